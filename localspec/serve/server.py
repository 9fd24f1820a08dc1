"""Runs the application: the socket, the signals, and an orderly end."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from localspec import native
from localspec.errors import UsageError
from localspec.serve.connections import Limited, protocol
from localspec.serve.worker import Worker

#: beyond the grace for texts in work: what clients need to read the last of them
_LAST_BYTES_S = 2
#: a decode can't be interrupted; a batch of a long prompt takes this long at most on any machine of use
_LAST_DECODE_S = 30.0
_BACKLOG = 128
#: beyond those that the worker takes: for /health, for bodies on their way, and for telling that the queue is full
_MORE_REQUESTS = 64


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: a free one), not listening yet.

    Raises UsageError: the port is in use or not allowed, the host is none of ours.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host}: no such address ({getattr(error, 'strerror', None) or error})") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _unusable(f"{host}:{port}", error) from error
    return sock


def listen(sock: socket.socket) -> None:
    """Accept connections from now on. Raises UsageError where another server, starting at the same time, was faster."""
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        raise _unusable(url(sock), error) from error


def _unusable(where: str, error: OSError) -> UsageError:
    return UsageError(f"{where} can't be used: {error.strerror or error}; give another --port")


def url(sock: socket.socket) -> str:
    """Where the server is found."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours are in place, and the exit code is ours, too


def run(app: Any, worker: Worker, sock: socket.socket, grace: float, ready: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGINT or SIGTERM, then let what runs end within `grace` seconds. Returns the exit code: 0, or 130 where
    a second SIGINT cut that short. `ready` is called when connections and signals are waited for."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # clients that go away are no news; bugs the app logs
    server = _Server(
        uvicorn.Config(
            Limited(app, _MORE_REQUESTS + worker.n_most), lifespan="off", log_config=None, access_log=False,
            server_header=False, http=protocol(), ws="none", backlog=_BACKLOG, timeout_keep_alive=5,
            timeout_graceful_shutdown=int(grace) + _LAST_BYTES_S,
        )
    )  # fmt: skip
    code = 0

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal code
        if server.should_exit and number == signal.SIGINT:
            code = 130
            worker.close(0)
            server.force_exit = True
        elif not server.should_exit:
            worker.close(grace)
            server.should_exit = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    native.unbound()  # not on the one CPU to which loading llama.cpp has bound this thread
    worker.start()
    try:
        listen(sock)
        ready()
        server.run([sock])
    finally:
        worker.close(0)
        worker.join(_LAST_DECODE_S)
        for number, handler in before.items():
            signal.signal(number, handler)
    return code
