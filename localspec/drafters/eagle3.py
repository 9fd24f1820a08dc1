"""Drafting with an EAGLE-3 head (Li et al., 2025): one layer that reads the target's hidden states.

What the head knows of a text is a row of pairs (eagle3_net.py). Pair P needs token P + 1, so with n tokens, the last of them
pending, the last pair is n - 2 and drafting starts from it. Its state is known as soon as the target has verified token
n - 2: `commit` sees every row that counts and none that does not, and nothing has to be taken back but what was drafted.

    tokens          t0 t1 t2 t3 t4          t4 pending, 5 tokens
    target's rows   0  1  2  3              states of t0 .. t3
    pairs           (t1 g0) (t2 g1) (t3 g2) (t4 g3)       the last one, at 3, drafts t5
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from localspec.accept import Draft, draw
from localspec.drafters import DrafterSettings, Sequence
from localspec.eagle3_net import F32, I32, Eagle3Net
from localspec.errors import LocalspecError, PairingError, UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.pairing import check_pair
from localspec.speculator import SpeculatorConfig
from localspec.target import Rows, TargetSession


class _Known:
    """One slot. `tokens` are those that the pairs were made of: pairs 0 .. len(tokens) - 3 lie in the net's cache; the last
    one, len(tokens) - 2, is what drafting starts from: its state is kept, and it is in the cache once it is `placed`."""

    __slots__ = ("placed", "state", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.state: F32 | None = None  # [1, E] of the last pair, None where it is not known
        self.placed = False

    @property
    def n_rows(self) -> int:
        """Rows of the target, from the first on, that have been read."""
        return max(0, len(self.tokens) - 1)

    def cut(self, n_rows: int) -> None:
        """Forget all but the first rows."""
        if n_rows < self.n_rows:
            del self.tokens[n_rows + 1 :]
            self.state = None


class Eagle3Drafter:
    """Owns the head's network. `_order` brings the session's taps, which ascend, into the order in which the head reads
    them; None where that is the same."""

    name = "eagle3"

    def __init__(self, net: Eagle3Net, target: TargetSession, settings: DrafterSettings):
        self.net = net
        self.rule = settings.rule
        self.p_min = settings.p_min
        self._n_vocab = target.model.n_vocab
        taps = target.settings.taps
        order = [sorted(taps).index(tap) for tap in net.config.taps]
        self._order = None if order == sorted(order) else np.array(order)
        self._slots = [_Known() for _ in range(target.settings.n_sequences)]
        self._row: F32 | None = None

    # -- following the text --------------------------------------------------------------------------------------------

    def keep(self, seq: Sequence) -> int:
        known = self._slots[seq.slot]
        common = 0
        for ours, theirs in zip(known.tokens, seq.tokens):
            if ours != theirs:
                break
            common += 1
        # Token `common` is another one now, so pair common - 1 is, and its state must be read again; and so must that of
        # the pair that drafting starts from.
        known.cut(max(0, min(common - 1, len(seq.tokens) - 2)))
        return known.n_rows

    def read(self, seq: Sequence, first: int, taps: F32) -> None:
        self._add(self._slots[seq.slot], seq, first, taps)

    def begin(self, seq: Sequence) -> None:
        if len(seq.tokens) == 1:  # no row, no pair: the first step goes without a draft
            known = self._slots[seq.slot]
            known.tokens, known.state = list(seq.tokens), None

    def commit(self, seq: Sequence, rows: Rows) -> None:
        if rows.taps is None:
            raise LocalspecError("an EAGLE-3 draft needs a session that reads its taps")
        self._add(self._slots[seq.slot], seq, len(seq.tokens) - 1 - len(rows.taps), rows.taps)

    def _add(self, known: _Known, seq: Sequence, first: int, taps: F32) -> None:
        """Rows `first` ... of the target, each followed by its token in `seq.tokens`: pairs first ... ."""
        n = len(taps)
        known.cut(first)
        if first != known.n_rows or first + n >= len(seq.tokens):
            raise LocalspecError(f"rows {first} to {first + n} of {len(seq.tokens)} tokens; {known.n_rows} were read so far")
        g = self.net.fuse(taps if self._order is None else taps[:, self._order])
        slot = seq.slot
        if known.state is not None and not known.placed:
            self.net.extend(slot, first - 1, seq.tokens[first : first + 1], known.state)
        if n > 1:
            self.net.extend(slot, first, seq.tokens[first + 1 : first + n], g[:-1])
        known.state, known.placed = g[-1:], False
        if first == 0:
            known.tokens = seq.tokens[: n + 1]
        else:
            known.tokens.extend(seq.tokens[first + 1 : first + n + 1])

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        self._slots[seq.slot].cut(max(0, n_keep - 1))

    # -- drafting ------------------------------------------------------------------------------------------------------

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        drafts = [Draft.empty() for _ in seqs]
        ready = [i for i, (seq, k) in enumerate(zip(seqs, ks)) if k > 0 and self._is_ready(seq)]
        plain = [i for i in ready if seqs[i].sampling.greedy and not seqs[i].sampling.needs_history]
        if plain:
            self._greedy(seqs, ks, plain, drafts)
        sampled = [i for i in ready if i not in plain]
        if sampled:
            self._sampled(seqs, ks, sampled, drafts)
        return drafts

    def _is_ready(self, seq: Sequence) -> bool:
        known = self._slots[seq.slot]
        return known.state is not None and len(known.tokens) == len(seq.tokens)

    def _pairs(self, seqs: Seq[Sequence], which: list[int]) -> tuple[I32, I32, I32, F32]:
        """Slot, position, token and state of the last pair of some sequences."""
        slots = np.array([seqs[i].slot for i in which], np.int32)
        positions = np.array([len(seqs[i].tokens) - 2 for i in which], np.int32)
        tokens = np.array([seqs[i].tokens[-1] for i in which], np.int32)
        known = [self._slots[slot] for slot in slots]
        states = [k.state for k in known]
        for k in known:
            k.placed = True
        return slots, positions, tokens, np.concatenate([s for s in states if s is not None])

    def _greedy(self, seqs: Seq[Sequence], ks: Seq[int], which: list[int], drafts: list[Draft]) -> None:
        wanted = np.array([ks[i] for i in which], np.int32)
        tokens, probs, counts = self.net.greedy(*self._pairs(seqs, which), wanted, self.p_min)
        for row, i in enumerate(which):
            n = counts[row]
            drafts[i] = Draft(tokens[row, :n], probs[row, :n])

    def _sampled(self, seqs: Seq[Sequence], ks: Seq[int], which: list[int], drafts: list[Draft]) -> None:
        """With the target's settings and, under `match`, its noise, which goes by the target's ids."""
        said: dict[int, list[int]] = {i: [] for i in which}
        probs: dict[int, list[float]] = {i: [] for i in which}
        dists: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {i: [] for i in which}
        with_q = self.rule == "reject"
        left = which
        slots, positions, tokens, states = self._pairs(seqs, which)
        while left:
            logits, states = self.net.step(slots, positions, tokens, states)
            drawn = draw(
                self._spread(logits),
                [seqs[i].key for i in left],
                [len(seqs[i].tokens) + len(said[i]) for i in left],
                [seqs[i].sampling for i in left],
                [self._history(seqs[i], said[i]) for i in left],
                rule=self.rule,
                with_q=with_q,
            )
            on: list[int] = []
            for row, i in enumerate(left):
                prob = float(drawn.probs[row])
                unsure = prob < self.p_min
                # Under `reject` a token must be judged once it is drawn: dropping it for its own low probability would
                # skew what the target samples in its place.
                if unsure and not with_q:
                    continue
                said[i].append(int(drawn.tokens[row]))
                probs[i].append(prob)
                if with_q and drawn.q_starts is not None and drawn.q_ids is not None and drawn.q_probs is not None:
                    a, b = drawn.q_starts[row], drawn.q_starts[row + 1]
                    dists[i].append((drawn.q_ids[a:b], drawn.q_probs[a:b]))
                if len(said[i]) < ks[i] and not unsure:
                    on.append(row)
            left = [left[row] for row in on]
            slots, positions, states = slots[on], positions[on] + 1, states[on]
            tokens = drawn.tokens[on]
        for i in which:
            drafts[i] = _draft(said[i], probs[i], dists[i])

    def _spread(self, logits: F32) -> F32:
        """Logits over the draft's vocabulary as rows over the target's: what the draft can't say is impossible."""
        m = len(logits)
        if self._row is None or len(self._row) < m:
            self._row = np.full((max(m, len(self._slots)), self._n_vocab), -np.inf, np.float32)
        self._row[:m, self.net.ids] = logits
        return self._row[:m]

    @staticmethod
    def _history(seq: Sequence, drafted: list[int]) -> npt.NDArray[np.int32]:
        if not seq.sampling.needs_history:
            return _NO_HISTORY
        n = seq.sampling.penalty_last_n
        recent = seq.tokens + drafted if n < 0 else seq.tokens[-n:] + drafted
        return np.array(recent, np.int32)

    def close(self) -> None:
        self.net.close()


_NO_HISTORY = np.zeros(0, np.int32)


def _draft(tokens: list[int], probs: list[float], dists: list[tuple[np.ndarray, np.ndarray]]) -> Draft:
    draft = Draft(np.array(tokens, np.int32), np.array(probs, np.float32))
    if dists:
        draft.q_ids = np.concatenate([ids for ids, _ in dists])
        draft.q_probs = np.concatenate([p for _, p in dists])
        draft.q_starts = np.cumsum([0, *(len(ids) for ids, _ in dists)]).astype(np.int32)
    return draft


def _open(settings: DrafterSettings) -> GGUFFile:
    if settings.draft_path is None:
        raise UsageError("--spec-type eagle3 needs a draft: give --draft FILE")
    draft = GGUFFile.open(settings.draft_path, "draft")
    require_model(draft, "draft")
    if draft.architecture != "eagle3":
        raise PairingError(f"{settings.draft_path} is a {draft.architecture} model, no EAGLE-3 draft: use --spec-type lm")
    return draft


def taps(target: GGUFFile, settings: DrafterSettings) -> tuple[int, ...]:
    """The taps that a session must read for this draft. Raises PairingError where the two don't fit."""
    draft = _open(settings)
    check_pair(target, draft)
    return SpeculatorConfig.from_gguf(draft).taps


def load(target: TargetSession, settings: DrafterSettings) -> Eagle3Drafter:
    """Load the head and hold it against the target. Raises PairingError where they don't fit."""
    draft = _open(settings)
    check_pair(target.model.gguf, draft)
    net = Eagle3Net(draft, target.model.gguf, target.settings.n_sequences, settings.n_threads or target.n_threads)
    if set(target.settings.taps) != set(net.config.taps):
        raise LocalspecError(f"the session reads the taps {list(target.settings.taps)}, the draft {list(net.config.taps)}")
    return Eagle3Drafter(net, target, settings)
