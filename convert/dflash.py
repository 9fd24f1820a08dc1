"""A DFlash checkpoint to the GGUF file that llama.cpp and localspec run: ours, z-lab's, or one of vLLM's `speculators`.

Its graph rotates halves (NEOX) like Hugging Face's, so rows of q and k stay where they are. What changes: names; `d2t`,
offsets in a checkpoint and absolute ids in a file; ids of target layers that z-lab counts by their outputs and GGUF by their
inputs. dspark.py adds two heads to all this.

What localspec.json holds in `extra`, by the keys' names behind "dflash.": block_size (the anchor included), mask_token_id,
and where they apply attention.sliding_window_pattern (a list, 1 for each layer with a window, 0 for one that sees all; all
have it where there is a window and no list) and attention.causal (no position of a block sees later ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localspec.convert.checkpoint import Checkpoint, head_name, layer_config, own_matrix, target_ids
from localspec.convert.foreign import check_kinds, whole_numbers
from localspec.convert.methods import Reading, Text, n_kept
from localspec.convert.output import dequantised
from localspec.convert.speculators import described, vocabulary
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig, TargetIdentity

if TYPE_CHECKING:
    from localspec.dflash_net import DFlashNet

METHOD = "dflash"
TITLE = "DFlash"
MAIN_TENSOR = "blk.0.ffn_gate.weight"
ARCHITECTURE = "dflash"

#: fc's type where the others have few bits; see eagle3.py
FINER = {"Q4_0": "Q8_0", "Q4_1": "Q8_0"}
#: checkpoint name -> GGUF name, without "layers.N." / "blk.N."
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_OUTER = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}
_OWN = ("embed_tokens.weight", "lm_head.weight", "d2t")  # each has a reason to be left out
#: what a trainer keeps for itself and a draft does not need
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
#: tensors of the later DFlash 2
_SECOND = ("candidate_selector", "attention_conv", "mlp_conv")
#: settings, nested or not, that change the network to one that can't be run here -> the value that does not
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "adds biases in its attention"),
    "rope_is_neox_style": (True, "rotates neighbours"),
    "partial_rotary_factor": (1.0, "rotates a part of each head"),
    "attention_value_scale": (1.0, "scales its attention's values"),
    "output_multiplier": (1.0, "scales its logits"),
    "input_embedding_scale": (1.0, "scales its embedding"),
    "final_logit_softcapping": (0.0, "caps its logits"),
    "hidden_act": ("silu", "has another activation than silu"),
    "add_one_to_norms": (False, "adds one to its norms"),
}


# -- what a checkpoint is -------------------------------------------------------------------------------------------------


def recognises(config: Mapping[str, Any], names: set[str]) -> bool:
    """fc and a norm behind it, layers with norms of q and k; without DSpark's heads."""
    return is_dflash(names) and not any(name.startswith("markov_head.") for name in names)


def is_dflash(names: set[str]) -> bool:
    """Whether these are tensors of DFlash's backbone, and perhaps more."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names


def foreign_config(source: Checkpoint, target: GGUFFile) -> SpeculatorConfig:
    """As methods.Method says."""
    outer = source.json("config.json")
    # DSpark's trainers can leave its Markov head out; their drafts begin at the anchor all the same.
    is_dspark = any("DSpark" in str(name) for name in outer.get("architectures") or [])
    if outer.get("sample_from_anchor", is_dspark):
        raise source.error(
            "predicts from the anchor's own place (sample_from_anchor) without a Markov head; llama.cpp needs one for it"
        )
    return backbone_config(source, target, METHOD, {})


def backbone_config(source: Checkpoint, target: GGUFFile, method: str, extra: Mapping[str, Any]) -> SpeculatorConfig:
    """The config of a foreign checkpoint, with `extra` added to the backbone's own extra keys."""
    flat = layer_config(source)
    flat = flat | {k: v for k, v in flat.get("dflash_config", {}).items() if v is not None}
    check_kinds(source, flat)
    _refuse_unsupported(source, flat, target)
    rope = flat.get("rope_parameters") or {}
    n_head, n_layer = flat["num_attention_heads"], flat.get("num_hidden_layers", 1)
    window, windowed = _windows(source, flat, n_layer)
    own: dict[str, Any] = {"block_size": flat.get("block_size", 16), "mask_token_id": flat.get("mask_token_id")}
    if window:
        own["attention.sliding_window_pattern"] = windowed
    if _is_causal(source, flat, windowed):
        own["attention.causal"] = True
    for key, value in own.items():
        if value is None or (key == "block_size" and (not isinstance(value, int) or value < 2)):
            raise source.error(f"says no {key} in config.json")
    n_draft = own["block_size"] if extra.get("sample_from_anchor") else own["block_size"] - 1
    return SpeculatorConfig(
        method=method,
        target=TargetIdentity.of(target),
        taps=_taps(source, flat, target),
        n_embd=flat["hidden_size"],
        n_head=n_head,
        n_head_kv=flat.get("num_key_value_heads") or n_head,
        head_dim=flat.get("head_dim") or flat["hidden_size"] // n_head,
        n_ff=flat["intermediate_size"],
        n_layer=n_layer,
        rms_eps=float(flat.get("rms_norm_eps", 1e-6)),
        rope_base=float(flat.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        draft_vocab=int(source.integers("d2t").size) if "d2t" in source.names else 0,
        depth=n_draft,
        window=window,
        n_ctx_train=int(flat.get("max_position_embeddings", 2048)),
        architecture=ARCHITECTURE,
        extra=own | dict(extra),
    )


def _refuse_unsupported(source: Checkpoint, flat: Mapping[str, Any], target: GGUFFile) -> None:
    if any(part in name for name in source.names for part in _SECOND) or "conv_kernel_size" in flat:
        raise source.error("is a DFlash 2 draft (convolutions and a selector), which can't be converted or run here")
    if (source.path / "mask_embedding.pt").exists():
        raise source.error("has a mask embedding of its own (mask_embedding.pt), which can't be converted here")
    rope = flat.get("rope_parameters") or {}
    for key, (usual, what) in _UNSUPPORTED.items():
        value = flat.get(key, rope.get(key))
        if value is not None and value != usual:
            raise source.error(f"{what} ({key}: {value}), which can't be converted here")
    if flat["hidden_size"] != target.n_embd:
        raise source.error(
            f"is {flat['hidden_size']} wide; llama.cpp's DFlash graph works in the target's own width, {target.n_embd}"
        )


def _taps(source: Checkpoint, flat: Mapping[str, Any], target: GGUFFile) -> tuple[int, ...]:
    """The taps, in the order in which fc reads them."""
    inputs, outputs = flat.get("aux_hidden_state_layer_ids"), flat.get("target_layer_ids")
    if not inputs and not outputs:
        raise source.error("does not say which of the target's layers it reads (target_layer_ids) in config.json")
    if inputs:
        taps = tuple(whole_numbers(source, "aux_hidden_state_layer_ids", inputs))
    else:
        taps = tuple(i + 1 for i in whole_numbers(source, "target_layer_ids", outputs))
    beyond = [tap for tap in taps if not 0 <= tap <= target.n_layer]
    if beyond:
        raise source.error(f"reads the target after layer {beyond[0]}; {target.path.name} has {target.n_layer}")
    return taps


def _windows(source: Checkpoint, flat: Mapping[str, Any], n_layer: int) -> tuple[int, list[int]]:
    """The window's width, 0 where there is none, and which layers have it."""
    everywhere = bool(flat.get("use_swa"))
    width = flat.get("swa_window_size") or flat.get("sliding_window")
    kinds = flat.get("layer_types") or []
    windowed = [1] * n_layer if everywhere else [int(kind == "sliding_attention") for kind in kinds]
    on = everywhere or flat.get("use_sliding_window", any(windowed))
    if not (on and any(windowed)):
        return 0, [0] * n_layer
    if not isinstance(width, int) or width <= 0 or len(windowed) != n_layer:
        raise source.error(f"has layers with a window, but no width for it, or not {n_layer} layer_types, in config.json")
    return width, windowed


def _is_causal(source: Checkpoint, flat: Mapping[str, Any], windowed: list[int]) -> bool:
    for key in ("is_causal", "causal"):
        if flat.get(key) is not None:
            return bool(flat[key])
    if flat.get("sliding_window_non_causal", True) or not any(windowed):
        return False
    if not all(windowed):
        raise source.error(
            "looks only backwards in a block where a layer has a window and both ways where it has none "
            "(sliding_window_non_causal: false), and llama.cpp's DFlash graph can't mix the two"
        )
    return True


# -- its tensors -----------------------------------------------------------------------------------------------------------


def tensors_of(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, np.ndarray]:
    """As methods.Method says."""
    return backbone_tensors(source, config, target, {})


def backbone_tensors(
    source: Checkpoint, config: SpeculatorConfig, target: GGUFFile, more: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, np.ndarray]:
    """The draft's tensors by GGUF name. `more`: what a draft has besides a backbone, checkpoint name -> GGUF name, shape."""
    check_extra(source, config)
    wanted = backbone_shapes(config) | dict(more)
    for name in sorted(source.names):
        if name not in wanted and name not in _OWN and name not in _IGNORED:
            raise source.error(f"has the tensor {name}, which can't be converted here; {config.method} has no place for it")
    out: dict[str, np.ndarray] = {}
    for name, (new, shape) in wanted.items():
        if name not in source.names:
            raise source.error(f"lacks the tensor {name}")
        value = source.tensor(name)
        if value.shape != shape:
            raise source.error(f"has {name} of the shape {list(value.shape)}; its config asks for {list(shape)}")
        out[new] = value
    n_vocab = config.target.n_vocab
    embedding = own_matrix(source, "embed_tokens.weight", target, (n_vocab, config.n_embd), "token_embd.weight")
    head = own_matrix(source, "lm_head.weight", target, (config.draft_vocab or n_vocab, config.n_embd), head_name(target))
    if config.draft_vocab:
        out["d2t"] = target_ids(source, config)
        if head is None:
            raise source.error("lacks the tensor lm_head.weight, which a reduced vocabulary needs")
    if embedding is not None:
        out["token_embd.weight"] = embedding
        if head is None:  # llama.cpp would take the draft's own embedding for the head
            head = dequantised(target, head_name(target))[:n_vocab]
    if head is not None:
        out["output.weight"] = head
    return out


def check_extra(source: Checkpoint, config: SpeculatorConfig) -> None:
    """Raise ModelFileError for a config that no file can be made of."""
    extra, n = config.extra, config.n_layer
    if config.n_embd != config.target.n_embd:
        raise source.error(f"is {config.n_embd} wide; a DFlash draft works in its target's width, {config.target.n_embd}")
    for key, least, most in (("block_size", 1, 1 << 10), ("mask_token_id", 0, config.target.n_vocab - 1)):
        value = extra.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise source.error(f"has a {key} of {value!r} in its config; {least} to {most} is what can be run")
    pattern = extra.get("attention.sliding_window_pattern")
    if pattern is not None and (not isinstance(pattern, list | tuple) or len(pattern) != n):
        raise source.error(f"has windows for {pattern!r} in its config; one number for each of {n} layers is expected")


def backbone_shapes(config: SpeculatorConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Checkpoint name -> GGUF name and shape, rows first."""
    e, d, ff = config.n_embd, config.head_dim, config.n_ff
    q, kv = config.n_head * d, config.n_head_kv * d
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (e,), "attn_q.weight": (q, e), "attn_k.weight": (kv, e), "attn_v.weight": (kv, e),
        "attn_output.weight": (e, q), "attn_q_norm.weight": (d,), "attn_k_norm.weight": (d,), "ffn_norm.weight": (e,),
        "ffn_gate.weight": (ff, e), "ffn_up.weight": (ff, e), "ffn_down.weight": (e, ff),
    }  # fmt: skip
    outer: dict[str, tuple[int, ...]] = {
        "fc.weight": (e, len(config.taps) * config.target.n_embd),
        "enc.output_norm.weight": (e,),
        "output_norm.weight": (e,),
    }
    shapes = {old: (new, outer[new]) for old, new in _OUTER.items()}
    for i in range(config.n_layer):
        shapes |= {f"layers.{i}.{old}": (f"blk.{i}.{new}", layer[new]) for old, new in _LAYER.items()}
    return shapes


def kind_of(name: str, kind: str) -> str:
    """fc stays finer than the rest."""
    return FINER.get(kind, kind) if name == "fc.weight" else kind


def extra_keys(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, Any]:
    """The mask's id, where llama.cpp looks for it, and which layers have a window, which it must be told."""
    keys: dict[str, Any] = {"tokenizer.ggml.mask_token_id": config.extra["mask_token_id"]}
    if config.window and "attention.sliding_window_pattern" not in config.extra:
        keys[f"{config.arch}.attention.sliding_window_pattern"] = [1] * config.n_layer
    return keys


# -- its two readings ------------------------------------------------------------------------------------------------------


def speculators_of(
    config: SpeculatorConfig, values: dict[str, np.ndarray], target: GGUFFile | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """As methods.Method says."""
    return speculators_form(config, values, target, "DFlash", {}, {})


def speculators_form(
    config: SpeculatorConfig, values: dict[str, np.ndarray], target: GGUFFile | None, title: str, more: Mapping[str, str],
    own: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:  # fmt: skip
    """(tensors, config.json) of a draft with this backbone; `more` names the tensors of its own, `own` its settings."""
    values = dict(values)
    if "output.weight" not in values:
        if target is None:
            raise UsageError("this draft has no head of its own: give its target as --target FILE, whose head it uses")
        values["output.weight"] = dequantised(target, head_name(target))[: config.target.n_vocab]
    names = {f"blk.{i}.{b}": f"layers.{i}.{a}" for i in range(config.n_layer) for a, b in _LAYER.items()}
    names |= {b: a for a, b in _OUTER.items()} | dict(more)
    names |= {"output.weight": "lm_head.weight", "token_embd.weight": "embed_tokens.weight"}
    tensors = vocabulary(values.pop("d2t"), config.target.n_vocab) if "d2t" in values else {}
    unknown = sorted(values.keys() - names.keys())
    if unknown:
        raise UsageError(f"this draft has the tensor {unknown[0]}, for which {title} in speculators has no place")
    tensors |= {names[name]: value for name, value in values.items()}
    layer: dict[str, Any] = {"model_type": "qwen3"}
    if config.window:
        pattern = config.extra.get("attention.sliding_window_pattern") or [1] * config.n_layer
        assert isinstance(pattern, list)
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
        layer |= {"use_sliding_window": True, "sliding_window": config.window, "layer_types": kinds}
    said: dict[str, Any] = {
        "target_hidden_size": config.target.n_embd, "aux_hidden_state_layer_ids": list(config.taps),
        "block_size": config.extra["block_size"], "mask_token_id": config.extra["mask_token_id"],
        "sample_from_anchor": False, "sliding_window_non_causal": not config.extra.get("attention.causal", False), **own,
    }  # fmt: skip
    return tensors, described(config, f"{title}Speculator", said, layer)


def trained(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> Reading:
    """PyTorch's reading of the checkpoint."""
    from localspec.convert.dflash_torch import TorchDraft

    return TorchDraft(source, config, target)


def written(draft: GGUFFile, target: GGUFFile) -> Reading:
    """The file through the network that drafts at run time."""
    from localspec.dflash_net import DFlashNet

    return _Written(DFlashNet(draft, target, 1, n_threads=1))


class _Written:
    def __init__(self, net: DFlashNet):
        self.net = net

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        net = self.net
        slot, ks = np.zeros(1, np.int32), np.array([depth], np.int32)
        logits = np.empty((len(starts), len(net.ids)), np.float32)
        kept = np.zeros(len(starts), np.int64)
        placed = 0
        for row, start in enumerate(starts.tolist()):
            net.inject(0, placed, text.taps[placed:start])
            placed = start
            position, token = np.array([start], np.int32), text.tokens[start : start + 1].astype(np.int32)
            rows, hidden = net.block(slot, position, token, ks)
            net.lean(token, hidden[:1], rows[:1])
            logits[row] = rows[0]
            drafted, _, _ = net.greedy(slot, position, token, ks, 0.0)
            kept[row] = n_kept(drafted[0].tolist(), text.tokens[start + 1 :])
        return logits, kept

    def close(self) -> None:
        self.net.close()
