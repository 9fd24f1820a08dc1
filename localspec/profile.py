"""What decodes cost here, kept from one run to the next: t(n) / t(1) for a target, its threads and kind of kernels.

`localspec curve` writes a profile, drafting runs begin with it and correct it. It is an aid: without one the controller
learns the same within a few hundred tokens. So nothing about a profile is an error: one that can't be read, or says what no
machine does, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
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
from localspec.speculator import TargetIdentity

VERSION = 2
#: steps of a run before what it saw of the costs is kept
ENOUGH_STEPS = 200
#: times seen of a size, before its median is kept
ENOUGH_SAMPLES = 3
#: how far a drafting run moves what is known: it sees fewer decodes of a size than `curve` does, at any context
RUN_WEIGHT = 0.5

_RATIOS = (0.2, 200.0)
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


def store(key: Key, ratios: Mapping[int, float], weight: float = 1.0) -> Path | None:
    """Add `ratios`, t(n) / t(1) with that of one row among them, to what is stored for `key`. Of a size that is known
    already, `weight` is the share of the new one (of their logarithms). Returns the file; None where nothing was stored: no
    place to write to, a file of a later version (which stays as it is), or ratios that no machine has.
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
        _write(path, {
            "version": VERSION, "when": datetime.now(UTC).isoformat(timespec="seconds"), "key": asdict(key),
            "ratios": {str(n): round(merged[n], 5) for n in sorted(merged)},
        })  # fmt: skip
    except (OSError, FetchError):
        return None
    return path


def _sane(n: Any, ratio: Any) -> bool:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        return False
    return 1 <= n <= _ROWS and math.isfinite(ratio) and _RATIOS[0] <= ratio <= _RATIOS[1]


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
