"""Model files from the Hugging Face hub: ``USER/REPO[:QUANT]`` to a path in the hub's own cache.

Everything goes through huggingface-hub, so its cache, token, endpoint and offline mode (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE) hold here too. The library is imported only when it is needed: that takes a good part of a second.
Which file is meant follows llama.cpp's ``-hf``, with one difference: a quantisation matches whole words only, so
``F16`` is never answered with a BF16 file.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from localspec.errors import FetchError
from localspec.fetch import Progress

_PREFERRED = ("Q4_K_M", "Q8_0")
_NEVER = ("mmproj", "imatrix")
# Small drafts that are published beside the model they draft for.
_SIDECARS = ("mtp-", "eagle3-", "dflash-", "dspark-")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_REVISION = re.compile(r"\w[\w./-]*")
_LISTED = 12
_CONFIG = "config.json"
#: what else belongs to a model in Hugging Face's layout, beside its weights
_BESIDES = (
    "localspec.json",
    "adapter_config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "model.safetensors.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
)  # fmt: skip
_POLL_S = 0.25


@dataclass(frozen=True)
class Spec:
    """What ``-hf`` or ``-hfd`` names: a repository, and a quantisation (``quant``) or one ``file`` in it, or neither."""

    repo: str
    quant: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str, flag: str) -> Spec:
        """Reads ``USER/REPO``, ``USER/REPO:QUANT``, ``USER/REPO:FILE.gguf`` or ``USER/REPO/FILE.gguf``."""
        repo, colon, choice = text.strip().partition(":")
        if not colon and repo.lower().endswith(".gguf") and repo.count("/") >= 2:
            user, name, choice = repo.split("/", 2)
            repo = f"{user}/{name}"
        if not _REPO.fullmatch(repo) or (colon and not choice):
            raise FetchError(f"{flag} {text!r}: expected USER/REPO, USER/REPO:QUANT or USER/REPO:FILE.gguf")
        if choice.lower().endswith(".gguf"):
            return cls(repo, file=choice)
        return cls(repo, quant=choice or None)


def resolve(spec: str, role: str, progress: Progress | None = None) -> Path:
    """The local path of the file that ``spec`` names, downloaded into the hub's cache if it is not there.

    ``role`` is ``target`` (``-hf``) or ``draft`` (``-hfd``, where the small drafts that lie beside a model count too).
    ``progress`` is called, from this thread or another, while something is downloaded, and not where nothing is.
    Offline, or when the hub is out of reach, the cache alone decides.

    Raises:
        FetchError: one line that says what to do. It never holds the token.
    """
    wanted = Spec.parse(spec, "-hfd" if role == "draft" else "-hf")
    hub = Hub(wanted.repo)
    if hub.offline:
        return from_cache(hub, wanted, role, "HF_HUB_OFFLINE is set")
    what = wanted.repo
    try:
        hub.has_token()
        names = hub.names()
        name = choose(names, wanted, role)
        what = f"{wanted.repo}/{name}"
        return hub.download(name, progress)
    except hub.failures as error:
        problem = hub.diagnose(error, what)
        if problem.lasting:
            raise FetchError(problem.text) from error
        return from_cache(hub, wanted, role, problem.text)


def snapshot(repo: str, check: Callable[[Path], None], progress: Progress | None = None) -> Path:
    """The local folder of a model's own weights (safetensors), configuration and tokenizer: ``USER/REPO`` on the hub, or
    ``USER/REPO@REVISION`` (a branch, a tag or a commit).

    ``check`` gets the folder when it holds config.json alone, and raises for a model that is not worth the download.
    ``progress`` is told of all files together. Offline, or when the hub is out of reach, the cache alone decides.

    Raises:
        FetchError: one line that says what to do. It never holds the token.
    """
    repo, pinned, revision = repo.partition("@")
    if not _REPO.fullmatch(repo) or (pinned and not _REVISION.fullmatch(revision)):
        raise FetchError(f"hf://{repo}{pinned}{revision}: expected hf://USER/REPO or hf://USER/REPO@REVISION")
    hub = Hub(repo, revision=revision or "main")
    if hub.offline:
        return _cached_snapshot(hub, repo, "HF_HUB_OFFLINE is set")
    what = repo
    try:
        wanted = _of_model(hub.names(), repo)
        n_done, n_all = 0, sum(hub.size(name) for name in wanted)

        def together(_title: str, n_bytes: int, _total: int) -> None:
            if progress is not None:
                progress(f"{repo} from {hub.endpoint}", n_done + n_bytes, n_all)

        folder = None
        for name in wanted:
            what = f"{repo}/{name}"
            path = hub.download(name, together if progress is not None else None)
            if folder not in (None, path.parent):
                raise FetchError(f"{repo} was changed while it was downloaded: try again")
            if folder is None:
                check(path.parent)
            folder, n_done = path.parent, n_done + hub.size(name)
        assert folder is not None  # config.json is always wanted
        return folder
    except hub.failures as error:
        problem = hub.diagnose(error, what)
        if problem.lasting:
            raise FetchError(problem.text) from error
        return _cached_snapshot(hub, repo, problem.text)


def _of_model(names: Sequence[str], repo: str) -> list[str]:
    """Of a repository's files those that `snapshot` wants, config.json first."""
    every = [name for name in names if "/" not in name]
    weights = [name for name in every if name.endswith(".safetensors")]
    weights = [name for name in weights if name.startswith("model")] or weights
    if not weights:
        ggufs = any(name.lower().endswith(".gguf") for name in names)
        instead = f"it holds GGUF files, which need no conversion: -hf {repo}" if ggufs else "name another repository"
        raise FetchError(f"{repo} has no weights in safetensors; {instead}")
    if _CONFIG not in every:
        raise FetchError(f"{repo} has no {_CONFIG}: it is no model in Hugging Face's layout; name another repository")
    return [_CONFIG, *(name for name in every if name in _BESIDES), *weights]


def _cached_snapshot(hub: Hub, repo: str, why: str) -> Path:
    for folder in hub.snapshots():
        if (folder / _CONFIG).is_file() and any(folder.glob("*.safetensors")):
            return folder
    raise FetchError(
        f"{repo} is not in the cache ({hub.cache}), and {why}; connect and try again, or name a directory that holds it"
    )


def choose(names: Iterable[str], spec: Spec, role: str) -> str:
    """The one of a repository's file names that ``spec`` means. Raises FetchError that lists what there is."""
    every = sorted(name for name in names if name.lower().endswith(".gguf"))
    if spec.file is not None:
        if spec.file not in every:
            raise FetchError(f"{spec.repo} has no file {spec.file}; {_listing(every)}")
        return _whole([spec.file], spec)
    models = [name for name in every if not _has(name, _NEVER + _SIDECARS)]
    found = _matches(models, spec.quant)
    if not found and role == "draft":
        found = _matches([name for name in every if not _has(name, _NEVER)], spec.quant)
    if not found:
        what = f"no GGUF model of quantisation {spec.quant}" if spec.quant else "no GGUF model"
        raise FetchError(f"{spec.repo} has {what}; {_listing(every)}")
    return _whole(found, spec)


def _has(name: str, marks: Sequence[str]) -> bool:
    return any(mark in PurePosixPath(name).name.lower() for mark in marks)


def _matches(names: Sequence[str], quant: str | None) -> Sequence[str]:
    """The names of one quantisation: the one asked for, else the first preferred one that exists, else all names."""
    for tag in (quant,) if quant else _PREFERRED:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}[.-]", re.IGNORECASE)
        if found := [name for name in names if pattern.search(name)]:
            return found
    return () if quant else names


def _whole(names: Sequence[str], spec: Spec) -> str:
    """The first name that is not one of several splits."""
    for name in names:
        if not _SPLIT.search(name):
            return name
    count = int(_SPLIT.search(names[0]).group(1))  # type: ignore[union-attr]  # every name has matched above
    raise FetchError(
        f"{spec.repo}: {names[0]} is one of {count} splits, which can't be loaded; download all of them, merge them "
        "(llama-gguf-split --merge FIRST.gguf OUT.gguf) and name the result with --target or --draft"
    )


def _listing(names: Sequence[str]) -> str:
    if not names:
        return "it holds no GGUF file at all; look for a repository whose name ends in -GGUF"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"it has {', '.join(names[:_LISTED])}{more}"


def from_cache(hub: Hub, spec: Spec, role: str, why: str) -> Path:
    """The cached file that ``spec`` means, where the hub can't be asked, for the reason ``why``. Raises FetchError."""
    cached = hub.cached()
    if not cached:
        raise FetchError(
            f"{spec.repo} is not in the cache ({hub.cache}), and {why}; connect and try again, or name a file with "
            + ("--draft FILE" if role == "draft" else "--target FILE")
        )
    try:
        return cached[choose(cached, spec, role)]
    except FetchError as error:
        raise FetchError(f"{error} (only the cache was searched, because {why})") from error


@dataclass(frozen=True)
class Problem:
    """Why the hub did not give a file. A ``lasting`` one is a whole message; any other follows "because", and means
    that a copy in the cache will do."""

    text: str
    lasting: bool


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it wraps."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file: its size in bytes (None: it doesn't say), and ``sha256`` (hex) of a large one or git's
    hash ``sha1`` of a small one."""

    n_bytes: int | None
    sha256: str | None = None
    sha1: str | None = None


class Hub:
    """One repository on the hub, through huggingface-hub of any version we allow (0.x uses requests, 1.x httpx)."""

    def __init__(self, repo: str, kind: str = "model", revision: str = "main") -> None:
        """``kind`` is "model" or "dataset": two repositories may have the same name. ``revision``: a branch, tag, commit."""
        self.repo, self.kind, self._revision = repo, kind, revision
        self._commit: str | None = None
        self._files: dict[str, RemoteFile] = {}
        self._lib: Any = importlib.import_module("huggingface_hub")
        self._constants: Any = importlib.import_module("huggingface_hub.constants")
        utils: Any = importlib.import_module("huggingface_hub.utils")
        utils.logging.set_verbosity_error()  # its hints are not about what the person asked for
        if self._constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
            utils.disable_progress_bars()  # the rate falls off their ends at 80 columns
        # Besides what fails on the way: ValueError, KeyError and TypeError come from an answer that is not the hub's,
        # RuntimeError from the hf-xet extension, which raises nothing more specific.
        kinds: list[type[Exception]] = [OSError, ValueError, KeyError, TypeError, RuntimeError]
        for module, name in (("httpx", "HTTPError"), ("httpx", "InvalidURL"), ("requests", "RequestException")):
            with contextlib.suppress(ImportError):
                kinds.append(getattr(importlib.import_module(module), name))
        #: What huggingface-hub raises when it can't deliver.
        self.failures: tuple[type[Exception], ...] = tuple(kinds)

    @property
    def offline(self) -> bool:
        return bool(self._constants.HF_HUB_OFFLINE)

    @property
    def cache(self) -> Path:
        return Path(self._constants.HF_HUB_CACHE)

    @property
    def _folder(self) -> Path:
        """Where the cache keeps this repository."""
        return self.cache / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def endpoint(self) -> str:
        """The hub's address, without a password that somebody may have put in it."""
        return re.sub(r"//[^/@]*@", "//", str(self._constants.ENDPOINT))

    @property
    def api(self) -> Any:
        """huggingface-hub's HfApi."""
        return self._lib.HfApi()

    def has_token(self) -> bool:
        """Whether huggingface-hub finds a token, in HF_TOKEN or where a login left it. Raises FetchError for one that can't
        be sent: the library's own error would show it."""
        token: str | None = self._lib.get_token()
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            where = "HF_TOKEN, or what `hf auth login` stored,"
            raise FetchError(f"{where} holds characters that no token has: copy the token again")
        return token is not None

    @property
    def addition(self) -> Any:
        """huggingface-hub's class of a file to add in a commit."""
        return self._lib.CommitOperationAdd

    @property
    def uses_xet(self) -> bool:
        """Whether files go through the hf-xet extension, in pieces that are sent once. False for versions of huggingface-hub
        that can't switch it off: those ask the repository."""
        allowed = getattr(self._constants, "HF_HUB_DISABLE_XET", True) is False
        return allowed and importlib.util.find_spec("hf_xet") is not None

    @contextlib.contextmanager
    def own_bars(self) -> Iterator[None]:
        """While entered, huggingface-hub shows its own progress bars, unless the person has switched them off."""
        utils: Any = importlib.import_module("huggingface_hub.utils")
        if self._constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
            yield
            return
        utils.enable_progress_bars()
        try:
            yield
        finally:
            utils.disable_progress_bars()

    def names(self) -> list[str]:
        """The names of all files on the main branch."""
        return list(self.files())

    def files(self) -> dict[str, RemoteFile]:
        """All files on the main branch, by name."""
        timeout = float(self._constants.HF_HUB_ETAG_TIMEOUT)
        pinned = None if self._revision == "main" else self._revision
        info = self.api.repo_info(
            self.repo, repo_type=self.kind, revision=pinned, timeout=timeout, files_metadata=True
        )
        self._commit = info.sha
        self._files = {}
        for sibling in info.siblings or ():
            if not isinstance(sibling.rfilename, str):
                raise ValueError(f"a file named {sibling.rfilename!r}")
            sha256 = getattr(sibling.lfs, "sha256", None) if sibling.lfs else None
            self._files[sibling.rfilename] = RemoteFile(sibling.size, sha256, None if sha256 else sibling.blob_id)
        return self._files

    def has(self, name: str) -> bool:
        """Whether the cache holds this file as it is on the main branch now. Call `names` first."""
        found = self._lib.try_to_load_from_cache(self.repo, name, revision=self._commit, repo_type=self.kind)
        return isinstance(found, str)

    def download(self, name: str, progress: Progress | None) -> Path:
        """Its path in the cache, once it is there. Call `names` first."""
        if progress is None or self.has(name):
            return self._download(name)
        with self._told(name, progress, self._so_far):
            return self._download(name)

    def resume(self, name: str, part: Path, progress: Progress | None) -> None:
        """Fetch what is missing of a file at the end of ``part``, which need not exist. Call `names` first.

        huggingface-hub 1.33 gives each download a name of its own, and a killed one is begun anew; here it goes on.
        """
        total = self._files[name].n_bytes
        have = part.stat().st_size if part.exists() else 0
        if total is None or have > total:
            part.unlink(missing_ok=True)
            have = 0
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as file:
            if total is not None and have == total:
                return
            http_get: Callable[..., None] = importlib.import_module("huggingface_hub.file_download").http_get
            url = self._lib.hf_hub_url(self.repo, name, repo_type=self.kind, revision=self._commit)
            headers = importlib.import_module("huggingface_hub.utils").build_hf_headers()
            watched = self._told(name, progress, lambda began: part.stat().st_size) if progress else contextlib.nullcontext()
            with watched:
                http_get(url, file, resume_size=have, headers=headers, expected_size=total)

    @contextlib.contextmanager
    def _told(self, name: str, progress: Progress, so_far: Callable[[float], int]) -> Iterator[None]:
        """While entered, ``progress`` is told the bytes that there are of a file: ``so_far`` of the time when it began."""
        remote = self._files.get(name)
        title, total = f"{self.repo}/{name} from {self.endpoint}", (remote.n_bytes if remote else None) or 0
        began, done = time.time(), threading.Event()
        progress(title, 0, total)

        def watch() -> None:
            while not done.wait(_POLL_S):
                with contextlib.suppress(OSError):
                    n_bytes = so_far(began)
                    progress(title, min(n_bytes, total) if total else n_bytes, total)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _download(self, name: str) -> Path:
        download: Callable[..., str] = self._lib.hf_hub_download
        return Path(download(self.repo, name, repo_type=self.kind, revision=self._revision))

    def _so_far(self, began: float) -> int:
        """Bytes on disk of the file that is being downloaded: the unfinished one that was written to since `began`."""
        n_bytes = 0
        for path in (self._folder / "blobs").glob("*.incomplete"):
            with contextlib.suppress(OSError):  # it may be renamed while we look
                status = path.stat()
                if status.st_mtime >= began - 1:
                    # Blocks: the hub's Rust part may write at several places of a file that has its full length at once.
                    n_bytes = max(n_bytes, min(status.st_size, 512 * getattr(status, "st_blocks", 1 << 60)))
        return n_bytes

    def size(self, name: str) -> int:
        """Bytes of a file, 0 where the hub doesn't say. Call `names` first."""
        known = self._files.get(name)
        return (known.n_bytes or 0) if known is not None else 0

    def snapshots(self) -> list[Path]:
        """Folders of the repository's files in the cache: that of the main branch first; of a pinned one that alone."""
        try:
            commit = (self._folder / "refs" / self._revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = self._revision
        found = sorted((self._folder / "snapshots").glob("*"), key=lambda path: (path.name != commit, path.name))
        return found if self._revision == "main" else [path for path in found if path.name == commit]

    def cached(self) -> dict[str, Path]:
        """Complete GGUF files in the cache, by name: those of the main branch first, then of other snapshots."""
        found: dict[str, Path] = {}
        for snapshot in self.snapshots():
            for path in sorted(snapshot.rglob("*.gguf")):
                if path.is_file():
                    found.setdefault(path.relative_to(snapshot).as_posix(), path)
        return found

    def diagnose(self, error: Exception, what: str) -> Problem:
        """What an error of huggingface-hub means to the person who asked for ``what``. Nothing of its text is passed on:
        it may hold signed addresses."""
        for cause in causes(error):
            status = getattr(getattr(cause, "response", None), "status_code", None)
            if isinstance(status, int):
                if status >= 500:
                    return Problem(f"{self.endpoint} answers HTTP {status}", lasting=False)
                return Problem(self._refusal(type(cause).__name__, status), lasting=True)
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                where = f"the disk that holds {self.cache} is full"
                return Problem(f"{what}: {where}; free some space or set HF_HOME to another folder", lasting=True)
            if isinstance(cause, OSError) and cause.filename is not None:
                where = f"{cause.filename}: {cause.strerror}"
                return Problem(f"{what}: {where}; set HF_HOME to a folder that can be written to", lasting=True)
            if "CERTIFICATE_VERIFY_FAILED" in str(cause):
                return Problem(f"the certificate of {self.endpoint} is not trusted (set SSL_CERT_FILE)", lasting=False)
        if type(error).__name__ == "HFValidationError":
            return Problem(f"{self.repo} can't be the name of a repository: check it", lasting=True)
        foreign = (ValueError, KeyError, TypeError)
        if isinstance(error, foreign) or any(type(cause).__name__ == "FileMetadataError" for cause in causes(error)):
            advice = "check HF_ENDPOINT and whether your network wants you to log in"
            return Problem(f"{what}: {self.endpoint} does not answer as a hub does; {advice}", lasting=True)
        if what == self.repo:
            return Problem(f"{self.endpoint} can't be reached", lasting=False)
        return Problem(f"the download of {what} broke off", lasting=False)

    def _refusal(self, kind: str, status: int) -> str:
        """What to do about an answer of the 400s; ``kind`` is the name of huggingface-hub's exception."""
        has_token = bool(self._lib.get_token())
        log_in = "log in with `hf auth login` or set HF_TOKEN"
        if kind == "GatedRepoError":
            then = "use a token that may read gated repositories" if has_token else log_in
            return f"{self.repo} is gated: accept its terms at {self.endpoint}/{self.repo}, then {then}"
        if kind == "RepositoryNotFoundError":
            then = "use a token that may read it" if has_token else log_in
            return f"{self.repo} does not exist at {self.endpoint}, or is private: check the name; if private, {then}"
        if status == 401:
            return f"{self.repo}: the hub refuses the token: " + (f"renew it ({log_in})" if has_token else log_in)
        if status == 403:
            return f"{self.repo}: the hub forbids access: check what your token may read, or {log_in}"
        if status == 429:
            then = "wait a few minutes" if has_token else f"wait a few minutes, or {log_in}"
            return f"{self.repo}: too many requests to the hub: {then}"
        return f"{self.repo}: {self.endpoint} answers HTTP {status}: check the name and try again"
