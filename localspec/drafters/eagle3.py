"""Drafting with an EAGLE-3 head (Li et al., 2025): one layer that reads the target's hidden states.

What the head knows of a text is a row of pairs (eagle3_net.py). Pair P needs token P + 1, so with n tokens, the last of them
pending, the last pair is n - 2 and drafting starts from it. Its state is known as soon as the target has verified token
n - 2.

    tokens          t0 t1 t2 t3 t4          t4 pending, 5 tokens
    target's rows   0  1  2  3              states of t0 .. t3
    pairs           (t1 g0) (t2 g1) (t3 g2) (t4 g3)       the last one, at 3, drafts t5
"""

from __future__ import annotations

import numpy as np

from localspec.drafters import DrafterSettings, Sequence
from localspec.drafters._taps import Known, TapDrafter, open_draft, taps_of
from localspec.drafters._trees import grow
from localspec.eagle3_net import F32, I32, Eagle3Net
from localspec.gguf_file import GGUFFile
from localspec.pairing import check_pair
from localspec.target import TargetSession
from localspec.tree import Growing, Shape, Tree, empty_tree


class _Pairs(Known):
    """Pairs 0 .. len(tokens) - 3 lie in the net's cache; the last one, len(tokens) - 2, is what drafting starts from: its
    state is kept, and it is in the cache once it is `placed`."""

    __slots__ = ("placed", "state")

    def __init__(self) -> None:
        super().__init__()
        self.state: F32 | None = None  # [1, E] of the last pair, None where it is not known
        self.placed = False

    def cut(self, n_rows: int) -> None:
        if n_rows < self.n_rows:
            self.state = None
        super().cut(n_rows)

    def begin_at(self, seq: Sequence, row: int) -> None:
        self.state = None
        super().begin_at(seq, row)


class _Chain:
    """Drafts token by token: the layer's own output is the next pair's state."""

    def __init__(self, net: Eagle3Net, pairs: tuple[I32, I32, I32, F32]):
        self.sure: F32 | None = None
        self._net = net
        self._slots, self._positions, tokens, states = pairs
        self.logits, self._states = net.step(self._slots, self._positions, tokens, states)

    def go_on(self, rows: list[int], tokens: I32) -> None:
        self._slots, self._positions = self._slots[rows], self._positions[rows] + 1
        self.logits, self._states = self._net.step(self._slots, self._positions, tokens, self._states[rows])


class Eagle3Drafter(TapDrafter[_Pairs]):
    """Owns the head's network."""

    name = "eagle3"
    behind = 1  # a pair is made of the token behind its row

    def __init__(self, net: Eagle3Net, target: TargetSession, settings: DrafterSettings):
        known = [_Pairs() for _ in range(target.settings.n_sequences)]
        super().__init__(net.config, net.ids, known, target, settings)
        self.net = net

    def _take(self, known: _Pairs, seq: Sequence, first: int, taps: F32) -> None:
        n, slot, place = len(taps), seq.slot, first - known.base
        g = self.net.fuse(taps)
        if known.state is not None and not known.placed:
            self.net.extend(slot, place - 1, seq.tokens[first : first + 1], known.state)
        if n > 1:
            self.net.extend(slot, place, seq.tokens[first + 1 : first + n], g[:-1])
        known.state, known.placed = g[-1:], False

    def _is_ready(self, seq: Sequence) -> bool:
        known = self._slots[seq.slot]
        return known.state is not None and known.n_tokens == len(seq.tokens)

    def _pairs(self, seqs: list[Sequence]) -> tuple[I32, I32, I32, F32]:
        """Slot, place in the cache, token and state of the last pair of some sequences."""
        slots = np.array([seq.slot for seq in seqs], np.int32)
        known = [self._slots[slot] for slot in slots]
        positions = np.array([len(k.tokens) - 2 for k in known], np.int32)
        tokens = np.array([seq.tokens[-1] for seq in seqs], np.int32)
        states = [k.state for k in known]
        for k in known:
            k.placed = True
        return slots, positions, tokens, np.concatenate([s for s in states if s is not None])

    def _greedy(self, seqs: list[Sequence], ks: I32) -> tuple[I32, F32, I32]:
        return self.net.greedy(*self._pairs(seqs), ks, self.p_min)

    def _chain(self, seqs: list[Sequence], ks: I32) -> _Chain:
        return _Chain(self.net, self._pairs(seqs))

    def propose_tree(self, seq: Sequence, shape: Shape) -> Tree:
        self._take_waiting(self._slots[seq.slot])
        if not self._is_ready(seq):
            return empty_tree()
        return grow(_Branches(self, seq), seq, shape, self.rule)

    def close(self) -> None:
        self.net.close()


class _Branches:
    """The places of a tree: each node is a pair of its token and the state that came out one pair before."""

    def __init__(self, drafter: Eagle3Drafter, seq: Sequence):
        self._net, self._spread = drafter.net, drafter._spread
        slots, positions, tokens, states = drafter._pairs([seq])
        self._slot, self._base = int(slots[0]), int(positions[0])
        logits, out = self._net.step(slots, positions, tokens, states)
        self.logits = self._spread(logits)
        self._states = {-1: out[0]}  # that come out behind a node
        self._number = {-1: -1}  # of the nodes read so far, without gaps

    def go_on(self, nodes: list[int], tree: Growing) -> None:
        above = [tree.parents[node] for node in nodes]
        for node in nodes:
            self._number[node] = len(self._number) - 1
        numbers = np.array([self._number[node] for node in nodes], np.int32)
        parents = np.array([self._number[node] for node in above], np.int32)
        tokens = np.array([tree.tokens[node] for node in nodes], np.int32)
        g = np.stack([self._states[node] for node in above])
        logits, out = self._net.branch(self._slot, self._base, numbers, parents, tokens, g)
        self.logits = self._spread(logits)
        self._states |= dict(zip(nodes, out))


def taps(target: GGUFFile, settings: DrafterSettings) -> tuple[int, ...]:
    """The taps that a session must read for this draft. Raises PairingError where the two don't fit."""
    return taps_of(target, open_draft(settings, "eagle3", "EAGLE-3"))


def load(target: TargetSession, settings: DrafterSettings) -> Eagle3Drafter:
    """Load the head and hold it against the target. Raises PairingError where they don't fit."""
    draft = open_draft(settings, "eagle3", "EAGLE-3")
    check_pair(target.model.gguf, draft)
    net = Eagle3Net(draft, target.model.gguf, target.settings.n_sequences, settings.n_threads or target.n_threads)
    return Eagle3Drafter(net, target, settings)
