"""What drafters share that read the target's hidden states: following a text, and drawing tokens from a draft's rows.

A row of the target is what its taps said at one token. `commit` runs after acceptance, so a drafter sees every row that
counts and none that does not: nothing has to be taken back but what was drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Generic, Protocol, TypeVar

import numpy as np

from localspec.accept import Draft
from localspec.draft_net import F32, I32
from localspec.drafters import DrafterSettings, Sequence
from localspec.drafters._drawing import Drawing
from localspec.errors import LocalspecError, PairingError, UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.pairing import check_pair
from localspec.speculator import SpeculatorConfig
from localspec.target import Rows, TargetSession, common_start

#: rows of a text that may wait, at least and at most, and bytes of them between the two; more are taken in at once
_WAITING = (64, 256)
_WAITING_BYTES = 4 << 20
#: rows in a row that nobody needed, after which a prompt's wait as well: beside many texts drafts may not pay for long
_IDLE = 64


class Known:
    """What was read of the text in one slot, from its row `base` on: `tokens` are those of its rows and the one behind the
    last of them. `waiting`: rows after those f32[n, T, H], piece by piece, of the text `of`, which nobody has needed yet.

    A draft knows nothing of rows before `base`. They stand nowhere in its cache, where row `base` has the first place: its
    attention goes by how far two rows are apart, so a text may as well begin there."""

    __slots__ = ("base", "n_waiting", "of", "tokens", "waiting")

    def __init__(self) -> None:
        self.base = 0
        self.tokens: list[int] = []
        self.of: Sequence | None = None
        self.waiting: list[F32] = []
        self.n_waiting = 0

    @property
    def n_rows(self) -> int:
        """The row of the target that is to be read next."""
        return self.base + max(0, len(self.tokens) - 1)

    @property
    def n_tokens(self) -> int:
        """Tokens of the text up to the one behind the last row."""
        return self.base + len(self.tokens)

    def begin_at(self, seq: Sequence, row: int) -> None:
        """Forget everything: of this text, this row is to be read next."""
        self.base, self.of, self.tokens, self.waiting, self.n_waiting = row, seq, [], [], 0

    def cut(self, n_rows: int) -> None:
        """Forget all but the first rows, those that wait among them."""
        over = self.n_rows + self.n_waiting - n_rows
        while over > 0 and self.waiting:
            last = self.waiting.pop()
            if len(last) > over:
                self.waiting.append(last[: len(last) - over])
            self.n_waiting -= min(over, len(last))
            over -= len(last)
        if n_rows < self.n_rows:
            del self.tokens[max(0, n_rows + 1 - self.base) :]


KnownT = TypeVar("KnownT", bound=Known)


class Chain(Protocol):
    """Sampled drafts under way: for each of m texts its next place. `logits` f32[m, Vd]; `sure` f32[m], how likely a token
    there is to be kept, where the draft has a head for that."""

    logits: F32
    sure: F32 | None

    def go_on(self, rows: list[int], tokens: I32) -> None:
        """Keep these rows alone, whose texts go on with these tokens i32[len(rows)]."""


class TapDrafter(ABC, Generic[KnownT]):
    """Follows texts by their rows. `_order` brings the session's taps, which ascend, into the order in which the draft
    reads them; None where that is the same."""

    name: str
    may_skip = True
    #: tokens behind a row that it depends on, 0 or 1
    behind: int

    def __init__(
        self, config: SpeculatorConfig, ids: I32, known: list[KnownT], target: TargetSession, settings: DrafterSettings
    ):
        """`ids` i32[Vd]: the target's ids of what the draft can say."""
        self.rule, self.p_min = settings.rule, settings.p_min
        self._ids, self._n_vocab = ids, target.model.n_vocab
        taps = target.settings.taps
        if set(taps) != set(config.taps):
            raise LocalspecError(f"the session reads the taps {list(taps)}, the draft {list(config.taps)}")
        order = [sorted(taps).index(tap) for tap in config.taps]
        self._order = None if order == sorted(order) else np.array(order)
        self._slots = known
        self._row: F32 | None = None
        self._unasked = 0  # commits since something was proposed
        most = _WAITING_BYTES // (4 * len(taps) * target.model.n_embd)
        self._most_waiting = min(max(most, _WAITING[0]), _WAITING[1])

    # -- following the text --------------------------------------------------------------------------------------------

    def keep(self, seq: Sequence) -> int:
        # Of rows that wait, those of the text that both have in common; what only the text before had is never read.
        known = self._slots[seq.slot]
        tokens = known.tokens if known.of is None else known.of.tokens[: known.n_rows + known.n_waiting + 1]
        common = common_start(tokens, seq.tokens)
        kept = max(0, min(common - self.behind, len(seq.tokens) - 1 - self.behind))
        if known.base and kept <= known.base:
            # Nothing is known of what both have in common, and nothing will be: the draft begins where the target does.
            known.begin_at(seq, 0)
            return len(seq.tokens) - 1
        known.cut(kept)
        if known.of is not None:
            known.of = seq
        return known.n_rows + known.n_waiting

    def read(self, seq: Sequence, first: int, taps: F32) -> None:
        known = self._slots[seq.slot]
        known.cut(first)
        if known.n_rows + known.n_waiting != first:
            known.begin_at(seq, first)
        if self._unasked < _IDLE or len(taps) >= self._most_waiting:
            self._take_waiting(known)
            self._add(known, seq, first, taps)
        else:
            self._keep_waiting(known, seq, taps)

    def skip(self, seq: Sequence) -> None:
        self._slots[seq.slot].begin_at(seq, len(seq.tokens) - 1)

    def begin(self, seq: Sequence) -> None:
        known = self._slots[seq.slot]
        if self._unasked < _IDLE:
            self._take_waiting(known)
        known.cut(len(seq.tokens) - 1)
        if known.n_rows + known.n_waiting != len(seq.tokens) - 1:
            self.skip(seq)
        # Where rows that were kept are all there are, nothing was read, and the token behind them may be another one.
        known.tokens[known.n_rows - known.base :] = seq.tokens[known.n_rows : known.n_rows + 1]

    def commit(self, seq: Sequence, rows: Rows) -> None:
        if rows.taps is None:
            self.skip(seq)
            return
        # While nothing is drafted, which the controller may decide for long, rows are kept as they are: many at once cost
        # less than one by one, and plain decoding pays nothing for a draft that it does not use.
        self._unasked += 1
        self._keep_waiting(self._slots[seq.slot], seq, rows.taps)

    def _keep_waiting(self, known: KnownT, seq: Sequence, taps: F32) -> None:
        known.of = seq
        known.waiting.append(taps.copy())
        known.n_waiting += len(taps)
        if known.n_waiting >= self._most_waiting:
            self._take_waiting(known)

    def _take_waiting(self, known: KnownT) -> None:
        if known.of is None or not known.waiting:
            return
        taps = known.waiting[0] if len(known.waiting) == 1 else np.concatenate(known.waiting)
        known.waiting, known.n_waiting = [], 0
        self._add(known, known.of, known.n_rows, taps)

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        known, n_rows = self._slots[seq.slot], max(0, n_keep - 1)
        if n_rows < known.base:
            known.begin_at(seq, n_rows)
        known.cut(n_rows)

    def _add(self, known: KnownT, seq: Sequence, first: int, taps: F32) -> None:
        """Rows `first` ... of the target, each followed by its token in `seq.tokens`."""
        n = len(taps)
        known.cut(first)
        if first != known.n_rows or first + n >= len(seq.tokens):
            raise LocalspecError(f"rows {first} to {first + n} of {len(seq.tokens)} tokens; {known.n_rows} were read so far")
        self._take(known, seq, first, taps if self._order is None else taps[:, self._order])
        known.tokens[first - known.base :] = seq.tokens[first : first + n + 1]

    @abstractmethod
    def _take(self, known: KnownT, seq: Sequence, first: int, taps: F32) -> None:
        """New rows f32[n, T, H] at positions first ... ."""

    # -- drafting ------------------------------------------------------------------------------------------------------

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        self._unasked = 0
        for seq in seqs:
            self._take_waiting(self._slots[seq.slot])
        drafts = [Draft.empty() for _ in seqs]
        wanted = [self._most(k) for k in ks]
        ready = [i for i, (seq, k) in enumerate(zip(seqs, wanted)) if k > 0 and self._is_ready(seq)]
        plain = [i for i in ready if seqs[i].sampling.greedy and not seqs[i].sampling.needs_history]
        if plain:
            tokens, sure, counts = self._greedy([seqs[i] for i in plain], np.array([wanted[i] for i in plain], np.int32))
            for row, i in enumerate(plain):
                drafts[i] = Draft(tokens[row, : counts[row]], sure[row, : counts[row]])
        sampled = [i for i in ready if i not in plain]
        if sampled:
            self._sampled(seqs, wanted, sampled, drafts)
        return drafts

    def _most(self, k: int) -> int:
        """How many tokens are drafted where k are wanted."""
        return k

    @abstractmethod
    def _is_ready(self, seq: Sequence) -> bool:
        """Whether everything is known that a draft for this text begins from."""

    @abstractmethod
    def _greedy(self, seqs: list[Sequence], ks: I32) -> tuple[I32, F32, I32]:
        """Target ids i32[m, k], confidences f32[m, k] and how many of them count i32[m]."""

    @abstractmethod
    def _chain(self, seqs: list[Sequence], ks: I32) -> Chain:
        """The first place of each draft."""

    def _sampled(self, seqs: Seq[Sequence], ks: Seq[int], which: list[int], drafts: list[Draft]) -> None:
        """With the target's settings, as Drawing says."""
        texts, most = [seqs[i] for i in which], [ks[i] for i in which]
        drawing = Drawing(texts, most, self.rule, self.p_min)
        chain = self._chain(texts, np.array(most, np.int32))
        left = list(range(len(texts)))
        while left:
            on, tokens = drawing.draw(self._spread(chain.logits), left, chain.sure)
            left = [left[row] for row in on]
            if left:
                chain.go_on(on, tokens)
        for i, draft in zip(which, drawing.drafts()):
            drafts[i] = draft

    def _spread(self, logits: F32) -> F32:
        """Logits over the draft's vocabulary as rows over the target's: what the draft can't say is impossible."""
        m = len(logits)
        if self._row is None or len(self._row) < m:
            self._row = np.full((max(m, len(self._slots)), self._n_vocab), -np.inf, np.float32)
        self._row[:m, self._ids] = logits
        return self._row[:m]


def open_draft(settings: DrafterSettings, architecture: str, title: str) -> GGUFFile:
    """The draft's file. Raises UsageError where none is named, PairingError for one of another kind."""
    if settings.draft_path is None:
        raise UsageError(f"--spec-type {architecture} needs a draft: give --draft FILE")
    draft = GGUFFile.open(settings.draft_path, "draft")
    require_model(draft, "draft")
    if draft.architecture != architecture:
        raise PairingError(f"{settings.draft_path} is a {draft.architecture} model, no {title} draft: use --spec-type auto")
    return draft


def taps_of(target: GGUFFile, draft: GGUFFile) -> tuple[int, ...]:
    """The taps that a session must read for this draft. Raises PairingError where the two don't fit."""
    check_pair(target, draft)
    return SpeculatorConfig.from_gguf(draft).taps
