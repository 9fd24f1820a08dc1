"""Is a shared library's file as long as its own headers say?

The system maps a library without reading it: where the file ends too soon, the first touch of a missing page kills the
process with SIGBUS, which nobody can catch. So the lengths are compared before a library is loaded. ELF (Linux) and
Mach-O (macOS) are understood; any other file is left to the loader, which refuses what it does not know.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from localspec.errors import NativeError

_ELF64_LE = b"\x7fELF\x02\x01"
_MACHO64_LE = b"\xcf\xfa\xed\xfe"
_LC_SEGMENT_64 = 0x19


def check_whole(path: Path) -> None:
    """Raise NativeError where the file at ``path`` can't be read or is shorter than its headers say."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            needed = _bytes_needed(file)
    except OSError as error:
        raise NativeError(f"{path}: {error.strerror}: pip install localspec again") from error
    except (struct.error, OverflowError, ValueError):  # the file ends within its headers, or they point nowhere
        needed = size + 1
    if size < needed:
        raise NativeError(f"{path}: cut off after {size} bytes: pip install localspec again")


def _bytes_needed(file: BinaryIO) -> int:
    """How long the file must be at least; 0 where its kind is not known."""
    magic = file.read(6)
    if magic == _ELF64_LE:
        return _elf(file)
    if magic[:4] == _MACHO64_LE:
        return _macho(file)
    return 0


def _elf(file: BinaryIO) -> int:
    """The end of whatever the program headers map and of the section-header table, which linkers write last."""
    file.seek(0)
    header = struct.unpack("<16s2H I 3Q I 6H", file.read(64))
    segments, sections = header[5], header[6]
    segment_size, n_segments, section_size, n_sections = header[9:13]
    ends = [64, sections + section_size * n_sections]
    for i in range(n_segments):
        file.seek(segments + i * segment_size)
        _, _, offset, _, _, in_file, _, _ = struct.unpack("<2I 6Q", file.read(56))
        ends.append(offset + in_file)
    return max(ends)


def _macho(file: BinaryIO) -> int:
    """The end of the last segment: symbols and signature lie inside __LINKEDIT."""
    file.seek(0)
    n_commands, commands_size = struct.unpack("<16x 2I 8x", file.read(32))
    commands = file.read(commands_size)
    ends = [32 + commands_size]
    at = 0
    for _ in range(n_commands):
        kind, length = struct.unpack_from("<2I", commands, at)
        if kind == _LC_SEGMENT_64:
            offset, in_file = struct.unpack_from("<40x 2Q", commands, at)
            ends.append(offset + in_file)
        at += max(length, 8)
    return max(ends)
