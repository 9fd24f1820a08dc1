"""Reading a draft's checkpoint: ours, one of vLLM's `speculators` package, or one as EAGLE's own trainer writes it.

The weights lie in safetensors files, read here without torch (bf16 included); pickles are read only where that is asked
for. Ours have localspec.json beside them; of the others config.json is read, where the shape of the layer is either nested
(transformer_layer_config) or not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert import foreign, methods, pickled
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
    def open(cls, path: Path, allow_pickle: bool = False) -> Checkpoint:
        """Read the tensors of a directory; `allow_pickle` reads PyTorch's pickles too, where there is no safetensors file.
        Raises ModelFileError."""
        from safetensors import SafetensorError, deserialize

        shown = clip(str(path), 400)
        if not path.is_dir():
            raise ModelFileError(f"checkpoint {shown} is not a directory; give the one that holds model.safetensors")
        raw: dict[str, tuple[str, list[int], bytes]] = {}
        for file in weights(path, allow_pickle):
            try:
                if file.suffix != ".safetensors":
                    read = pickled.read(file)
                else:
                    read = {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in deserialize(file.read_bytes())}
            except (OSError, SafetensorError) as error:
                raise ModelFileError(f"checkpoint {clip(str(file), 400)} can't be read: {error}") from None
            raw |= {_renamed(name): tensor for name, tensor in read.items()}
        return cls(path, raw)

    @property
    def names(self) -> set[str]:
        """The tensors that there are."""
        return set(self._raw)

    def shape(self, name: str) -> list[int]:
        """A tensor's shape, rows first."""
        return list(self._raw[name][1])

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
        """A tensor as f32. Raises ModelFileError where it holds NaN or infinity (a training that went wrong), or whole
        numbers, which are no weights."""
        stored = self._array(name)
        if stored.dtype.kind != "f":
            raise self.error(f"has whole numbers ({self._raw[name][0]}) in {name}; save it as F32, F16 or BF16")
        value = stored.astype(np.float32)
        if not np.isfinite(value).all():
            raise self.error(f"has values that are not finite in {name}; take an earlier checkpoint")
        return value

    def marked(self, name: str) -> np.ndarray:
        """The places of a tensor that are not 0, i64."""
        return np.flatnonzero(self._array(name))

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
            foreign.check_kinds(self, {foreign.ROPE: config.provenance.get(foreign.ROPE)}, CHECKPOINT_FILE)
            if config.method not in methods.names():
                known = ", ".join(methods.names())
                raise self.error(f"is of the method {clip(config.method)}; {known} are what can be converted here")
            return config
        outer = self.json("config.json")
        foreign.check_kinds(self, outer)
        foreign.check_plain(self, outer)
        for name in methods.names():
            if methods.find(name).recognises(outer, self.names):
                config = methods.find(name).foreign_config(self, target)
                return config
        raise self.error(foreign.kind_of(outer, self.names, {name: self.shape(name) for name in self.names}))

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object beside the tensors. Raises ModelFileError."""
        try:
            value = json.loads((self.path / name).read_text("utf-8"))
        except RecursionError:
            raise self.error(f"has no {name} that can be read (nested too deep)") from None
        except (OSError, ValueError) as error:
            raise self.error(f"has no {name} that can be read ({error})") from None
        if not isinstance(value, dict):
            raise self.error(f"has no object in {name}")
        return value


def layer_config(source: Checkpoint, ropes: tuple[str, ...] = ("default",)) -> dict[str, Any]:
    """config.json with the decoder layer's keys, nested or not, on the first level. Raises ModelFileError where it lacks
    sizes, has values of the wrong kind, or scales its rope in another way than `ropes` name."""
    outer = source.json("config.json")
    foreign.check_kinds(source, outer)
    layer = {key: value for key, value in outer.items() if value is not None}
    inner = layer.get("transformer_layer_config", {})
    layer |= {key: value for key, value in inner.items() if value is not None}
    foreign.check_kinds(source, layer)
    rope = foreign.rope_settings(layer)
    if rope["rope_type"] not in ropes:
        raise source.error(f"scales its rope by {clip(str(rope['rope_type']), 40)}, which can't be converted")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise source.error("rotates a part of each head only (partial_rotary_factor), which can't be converted")
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
    if "t2d" in source.names and not np.array_equal(source.marked("t2d"), ids):
        raise source.error("has tables d2t and t2d that contradict each other; d2t holds offsets, target id minus draft id")
    return ids


def weights(path: Path, allow_pickle: bool) -> list[Path]:
    """The files that hold a checkpoint's tensors. Raises ModelFileError where there are none, or only pickles unasked."""
    shown = clip(str(path), 400)
    every = sorted(path.glob("*.safetensors"))
    found = [file for file in every if file.name.startswith("model")] or every
    if found:
        return found
    pickles = pickled.files(path)
    if pickles and allow_pickle:
        return pickles
    if pickles:
        raise ModelFileError(
            f"checkpoint {shown} has only a pickle ({clip(pickles[0].name, 80)}), which may run whatever its author wrote: "
            "get it as safetensors, or give --allow-pickle to read its tensors and nothing else"
        )
    inner = sorted(p.parent.name for p in path.glob("*/model*.safetensors"))
    hint = f"; there is one in {clip(str(path / inner[0]), 400)}" if inner else ""
    looked_for = ", ".join(("*.safetensors", *pickled.PATTERNS))
    raise ModelFileError(f"{shown} holds no checkpoint: it has none of the files {looked_for}{hint}")


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
