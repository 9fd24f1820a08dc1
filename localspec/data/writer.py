"""Writing shards: samples in, files out that are there whole or not at all. The layout is in shards.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from localspec.data import states as codec
from localspec.data.shards import FORMAT, MANIFEST, Manifest, Sample, Shards, write_whole
from localspec.errors import DataError

SHARD_TOKENS = 1 << 16
_RMS_TOKENS = 4096  # from so many tokens a shard's scales are known


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
        self._lock = locked(self.folder / ".lock")
        self.manifest = self._resumed(manifest)
        self._tidy()
        self.done: set[str] = set(Shards(self.folder, self.manifest).keys())
        self._clear()

    def _resumed(self, wanted: Manifest) -> Manifest:
        if not (self.folder / MANIFEST).exists():
            if any(self.folder.glob("shard-*.safetensors")):
                raise DataError(f"{self.folder} holds shards but no {MANIFEST}: give another directory, or delete them")
            wanted.save(self.folder)
            return wanted
        found = Manifest.load(self.folder)
        if not found.shards:  # nothing that other settings could spoil: of a call that failed, or was killed at once
            wanted.save(self.folder)
            return wanted
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
        return found

    def _tidy(self) -> None:
        """Remove what a killed run left behind."""
        named = {str(shard["file"]) for shard in self.manifest.shards}
        for path in self.folder.glob("shard-*.safetensors*"):
            if path.name not in named:
                path.unlink()

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


def locked(path: Path) -> IO[bytes]:
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
