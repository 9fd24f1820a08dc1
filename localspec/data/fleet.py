"""Many requests at once, spread over several endpoints: who is free takes the next one; who fails is waited for with growing
patience, and left out when that is at its end. What it had been asked goes to the others."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.data.endpoints import Answer, Ask, BusyError, Endpoint, RefusedError


@dataclass(frozen=True, slots=True)
class Patience:
    """Tries for one request, seconds before the second one (doubled each time), seconds that a full server is waited for,
    requests in a row that a server may refuse."""

    n_tries: int = 6
    first_wait: float = 1.0
    full_s: float = 1800.0
    n_refused: int = 5


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to what was asked under this number."""

    number: int
    endpoint: Endpoint
    answer: Answer


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked under this number is not to be had."""

    number: int
    endpoint: Endpoint
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """This endpoint is asked nothing any more."""

    endpoint: Endpoint
    reason: str


Event = Answered | Refused | Lost


class Fleet:
    """Endpoints at work, each with `n_each` requests in flight. Close it when done; what is in flight then is lost."""

    def __init__(self, endpoints: Sequence[Endpoint], n_each: int, patience: Patience | None = None):
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        self._asked: deque[tuple[int, Ask]] = deque()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._states = [_State(endpoint) for endpoint in endpoints]
        for state in self._states:
            for _ in range(n_each):
                # Daemons: a server that never answers must not keep the process from ending.
                threading.Thread(target=self._work, args=(state,), daemon=True).start()

    @property
    def n_alive(self) -> int:
        """Endpoints that still work."""
        return sum(not state.lost.is_set() for state in self._states)

    def ask(self, number: int, ask: Ask) -> None:
        """Have somebody answer this."""
        with self._changed:
            self._asked.append((number, ask))
            self._changed.notify()

    def get(self, timeout: float) -> Event | None:
        """What happened next; None: nothing in so many seconds."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def drop(self, endpoint: Endpoint, reason: str) -> None:
        """Leave an endpoint out."""
        for state in self._states:
            if state.endpoint is endpoint:
                self._lose(state, reason)

    def close(self) -> None:
        """Ask nothing more."""
        self._closed.set()
        for state in self._states:
            state.lost.set()
        with self._changed:
            self._asked.clear()
            self._changed.notify_all()

    # -- threads -----------------------------------------------------------------------------------------------------------

    def _work(self, state: _State) -> None:
        while True:
            with self._changed:
                while not self._asked and not state.lost.is_set():
                    self._changed.wait()
                if state.lost.is_set():
                    return
                number, ask = self._asked.popleft()
            event = self._try(state, number, ask)
            if event is not None:
                self._events.put(event)
                continue
            with self._changed:  # somebody else's now
                if not self._closed.is_set():
                    self._asked.appendleft((number, ask))
                    self._changed.notify_all()

    def _try(self, state: _State, number: int, ask: Ask) -> Event | None:
        """Answered or Refused; None where the endpoint is lost, or all is over."""
        began, n_full = time.monotonic(), 0
        n_failed = n_alone = 0  # failures; those between which others were answered: the request's fault, it seems
        n_answered = -1  # at the last failure
        while not state.lost.is_set():
            try:
                answer = state.endpoint.answer(ask)
            except RefusedError as error:
                state.n_refused += 1
                if not error.all_of_it and state.n_refused < self._patience.n_refused:
                    return Refused(number, state.endpoint, str(error))
                self._lose(state, str(error))
            except BusyError as error:
                n_full += error.full
                n_failed += not error.full
                n_alone += not error.full and -1 < n_answered < state.n_answered
                n_answered = state.n_answered
                if n_alone >= self._patience.n_tries:
                    return Refused(number, state.endpoint, str(error))
                too_full = error.full and time.monotonic() - began > self._patience.full_s
                if too_full or n_failed - n_alone >= self._patience.n_tries:
                    tries = f" ({n_failed} tries)" if n_failed > 1 else ""
                    self._lose(state, f"{error}{tries}")
                    continue
                wait = self._patience.first_wait * 2.0 ** min(5, n_failed + n_full - 1)
                state.lost.wait(max(error.wait, wait))
            else:
                state.n_answered += 1
                state.n_refused = 0
                return Answered(number, state.endpoint, answer)
        return None

    def _lose(self, state: _State, reason: str) -> None:
        with self._changed:
            if state.lost.is_set():
                return
            state.lost.set()
            self._changed.notify_all()
        self._events.put(Lost(state.endpoint, reason))


class _State:
    """An endpoint as the threads that ask it see it."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.lost = threading.Event()
        self.n_answered = 0
        self.n_refused = 0  # in a row
