"""The cost curve: the time of one target decode of n tokens, t(n), and what it says about drafting.

For each n the median of several decodes is taken; the sizes are visited in turn, round after round, so that a machine
that slows down for a while touches all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.errors import UsageError
from localspec.target import TargetSession

DEFAULT_SIZES = (*range(1, 17), 32)


@dataclass(frozen=True, slots=True)
class Curve:
    """t(n) in milliseconds for each n (the first is 1)."""

    n: tuple[int, ...]
    ms: tuple[float, ...]

    @property
    def ratio(self) -> tuple[float, ...]:
        """t(n)/t(1)."""
        return tuple(ms / self.ms[0] for ms in self.ms)

    @property
    def ceiling(self) -> tuple[float, int]:
        """(the largest n over t(n)/t(1), that n): what a free, perfect draft would give with the best block."""
        return max((n / ratio, n) for n, ratio in zip(self.n, self.ratio))

    def as_json(self) -> dict[str, Any]:
        """n, ms, ratio, ceiling."""
        best, at = self.ceiling
        return {"n": list(self.n), "ms": list(self.ms), "ratio": list(self.ratio), "ceiling": best, "ceiling_n": at}


def measure_curve(
    session: TargetSession,
    sizes: Sequence[int] = DEFAULT_SIZES,
    n_context: int = 128,
    rounds: int = 7,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Curve:
    """Measure t(n) after `n_context` tokens in sequence 0, with logits for every row, as verification needs them."""
    if n_context + max(sizes) > session.n_ctx:
        raise UsageError(f"{n_context} tokens of context and a block of {max(sizes)} need a larger --ctx-size")
    vocabulary = session.model.n_vocab
    text = [(7919 * i + 13) % vocabulary for i in range(n_context + max(sizes))]
    times: dict[int, list[float]] = {n: [] for n in sizes}
    session.prefill(0, text[:n_context])
    for turn in range(rounds + 1):
        for n in sizes:
            began = time.perf_counter()
            session.decode([(0, text[n_context : n_context + n])])
            if turn > 0:  # the first round warms up
                times[n].append(1e3 * (time.perf_counter() - began))
            session.rollback(0, n_context)
        progress(turn + 1, rounds + 1)
    return Curve(tuple(sizes), tuple(statistics.median(times[n]) for n in sizes))
