"""config.json of a model in Hugging Face's layout, and what is to be written of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert.weights import read_object
from localspec.errors import ModelFileError
from localspec.gguf_format import clip

#: what converts everything that is not covered here
OTHER_CONVERTER = "llama.cpp's convert_hf_to_gguf.py"


class Config:
    """The settings of a model's text part: those of ``text_config`` where there is one, before the outer ones.

    The getters raise ModelFileError for a setting that is missing or of the wrong kind; null counts as missing.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path = path
        names = values.get("architectures")
        self.architecture = str(names[0]) if isinstance(names, list) and names else ""
        inner = values.get("text_config")
        self.is_multimodal = isinstance(inner, dict)
        self._values = {**values, **inner} if isinstance(inner, dict) else dict(values)

    @classmethod
    def read(cls, path: Path) -> Config:
        """The config.json of a directory. Raises ModelFileError."""
        return cls(path, read_object(path / "config.json"))

    def error(self, text: str) -> ModelFileError:
        """A ModelFileError about this model."""
        return ModelFileError(f"{clip(str(self.path), 400)} {text}")

    def unsupported(self, text: str) -> ModelFileError:
        """A ModelFileError about what can't be converted here, with what can be done."""
        return self.error(f"{clip(text, 300)}, which can't be converted here; use {OTHER_CONVERTER} and give the GGUF")

    def get(self, key: str, default: Any = None) -> Any:
        """A setting as it stands; ``default`` where it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Take `defaults` for the settings that are missing."""
        self._values |= {key: value for key, value in defaults.items() if self._values.get(key) is None}

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.error(f"has no usable {key} in config.json: {clip(repr(value))}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(f"has no usable {key} in config.json: {clip(repr(value))}")
        return float(value)

    def refuse(self, **settings: Any) -> None:
        """Raise ModelFileError where one of `settings` is given and not the value, or one of the tuple, named here."""
        for key, allowed in settings.items():
            value = self.get(key)
            if value is not None and value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
                raise self.unsupported(f"has {key} {value!r}")

    def layer_types(self, default: list[str]) -> list[str]:
        """``sliding_attention`` or ``full_attention`` for each layer."""
        types = self.get("layer_types", default)
        n_layer = self.integer("num_hidden_layers")
        if not isinstance(types, list) or len(types) != n_layer or not set(types) <= {"sliding_attention", "full_attention"}:
            raise self.unsupported(f"has layer_types that are not {n_layer} of sliding_attention and full_attention")
        return types

    def rope(self, kind: str = "full_attention") -> dict[str, Any]:
        """The rope's settings of one kind of layer: ``rope_type``, ``rope_theta``... from old and new configurations."""
        given = self.get("rope_parameters", {})
        if not isinstance(given, dict) or not isinstance(given.get(kind, {}), dict):
            raise self.error("has no usable rope_parameters in config.json")
        if "full_attention" in given or "sliding_attention" in given:
            found = dict(given.get(kind) or {})
        else:
            found = dict(given) if kind == "full_attention" else {}
        if kind == "full_attention":
            scaling = self.get("rope_scaling", {})
            if not isinstance(scaling, dict):
                raise self.error("has no usable rope_scaling in config.json")
            found = {**scaling, **found}
        found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
        return found


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF: its name there, the ``source``'s name and shape (rows first), and what is done to it.

    ``change`` takes and gives f32; without it the values are written as they are. ``shape`` is checked before and after.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    change: Callable[[np.ndarray], np.ndarray] | None = None
    #: keep all 32 bits, whatever the file's type (norms and biases are kept anyway)
    exact: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether this tensor is stored as F32 in every file."""
        return self.exact or len(self.shape) < 2


@dataclass
class Plan:
    """What a family makes of a model: the GGUF's architecture, its keys in order (without ``ARCH.``), its tensors.

    ``extra`` are tensors that come out of the configuration alone; ``ignored`` names of the checkpoint that are no part
    of the text model, or say nothing new.
    """

    architecture: str
    keys: dict[str, Any]
    tensors: list[Tensor]
    n_vocab: int
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    ignored: Callable[[str], bool] = lambda _name: False
    #: which kind of tokenizer the model has where tokenizer.json doesn't tell ("llama" or "gemma4")
    tokenizer: str = "llama"
