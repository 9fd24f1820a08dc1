"""How a converted file comes into being: looked at before the work, written under a temporary name, renamed when whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.errors import LocalspecError, ModelFileError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES, StringArray, clip

TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


def check_output(target: Path, overwrite: bool, *sources: Path) -> None:
    """Raise UsageError unless `target` may be written: a new file, or one to be replaced that is none of `sources`."""
    if not target.name or (target.exists() and not target.is_file()):
        raise UsageError(f"{target}: not a regular file; name the .gguf file to write")
    if target.exists() and any(source.exists() and target.samefile(source) for source in sources):
        raise UsageError(f"{target} is read for this, so it can't be replaced: name another file")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists: name another file or give --force")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such directory")


@contextlib.contextmanager
def partial(target: Path) -> Iterator[Path]:
    """A path to write to; when the block ends without an error, that file takes `target`'s name, otherwise it is gone.

    Removes what killed runs left. Errors of the file system become LocalspecError.
    """
    path = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        _remove_leftovers(target)
        yield path
        os.replace(path, target)
    except OSError as error:
        # numpy's writing of tensors gives no reason, only "8704 requested and 0 written"
        reason = error.strerror or "writing failed: is the disk full, or the size of files limited?"
        raise LocalspecError(f"{target}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A path beside `target` for what is needed on the way to it; the file is gone when the block ends.

    Removes what killed runs left. Errors of the file system become LocalspecError.
    """
    stem = target.with_name(f"{target.name}.unquantised")
    path = stem.with_name(f".{stem.name}.{os.getpid()}.part")
    try:
        _remove_leftovers(stem)
        yield path
    except OSError as error:
        reason = error.strerror or "writing failed: is the disk full, or the size of files limited?"
        raise LocalspecError(f"{path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def write_gguf(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]]
) -> None:
    """Write one GGUF file. `keys` are full names in order: int becomes u32, float f32, a list an array of i32 or
    bool; `Typed` keeps any other type. `tensors`: type name and, rows first, the values (F32, I64...) or the rows' bytes
    u8[..., n].
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, keys)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(TYPE_NUMBERS[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Streamed:
    """A tensor that is made while it is written: GGUF's type, shape (rows first), and its data in parts, in order."""

    kind: str
    shape: tuple[int, ...]
    n_bytes: int
    parts: Callable[[], Iterable[np.ndarray]]


def stream_gguf(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Streamed]) -> None:
    """`write_gguf` for a model that doesn't fit into the memory: one part of one tensor is held at a time."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, keys)
    for name, tensor in tensors.items():
        number = gguf.GGMLQuantizationType(TYPE_NUMBERS[tensor.kind])
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    for name, tensor in tensors.items():
        writer.write_padding(file, file.tell())
        start = file.tell()
        for part in tensor.parts():
            part.tofile(file)
        if file.tell() - start != tensor.n_bytes:
            raise ValueError(f"{name}: {file.tell() - start} bytes written, {tensor.n_bytes} announced")
        writer.write_padding(file, tensor.n_bytes)
    writer.close()


def _add_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    import gguf

    types = gguf.GGUFValueType
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if not isinstance(value, Typed):
            _require_storable(key, value)
        if isinstance(value, Typed):
            kind, is_array = types(value.kind), value.is_array
            writer.add_key_value(key, value.value, types.ARRAY if is_array else kind, sub_type=kind if is_array else None)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            is_bools = all(isinstance(item, bool) for item in value)
            writer.add_key_value(key, list(value), types.ARRAY, sub_type=types.BOOL if is_bools else types.INT32)


def _require_storable(key: str, value: Any) -> None:
    """Raise ModelFileError for a number beyond the type that it is stored as (see `write_gguf`)."""
    if isinstance(value, bool | str):
        return
    if isinstance(value, int):
        fits = 0 <= value < 1 << 32
    elif isinstance(value, float):
        fits = abs(value) <= float(np.finfo(np.float32).max)
    else:
        values = value.tolist() if isinstance(value, np.ndarray) else value
        fits = isinstance(values, list | tuple) and all(isinstance(v, int) and -1 << 31 <= v < 1 << 31 for v in values)
    if not fits:
        shown = clip(repr(value), 60)
        raise ModelFileError(f"{clip(key)} would be {shown}, which no file can hold: mend the checkpoint's configuration")


class Typed:
    """A metadata value as another file stores it, with its GGUF type (of the elements, where it is an array)."""

    def __init__(self, value: Any, kind: int, is_array: bool):
        if isinstance(value, StringArray):
            value = value.items()
        self.value: Any = value.tolist() if isinstance(value, np.ndarray) else value
        self.kind, self.is_array = kind, is_array


def copied_keys(gguf_file: GGUFFile, prefix: str = "") -> dict[str, Typed]:
    """The metadata of a file whose keys begin with `prefix`, as they are. Empty arrays, which say nothing, are left out."""
    kept: dict[str, Typed] = {}
    for key, value in gguf_file.metadata.items():
        kind, is_array = gguf_file.types[key]
        if key.startswith(prefix) and not (is_array and isinstance(value, Sequence | np.ndarray) and len(value) == 0):
            kept[key] = Typed(value, kind, is_array)
    return kept


def stored_rows(gguf_file: GGUFFile, name: str) -> np.ndarray:
    """A tensor's stored bytes as u8[..., bytes of a row], a view into the file."""
    info = gguf_file.tensors[name]
    return np.frombuffer(gguf_file.tensor_bytes(name), np.uint8).reshape(*reversed(info.shape[1:]), -1)


def dequantised(gguf_file: GGUFFile, name: str) -> np.ndarray:
    """A tensor's values, f32, rows first."""
    import gguf

    info = gguf_file.tensors[name]
    values: np.ndarray = gguf.dequantize(stored_rows(gguf_file, name), gguf.GGMLQuantizationType(TYPE_NUMBERS[info.type]))
    return values.astype(np.float32, copy=False)


def _remove_leftovers(target: Path) -> None:
    """Unfinished files of conversions to `target` that were killed."""
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(f".{target.name}.").removesuffix(".part")
        if path.name == f".{target.name}.{pid}.part" and pid.isdigit() and not _is_alive(int(pid)):
            path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's
    return True
