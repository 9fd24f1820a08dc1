"""Drafting with a small language model: any GGUF with the target's tokenizer.

It draws from its own distribution with the target's sampling settings and, under `match`, with the target's noise, so
that the two agree wherever their distributions do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from localspec.accept import Draft, draw
from localspec.drafters import DrafterSettings, Sequence
from localspec.errors import PairingError, UsageError
from localspec.model import Model
from localspec.pairing import can_roll_back, check_pair
from localspec.target import Rows, TargetSession


class LmDrafter:
    """Owns the draft's model and context; its cache follows `seq.tokens` by itself."""

    name = "lm"

    def __init__(self, model: Model, target: TargetSession, settings: DrafterSettings):
        self.model = model
        self.rule = settings.rule
        self.p_min = settings.p_min
        session_settings = replace(
            target.settings, n_ctx=target.n_ctx, n_threads=settings.n_threads or target.n_threads, type_k="f16", type_v="f16"
        )
        self.session = TargetSession(model, session_settings)
        self._n_vocab = min(model.n_vocab, target.model.n_vocab)
        self._agreed = [0] * target.settings.n_sequences  # cached tokens already held against seq.tokens, by slot

    def begin(self, seq: Sequence) -> None:
        self.session.prefill(seq.slot, seq.tokens[:-1])
        self._agreed[seq.slot] = len(seq.tokens) - 1

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in seqs]
        probs: list[list[float]] = [[] for _ in seqs]
        dists: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in seqs]
        feed = {i: self._missing(seq) for i, (seq, k) in enumerate(zip(seqs, ks)) if k > 0}
        while feed:
            order = list(feed)
            last = np.cumsum([len(feed[i]) for i in order]) - 1
            rows = self.session.decode([(seqs[i].slot, feed[i]) for i in order])
            # Padding ids may exist in the draft's vocabulary only: the target could never choose them.
            logits = np.ascontiguousarray(rows.logits[last, : self._n_vocab])
            with_q = self.rule == "reject"
            drawn = draw(
                logits,
                [seqs[i].key for i in order],
                [len(seqs[i].tokens) + len(tokens[i]) for i in order],
                [seqs[i].sampling for i in order],
                [self._history(seqs[i], tokens[i]) for i in order],
                rule=self.rule,
                with_q=with_q,
            )
            feed = {}
            for row, i in enumerate(order):
                token, prob = int(drawn.tokens[row]), float(drawn.probs[row])
                unsure = prob < self.p_min
                # Under `reject` a token must be judged once it is drawn: dropping it for its own low probability would
                # skew what the target samples in its place.
                if unsure and not with_q:
                    continue
                tokens[i].append(token)
                probs[i].append(prob)
                if with_q and drawn.q_starts is not None and drawn.q_ids is not None and drawn.q_probs is not None:
                    a, b = drawn.q_starts[row], drawn.q_starts[row + 1]
                    dists[i].append((drawn.q_ids[a:b], drawn.q_probs[a:b]))
                if len(tokens[i]) < ks[i] and not unsure:
                    feed[i] = [token]
        return [_draft(tokens[i], probs[i], dists[i]) for i in range(len(seqs))]

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

    @staticmethod
    def _history(seq: Sequence, drafted: list[int]) -> np.ndarray:
        if not seq.sampling.needs_history:
            return _NO_HISTORY
        n = seq.sampling.penalty_last_n
        recent = seq.tokens + drafted if n < 0 else seq.tokens[-n:] + drafted
        return np.array(recent, np.int32)

    def commit(self, seq: Sequence, rows: Rows) -> None:
        pass

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        self._agreed[seq.slot] = min(self._agreed[seq.slot], self.session.rollback(seq.slot, n_keep))

    def close(self) -> None:
        self.session.close()
        self.model.close()


_NO_HISTORY = np.zeros(0, np.int32)


def _draft(tokens: list[int], probs: list[float], dists: list[tuple[np.ndarray, np.ndarray]]) -> Draft:
    draft = Draft(np.array(tokens, np.int32), np.array(probs, np.float32))
    if dists:
        draft.q_ids = np.concatenate([ids for ids, _ in dists])
        draft.q_probs = np.concatenate([p for _, p in dists])
        draft.q_starts = np.cumsum([0, *(len(ids) for ids, _ in dists)]).astype(np.int32)
    return draft


def load(target: TargetSession, settings: DrafterSettings) -> LmDrafter:
    """Load the draft model and hold it against the target's tokenizer. Raises PairingError where they don't fit."""
    if settings.draft_path is None:
        raise UsageError("--spec-type lm needs a draft model: give --draft FILE")
    model = Model(settings.draft_path, role="draft", n_gpu_layers=settings.n_gpu_layers, use_mmap=settings.use_mmap)
    check_pair(target.model.gguf, model.gguf)
    able, reason = can_roll_back(model.gguf)
    if not able:
        model.close()
        raise PairingError(f"{settings.draft_path}: can't draft: {reason}")
    return LmDrafter(model, target, settings)
