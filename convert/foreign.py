"""What checkpoints of other trainers have in common: what kinds there are, which of them no file can hold, and their ropes.

Whatever can't be written is named in one line: a draft that lost a bias or a layer on the way still loads, and then drafts
badly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localspec.gguf_format import clip
from localspec.speculator import MAX_BASE, MAX_EPS, MAX_LAYERS, MIN_EPS, SpeculatorConfig

if TYPE_CHECKING:
    from localspec.convert.checkpoint import Checkpoint

#: under SpeculatorConfig.provenance: a rope's settings as its trainer wrote them, where they are more than a base
ROPE = "rope_parameters"
#: llama3's rope where a config says nothing
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TRAIN = "train an EAGLE-3 draft for this target instead (localspec train)"
_OBJECTS = (
    "rope_scaling", "rope_parameters", "eagle_config", "dflash_config", "transformer_layer_config", "text_config",
    "speculators_config",
)  # fmt: skip
_LISTS = ("architectures", "layer_types")
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "target_hidden_size", "vocab_size", "draft_vocab_size",
)  # fmt: skip
_WINDOWS = ("sliding_window", "swa_window_size")
_MOST = (1 << 31) - 1
#: ends of names that only quantised checkpoints have
_PACKED = (".qweight", ".qzeros", ".scales", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax")


def kind_of(config: Mapping[str, Any], names: set[str], shapes: Mapping[str, list[int]]) -> str:
    """What a checkpoint of no kind known here is, as the rest of a sentence that begins with its name."""
    said = config.get("speculators_model_type") or config.get("model_type")
    fc = shapes.get("fc.weight", [])
    ordinary = "layers.0.self_attn.q_proj.weight" in names and "layers.0.hidden_norm.weight" not in names
    if (ordinary and len(fc) == 2 and fc[1] == 2 * fc[0]) or said == "eagle" or "fusion_fc.weight" in names:
        return (
            "is an EAGLE-1 or EAGLE-2 head: it joins the embedding with one state of the target, where llama.cpp's EAGLE-3 "
            f"graph normalises both and reads three; no file can hold it; {_TRAIN}"
        )
    if said == "medusa" or any("medusa" in n for n in names) or {"0.0.linear.weight", "0.1.weight"} & names:
        return f"holds Medusa heads, for which llama.cpp has no graph; {_TRAIN}"
    if said in ("mlp_speculator", "peagle") or config.get("parallel_drafting"):
        what = "an MLP speculator" if said == "mlp_speculator" else "a draft that says all its tokens at once (P-EAGLE)"
        return f"is {what}, for which llama.cpp has no graph; {_TRAIN}"
    architecture = (config.get("architectures") or [None])[0]
    told = f"says {clip(str(architecture or said), 80)}" if architecture or said else "says nothing of its kind"
    return f"is of no kind that can be converted here; its config.json {told}"


def check_plain(source: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise ModelFileError for quantised weights, which are not the values that a file is made of."""
    said = config.get("quantization_config") or config.get("compression_config")
    packed = next((n for n in sorted(source.names) if n.endswith(_PACKED)), None)
    if said or packed:
        how = said.get("quant_method") if isinstance(said, Mapping) else None
        raise source.error(
            f"is quantised ({clip(str(how or packed or 'quantization_config'), 80)}); convert the one that it was made of, "
            "in F32, F16 or BF16"
        )


def check_kinds(source: Checkpoint, layer: Mapping[str, Any], file: str = "config.json") -> None:
    """Raise ModelFileError for a setting of `file` that is not of its kind, or beyond what any model has; None is
    nothing said."""
    rope = {key: value for name in _OBJECTS if isinstance(layer.get(name), dict) for key, value in layer[name].items()}
    for keys, holder, is_right in (
        (_OBJECTS, layer, lambda value: isinstance(value, dict)),
        (_LISTS, layer, lambda value: isinstance(value, list)),
        (_SIZES, layer, lambda value: _is_whole(value, 1, _MOST)),
        (("num_hidden_layers",), layer, lambda value: _is_whole(value, 1, MAX_LAYERS)),
        (_WINDOWS, layer, lambda value: _is_whole(value, 0, _MOST)),
        (("rms_norm_eps",), layer, lambda value: _is_number(value, MIN_EPS, MAX_EPS)),
        (("rope_theta",), layer, lambda value: _is_number(value, 1, MAX_BASE)),
        (("rope_theta", "original_max_position_embeddings"), rope, lambda value: _is_number(value, 1, MAX_BASE)),
        (LLAMA3, rope, lambda value: _is_number(value, 1e-3, 1e6)),
    ):
        wrong = next((key for key in keys if holder.get(key) is not None and not is_right(holder[key])), None)
        if wrong is not None:
            raise source.error(
                f"has a {wrong} in {file} that can't be used ({clip(repr(holder[wrong]), 60)}): give it as its trainer "
                "wrote it"
            )
    if rope.get("rope_type") == "llama3":
        low, high = (rope.get(key) or LLAMA3[key] for key in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise source.error(f"has a low_freq_factor of {low} in {file}, which must be below its high_freq_factor, {high}")


def whole_numbers(source: Checkpoint, key: str, value: Any) -> list[int]:
    """The layers that `key` of config.json lists. Raises ModelFileError unless they are whole numbers, each given once."""
    if not isinstance(value, list) or not value or not all(_is_whole(i, -_MOST, _MOST) for i in value):
        raise source.error(f"has a {key} in config.json that is no list of layers ({clip(repr(value), 60)})")
    if len(set(value)) < len(value):
        raise source.error(f"names a layer twice in its {key} in config.json ({clip(repr(value), 60)})")
    return value


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def rope_settings(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The rope's settings under their newer names: ``rope_type``, ``rope_theta``, ``factor``, ..."""
    both = (layer.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    older, newer = ({key: value for key, value in kept.items() if value is not None} for kept in both)
    for given in (older, newer):
        short = given.pop("type", None)
        given["rope_type"] = given.get("rope_type") or short or "default"
    said = older | newer
    if newer["rope_type"] == "default":  # where they contradict each other, the one that stretches is meant
        said["rope_type"] = older["rope_type"]
    if isinstance(layer.get("rope_theta"), int | float):
        said.setdefault("rope_theta", layer["rope_theta"])
    if "partial_rotary_factor" in layer:
        said.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])
    return said


def rope_factors(config: SpeculatorConfig) -> npt.NDArray[np.float32] | None:
    """What the speed of each pair of a head is divided by, f32[head_dim / 2], for llama3's rope; None for any other.

    Wavelengths below original / high_freq_factor stay, those beyond original / low_freq_factor are stretched by `factor`,
    and between the two the stretching grows smoothly (Llama 3.1; transformers' rope type of this name).
    """
    said = config.provenance.get(ROPE)
    if not isinstance(said, Mapping) or said.get("rope_type") != "llama3":
        return None
    factor, low, high = (float(said.get(key) or usual) for key, usual in LLAMA3.items())
    original = float(said.get("original_max_position_embeddings") or 8192)
    speeds = config.rope_base ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = original * speeds / (2 * math.pi)  # of each pair, over the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float32] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return factors
