"""From the hub: which repository is meant, which of its files are needed, and whether what came is of use."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from localspec.data.shards import MANIFEST, Manifest
from localspec.errors import DataError, FetchError
from localspec.fetch import Progress, cache_dir
from localspec.gguf_file import GGUFFile, require_model
from localspec.hub import Hub, RemoteFile, Spec, causes, choose, from_cache
from localspec.share.arrival import arrive, safe
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
    which are also taken where no model has that name. It goes into ``folder``, else into localspec's own cache, which alone
    decides where the hub is out of reach.

    With ``target`` it must fit that model. A file in ``folder`` with another content stays, unless ``force``.

    Raises:
        FetchError: one line that says what to do. It never holds the token.
        ModelFileError, DataError, PairingError: what came is of no use; ``folder`` has not been touched.
    """
    wanted = Spec.parse(text, "pull")
    hub = Hub(wanted.repo, "dataset" if data else "model")
    if hub.offline:
        return _without_hub(hub, wanted, folder, target, "HF_HUB_OFFLINE is set")
    what, place = wanted.repo, folder
    try:
        hub.has_token()
        hub, files = _look(hub, wanted, data)
        kind, names = _parts(files, wanted, hub.kind)
        what = f"{wanted.repo}/{names[0]}" if kind == "draft" else wanted.repo
        place = folder if folder is not None else _own(hub)
        paths = arrive(hub, names, files, place, force or folder is None, progress,
                       lambda staged: _check(kind, staged, files, target))  # fmt: skip
        return Pulled(kind, paths[names[0]] if kind == "draft" else place)
    except hub.failures as error:
        for cause in causes(error):
            if place is not None and isinstance(cause, OSError) and _about(cause, place):
                reason = f"{cause.filename or place} can't be written: {cause.strerror}"
                raise FetchError(f"{reason}; choose another folder with -o, or make room") from error
        problem = hub.diagnose(error, what)
        if problem.lasting:
            raise FetchError(problem.text) from error
        return _without_hub(hub, wanted, folder, target, problem.text)


def _own(hub: Hub) -> Path:
    """Where localspec keeps what it pulled from a repository."""
    return cache_dir() / "hub" / f"{hub.kind}s--{hub.repo.replace('/', '--')}"


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


def _parts(files: Iterable[str], wanted: Spec, kind: str) -> tuple[str, list[str]]:
    """What a repository holds and which of its files are needed, that without which the others mean nothing last."""
    names = set(files)
    if kind == "dataset":
        if MANIFEST not in names:
            raise FetchError(f"{wanted.repo} is a data set without {MANIFEST}: no shards of localspec data")
        shards = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name and safe(name))
        return "data", [*shards, *({SELF_PROMPTS} & names), MANIFEST]
    has_gguf = any(name.lower().endswith(".gguf") for name in names)
    if not has_gguf and not wanted.quant and not wanted.file and {WEIGHTS, CHECKPOINT_FILE} <= names:
        missing = [name for name in CHECKPOINT_FILES if name not in names]
        if missing:
            raise FetchError(f"{wanted.repo} holds a checkpoint without {missing[0]}")
        return "checkpoint", list(CHECKPOINT_FILES)
    name = choose(names, wanted, "draft")
    if not safe(name):
        raise FetchError(f"{wanted.repo} has a file with a name that would lie elsewhere; don't use it")
    return "draft", [name]


def _about(error: OSError, folder: Path) -> bool:
    """Whether an error comes from writing to `folder`."""
    if not isinstance(error.filename, str):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    name, place = Path(error.filename).absolute(), folder.absolute()
    return name.is_relative_to(place) or place.is_relative_to(name)


def _without_hub(hub: Hub, wanted: Spec, folder: Path | None, target: GGUFFile | None, why: str) -> Pulled:
    """What was pulled before, or what -hfd has left in the hub's cache; not where a folder is to be filled."""
    if folder is None:
        for kind in ("model", "dataset") if hub.kind == "model" else ("dataset",):
            place = _own(Hub(wanted.repo, kind))
            with contextlib.suppress(FetchError):
                what, names = _parts((path.name for path in place.glob("*")), wanted, kind)
                _check(what, {name: place / name for name in names}, None, target)
                return Pulled(what, place / names[0] if what == "draft" else place)
        if hub.kind == "model" and hub.cached():
            path = from_cache(hub, wanted, "draft", why)
            _check("draft", {path.name: path}, None, target)
            return Pulled("draft", path)
    raise FetchError(f"{wanted.repo} can't be fetched, because {why}; what had arrived is kept: connect and pull again")


def _check(kind: str, paths: Mapping[str, Path], files: Mapping[str, RemoteFile] | None, target: GGUFFile | None) -> None:
    """Raise unless what came is what localspec reads, and fits ``target``. ``files``: what the hub says of them."""
    if kind == "draft":
        path = next(iter(paths.values()))
        if target is not None:
            require_fit(target, path)
        else:
            require_model(GGUFFile.open(path, "draft"), "draft")
        return
    if kind == "checkpoint":
        identity = SpeculatorConfig.load(paths[CHECKPOINT_FILE].parent).target
    else:
        manifest = Manifest.load(paths[MANIFEST].parent)
        identity = manifest.identity
        for shard in manifest.shards if files is not None else ():
            remote = files.get(str(shard["file"])) if files is not None else None
            if remote is None or remote.sha256 not in (None, shard["sha256"]):
                raise DataError(f"{shard['file']} there is not the shard that {MANIFEST} names: it was changed since")
    if target is not None:
        identity.require(TargetIdentity.of(target), f"the {kind}")
