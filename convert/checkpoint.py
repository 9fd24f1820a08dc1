"""Reading a draft's checkpoint: ours, one of vLLM's `speculators` package, or one as EAGLE's own trainer writes it.

The weights lie in safetensors files, read here without torch (bf16 included). Ours have localspec.json beside them; of
the others config.json is read, where the shape of the layer is either nested (transformer_layer_config) or not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert import methods
from localspec.convert.output import dequantised
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import clip
from localspec.speculator import CHECKPOINT_FILE, SpeculatorConfig

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "BOOL": "|b1"}
#: a checkpoint's matrix is the target's when it is this close to it: rounding of bf16 and of the target's own type
_SAME = 0.02


@dataclass
class Checkpoint:
    """A checkpoint's directory with its tensors, still as they are stored. Names are those of `speculators`."""

    path: Path
    _raw: dict[str, tuple[str, list[int], bytes]]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the tensors of a directory. Raises ModelFileError."""
        from safetensors import SafetensorError, deserialize

        shown = clip(str(path), 400)
        if not path.is_dir():
            raise ModelFileError(f"checkpoint {shown} is not a directory; give the one that holds model.safetensors")
        files = sorted(path.glob("model*.safetensors"))
        if not files:
            inner = sorted(p.parent.name for p in path.glob("*/model*.safetensors"))
            hint = f"; there is one in {clip(str(path / inner[0]), 400)}" if inner else ""
            raise ModelFileError(f"checkpoint {shown} has no model.safetensors{hint}")
        raw: dict[str, tuple[str, list[int], bytes]] = {}
        for file in files:
            try:
                for name, tensor in deserialize(file.read_bytes()):
                    raw[_renamed(name)] = (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
            except (OSError, SafetensorError) as error:
                raise ModelFileError(f"checkpoint {clip(str(file), 400)} can't be read: {error}") from None
        return cls(path, raw)

    @property
    def names(self) -> set[str]:
        """The tensors that there are."""
        return set(self._raw)

    def error(self, text: str) -> ModelFileError:
        """A ModelFileError about this checkpoint."""
        return ModelFileError(f"checkpoint {clip(str(self.path), 400)} {text}")

    def _array(self, name: str) -> np.ndarray:
        dtype, shape, data = self._raw[name]
        if dtype == "BF16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if dtype not in _DTYPES:
            raise self.error(f"has the tensor {name} of the type {dtype}; save it as F32, F16 or BF16")
        return np.frombuffer(data, _DTYPES[dtype]).reshape(shape)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as f32. Raises ModelFileError where it holds NaN or infinity: a training that went wrong."""
        value = self._array(name).astype(np.float32)
        if not np.isfinite(value).all():
            raise self.error(f"has values that are not finite in {name}; take an earlier checkpoint")
        return value

    def integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers as i64."""
        if name not in self._raw:
            raise self.error(f"lacks the tensor {name}")
        value = self._array(name)
        if value.dtype.kind not in "iu":
            raise self.error(f"has {name} of the type {value.dtype}; whole numbers are expected")
        return value.astype(np.int64)

    def config(self, target: GGUFFile) -> SpeculatorConfig:
        """What this draft is. For checkpoints of others `target` gives the identity that they don't record."""
        if (self.path / CHECKPOINT_FILE).is_file():
            config = SpeculatorConfig.load(self.path)
            if config.method not in methods.names():
                known = ", ".join(methods.names())
                raise self.error(f"is of the method {clip(config.method)}; {known} are what can be converted here")
            return config
        outer = self.json("config.json")
        for name in methods.names():
            if methods.find(name).recognises(outer, self.names):
                config = methods.find(name).foreign_config(self, target)
                return config
        raise self.error(f"is of no kind that can be converted here ({', '.join(methods.names())})")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object beside the tensors. Raises ModelFileError."""
        try:
            value = json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(f"has no {name} that can be read ({error})") from None
        if not isinstance(value, dict):
            raise self.error(f"has no object in {name}")
        return value


def layer_config(source: Checkpoint) -> dict[str, Any]:
    """config.json with the decoder layer's keys, nested or not, on the first level. Raises ModelFileError where it lacks
    sizes, or scales its rope."""
    outer = source.json("config.json")
    layer = outer | outer.get("transformer_layer_config", {})
    if (layer.get("rope_scaling") or layer.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        raise source.error("scales its rope, which can't be converted yet")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [key for key in needed if not isinstance(layer.get(key), int)]
    if missing:
        raise source.error(f"says no {missing[0]} in config.json")
    return layer


def target_ids(source: Checkpoint, config: SpeculatorConfig) -> np.ndarray:
    """The table d2t as a file has it, absolute ids i64[Vd], out of a checkpoint's offsets."""
    offsets = source.integers("d2t")
    if offsets.shape != (config.draft_vocab,):
        raise source.error(f"has d2t of the shape {list(offsets.shape)}; its config asks for [{config.draft_vocab}]")
    ids: np.ndarray = offsets + np.arange(len(offsets))
    if len(ids) and not (ids.min() >= 0 and ids.max() < config.target.n_vocab and (np.diff(ids) > 0).all()):
        raise source.error(
            f"has a table d2t that does not give {config.draft_vocab} rising ids below {config.target.n_vocab}: "
            "offsets are expected, target id minus draft id"
        )
    return ids


def own_matrix(source: Checkpoint, name: str, target: GGUFFile, shape: tuple[int, int], given: str) -> np.ndarray | None:
    """The checkpoint's own `name`, f32 of this shape; None where it has none, or the same as the target's tensor `given`."""
    if name not in source.names:
        return None
    own = source.tensor(name)
    if own.shape != shape:
        raise source.error(f"has {name} of the shape {list(own.shape)}, not {list(shape)}")
    if shape[1] == target.n_embd and given in target.tensors:
        theirs = dequantised(target, given)[: len(own)]
        if theirs.shape == own.shape and np.linalg.norm(own - theirs) <= _SAME * np.linalg.norm(theirs):
            return None
    return own


def head_name(target: GGUFFile) -> str:
    """The target's tensor that gives its logits."""
    return "output.weight" if "output.weight" in target.tensors else "token_embd.weight"


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
