"""From the hub: a draft, a checkpoint or shards, resumed, checked, and under its own name only when it is whole.

Without a folder of the person's own everything stays in the hub's cache, where ``-hfd`` finds it, too. With one it is
gathered in a hidden folder beside its destination, checked there, and moved by renaming; what a killed pull has fetched
waits there for the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localspec.data.shards import MANIFEST, Manifest
from localspec.errors import DataError, FetchError, LocalspecError
from localspec.fetch import Progress
from localspec.gguf_file import GGUFFile, require_model
from localspec.hub import Hub, RemoteFile, Spec, causes, choose, from_cache
from localspec.share.artefact import CHECKPOINT_FILES, SELF_PROMPTS, WEIGHTS, require_fit
from localspec.speculator import CHECKPOINT_FILE, SpeculatorConfig, TargetIdentity


@dataclass(frozen=True)
class Pulled:
    """What came: its ``kind`` ("draft", "checkpoint" or "data") and where it lies: a file, or a directory."""

    kind: str
    path: Path


def pull(
    text: str,
    folder: Path | None = None,
    target: GGUFFile | None = None,
    data: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Pulled:
    """Fetch what ``text`` names: USER/REPO, USER/REPO:QUANT or USER/REPO:FILE.gguf; with ``data`` the shards of a data set,
    which are also taken where no model has that name.

    With ``target`` it must fit that model. A file in ``folder`` with another content stays, unless ``force``.

    Raises:
        FetchError: one line that says what to do. It never holds the token.
        ModelFileError, DataError, PairingError: what came is of no use; ``folder`` has not been touched.
    """
    wanted = Spec.parse(text, "pull")
    hub = Hub(wanted.repo, "dataset" if data else "model")
    if hub.offline:
        return _offline(hub, wanted, folder, target, data, "HF_HUB_OFFLINE is set")
    hub.has_token()
    what = wanted.repo
    try:
        hub, files = _look(hub, wanted, data)
        kind, names = _parts(files, wanted, hub.kind)
        if folder is None:
            what = f"{wanted.repo}/{names[0]}"
            paths = {}
            for name in names:
                what = f"{wanted.repo}/{name}"
                paths[name] = _cached(hub, name, files[name], progress)
            place = paths[names[-1]] if kind == "draft" else paths[names[-1]].parent
            _check_content(kind, place, files, target)
            return Pulled(kind, place)
        what = f"{wanted.repo}/{names[-1]}"
        return _into(folder, hub, kind, names, files, target, force, progress)
    except hub.failures as error:
        for cause in causes(error):
            if folder is not None and isinstance(cause, OSError) and _about(cause, folder):
                reason = f"{cause.filename or folder} can't be written: {cause.strerror}"
                raise FetchError(f"{reason}; choose another folder with -o, or make room") from error
        problem = hub.diagnose(error, what)
        if problem.lasting:
            raise FetchError(problem.text) from error
        return _offline(hub, wanted, folder, target, data or hub.kind == "dataset", problem.text)


def _look(hub: Hub, wanted: Spec, data: bool) -> tuple[Hub, Mapping[str, RemoteFile]]:
    """The repository that is meant, and its files."""
    try:
        return hub, hub.files()
    except hub.failures as error:
        absent = any(type(cause).__name__ == "RepositoryNotFoundError" for cause in causes(error))
        if data or wanted.quant or wanted.file or not absent:
            raise
        first = error
    other = Hub(wanted.repo, "dataset")
    with contextlib.suppress(*hub.failures):
        return other, other.files()
    raise first


def _parts(files: Mapping[str, RemoteFile], wanted: Spec, kind: str) -> tuple[str, list[str]]:
    """What a repository holds and which of its files are needed, that without which the others mean nothing last."""
    if kind == "dataset":
        if MANIFEST not in files:
            raise FetchError(f"{wanted.repo} is a data set without {MANIFEST}: no shards of localspec data")
        shards = sorted(name for name in files if name.endswith(".safetensors") and _plain(name))
        return "data", [*shards, *([SELF_PROMPTS] if SELF_PROMPTS in files else []), MANIFEST]
    has_gguf = any(name.lower().endswith(".gguf") for name in files)
    if not has_gguf and not wanted.quant and not wanted.file and {WEIGHTS, CHECKPOINT_FILE} <= set(files):
        missing = [name for name in CHECKPOINT_FILES if name not in files]
        if missing:
            raise FetchError(f"{wanted.repo} holds a checkpoint without {missing[0]}")
        return "checkpoint", list(CHECKPOINT_FILES)
    name = choose(files, wanted, "draft")
    if not _safe(name):
        raise FetchError(f"{wanted.repo} has a file with a name that would lie elsewhere; don't use it")
    return "draft", [name]


def _plain(name: str) -> bool:
    return "/" not in name and _safe(name)


def _safe(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\\" not in name and name.isprintable()


def _about(error: OSError, folder: Path) -> bool:
    """Whether an error comes from writing to `folder`."""
    if not isinstance(error.filename, str):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    name, place = Path(error.filename).absolute(), folder.absolute()
    return name.is_relative_to(place) or place.is_relative_to(name)


# -- without the hub ---------------------------------------------------------------------------------------------------


def _offline(hub: Hub, wanted: Spec, folder: Path | None, target: GGUFFile | None, data: bool, why: str) -> Pulled:
    """A draft out of the cache; everything else needs the hub."""
    if folder is not None or data:
        what = f"what has arrived is kept beside {folder}" if folder is not None else "what has arrived is kept in the cache"
        raise FetchError(f"{wanted.repo} can't be fetched, {why}; {what}: connect and give the same command")
    path = from_cache(hub, wanted, "draft", why)
    _check_content("draft", path, {}, target)
    return Pulled("draft", path)


# -- into the cache ----------------------------------------------------------------------------------------------------


def _cached(hub: Hub, name: str, remote: RemoteFile, progress: Progress | None) -> Path:
    _check_room(hub.cache, [] if hub.has(name) else [remote], "set HF_HOME to another folder")
    path = hub.download(name, progress)
    fault = _damage(path, remote)
    if fault is not None:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise FetchError(f"{name} arrived damaged ({fault}) and was deleted: try again")
    return path


# -- into a folder -----------------------------------------------------------------------------------------------------


def _into(
    folder: Path,
    hub: Hub,
    kind: str,
    names: list[str],
    files: Mapping[str, RemoteFile],
    target: GGUFFile | None,
    force: bool,
    progress: Progress | None,
) -> Pulled:
    if folder.exists() and not folder.is_dir():
        raise FetchError(f"-o {folder}: that is a file; give a directory")
    final = {name: folder / PurePosixPath(name).name for name in names}
    there = {name for name, path in final.items() if path.exists() and _damage(path, files[name]) is None}
    others = [path for name, path in final.items() if path.exists() and name not in there]
    if others and not force:
        raise FetchError(f"{others[0]} exists with another content: choose another folder with -o, or give --force")
    staging = folder / f".{hub.repo.replace('/', '--')}.pull"
    waiting = {name for name in names if name not in there and _damage(staging / name, files[name]) is None}
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if name not in there | waiting]
    _check_room(folder, [files[name] for name in missing], "choose another folder with -o")
    for name in missing:
        path = hub.download(name, progress, staging)
        fault = _damage(path, files[name])
        if fault is not None:
            path.unlink(missing_ok=True)
            raise FetchError(f"{name} arrived damaged ({fault}) and was deleted: try again")
    moved = {name: final[name] if name in there else staging / name for name in names}
    try:
        _check_parts(kind, moved, files, target)
    except LocalspecError:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where there is nothing else in it
        raise
    for name in names:  # the last is what makes the others count
        if moved[name] != final[name]:
            os.replace(moved[name], final[name])
    shutil.rmtree(staging, ignore_errors=True)
    return Pulled(kind, final[names[0]] if kind == "draft" else folder)


def _check_parts(kind: str, paths: Mapping[str, Path], files: Mapping[str, RemoteFile], target: GGUFFile | None) -> None:
    """_check_content, where parts lie in several folders."""
    if kind == "draft":
        _check_content(kind, next(iter(paths.values())), files, target)
    else:
        name = MANIFEST if kind == "data" else CHECKPOINT_FILE
        _check_content(kind, paths[name].parent, files, target)


def _check_room(folder: Path, files: Iterable[RemoteFile], otherwise: str) -> None:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    needed = sum(remote.n_bytes or 0 for remote in files)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise FetchError(
            f"it takes {needed / 1e6:.0f} MB, and the disk that holds {folder} has {free / 1e6:.0f} MB left: free some "
            f"space, or {otherwise}"
        )


def _damage(path: Path, remote: RemoteFile) -> str | None:
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
    wanted = remote.sha256 or remote.sha1 or ""
    found = digest.hexdigest()
    return None if found == wanted else f"SHA {found[:12]}, not {wanted[:12]}"


def _check_content(kind: str, path: Path, files: Mapping[str, RemoteFile], target: GGUFFile | None) -> None:
    """Raise unless what came is what localspec reads, and fits ``target``."""
    if kind == "draft":
        if target is not None:
            require_fit(target, path)
        else:
            require_model(GGUFFile.open(path, "draft"), "draft")
        return
    if kind == "checkpoint":
        identity = SpeculatorConfig.load(path).target
    else:
        manifest = Manifest.load(path)
        identity = manifest.identity
        for shard in manifest.shards:
            remote = files.get(str(shard["file"]))
            if remote is None or remote.sha256 not in (None, shard["sha256"]):
                raise DataError(f"{shard['file']} there is not the shard that {MANIFEST} names: it was changed since")
    if target is not None:
        identity.require(TargetIdentity.of(target), f"the {kind}")
