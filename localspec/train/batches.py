"""Samples into batches: which are held out, in which order the others come, and how they lie side by side.

Everything is a function of the data, the seed and the epoch, so that a resumed run sees the same batches. A prompt's
answers go to one side together, chosen by the prompt's name alone: data that grows moves nothing from one side to the
other.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.data.shards import Sample
from localspec.errors import TrainError

T = TypeVar("T")
Made = TypeVar("Made")


class Keyed(Protocol):
    """Samples with keys."""

    def keys(self) -> list[str]: ...


@dataclass
class Batch:
    """Samples of N tokens together, one after another.

    `starts` i64[D + 1] their bounds; `tokens` i64[N]; `mask` bool[N]: the assistant said it; `taps` f32 or bf16 [N, T * H];
    `teacher_of` i64[N]: the row of the teacher's guesses for this token, -1 where there is none; `teacher_ids` i64[M, k]
    and `teacher_p` f32[M, k]: the tokens likeliest here and their probabilities. `sources`: one for each sample.
    """

    starts: npt.NDArray[np.int64]
    tokens: Tensor
    mask: npt.NDArray[np.bool_]
    taps: Tensor
    teacher_of: npt.NDArray[np.int64]
    teacher_ids: Tensor
    teacher_p: Tensor
    sources: list[str]

    @property
    def n_tokens(self) -> int:
        return len(self.mask)

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        moved = [t.to(device) for t in (self.tokens, self.taps, self.teacher_ids, self.teacher_p)]
        return Batch(self.starts, moved[0], self.mask, moved[1], self.teacher_of, moved[2], moved[3], self.sources)


def collate(samples: Sequence[Sample], max_len: int, scale: npt.NDArray[np.float32] | None, dtype: torch.dtype) -> Batch:
    """A batch of these samples, each cut to `max_len` tokens. `scale` f32[T * H] multiplies the taps before they are
    rounded to `dtype`."""
    lengths = [min(len(s.tokens), max_len) for s in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.concatenate([s.mask[:n] for s, n in zip(samples, lengths)]) > 0
    kept = [int((s.teacher_rows < n - 1).sum()) for s, n in zip(samples, lengths)]
    teacher_of = np.full(len(mask), -1, np.int64)
    teacher_of[mask] = np.arange(int(mask.sum()))
    taps = []
    for sample, n in zip(samples, lengths):
        flat = torch.from_numpy(np.ascontiguousarray(sample.taps[:n])).flatten(1)
        taps.append((flat * torch.from_numpy(scale) if scale is not None else flat).to(dtype))
    logits = np.concatenate([s.teacher_logits[:m] for s, m in zip(samples, kept)]).astype(np.float32)
    lse = np.concatenate([s.teacher_lse[:m] for s, m in zip(samples, kept)]).astype(np.float32)
    ids = np.concatenate([s.teacher_ids[:m] for s, m in zip(samples, kept)]).astype(np.int64)
    return Batch(
        starts,
        torch.from_numpy(np.concatenate([s.tokens[:n] for s, n in zip(samples, lengths)]).astype(np.int64)),
        mask,
        torch.cat(taps),
        teacher_of,
        torch.from_numpy(ids),
        torch.from_numpy(np.exp(logits - lse[:, None])),
        [s.source for s in samples],
    )


# -- which, and in which order --------------------------------------------------------------------------------------------


def split(shards: Keyed, held_out: float) -> tuple[list[int], list[int]]:
    """(samples to train on, samples to evaluate on), by a hash of each one's prompt. Raises TrainError where nothing is
    left to train on."""
    training: list[int] = []
    evaluation: list[int] = []
    limit = int(held_out * 2**32)
    for i, key in enumerate(shards.keys()):
        prompt = key.split("#")[0].encode()
        chosen = int.from_bytes(hashlib.sha256(prompt).digest()[:4], "little") < limit
        (evaluation if chosen else training).append(i)
    if not training:
        raise TrainError("no sample is left to train on: make more data, or lower --held-out")
    return training, evaluation


def plan(
    lengths: npt.NDArray[np.int64], samples: Sequence[int], batch_tokens: int, max_len: int, seed: int, epoch: int
) -> list[list[int]]:
    """An epoch's batches: the samples in a random order, put together until the next would not fit."""
    order = np.random.default_rng([seed, epoch]).permutation(np.asarray(samples, np.int64))
    batches: list[list[int]] = []
    room = 0
    for i in order:
        n = min(int(lengths[i]), max_len)
        if not batches or n > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(int(i))
        room -= n
    return batches


def ahead(items: Iterable[T], make: Callable[[T], Made], depth: int = 2) -> Generator[Made, None, None]:
    """`make` of each item, made in a thread while the trainer works on those before. An error in it is raised here."""
    ready: queue.Queue[list[Made] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(value: list[Made] | BaseException | None) -> None:
        while not stop.is_set():
            try:
                ready.put(value, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                if stop.is_set():
                    return
                put([make(item)])
            put(None)
        except BaseException as error:  # noqa: BLE001 (it is raised again where the batch is wanted)
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            value = ready.get()
            if value is None:
                return
            if isinstance(value, BaseException):
                raise value
            yield value[0]
    finally:
        stop.set()
        thread.join()
