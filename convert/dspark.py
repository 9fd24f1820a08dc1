"""A DSpark checkpoint to the GGUF file that llama.cpp (draft-dspark) and localspec run: ours, DeepSpec's, or one of vLLM's
`speculators`.

DSpark is DFlash with two heads on top: a Markov head of low rank, which adds to the logits of a place what the token before
it makes likely, and one that says how sure a place is. In `extra` stand, besides DFlash's keys, sample_from_anchor (true,
the default: the anchor's own place predicts the first token) and has_confidence_head (true by default).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localspec.convert import dflash
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.dflash import MAIN_TENSOR, trained, written
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig

__all__ = ["MAIN_TENSOR", "METHOD", "TITLE", "extra_keys", "foreign_config", "kind_of", "recognises", "speculators_of",
           "tensors_of", "trained", "written"]  # fmt: skip

METHOD = "dspark"
TITLE = "DSpark"

_FIRST, _SECOND = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_SURE, _SURE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def recognises(config: Mapping[str, Any], names: set[str]) -> bool:
    """DFlash's tensors and a Markov head."""
    return dflash.is_dflash(names) and _FIRST in names


def foreign_config(source: Checkpoint, target: GGUFFile) -> SpeculatorConfig:
    """As methods.Method says."""
    outer = source.json("config.json")
    kind = outer.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise source.error(f"has a Markov head of the type {kind}; llama.cpp's DSpark graph knows vanilla only")
    from_anchor = not {"transformer_layer_config", "aux_hidden_state_layer_ids"} & outer.keys()
    extra = {
        "sample_from_anchor": bool(outer.get("sample_from_anchor", from_anchor)),
        "has_confidence_head": _SURE in source.names,
    }
    return dflash.backbone_config(source, target, METHOD, extra)


def tensors_of(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, np.ndarray]:
    """As methods.Method says."""
    for name in (_FIRST, _SECOND):
        if name not in source.names:
            raise source.error(f"lacks the tensor {name}")
    rank = source.tensor(_SECOND).shape[-1]
    n_vocab = config.target.n_vocab
    more: dict[str, tuple[str, tuple[int, ...]]] = {
        _FIRST: ("markov_w1.weight", (n_vocab, rank)),
        _SECOND: ("markov_w2.weight", (config.draft_vocab or n_vocab, rank)),
    }
    if config.extra.get("has_confidence_head", True):
        seen = source.tensor(_SURE).shape[-1] if _SURE in source.names else 0
        # A head that does not look at the Markov state is one whose weights for it are zero.
        more[_SURE] = ("conf_proj.weight", (1, config.n_embd if seen == config.n_embd else config.n_embd + rank))
        if _SURE_BIAS in source.names:
            more[_SURE_BIAS] = ("conf_proj.bias", (1,))
    out = dflash.backbone_tensors(source, config, target, more)
    sure = out.get("conf_proj.weight")
    if sure is not None and sure.shape[1] == config.n_embd:
        out["conf_proj.weight"] = np.concatenate([sure, np.zeros((1, rank), np.float32)], 1)
    return out


def kind_of(name: str, kind: str) -> str:
    """The one row that says how sure a place is costs nothing: it keeps its precision."""
    return "F16" if name == "conf_proj.weight" else dflash.kind_of(name, kind)


def extra_keys(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, Any]:
    """DFlash's keys, and whether there is a confidence head: llama.cpp must know."""
    own = {key: bool(config.extra.get(key, True)) for key in ("sample_from_anchor", "has_confidence_head")}
    return dflash.extra_keys(source, config, target) | {f"{config.arch}.{key}": value for key, value in own.items()}


def speculators_of(
    config: SpeculatorConfig, values: dict[str, np.ndarray], target: GGUFFile | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """As methods.Method says."""
    sure = bool(config.extra.get("has_confidence_head", True))
    names = {"markov_w1.weight": _FIRST, "markov_w2.weight": _SECOND}
    names |= {"conf_proj.weight": _SURE, "conf_proj.bias": _SURE_BIAS}
    own = {
        "sample_from_anchor": bool(config.extra.get("sample_from_anchor", True)),
        "markov_rank": values["markov_w1.weight"].shape[-1], "markov_head_type": "vanilla",
        "enable_confidence_head": sure, "confidence_head_with_markov": sure,
    }  # fmt: skip
    return dflash.speculators_form(config, values, target, "DSpark", names, own)
