"""What clients get: OpenAI's response objects, with llama-server's `timings` beside `usage`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec import __version__
from localspec.engine import Piece, Stats
from localspec.report import rate
from localspec.serve.probs import chat_logprobs, text_logprobs
from localspec.tokenizer import Tokenizer


def finish_reason(stop: str) -> str:
    """The engine's stop reason in OpenAI's words: `length` where the text was cut off."""
    return "length" if stop in ("length", "context") else "stop"


def usage(stats: Stats) -> dict[str, Any]:
    """Tokens read and written; those of the prompt that were in a cache are counted apart, too."""
    return {
        "prompt_tokens": stats.n_prompt,
        "completion_tokens": stats.n_generated,
        "total_tokens": stats.n_prompt + stats.n_generated,
        "prompt_tokens_details": {"cached_tokens": _cached(stats)},
    }


def timings(stats: Stats) -> dict[str, Any]:
    """llama-server's object of that name; draft_n and draft_n_accepted are there where something was drafted."""
    n, m = stats.n_prompt_computed, stats.n_generated
    result = {
        "cache_n": _cached(stats),
        "prompt_n": n,
        "prompt_ms": 1e3 * stats.t_prompt,
        "prompt_per_token_ms": 1e3 * stats.t_prompt / n if n else 0.0,
        "prompt_per_second": rate(n, stats.t_prompt),
        "predicted_n": m,
        "predicted_ms": 1e3 * stats.t_generate,
        "predicted_per_token_ms": 1e3 * stats.t_generate / m if m else 0.0,
        "predicted_per_second": rate(m, stats.t_generate),
    }
    if stats.n_drafted:
        result |= {"draft_n": stats.n_drafted, "draft_n_accepted": stats.n_accepted}
    return result


def _cached(stats: Stats) -> int:
    # The last token of a prompt is computed with the first step, never with the prompt.
    return max(0, stats.n_prompt - 1 - stats.n_prompt_computed)


@dataclass(slots=True)
class Answer:
    """Makes the objects of one answer, whole or as chunks of a stream."""

    model: str
    chat: bool
    tokenizer: Tokenizer | None = None  # where probabilities are asked for
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _n_chars: int = 0  # of the tokens whose probabilities were given

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(
        self, text: str, tokens: Sequence[Piece], stop: str, stats: Stats, ids: list[int] | None = None
    ) -> dict[str, Any]:
        """The answer to a request without `stream`; `ids`: of all tokens written, where they are asked for."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason(stop), "logprobs": self._logprobs(tokens)}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if ids is not None:
            choice["tokens"] = ids
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage(stats), "timings": timings(stats)}

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat's stream; completions have none."""
        return self._chunk({"role": "assistant", "content": ""}) if self.chat else None

    def chunk(self, text: str, tokens: Sequence[Piece]) -> dict[str, Any]:
        """Some text, and the tokens that it is made of."""
        chunk = self._chunk({"content": text} if self.chat else text)
        chunk["choices"][0]["logprobs"] = self._logprobs(tokens)
        return chunk

    def closing(self, stop: str, stats: Stats, include_usage: bool) -> list[dict[str, Any]]:
        """The last chunk, and one with the usage where that was asked for."""
        last = self._chunk({} if self.chat else "", finish_reason(stop)) | {"timings": timings(stats)}
        if not include_usage:
            return [last]
        counts = {"choices": [], "usage": usage(stats), "timings": timings(stats)}
        return [last, self._head(self._chunk_kind) | counts]

    def _logprobs(self, tokens: Sequence[Piece]) -> dict[str, Any] | None:
        if self.tokenizer is None:
            return None
        if self.chat:
            return chat_logprobs(self.tokenizer, tokens)
        offset, self._n_chars = self._n_chars, self._n_chars + sum(len(self.tokenizer.decode([p.token])) for p in tokens)
        return text_logprobs(self.tokenizer, tokens, offset)

    def _chunk(self, content: dict[str, str] | str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.chat else "text": content, "logprobs": None, "finish_reason": finish}
        return {**self._head(self._chunk_kind), "choices": [choice]}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": f"localspec-{__version__}"}


def to_json(value: Any) -> bytes:
    """UTF-8, without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
