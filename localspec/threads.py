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
_BETTER = 0.9  # a thread is given up for at least this
_AS_GOOD = 0.98  # and taken back for this: a quiet machine should be used
_TRIAL = 5  # decodes of a trial, after one that warms up
_LONGEST_TRIAL = 25  # where most are of sizes that were not seen of late
_LATELY = 96  # decodes, among which a size's times are held against a trial's
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
        self._lately: collections.deque[tuple[int, float]] = collections.deque(maxlen=_LATELY)  # rows and seconds
        # of a trial: threads before it, the mean seconds of each size there, times over those, and its decodes
        self._before = 0
        self._means: dict[int, float] = {}
        self._seen: list[float] = []
        self._tried = 0

    def record(self, rows: int, seconds: float) -> None:
        """One finished decode of so many rows; may change `now`."""
        if self.most == 1:
            return
        quietest = self._quietest(rows, seconds)
        if self._before:
            self._judge(rows, seconds)
            return
        seconds = min(seconds, _WORST * quietest)
        self._lately.append((rows, seconds))
        self._ratios.append(seconds / quietest)
        self._wait = max(0, self._wait - 1)
        if self._wait or len(self._ratios) < _RECENT:
            return
        cost = statistics.fmean(self._ratios)
        explained = _STALLED * self.most / self.now  # by so many threads
        if cost > explained and sum(r > explained for r in self._ratios) > 1:
            if self.now > 1:
                self._try(max(1, self.now - self._step))
        elif self.now < self.most:
            self._try(self.now + 1)

    def _quietest(self, rows: int, seconds: float) -> float:
        """Seconds of a decode of this size on a quiet machine with all threads, as far as is known."""
        known = self._quiet.setdefault(rows, collections.deque(maxlen=_REMEMBERED))
        if self.now == self.most or not known:
            known.append(seconds)
        return max(min(known), 1e-9)

    def _try(self, threads: int) -> None:
        times: dict[int, list[float]] = {}
        for rows, seconds in self._lately:
            times.setdefault(rows, []).append(seconds)
        self._means = {rows: statistics.fmean(each) for rows, each in times.items()}
        self._before, self._seen, self._tried = self.now, [], 0
        self.now = threads

    def _judge(self, rows: int, seconds: float) -> None:
        """A decode of the trial, held against those of its size: the quickest of a size may have been seen on another
        day, with another number of texts, and says nothing about which of two numbers of threads is better now."""
        self._tried += 1
        if self._tried > 1 and rows in self._means:
            self._seen.append(min(seconds / self._means[rows], _WORST))
        if len(self._seen) < _TRIAL and self._tried < _LONGEST_TRIAL:
            return
        before, self._before = self._before, 0
        self._ratios.clear()
        self._lately.clear()
        wanted = _BETTER if self.now < before else _AS_GOOD
        if len(self._seen) == _TRIAL and statistics.fmean(self._seen) < wanted:
            self._step, self._next_wait = 1, _FIRST_WAIT
        else:
            self._step = 2 * self._step if self.now < before else 1
            self._next_wait = min(2 * self._next_wait, _LONGEST_WAIT)
            self.now = before
        self._wait = self._next_wait
