"""Prompt lookup: what followed the last few tokens the last time they occurred in this text. No model.

The method is prompt lookup decoding (Saxena, 2023). The longest match wins; among equally long ones, the latest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from localspec.accept import Draft
from localspec.drafters import DrafterSettings, Sequence
from localspec.target import Rows, TargetSession

#: lengths of match tried, longest first; single tokens recur too often to predict anything
LENGTHS = (6, 5, 4, 3, 2)


class _Index:
    """Where each n-gram of one text ended last, kept up to date as the text grows."""

    def __init__(self) -> None:
        self.n_indexed = 0
        self.last: dict[tuple[int, ...], int] = {}

    def update(self, tokens: list[int]) -> None:
        """Index every n-gram that has a follower: those that end before the last token."""
        for end in range(self.n_indexed, len(tokens) - 1):
            for n in LENGTHS:
                if end + 1 >= n:
                    self.last[tuple(tokens[end + 1 - n : end + 1])] = end + 1
        self.n_indexed = max(self.n_indexed, len(tokens) - 1)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """(match length, index of the follower); length 0 where nothing matches."""
        for n in LENGTHS:
            if len(tokens) >= n:
                at = self.last.get(tuple(tokens[-n:]))
                if at is not None:
                    return n, at
        return 0, 0


class NgramDrafter:
    """Prompt lookup over each sequence's own text."""

    name = "ngram"

    def __init__(self, p_min: float = 0.0):
        self.p_min = p_min
        self._index: dict[int, _Index] = {}

    def begin(self, seq: Sequence) -> None:
        index = self._index[seq.slot] = _Index()
        index.update(seq.tokens)

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        return [self._one(seq, k) for seq, k in zip(seqs, ks)]

    def _one(self, seq: Sequence, k: int) -> Draft:
        index = self._index.setdefault(seq.slot, _Index())
        index.update(seq.tokens)
        if k <= 0:
            return Draft.empty()
        n, at = index.find(seq.tokens)
        # The longer the match, the surer: each matching token halves the doubt.
        confidence = 1.0 - 0.5**n
        if n == 0 or confidence < self.p_min:
            return Draft.empty()
        copied: list[int] = []
        for i in range(k):
            source = at + i
            # A match that reaches the end of the text goes on in what was just copied: a loop repeats itself.
            copied.append(seq.tokens[source] if source < len(seq.tokens) else copied[source - len(seq.tokens)])
        return Draft(np.array(copied, np.int32), np.full(k, confidence, np.float32))

    def commit(self, seq: Sequence, rows: Rows) -> None:
        pass

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        self._index.pop(seq.slot, None)

    def close(self) -> None:
        self._index.clear()


def load(target: TargetSession, settings: DrafterSettings) -> NgramDrafter:
    """Needs nothing but the text."""
    return NgramDrafter(settings.p_min)
