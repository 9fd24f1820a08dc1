"""Log-probabilities of the tokens written, in OpenAI's forms: those of the target as it is, at temperature 1, unfiltered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from localspec.engine import Piece
from localspec.tokenizer import Tokenizer

#: What OpenAI gives for "practically never"; JSON has no infinity.
_NEVER = -9999.0


class Aligned:
    """Gives tokens away with the text that they make: those that a stop string may still take back are held."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._held: deque[Piece] = deque()
        self._ahead = 0  # bytes of text given beyond those of the tokens given

    def take(self, pieces: Iterable[Piece], text: str, stop: str | None) -> list[Piece]:
        """The tokens whose text is out, given the new pieces, their text and the reason of the text's end, if it ends.
        An end-of-generation token is none of them."""
        self._held.extend(piece for piece in pieces if piece.token >= 0 and not self._tokenizer.eog[piece.token])
        self._ahead += len(text.encode("utf-8"))
        given = []
        everything = stop is not None and stop != "stop-string"
        while self._held and (everything or self._size(self._held[0]) <= self._ahead):
            piece = self._held.popleft()
            self._ahead -= self._size(piece)
            given.append(piece)
        return given

    def _size(self, piece: Piece) -> int:
        return len(self._tokenizer.piece(piece.token))


def chat_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = []
    for piece in pieces:
        top = [_entry(tokenizer, token, value) for token, value in piece.likeliest]
        content.append({**_entry(tokenizer, piece.token, piece.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion's choice; `offset`: characters of the text before these tokens."""
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        text = tokenizer.decode([piece.token])
        result["tokens"].append(text)
        result["token_logprobs"].append(_finite(piece.logprob))
        result["top_logprobs"].append({tokenizer.decode([t], special=True): _finite(value) for t, value in piece.likeliest})
        result["text_offset"].append(offset)
        offset += len(text)
    return result


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    raw = tokenizer.piece(token, special=True)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)
