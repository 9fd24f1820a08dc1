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
from urllib.parse import parse_qs

import yaml

from tests.fake_hub_uploads import Uploads

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repo:
    """One repository: files by name, and who may read it (``gated``: listed for all, read with the token).

    It answers as a model and as a data set, unless ``kind`` ("model", "dataset") says which it is; the data set's name in
    FakeHub.repos may begin with ``datasets/``. ``lie``: the SHA-256 that is told of its large files.
    """

    files: dict[str, bytes]
    private: bool = False
    gated: bool = False
    kind: str = ""
    commit: str = COMMIT
    downloads: int = 0
    lie: str = ""


@dataclass
class FakeHub:
    """What the server serves and what it was asked. Change it while it runs.

    ``cut_after``: bytes of a file that go out before the connection is closed, ``cuts`` times.
    ``hold_after``: bytes of a file that go out before the rest waits for ``go_on``. ``hold_upload_after``: bytes of a large
    file that come in before the rest does (``holding`` is set then).
    ``broken``: None, a status that every request gets, "login-page" or "odd-names"; only those with ``broken_at`` in
    their path.
    ``ranges``: where the parts of files began that were asked for. ``ignored``: files that a commit leaves out.
    ``objects``: what lies in the store of large files, by SHA-256; a commit alone puts it into a repository.
    """

    url: str = ""
    token: str = "hf_right"
    read_only: str = "hf_reader"
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken: int | str | None = None
    broken_at: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    cut_after: int = 0
    cuts: int = 0
    hold_after: int | None = None
    hold_upload_after: int | None = None
    holding: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    ranges: list[int] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)


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


def is_large(name: str) -> bool:
    """Whether the hub keeps a file of this name apart, known by its SHA-256."""
    return name.endswith((".gguf", ".safetensors"))


def card_data(repo: Repo) -> dict[str, Any]:
    """The front matter of a repository's README, as the hub reads it."""
    text = repo.files.get("README.md", b"").decode()
    found = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}
    return found if isinstance(found, dict) else {}


class _Handler(Uploads, BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.broken_at not in path:
            self._sound(path)
        elif isinstance(self.hub.broken, int):
            self._send(self.hub.broken, b"in trouble", {})
        elif self.hub.broken == "odd-names":
            self.send_json({"id": "user/repo", "sha": COMMIT, "siblings": [{"rfilename": 5}]})
        elif self.hub.broken:
            self._send(200, b"<html>Please log in to the hotel's network</html>", {"Content-Type": "text/html"})
        else:
            self._sound(path)

    def _sound(self, path: str) -> None:
        """Answer as a hub without troubles does."""
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/(?:main|[0-9a-f]{40}))?", path):
            self._info(match[1], match[2])
        elif path == "/api/models" and self.command == "GET":
            self._search()
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/(?:main|[0-9a-f]{40})/(.+)", path):
            self._file("dataset" if match[1] else "model", match[2], match[3])
        elif self.command not in ("POST", "PUT") or not self.take_upload(path):
            self._send(404, b"", {})

    def find(self, kind: str, name: str) -> Repo | None:
        """The repository of that kind and name."""
        for key in ("datasets/" + name,) * (kind == "dataset") + (name,):
            if (repo := self.hub.repos.get(key)) is not None and repo.kind in ("", kind):
                return repo
        return None

    def _may_read(self, kind: str, name: str, for_file: bool) -> Repo | None:
        """The repository, or None after the refusal was sent."""
        repo = self.find(kind, name)
        given = self.headers.get("authorization")
        authorised = given in (f"Bearer {self.hub.token}", f"Bearer {self.hub.read_only}")
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

    def _info(self, kind: str, name: str) -> None:
        repo = self._may_read(kind, name, for_file=False)
        if repo is not None:
            siblings = []
            for file, content in repo.files.items():
                blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
                siblings.append({"rfilename": file, "size": len(content), "blobId": blob})
                if is_large(file):
                    sha256 = repo.lie or hashlib.sha256(content).hexdigest()
                    siblings[-1]["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            body = {"id": name, "sha": repo.commit, "private": repo.private, "gated": repo.gated, "siblings": siblings}
            self.send_json(body)

    def _search(self) -> None:
        wanted = set(parse_qs(self.path.partition("?")[2]).get("filter", ()))
        found = []
        for name, repo in self.hub.repos.items():
            card = card_data(repo)
            tags = card.get("tags", [])
            if repo.kind != "dataset" and not repo.private and wanted <= set(tags):
                found.append({"id": name, "tags": tags, "cardData": card, "downloads": repo.downloads, "private": False})
        self.send_json(found)

    def send_json(self, body: Any, status: int = 200) -> None:
        self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, kind: str, name: str, file: str) -> None:
        repo = self._may_read(kind, name, for_file=True)
        if repo is None:
            return
        if file not in repo.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            return
        content = repo.files[file]
        headers = {
            "X-Repo-Commit": repo.commit,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "")):
            start = int(match[1])
            self.hub.ranges.append(start)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self._send(status, content, headers, may_cut=True)

    def _send(self, status: int, body: bytes, headers: dict[str, str], may_cut: bool = False) -> None:
        self.read_body()  # also of a request that is refused: the next one on this connection begins behind it
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
