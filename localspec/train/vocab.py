"""The reduced draft vocabulary: which of the target's tokens a draft can say, and how much of the text they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from localspec.data.shards import Shards
from localspec.train.live import Memory


def token_counts(shards: Shards | Memory, samples: Iterable[int], n_vocab: int) -> npt.NDArray[np.int64]:
    """i64[n_vocab]: how often the assistant said each token in these samples."""
    counts = np.zeros(n_vocab, np.int64)
    for i in samples:
        tokens, mask = shards.tokens(i)
        counts += np.bincount(tokens[mask > 0], minlength=n_vocab)
    return counts


def expected_counts(shards: Shards | Memory, samples: Iterable[int], n_vocab: int) -> npt.NDArray[np.float64]:
    """f64[n_vocab]: how often each token was said, and how often the target would say it by what it thought at each place:
    the same counts with less noise. On 228,000 tokens it covers half a point more of unseen text (docs/LOG.md)."""
    counts = np.zeros(n_vocab)
    for i in samples:
        tokens, mask = shards.tokens(i)
        counts += np.bincount(tokens[mask > 0], minlength=n_vocab)
        ids, p = shards.teacher(i)
        counts += np.bincount(ids.ravel(), p.ravel(), minlength=n_vocab)
    return counts


def choose(counts: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.int64]:
    """i64[size], ascending: the tokens that count most. Of those that count the same, never perhaps, the lower ids: a
    BPE makes its frequent tokens first."""
    best = np.argsort(-counts, kind="stable")[:size]
    return np.sort(best).astype(np.int64)


def coverage(counts: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> float:
    """The share of what was said that these tokens are; 1 where nothing was said."""
    total = int(counts.sum())
    return float(counts[ids].sum()) / total if total else 1.0
