"""Text to tokens and back, through llama.cpp's own vocabulary of the loaded model."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localspec import native
from localspec.errors import ContextFullError, UsageError

_WITHOUT_TEXT = 1 | 8  # llama.cpp's attributes of unknown and control tokens


class Tokenizer:
    """Encodes and decodes with one model's vocabulary (``vocab`` is llama.cpp's handle)."""

    def __init__(self, vocab: Any, n_vocab: int):
        lib = native.lib()
        self._vocab = vocab
        self.n_vocab = n_vocab
        self.bos = int(lib.llama_vocab_bos(vocab))
        self.eos = int(lib.llama_vocab_eos(vocab))
        self.add_bos = bool(lib.llama_vocab_get_add_bos(vocab))
        self._eog: np.ndarray | None = None
        self._silent: np.ndarray | None = None
        self._starts: tuple[np.ndarray, np.ndarray] | None = None
        self._pieces: dict[int, bytes] = {}

    @property
    def eog(self) -> np.ndarray:
        """uint8[V]: 1 where the token ends a generation."""
        if self._eog is None:
            is_eog = native.lib().llama_vocab_is_eog
            vocab = self._vocab
            self._eog = np.fromiter((is_eog(vocab, i) for i in range(self.n_vocab)), dtype=np.uint8, count=self.n_vocab)
        return self._eog

    @property
    def silent(self) -> np.ndarray:
        """bool[V]: True where a token has no text that `piece` shows and does not end a generation, either."""
        if self._silent is None:
            attributes = native.lib().llama_vocab_get_attr
            vocab = self._vocab
            kinds = np.fromiter((attributes(vocab, i) for i in range(self.n_vocab)), dtype=np.int32, count=self.n_vocab)
            self._silent = ((kinds & _WITHOUT_TEXT) != 0) & (self.eog == 0)
        return self._silent

    @property
    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """(u8[V, 2] the first two bytes of each token, control tokens too, 0 where it is shorter; i32[256] for each byte a
        token that is just this byte, -1 where there is none)."""
        if self._starts is None:
            to_piece, vocab, size = native.lib().llama_token_to_piece, self._vocab, 8
            buffer = (ctypes.c_uint8 * size)()
            as_chars = ctypes.cast(buffer, ctypes.c_char_p)
            starts, single = np.zeros((self.n_vocab, 2), np.uint8), np.full(256, -1, np.int32)
            for token in range(self.n_vocab):
                n = to_piece(vocab, token, as_chars, size, 0, True)
                if n < 0:  # a long one
                    starts[token] = list(self._piece(token, True)[:2])
                elif n > 1:
                    starts[token] = buffer[0], buffer[1]
                elif n == 1:
                    starts[token, 0] = buffer[0]
                    if buffer[0] > 0 and not self.silent[token]:
                        single[buffer[0]] = token
            self._starts = starts, single
        return self._starts

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds what the model wants at the start (BOS), and at the end."""
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt is not valid text at character {error.start} (a lone surrogate)") from error
        size = len(raw) + 8
        for _ in range(2):
            buffer = (ctypes.c_int32 * size)()
            n = native.lib().llama_tokenize(self._vocab, raw, len(raw), buffer, size, add_special, parse_special)
            if n >= 0:
                return list(buffer[:n])
            size = -n
        raise UsageError("the prompt is too long for the tokenizer")

    def check_length(self, text: str, n_ctx: int) -> None:
        """Raise ContextFullError where `text` can't be in `n_ctx` tokens, however it is cut: by its length, at once.

        Encoding 60 MB to find that out takes minutes and gigabytes.
        """
        n_bytes = len(text.encode("utf-8", "replace"))
        if n_bytes <= 16 * n_ctx:  # far from hopeless: don't look through the vocabulary
            return
        longest = max(len(self._piece(token, special=True)) for token in range(self.n_vocab))
        if n_bytes > longest * n_ctx:
            raise ContextFullError(
                f"the text has {n_bytes:,} bytes, which is too much for any {n_ctx} tokens: "
                "give a larger --ctx-size or a shorter prompt"
            )

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`. A token may hold half a character."""
        key = token * 2 + special
        cached = self._pieces.get(key)
        if cached is None:
            cached = self._pieces[key] = self._piece(token, special)
        return cached

    def _piece(self, token: int, special: bool) -> bytes:
        size = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            n = native.lib().llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n
        return b""

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of `tokens`; bytes that are not UTF-8 become replacement characters."""
        return b"".join(self.piece(int(t), special) for t in tokens).decode("utf-8", "replace")


@dataclass(slots=True)
class Pushed:
    """What one token gave: text that can be shown now, and whether a stop string was completed."""

    text: str
    stopped: bool


class TextStream:
    """Turns tokens into text as they come: never half a character, nothing of a stop string.

    Text that could be the beginning of a stop string is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = [s for s in stops if s]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token: int) -> Pushed:
        """Take one token."""
        return self._take(self._utf8.decode(self._tokenizer.piece(token)))

    def finish(self) -> str:
        """The rest: held text and a character left incomplete (as a replacement character)."""
        rest = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return rest

    def _take(self, new: str) -> Pushed:
        if not self._stops:
            return Pushed(new, False)
        text = self._held + new
        ends = [i for i in (text.find(stop) for stop in self._stops) if i >= 0]
        if ends:
            self._held = ""
            return Pushed(text[: min(ends)], True)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Pushed(text[: len(text) - keep], False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
