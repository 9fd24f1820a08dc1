"""Connections before and after their requests: who sends no request is shown out, and does not count as one.

uvicorn's own limit counts connections: as many as it allows, opened and left idle, would shut everybody out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.serve.answers import to_json
from localspec.serve.schema import ApiError

#: seconds in which a request's head must be there, whole; what a client sends at once is there in one
HEAD_S = 15.0
#: connections that may wait for their heads: beyond, the one that has waited longest makes room
MOST_WAITING = 256


def protocol(head_s: float = HEAD_S, most_waiting: int = MOST_WAITING) -> type[H11Protocol]:
    """A protocol class for one uvicorn.Config."""
    waiting: dict[_Connection, None] = {}  # oldest first
    return type("Connection", (_Connection,), {"head_s": head_s, "most_waiting": most_waiting, "waiting": waiting})


class _Connection(H11Protocol):
    head_s: float
    most_waiting: int
    waiting: dict[_Connection, None]
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._wait_no_more()
        elif self._late is None:  # the beginning of another request
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in the form of our other errors."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(ApiError(400, "this is no HTTP request", "invalid_request_error").body())
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            for event in (h11.Response(status_code=400, headers=headers, reason="Bad Request"), h11.Data(data=body)):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait(self) -> None:
        self._late = self.loop.call_later(self.head_s, self.transport.close)
        self.waiting[self] = None
        if len(self.waiting) > self.most_waiting:
            oldest = next(iter(self.waiting))
            oldest._wait_no_more()
            oldest.transport.close()

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self.waiting.pop(self, None)


class Limited:
    """An application that has at most `most` requests in work; of more it says so with a 503."""

    def __init__(self, app: ASGIApp, most: int):
        self._app, self._most, self._n = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._n >= self._most and scope["type"] == "http":
            error = ApiError(503, "too many requests at once; try again later", "server_error", code="overloaded")
            headers: dict[str, Any] = {"connection": "close", "retry-after": "1"}
            await Response(to_json(error.body()), 503, headers, "application/json")(scope, receive, send)
            return
        self._n += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n -= 1
