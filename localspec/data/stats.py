"""What a directory of shards holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.data.shards import Shards

#: Sizes of a draft vocabulary for which the coverage is told.
VOCABULARIES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Samples of one source."""

    n_samples: int
    n_tokens: int
    n_masked: int


@dataclass(frozen=True, slots=True)
class DataStats:
    """Counts over all samples. `coverage`: for each size of a draft vocabulary, the share of the assistant's tokens that
    are among so many of the commonest. `quantiles` of the samples' lengths: least, 25 %, half, 75 %, most."""

    n_samples: int
    n_tokens: int
    n_masked: int
    n_bytes: int
    n_distinct: int
    quantiles: tuple[int, int, int, int, int]
    coverage: dict[int, float]
    sources: dict[str, SourceStats]


def token_counts(shards: Shards) -> npt.NDArray[np.int64]:
    """i64[V]: how often the assistant says each token."""
    counts = np.zeros(int(shards.manifest.target["n_vocab"]), np.int64)
    for i in range(len(shards)):
        tokens, mask = shards.tokens(i)
        counts += np.bincount(tokens[mask == 1], minlength=len(counts))
    return counts


def data_stats(shards: Shards) -> DataStats:
    """Count everything; the states are not looked at."""
    lengths = shards.lengths()
    masked = np.array([int(shards.tokens(i)[1].sum()) for i in range(len(shards))])
    counts = token_counts(shards)
    common = np.cumsum(np.sort(counts)[::-1])
    names = np.array(shards.sources())
    sources = {}
    for name in dict.fromkeys(shards.sources()):
        here = names == name
        sources[name] = SourceStats(int(here.sum()), int(lengths[here].sum()), int(masked[here].sum()))
    least, low, half, high, most = np.percentile(lengths, [0, 25, 50, 75, 100], method="nearest").tolist()
    return DataStats(
        n_samples=len(shards),
        n_tokens=int(lengths.sum()),
        n_masked=int(masked.sum()),
        n_bytes=sum(int(shard.get("n_bytes", 0)) for shard in shards.manifest.shards),
        n_distinct=int((counts > 0).sum()),
        quantiles=(int(least), int(low), int(half), int(high), int(most)),
        coverage={size: float(common[size - 1] / common[-1]) for size in VOCABULARIES if size < len(counts)},
        sources=sources,
    )
