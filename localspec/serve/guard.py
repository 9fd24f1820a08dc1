"""Who may speak to the server through a browser: the names it answers to, and the origins that may read its answers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from localspec.errors import UsageError
from localspec.serve.answers import to_json
from localspec.serve.schema import ApiError

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_NAME = re.compile(r"\[[0-9a-f:.%]+\]|[a-z0-9_.-]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(?:\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9_.-]+)(?::[0-9]{1,5})?")


def hosts(bound: str, loopback: bool, more: Iterable[str]) -> frozenset[str] | None:
    """The names that a request may call the server by; None: any.

    `bound` is the address it listens on. On loopback a page from elsewhere, whose name was made to point to this machine
    once it was loaded (DNS rebinding), would be of one origin with the server: it comes with its own name, and is refused.
    Raises UsageError for a name that is none.
    """
    names = [name.strip().lower().rstrip(".") for name in more]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"--allowed-host '{name}': give a host's name or address alone, such as my-pc.local or [::2]")
    if not loopback and not names:
        return None
    own = f"[{bound}]" if ":" in bound else bound
    return frozenset((*_LOOPBACK, own, *names))


def check_origins(origins: Iterable[str]) -> list[str]:
    """The origins as given. Raises UsageError for one that no browser would send."""
    taken = list(origins)
    for origin in taken:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors-origin '{origin}': an origin is written http://name:port, without a path; or '*'")
    return taken


def middleware(names: frozenset[str] | None, origins: list[str]) -> list[Middleware]:
    """What stands before the application."""
    made = [] if names is None else [Middleware(_HostGuard, names=names)]
    if origins:
        made.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]))
    return made


class _HostGuard:
    """Refuses requests whose Host header names somebody else, at any port."""

    def __init__(self, app: ASGIApp, names: frozenset[str]):
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == b"host"]
        if len(given) == 1 and re.sub(r":[0-9]*$", "", given[0]).rstrip(".") in self._names:
            await self._app(scope, receive, send)
            return
        said = given[0][:60] if given else ""
        error = ApiError(
            403, f"this server does not answer to the name '{said}': start it with --allowed-host to let it",
            "invalid_request_error", code="host_not_allowed",
        )  # fmt: skip
        await Response(to_json(error.body()), 403, media_type="application/json")(scope, receive, send)
