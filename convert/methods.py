"""What the export asks of a kind of speculator: a module of this package, found by the method's name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig
from localspec.target import common_start

if TYPE_CHECKING:
    from localspec.convert.checkpoint import Checkpoint

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens i32[n] and the target's states f32[n, T * H], in the order in which the draft reads them (T = 0 where it reads
    none); `said` bool[n]: tokens that the target chose."""

    tokens: npt.NDArray[np.int32]
    taps: npt.NDArray[np.float32]
    said: npt.NDArray[np.bool_]


def n_kept(drafted: Sequence[int], told: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """How many of these drafted tokens are those of a text that goes on with `told`, up to the first that is not."""
    return common_start(drafted, [int(token) for token in told[: len(drafted)]])


class Reading(Protocol):
    """A draft, read from its checkpoint or from its file."""

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Drafts of `depth` tokens after each of the tokens at `starts` i64[R], the last ones known: the first drafted
        position's logits f32[R, Vd], and how many tokens of each draft are the text's, i64[R]."""
        ...

    def close(self) -> None: ...


class Method(Protocol):
    """Such a module. Its tensors go by their names in GGUF, rows first, rows of q and k in llama.cpp's order."""

    METHOD: str
    TITLE: str  # "EAGLE-3"
    MAIN_TENSOR: str  # whose type stands for the file's quantisation

    def recognises(self, config: Mapping[str, Any], names: set[str]) -> bool:
        """Whether a checkpoint of somebody else's, with this config.json and these tensors, is of this kind."""

    def foreign_config(self, source: Checkpoint, target: GGUFFile) -> SpeculatorConfig:
        """What such a checkpoint is. Raises ModelFileError, naming it, for what llama.cpp's graph can't do."""

    def tensors_of(self, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, np.ndarray]:
        """f32 values by GGUF name; i64 for tables of ids. Raises ModelFileError for what is missing, unknown, misshapen."""

    def kind_of(self, name: str, kind: str) -> str:
        """The type that the matrix `name` is stored in where `kind` was asked for."""

    def extra_keys(self, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, Any]:
        """Keys of the file beyond SpeculatorConfig's and the target's tokenizer, which they may replace."""

    def speculators_of(
        self, config: SpeculatorConfig, values: dict[str, np.ndarray], target: GGUFFile | None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Tensors under the names of vLLM's speculators and their config.json (speculators.py), out of a file's values by
        GGUF name. Raises UsageError, naming it, for what that format can't hold."""

    def trained(self, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> Reading:
        """The checkpoint through PyTorch. Raises UsageError where that is not installed."""

    def written(self, draft: GGUFFile, target: GGUFFile) -> Reading:
        """The file as `localspec run` reads it."""


def names() -> list[str]:
    """The methods that can be exported."""
    return sorted(path.stem for path in HERE.glob("*.py") if "\nMETHOD = " in path.read_text("utf-8"))


def find(name: str) -> Any:
    """The module of a method. Raises UsageError where there is none."""
    if name not in names():
        raise UsageError(f"a draft of the method {name!r} can't be converted by this version; it knows {', '.join(names())}")
    return importlib.import_module(f"localspec.convert.{name}")
