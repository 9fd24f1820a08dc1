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

from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import clip
from localspec.speculator import CHECKPOINT_FILE, SpeculatorConfig, TargetIdentity

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "BOOL": "|b1"}
#: settings that change the graph to one that llama.cpp does not have
_UNSUPPORTED = {"norm_output": "feeds normalised states back", "fc_norm": "normalises each tap by itself"}


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
            if config.method != "eagle3":
                raise self.error(f"is of the method {clip(config.method)}; eagle3 is what can be converted here")
            return config
        return self._foreign_config(target)

    def _foreign_config(self, target: GGUFFile) -> SpeculatorConfig:
        try:
            outer: dict[str, Any] = json.loads((self.path / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(f"has no config.json that can be read ({error})") from None
        layer = outer | outer.get("transformer_layer_config", {})
        for name, what in _UNSUPPORTED.items():
            if layer.get(name):
                raise self.error(f"{what} ({name}), which llama.cpp's EAGLE-3 graph can't do")
        if layer.get("num_hidden_layers", 1) != 1:
            raise self.error(f"has {layer['num_hidden_layers']} layers; llama.cpp's EAGLE-3 graph has one")
        if (layer.get("rope_scaling") or layer.get("rope_parameters") or {}).get("rope_type", "default") != "default":
            raise self.error("scales its rope, which can't be converted yet")
        needed = ("hidden_size", "intermediate_size", "num_attention_heads")
        missing = [key for key in needed if not isinstance(layer.get(key), int)]
        if missing:
            raise self.error(f"says no {missing[0]} in config.json")
        taps = layer.get("eagle_aux_hidden_state_layer_ids")
        n_head = layer["num_attention_heads"]
        windowed = "sliding_attention" in (layer.get("layer_types") or [])
        rope = layer.get("rope_parameters") or {}
        return SpeculatorConfig(
            method="eagle3",
            target=TargetIdentity.of(target),
            taps=tuple(taps) if taps else (2, target.n_layer // 2, target.n_layer - 3),
            n_embd=layer["hidden_size"],
            n_head=n_head,
            n_head_kv=layer.get("num_key_value_heads") or n_head,
            head_dim=layer.get("head_dim") or layer["hidden_size"] // n_head,
            n_ff=layer["intermediate_size"],
            rms_eps=float(layer.get("rms_norm_eps", 1e-6)),
            rope_base=float(layer.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            norm_before_residual=bool(layer.get("norm_before_residual", False)),
            norm_before_fc=bool(layer.get("norm_before_fc", False)),
            draft_vocab=len(self.integers("d2t")) if "d2t" in self._raw else 0,
            window=int(layer.get("sliding_window") or 0) if windowed else 0,
            n_ctx_train=int(layer.get("max_position_embeddings", 2048)),
        )


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
