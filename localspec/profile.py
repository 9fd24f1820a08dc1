"""What decodes and drafts cost here, kept from one run to the next: t(n) / t(1) for a target, its threads and kind of
kernels, and of each draft what drafting takes and how often it was right.

`localspec curve` writes a profile, drafting runs begin with it and correct it. It is an aid: without one the controller
learns the same within a few hundred tokens. So nothing about a profile is an error: one that can't be read, or says what no
machine does, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localspec.errors import FetchError
from localspec.fetch import cache_dir
from localspec.gguf_file import GGUFFile
from localspec.prior import DraftPrior
from localspec.speculator import TargetIdentity

VERSION = 2
#: steps of a run before what it saw of the costs is kept
ENOUGH_STEPS = 200
#: times seen of a size, before its median is kept
ENOUGH_SAMPLES = 3
#: how far a drafting run moves what is known: it sees fewer decodes of a size than `curve` does, at any context
RUN_WEIGHT = 0.5

#: drafts of a target that are remembered: those used last
MOST_DRAFTS = 16

_RATIOS = (0.2, 200.0)
_COST = (0.0, 100.0)
_PLACES = 64
_ROWS = 4096
_MAX_BYTES = 1 << 18


@dataclass(frozen=True)
class Key:
    """What a cost curve depends on. `size` of the target's file, in bytes, tells its quantisations apart."""

    file: str
    size: int
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    tokenizer: str
    kernels: str
    threads: int
    n_gpu_layers: int = 0

    @classmethod
    def of(cls, target: GGUFFile, kernels: str, threads: int, n_gpu_layers: int = 0) -> Key:
        """The key of an open target. `kernels` as native.kernels_in_use says, `n_gpu_layers` 0 where there is no GPU."""
        it = TargetIdentity.of(target)
        size = target.path.stat().st_size
        return cls(
            target.path.name, size, it.architecture, it.n_layer, it.n_embd, it.n_vocab, it.tokenizer_hash, kernels, threads,
            n_gpu_layers,
        )  # fmt: skip

    def path(self) -> Path:
        """Where its profile lies, or would lie. Raises FetchError for a user without a home."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", self.file.removesuffix(".gguf"))[:60]
        return cache_dir() / "profiles" / f"{stem}-{self.kernels}-{self.threads}t-{digest[:16]}.json"


def load(key: Key) -> dict[int, float] | None:
    """The ratios stored for `key`, that of one row among them; None where there are none that can be believed."""
    try:
        data = _read(key.path())
    except FetchError:
        return None
    if data is None or data.get("version") != VERSION or data.get("key") != asdict(key):
        return None
    ratios = data.get("ratios")
    if not isinstance(ratios, dict):
        return None
    found = {int(n): ratio for n, ratio in ratios.items() if re.fullmatch(r"[1-9][0-9]{0,3}", n)}
    if len(found) != len(ratios) or not all(_sane(n, ratio) for n, ratio in found.items()):
        return None
    return {n: float(found[n]) for n in sorted(found)} if found.get(1) == 1 else None


def draft_name(spec_type: str, path: Path | None) -> str:
    """What a draft is kept as: the way of drafting, its file's name and size in bytes."""
    size = 0
    if path is not None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
    return f"{spec_type}:{path.name}:{size}" if path is not None else spec_type


def load_draft(key: Key, draft: str) -> DraftPrior | None:
    """What is stored of a draft (`draft_name`); None where nothing is that can be believed."""
    return _drafts(key).get(draft)


def _drafts(key: Key) -> dict[str, DraftPrior]:
    """All that are stored, those used last at the end."""
    if load(key) is None:
        return {}
    data = _read(key.path()) or {}
    drafts = data.get("drafts")
    found = {name: _draft(each) for name, each in drafts.items()} if isinstance(drafts, dict) else {}
    return {name: draft for name, draft in found.items() if draft is not None}


def _draft(data: Any) -> DraftPrior | None:
    if not isinstance(data, dict) or not all(isinstance(data.get(name), list) for name in ("cost", "kept", "sure")):
        return None
    cost, kept, sure = data["cost"], data["kept"], data["sure"]
    if len(cost) != 2 or not all(_number(value, *_COST) for value in cost):
        return None
    if len(kept) > _PLACES or len(sure) > _PLACES:
        return None
    if not all(_number(value, 0.0, 1.0) for value in (*kept, *(value for value in sure if value is not None))):
        return None
    return DraftPrior((cost[0], cost[1]), tuple(kept), tuple(sure))


def store(
    key: Key, ratios: Mapping[int, float], weight: float = 1.0, draft: tuple[str, DraftPrior] | None = None
) -> Path | None:  # fmt: skip
    """Add `ratios`, t(n) / t(1) with that of one row among them, to what is stored for `key`, and what was learnt of a draft
    with its `draft_name`. Of what is known already, `weight` is the share of the new (for ratios, of their logarithms).
    Returns the file; None where nothing was stored: no place to write to, a file of a later version (which stays as it is),
    or ratios that no machine has.
    """
    new = {n: float(ratio) for n, ratio in ratios.items() if _sane(n, ratio)}
    if len(new) < 2 or abs(new.get(1, 0.0) - 1) > 1e-6:
        return None
    try:
        path = key.path()
        before = _read(path)
        if before is not None and _later(before.get("version")):
            return None
        merged = dict(load(key) or {})
        for n, ratio in new.items():
            old = merged.get(n, ratio)
            merged[n] = old * (ratio / old) ** weight
        merged[1] = 1.0
        drafts = _drafts(key)
        if draft is not None:
            name, learnt = draft
            known = drafts.pop(name, None)
            drafts[name] = known.mixed(learnt, weight) if known else learnt
        _write(path, {
            "version": VERSION, "when": datetime.now(UTC).isoformat(timespec="seconds"), "key": asdict(key),
            "ratios": {str(n): round(merged[n], 5) for n in sorted(merged)},
            "drafts": {name: _rounded(each) for name, each in list(drafts.items())[-MOST_DRAFTS:]},
        })  # fmt: skip
    except (OSError, FetchError):
        return None
    return path


def _rounded(draft: DraftPrior) -> dict[str, list[float | None]]:
    return {name: [None if v is None else round(v, 5) for v in values] for name, values in asdict(draft).items()}


def _sane(n: Any, ratio: Any) -> bool:
    return 1 <= n <= _ROWS and _number(ratio, *_RATIOS)


def _number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most  # no nan is


def _later(version: Any) -> bool:
    return isinstance(version, int) and version > VERSION


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None for anything else, and where there is nothing."""
    with contextlib.suppress(OSError, ValueError, RecursionError):  # ValueError: no UTF-8, no JSON, an endless number
        if path.is_file():  # a pipe would be waited for
            with path.open("rb") as file:
                data = json.loads(file.read(_MAX_BYTES).decode("utf-8"))
            return data if isinstance(data, dict) else None
    return None


def _write(path: Path, data: dict[str, Any]) -> None:
    """Under a temporary name and renamed: two runs that end at once leave one whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=path.stem[:80] + ".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
