"""What earlier runs knew of a draft: what a controller begins with. It is corrected as a text goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftPrior:
    """Of a draft beside one target.

    `cost`: of a call of the drafter and of each token that it gives, in plain decoding's steps. `kept`: the chance of each
    place of a block, given those before it. `sure`: how often a token was kept whose confidence lay in each of survival.py's
    ranges, None for ranges that were hardly seen.
    """

    cost: tuple[float, float]
    kept: tuple[float, ...]
    sure: tuple[float | None, ...]

    def mixed(self, new: DraftPrior, weight: float) -> DraftPrior:
        """With this share of what a newer run knew."""
        n = min(len(self.kept), len(new.kept))
        return DraftPrior(
            (_mix(self.cost[0], new.cost[0], weight), _mix(self.cost[1], new.cost[1], weight)),
            (*(_mix(a, b, weight) for a, b in zip(self.kept, new.kept)), *self.kept[n:], *new.kept[n:]),
            tuple(_known(self.sure, new.sure, weight)),
        )


def _mix(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)


def _known(old: Sequence[float | None], new: Sequence[float | None], weight: float) -> list[float | None]:
    return [b if a is None else a if b is None else _mix(a, b, weight) for a, b in zip(old, new)]
