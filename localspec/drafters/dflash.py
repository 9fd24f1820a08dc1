"""Drafting with DFlash or DSpark: a few layers that read the target's hidden states and draft a whole block in one pass.

The target's rows are injected into the draft's cache as they are accepted (dflash_net.py). With n tokens, the last of them
pending, rows 0 .. n - 2 are there, and the block stands behind them:

    tokens          t0 t1 t2 t3 t4              t4 pending, 5 tokens
    injected rows   0  1  2  3
    block                       t4 MASK MASK    at positions 4, 5, 6; the masks' rows draft t5 and t6
    from the anchor             t4 MASK         at positions 4, 5, whose rows draft t5 and t6 (DSpark)

A DFlash draft's places know nothing of each other's tokens: each is drawn from its own row. DSpark's Markov head adds to a
row what the token drawn before makes likely, so its tokens are drawn one after another, and its confidence head says how
likely a place is to be kept.
"""

from __future__ import annotations

import numpy as np

from localspec.dflash_net import DFlashNet
from localspec.draft_net import F32, I32
from localspec.drafters import DrafterSettings, Sequence
from localspec.drafters._taps import Known, TapDrafter, open_draft, taps_of
from localspec.gguf_file import GGUFFile
from localspec.pairing import check_pair
from localspec.target import TargetSession


class _Chain:
    """Places of blocks that were computed at once."""

    def __init__(self, net: DFlashNet, anchors: tuple[I32, I32, I32], ks: I32):
        self._net = net
        self._all, self._hidden = net.block(*anchors, ks)
        self._at = np.cumsum(ks) - ks  # the row of each text's next place
        self._read(anchors[2])

    def _read(self, previous: I32) -> None:
        self.logits = self._all[self._at]
        sure = self._net.lean(previous, self._hidden[self._at], self.logits) if self._net.has_markov else None
        self.sure = sure if self._net.has_confidence else None

    def go_on(self, rows: list[int], tokens: I32) -> None:
        self._at = self._at[rows] + 1
        self._read(tokens)


class DFlashDrafter(TapDrafter[Known]):
    """Owns the draft's network."""

    name = "dflash"
    behind = 0

    def __init__(self, net: DFlashNet, target: TargetSession, settings: DrafterSettings):
        known = [Known() for _ in range(target.settings.n_sequences)]
        super().__init__(net.config, net.ids, known, target, settings)
        self.net = net

    def _take(self, known: Known, seq: Sequence, first: int, taps: F32) -> None:
        self.net.inject(seq.slot, first - known.base, taps)

    def _most(self, k: int) -> int:
        return min(k, self.net.n_most)

    def _is_ready(self, seq: Sequence) -> bool:
        return self._slots[seq.slot].n_tokens == len(seq.tokens)

    def _anchors(self, seqs: list[Sequence]) -> tuple[I32, I32, I32]:
        """Slot, place in the cache and token of the pending tokens."""
        slots = [seq.slot for seq in seqs]
        positions = [len(self._slots[slot].tokens) - 1 for slot in slots]
        tokens = [seq.tokens[-1] for seq in seqs]
        return np.array(slots, np.int32), np.array(positions, np.int32), np.array(tokens, np.int32)

    def _greedy(self, seqs: list[Sequence], ks: I32) -> tuple[I32, F32, I32]:
        return self.net.greedy(*self._anchors(seqs), ks, self.p_min)

    def _chain(self, seqs: list[Sequence], ks: I32) -> _Chain:
        return _Chain(self.net, self._anchors(seqs), ks)

    def close(self) -> None:
        self.net.close()


def taps(target: GGUFFile, settings: DrafterSettings) -> tuple[int, ...]:
    """The taps that a session must read for this draft. Raises PairingError where the two don't fit."""
    return taps_of(target, open_draft(settings, "dflash", "DFlash"))


def load(target: TargetSession, settings: DrafterSettings) -> DFlashDrafter:
    """Load the draft and hold it against the target. Raises PairingError where they don't fit."""
    draft = open_draft(settings, "dflash", "DFlash")
    check_pair(target.model.gguf, draft)
    net = DFlashNet(draft, target.model.gguf, target.settings.n_sequences, settings.n_threads or target.n_threads)
    return DFlashDrafter(net, target, settings)
