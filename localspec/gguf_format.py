"""The GGUF container: header, key-value pairs, tensor table. It knows bytes, not models.

Layout (versions 2 and 3, little-endian): magic, version u32, tensor count u64, pair count u64; each pair is a key
(length u64 and bytes), a type u32 and a value; each tensor is a name, a number of dimensions u32, ne u64 each, a type
u32, an offset u64 from the start of the data, which begins at the next multiple of ``general.alignment``.

Every check that llama.cpp's own reader makes is made here as well, so that a file which passes also opens there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

MAGIC = b"GGUF"
MAX_STRING = MAX_ARRAY = 1 << 30  # llama.cpp's own limits
MAX_TENSOR_NAME = 63
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
VALUE_DTYPE = {
    U8: "<u1", I8: "<i1", U16: "<u2", I16: "<i2", U32: "<u4", I32: "<i4", F32: "<f4", BOOL: "|b1", U64: "<u8",
    I64: "<i8", F64: "<f8",
}  # fmt: skip

# ggml type number -> (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class FormatError(Exception):
    """What is wrong with the bytes, as the end of a sentence that begins with the file's name."""


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table. ``shape`` is ggml's order (``ne``: the fastest dimension first);
    ``offset`` counts from the start of the file, ``nbytes`` is without padding."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class StringArray(Sequence[bytes]):
    """An array of strings that stays undecoded in the file until somebody looks: opening needs no vocabulary."""

    def __init__(self, buffer: memoryview, start: int, end: int, n: int) -> None:
        self._buffer, self._start, self._end, self._n = buffer, start, end, n
        self._items: list[bytes] | None = None

    @property
    def raw(self) -> memoryview:
        """The bytes in the file: each string behind its length (u64)."""
        return self._buffer[self._start : self._end]

    def items(self) -> list[bytes]:
        """All strings as bytes (GGUF doesn't promise UTF-8)."""
        if self._items is None:
            raw, at, items = bytes(self.raw), 0, []
            for _ in range(self._n):
                end = at + 8 + _U64(raw, at)[0]
                items.append(raw[at + 8 : end])
                at = end
            self._items = items
        return self._items

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, i: int) -> bytes: ...
    @overload
    def __getitem__(self, i: slice) -> list[bytes]: ...
    def __getitem__(self, i: int | slice) -> bytes | list[bytes]:
        return self.items()[i]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.items())

    def __repr__(self) -> str:
        return f"<StringArray of {self._n}>"


Value = int | float | bool | str | StringArray | np.ndarray


@dataclass
class Contents:
    """A parsed file. ``types`` holds each pair's value type (for an array: its element type, and True)."""

    version: int
    alignment: int = DEFAULT_ALIGNMENT
    metadata: dict[str, Value] = field(default_factory=dict)
    types: dict[str, tuple[int, bool]] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    data_start: int = 0


def parse(buffer: memoryview) -> Contents:
    """Read everything but the tensors' data. Raises FormatError; never reads or allocates beyond the file's size."""
    if bytes(buffer[:4]) != MAGIC:
        raise FormatError(f"is not a GGUF file: {looks_like(buffer)}")
    if len(buffer) < 24:
        raise FormatError(f"is truncated: a GGUF header has 24 bytes, the file {len(buffer)}; fetch it again")
    version = _U32(buffer, 4)[0]
    if version & 0xFFFF == 0 and version:
        raise FormatError("is a big-endian GGUF; this machine needs the little-endian file")
    if version not in (2, 3):
        raise FormatError(f"is GGUF version {version}; versions 2 and 3 can be read; convert it again with llama.cpp")
    return _Parser(buffer, version).run()


class _Parser:
    def __init__(self, buffer: memoryview, version: int) -> None:
        self.buffer, self.size, self.at = buffer, len(buffer), 8
        self.out = Contents(version)

    def run(self) -> Contents:
        n_tensors, n_pairs = self.u64("the header"), self.u64("the header")
        # The smallest tensor entry takes 24 bytes, the smallest pair 14: a larger count can't be true.
        for n, least, what in ((n_tensors, 24, "tensors"), (n_pairs, 14, "key-value pairs")):
            if n * least > self.size - self.at:
                raise FormatError(f"claims {n} {what}, more than its {self.size} bytes can hold: truncated or damaged")
        for i in range(n_pairs):
            self.pair(i)
        alignment = self.out.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if "general.alignment" in self.out.types and self.out.types["general.alignment"] != (U32, False):
            raise FormatError("is damaged: general.alignment is not an unsigned 32-bit number")
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise FormatError(f"is damaged: general.alignment is {alignment}, not a power of two")
        self.out.alignment = alignment
        self.tensor_table(n_tensors)
        return self.out

    def need(self, n: int, what: str) -> None:
        if n > self.size - self.at:
            missing = n - (self.size - self.at)
            raise FormatError(
                f"is truncated or damaged: {what} at byte {self.at} needs {missing} bytes more than the file has; "
                "fetch it again"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.at += 4
        return int(_U32(self.buffer, self.at - 4)[0])

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.at += 8
        return int(_U64(self.buffer, self.at - 8)[0])

    def string(self, what: str) -> bytes:
        n = self.u64(what)
        if n > MAX_STRING:
            raise FormatError(f"is damaged: {what} claims a length of {n} bytes")
        self.need(n, what)
        self.at += n
        return bytes(self.buffer[self.at - n : self.at])

    def pair(self, i: int) -> None:
        key = _text(self.string(f"key {i}"))
        if not key:
            raise FormatError(f"is damaged: key {i} is empty")
        if key in self.out.metadata:
            raise FormatError(f"is damaged: key {clip(key)} stands twice")
        what = f"the value of {clip(key)}"
        kind = self.u32(what)
        is_array = kind == ARRAY
        if is_array:
            kind, n = self.u32(what), self.u64(what)
            if n > MAX_ARRAY:
                raise FormatError(f"is damaged: {what} claims {n} elements")
        if kind != STRING and kind not in VALUE_DTYPE:
            raise FormatError(f"is damaged: {what} has the unknown type {kind}")
        self.out.types[key] = (kind, is_array)
        if is_array:
            self.out.metadata[key] = self.strings(n, what) if kind == STRING else self.numbers(kind, n, what)
        elif kind == STRING:
            self.out.metadata[key] = _text(self.string(what))
        else:
            self.out.metadata[key] = self.numbers(kind, 1, what)[0].item()

    def numbers(self, kind: int, n: int, what: str) -> np.ndarray:
        dtype = np.dtype(VALUE_DTYPE[kind])
        self.need(n * dtype.itemsize, what)
        start, self.at = self.at, self.at + n * dtype.itemsize
        if kind == BOOL:  # any byte that isn't zero is true; numpy would keep a 2 as it is
            return np.frombuffer(self.buffer, np.uint8, n, start) != 0
        return np.frombuffer(self.buffer, dtype, n, start)

    def strings(self, n: int, what: str) -> StringArray:
        self.need(n * 8, what)
        start, at, unpack, buffer, size = self.at, self.at, _U64, self.buffer, self.size
        try:
            for _ in range(n):
                at += 8 + unpack(buffer, at)[0]
                if at > size:
                    break
        except struct.error:
            at = size + 1
        if at > size:
            raise FormatError(f"is truncated or damaged: {what} runs past the end of the file; fetch it again")
        self.at = at
        return StringArray(buffer, start, at, n)

    def tensor_table(self, n_tensors: int) -> None:
        raw: list[tuple[str, tuple[int, ...], str, int, int]] = []
        seen: set[str] = set()
        expected = 0
        for i in range(n_tensors):
            name = _text(self.string(f"the name of tensor {i}"))
            if len(name.encode()) > MAX_TENSOR_NAME:
                raise FormatError(f"is damaged: the name of tensor {i} has more than {MAX_TENSOR_NAME} bytes")
            what = f"tensor {clip(name)}"
            if name in seen:
                raise FormatError(f"is damaged: {what} stands twice")
            seen.add(name)
            n_dims = self.u32(what)
            if n_dims > MAX_DIMS:
                raise FormatError(f"is damaged: {what} has {n_dims} dimensions")
            shape = tuple(self.u64(what) for _ in range(n_dims)) or (1,)
            kind, offset = self.u32(what), self.u64(what)
            if kind not in TENSOR_TYPES:
                raise FormatError(f"has {what} of type {kind}, which this llama.cpp does not know; quantise it anew")
            type_name, block, block_bytes = TENSOR_TYPES[kind]
            n = 1
            for ne in shape:
                n *= ne
            if n >= 1 << 62 or max(shape) >= 1 << 62:
                raise FormatError(f"is damaged: {what} claims the shape {list(shape)}")
            if shape[0] % block:
                raise FormatError(
                    f"is damaged: {what} has rows of {shape[0]} elements, but {type_name} comes in blocks of {block}"
                )
            nbytes = n // block * block_bytes
            if offset != expected:
                raise FormatError(f"is damaged: {what} begins at data byte {offset} where {expected} is expected")
            expected = _pad(offset + nbytes, self.out.alignment)
            raw.append((name, shape, type_name, offset, nbytes))
        start = self.out.data_start = _pad(self.at, self.out.alignment)
        self.out.tensors = {n: TensorInfo(n, shape, t, start + off, nb) for n, shape, t, off, nb in raw}
        if raw:
            end = start + raw[-1][3] + raw[-1][4]
            if end > self.size:
                raise FormatError(
                    f"is truncated: {end - self.size} of {end} bytes are missing (the download stopped early); "
                    "fetch it again"
                )


def _pad(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def clip(text: str, n: int = 60) -> str:
    """A name out of a file, safe inside a one-line message: control characters escaped, long ones cut."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= n else shown[: n - 1] + "…"


def looks_like(buffer: memoryview | bytes) -> str:
    """What a file that isn't GGUF seems to be, and what to do about it."""
    head = bytes(buffer[:512])
    start = head.lstrip()[:64].lower()
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, not the file itself; run `git lfs pull`"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is a web page, so a download went wrong; fetch the file itself"
    if head.startswith(b"PK\x03\x04"):
        return "it looks like a PyTorch checkpoint or another zip; convert it with llama.cpp's convert_hf_to_gguf.py"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "it looks like a Python pickle (old PyTorch checkpoint); convert it with convert_hf_to_gguf.py"
    if len(head) > 9 and head[8:9] == b"{" and _U64(head, 0)[0] < 1 << 30:
        return "it looks like safetensors; convert it with llama.cpp's convert_hf_to_gguf.py"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file from before GGUF, which llama.cpp no longer reads; fetch a GGUF of the model"
    if head[:4] == b"FUGG":
        return "its magic is byte-swapped; this machine needs the little-endian file"
    if head[:2] == b"\x1f\x8b" or head[:4] in (b"\x28\xb5\x2f\xfd", b"\xfd7zX") or head[:3] == b"BZh":
        return "it is compressed; unpack it first"
    if start[:1] in (b"{", b"["):
        return "it looks like JSON (maybe an error page of a hub); fetch the file itself"
    if head and not any(head):
        return "it begins with zero bytes, as an unfinished download does; fetch it again"
    return f"it begins with {head[:4]!r}, not b'GGUF'"


def describe(value: Any) -> str:
    """A value's type in words, for messages."""
    if isinstance(value, StringArray):
        return "an array of strings"
    if isinstance(value, np.ndarray):
        return "an array"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(type(value), "unknown")
