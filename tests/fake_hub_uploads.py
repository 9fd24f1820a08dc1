"""The side of the fake hub that takes files: repositories are made, large files go to a store, commits name them.

As huggingface-hub asks for it without hf-xet: POST repos/create, validate-yaml, preupload, info/lfs/objects/batch, commit,
and PUT to the store. Writing needs the token; ``read_only`` is told 403.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_hub import FakeHub, Repo

_CHUNK = 1 << 16


class Uploads:
    """What a request handler of the fake hub inherits for POST and PUT."""

    hub: FakeHub
    path: str
    headers: Any
    rfile: Any
    command: str
    close_connection: bool
    _read = False

    def find(self, kind: str, name: str) -> Repo | None:
        raise NotImplementedError

    def send_json(self, body: Any, status: int = 200) -> None:
        raise NotImplementedError

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        raise NotImplementedError

    def handle_one_request(self) -> None:
        self._read = False
        super().handle_one_request()  # type: ignore[misc]

    def read_body(self) -> bytes:
        """The request's body, once: b"" after that."""
        if self._read or self.command not in ("POST", "PUT"):
            return b""
        self._read = True
        n = int(self.headers.get("content-length") or 0)
        held = self.hub.hold_upload_after
        body = b""
        while len(body) < n:
            if self.command == "PUT" and held is not None and len(body) >= held:
                self.hub.holding.set()
                self.hub.go_on.wait()
                held = None
            chunk = self.rfile.read(min(_CHUNK, n - len(body), *([held - len(body)] if held is not None else [])))
            if not chunk:  # the sender is gone
                self.close_connection = True
                raise ConnectionError
            body += chunk
        return body

    def take_upload(self, path: str) -> bool:
        """Answer a POST or PUT; False where there is nothing at `path`."""
        if path.startswith("/store/"):  # signed addresses: no token is asked for, and none must come
            assert "authorization" not in self.headers
            return self._store(path.removeprefix("/store/"))
        given = self.headers.get("authorization")
        if given not in (f"Bearer {self.hub.token}", f"Bearer {self.hub.read_only}"):
            self._send(401, b"", {"X-Error-Message": "Invalid username or password."})
            return True
        if path == "/api/validate-yaml":
            card = json.loads(self.read_body())["content"]
            errors = [{"message": "no such license"}] if 'license: "nonsense"' in card else []
            self.send_json({"warnings": [{"message": "it lacks this"}], "errors": errors}, 400 if errors else 200)
            return True
        if given != f"Bearer {self.hub.token}":
            self._send(403, b"", {"X-Error-Message": f"No rights to write. You said {given}"})
            return True
        if path == "/api/repos/create":
            return self._create(json.loads(self.read_body()))
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/(preupload|commit)/main", path):
            repo = self.find(match[1], match[2])
            if repo is None:
                return False
            return self._preupload(repo) if match[3] == "preupload" else self._commit(repo, match[2])
        if re.fullmatch(r"/(?:datasets/)?[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            return self._batch()
        return False

    def _create(self, wanted: dict[str, Any]) -> bool:
        from tests.fake_hub import Repo

        kind, name = wanted.get("type") or "model", f"{wanted['organization']}/{wanted['name']}"
        key = f"datasets/{name}" if kind == "dataset" else name
        if self.find(kind, name) is not None:
            self.send_json({"error": "You already created this repo", "url": f"{self.hub.url}/{key}"}, 409)
            return True
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repos[key] = Repo({}, private, kind=kind)
        self.send_json({"url": f"{self.hub.url}/{key}", "id": name, "name": name})
        return True

    def _preupload(self, repo: Repo) -> bool:
        from tests.fake_hub import is_large

        files = []
        for file in json.loads(self.read_body())["files"]:
            name, old = file["path"], repo.files.get(file["path"])
            mode, oid = "lfs" if is_large(name) else "regular", None
            if old is not None:
                whole = f"blob {len(old)}\0".encode() + old
                oid = hashlib.sha256(old).hexdigest() if mode == "lfs" else hashlib.sha1(whole).hexdigest()
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": name in self.hub.ignored, "oid": oid})
        self.send_json({"files": files})
        return True

    def _batch(self) -> bool:
        objects = []
        for one in json.loads(self.read_body())["objects"]:
            objects.append({"oid": one["oid"], "size": one["size"]})
            if one["oid"] not in self.hub.objects:
                objects[-1]["actions"] = {"upload": {"href": f"{self.hub.url}/store/{one['oid']}"}}
        self.send_json({"transfer": "basic", "objects": objects})
        return True

    def _store(self, oid: str) -> bool:
        with contextlib.suppress(ConnectionError):
            content = self.read_body()
            good = hashlib.sha256(content).hexdigest() == oid
            if good:
                self.hub.objects[oid] = content
            self._send(200 if good else 400, b"", {})
        self.hub.requests.append("end of PUT")
        return True

    def _commit(self, repo: Repo, name: str) -> bool:
        lines = [json.loads(line) for line in self.read_body().splitlines()]
        for line in lines[1:]:
            value = line["value"]
            content = self.hub.objects[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])
            repo.files[value["path"]] = content
        repo.commit = hashlib.sha1(repo.commit.encode() + repr(lines).encode()).hexdigest()
        self.send_json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.commit}", "commitOid": repo.commit})
        return True
