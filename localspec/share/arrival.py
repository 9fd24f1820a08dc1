"""How files come into a folder: resumed, compared with the hub's checksums, and under their own names only when all of them
are whole.

They are gathered in a hidden folder beside their destination and moved by renaming. What a killed pull has fetched waits
there for the next one, to the byte; when everything has moved the hidden folder goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from localspec.errors import FetchError, LocalspecError
from localspec.fetch import Progress, locked
from localspec.hub import Hub, RemoteFile


def safe(name: str) -> bool:
    """Whether a name that came from elsewhere stays inside the folder that it is put into."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\\" not in name and name.isprintable()


def arrive(
    hub: Hub,
    names: Sequence[str],
    files: Mapping[str, RemoteFile],
    folder: Path,
    replace: bool,
    progress: Progress | None,
    check: Callable[[Mapping[str, Path]], None],
) -> dict[str, Path]:
    """Fetch ``names`` into ``folder`` (without their own folders) and return where they lie. They are moved in this order;
    ``check`` is called before, with the path of each, and raises where they are of no use. A file that is there with
    another content is replaced, or with ``replace`` False an error.

    Raises FetchError, what ``check`` raises, and what huggingface-hub does.
    """
    if folder.exists() and not folder.is_dir():
        raise FetchError(f"-o {folder}: that is a file; give a directory")
    final = {name: folder / PurePosixPath(name).name for name in names}
    there = {name for name in names if final[name].exists() and damage(final[name], files[name]) is None}
    for name in names:
        if final[name].exists() and name not in there and not replace:
            raise FetchError(f"{final[name]} exists with another content: choose another folder with -o, or give --force")
    if there == set(names):
        return final
    staging = folder / f".{hub.repo.replace('/', '--')}.pull"
    staged = {name: final[name] if name in there else staging / final[name].name for name in names}
    staging.mkdir(parents=True, exist_ok=True)
    with locked(staging / ".lock", lambda: None):
        missing = [name for name in names if not staged[name].exists() or damage(staged[name], files[name]) is not None]
        parts = {name: _part(staging, name, files[name]) for name in missing}
        try:
            _check_room(folder, [(files[name], parts[name]) for name in missing])
            for name in missing:
                _fetch(hub, name, files[name], parts[name], staged[name], progress)
        except BaseException:
            if not any(path.stat().st_size for path in staging.iterdir()):
                _clear(staging)
            raise
        try:
            check(staged)
        except LocalspecError:
            _clear(staging)
            raise
        for name in names:
            os.replace(staged[name], final[name])
        _clear(staging, whole=False)
    return final


def _part(staging: Path, name: str, remote: RemoteFile) -> Path:
    # Named by its content: what has become of a file since is not put behind what had arrived of it.
    return staging / f"{(remote.sha256 or remote.sha1 or PurePosixPath(name).name)[:32]}.part"


def _fetch(hub: Hub, name: str, remote: RemoteFile, part: Path, path: Path, progress: Progress | None) -> None:
    hub.resume(name, part, progress)
    fault = damage(part, remote)
    if fault is not None:
        part.unlink(missing_ok=True)
        raise FetchError(f"{name} arrived damaged ({fault}) and was deleted: try again")
    os.replace(part, path)


def _clear(staging: Path, whole: bool = True) -> None:
    """Remove the hidden folder, and with ``whole`` the folders around it where there is nothing else in them."""
    shutil.rmtree(staging, ignore_errors=True)
    if whole:
        with contextlib.suppress(OSError):
            staging.parent.rmdir()


def _check_room(folder: Path, files: Iterable[tuple[RemoteFile, Path]]) -> None:
    """Raise before a download that can't succeed. ``files``: each with the part of it that is there."""
    needed = sum((remote.n_bytes or 0) - (part.stat().st_size if part.exists() else 0) for remote, part in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            f"it takes {needed / 1e6:.0f} MB, and the disk that holds {folder} has {free / 1e6:.0f} MB left: free some "
            "space, or choose another folder with -o"
        )


def damage(path: Path, remote: RemoteFile) -> str | None:
    """How a file on disk differs from what the hub says of it, None where it doesn't."""
    try:
        n_bytes = path.stat().st_size
        if remote.n_bytes is not None and n_bytes != remote.n_bytes:
            return f"{n_bytes:,} bytes, not {remote.n_bytes:,}"
        if remote.sha256 is None and remote.sha1 is None:
            return None
        digest = hashlib.sha256() if remote.sha256 else hashlib.sha1(f"blob {n_bytes}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        return error.strerror or "it can't be read"
    wanted, found = remote.sha256 or remote.sha1 or "", digest.hexdigest()
    return None if found == wanted else f"SHA {found[:12]}, not {wanted[:12]}"
