"""Prompts from a dataset on the Hugging Face hub: ``hf://USER/NAME`` or ``hf://USER/NAME/PATH.jsonl``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from localspec.data.conversations import Conversation, read_conversations
from localspec.errors import FetchError

PREFIX = "hf://"
_NAME = re.compile(r"(?:datasets/)?(\w[\w.-]*/\w[\w.-]*)(?:/(.+))?")
_ENDINGS = (".jsonl", ".json", ".txt")


def read_dataset(address: str, raw: bool = False) -> list[Conversation]:
    """The conversations of one file of a dataset, fetched into the hub's cache. Raises FetchError, one line."""
    match = _NAME.fullmatch(address.removeprefix(PREFIX).strip("/"))
    if match is None:
        raise FetchError(f"{address}: expected hf://USER/NAME or hf://USER/NAME/FILE.jsonl")
    return read_conversations(_fetched(match[1], match[2], address), raw)


def _fetched(repo: str, name: str | None, address: str) -> Path:
    hub: Any = importlib.import_module("huggingface_hub")
    utils: Any = importlib.import_module("huggingface_hub.utils")
    utils.logging.set_verbosity_error()
    try:
        if name is None:
            name = _choose(list(hub.HfApi().list_repo_files(repo, repo_type="dataset")), address)
        return Path(hub.hf_hub_download(repo, name, repo_type="dataset"))
    except FetchError:
        raise
    except Exception as error:  # its own errors, those of httpx, and of what lies below
        kind = type(error).__name__
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = {"RepositoryNotFoundError": "does not exist, or is private", "EntryNotFoundError": f"has no file {name}",
                "RemoteEntryNotFoundError": f"has no file {name}", "GatedRepoError": "is gated: accept its terms on the hub",
                "OfflineModeIsEnabled": "is not in the cache, and HF_HUB_OFFLINE is set",
                "LocalEntryNotFoundError": "is not in the cache, and the hub can't be reached"}  # fmt: skip
        reason = what.get(kind, f"can't be fetched ({f'HTTP {status}' if status else kind})")
        raise FetchError(f"{address}: the dataset {repo} {reason}; check the name, or name a file with --prompts") from error


def _choose(names: list[str], address: str) -> str:
    """The one file of training prompts. Raises FetchError that lists what there is."""
    usable = sorted(name for name in names if name.lower().endswith(_ENDINGS) and "README" not in name)
    usable = [name for name in usable if Path(name).name not in ("dataset_infos.json", "config.json")]
    train = [name for name in usable if "train" in name.lower()] or usable
    if len(train) == 1:
        return train[0]
    listed = ", ".join((train or sorted(names))[:8]) or "none"
    if not train:
        raise FetchError(f"{address}: no .jsonl, .json or .txt file in it (it has {listed}); export one as JSONL")
    raise FetchError(f"{address}: name one of its files, {address.rstrip('/')}/FILE: {listed}")
