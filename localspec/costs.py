"""What decodes and drafts cost here, learnt from the steps as they run. Pure arithmetic.

A pass over the weights, which is a whole decode of one sequence, takes a time that depends on its rows, not smoothly:
kernels work on so many columns at a time, so 8 rows can cost less than 7. It grows with the context, too, and a machine has
slower and faster minutes. So each number of rows keeps the median of its last times, all of them relative to one level, the
machine's speed: when all that is measured takes longer, what is known of other sizes grows with it. The level jumps when it
has to, and does not follow single times: those differ upwards more than downwards, and it would rise with the noise, away
from the sizes that are seen rarely. A size that was seen once may have been interrupted just then, and would never be tried
again: until there are enough, what the sizes around it let expect stands for the times that are missing.

What was seen while other programs ran, or with other texts beside, may hold no longer: a size that looks too dear to be used
would never be seen again. So after a while it is forgotten, and what the others let expect stands for it.

A pass with another number of rows than the one before has its graph built anew, which on a small model costs a tenth of a
decode: plain decoding, one after the other, does not have that. So what a change costs is learnt too, and times of a size
are what it takes without.
"""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_KEPT = 101  # times of each size: their median forgets interrupted ones, and moves later than the level does
_LATE = 16  # times in a row, whose median tells whether the machine's speed has changed
_TELLS = ((12, 1.06), (5, 1.2))  # so many of them tell of a change, if they are so many times what was expected
_CHANGED = 1.2  # times what an earlier run knew: that is contradicted
_ENOUGH = 3  # times of a size to be believed against others
_KEPT_CALLS = 21  # times of the drafter, for each number of tokens
_ENOUGH_CALLS = 8  # of the drafter, for their median to be believed against those for other numbers of tokens
_DIFFERENCES = 31  # between times with a change and times without, of which the median is what a change costs
_STALE = 1024  # passes, after which a size that was not among them is doubted
_DOUBTED = 1.5  # times what the other sizes let expect: so far off it is forgotten then
_SLOPE = 0.06  # a further row, in decodes of one row, before anything is known


@dataclass(slots=True)
class _Time:
    """Of one pass, over the level, and whether the pass before it had another number of rows."""

    value: float
    changed: bool


class DecodeCost:
    """Seconds of a decode by its rows. `prior`: ratios t(n) / t(1) from an earlier run.

    It is asked for every size at every step, so what follows from the times is worked out when one is recorded."""

    def __init__(self, prior: Mapping[int, float] | None = None):
        self._level = 0.0  # seconds of one row, moving; 0: nothing is known
        self._times: dict[int, collections.deque[_Time]] = {}
        self._late: collections.deque[tuple[_Time, float]] = collections.deque(maxlen=_LATE)  # and over what was expected
        self._prior = dict(prior or {})
        self._medians = dict(self._prior)  # of the times; of the prior while there are none
        self._sizes = sorted(self._prior)  # those of `_medians`
        self._scale = 1.0  # between the prior's ratios and those of the sizes seen in this run
        self.last = 0  # rows of the last pass
        self._differences: collections.deque[float] = collections.deque(maxlen=_DIFFERENCES)
        self._change = 0.0  # what another number of rows costs, over the level
        self.passes = 0  # so far
        self._seen: dict[int, int] = {}  # of each size: how many had been recorded when it was the last one

    @property
    def known(self) -> bool:
        """Whether any decode was seen."""
        return self._level > 0

    @property
    def change(self) -> float:
        """Seconds that another number of rows than in the pass before costs."""
        return self._level * self._change

    @property
    def prior_holds(self) -> bool:
        """Whether there is a prior, and no size that was seen here contradicts it."""
        off = [self._medians[n] / (self._prior[n] * self._scale) for n in self._times if n in self._prior]
        return bool(self._prior) and all(1 / _CHANGED < each < _CHANGED for each in off)

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
        self.pass_over(1)
        self._seen[rows] = self.passes
        few = self.samples(rows) < _ENOUGH
        expected = self.of((rows,), self.last)
        time = _Time(seconds / self._level, rows != self.last)
        self.last = rows
        self._times.setdefault(rows, collections.deque(maxlen=_KEPT))
        self._compare(time, self._times[rows])
        self._times[rows].append(time)
        if rows not in self._medians:
            bisect.insort(self._sizes, rows)
        self._medians[rows] = self._median(rows)
        if not few:
            self._late.append((time, seconds / expected))
            self._follow()
        if rows in self._prior:
            self._scale = self._scale_of(self._sizes)

    def pass_over(self, n: int) -> None:
        """So many decodes, of which nothing else is to be learnt."""
        due = self.passes // _STALE != (self.passes + n) // _STALE
        self.passes += n
        if due:
            self.doubt(self.passes - _STALE)

    def doubt(self, before: int, cheap: bool = False) -> None:
        """Forget the sizes that were last seen before `passes` had that value, and look so dear beside the others that they
        would never be tried. With `cheap` those, too, that look so much cheaper: a busy machine, which made the others dear,
        did not do that to them."""
        fresh = [rows for rows in self._sizes if self._seen.get(rows, 0) > before]
        stale = [rows for rows in self._times if rows not in fresh]
        scale = self._scale_of(fresh)
        off = {rows: self._medians[rows] / self._expected(rows, fresh, scale) for rows in stale}
        doubted = [rows for rows, each in off.items() if each > _DOUBTED or (cheap and each < 1 / _DOUBTED)]
        for rows in doubted:
            del self._times[rows], self._medians[rows], self._seen[rows]
            self._sizes.remove(rows)
        if doubted:
            self._scale = self._scale_of(self._sizes)

    def _scale_of(self, sizes: Iterable[int]) -> float:
        """Between the prior's ratios and these sizes'."""
        found = [self._medians[n] / self._prior[n] for n in sizes if n in self._prior]
        return statistics.median(found) if found else self._scale

    def _compare(self, time: _Time, times: Iterable[_Time]) -> None:
        """Learn what a change costs from a time and those of the other kind."""
        others = [other.value for other in times if other.changed != time.changed]
        if len(others) < _ENOUGH:
            return
        difference = time.value - statistics.median(others)
        self._differences.append(difference if time.changed else -difference)
        if len(self._differences) >= _ENOUGH:
            self._change = max(0.0, statistics.median(self._differences))

    def _follow(self) -> None:
        """Move the level where the last times say that the machine's speed is another."""
        offs = [off for _, off in self._late]
        off = max(1.0, statistics.median_low(offs)) * min(1.0, statistics.median_high(offs))  # most of them are that far off
        if not any(len(offs) >= enough and not 1 / far < off < far for enough, far in _TELLS):
            return
        self._level *= off
        for time, each in self._late:
            if max(each / off, off / each) < max(each, 1 / each):  # taken at the new speed
                time.value /= off
        self._late.clear()
        for rows in self._times:
            self._medians[rows] = self._median(rows)

    def _median(self, rows: int) -> float:
        """Of a size's times, those that are missing being what it was expected to take without them."""
        times = [time.value - time.changed * self._change for time in self._times[rows]]
        if len(times) < _ENOUGH:
            times += [self._expected(rows, self._sizes, self._scale)] * (_ENOUGH - len(times))
        return statistics.median(times)

    def record_passes(self, passes: Sequence[int], seconds: float) -> None:
        """One decode, in passes of so many rows: each is held to have taken the share of the time that was expected."""
        if len(passes) == 1:
            self.record(passes[0], seconds)
            return
        expected = [self.of((rows,), before) for before, rows in zip((self.last, *passes), passes)]
        for rows, each in zip(passes, expected):
            self.record(rows, seconds * (each / sum(expected) if self.known else 1 / len(passes)))

    def seconds(self, rows: int) -> float:
        """What a pass of so many rows is expected to take, after one that had as many; 0 while nothing is known."""
        return self._level * self._ratio(rows)

    def of(self, passes: Sequence[int], after: int = 0) -> float:
        """What a decode in passes of so many rows is expected to take. `after`: the rows of the pass before, where what a
        change costs is to count."""
        changes = sum([a != b for a, b in zip((after, *passes), passes)]) if after and self._change else 0
        return self._level * (sum([self._ratio(rows) for rows in passes]) + changes * self._change)

    def at_most(self, passes: Sequence[int]) -> float:
        """The same, but each pass no more than what larger ones have been seen to take: for what plain decoding costs. Times
        that the system stretched, all of the few there are, would make every draft look good."""
        larger = [(n, median) for n, median in self._medians.items() if self.samples(n) >= _ENOUGH]
        return self._level * sum([min([self._ratio(rows), *(m for n, m in larger if n > rows)]) for rows in passes])

    def curve(self, least: int = 1) -> dict[int, float]:
        """t(n) / t(1) of the sizes that were seen, at least so many times: the prior of a later run."""
        one = self._ratio(1)
        if not self.known:
            return dict(self._prior)
        return {n: self._ratio(n) / one for n in sorted(self._times) if self.samples(n) >= least}

    def _ratio(self, rows: int) -> float:
        return self._medians[rows] if rows in self._medians else self._expected(rows, self._sizes, self._scale)

    def _expected(self, rows: int, sizes: Sequence[int], scale: float) -> float:
        """What an earlier run or these other sizes, which ascend, say about one."""
        if rows in self._prior:
            return self._prior[rows] * scale
        ratio = self._medians
        below = bisect.bisect_left(sizes, rows)
        above = below + (below < len(sizes) and sizes[below] == rows)
        if below and above < len(sizes):
            a, b = sizes[below - 1], sizes[above]
            return ratio[a] + (ratio[b] - ratio[a]) * (rows - a) / (b - a)
        if below:
            return ratio[sizes[below - 1]] * (1 + _SLOPE * (rows - sizes[below - 1]))
        if above < len(sizes):
            return ratio[sizes[above]] / (1 + _SLOPE * (sizes[above] - rows))
        return 1 + _SLOPE * (rows - 1)


class DraftCost:
    """Seconds of drafting, a + b per token: medians of what so many tokens took, and a line through them. `prior`: a and b
    of an earlier run, in decodes of one row of `decode`."""

    def __init__(self, decode: DecodeCost, prior: tuple[float, float] | None = None) -> None:
        self._decode = decode
        self._prior = prior or (0.0, 0.0)
        self._times: dict[int, collections.deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._line = (0.0, 0.0, 0.0)  # through the point (tokens, seconds), with this slope

    @property
    def known(self) -> bool:
        """Whether any call was seen."""
        return bool(self._medians)

    def record(self, tokens: int, seconds: float) -> None:
        """One call of the drafter that gave so many tokens, all sequences together."""
        times = self._times.setdefault(tokens, collections.deque(maxlen=_KEPT_CALLS))
        times.append(seconds)
        self._medians[tokens] = statistics.median(times)
        points = [(n, self._medians[n], len(t)) for n, t in self._times.items()]
        weight = sum(w for _, _, w in points)
        x = sum(n * w for n, _, w in points) / weight
        y = sum(s * w for _, s, w in points) / weight
        spread = sum(w * (n - x) ** 2 for n, _, w in points)
        slope = sum(w * (n - x) * (s - y) for n, s, w in points) / spread if spread else self._first_slope(x, y)
        self._line = x, y, max(0.0, slope)

    def _first_slope(self, x: float, y: float) -> float:
        """Of the line through one point only: as an earlier run's, or through nothing for no tokens."""
        a, b = self._prior
        share = b * x / (a + b * x) if a + b * x > 0 else 1.0
        return share * y / max(1.0, x)

    def seconds(self, tokens: int) -> float:
        """What so many tokens are expected to take; 0 while nothing is known."""
        if not self._medians:
            return (self._prior[0] + self._prior[1] * tokens) * self._decode.seconds(1)
        if len(self._times.get(tokens, ())) >= _ENOUGH_CALLS:
            return self._medians[tokens]
        x, y, slope = self._line
        return max(0.0, y + slope * (tokens - x))

    def line(self) -> tuple[float, float]:
        """a and b, in decodes of one row: the prior of a later run."""
        one = self._decode.seconds(1)
        if not self._medians or not one:
            return self._prior
        x, y, slope = self._line
        slope = min(slope, y / x) if x else slope
        return (y - slope * x) / one, slope / one
