"""Shards: samples on disk, with what the target's layers held and its best guesses for every token.

A directory has a manifest.json and shard-00000.safetensors and so on. A shard is written whole under a temporary name and
renamed, then the manifest is rewritten the same way: only what the manifest names counts, so a killed run leaves no half
sample. Each sample has a key (which prompt, which answer); keys already there are how a resumed run knows its place.

In a shard of N tokens in D samples, with M masked tokens:

    tokens i32[N], mask u8[N], starts i64[D + 1], states as states.py lays them out
    teacher.ids u16 or i32[M, k], teacher.logits f16[M, k] below the row's largest logit, teacher.lse f32[M] the logarithm
    of the sum of all exponentials (also below the largest logit), teacher.top f32[M] that logit
    metadata: source and key of each sample, as JSON lists

The mask is 1 where the assistant said the token, its end-of-turn token included. The teacher's row for token t is what the
target thought at t - 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.data import states as codec
from localspec.errors import DataError
from localspec.speculator import TargetIdentity

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(slots=True)
class Sample:
    """One conversation of n tokens, m of them the assistant's. `taps` is f32[n, T, H], T 0 where none were kept; the
    row of a last token that was never computed is 0.

    `teacher_rows` i64[m]: the row t - 1 of each masked token t. For each of them the target's k likeliest next tokens
    `teacher_ids` i32[m, k], their logits f16 or f32[m, k] and the log-sum-exp over the whole vocabulary f32[m]:
    log-probabilities are ``teacher_logits - teacher_lse[:, None]``.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    taps: npt.NDArray[np.float32]
    teacher_rows: npt.NDArray[np.int64]
    teacher_ids: npt.NDArray[np.int32]
    teacher_logits: npt.NDArray[np.float32]
    teacher_lse: npt.NDArray[np.float32]
    source: str


@dataclass(frozen=True)
class Manifest:
    """What a directory of shards holds. `target` is a TargetIdentity as a dict with `file_hash`, the file's SHA-256."""

    target: dict[str, Any]
    taps: list[int]
    states: str
    teacher_k: int
    settings: dict[str, Any] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    n_samples: int = 0
    n_tokens: int = 0
    n_masked: int = 0
    format: int = FORMAT

    @property
    def identity(self) -> TargetIdentity:
        """The target's identity, without the file's hash."""
        return TargetIdentity(**{k: v for k, v in self.target.items() if k != "file_hash"})

    def with_shard(self, shard: dict[str, Any]) -> Manifest:
        """This one and a shard more."""
        values = {f: getattr(self, f) for f in self.__dataclass_fields__}
        for name in _COUNTS:
            values[name] += shard[name]
        return Manifest(**values | {"shards": [*self.shards, shard]})

    def save(self, folder: Path) -> None:
        """Write it, the old one staying until the new one is whole."""
        write_whole(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises DataError where there is none or it can't be read."""
        path = folder / MANIFEST
        try:
            entries = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise DataError(f"{folder}: no training data there (no {MANIFEST}): make some with localspec data") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} can't be read ({error}): make the data again") from None
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            raise DataError(f"{path}: not training data of format {FORMAT}: make it again with this localspec")
        try:
            manifest = cls(**entries)
            manifest._check()
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}): make the data again") from None
        return manifest

    def _check(self) -> None:
        """Raise one of Python's own errors where a value can't be what was written."""
        identity = self.identity
        for name, value in (asdict(identity) | {"file_hash": self.target["file_hash"], "states": self.states}).items():
            if not isinstance(value, int if name.startswith("n_") else str):
                raise ValueError(f"{name} is {value!r}")
        if self.states not in codec.PRECISIONS:
            raise ValueError(f"states are {self.states!r}")
        self.settings.get("target_file")
        sums = dict.fromkeys(_COUNTS, 0)
        for shard in self.shards:
            if not shard["file"].endswith(".safetensors") or not isinstance(shard["sha256"], str):
                raise ValueError("a shard has no name or no checksum")
            for name in (*_COUNTS, "n_bytes"):
                if not isinstance(shard[name], int) or shard[name] < 1:
                    raise ValueError(f"a shard's {name} is {shard[name]!r}")
            sums = {name: sums[name] + shard[name] for name in _COUNTS}
        for name, value in sums.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not {value} as its shards say")
        for value in (*self.taps, self.teacher_k):
            if not isinstance(value, int):
                raise ValueError(f"taps or teacher_k are {value!r}")


_COUNTS = ("n_samples", "n_tokens", "n_masked")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut. Raises DataError where it can't be."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path} can't be written: {error.strerror or error}; what is there already is safe") from None


# -- reading -----------------------------------------------------------------------------------------------------------


class Shards:
    """A directory of shards, read lazily. Samples are numbered over all shards, 0 to len - 1, in the order written."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        counts = [int(shard["n_samples"]) for shard in manifest.shards]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._open = lru_cache(maxsize=64)(self._map)

    @classmethod
    def open(cls, folder: Path, target: TargetIdentity | None = None) -> Shards:
        """Raises DataError where the directory can't be used, PairingError where it was made for another target."""
        folder = Path(folder)
        manifest = Manifest.load(folder)
        if target is not None:
            manifest.identity.require(target, f"the data in {folder}")
        if not manifest.shards:
            raise DataError(f"{folder}: no shard there yet: let localspec data run on")
        return cls(folder, manifest)

    def __len__(self) -> int:
        return int(self._first[-1])

    def _place(self, i: int) -> tuple[_Shard, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        number = int(np.searchsorted(self._first, i, side="right")) - 1
        return self._open(number), i - int(self._first[number])

    def sample(self, i: int) -> Sample:
        """Sample i, its states dequantised."""
        shard, j = self._place(i)
        return shard.sample(j)

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """(tokens, mask) of sample i, without the states."""
        shard, j = self._place(i)
        here = slice(shard.starts[j], shard.starts[j + 1])
        return shard.arrays["tokens"][here], shard.arrays["mask"][here]

    def teacher(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(the likeliest tokens i32[m, k] of sample i, their probabilities f32[m, k]), without the states."""
        shard, j = self._place(i)
        here = slice(int(shard.teacher_starts[j]), int(shard.teacher_starts[j + 1]))
        below, lse = shard.arrays["teacher.logits"][here].astype(np.float32), shard.arrays["teacher.lse"][here]
        return shard.arrays["teacher.ids"][here].astype(np.int32), np.exp(below - lse[:, None])

    def lengths(self) -> npt.NDArray[np.int64]:
        """i64[len]: tokens of each sample."""
        parts = [np.diff(self._open(number).starts) for number in range(len(self.manifest.shards))]
        return np.concatenate(parts).astype(np.int64)

    def sources(self) -> list[str]:
        """Where each sample's prompt came from."""
        return [source for number in range(len(self.manifest.shards)) for source in self._open(number).sources]

    def keys(self) -> list[str]:
        """Each sample's key: which prompt, which answer. Answers to one prompt share what stands before the ``#``."""
        return [key for number in range(len(self.manifest.shards)) for key in self._open(number).keys]

    def verify(self) -> None:
        """Read every shard and compare it with its checksum. Raises DataError."""
        for shard in self.manifest.shards:
            path = self.folder / str(shard["file"])
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise DataError(f"{path}: {error.strerror or error}: make the data again") from None
            if found != shard["sha256"]:
                raise DataError(f"{path} is damaged (its checksum is wrong): make the data again")

    def _map(self, number: int) -> _Shard:
        entry = self.manifest.shards[number]
        return _Shard(self.folder / str(entry["file"]), self.manifest, int(entry["n_samples"]))


class _Shard:
    """One file, mapped into memory."""

    def __init__(self, path: Path, manifest: Manifest, n_samples: int):
        self.manifest = manifest
        self.arrays, metadata = map_safetensors(path)
        try:
            self.sources: list[str] = json.loads(metadata["source"])
            self.keys: list[str] = json.loads(metadata["key"])
            self.starts = self.arrays["starts"]
            mask = self.arrays["mask"]
            masked = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
            self.teacher_starts = masked[self.starts]
            if not len(self.sources) == len(self.keys) == len(self.starts) - 1 == n_samples or self.starts[-1] != len(mask):
                raise ValueError("its parts don't fit together")
            whole = self.arrays.get({"f16": "taps.half", "none": ""}.get(manifest.states, "taps.whole"))
            shape = (len(manifest.taps), int(manifest.target["n_embd"]))
            if manifest.states != "none" and (whole is None or whole.shape[1:] != shape):
                raise ValueError(f"its states are not {list(shape)} each")
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(f"{path} is damaged ({error}): make the data again") from None

    def sample(self, j: int) -> Sample:
        start, end = int(self.starts[j]), int(self.starts[j + 1])
        a, b = int(self.teacher_starts[j]), int(self.teacher_starts[j + 1])
        arrays, manifest = self.arrays, self.manifest
        mask = arrays["mask"][start:end]
        n_embd = int(manifest.target["n_embd"])
        top = arrays["teacher.top"][a:b]
        return Sample(
            tokens=arrays["tokens"][start:end],
            mask=mask,
            taps=codec.decode(arrays, manifest.states, start, end, len(manifest.taps), n_embd),
            teacher_rows=np.flatnonzero(mask).astype(np.int64) - 1,
            teacher_ids=arrays["teacher.ids"][a:b].astype(np.int32),
            teacher_logits=arrays["teacher.logits"][a:b].astype(np.float32) + top[:, None],
            teacher_lse=arrays["teacher.lse"][a:b] + top,
            source=self.sources[j],
        )


_DTYPES = {"U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I32": np.int32, "U32": np.uint32, "I64": np.int64,
           "F16": np.float16, "F32": np.float32}  # fmt: skip


def map_safetensors(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """(tensors as views into the mapped file, metadata). Raises DataError for anything malformed.

    The safetensors package copies what it reads; a sample's parts are small and many, and views cost nothing.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        metadata = header.pop("__metadata__", {})
        arrays = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(data) - 8 - size:
                raise ValueError(f"{name} lies outside the file")
            raw = data[8 + size + begin : 8 + size + end].view(np.ndarray)
            arrays[name] = np.frombuffer(raw, _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: make the data again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}): make the data again") from None
    return arrays, metadata
