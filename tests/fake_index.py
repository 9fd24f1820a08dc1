"""A package index on loopback that pip takes for a real one, and the small packages in it."""

from __future__ import annotations

import contextlib
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def wheel(name: str, members: Mapping[str, bytes], version: str = "1.0") -> bytes:
    """A wheel of ``name`` (a Python identifier) that holds ``members``, stored uncompressed."""
    info = f"{name}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return buffer.getvalue()


@dataclass
class FakeIndex:
    """What the server serves and what it was asked. Change it while it runs.

    ``status``: sent instead of every answer when it is not 200. ``hold_after``: bytes of a wheel that go out before
    the rest waits for ``go_on``; ``holding`` is set while it waits.
    """

    url: str = ""
    packages: dict[str, bytes] = field(default_factory=dict)  # by name, underscores
    requests: list[str] = field(default_factory=list)
    status: int = 200
    hold_after: int | None = None
    holding: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@contextmanager
def running() -> Iterator[FakeIndex]:
    """A FakeIndex on a free port of 127.0.0.1."""
    index = FakeIndex()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": index}))
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    index: FakeIndex

    def do_GET(self) -> None:
        index = self.index
        index.requests.append(self.path)
        kind, _, rest = self.path.strip("/").partition("/")
        name = rest.partition("-1.0-py3")[0].strip("/").replace("-", "_")
        if index.status != 200 or name not in index.packages:
            self._start(404 if index.status == 200 else index.status, 0, "text/html")
        elif kind == "simple":
            file = f"{name}-1.0-py3-none-any.whl"
            page = f'<!DOCTYPE html><html><body><a href="/files/{file}">{file}</a></body></html>'.encode()
            self._start(200, len(page), "text/html")
            self.wfile.write(page)
        else:
            content = index.packages[name]
            self._start(200, len(content), "application/octet-stream")
            if index.hold_after is not None:
                self.wfile.write(content[: index.hold_after])
                self.wfile.flush()
                index.holding.set()
                index.go_on.wait()
                content = content[index.hold_after :]
            with contextlib.suppress(OSError):  # the reader may have been killed while we held it
                self.wfile.write(content)

    def _start(self, status: int, n_bytes: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(n_bytes))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
