"""Drafting with a small language model: any GGUF with the target's tokenizer.

It draws from its own distribution with the target's sampling settings and, under `match`, with the target's noise, so
that the two agree wherever their distributions do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from localspec.accept import Draft
from localspec.drafters import DrafterSettings, Sequence
from localspec.drafters._drawing import Drawing
from localspec.drafters._trees import grow
from localspec.errors import PairingError, UsageError
from localspec.model import Model
from localspec.pairing import can_draft, check_pair
from localspec.target import Rows, TargetSession
from localspec.tree import Growing, Shape, Tree, empty_tree


class LmDrafter:
    """Owns the draft's model and context; its cache follows `seq.tokens` by itself."""

    name = "lm"

    def __init__(self, model: Model, target: TargetSession, settings: DrafterSettings):
        self.model = model
        self.rule = settings.rule
        self.p_min = settings.p_min
        session_settings = replace(
            target.settings, n_ctx=target.n_ctx, n_threads=settings.n_threads or target.n_threads,
            type_k="f16", type_v="f16", n_rollback=0, n_branches=settings.n_branches,
        )  # fmt: skip
        self.session = TargetSession(model, session_settings)
        self._n_vocab = min(model.n_vocab, target.model.n_vocab)
        self._agreed = [0] * target.settings.n_sequences  # cached tokens already held against seq.tokens, by slot

    def begin(self, seq: Sequence) -> None:
        self.session.prefill(seq.slot, seq.tokens[:-1])
        self._agreed[seq.slot] = len(seq.tokens) - 1

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        drawing = Drawing(seqs, ks, self.rule, self.p_min)
        feed = {i: self._missing(seq) for i, (seq, k) in enumerate(zip(seqs, ks)) if k > 0}
        while feed:
            order = list(feed)
            last = np.cumsum([len(feed[i]) for i in order]) - 1
            rows = self.session.decode([(seqs[i].slot, feed[i]) for i in order])
            # Padding ids may exist in the draft's vocabulary only: the target could never choose them.
            on, tokens = drawing.draw(np.ascontiguousarray(rows.logits[last, : self._n_vocab]), order)
            feed = {order[row]: [token] for row, token in zip(on, tokens.tolist())}
        return drawing.drafts()

    def propose_tree(self, seq: Sequence, shape: Shape) -> Tree:
        # A layer's lines and those that they leave.
        if self.session.n_branches < 2 * shape.width - 1:
            return empty_tree()
        if len(seq.tokens) + shape.width * shape.depth > self.session.n_ctx:
            return empty_tree()
        branches = _Branches(self, seq)
        try:
            return grow(branches, seq, shape, self.rule)
        finally:
            branches.release()

    def _missing(self, seq: Sequence) -> list[int]:
        """Bring the draft's cache to the beginning of the text and return what it has not seen, to be decoded now."""
        want = seq.tokens
        held = self.session.tokens[seq.slot]
        common = self._agreed[seq.slot]
        while common < len(held) and common < len(want) and held[common] == want[common]:
            common += 1
        keep = self.session.rollback(seq.slot, min(common, len(want) - 1))
        self._agreed[seq.slot] = keep
        # A long gap (drafting was paused) goes through without logits; a short one rides along with the pending token.
        if len(want) - keep > 16:
            self.session.prefill(seq.slot, want[:-1])
            keep = len(want) - 1
        return want[keep:]

    def commit(self, seq: Sequence, rows: Rows) -> None:
        pass

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        self._agreed[seq.slot] = min(self._agreed[seq.slot], self.session.rollback(seq.slot, n_keep))

    def close(self) -> None:
        self.session.close()
        self.model.close()


class _Branches:
    """The draft's cache during a tree: each line of nodes has a sequence id, the line of first children the text's own, so
    that what is kept of it need not be read again."""

    def __init__(self, drafter: LmDrafter, seq: Sequence):
        self._session, self._n_vocab = drafter.session, drafter._n_vocab
        self._spare = list(range(self._session.settings.n_sequences, len(self._session.tokens)))
        self._slot = {-1: seq.slot}
        missing = drafter._missing(seq)
        rows = self._session.decode([(seq.slot, missing)])
        self.logits = np.ascontiguousarray(rows.logits[-1:, : self._n_vocab])

    def go_on(self, nodes: list[int], tree: Growing) -> None:
        first: dict[int, int] = {}  # of each parent, the child that goes on in its sequence
        for node in nodes:
            first.setdefault(tree.parents[node], node)
        for node in nodes:  # others leave before the parent's sequence grows
            parent = tree.parents[node]
            if first[parent] == node:
                self._slot[node] = self._slot[parent]
                continue
            self._slot[node] = self._free(tree, nodes)
            self._session.fork(self._slot[parent], self._slot[node])
        rows = self._session.decode([(self._slot[node], [tree.tokens[node]]) for node in nodes])
        self.logits = np.ascontiguousarray(rows.logits[:, : self._n_vocab])

    def release(self) -> None:
        """Give the branches' cells back."""
        for slot in self._spare:
            self._session.rollback(slot, 0)

    def _free(self, tree: Growing, nodes: list[int]) -> int:
        """A sequence that no node of this layer goes on in, nor comes from."""
        taken = {self._slot.get(node) for node in nodes} | {self._slot[tree.parents[node]] for node in nodes}
        return next(slot for slot in self._spare if slot not in taken)


def load(target: TargetSession, settings: DrafterSettings) -> LmDrafter:
    """Load the draft model and hold it against the target's tokenizer. Raises PairingError where they don't fit."""
    if settings.draft_path is None:
        raise UsageError("--spec-type lm needs a draft model: give --draft FILE")
    model = Model(settings.draft_path, role="draft", n_gpu_layers=settings.n_gpu_layers, use_mmap=settings.use_mmap)
    check_pair(target.model.gguf, model.gguf)
    able, reason = can_draft(model.gguf)
    if not able:
        model.close()
        raise PairingError(f"{settings.draft_path}: can't draft: {reason}")
    return LmDrafter(model, target, settings)
