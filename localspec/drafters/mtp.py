"""Drafting with a multi-token-prediction head, run by llama.cpp's own graph (mtp_context.py).

Either an assistant for Gemma 4, a file of its own, which reads the target's cache; or a NextN head in the target's own file
(--spec-type mtp without a draft). A step takes a token and the state that came before it, and gives logits and the state
that goes with the next token; the first state is the target's own, the one under its last known row.

    tokens          t0 t1 t2 t3         t3 pending, 4 tokens
    target's rows   0  1  2             states h0 .. h2
    assistant       (t3, h2) at 3, then (drafted, its own state) at 3 again and again: it has no keys, only queries
    NextN head      (t3, h2) at 3, then at 4, 5, ...; in its cache are (t1, h0) at 1, (t2, h1) at 2, and (t0, zeros) at 0
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from localspec.accept import Draft
from localspec.clusters import ClusteredHead
from localspec.drafters import DrafterSettings, Sequence
from localspec.drafters._drawing import Drawing
from localspec.errors import LocalspecError, PairingError
from localspec.gemma4 import ARCHITECTURE
from localspec.gguf_file import GGUFFile, require_model
from localspec.model import Model
from localspec.mtp_context import F32, I32, MtpContext
from localspec.pairing import check_pair, own_heads
from localspec.target import Rows, TargetSession


class _Slot:
    """What is known of one text: the state under its row n_rows - 1."""

    __slots__ = ("n_rows", "state")

    def __init__(self) -> None:
        self.state: F32 | None = None
        self.n_rows = 0


class MtpDrafter:
    """Drafts with an assistant, which shares the target's cache. `model`: its own, closed with the drafter."""

    name = "mtp"
    may_skip = True  # all but the last state

    def __init__(self, context: MtpContext, target: TargetSession, settings: DrafterSettings, model: Model | None):
        self.context, self.model = context, model
        self.rule, self.p_min = settings.rule, settings.p_min
        self._n_vocab = min(context.n_vocab, target.model.n_vocab)
        self._column = target.settings.taps.index(target.model.n_layer + 1)
        self._slots = [_Slot() for _ in range(target.settings.n_sequences)]

    # -- following the text --------------------------------------------------------------------------------------------

    def keep(self, seq: Sequence) -> int:
        self._slots[seq.slot].state = None
        return max(0, len(seq.tokens) - 2)  # the state of the last row must be read again

    def read(self, seq: Sequence, first: int, taps: F32) -> None:
        self._take(seq, first, taps[:, self._column])

    def skip(self, seq: Sequence) -> None:
        self._slots[seq.slot].state = None

    def begin(self, seq: Sequence) -> None:
        if len(seq.tokens) == 1:  # no row, no state: the first step goes without a draft
            self._slots[seq.slot].state = None

    def commit(self, seq: Sequence, rows: Rows) -> None:
        if rows.taps is None:
            self.skip(seq)
            return
        self._take(seq, len(seq.tokens) - 1 - len(rows.taps), rows.taps[:, self._column])

    def _take(self, seq: Sequence, first: int, states: F32) -> None:
        """States of rows first ... of the target."""
        known = self._slots[seq.slot]
        known.state, known.n_rows = states[-1:].copy(), first + len(states)

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        if n_keep <= self._slots[seq.slot].n_rows:
            self._slots[seq.slot].state = None

    # -- drafting ------------------------------------------------------------------------------------------------------

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        drawing = Drawing(seqs, ks, self.rule, self.p_min)
        left = [i for i, (seq, k) in enumerate(zip(seqs, ks)) if k > 0 and self._is_ready(seq)]
        tokens = np.array([seqs[i].tokens[-1] for i in left], np.int32)
        states = [self._slots[seqs[i].slot].state for i in left]
        state = np.concatenate([s for s in states if s is not None]) if left else np.zeros((0, 0), np.float32)
        while left:
            slots = np.array([seqs[i].slot for i in left], np.int32)
            at = np.array([len(seqs[i].tokens) - 1 for i in left], np.int32)
            logits, state = self.context.step(slots, self._place(at, len(drawing.said[left[0]])), tokens, state)
            on, tokens = drawing.draw(np.ascontiguousarray(logits[:, : self._n_vocab]), left)
            left, state = [left[row] for row in on], state[on]
        return drawing.drafts()

    def _is_ready(self, seq: Sequence) -> bool:
        known = self._slots[seq.slot]
        return known.state is not None and known.n_rows == len(seq.tokens) - 1

    def _place(self, pending: I32, step: int) -> I32:
        """Where a step stands. The assistant always asks from the pending token's place."""
        return pending

    def close(self) -> None:
        self.context.close()
        if self.model is not None:
            self.model.close()


class NextnDrafter(MtpDrafter):
    """Drafts with the head in the target's own file. Its cache holds (token[P], state[P - 1]) at each P."""

    may_skip = False

    def keep(self, seq: Sequence) -> int:
        known = self._slots[seq.slot]
        known.state, known.n_rows = None, 0
        return 0  # the head needs a row for every token of the prompt

    def _take(self, seq: Sequence, first: int, states: F32) -> None:
        known = self._slots[seq.slot]
        if first != known.n_rows:
            raise LocalspecError(f"rows {first} ... of the target, {known.n_rows} were read so far")
        before = np.zeros_like(states[:1]) if known.state is None else known.state
        self.context.cut(seq.slot, first)
        tokens = np.array(seq.tokens[first : first + len(states)], np.int32)
        self.context.extend(seq.slot, first, tokens, np.concatenate([before, states[:-1]]))
        super()._take(seq, first, states)

    def _place(self, pending: I32, step: int) -> I32:
        return pending + np.int32(step)


def _open(settings: DrafterSettings) -> GGUFFile | None:
    if settings.draft_path is None:
        return None
    draft = GGUFFile.open(settings.draft_path, "draft")
    require_model(draft, "draft")
    if draft.architecture != ARCHITECTURE:
        raise PairingError(f"{settings.draft_path} is a {draft.architecture} model, no MTP head: use --spec-type auto")
    return draft


def taps(target: GGUFFile, settings: DrafterSettings) -> tuple[int, ...]:
    """The taps that a session must read for this head. Raises PairingError where the two don't fit."""
    draft = _open(settings)
    if draft is not None:
        check_pair(target, draft)
        return (target.n_layer + 1,)
    own, reason = own_heads(target)
    if own != 1:
        raise PairingError(f"--spec-type mtp: {target.path} {reason}")
    return (target.n_layer - own + 1,)


def load(target: TargetSession, settings: DrafterSettings) -> MtpDrafter:
    """Make the head's context and hold it against the target. Raises PairingError where they don't fit."""
    n_threads = settings.n_threads or target.n_threads
    wanted = taps(target.model.gguf, settings)
    if not set(wanted) <= set(target.settings.taps):
        raise LocalspecError(f"the session reads the taps {list(target.settings.taps)}, the head {list(wanted)}")
    if settings.draft_path is None:
        context = MtpContext(target.model.handle, target.model.n_vocab, target, target.n_batch, n_threads)
        return NextnDrafter(context, target, settings, None)
    model = Model(settings.draft_path, "draft", settings.n_gpu_layers, settings.use_mmap)
    try:
        # on a GPU the whole head costs less than the way back and forth
        head = ClusteredHead.of(model.gguf) if settings.n_gpu_layers == 0 else None
        context = MtpContext(model.handle, model.n_vocab, target, 0, n_threads, head)
    except BaseException:
        model.close()
        raise
    return MtpDrafter(context, target, settings, model)
