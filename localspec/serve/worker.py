"""The thread that owns the engine: takes up jobs from a bounded queue and gives their text back as it comes. No HTTP here.

Continuous batching: every step is one decode over all texts in work; between two steps a bounded number of prompts' tokens
is computed, so that a long prompt does not hold up the others. llama.cpp and the engine are touched by this thread alone;
the others only submit, cancel and close.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from localspec import native
from localspec.drafters import Sequence as DraftSequence
from localspec.engine import Engine, Piece, Request, Stats, Step
from localspec.errors import LocalspecError
from localspec.serve.probs import Aligned
from localspec.target import common_start

log = logging.getLogger(__name__)

DEAD_END = (
    "the grammar came to a place where it allows no token of this model, and is not complete; "
    "or the text can be read in too many ways"
)
#: tokens of prompts that are computed between two steps of other texts: a fraction of a second, and enough at once that a
#: prompt is read about as fast as in one piece
PROMPT_TOKENS = 128


class QueueFullError(LocalspecError):
    """As many requests are waiting as may wait."""


class ClosingError(LocalspecError):
    """The server is being stopped, or its worker has died."""


@dataclass(frozen=True, slots=True)
class Text:
    """The next text of a job. `tokens`: those that make it, where the request asks for probabilities; the text of one may be
    empty then, never both."""

    text: str
    tokens: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job. `stop` is the engine's: eog, length, stop-string or context. `tokens`: all that were written, with
    the one that ended the text, where the job asks for them."""

    stop: str
    stats: Stats
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A job that gives no more text. `kind`: closing (the server stops), request (it can't be done), internal."""

    kind: str
    message: str


Event = Text | Done | Failed


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `deliver` gets its events, in the worker's thread: it must neither block nor raise. The last
    event is a Done or a Failed; a cancelled job may get none."""

    request: Request
    deliver: Callable[[Event], None]
    written: list[int] | None = None  # the tokens, where they are asked for
    cancelled: bool = False
    aligned: Aligned | None = None  # where probabilities are asked for


@dataclass(slots=True)
class Totals:
    """What has been done since the start, for /metrics."""

    n_done: int = 0
    n_cancelled: int = 0
    n_failed: int = 0
    n_refused: int = 0  # because the queue was full
    stats: Stats = field(default_factory=Stats)  # of what has ended


class Worker:
    """Runs jobs on an engine, as many at once as its session has sequences; `n_queue` more may wait.

    `start` begins the thread, `close` ends it. All methods may be called from any thread.
    """

    def __init__(self, engine: Engine, n_queue: int = 64):
        self._engine = engine
        self._n_slots = engine.session.settings.n_sequences
        self._n_queue = n_queue
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # slot -> job
        self._freed: list[int] = list(range(self._n_slots))  # free slots, the one longest unused first
        self._totals = Totals()
        self._deadline: float | None = None  # of time.monotonic(), once it is being closed
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="localspec-worker", daemon=True)

    # -- for other threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError or ClosingError; nothing is delivered then."""
        with self._lock:
            if self._deadline is not None or self._dead:
                raise ClosingError("the server is shutting down" if not self._dead else "the server's worker has ended")
            if len(self._waiting) + len(self._running) >= self.n_most:
                self._totals.n_refused += 1
                raise QueueFullError(
                    f"{len(self._running)} requests are being answered and {len(self._waiting)} are waiting: try again later"
                )
            self._waiting.append(job)
            self._lock.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody wants this job's text any more. Its slot is free after the step in work; what it computed is kept."""
        with self._lock:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._totals.n_cancelled += 1

    def close(self, grace: float = 0.0) -> None:
        """Take no more jobs; those that run have `grace` seconds to end, those that wait fail at once. Doesn't wait; a later
        call may shorten the time."""
        with self._lock:
            deadline = time.monotonic() + grace
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._lock.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended; returns whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def n_most(self) -> int:
        """The most jobs that it has at any time."""
        return self._n_slots + self._n_queue

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return not self._dead and self._deadline is None and self._thread.is_alive()

    def counts(self) -> tuple[int, int]:
        """(jobs in work, jobs waiting)."""
        with self._lock:
            return len(self._running), len(self._waiting)

    def totals(self) -> Totals:
        """A copy of the totals."""
        with self._lock:
            t = self._totals
            copy = Totals(t.n_done, t.n_cancelled, t.n_failed, t.n_refused)
            copy.stats.add(t.stats)
            return copy

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            native.unbound()  # the thread that loaded llama.cpp was bound to one CPU, and we inherit that
        try:
            while self._wait():
                self._drop_cancelled()
                self._take_up()
                self._step()
        except BaseException:
            log.exception("the worker has ended on an error of its own")
            raise
        finally:
            with self._lock:
                self._dead = self._deadline is None
                left = [*self._waiting, *self._running.values()]
                self._waiting.clear()
                self._running.clear()
            kind = "internal" if self._dead else "closing"
            for job in left:
                job.deliver(Failed(kind, "the server's worker has ended" if self._dead else "the server is shutting down"))

    def _wait(self) -> bool:
        """Sleep until there is work; False when the thread is to end."""
        with self._lock:
            while not self._waiting and not self._running and self._deadline is None:
                self._lock.wait()
            if self._deadline is None:
                return True
            refused = list(self._waiting)
            self._waiting.clear()
        for job in refused:
            job.deliver(Failed("closing", "the server is shutting down"))
        return bool(self._running) and not self._late()

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _drop_cancelled(self) -> None:
        for slot, job in list(self._running.items()):
            if job.cancelled:
                self._end(slot, "n_cancelled")

    def _take_up(self) -> None:
        """Compute prompts: of the text that is being read, then of waiting jobs while slots are free."""
        left = PROMPT_TOKENS
        while left > 0 and not self._late():
            slot = next((slot for slot in self._running if not self._engine.is_ready(slot)), None)
            if slot is None:
                slot = self._next()
                if slot is None:
                    return
            job = self._running[slot]
            try:
                if not any(self._engine.is_ready(other) for other in self._running):
                    left = max(left, self._engine.session.n_batch)  # nobody is held up
                left -= self._engine.read(slot, left, functools.partial(self._unwanted, job))
            except Exception as error:  # noqa: BLE001 (one request must not end the others)
                self._fail([slot], error)
            if job.cancelled:
                return

    def _unwanted(self, job: Job) -> bool:
        return job.cancelled or self._late()

    def _next(self) -> int | None:
        """Give a waiting job a free slot, if there are both."""
        while True:
            with self._lock:
                if not self._waiting or not self._freed:
                    return None
                job = self._waiting.popleft()
                held = [self._engine.session.tokens[i] for i in self._freed]
                slot = choose_slot(self._freed, held, job.request.prompt)
                self._freed.remove(slot)
                self._running[slot] = job
            if job.request.n_probs is not None:
                job.aligned = Aligned(self._engine.session.model.tokenizer)
            try:
                # The engine finds a wrong last token in the next step, together with everybody else's.
                self._engine.session.model.check_tokens(np.array(job.request.prompt, np.int64))
                return self._engine.begin(job.request, slot)
            except Exception as error:  # noqa: BLE001 (one request must not end the others)
                self._fail([slot], error)

    def _step(self) -> None:
        # A job that was cancelled while its prompt was computed has it in part only: no step may follow.
        self._drop_cancelled()
        if not self._running or self._late():
            return
        try:
            steps = self._engine.step()
        except Exception as error:  # noqa: BLE001 (the next requests may do better)
            self._fail(list(self._running), error)
            return
        for step in steps:
            self._give(step)

    def _give(self, step: Step) -> None:
        job = self._running[step.slot]
        text = "".join(piece.text for piece in step.pieces)
        tokens = () if job.aligned is None else tuple(job.aligned.take(step.pieces, text, step.stop))
        if (text or tokens) and not job.cancelled:
            job.deliver(Text(text, tokens))
        if job.written is not None:
            job.written += [piece.token for piece in step.pieces if piece.token >= 0]
        if step.stop == "grammar":
            self._end(step.slot, "n_failed")
            job.deliver(Failed("request", DEAD_END))
        elif step.stop is not None:
            job.deliver(Done(step.stop, self._end(step.slot, "n_done"), tuple(job.written or ())))

    def _end(self, slot: int, counter: str) -> Stats:
        """Let go of a slot and count what became of its job."""
        stats = Stats()
        with contextlib.suppress(KeyError):  # it may never have started
            stats = self._engine.finish(slot)
        with self._lock:
            del self._running[slot]
            self._freed.append(slot)
            self._totals.stats.add(stats)
            setattr(self._totals, counter, getattr(self._totals, counter) + 1)
        return stats

    def _fail(self, slots: Sequence[int], error: Exception) -> None:
        """End the jobs of `slots` with an error; nothing of their caches is believed any more."""
        foreseen = isinstance(error, LocalspecError)
        if not foreseen:
            log.error("a request failed", exc_info=error)
        for slot in slots:
            job = self._running[slot]
            self._end(slot, "n_failed")
            self._engine.session.rollback(slot, 0)
            if self._engine.drafter is not None:
                self._engine.drafter.rewind(DraftSequence(slot, 0, job.request.sampling), 0)
            job.deliver(Failed("request" if foreseen else "internal", str(error) if foreseen else "internal error"))


def choose_slot(free: Sequence[int], held: Sequence[list[int]], prompt: list[int]) -> int:
    """Which of the `free` slots (longest unused first, at least one) takes up `prompt`; `held[i]` is what free[i] caches.

    The one that shares the longest beginning, where that is most of the prompt or most of what the slot holds. Otherwise
    little would be saved (a system message that all slots share), and another conversation's cache lost for it: then an
    empty slot, or the one longest unused.
    """
    shared = [common_start(tokens, prompt) for tokens in held]
    best = max(range(len(free)), key=lambda i: shared[i])
    if shared[best] and 2 * shared[best] >= min(len(prompt), len(held[best])):
        return free[best]
    return free[min(range(len(free)), key=lambda i: bool(held[i]))]
