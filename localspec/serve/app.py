"""The HTTP side: routes, keys, limits, and clients that are slow or gone. It reads and writes; the worker does the work."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from localspec.chat.conversation import PlainTranscript, Template
from localspec.engine import Piece
from localspec.engine import Request as EngineRequest
from localspec.errors import ContextFullError, UsageError
from localspec.grammar import Grammar
from localspec.model import Model
from localspec.serve import metrics
from localspec.serve.answers import LAST_EVENT, Answer, event, to_json
from localspec.serve.outbox import Outbox
from localspec.serve.schema import ApiError, Defaults, Form, Order, bad, take_chat, take_completion
from localspec.serve.worker import ClosingError, Done, Failed, Job, QueueFullError, Text, Worker
from localspec.template import ChatTemplate

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take up: bytes of a body, seconds for sending it, characters of a stream that it has not read yet,
    seconds in which it reads nothing at all."""

    body_bytes: int = 8 << 20
    body_s: float = 30.0
    unread_chars: int = 256 << 10
    stalled_s: float = 60.0


@dataclass(slots=True)
class Served:
    """What is served, and under which conditions. `name` is the model's id."""

    name: str
    model: Model
    n_ctx: int
    defaults: Defaults
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))
    template: Template = field(init=False)
    tokenizer_hash: str = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer_hash = self.model.gguf.tokenizer_hash()
        self.template = ChatTemplate.of(self.model) or PlainTranscript(self.model.tokenizer)

    def encode(self, order: Order) -> EngineRequest:
        """The engine's request. Raises ApiError where the prompt can't be encoded or is too long."""
        tokenizer, prompt, stops = self.model.tokenizer, order.prompt, order.stops
        try:
            if isinstance(prompt, str):
                tokenizer.check_length(prompt, self.n_ctx)
                tokens = tokenizer.encode(prompt)
            elif prompt and isinstance(prompt[0], dict):
                tokenizer.check_length("".join(m["content"].strip() for m in prompt), self.n_ctx)
                tokens = self.template.encode(prompt)
                if isinstance(self.template, PlainTranscript):
                    stops = (*stops, *PlainTranscript.STOPS)
            else:
                tokens = self._checked(prompt)  # type: ignore[arg-type]
        except ContextFullError as error:
            raise bad(str(error), code="context_length_exceeded") from error
        except UsageError as error:
            raise bad(str(error)) from error
        if not tokens:
            raise bad("the prompt is empty: it has no tokens", "prompt")
        if len(tokens) > self.n_ctx:
            raise bad(f"the prompt has {len(tokens)} tokens, the context holds {self.n_ctx}", code="context_length_exceeded")
        grammar = None if order.form is None else self._grammar(order.form)
        return EngineRequest(tokens, order.sampling, order.max_tokens, stops, n_probs=order.n_probs, grammar=grammar)

    def _grammar(self, form: Form) -> Grammar:
        text = form.gbnf()
        try:
            return Grammar(self.model, text)
        except UsageError as error:
            raise bad(str(error), form.field) from error

    def _checked(self, tokens: list[int]) -> list[int]:
        wrong = next((t for t in tokens if not 0 <= t < self.model.n_vocab), None)
        if wrong is not None:
            raise bad(f"prompt: {wrong} is no token; ids go from 0 to {self.model.n_vocab - 1}", "prompt")
        return tokens


def make_app(worker: Worker, served: Served, before: Sequence[Middleware] = ()) -> Starlette:
    """The ASGI application behind `before`. The worker is started and closed by whoever runs it."""
    api = _Api(worker, served)
    routes = [
        Route("/health", api.health),
        Route("/metrics", api.guarded(api.metrics)),
        Route("/v1/models", api.guarded(api.models)),
        Route("/v1/models/{name:path}", api.guarded(api.model)),
        Route("/v1/chat/completions", api.guarded(api.chat), methods=["POST"]),
        Route("/v1/completions", api.guarded(api.completion), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _on_api_error, HTTPException: _on_http_error, ClientDisconnect: _on_gone, Exception: _on_bug,
    }  # fmt: skip
    return Starlette(routes=routes, exception_handlers=handlers, middleware=before)


class _Api:
    def __init__(self, worker: Worker, served: Served):
        self._worker = worker
        self._served = served

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint`, for those who have the key."""
        if self._served.api_key is None:
            return endpoint
        wanted = self._served.api_key.encode()

        async def check(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Compared in a time that tells nothing of where the two part.
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), wanted):
                message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, message, "authentication_error", code="invalid_api_key")
            return await endpoint(request)

        return check

    async def health(self, _request: Request) -> Response:
        alive = self._worker.alive
        return _json({"status": "ok" if alive else "unavailable"}, 200 if alive else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(metrics.render(self._worker), media_type=metrics.CONTENT_TYPE)

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name:
            message = f"there is no model '{name[:60]}' here; this server has '{self._served.name}'"
            raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        served = self._served
        meta = {
            "n_ctx": served.n_ctx, "n_ctx_train": served.model.n_ctx_train, "n_vocab": served.model.n_vocab,
            "tokenizer_hash": served.tokenizer_hash,
        }  # fmt: skip
        return {"id": served.name, "object": "model", "created": served.created, "owned_by": "localspec", "meta": meta}

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, True)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, False)

    async def _answer(self, request: Request, chat: bool) -> Response:
        served = self._served
        body = await _read_body(request, served.limits)
        order = (take_chat if chat else take_completion)(body, served.name, served.defaults)
        engine_request = await asyncio.to_thread(served.encode, order)
        outbox = Outbox(served.limits.unread_chars if order.stream else None)
        job = Job(engine_request, outbox.deliver, [] if order.return_tokens else None)
        try:
            self._worker.submit(job)
        except QueueFullError as error:
            raise ApiError(429, str(error), "rate_limit_error", code="queue_full") from error
        except ClosingError as error:
            raise ApiError(503, str(error), "server_error", code="closing") from error
        answer = Answer(served.name, chat, None if order.n_probs is None else served.model.tokenizer)
        if order.stream:
            return _Stream(self._worker, job, outbox, answer, order.include_usage, served.limits.stalled_s)
        collecting = asyncio.create_task(_collect(outbox))
        gone = asyncio.create_task(_until_gone(request.receive))
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            text, tokens, done = collecting.result()
        finally:
            collecting.cancel()
            gone.cancel()
            self._worker.cancel(job)  # without effect where it has ended
        ids = list(done.tokens) if order.return_tokens else None
        return _json(answer.whole(text, tokens, done.stop, done.stats, ids))


class _Stream(Response):
    """Server-sent events until the text ends, or until nobody reads them."""

    def __init__(
        self, worker: Worker, job: Job, outbox: Outbox, answer: Answer, include_usage: bool, stalled_s: float
    ):  # fmt: skip
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._worker = worker
        self._job = job
        self._outbox = outbox
        self._answer = answer
        self._include_usage = include_usage
        self._stalled_s = stalled_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        pumping = asyncio.create_task(self._pump(send))
        others = [asyncio.create_task(_until_gone(receive)), asyncio.create_task(self._outbox.broken.wait())]
        try:
            await asyncio.wait({pumping, *others}, return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                pumping.result()
        except (OSError, TimeoutError):
            pass  # the client is gone, or reads nothing: the connection is closed
        finally:
            for task in (pumping, *others):
                task.cancel()
            self._worker.cancel(self._job)

    async def _pump(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._stalled_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        opening = self._answer.opening()
        if opening is not None:
            await write(event(opening))
        while True:
            got = await self._outbox.get()
            if isinstance(got, Text):
                await write(event(self._answer.chunk(got.text, got.tokens)))
            elif isinstance(got, Done):
                for chunk in self._answer.closing(got.stop, got.stats, self._include_usage):
                    await write(event(chunk))
                await write(LAST_EVENT, False)
                return
            else:
                await write(event(_failure(got).body()), False)
                return


async def _collect(outbox: Outbox) -> tuple[str, list[Piece], Done]:
    """The whole text, and its tokens where probabilities are asked for. Raises ApiError where it fails."""
    texts: list[str] = []
    tokens: list[Piece] = []
    while True:
        got = await outbox.get()
        if isinstance(got, Text):
            texts.append(got.text)
            tokens.extend(got.tokens)
        elif isinstance(got, Done):
            return "".join(texts), tokens, got
        else:
            raise _failure(got)


def _failure(failed: Failed) -> ApiError:
    if failed.kind == "request":
        return bad(failed.message)
    return ApiError(503 if failed.kind == "closing" else 500, failed.message, "server_error", code=failed.kind)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, limits: Limits) -> Any:
    """The body as JSON. Raises ApiError: too large, too slow, no JSON."""
    too_large = ApiError(413, f"the body has more than {limits.body_bytes} bytes", "invalid_request_error")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for piece in request.stream():
                data += piece
                if len(data) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive", "invalid_request_error") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not valid JSON: {error}") from None


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


async def _on_api_error(_request: Request, error: ApiError) -> Response:
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.status in (429, 503):
        headers["retry-after"] = "1"
    elif error.status in (408, 413):
        headers["connection"] = "close"
    return _json(error.body(), error.status, headers)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    reason = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for {request.url.path}"}
    message = reason.get(error.status_code, str(error.detail))
    return _json(ApiError(error.status_code, message, "invalid_request_error").body(), error.status_code)


async def _on_gone(_request: Request, _error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(_request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _json(ApiError(500, "internal error", "server_error").body(), 500)
