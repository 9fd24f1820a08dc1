"""The tensors of a Hugging Face checkpoint: one safetensors file or several with an index, mapped, never read whole.

The format is read here: a number u64 with the length of a JSON header (names, types, shapes, offsets), then the data.
So bfloat16 needs no torch, and a model larger than the memory can be gone through tensor by tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.errors import ModelFileError
from localspec.gguf_format import clip

#: floating-point types of safetensors -> how numpy holds them (bfloat16 as its bits)
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # bytes
_HEADER_LIMIT = 100_000_000  # bytes: the format's own limit
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: ``dtype`` as safetensors names it, ``shape`` rows first, bytes ``begin`` to ``end`` of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Weights:
    """The tensors of one directory by their names. ``stored`` says what there is; `values` gives one as f32."""

    def __init__(self, path: Path, stored: dict[str, Stored]):
        self.path, self.stored = path, stored
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path) -> Weights:
        """Reads the headers alone. Raises ModelFileError for files missing, damaged, or of another format."""
        stored: dict[str, Stored] = {}
        for file in _files(path):
            for name, tensor in _header(file).items():
                if name in stored:
                    raise _bad(file, f"holds the tensor {clip(name)}, which {stored[name].file.name} has too")
                stored[name] = tensor
        return cls(path, stored)

    def raw(self, name: str) -> np.ndarray:
        """A tensor of one of the types FLOATS as it is stored, a view into the mapped file."""
        tensor = self.stored[name]
        count = math.prod(tensor.shape)
        return np.frombuffer(self._map(tensor.file), FLOATS[tensor.dtype], count, tensor.begin).reshape(tensor.shape)

    def values(self, name: str) -> np.ndarray:
        """A tensor as f32."""
        stored = self.raw(name)
        if self.stored[name].dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def main_dtype(self) -> str:
        """The type of most of the values: F32, F16 or BF16 (F64 counts as F32)."""
        sizes: dict[str, int] = {}
        for tensor in self.stored.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
        main = max((name for name in FLOATS if name in sizes), key=lambda name: sizes[name], default="F32")
        return "F32" if main == "F64" else main

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ModelFileError."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{clip(str(path), 400)}: no such file; a checkpoint in Hugging Face's layout has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(path, f"can't be read: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds, where it is an object. Raises ModelFileError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise _bad(path, "holds no JSON object; fetch it again")
    return value


def _bad(path: Path, text: str) -> ModelFileError:
    return ModelFileError(f"{clip(str(path), 400)} {text}")


def _files(path: Path) -> list[Path]:
    """The safetensors files of a model: those that its index names, or the only one."""
    if (path / _INDEX).is_file():
        index = read_object(path / _INDEX).get("weight_map")
        names = sorted(set(index.values())) if isinstance(index, dict) and index else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise _bad(path / _INDEX, "names no files of this directory; fetch it again")
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise _bad(path, f"lacks {missing[0]} ({len(missing)} of {len(names)} files are missing); finish the download")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if len(files) == 1:
        return files
    if files:
        raise _bad(path, f"has {len(files)} safetensors files and no {_INDEX}, which says what belongs together")
    pickles = [file for pattern in _PICKLES for file in path.glob(pattern)]
    if pickles:
        raise _bad(pickles[0], "is a pickle, which can run code when it is read; save the model as safetensors")
    raise _bad(path, "has no model.safetensors")


def _header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as handle:
            size = file.stat().st_size
            first = handle.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise _bad(file, "is no safetensors file, or cut off; fetch it again")
            described = json.loads(handle.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(file, f"can't be read: {error}") from None
    start = 8 + length
    found = {}
    try:
        for name, entry in described.items():
            if name == "__metadata__":
                continue
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
                raise ValueError(name)
            width = _WIDTHS.get(entry["dtype"])
            if start + end > size:
                raise _bad(file, f"is cut off within {clip(name)}; fetch it again")
            if end < begin or (width is not None and end - begin != width * math.prod(shape)):
                raise ValueError(name)
            found[name] = Stored(file, entry["dtype"], shape, start + begin, start + end)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _bad(file, "is damaged: its header describes no tensors; fetch it again") from None
    return found
