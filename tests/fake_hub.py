"""A hub on loopback that huggingface-hub takes for the real one, with the troubles that the real one has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repo:
    """One model repository: files by name, and who may read it (``gated``: listed for all, read with the token)."""

    files: dict[str, bytes]
    private: bool = False
    gated: bool = False


@dataclass
class FakeHub:
    """What the server serves and what it was asked. Change it while it runs.

    ``cut_after``: bytes of a file that go out before the connection is closed, ``cuts`` times.
    ``hold_after``: bytes of a file that go out before the rest waits for ``go_on``.
    ``broken``: None, a status that every request gets, or "login-page".
    """

    url: str = ""
    token: str = "hf_right"
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken: int | str | None = None
    cut_after: int = 0
    cuts: int = 0
    hold_after: int | None = None
    go_on: threading.Event = field(default_factory=threading.Event)


@contextmanager
def running() -> Iterator[FakeHub]:
    """A FakeHub on a free port of 127.0.0.1."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if isinstance(self.hub.broken, int):
            self._send(self.hub.broken, b"in trouble", {})
        elif self.hub.broken:
            self._send(200, b"<html>Please log in to the hotel's network</html>", {"Content-Type": "text/html"})
        elif match := re.fullmatch(rf"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/{COMMIT})?", path):
            self._info(match[1])
        elif match := re.fullmatch(rf"(?:/datasets)?/([^/]+/[^/]+)/resolve/(?:main|{COMMIT})/(.+)", path):
            self._file(match[1], match[2])
        else:
            self._send(404, b"", {})

    def _may_read(self, name: str, for_file: bool) -> Repo | None:
        """The repository, or None after the refusal was sent."""
        repo = self.hub.repos.get(name)
        given = self.headers.get("authorization")
        authorised = given == f"Bearer {self.hub.token}"
        if given and not authorised:
            message = "Invalid credentials in Authorization header"
            self._send(401, b"", {"X-Error-Message": message})
        elif repo is None or (repo.private and not authorised):
            # Without a token the hub answers 401 for what does not exist, too.
            self._send(404 if authorised else 401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo.gated and for_file and not authorised:
            self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        else:
            return repo
        return None

    def _info(self, name: str) -> None:
        repo = self._may_read(name, for_file=False)
        if repo is not None:
            siblings = [{"rfilename": file, "size": len(content)} for file, content in repo.files.items()]
            body = {"id": name, "sha": COMMIT, "private": repo.private, "gated": repo.gated, "siblings": siblings}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, file: str) -> None:
        repo = self._may_read(name, for_file=True)
        if repo is None:
            return
        if file not in repo.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content = repo.files[file]
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "")):
            start = int(match[1])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self._send(status, content, headers, may_cut=True)

    def _send(self, status: int, body: bytes, headers: dict[str, str], may_cut: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if may_cut and self.hub.cuts > 0:
            self.hub.cuts -= 1
            self.hub.requests.append("cut")
            body = body[: self.hub.cut_after]
            self.close_connection = True
        if may_cut and self.hub.hold_after is not None:
            self.wfile.write(body[: self.hub.hold_after])
            self.wfile.flush()
            self.hub.go_on.wait()
            body = body[self.hub.hold_after :]
        with contextlib.suppress(OSError):  # the reader may have been interrupted while we held it
            self.wfile.write(body)
