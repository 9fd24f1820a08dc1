"""One request's events on their way from the worker's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from localspec.serve.worker import Event, Text


class Outbox:
    """A queue that the worker fills without ever waiting and a coroutine empties.

    A reader that falls behind by more than `limit` characters has lost its text: `broken` is set and nothing more is kept.
    """

    def __init__(self, limit: int | None = None):
        self.broken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._limit = limit
        self._held = 0

    def deliver(self, event: Event) -> None:
        """For the worker's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event) -> None:
        if self.broken.is_set():
            return
        if isinstance(event, Text):
            self._held += len(event.text)
            if self._limit is not None and self._held > self._limit:
                self.broken.set()
                return
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """The next event."""
        event = await self._queue.get()
        if isinstance(event, Text):
            self._held -= len(event.text)
        return event
