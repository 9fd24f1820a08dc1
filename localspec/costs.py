"""What decodes and drafts cost here, learnt from the steps as they run. Pure arithmetic.

A decode's time depends on its rows, not smoothly: kernels work on so many columns at a time, so 8 rows can cost less than 7.
It grows with the context, too, and a machine has slower and faster minutes. So each number of rows keeps the median of its
last times, all of them relative to one level that moves with whatever is measured: what is seen of 4 rows ages what is known
of 1.
"""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Mapping

_KEPT = 9  # times of each size: their median forgets an interrupted one
_FOLLOW = 0.1  # of what one time differs by, the level takes this
_OFF = 1.25  # times what was expected, that the level follows at most
_UNLIKELY = 4.0  # times what was to be expected
_SLOPE = 0.06  # a further row, in decodes of one row, before anything is known


class DecodeCost:
    """Seconds of a decode by its rows. `prior`: ratios t(n) / t(1) from an earlier run.

    It is asked for every size at every step, so what follows from the times is worked out when one is recorded."""

    def __init__(self, prior: Mapping[int, float] | None = None):
        self._level = 0.0  # seconds of one row, moving; 0: nothing is known
        self._times: dict[int, collections.deque[float]] = {}  # seconds / level
        self._prior = dict(prior or {})
        self._medians = dict(self._prior)  # of the times; of the prior while there are none
        self._sizes = sorted(self._prior)  # those of `_medians`
        self._scale = 1.0  # between the prior's ratios and those of the sizes seen in this run

    @property
    def known(self) -> bool:
        """Whether any decode was seen."""
        return self._level > 0

    def samples(self, rows: int) -> int:
        """How many times of this size are kept."""
        return len(self._times.get(rows, ()))

    def record(self, rows: int, seconds: float) -> None:
        """One decode."""
        if seconds <= 0:
            return
        if not self.known:
            self._level = seconds / self._ratio(rows)
            self._medians, self._sizes = {}, []
        elif self.samples(rows) >= 3:
            off = seconds / self.seconds(rows)
            self._level *= min(_OFF, max(1 / _OFF, off)) ** _FOLLOW
        else:  # a first time that was interrupted would stand for this size until there are more
            seconds = min(seconds, _UNLIKELY * self.seconds(rows))
        self._times.setdefault(rows, collections.deque(maxlen=_KEPT)).append(seconds / self._level)
        if rows not in self._medians:
            bisect.insort(self._sizes, rows)
        self._medians[rows] = statistics.median(self._times[rows])
        if rows in self._prior:
            self._scale = statistics.median(self._medians[n] / self._prior[n] for n in self._sizes if n in self._prior)

    def seconds(self, rows: int) -> float:
        """What a decode of so many rows is expected to take; 0 while nothing is known."""
        return self._level * self._ratio(rows)

    def curve(self, least: int = 1) -> dict[int, float]:
        """t(n) / t(1) of the sizes that were seen, at least so many times: the prior of a later run."""
        one = self._ratio(1)
        if not self.known:
            return dict(self._prior)
        return {n: self._ratio(n) / one for n in sorted(self._times) if self.samples(n) >= least}

    def _ratio(self, rows: int) -> float:
        ratio, sizes = self._medians, self._sizes
        if rows in ratio:
            return ratio[rows]
        if rows in self._prior:
            return self._prior[rows] * self._scale
        at = bisect.bisect(sizes, rows)
        if 0 < at < len(sizes):
            a, b = sizes[at - 1], sizes[at]
            return ratio[a] + (ratio[b] - ratio[a]) * (rows - a) / (b - a)
        if at:
            return ratio[sizes[-1]] * (1 + _SLOPE * (rows - sizes[-1]))
        if sizes:
            return ratio[sizes[0]] / (1 + _SLOPE * (sizes[0] - rows))
        return 1 + _SLOPE * (rows - 1)


class DraftCost:
    """Seconds of drafting, a + b per token: medians of what so many tokens took, and a line through them."""

    def __init__(self) -> None:
        self._times: dict[int, collections.deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._line = (0.0, 0.0, 0.0)  # through the point (tokens, seconds), with this slope

    def record(self, tokens: int, seconds: float) -> None:
        """One call of the drafter that gave so many tokens, all sequences together."""
        times = self._times.setdefault(tokens, collections.deque(maxlen=_KEPT))
        times.append(seconds)
        self._medians[tokens] = statistics.median(times)
        points = [(n, self._medians[n], len(t)) for n, t in self._times.items()]
        weight = sum(w for _, _, w in points)
        x = sum(n * w for n, _, w in points) / weight
        y = sum(s * w for _, s, w in points) / weight
        spread = sum(w * (n - x) ** 2 for n, _, w in points)
        slope = sum(w * (n - x) * (s - y) for n, s, w in points) / spread if spread else y / max(1.0, x)
        self._line = x, y, max(0.0, slope)

    def seconds(self, tokens: int) -> float:
        """What so many tokens are expected to take; 0 while nothing is known."""
        if tokens in self._medians:
            return self._medians[tokens]
        x, y, slope = self._line
        return max(0.0, y + slope * (tokens - x))
