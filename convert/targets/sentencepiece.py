"""tokenizer.model: the pieces of a SentencePiece model, read from its protobuf without that library.

Of the message ModelProto these fields are read (sentencepiece_model.proto): 1 pieces {1 text, 2 score, 3 type},
2 trainer {3 model_type}, 3 normaliser {2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.errors import ModelFileError
from localspec.gguf_format import clip

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF numbers the types in the same way
_BPE = 2


@dataclass(frozen=True)
class Pieces:
    """The pieces in the order of their ids; ``space_prefix``: whether a space is put before a text."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    space_prefix: bool


def read(path: Path) -> Pieces:
    """The pieces of a tokenizer.model. Raises ModelFileError for a damaged one, or one that is no BPE."""
    shown = clip(str(path), 400)
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    kind, prefix, squeezes, normalises = 1, True, True, False  # the format's defaults; kind 1 is a unigram model
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                text, score, piece_type = "", 0.0, NORMAL
                for inner, content in _fields(value):
                    if inner == 1 and isinstance(content, bytes):
                        text = content.decode("utf-8")
                    elif inner == 2 and isinstance(content, float):
                        score = content
                    elif inner == 3 and isinstance(content, int):
                        piece_type = content
                texts.append(text)
                scores.append(score)
                types.append(piece_type)
            elif number == 2 and isinstance(value, bytes):
                kind = next((v for n, v in _fields(value) if n == 3 and isinstance(v, int)), kind)
            elif number == 3 and isinstance(value, bytes):
                found = dict(_fields(value))
                prefix, squeezes = bool(found.get(3, True)), bool(found.get(4, True))
                normalises = bool(found.get(2))
    except OSError as error:
        raise ModelFileError(f"{shown} can't be read: {error.strerror or error}") from None
    except (ValueError, IndexError, struct.error):
        raise ModelFileError(f"{shown} is no SentencePiece model, or damaged; fetch it again") from None
    if not texts or not all(NORMAL <= t <= BYTE for t in types):
        raise ModelFileError(f"{shown} is no SentencePiece model, or damaged; fetch it again")
    if kind != _BPE:
        raise ModelFileError(f"{shown} is no BPE model (its type is {kind}), which llama.cpp's tokenizer for it would be")
    if squeezes or normalises:
        raise ModelFileError(f"{shown} changes text before it cuts it, which llama.cpp's tokenizer for it doesn't")
    return Pieces(texts, scores, types, prefix)


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """The fields of a protobuf message in order: whole numbers, floats of 32 bits, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        value: int | float | bytes
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 1:
            value, at = data[at : at + 8], at + 8
        elif wire == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif wire == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(data):
            raise ValueError("cut off")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number too long")
