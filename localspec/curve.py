"""The cost curve: the time of one target decode of n tokens, t(n), and what it says about drafting.

For each n the median of several decodes is taken; the sizes are visited in turn, round after round, so that a machine
that slows down for a while touches all of them alike. Two kinds of kernels are compared the same way, one round each in
turn. Kernels are registered for the life of a process, so each kind has a child process of its own.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from localspec import native
from localspec.errors import LocalspecError, UsageError
from localspec.target import TargetSession

DEFAULT_SIZES = (*range(1, 17), 32)
#: Seconds between the turns of two children: OpenMP's threads go on spinning for a while after a graph is done, and
#: would take the cores from the other child's.
PAUSE = 0.03


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


class Probe:
    """A session with `n_context` tokens in sequence 0, ready to time decodes after them.

    Each decode wants logits for every row, as verification does. Raises UsageError where the context or the batch is too
    small for the sizes, or where the model's cache can't be trimmed back to the context.
    """

    def __init__(self, session: TargetSession, sizes: Sequence[int] = DEFAULT_SIZES, n_context: int = 128):
        self.sizes = tuple(sorted({1, *sizes}))
        largest = self.sizes[-1]
        if n_context + largest > session.n_ctx:
            raise UsageError(f"{n_context} tokens of context and a block of {largest} need a larger --ctx-size")
        if largest > session.n_batch:
            raise UsageError(f"--sizes {largest}: one decode takes at most {session.n_batch} tokens")
        if not session.can_roll_back:
            raise UsageError(f"{session.model.path}: its cache can't be rolled back, so blocks can't be measured")
        self._session = session
        vocabulary = session.model.n_vocab
        self._text = [(7919 * i + 13) % vocabulary for i in range(session.n_ctx)]
        self._n_context, self._largest = n_context, largest
        began = time.perf_counter()
        session.prefill(0, self._text[:n_context])
        self.prefill_ms = 1e3 * (time.perf_counter() - began)

    def round(self) -> list[float]:
        """Milliseconds of one decode of each size."""
        self._decode(1)  # wakes the threads and brings the weights back that another process drove from the caches
        return [self._decode(n) for n in self.sizes]

    def _decode(self, n: int) -> float:
        # A recurrent state goes back as far as the first token of a block: it is one token further on after each decode.
        step = int(self._session.model.is_recurrent)
        at = len(self._session.tokens[0])
        if at + self._largest > self._session.n_ctx:
            at = self._n_context
            self._session.prefill(0, self._text[:at])
        began = time.perf_counter()
        self._session.decode([(0, self._text[at : at + n])])
        ms = 1e3 * (time.perf_counter() - began)
        if self._session.rollback(0, at + step) != at + step:
            raise UsageError(f"{self._session.model.path}: its cache can't be rolled back by {n} tokens")
        self._session.settle()
        return ms


def measure_curves(
    sides: Mapping[str, tuple[Sequence[int], Callable[[], list[float]]]],
    rounds: int = 7,
    progress: Callable[[int, int], None] = lambda done, of: None,
    pause: float = PAUSE,
) -> dict[str, Curve]:
    """One curve for each side, name -> (sizes, what measures one round of them), taken in turn, each first as often.

    A first round of each warms up. `pause` seconds lie before each turn where there is more than one side.
    """
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds + 1):
        for name in names:
            if len(names) > 1:
                time.sleep(pause)
            taken[name].append(sides[name][1]())
        names.reverse()
        progress(turn + 1, rounds + 1)
    return {
        name: Curve(tuple(sizes), tuple(statistics.median(ms) for ms in zip(*taken[name][1:])))
        for name, (sizes, _) in sides.items()
    }


class Child:
    """A process of ours that serves rounds: one JSON line when it is ready, then one for each line it is sent.

    Its own session keeps a Ctrl-C of the terminal away from it: the parent ends it. It ends by itself when its standard
    input closes. Raises LocalspecError with the child's last line where it fails.
    """

    def __init__(self, arguments: Sequence[str]):
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "localspec", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=native.unbound,
        )
        self._to = cast("IO[bytes]", self._process.stdin)
        self._from = cast("IO[bytes]", self._process.stdout)
        try:
            self.ready: dict[str, Any] = self._read()
        except BaseException:
            self.close()
            raise

    def round(self) -> list[float]:
        """Have it measure one round; milliseconds for each size."""
        try:
            self._to.write(b"round\n")
            self._to.flush()
        except BrokenPipeError:
            raise LocalspecError(self._why()) from None
        ms: list[float] = self._read()
        return ms

    def _read(self) -> Any:
        line = self._from.readline()
        if not line.endswith(b"\n"):
            raise LocalspecError(self._why())
        return json.loads(line)

    def _why(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().decode("utf-8", "replace").split("\n") if line.strip()]
        return lines[-1].rpartition("error: ")[2] if lines else f"the measuring process ended with code {code}"

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._to, self._from):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
