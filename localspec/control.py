"""How many tokens to draft. Pure arithmetic over measured times: no llama.cpp, no clock of its own.

`FixedBlock` always asks for n_max. `Gate` does so only while it pays: it compares the time per gained token of steps that
drafted with that of steps that did not, and stops drafting where plain decoding is faster, with ever rarer trials
afterwards, so that a bad draft costs a few steps and not a constant share.
"""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, field
from typing import Protocol

#: llama.cpp's default of --spec-draft-n-max
DEFAULT_N_MAX = 3
#: A step that takes so many times the median was interrupted; blocks of different lengths differ by less.
_STALLED = 2.0


class Controller(Protocol):
    """Chooses the block size before a step and learns from it afterwards."""

    n_max: int

    def choose(self) -> int:
        """Tokens to draft in the next step, 0 to n_max."""

    def record(self, asked: int, n_drafted: int, n_gained: int, seconds: float) -> None:
        """One finished step: drafts asked for, drafts proposed, tokens gained, and its whole time."""


@dataclass
class FixedBlock:
    """Always n_max tokens."""

    n_max: int = DEFAULT_N_MAX

    def choose(self) -> int:
        return self.n_max

    def record(self, asked: int, n_drafted: int, n_gained: int, seconds: float) -> None:
        pass


@dataclass
class Gate:
    """n_max tokens while drafting pays, none while it does not.

    Three steps without drafts come first, to know what plain decoding costs here. Then follows a trial of `trial` steps
    that really drafted (a step in which the drafter had nothing to say costs nothing and proves nothing). A trial that
    lost closes the gate for `pause` tokens, and each further lost one doubles the pause, up to `longest_pause`. While the
    gate is open the last `trial` drafted steps are judged all the time, and every `refresh`-th step is plain, to keep its
    cost current.
    """

    n_max: int = DEFAULT_N_MAX
    trial: int = 16
    pause: int = 64
    longest_pause: int = 2048
    refresh: int = 64
    _plain: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=9))
    _drafted: collections.deque[tuple[int, float]] = field(default_factory=collections.deque)
    _steps: int = 0
    _closed_for: int = 0
    _next_pause: int = 0

    def __post_init__(self) -> None:
        self._drafted = collections.deque(maxlen=self.trial)
        self._next_pause = self.pause

    @property
    def is_open(self) -> bool:
        """Whether drafting is on at the moment."""
        return self._closed_for <= 0

    def choose(self) -> int:
        if self.n_max == 0 or not self.is_open or len(self._plain) < 3:
            return 0
        return 0 if self._steps % self.refresh == self.refresh - 1 else self.n_max

    def record(self, asked: int, n_drafted: int, n_gained: int, seconds: float) -> None:
        self._steps += 1
        if n_drafted == 0:
            # A drafter that looked and found nothing has cost time too, but belongs to neither side.
            if asked == 0:
                self._plain.append(seconds / max(1, n_gained))
            if not self.is_open:
                self._closed_for -= n_gained
            return
        self._drafted.append((n_gained, seconds))
        if len(self._drafted) == self.trial:
            self._judge()

    def _judge(self) -> None:
        gained = sum(n for n, _ in self._drafted)
        # A step that the system interrupted says nothing about drafting, just as the median of the plain ones forgets it.
        most = _STALLED * statistics.median(s for _, s in self._drafted)
        cost = sum(min(s, most) for _, s in self._drafted) / max(1, gained)
        if cost > statistics.median(self._plain):
            self._closed_for = self._next_pause
            self._next_pause = min(2 * self._next_pause, self.longest_pause)
            self._drafted.clear()
        else:
            self._next_pause = self.pause
