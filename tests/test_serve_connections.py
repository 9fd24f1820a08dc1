"""Connections that send no request: they shut nobody out, and are closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localspec.serve.connections import Limited, protocol

HALF = b"POST /v1/chat"
WHOLE = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(body)(scope, receive, send)


class Asked:
    """A client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def says(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """(status, body); 0 where the connection was closed without one."""
        head = b""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)
        if not head:
            return 0, b""
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await self.reader.readexactly(length)


Connect = Callable[[], Awaitable[Asked]]


def served(use: Callable[[Connect], Awaitable[None]], head_s: float, most_waiting: int = 300, most: int = 50) -> None:
    """A server with these limits while `use` runs, which gets what opens a connection to it."""

    async def run() -> None:
        made = protocol(head_s, most_waiting)
        config = uvicorn.Config(Limited(echo, most), port=0, lifespan="off", log_config=None, http=made, ws="none")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        opened: list[Asked] = []

        async def connect() -> Asked:
            opened.append(Asked(*await asyncio.open_connection("127.0.0.1", port)))
            return opened[-1]

        try:
            await use(connect)
        finally:
            for asked in opened:
                asked.writer.close()
            server.should_exit = True
            await task

    asyncio.run(run())


def test_idle_connections_are_no_requests() -> None:
    async def use(connect: Connect) -> None:
        idle = [await connect() for _ in range(60)]
        for asked in idle:
            await asked.says(HALF)
        other = await connect()
        for _ in range(2):
            await other.says(WHOLE)
            assert await other.answer() == (200, b"hi")
        await idle[0].says(b" HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nho")  # late, but not too late
        assert await idle[0].answer() == (200, b"ho")

    served(use, 60)


def test_a_head_that_does_not_end_closes_the_connection() -> None:
    async def use(connect: Connect) -> None:
        silent, dripping, again = [await connect() for _ in range(3)]
        await again.says(WHOLE)
        assert await again.answer() == (200, b"hi")
        await again.says(HALF)  # a second request's
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in WHOLE[:30]:
                await dripping.says(bytes([byte]))
                await asyncio.sleep(0.1)
                if dripping.reader.at_eof():
                    break
        for asked in (silent, dripping, again):
            assert await asked.answer() == (0, b"")
        assert time.monotonic() - begun >= 0.5

    served(use, 0.6)


def test_a_body_may_take_longer() -> None:
    async def use(connect: Connect) -> None:
        slow = await connect()
        await slow.says(WHOLE[:-1])
        await asyncio.sleep(1)
        await slow.says(WHOLE[-1:])
        assert await slow.answer() == (200, b"hi")

    served(use, 0.3)


def test_the_longest_waiting_makes_room() -> None:
    async def use(connect: Connect) -> None:
        waiting = [await connect() for _ in range(5)]
        assert await waiting[0].answer() == (0, b"")
        for asked in waiting[2:]:
            await asked.says(WHOLE)
            assert await asked.answer() == (200, b"hi")

    served(use, 60, most_waiting=3)


def test_refusals_are_json() -> None:
    async def use(connect: Connect) -> None:
        busy, refused, odd = [await connect() for _ in range(3)]
        await busy.says(WHOLE[:-1])
        while True:  # until the first one is in work
            await refused.says(WHOLE)
            status, body = await refused.answer()
            if status == 503:
                break
        assert json.loads(body)["error"]["code"] == "overloaded"
        await busy.says(b"i")
        assert await busy.answer() == (200, b"hi")
        await odd.says(b"\x00\x01 nonsense\r\n\r\n")
        status, body = await odd.answer()
        assert (status, json.loads(body)["error"]["message"]) == (400, "this is no HTTP request")

    served(use, 60, most=1)
