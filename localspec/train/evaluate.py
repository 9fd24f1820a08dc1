"""Acceptance as run time would see it: the draft rolled out on its own tokens, along texts that the target wrote.

Decoding a text again with the draft is a walk: from the last token known, so many drafted tokens are right, then one more
token is the target's own. For greedy answers this is what `localspec run` does, token for token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.data.shards import Shards
from localspec.train.batches import Batch
from localspec.train.live import Memory
from localspec.train.models import Rollout, Speculator


@dataclass
class Walk:
    """`tokens` gained in `verifies`; `tried[j]` and `kept[j]`: how often draft j + 1 was there to be judged, those before it
    kept, and how often it was kept, too."""

    verifies: int = 0
    tokens: int = 0
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @property
    def tokens_per_verify(self) -> float:
        return self.tokens / self.verifies if self.verifies else float("nan")

    def as_json(self) -> dict[str, Any]:
        by_position = [round(k / t, 4) if t else None for k, t in zip(self.kept, self.tried)]
        return {"tokens_per_verify": round(self.tokens_per_verify, 4), "acceptance": by_position, "verifies": self.verifies}

    def add(self, other: Walk) -> None:
        self.verifies += other.verifies
        self.tokens += other.tokens
        for mine, theirs in ((self.tried, other.tried), (self.kept, other.kept)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for j, n in enumerate(theirs):
                mine[j] += n


def walk(mask: npt.NDArray[np.bool_], accepted: dict[int, int], n_max: int) -> Walk:
    """Decode the assistant's turns of one sample again. `mask` bool[n]; `accepted`: by the place of the last token known,
    how many of the drafts after it are right."""
    done = Walk(0, 0, [0] * n_max, [0] * n_max)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    for first, after in edges.reshape(-1, 2):
        at, last = int(first), int(after) - 1  # the turn's first token comes from the prefill
        while at < last:
            room = last - at
            n = min(accepted.get(at, 0), n_max, room)
            for j in range(min(n_max, room)):
                if j > n:
                    break
                done.tried[j] += 1
                done.kept[j] += j < n
            gained = min(n + 1, room)
            done.verifies += 1
            done.tokens += gained
            at += gained
    return done


def walks(batch: Batch, rollout: Rollout, n_max: int) -> list[tuple[str, Walk]]:
    """(source, walk) of each sample of a batch."""
    accepted = dict(zip(rollout.starts.tolist(), rollout.accepted.tolist()))
    found = []
    for source, a, b in zip(batch.sources, batch.starts[:-1], batch.starts[1:]):
        own = {place - int(a): n for place, n in accepted.items() if a <= place < b}
        found.append((source, walk(batch.mask[a:b], own, n_max)))
    return found


@dataclass
class Report:
    """What an evaluation found, over all and by source, at each number of drafted tokens."""

    n_max: int
    total: dict[int, Walk]
    by_source: dict[str, dict[int, Walk]]

    @property
    def score(self) -> float:
        """Tokens per verify at n_max."""
        return self.total[self.n_max].tokens_per_verify

    def as_json(self) -> dict[str, Any]:
        by_source = {source: self._one(walks) for source, walks in sorted(self.by_source.items())}
        return {"n_max": self.n_max, **self._one(self.total), "by_source": by_source}

    def _one(self, walks: dict[int, Walk]) -> dict[str, Any]:
        by_n_max = {str(n): round(w.tokens_per_verify, 4) for n, w in walks.items()}
        return {**walks[self.n_max].as_json(), "by_n_max": by_n_max}


def choose(shards: Shards | Memory, samples: list[int], n_tokens: int) -> list[int]:
    """Samples for an evaluation of some `n_tokens`: from each source in turn, in the order they were made."""
    lengths, sources = shards.lengths(), shards.sources()
    waiting: dict[str, list[int]] = {}
    for i in samples:
        waiting.setdefault(sources[i], []).append(i)
    chosen: list[int] = []
    left = n_tokens
    while waiting and left > 0:
        for source in sorted(waiting):
            i = waiting[source].pop(0)
            if not waiting[source]:
                del waiting[source]
            if left > 0:
                chosen.append(i)
                left -= int(lengths[i])
    return chosen


def evaluate(model: Speculator, batches: Iterable[Batch], n_max: int) -> Report:
    """Roll the draft out along these batches."""
    total = {n: Walk() for n in range(1, n_max + 1)}
    by_source: dict[str, dict[int, Walk]] = {}
    for batch in batches:
        rollout = model.rollout(batch, n_max)
        for n in total:
            for source, found in walks(batch, rollout, n):
                total[n].add(found)
                by_source.setdefault(source, {k: Walk() for k in total})[n].add(found)
    return Report(n_max, total, by_source)
