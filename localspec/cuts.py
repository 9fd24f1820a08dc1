"""Ways to cut the drafts of several sequences, which are held against each other. Pure arithmetic."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

_WAYS = 16  # at most, of those that take the likeliest tokens


def survival(chances: Sequence[float]) -> list[float]:
    """Of each token of a draft, with all those before it."""
    return list(itertools.accumulate(chances, operator.mul))


def ways_to_cut(alive: Sequence[Sequence[float]]) -> list[list[int]]:
    """How many tokens of each draft to verify: ways worth a look. `alive`: by sequence, each token's chance to survive.

    The likeliest tokens of all, more and more of them; and of every draft the same number, which makes one pass.
    """
    order = [i for i, _ in sorted(((i, c) for i, chances in enumerate(alive) for c in chances), key=lambda item: -item[1])]
    counts = [0] * len(alive)
    ways = []
    every = max(1, -(-len(order) // _WAYS))
    for m, i in enumerate(order, 1):
        counts[i] += 1
        if m % every == 0 or m == len(order):
            ways.append(list(counts))
    if len(alive) > 1:
        longest = max(map(len, alive), default=0)
        ways += [[min(level, len(chances)) for chances in alive] for level in range(1, longest)]
    return ways
