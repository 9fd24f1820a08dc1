"""What clients may ask for: OpenAI's request bodies, checked, and its form of errors.

Fields that could change the answer and are not served are refused, never ignored. So are unknown ones, which are misspelt
settings more often than not; a short list of those that don't touch the text is passed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localspec.accept import Sampling
from localspec.errors import LocalspecError, UsageError
from localspec.json_schema import ANY_OBJECT, to_gbnf

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_MESSAGES = 10_000
MAX_PROBS = 20

#: Neither changes the text.
_PASSED_OVER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_prompt", "timings_per_token", "parallel_tool_calls",
}  # fmt: skip
#: field -> the values that ask for nothing; any other is refused with "not supported".
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": (), "web_search_options": (), "verbosity": (),
}  # fmt: skip
#: field of the body -> (field of Sampling, least, most); a whole number where these are whole
_SAMPLING: dict[str, tuple[str, Any, Any]] = {
    "temperature": ("temperature", 0.0, 1e6),
    "top_p": ("top_p", 0.0, 1.0),
    "top_k": ("top_k", -(2**31), 2**31 - 1),
    "min_p": ("min_p", 0.0, 1.0),
    "repeat_penalty": ("repeat_penalty", 1e-3, 1e3),
    "presence_penalty": ("presence_penalty", -1e3, 1e3),
    "frequency_penalty": ("frequency_penalty", -1e3, 1e3),
    "repeat_last_n": ("penalty_last_n", -1, 2**31 - 1),
}
_FORMS = {"response_format", "grammar", "json_schema"}
_COMMON = {"model", "stream", "stream_options", "max_tokens", "stop", "seed", *_SAMPLING, *_FORMS}
_CHAT = {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ApiError(LocalspecError):
    """An answer other than 200: HTTP status, and what OpenAI's error object says."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, "invalid_request_error", param, code)


@dataclass(frozen=True, slots=True)
class Form:
    """What the text must be: a grammar in GBNF, or what a JSON schema admits. `field` of the body asked for it."""

    field: str
    grammar: str | None = None
    schema: Any = None

    def gbnf(self) -> str:
        """The grammar. Raises ApiError where the schema has none."""
        if self.grammar is not None:
            return self.grammar
        try:
            return to_gbnf(self.schema)
        except UsageError as error:
            raise bad(f"{self.field}: {error}", self.field) from error


@dataclass(frozen=True, slots=True)
class Order:
    """A checked request. `prompt` is a list of messages of a chat, or a completion's text or token ids."""

    prompt: list[dict[str, str]] | str | list[int]
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    n_probs: int | None  # of the likeliest tokens to name at each position; None: no probabilities
    form: Form | None = None
    return_tokens: bool = False  # the ids of the answer's tokens, too


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request doesn't say. `seed` None: a random one for each request; `max_tokens` is also the most
    that a request gets (None: until the model ends or the context is full)."""

    sampling: Sampling
    seed: int | None = None
    max_tokens: int | None = None


def take_chat(body: Any, model: str, defaults: Defaults) -> Order:
    """Check the body of /v1/chat/completions. Raises ApiError."""
    body = _fields(body, model, _COMMON | _CHAT)
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise bad("give max_completion_tokens or max_tokens, not both", "max_tokens")
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    n_probs = _whole(body, "top_logprobs", 0, MAX_PROBS) if "top_logprobs" in body else 0
    if n_probs and not _boolean(body, "logprobs"):
        raise bad("top_logprobs needs logprobs=true", "top_logprobs")
    return _order(body, _messages(body.get("messages")), limit, defaults, n_probs if _boolean(body, "logprobs") else None)


def take_completion(body: Any, model: str, defaults: Defaults) -> Order:
    """Check the body of /v1/completions. Raises ApiError."""
    body = _fields(body, model, _COMMON | {"prompt", "logprobs", "return_tokens"})
    n_probs = _whole(body, "logprobs", 0, MAX_PROBS) if body.get("logprobs", False) is not False else None
    order = _order(body, _prompt(body.get("prompt")), "max_tokens", defaults, n_probs)
    return_tokens = _boolean(body, "return_tokens")
    if return_tokens and order.stream:
        raise bad("return_tokens is for stream=false only", "return_tokens")
    return replace(order, return_tokens=return_tokens)


def _fields(body: Any, model: str, known: set[str]) -> dict[str, Any]:
    """The fields that count, nulls left out."""
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    taken: dict[str, Any] = {}
    for name, value in body.items():
        if name in _PASSED_OVER or value is None:
            continue
        if name in known:
            taken[name] = value
        elif name not in _UNSERVED:
            raise bad(f"unknown field {_clip(name)}", name[:60])
        elif not any(type(value) is type(harmless) and value == harmless for harmless in _UNSERVED[name]):
            raise bad(f"{name}: this server does not support {name}={_clip(value)}; leave it out", name)
    asked = taken.get("model", model)
    if not isinstance(asked, str):
        raise bad("model must be a string", "model")
    if asked != model:
        message = f"there is no model {_clip(asked)} here; this server has '{model}'"
        raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")
    return taken


def _order(body: dict[str, Any], prompt: Any, limit: str, defaults: Defaults, n_probs: int | None) -> Order:
    stream = _boolean(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise bad("stream_options must be an object with include_usage", "stream_options")
    if options and not stream:
        raise bad("stream_options is for stream=true only", "stream_options")
    max_tokens = _whole(body, limit, 0, 1 << 31) if limit in body else None
    if defaults.max_tokens is not None:
        max_tokens = defaults.max_tokens if max_tokens is None else min(max_tokens, defaults.max_tokens)
    include_usage = _boolean(options, "include_usage")
    sampling, stops = _sampling(body, defaults), _stops(body.get("stop"))
    return Order(prompt, sampling, max_tokens, stops, stream, include_usage, n_probs, _form(body))


def _form(body: dict[str, Any]) -> Form | None:
    """What the text must be. llama-server's two fields, and OpenAI's one."""
    asked: list[Form] = []
    if body.get("grammar", "") != "":
        if not isinstance(body["grammar"], str):
            raise bad("grammar must be a string in GBNF", "grammar")
        asked.append(Form("grammar", grammar=body["grammar"]))
    if "json_schema" in body:
        asked.append(Form("json_schema", schema=_schema(body["json_schema"], "json_schema")))
    form = body.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        schema = form.get("schema", ANY_OBJECT)  # llama-server's way of giving one
        asked.append(Form("response_format", schema=_schema(schema, "response_format.schema")))
    elif kind == "json_schema":
        inner = form.get("json_schema")
        if not isinstance(inner, dict) or "schema" not in inner:
            raise bad("response_format.json_schema must be an object with a schema", "response_format")
        asked.append(Form("response_format", schema=_schema(inner["schema"], "response_format.json_schema.schema")))
    elif kind != "text":
        raise bad("response_format must be an object of type text, json_object or json_schema", "response_format")
    if len(asked) > 1:
        raise bad(f"give {asked[0].field} or {asked[1].field}, not both", asked[1].field)
    return asked[0] if asked else None


def _schema(given: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise bad(f"{where} must be a JSON schema, an object, not {_clip(given)}", where.partition(".")[0])
    return given


def _sampling(body: dict[str, Any], defaults: Defaults) -> Sampling:
    values: dict[str, Any] = {}
    for name, (ours, low, high) in _SAMPLING.items():
        if name in body:
            whole = isinstance(low, int)
            values[ours] = _whole(body, name, low, high) if whole else _number(body, name, low, high)
    seed = _whole(body, "seed", -1, (1 << 64) - 1) if "seed" in body else defaults.seed
    values["seed"] = secrets.randbits(32) if seed is None or seed == -1 else seed
    try:
        return replace(defaults.sampling, **values)
    except UsageError as error:
        raise bad(str(error)) from error


def _messages(given: Any) -> list[dict[str, str]]:
    if not isinstance(given, list) or not given:
        raise bad("messages must be a list with at least one message", "messages")
    if len(given) > MAX_MESSAGES:
        raise bad(f"{len(given)} messages are too many: at most {MAX_MESSAGES}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise bad(f"{where} must be an object with role and content", where)
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad(f"{where}.role must be one of {', '.join(_ROLES)}, not {_clip(role)}", f"{where}.role")
    for name, value in given.items():
        if name not in ("role", "content", "name") and value not in (None, [], ""):
            raise bad(f"{where}: this server does not support '{_clip(name)}' in a message", where)
    return {"role": _ROLES[role], "content": _content(given.get("content"), f"{where}.content")}


def _content(given: Any, where: str) -> str:
    if isinstance(given, str):
        return _text(given, where)
    if not isinstance(given, list):
        raise bad(f"{where} must be a string or a list of text parts", where)
    parts = []
    for part in given:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{where}: only parts of type text are supported", where)
        parts.append(_text(part["text"], where))
    return "\n".join(parts)


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        if not given:
            raise bad("prompt is empty", "prompt")
        return _text(given, "prompt")
    if isinstance(given, list) and given and all(type(token) is int for token in given):
        return given
    if isinstance(given, list) and len(given) > 1 and all(isinstance(text, str | list) for text in given):
        raise bad(f"{len(given)} prompts in one request: send them one by one", "prompt")
    raise bad("prompt must be a text or a list of token ids", "prompt")


def _stops(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad("stop must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise bad(f"{len(stops)} stop strings are too many: at most {MAX_STOPS}", "stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise bad(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(_text(stop, "stop") for stop in stops)


def _text(text: str, where: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise bad(f"{where} is not valid text (a lone surrogate)", where)
    return text


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false, not {_clip(value)}", name)
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(f"{name} must be a number, not {_clip(value)}", name)
    if not low <= value <= high:  # NaN is neither
        raise bad(f"{name} must be between {low:g} and {high:g}, not {_clip(value)}", name)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(f"{name} must be a whole number, not {_clip(value)}", name)
    if not low <= value <= high:
        raise bad(f"{name} must be between {low} and {high}, not {_clip(value)}", name)
    return value


def _clip(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "that number"
    return text if len(text) <= 60 else text[:57] + "..."
