"""To the hub: one commit that holds everything, once every file has arrived.

Files go one by one into the store behind the repository (huggingface-hub's preupload_lfs_files), and only then does one
commit name them. A push that is killed has changed nothing that anybody sees; run again it sends neither the files that
had arrived nor, where hf-xet is installed, the pieces of the one that had not. upload_folder would begin again where
hf-xet is missing, and upload_large_folder writes its notes into the person's own folder, tries for ever and commits in
pieces: a manifest could then name shards that are not there.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from localspec.errors import FetchError, UsageError
from localspec.fetch import Progress
from localspec.gguf_format import clip
from localspec.hub import Hub, Spec, causes
from localspec.share.artefact import Artefact
from localspec.share.card import CARD, is_ours

_KEPT = "nothing has changed there, and the same command goes on"


@dataclass(frozen=True)
class Pushed:
    """What a push did: the repository's address, whether it ``changed``, and whether its card was left as it was because
    somebody had written it by hand."""

    url: str
    changed: bool
    kept_card: bool


def push(
    artefact: Artefact, repo: str, text: str, private: bool = False, force: bool = False, progress: Progress | None = None
) -> Pushed:
    """Send ``artefact`` and its card ``text`` to ``repo``, which is created if it does not exist.

    ``progress`` is told the bytes sent so far. A card that was written by hand stays, unless ``force``.

    Raises:
        FetchError: one line that says what to do. It never holds the token.
    """
    check_name(repo)
    hub = Hub(repo, artefact.repo_kind)
    # hf-xet reads files itself and tells only huggingface-hub's own bars how far it is.
    theirs = hub.uses_xet and progress is not None and sys.stderr.isatty()
    progress = None if theirs else progress
    if hub.offline:
        raise FetchError("HF_HUB_OFFLINE is set: nothing can be sent; unset it and try again")
    what = repo
    try:
        if not hub.has_token():
            raise FetchError("pushing needs a token that may write: log in with `hf auth login` or set HF_TOKEN")
        api = hub.api
        api.create_repo(repo, repo_type=artefact.repo_kind, private=private or None, exist_ok=True)
        before = api.repo_info(repo, repo_type=artefact.repo_kind)
        if private and not before.private:
            raise FetchError(f"{repo} exists and is public: make it private at {hub.endpoint} first, or leave --private out")
        names = {sibling.rfilename for sibling in before.siblings or ()}
        kept_card = CARD in names and not force and not is_ours(_text(hub, CARD))
        operations = _operations(hub, artefact, None if kept_card else text)
        done, total = 0, sum(op.upload_info.size for op in operations)
        title = f"{repo} at {hub.endpoint}"
        with _quiet(), hub.own_bars() if theirs else nullcontext():
            for op in operations:
                what = f"{op.path_in_repo} to {repo}"
                op.told = _teller(progress, title, done, total)
                op.told(0)
                api.preupload_lfs_files(repo, [op], repo_type=artefact.repo_kind, num_threads=1, free_memory=False)
                done += op.upload_info.size
        what = repo
        with _quiet():
            commit = api.create_commit(
                repo, operations, commit_message=f"{artefact.kind} by localspec push", repo_type=artefact.repo_kind
            )
        missing = sorted({op.path_in_repo for op in operations} - set(hub.names()))
        if missing:
            raise FetchError(f"{repo} leaves out {', '.join(missing)}: look at its .gitignore")
        prefix = "datasets/" if artefact.repo_kind == "dataset" else ""
        return Pushed(f"{hub.endpoint}/{prefix}{repo}", commit.oid != before.sha, kept_card)
    except hub.failures as error:
        raise FetchError(_reason(hub, error, repo, what)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface-hub's remarks about cards that lack this or that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_name(repo: str) -> None:
    """Raise FetchError unless this can be the name of a repository."""
    if Spec.parse(repo, "push") != Spec(repo):
        raise FetchError(f"push {repo!r}: expected USER/REPO; a file keeps its name there")


def check_settings(licence: str, base_model: str) -> None:
    """Raise UsageError for what the hub would refuse in a card, before anything is read."""
    if licence and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        raise UsageError(f"--license {clip(licence)!r}: give it as the hub names it, such as apache-2.0, mit or other")
    if base_model and Spec.parse(base_model, "--base-model") != Spec(base_model):
        raise UsageError(f"--base-model {clip(base_model)!r}: expected USER/REPO")


def _text(hub: Hub, name: str) -> str:
    hub.names()
    return hub.download(name, None).read_text("utf-8", errors="replace")


def _operations(hub: Hub, artefact: Artefact, text: str | None) -> list[Any]:
    """huggingface-hub's additions, each of which says how far it has been read: the small card first, so that what is
    wrong with the repository shows before anything large is sent."""

    base: Any = hub.addition

    class Addition(base):
        told: Callable[[int], None] = staticmethod(lambda n: None)

        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
            with super().as_file(with_tqdm) as file:
                yield cast(BinaryIO, Told(file, self.told))

    items = [] if text is None else [Addition(CARD, text.encode())]
    return items + [Addition(item.name, str(item.path) if item.content is None else item.content) for item in artefact.items]


class Told(io.BufferedIOBase):
    """A file that tells how far it has been read."""

    mode = "rb"  # requests (huggingface-hub 0.x) asks for it before it looks for a size; without one it sends in chunks

    def __init__(self, file: BinaryIO, told: Callable[[int], None]):
        self._file, self._told = file, told

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(-1 if size is None else size)
        self._told(self._file.tell())
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()


def _teller(progress: Progress | None, title: str, before: int, total: int) -> Callable[[int], None]:
    def told(n: int) -> None:
        if progress is not None:
            progress(title, min(before + n, total), total)

    return told


def _reason(hub: Hub, error: Exception, repo: str, what: str) -> str:
    """One line about why nothing could be sent."""
    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status == 400 and what == repo:
            return f"{what}: the hub refuses it as malformed (HTTP 400): check --license and --base-model"
        if status == 401:
            return f"{repo}: the hub refuses the token: renew it (log in with `hf auth login` or set HF_TOKEN)"
        if status == 403 or type(cause).__name__ == "RepositoryNotFoundError":
            return f"{repo}: your token may not write there: check the name, and use a token with write access"
        if isinstance(cause, OSError) and cause.filename is not None:
            return f"{cause.filename} can't be read: {cause.strerror}; {_KEPT}"
    problem = hub.diagnose(error, what)
    text = problem.text.replace("the download of", "the upload of")
    return text if problem.lasting else f"{text}; {_KEPT}"
