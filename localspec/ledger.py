"""What was lost against plain decoding. Pure arithmetic."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Plain steps whose time was lost, all together, and their largest rise over the tokens of a window, of each text."""

    total: float = 0.0
    tokens: float = 0.0
    # (tokens, total) before each step of the window, only those with the lowest totals so far from their place on
    _lows: collections.deque[tuple[float, float]] = field(default_factory=collections.deque)

    def add(self, gained: float, lost: float, window: int) -> None:
        while self._lows and self._lows[-1][1] >= self.total:
            self._lows.pop()
        self._lows.append((self.tokens, self.total))
        self.tokens += gained
        self.total += lost
        while len(self._lows) > 1 and self._lows[0][0] < self.tokens - window:
            self._lows.popleft()

    @property
    def rise(self) -> float:
        return max(0.0, self.total - self._lows[0][1]) if self._lows else 0.0

    def left(self, window: int) -> float:
        """Tokens of the window that began where the rise did, which are still to come."""
        return max(0.0, window - (self.tokens - self._lows[0][0])) if self._lows else float(window)
