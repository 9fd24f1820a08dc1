"""The trainer's settings: one place for each default, from which the command line, run.json and resuming all read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.errors import TrainError


def setting(
    default: Any, text: str, choices: Sequence[str] = (), at_least: float | None = None, at_most: float | None = None
) -> Any:
    """A dataclass field that the command line shows as an option: `text` is its help."""
    limits = {"help": text, "choices": tuple(choices), "at_least": at_least, "at_most": at_most}
    return field(default=default, metadata=limits)


def check(settings: Any) -> None:
    """Raise TrainError for the first setting out of its range."""
    for f in dataclasses.fields(settings):
        value, limits = getattr(settings, f.name), f.metadata
        flag = "--" + f.name.replace("_", "-")
        if limits.get("choices") and value not in limits["choices"]:
            raise TrainError(f"{flag} {value}: give one of {', '.join(limits['choices'])}")
        least = limits.get("at_least")
        if least is not None and not value >= least:  # a NaN isn't, either
            raise TrainError(f"{flag} {value}: at least {least:g}")
        most = limits.get("at_most")
        if most is not None and not value <= most:
            raise TrainError(f"{flag} {value}: at most {most:g}")
        if isinstance(value, float) and not math.isfinite(value):
            raise TrainError(f"{flag} {value}: give a number")


def from_dict(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    """`cls(**values)`; a key that it does not have is a TrainError that begins with `where`."""
    known = {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            raise TrainError(f"{where}: unknown setting {name}")
    return cls(**values)


@dataclass(frozen=True)
class TrainSettings:
    """Of the loop, whatever it trains."""

    epochs: float = setting(3.0, "Passes over the data.", at_least=0, at_most=10_000)
    steps: int = setting(0, "Optimiser steps, in place of --epochs.", at_least=0)
    batch_tokens: int = setting(8192, "Tokens in a batch.", at_least=16)
    accumulate: int = setting(1, "Batches whose gradients make one step.", at_least=1)
    optimizer: str = setting("muon", "muon: Muon for matrices, AdamW for the rest; adamw: AdamW for all.", ("muon", "adamw"))
    lr: float = setting(0.0, "Largest learning rate; 0: the optimizer's own (muon 0.002, adamw 0.001).", at_least=0)
    warmup: int = setting(20, "Steps until the learning rate is reached.", at_least=0)
    decay: float = setting(0.5, "Share of the steps, the last ones, over which it falls to nothing.", at_least=0, at_most=1)
    weight_decay: float = setting(0.01, "Decoupled weight decay of the matrices.", at_least=0)
    clip: float = setting(1.0, "Largest norm of a gradient.", at_least=0)
    max_len: int = setting(2048, "Longer samples are cut.", at_least=8)
    held_out: float = setting(0.03, "Share of the prompts kept for evaluation.", at_least=0)
    eval_every: int = setting(200, "Steps between evaluations.", at_least=1)
    eval_tokens: int = setting(24000, "Tokens of an evaluation, at most.", at_least=1)
    save_every: int = setting(50, "Steps between checkpoints.", at_least=1)
    seed: int = setting(0, "Of order and initial weights.", at_least=0, at_most=(1 << 63) - 1)
    dtype: str = setting("auto", "Type of activations and matrix products.", ("auto", "bf16", "fp32"))
    device: str = setting("auto", "auto: CUDA or MPS where there are, else the CPU.", ("auto", "cpu", "cuda", "mps"))
    threads: int = setting(0, "CPU threads, of the preflight too; 0: PyTorch's own choice.", at_least=0, at_most=512)

    @property
    def peak_lr(self) -> float:
        return self.lr or {"muon": 0.002, "adamw": 0.001}[self.optimizer]
