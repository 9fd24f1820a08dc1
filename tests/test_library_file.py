"""A plug-in file that was cut off is noticed before the loader maps it: dlopen of one can end the process with SIGBUS."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from localspec import native
from localspec.errors import NativeError
from localspec.library_file import check_whole


def cut(source: bytes, n: int, folder: Path) -> Path:
    path = folder / "library"
    path.write_bytes(source[:n])
    return path


def test_the_whole_plugin_passes() -> None:
    check_whole(native.backend_path())


@pytest.mark.skipif(sys.platform != "linux", reason="cuts an ELF file")
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 0.999])
def test_the_plugin_cut_anywhere_is_refused(share: float, tmp_path: Path) -> None:
    whole = native.backend_path().read_bytes()
    path = cut(whole, int(len(whole) * share), tmp_path)
    with pytest.raises(NativeError, match="cut off after"):
        check_whole(path)


@pytest.mark.skipif(sys.platform != "linux", reason="cuts an ELF file")
def test_what_is_not_refused_does_not_kill_the_loader(tmp_path: Path) -> None:
    """At every multiple of 4096 bytes and beside it, where full disks cut: refused, or harmless to open."""
    whole = native.backend_path().read_bytes()
    let_through = []
    for n in sorted({m + d for m in range(0, len(whole) + 1, 4096) for d in (-1, 0, 1)} | {len(whole) - 1}):
        if not 0 <= n < len(whole):
            continue
        path = cut(whole, n, tmp_path)
        try:
            check_whole(path)
        except NativeError:
            continue
        let_through.append(n)
    assert let_through == [0, 1]  # too short to say what they are: the loader reads that much before it maps
    for n in let_through:
        code = "import ctypes, sys\ntry: ctypes.CDLL(sys.argv[1])\nexcept OSError: print('refused')"
        command = [sys.executable, "-c", code, str(cut(whole, n, tmp_path))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "refused\n"), n


def macho(n_bytes: int) -> bytes:
    """A 64-bit Mach-O dylib of one segment that ends at ``n_bytes``, after a command of another kind."""
    other = struct.pack("<2I 8x", 0x1B, 16)
    segment = struct.pack("<2I 16s 4Q 4I", 0x19, 72, b"__LINKEDIT", 0, 4096, 104, n_bytes - 104 - 16, 1, 1, 0, 0)
    header = struct.pack("<4s 3I 4I", b"\xcf\xfa\xed\xfe", 0x0100000C, 0, 6, 2, len(other) + len(segment), 0, 0)
    return (header + other + segment).ljust(n_bytes - 16, b"\0")


def test_macho_files(tmp_path: Path) -> None:
    whole = macho(5000)
    check_whole(cut(whole, len(whole), tmp_path))
    for n in (10, 40, 60, 110, len(whole) - 1):
        with pytest.raises(NativeError, match=f"cut off after {n} bytes"):
            check_whole(cut(whole, n, tmp_path))


def test_a_header_that_points_nowhere(tmp_path: Path) -> None:
    whole = bytearray(native.backend_path().read_bytes()[:4096])
    whole[32:40] = b"\xff" * 8
    with pytest.raises(NativeError):
        check_whole(cut(bytes(whole), len(whole), tmp_path))


def test_other_files_are_left_to_the_loader(tmp_path: Path) -> None:
    for content in (b"", b"not a library", b"MZ" + bytes(100)):
        check_whole(cut(content, len(content), tmp_path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="nowhere"):
        check_whole(tmp_path / "nowhere")
