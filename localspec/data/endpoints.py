"""Servers that write answers: what is asked of them over HTTP, and what comes back. No llama.cpp here.

Three kinds are told apart by what they say of themselves at /v1/models. `localspec serve` and llama-server give the ids of
the tokens they wrote; any other server of OpenAI's API gives text and a number of tokens, from which ids must be guessed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from localspec.accept import Sampling
from localspec.errors import LocalspecError, UsageError

_MAX_BYTES = 64 << 20  # of one answer
_CONNECT_S = 10.0
_LOOK_S = 30.0
_KINDS = {"localspec": "localspec", "llamacpp": "llama-server"}


class BusyError(LocalspecError):
    """The server can't be reached, is too busy, or failed: the same request may succeed later. `wait`: seconds it asks for;
    `full`: it works, but takes no more at the moment."""

    def __init__(self, message: str, wait: float = 0.0, full: bool = False):
        super().__init__(message)
        self.wait = wait
        self.full = full


class RefusedError(LocalspecError):
    """The server does not do this. `all_of_it`: nor anything else that we would ask (a wrong key, another API)."""

    def __init__(self, message: str, all_of_it: bool):
        super().__init__(message)
        self.all_of_it = all_of_it


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to be continued by at most `max_tokens` tokens."""

    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written. `tokens`: with the end-of-generation token, where there is one; None where the server gives none.
    `ended`: by the model itself. `n_tokens`: as the server counts them, where it says."""

    tokens: list[int] | None
    text: str
    ended: bool
    n_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of its model; None: nothing."""

    name: str
    n_vocab: int | None
    n_ctx: int | None
    tokenizer_hash: str | None


@dataclass(slots=True)
class Endpoint:
    """One server. `url` with or without /v1 at its end; `key` is sent and never shown. Raises UsageError for no URL.

    Each call opens a connection of its own; any number of threads may call.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0  # seconds in which an answer must have come, whole
    kind: str = "openai"
    model: str = ""
    _parts: tuple[bool, str, int, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shown = self.url if "@" not in self.url else "..."
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--endpoint {shown}: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise UsageError("--endpoint: leave name and password out of the URL; a key goes into --endpoint-key")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"--endpoint {shown}: give a URL such as http://127.0.0.1:8080")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._parts = (tls, parts.hostname, port or (443 if tls else 80), path)

    def look(self) -> Facts:
        """Ask what is served, and note which kind of server it is. Raises BusyError, RefusedError."""
        listed = self._call("GET", "/v1/models", None, _LOOK_S)
        models = listed.get("data")
        entry = models[0] if isinstance(models, list) and models else None
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise RefusedError("/v1/models names no model there", True)
        self.kind = _KINDS.get(str(entry.get("owned_by")), "openai")
        self.model = entry["id"]
        given = entry.get("meta")
        meta = given if isinstance(given, dict) else {}
        n_vocab, n_ctx = (value if type(value := meta.get(name)) is int else None for name in ("n_vocab", "n_ctx"))
        known = meta.get("tokenizer_hash")
        return Facts(self.model, n_vocab, n_ctx, known if isinstance(known, str) else None)

    def tokens_of(self, text: str) -> list[int] | None:
        """The ids that it makes of `text`, nothing added; None where it can't say. Raises BusyError, RefusedError."""
        if self.kind != "llama-server":
            return None
        found = self._call("POST", "/tokenize", {"content": text, "add_special": False, "parse_special": True}, _LOOK_S)
        return _ids(found.get("tokens"))

    def n_tokens_of(self, text: str) -> int | None:
        """How many tokens it makes of `text`, perhaps with one at the beginning. Raises BusyError, RefusedError."""
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0.0}
        return _count(self._call("POST", "/v1/completions", body, self.timeout), "prompt_tokens")

    def answer(self, ask: Ask) -> Answer:
        """Continue a prompt. Raises BusyError, RefusedError."""
        s = ask.sampling
        body: dict[str, Any] = {
            "prompt": ask.tokens, "temperature": s.temperature, "top_p": s.top_p, "seed": ask.seed,
            "presence_penalty": s.presence_penalty, "frequency_penalty": s.frequency_penalty,
        }  # fmt: skip
        if self.kind == "openai":
            return self._openai({**body, "model": self.model, "max_tokens": ask.max_tokens})
        body |= {"top_k": s.top_k, "min_p": s.min_p, "repeat_penalty": s.repeat_penalty, "repeat_last_n": s.penalty_last_n,
                 "return_tokens": True}  # fmt: skip
        if self.kind == "localspec":
            return self._openai({**body, "model": self.model, "max_tokens": ask.max_tokens}, True)
        found = self._call("POST", "/completion", {**body, "n_predict": ask.max_tokens}, self.timeout)
        tokens = _ids(found.get("tokens"))
        if tokens is None:
            raise RefusedError("it gives no token ids: a llama-server that knows return_tokens is needed", True)
        return Answer(tokens, str(found.get("content", "")), found.get("stop_type") == "eos", len(tokens))

    def _openai(self, body: dict[str, Any], with_ids: bool = False) -> Answer:
        found = self._call("POST", "/v1/completions", body, self.timeout)
        choices = found.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise BusyError("its answer holds no text")
        tokens = _ids(choice.get("tokens")) if with_ids else None
        if with_ids and tokens is None:
            raise RefusedError("it gives no token ids: a newer localspec serve is needed", True)
        ended = choice.get("finish_reason") == "stop"
        return Answer(tokens, choice["text"], ended, _count(found, "completion_tokens"))

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        tls, host, port, prefix = self._parts
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        maker = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        connection = maker(host, port, timeout=min(_CONNECT_S, timeout))
        late = BusyError(f"no answer within {timeout:g} s")
        deadline = None
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            deadline = _Deadline(connection.sock, timeout)
            connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read(_MAX_BYTES + 1)
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(f"its certificate is not trusted ({error.verify_message})", True) from None
        except TimeoutError:
            raise late from None
        except (OSError, http.client.HTTPException) as error:
            if deadline is not None and deadline.passed:
                raise late from None
            raise BusyError(str(getattr(error, "strerror", None) or error) or type(error).__name__) from None
        finally:
            if deadline is not None:
                deadline.cancel()
            connection.close()
        if deadline.passed:  # what is cut off is no error to http.client
            raise late
        status = response.status
        if status == 200 and len(data) <= _MAX_BYTES:
            try:
                found = json.loads(data)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                return found
            raise BusyError(f"{path}: its answer is no JSON object")
        if status == 200:
            raise BusyError(f"{path}: its answer has more than {_MAX_BYTES >> 20} MiB")
        said = f"{status}{_message(data)}"
        if status in (408, 429) or status >= 500:
            raise BusyError(said, _seconds(response.headers.get("Retry-After")), status == 429)
        if status in (401, 403):
            raise RefusedError(f"it refuses {'this key' if self.key else 'to work without a key'} ({status}): give "
                               "--endpoint-key, or set LOCALSPEC_ENDPOINT_KEY", True)  # fmt: skip
        raise RefusedError(f"{path}: {said}", status not in (400, 413, 422))


class _Deadline:
    """Ends a connection `seconds` from now: a socket's own timeout begins anew with each byte that comes."""

    def __init__(self, sock: socket.socket, seconds: float):
        self.passed = False
        self._sock = sock
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self.passed = True
        with contextlib.suppress(OSError):  # closed a moment ago
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # below TLS, which would answer first

    def cancel(self) -> None:
        self._timer.cancel()


def _message(data: bytes) -> str:
    """What an error's body says, in few words, with a colon before them."""
    try:
        error = json.loads(data).get("error")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = None
    words = "".join(c if c.isprintable() else " " for c in str(text or ""))
    return f": {' '.join(words.split())[:200]}" if words.strip() else ""


def _seconds(value: str | None) -> float:
    return min(60.0, float(value)) if value and value.isdecimal() else 0.0


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(token) is int for token in value) else None


def _count(found: dict[str, Any], name: str) -> int | None:
    usage = found.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else None
