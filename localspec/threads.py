"""How many threads decode while other processes want the cores. Pure arithmetic over measured times.

The threads of a decode wait for each other at every operation, so one that shares its core with another process holds up
all: with two threads and one busy process a decode takes three to four times as long, though only a quarter of the
machine is gone. With one thread fewer the other process has that core to itself. Whether that is better is measured, not
guessed; and it is asked for only where a row's numbers don't depend on the number of threads.
"""

from __future__ import annotations

import collections
import statistics

_RECENT = 8  # decodes whose mean stands for now
_REMEMBERED = 256 # decodes among which the quickest of a size stands for a quiet machine
_STALLED = 1.6  # so many times as slow as quiet: something else runs
_WORST = 10.0  # a longer pause counts as this: it says nothing about how often there will be one
_BETTER = 0.9  # a level is changed for at least this
_TRIAL = 5  # decodes of a trial, after one that warms up
_FIRST_WAIT, _LONGEST_WAIT = 32, 512  # decodes between trials that lead to nothing


class ThreadCount:
    """`now` threads, at most `most`. Give each decode's rows and seconds to `record`."""

    def __init__(self, most: int):
        self.most = self.now = max(1, most)
        self._quiet: dict[int, collections.deque[float]] = {}
        self._ratios: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._step = 1  # threads to give up at once, more after each attempt that did not help
        self._wait = 0
        self._next_wait = _FIRST_WAIT
        # of a trial: threads before it, what a decode cost there, and the ratios seen since
        self._before: tuple[int, float] | None = None
        self._seen: list[float] = []

    def record(self, rows: int, seconds: float) -> None:
        """One finished decode of so many rows; may change `now`."""
        if self.most == 1:
            return
        ratio = min(seconds / self._quietest(rows, seconds), _WORST)
        if self._before is not None:
            self._judge(*self._before, ratio)
            return
        self._ratios.append(ratio)
        self._wait = max(0, self._wait - 1)
        if self._wait or len(self._ratios) < _RECENT:
            return
        cost = statistics.fmean(self._ratios)
        explained = _STALLED * self.most / self.now  # by so many threads
        if cost > explained and sum(r > explained for r in self._ratios) > 1:
            if self.now > 1:
                self._try(max(1, self.now - self._step), cost)
        elif self.now < self.most:
            self._try(self.now + 1, cost)

    def _quietest(self, rows: int, seconds: float) -> float:
        """Seconds of a decode of this size on a quiet machine with all threads, as far as is known."""
        known = self._quiet.setdefault(rows, collections.deque(maxlen=_REMEMBERED))
        if self.now == self.most or not known:
            known.append(seconds)
        return max(min(known), 1e-9)

    def _try(self, threads: int, cost: float) -> None:
        self._before, self._seen = (self.now, cost), []
        self.now = threads

    def _judge(self, before: int, cost: float, ratio: float) -> None:
        self._seen.append(ratio)
        if len(self._seen) <= _TRIAL:
            return
        found = statistics.fmean(self._seen[1:])
        self._before = None
        self._ratios.clear()
        if found < _BETTER * cost:
            self._step, self._next_wait = 1, _FIRST_WAIT
        else:
            self._step = 2 * self._step if self.now < before else 1
            self._next_wait = min(2 * self._next_wait, _LONGEST_WAIT)
            self.now = before
        self._wait = self._next_wait
