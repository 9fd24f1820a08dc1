"""How likely a drafted token is to be kept, learnt from what became of others. Pure arithmetic.

Two looks at the same thing. Before anything is drafted only the place in the block is known: `ByPosition`. Once tokens are
there, the draft has said how sure it was of each: `Calibration` turns that into a frequency, whatever it was (a
probability, the length of a match, a head's own estimate): a draft of 0.9 that is kept half of the time counts as 0.5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 96.0  # observations that count: what came before fades
_PRIOR = 0.6  # a draft's first token before anything is known: worth a try
_WEIGHT = 2.0  # of the prior, in observations
_LEAN = 8.0  # of the place before
_FURTHER = 0.98  # of the chance, with each place
_SEED = 8.0  # observations that what an earlier run knew counts for
_SEEN = 8  # observations of a range, before a later run is told of it


@dataclass
class Rate:
    """A frequency that forgets."""

    prior: float
    hits: float = 0.0
    seen: float = 0.0

    def add(self, hit: bool) -> None:
        if self.seen >= _MEMORY:
            keep = (_MEMORY - 1) / self.seen
            self.hits *= keep
            self.seen *= keep
        self.hits += hit
        self.seen += 1

    @property
    def value(self) -> float:
        return self.against(self.prior, _WEIGHT)

    def against(self, prior: float, weight: float) -> float:
        """The frequency, with so many observations of `prior` added."""
        return (self.hits + prior * weight) / (self.seen + weight)


@dataclass
class ByPosition:
    """The chance of the j-th drafted token, given that those before it were kept. Later places are seen less often, and are
    alike: each leans on the one before it."""

    _rates: list[Rate] = field(default_factory=list)

    @classmethod
    def begun(cls, chances: Sequence[float]) -> ByPosition:
        """With what an earlier run knew, by position."""
        return cls([Rate(_PRIOR, _SEED * chance, _SEED) for chance in chances])

    def chance(self, j: int) -> float:
        """Of position j, from 0. Beyond what was tried: that of the last one known, a little less each."""
        known = self.values()
        last = known[-1] if known else _PRIOR
        return known[j] if j < len(known) else float(last * _FURTHER ** (j - len(known) + bool(known)))

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """A block: its first n_accepted tokens were kept, the next one, if there was one, was not."""
        for j in range(min(n_drafted, n_accepted + 1)):
            if j == len(self._rates):
                self._rates.append(Rate(_PRIOR))
            self._rates[j].add(j < n_accepted)

    def values(self) -> list[float]:
        """All that is known, by position."""
        found: list[float] = []
        for rate in self._rates:
            found.append(rate.against(found[-1] * _FURTHER, _LEAN) if found else rate.value)
        return found


_MOOD_KEPT = 0.8  # from a step to the next
_MOOD_WEIGHT = 2.0  # of no mood, in first tokens
_BAD_MOOD = 0.8  # from which on it counts


class Mood:
    """Of a text, of late: a draft that was wrong several times in a row is likelier to be wrong again (SmolLM2 at a
    temperature of 0.8: the first token is kept in .53 of the blocks, in .33 to .44 of those after three to five refusals, in
    .22 to .3 later). `factor`: times the chance of a block's first token."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._kept = self._expected = 0.0

    def record(self, expected: float, kept: bool) -> None:
        """A block whose first token had this chance; 0 where none was verified."""
        self._kept = self._kept * _MOOD_KEPT + kept
        self._expected = self._expected * _MOOD_KEPT + expected
        factor = (self._kept + _MOOD_WEIGHT) / (self._expected + _MOOD_WEIGHT)
        self.factor = factor if factor < _BAD_MOOD else 1.0


_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_MIDDLES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.97, 0.995)


class Calibration:
    """How often a token was kept (those before it kept, too), by the confidence that its draft had in it."""

    def __init__(self, begun: Sequence[float | None] = ()) -> None:
        """`begun`: what `known` of an earlier run was."""
        self._rates = [Rate(middle) for middle in _MIDDLES]
        for rate, chance in zip(self._rates, begun):
            if chance is not None:
                rate.hits, rate.seen = _SEED * chance, _SEED
        self._chances = [rate.value for rate in self._rates]  # it is asked for more often than it changes

    def chance(self, confidence: float) -> float:
        """Of a token with this confidence."""
        return self._chances[bisect_right(_EDGES, confidence)]

    def record(self, confidence: float, kept: bool) -> None:
        """One token that was judged."""
        bucket = _bucket(confidence)
        self._rates[bucket].add(kept)
        self._chances[bucket] = self._rates[bucket].value

    def threshold(self, chance: float) -> float:
        """The lowest confidence from which on tokens have at least this chance; 1.0 where none has."""
        low = 1.0
        for bucket in range(len(self._rates) - 1, -1, -1):
            if self._rates[bucket].value < chance:
                break
            low = _EDGES[bucket - 1] if bucket else 0.0
        return low

    def known(self) -> tuple[float | None, ...]:
        """The chance in each range of confidence that was seen often enough, None for the others."""
        return tuple(rate.value if rate.seen >= _SEEN else None for rate in self._rates)

    def table(self) -> list[tuple[float, float, int]]:
        """(confidence, chance, observations that count) of each range."""
        return [(middle, rate.value, round(rate.seen)) for middle, rate in zip(_MIDDLES, self._rates)]


def _bucket(confidence: float) -> int:
    return bisect_right(_EDGES, confidence)
