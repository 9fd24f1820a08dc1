"""Drafts drawn token by token, several texts at once: what all drafters share that go on from what they have drawn."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from localspec.accept import Draft, draw
from localspec.drafters import Sequence

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class Drawing:
    """Drafts of at most ks[i] tokens behind seqs[i], with the target's settings and, under `match`, its noise, which goes by
    the target's ids. A draft ends before a token that is less sure than `p_min`."""

    def __init__(self, seqs: Seq[Sequence], ks: Seq[int], rule: str, p_min: float):
        self._seqs, self._ks, self._rule, self._p_min = seqs, ks, rule, p_min
        #: tokens of each draft so far
        self.said: list[list[int]] = [[] for _ in seqs]
        self._sure: list[list[float]] = [[] for _ in seqs]
        self._dists: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in seqs]

    def draw(self, logits: F32, which: list[int], sure: F32 | None = None) -> tuple[list[int], I32]:
        """The next token of drafts `which`, out of their rows f32[len(which), V]; returns the rows whose drafts go on, and
        the tokens i32 that they go on with. `sure` f32[len(which)]: confidences that are no probabilities of the tokens."""
        seqs, with_q = self._seqs, self._rule == "reject"
        drawn = draw(
            logits,
            [seqs[i].key for i in which],
            [len(seqs[i].tokens) + len(self.said[i]) for i in which],
            [seqs[i].sampling for i in which],
            [self._history(i) for i in which],
            rule=self._rule,
            with_q=with_q,
        )
        confidence = drawn.probs if sure is None else sure
        on: list[int] = []
        for row, i in enumerate(which):
            prob = float(confidence[row])
            unsure = prob < self._p_min
            # Under `reject` a token must be judged once it is drawn: dropping it for its own low probability would skew
            # what the target samples in its place.
            if unsure and not with_q:
                continue
            self.said[i].append(int(drawn.tokens[row]))
            self._sure[i].append(prob)
            if with_q and drawn.q_starts is not None and drawn.q_ids is not None and drawn.q_probs is not None:
                a, b = drawn.q_starts[row], drawn.q_starts[row + 1]
                self._dists[i].append((drawn.q_ids[a:b], drawn.q_probs[a:b]))
            if len(self.said[i]) < self._ks[i] and not unsure:
                on.append(row)
        return on, drawn.tokens[on]

    def drafts(self) -> list[Draft]:
        """What was drawn, for each of the texts."""
        return [self._draft(i) for i in range(len(self._seqs))]

    def _draft(self, i: int) -> Draft:
        draft = Draft(np.array(self.said[i], np.int32), np.array(self._sure[i], np.float32))
        dists = self._dists[i]
        if dists:
            draft.q_ids = np.concatenate([ids for ids, _ in dists])
            draft.q_probs = np.concatenate([p for _, p in dists])
            draft.q_starts = np.cumsum([0, *(len(ids) for ids, _ in dists)]).astype(np.int32)
        return draft

    def _history(self, i: int) -> I32:
        seq = self._seqs[i]
        if not seq.sampling.needs_history:
            return _NO_HISTORY
        n = seq.sampling.penalty_last_n
        recent = seq.tokens + self.said[i] if n < 0 else seq.tokens[-n:] + self.said[i]
        return np.array(recent, np.int32)


_NO_HISTORY = np.zeros(0, np.int32)
