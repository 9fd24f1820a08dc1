"""Prompts from a dataset on the Hugging Face hub: ``hf://USER/NAME`` or ``hf://USER/NAME/PATH.jsonl``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from localspec.data.conversations import Conversation, from_entry, read_conversations, unique
from localspec.errors import FetchError

PREFIX = "hf://"
_NAME = re.compile(r"(?:datasets/)?(\w[\w.-]*/\w[\w.-]*)(?:/(.+))?")
_ENDINGS = (".jsonl", ".json", ".txt", ".parquet")
_NO_DATA = ("dataset_infos.json", "config.json", "requirements.txt")
#: huggingface-hub's exceptions by name, and what they mean to the person.
_MEANINGS = {
    "RepositoryNotFoundError": "does not exist, or is private: check the name, or log in with `hf auth login`",
    "EntryNotFoundError": "has no such file: check the name",
    "RemoteEntryNotFoundError": "has no such file: check the name",
    "GatedRepoError": "is gated: accept its terms on the hub and log in with `hf auth login`",
    "OfflineModeIsEnabled": "is not in the cache, and HF_HUB_OFFLINE is set: connect, or name a file with --prompts",
    "LocalEntryNotFoundError": "is not in the cache, and the hub can't be reached: connect, or name a file with --prompts",
}


def read_dataset(address: str, raw: bool = False) -> list[Conversation]:
    """The conversations of one file of a dataset, fetched into the hub's cache. Raises FetchError, one line."""
    match = _NAME.fullmatch(address.removeprefix(PREFIX).strip("/"))
    if match is None:
        raise FetchError(f"{address}: expected hf://USER/NAME or hf://USER/NAME/FILE.jsonl")
    path = _fetched(match[1], match[2], address)
    return _read_parquet(path, raw) if path.suffix == ".parquet" else read_conversations(path, raw)


def _fetched(repo: str, name: str | None, address: str) -> Path:
    hub: Any = importlib.import_module("huggingface_hub")
    utils: Any = importlib.import_module("huggingface_hub.utils")
    utils.logging.set_verbosity_error()
    try:
        if name is None:
            name = _choose([file.rfilename for file in hub.HfApi().dataset_info(repo).siblings or ()], address)
        return Path(hub.hf_hub_download(repo, name, repo_type="dataset"))
    except FetchError:
        raise
    except Exception as error:  # its own errors, those of httpx, and of what lies below
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = _MEANINGS.get(type(error).__name__)
        if reason is None:
            reason = f"can't be fetched ({f'HTTP {status}' if status else type(error).__name__}): connect and try again"
        raise FetchError(f"{address}: the dataset {repo} {reason}") from error


def _read_parquet(path: Path, raw: bool) -> list[Conversation]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise FetchError(f"{path.name} is a Parquet file: pip install pyarrow, or name a JSONL file") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own are among them
        raise FetchError(f"{path.name} is no Parquet file that can be read ({error}); name another file") from None
    return unique((from_entry(row, f"{path.name} row {n}", path.stem, raw) for n, row in enumerate(rows)), path.name)


def _choose(names: list[str], address: str) -> str:
    """The one file of training prompts. Raises FetchError that lists what there is."""
    usable = sorted(name for name in names if name.lower().endswith(_ENDINGS) and "README" not in name)
    usable = [name for name in usable if Path(name).name not in _NO_DATA]
    train = [name for name in usable if "train" in name.lower()] or usable
    if len(train) == 1:
        return train[0]
    listed = ", ".join((train or sorted(names))[:8]) or "none"
    if not train:
        raise FetchError(f"{address}: no .jsonl, .json, .parquet or .txt file in it (it has {listed})")
    raise FetchError(f"{address}: name one of its files, {address.rstrip('/')}/FILE: {listed}")
