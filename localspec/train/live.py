"""Training beside the target while it writes: nothing on disk (`online`), or the shards of the first pass (`hybrid`).

The target runs in a process of its own, because llama.cpp and PyTorch would fight over OpenMP's threads. Online, samples
come over a queue and the last ones stay in memory; an epoch is one pass over those that are there when it begins. Hybrid,
the process is `localspec data` itself, and each epoch reads the shards that stand there when it begins.
"""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import native
from localspec.data.shards import MANIFEST, Manifest, Sample, Shards
from localspec.errors import LocalspecError, TrainError
from localspec.gguf_file import GGUFFile
from localspec.speculator import TargetIdentity
from localspec.taps import default_taps

_WAITING = 16  # samples in the queue: the target pauses when the trainer does not keep up
_TEACHER_K = 32


@dataclass(frozen=True)
class LiveSettings:
    """How the target writes. `first` tokens must be there before training begins: vocabulary, scales and evaluation come
    from them. `keep` tokens stay in memory (online)."""

    prompts: tuple[Path, ...]
    answers: int = 1
    temperature: float = 0.7
    max_tokens: int = 512
    parallel: int = 16
    n_threads: int = 0
    kernels: str = "auto"
    n_ctx: int = 1024
    first: int = 20_000
    keep: int = 200_000
    taps: tuple[int, ...] = field(default_factory=tuple)  # none: the default ones


class Memory:
    """Samples in memory, read like Shards; the oldest go when there are too many. States are kept in fp16, relative to each
    row's largest."""

    def __init__(self, manifest: Manifest, keep: int):
        self.manifest = manifest
        self._keep = keep
        self._samples: deque[tuple[Sample, npt.NDArray[np.float32], str]] = deque()
        self._dropped = 0
        self.n_tokens = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample, key: str) -> None:
        unit = np.maximum(np.abs(sample.taps).max(axis=(1, 2), keepdims=True), 1e-30).astype(np.float32)
        sample.taps = (sample.taps / unit).astype(np.float16)
        self._samples.append((sample, unit, key))
        self.n_tokens += len(sample.tokens)
        while self.n_tokens > self._keep and len(self._samples) > 1:
            old, _, _ = self._samples.popleft()
            self.n_tokens -= len(old.tokens)

    def sample(self, i: int) -> Sample:
        found, unit, _ = self._samples[i]
        values = {name: getattr(found, name) for name in Sample.__dataclass_fields__}
        return Sample(**values | {"taps": found.taps.astype(np.float32) * unit})

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        return self._samples[i][0].tokens, self._samples[i][0].mask

    def teacher(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        found = self._samples[i][0]
        return found.teacher_ids, np.exp(found.teacher_logits - found.teacher_lse[:, None])

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(s.tokens) for s, _, _ in self._samples], np.int64)

    def sources(self) -> list[str]:
        return [s.source for s, _, _ in self._samples]

    def keys(self) -> list[str]:
        return [key for _, _, key in self._samples]

    def copy(self, chosen: list[int]) -> Memory:
        """Some of the samples, which stay when they leave here."""
        other = Memory(self.manifest, sys.maxsize)
        for i in chosen:
            other._samples.append(self._samples[i])
            other.n_tokens += len(self._samples[i][0].tokens)
        return other


class Online:
    """The target in a process, its samples in memory."""

    def __init__(self, target: Path, settings: LiveSettings):
        gguf = GGUFFile.open(target, "target")
        taps = settings.taps or default_taps(gguf.n_layer)
        manifest = Manifest({**asdict(TargetIdentity.of(gguf)), "file_hash": ""}, list(taps), "f16", _TEACHER_K)
        self.shards: Memory = Memory(manifest, settings.keep)
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(_WAITING)
        self._process = context.Process(target=_write, args=(target, settings, taps, self._queue), daemon=True)
        self._process.start()
        self.ended = False
        self._wait(settings.first)

    def _wait(self, n_tokens: int) -> None:
        while self.shards.n_tokens < n_tokens and not self.ended:
            self._take(timeout=1.0)
        if not len(self.shards):
            raise TrainError("the target wrote nothing that could be trained on")

    def _take(self, timeout: float) -> bool:
        try:
            item = self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            if not self._process.is_alive() and not self.ended:
                raise TrainError(f"the process that runs the target ended with code {self._process.exitcode}") from None
            return False
        if isinstance(item, str):
            raise TrainError(f"the target can't go on: {item}")
        if item is None:
            self.ended = True
        else:
            self.shards.add(*item)
        return item is not None

    def refresh(self) -> Memory:
        """Take in what has been written since."""
        while not self.ended and self._take(timeout=0):
            pass
        return self.shards

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._queue.cancel_join_thread()


def _write(target: Path, settings: LiveSettings, taps: tuple[int, ...], out: Any) -> None:
    """The child: write until every prompt is answered, then None; an error is sent as its text."""
    from localspec.accept import Sampling
    from localspec.data.conversations import read_conversations, unique
    from localspec.data.generate import Generator
    from localspec.data.jobs import Jobs
    from localspec.model import Model
    from localspec.target import SessionSettings, TargetSession

    try:
        native.use_kernels(settings.kernels, 0)
        given = unique([c for path in settings.prompts for c in read_conversations(path)], "the prompts")
        groups = Jobs(given, settings.answers, Sampling(temperature=settings.temperature), True, set())
        with Model(target) as model:
            shape = SessionSettings(
                n_ctx=settings.n_ctx, n_sequences=settings.parallel, n_threads=settings.n_threads, taps=taps
            )
            session = TargetSession(model, shape)
            try:
                for item in Generator(session, settings.max_tokens, _TEACHER_K).run(groups):
                    out.put(item)
            finally:
                session.close()
        out.put(None)
    except LocalspecError as error:
        out.put(str(error))


class Hybrid:
    """`localspec data` in a process, writing the shards that the trainer reads."""

    def __init__(self, target: Path, settings: LiveSettings, folder: Path):
        self._folder = folder
        arguments = ["data", "-m", str(target), "-o", str(folder), "--answers", str(settings.answers)]
        arguments += ["--temp", str(settings.temperature), "--max-tokens", str(settings.max_tokens)]
        arguments += ["--kernels", settings.kernels]
        arguments += ["-np", str(settings.parallel), "-t", str(settings.n_threads), "-c", str(settings.n_ctx)]
        arguments += ["--shard-tokens", str(settings.first)]
        for path in settings.prompts:
            arguments += ["-f", str(path)]
        if settings.taps:
            arguments += ["--taps", ",".join(map(str, settings.taps))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "localspec", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=native.unbound,
        )  # fmt: skip
        self._wait(lambda: (folder / MANIFEST).exists() and bool(Manifest.load(folder).shards))

    def _wait(self, there: Callable[[], bool]) -> None:
        while not there():
            if self._process.poll() not in (None, 0):
                said = self._process.stderr.read() if self._process.stderr else ""
                last = said.strip().splitlines()[-1:] or [f"code {self._process.returncode}"]
                raise TrainError(f"localspec data ended: {last[0].removeprefix('localspec: error: ')}")
            if self._process.poll() == 0 and not there():
                raise TrainError(f"localspec data wrote no shard into {self._folder}")
            time.sleep(0.2)

    def refresh(self) -> Shards:
        """The shards that stand there now."""
        return Shards.open(self._folder)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
