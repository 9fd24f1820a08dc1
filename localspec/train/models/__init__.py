"""One file per kind of speculator, found by its name. Each has a class `Model` that meets `Speculator`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.data.shards import Sample
from localspec.errors import TrainError
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig
from localspec.taps import default_taps
from localspec.train.batches import Batch
from localspec.train.kinds import names
from localspec.train.target_weights import TargetWeights


@dataclass(frozen=True)
class DataFacts:
    """What a model may want to know of the data before it is made: the taps' places in the target, the root mean square of
    each of their dimensions f32[T * H], and how often the assistant would say each token f64[V]."""

    taps: tuple[int, ...]
    tap_rms: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float64]


@dataclass
class LossParts:
    """`loss`: a sum over rows, to be divided by `n_rows`. By depth: `losses` and `rows`, sums and their numbers of rows, and
    `right`: in how many the draft's first choice was the text's token."""

    loss: Tensor
    n_rows: int
    losses: list[float]
    rows: list[int]
    right: list[int]

    def add(self, loss: Tensor, n_rows: int, n_right: int) -> None:
        """What another depth came to."""
        self.losses.append(float(loss.detach()))
        self.rows.append(n_rows)
        self.right.append(n_right)


@dataclass
class Rollout:
    """Drafts for a batch, as run time makes them. `starts` i64[R]: the last token known; `accepted` i64[R]: how many of the
    drafted tokens after it are the text's, one after another."""

    starts: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]


class Speculator(Protocol):
    """What the loop wants of a model, which is a torch.nn.Module besides."""

    METHOD: ClassVar[str]
    NEEDS_TAPS: ClassVar[bool]
    Settings: ClassVar[Any]  # a dataclass of `settings.setting` fields
    depth: int  # tokens in a row that it learns to draft

    def __init__(self, shape: SpeculatorConfig, settings: Any): ...

    @classmethod
    def shape_of(cls, settings: Any, target: TargetWeights, taps: tuple[int, ...]) -> SpeculatorConfig:
        """What a model with these settings would be. Raises TrainError where the taps don't suit it."""
        ...

    @classmethod
    def new(cls, settings: Any, target: TargetWeights, facts: DataFacts, seed: int) -> Self:
        """A model with fresh weights."""
        ...

    def batch(self, samples: Sequence[Sample], max_len: int, dtype: torch.dtype) -> Batch: ...
    def loss(self, batch: Batch) -> LossParts: ...
    def rollout(self, batch: Batch, n_max: int) -> Rollout: ...
    def matrices(self) -> list[str]:
        """Names of the parameters that Muon may train."""
        ...

    def config(self, provenance: Mapping[str, Any]) -> SpeculatorConfig: ...
    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, config.json) in the format of vLLM's speculators."""
        ...

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from the weights of such an export. Raises TrainError where they don't fit."""
        ...

    def vocabulary(self) -> npt.NDArray[np.int64]:
        """i64[Vd]: the target's tokens that the draft can say."""
        ...

    def remarks(self) -> list[str]:
        """Lines about this model that a person should see before it is trained."""
        ...


def taps_of(kind: Any, target: GGUFFile) -> tuple[int, ...]:
    """The taps that data for this kind has where nobody names others: its own (`Model.taps_wanted`), or the default ones.
    Raises TrainError or UsageError where the target has none such."""
    wanted: Callable[[GGUFFile], tuple[int, ...]] | None = getattr(kind, "taps_wanted", None)
    return default_taps(target.n_layer) if wanted is None else wanted(target)


def n_parameters(kind: Any, settings: Any, target: TargetWeights, taps: tuple[int, ...]) -> int:
    """How large such a model would be, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in kind(kind.shape_of(settings, target, taps), settings).parameters())


def find(name: str) -> Any:
    """The Model class of a kind. Raises TrainError for a name without a file."""
    if name not in names():
        raise TrainError(f"no speculator is called {name!r}: there are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").Model
