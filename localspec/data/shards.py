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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from localspec.data import states as codec
from localspec.errors import DataError
from localspec.speculator import TargetIdentity

MANIFEST = "manifest.json"
FORMAT = 1
SHARD_TOKENS = 1 << 16
_RMS_TOKENS = 4096  # from so many tokens a shard's scales are known


@dataclass(slots=True)
class Sample:
    """One conversation of n tokens, m of them the assistant's. `taps` is f32[n, T, H], T 0 where none were kept.

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
        for name in ("n_samples", "n_tokens", "n_masked"):
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
            manifest.identity  # noqa: B018 (it must be whole, too)
            for shard in manifest.shards:
                shard["file"], shard["sha256"], shard["n_samples"], shard["n_tokens"], shard["n_masked"]
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error}): make the data again") from None
        return manifest


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
        return _Shard(self.folder / str(self.manifest.shards[number]["file"]), self.manifest)


class _Shard:
    """One file, mapped into memory."""

    def __init__(self, path: Path, manifest: Manifest):
        self.manifest = manifest
        self.arrays, metadata = map_safetensors(path)
        try:
            self.sources: list[str] = json.loads(metadata["source"])
            self.keys: list[str] = json.loads(metadata["key"])
            self.starts = self.arrays["starts"]
            mask = self.arrays["mask"]
            masked = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
            self.teacher_starts = masked[self.starts]
            if not len(self.sources) == len(self.keys) == len(self.starts) - 1 or self.starts[-1] != len(mask):
                raise ValueError("its parts don't fit together")
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


# -- writing -----------------------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes samples into a directory, a shard whenever `shard_tokens` have come together, or `flush` is called.

    Goes on where an earlier writer ended; `done` holds the keys already there. One writer at a time: the directory is locked
    until `close` (or the process's end, however it comes). Raises DataError where the directory is locked or holds data of
    another target, other taps, another precision.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_tokens: int = SHARD_TOKENS):
        codec.check_precision(manifest.states)
        self.folder = Path(folder)
        self.shard_tokens = shard_tokens
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / ".lock")
        self.manifest = self._resumed(manifest)
        self.done: set[str] = set(Shards(self.folder, self.manifest).keys())
        self._clear()

    def _resumed(self, wanted: Manifest) -> Manifest:
        if not (self.folder / MANIFEST).exists():
            wanted.save(self.folder)
            return wanted
        found = Manifest.load(self.folder)
        if found.target["file_hash"] != wanted.target["file_hash"]:
            raise DataError(
                f"{self.folder} holds data of another target, {found.target['name']} (file hash "
                f"{str(found.target['file_hash'])[:12]}, not {str(wanted.target['file_hash'])[:12]}): give another directory"
            )
        for name, flag in (("taps", "--taps"), ("states", "--states"), ("teacher_k", "--teacher-k")):
            mine, theirs = getattr(wanted, name), getattr(found, name)
            if mine != theirs:
                raise DataError(f"{self.folder} was begun with {flag} {_shown(theirs)}, not {_shown(mine)}: give that, or "
                                "another directory")  # fmt: skip
        named = {str(shard["file"]) for shard in found.shards}
        for path in self.folder.glob("shard-*.safetensors*"):  # what a killed run left behind
            if path.name not in named:
                path.unlink()
        return found

    def _clear(self) -> None:
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._masks: list[npt.NDArray[np.uint8]] = []
        self._teacher: list[tuple[npt.NDArray[Any], ...]] = []
        self._sources: list[str] = []
        self._keys: list[str] = []
        self._waiting: list[npt.NDArray[Any]] = []
        self._encoded: list[dict[str, npt.NDArray[Any]]] = []
        self._rms: npt.NDArray[np.float32] | None = None
        self.n_pending = 0

    def add(self, sample: Sample, key: str) -> None:
        """Take a sample; `taps` may be fp16. A key that is there already is refused."""
        n, m = len(sample.tokens), int(sample.mask.sum())
        if m == 0 or sample.mask[0]:
            raise DataError(f"sample {key} ({sample.source}): the assistant says nothing in it, or the very first token")
        if not len(sample.mask) == n == len(sample.taps) or not len(sample.teacher_ids) == len(sample.teacher_lse) == m:
            raise DataError(f"sample {key} ({sample.source}): {n} tokens, {m} of the assistant's, but {len(sample.taps)} "
                            f"states and {len(sample.teacher_ids)} teacher rows")  # fmt: skip
        shape = (len(self.manifest.taps), int(self.manifest.target["n_embd"]))
        if sample.taps.shape[1:] != shape and self.manifest.states != "none":
            raise DataError(f"sample {key} has states of {list(sample.taps.shape[1:])}, the data {list(shape)}")
        if key in self.done:
            raise DataError(f"sample {key} ({sample.source}) is there already")
        self.done.add(key)
        self._tokens.append(sample.tokens.astype(np.int32))
        self._masks.append(sample.mask.astype(np.uint8))
        logits = sample.teacher_logits.astype(np.float32)
        top = logits.max(axis=1)
        wide = int(self.manifest.target["n_vocab"]) > 1 << 16
        self._teacher.append((
            sample.teacher_ids.astype(np.int32 if wide else np.uint16),
            np.maximum(logits - top[:, None], -65504.0).astype(np.float16),
            (sample.teacher_lse - top).astype(np.float32),
            top,
        ))  # fmt: skip
        self._sources.append(sample.source)
        self._keys.append(key)
        self._waiting.append(sample.taps)
        self.n_pending += n
        if sum(map(len, self._waiting)) >= _RMS_TOKENS:
            self._encode()
        if self.n_pending >= self.shard_tokens:
            self.flush()

    def close(self) -> None:
        """Write what is left, and let others write here."""
        self.flush()
        self._lock.close()

    def _encode(self) -> None:
        """Bring the waiting states into their small form. The first of a shard say how large each dimension is."""
        if not self._waiting:
            return
        first = np.zeros(sum(map(len, self._waiting)), bool)
        at = 0
        for taps in self._waiting:
            first[at : at + codec.N_FIRST] = True
            at += len(taps)
        together = np.concatenate(self._waiting).astype(np.float32, copy=False)
        if not np.isfinite(together).all():
            raise DataError("the target's states hold a value that is not finite: it can't be trained on")
        if self._rms is None:
            self._rms = codec.rms_of(together, first) if self.manifest.states in ("q4", "q8") else np.ones(0, np.float32)
        self._encoded.append(codec.encode(together, first, self.manifest.states, self._rms))
        self._waiting = []

    def flush(self) -> None:
        """Write what has come together as a shard, and the manifest."""
        if not self._tokens:
            return
        from safetensors.numpy import save

        self._encode()
        tokens, mask = np.concatenate(self._tokens), np.concatenate(self._masks)
        ids, logits, lse, top = (np.concatenate(parts) for parts in zip(*self._teacher))
        starts = np.concatenate([[0], np.cumsum([len(t) for t in self._tokens])]).astype(np.int64)
        arrays = {"tokens": tokens, "mask": mask, "starts": starts, "teacher.ids": ids, "teacher.logits": logits,
                  "teacher.lse": lse, "teacher.top": top, **_joined(self._encoded)}  # fmt: skip
        metadata = {"format": str(FORMAT), "source": json.dumps(self._sources), "key": json.dumps(self._keys)}
        name = f"shard-{len(self.manifest.shards):05}.safetensors"
        data = save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata)
        write_whole(self.folder / name, data)
        shard = {"file": name, "n_samples": len(self._keys), "n_tokens": len(tokens), "n_masked": int(mask.sum()),
                 "n_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}  # fmt: skip
        manifest = self.manifest.with_shard(shard)
        manifest.save(self.folder)
        self.manifest = manifest
        self._clear()


def _locked(path: Path) -> IO[bytes]:
    """An open file that holds a lock until it is closed. Raises DataError where another process has it."""
    file = path.open("ab")
    try:
        import fcntl  # not on Windows: there two writers are not kept apart

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError:
        file.close()
        raise DataError(f"{path.parent}: another localspec writes there: wait for it, or give another directory") from None
    except OSError:  # a file system without locks
        pass
    return file


def _joined(parts: Iterable[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Encoded pieces, one after another, as one."""
    parts = list(parts)
    joined: dict[str, npt.NDArray[Any]] = {}
    for name in parts[0] if parts else ():
        arrays = [part[name] for part in parts]
        if name == "taps.rms":
            joined[name] = arrays[0]
        elif name == "taps.row":
            offsets = np.cumsum([0] + [len(part["taps.q"]) for part in parts])
            joined[name] = np.concatenate([a + o for a, o in zip(arrays, offsets)]).astype(np.int32)
        elif name == "taps.far":
            offsets = np.cumsum([0] + [int(a[-1]) for a in arrays])
            joined[name] = np.concatenate([[0], *(a[1:] + o for a, o in zip(arrays, offsets))]).astype(np.int32)
        else:
            joined[name] = np.concatenate(arrays)
    return joined


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
