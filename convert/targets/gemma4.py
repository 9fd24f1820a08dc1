"""Gemma 4, the text part: two sizes of heads, keys and values shared between layers, embeddings for each layer, experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from localspec.convert.targets.config import Config, Plan, Tensor
from localspec.convert.targets.decoder import GEMMA_NORMS, Decoder, is_beside_the_text
from localspec.convert.weights import Weights

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
#: what transformers takes where config.json says nothing
_DEFAULTS = {
    "vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "sliding_window": 512, "tie_word_embeddings": True, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
_PATTERN = 6
_GLOBAL_HEAD_DIM = 512
#: a divisor that stops a frequency of rope
_STOPPED = 1e30
_ATTENTION_KV = ("attn_k", "attn_v", "attn_k_norm")


class _Shapes:
    """What differs from layer to layer: lists with a number for each."""

    def __init__(self, config: Config, decoder: Decoder):
        n_layer = decoder.n_layer
        types = config.layer_types(["sliding_attention" if (i + 1) % _PATTERN else "full_attention" for i in range(n_layer)])
        self.windowed = [kind == "sliding_attention" for kind in types[:-1]] + [False]  # the last one always sees all
        self.n_shared = _count(config, "num_kv_shared_layers")
        own = n_layer - self.n_shared
        if own < 2 or (self.n_shared and self.windowed[own - 2 : own] != [True, False]):
            raise config.unsupported("shares keys and values of other layers than llama.cpp does")
        self.shares = [index >= own for index in range(n_layer)]
        self.global_dim, global_kv = _global_sizes(config, self.windowed)
        self.is_k_v = bool(config.get("attention_k_eq_v", False))
        self.kv_differ = self.is_k_v and global_kv is not None
        kv = global_kv if global_kv is not None and self.is_k_v else decoder.n_head_kv
        self.head_dim = [decoder.head_dim if window else self.global_dim for window in self.windowed]
        self.n_head_kv = [decoder.n_head_kv if window else kv for window in self.windowed]
        self.is_double_wide = bool(config.get("use_double_wide_mlp", False)) and self.n_shared > 0
        self.n_ff = [decoder.n_ff * (2 if self.is_double_wide and shared else 1) for shared in self.shares]


def plan(config: Config, weights: Weights) -> Plan:
    """Raises ModelFileError for a model that llama.cpp's gemma4 graph can't compute."""
    config.fill(_DEFAULTS)
    config.refuse(hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention="vision")
    decoder = Decoder(config, weights)
    shapes = _Shapes(config, decoder)
    tensors = decoder.outer()
    for index in range(decoder.n_layer):
        tensors += _layer(decoder, shapes, index)
    keys = decoder.keys() | _attention_keys(config, decoder, shapes)
    for part_keys, part in (_per_layer_inputs(config, decoder), _experts(config, decoder)):
        keys |= part_keys
        tensors += part
    if config.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")

    def ignored(name: str) -> bool:
        return decoder.is_ignored(name) or is_beside_the_text(name) or name in unused

    unused = {t.source for i, shares in enumerate(shapes.shares) if shares for t in _shared_parts(decoder, i)}
    extra = {"rope_freqs.weight": _rope_factors(config, shapes.global_dim)}
    return Plan("gemma4", keys, tensors, decoder.n_vocab, extra, ignored, tokenizer="gemma4")


def _layer(decoder: Decoder, shapes: _Shapes, index: int) -> list[Tensor]:
    head_dim = shapes.head_dim[index]
    tensors = decoder.matrices(index, head_dim, shapes.n_head_kv[index], shapes.n_ff[index])
    norms = GEMMA_NORMS | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    tensors += decoder.norms(index, norms, head_dim=head_dim)
    left_out = set(_ATTENTION_KV) if shapes.shares[index] else set()
    if shapes.is_k_v and not shapes.windowed[index]:
        left_out.add("attn_v")  # the keys are the values
    scalar = Tensor(f"blk.{index}.layer_output_scale.weight", decoder.layer(index, "layer_scalar"), (1,))
    return [tensor for tensor in tensors if tensor.name.split(".")[2] not in left_out] + [scalar]


def _shared_parts(decoder: Decoder, index: int) -> list[Tensor]:
    """What a layer with the keys and values of another one may have in the checkpoint, and nothing reads."""
    parts = decoder.matrices(index) + decoder.norms(index, {"attn_k_norm": "self_attn.k_norm"})
    return [tensor for tensor in parts if tensor.name.split(".")[2] in _ATTENTION_KV]


def _attention_keys(config: Config, decoder: Decoder, shapes: _Shapes) -> dict[str, Any]:
    local, full = config.rope("sliding_attention"), config.rope()
    if (local["rope_type"], full["rope_type"]) != ("default", "proportional") or full.get("factor") not in (None, 1):
        raise config.unsupported("has other rope settings than Gemma 4's")
    if local.get("partial_rotary_factor") not in (None, 1):
        raise config.unsupported("rotates a part of its sliding layers' heads")
    keys: dict[str, Any] = {
        "rope.freq_base": decoder.rope_number(full, "rope_theta", 1e6),
        "rope.freq_base_swa": decoder.rope_number(local, "rope_theta", 1e4),
        "rope.dimension_count": shapes.global_dim,
        "rope.dimension_count_swa": decoder.head_dim,
        "attention.key_length": shapes.global_dim,
        "attention.value_length": shapes.global_dim,
        "attention.key_length_swa": decoder.head_dim,
        "attention.value_length_swa": decoder.head_dim,
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": shapes.windowed,
        "attention.shared_kv_layers": shapes.n_shared,
    }
    if shapes.kv_differ:
        keys["attention.head_count_kv"] = shapes.n_head_kv
    if shapes.is_double_wide:
        keys["feed_forward_length"] = shapes.n_ff
    return keys


def _per_layer_inputs(config: Config, decoder: Decoder) -> tuple[dict[str, Any], list[Tensor]]:
    """Keys and tensors of the embeddings that each layer gets beside its input; the key is there without them, too."""
    size = _count(config, "hidden_size_per_layer_input")
    keys = {"embedding_length_per_layer_input": size}
    if not size:
        return keys, []
    if config.integer("vocab_size_per_layer_input") != decoder.n_vocab:
        raise config.unsupported("has per-layer embeddings for another number of tokens than the model has")
    whole, n_embd, prefix = size * decoder.n_layer, decoder.n_embd, decoder.prefix
    tensors = [
        Tensor("per_layer_token_embd.weight", f"{prefix}embed_tokens_per_layer.weight", (decoder.n_vocab, whole)),
        Tensor("per_layer_model_proj.weight", f"{prefix}per_layer_model_projection.weight", (whole, n_embd)),
        Tensor("per_layer_proj_norm.weight", f"{prefix}per_layer_projection_norm.weight", (size,)),
    ]
    for i in range(decoder.n_layer):
        tensors += [
            Tensor(f"blk.{i}.inp_gate.weight", decoder.layer(i, "per_layer_input_gate.weight"), (size, n_embd)),
            Tensor(f"blk.{i}.proj.weight", decoder.layer(i, "per_layer_projection.weight"), (n_embd, size)),
            Tensor(f"blk.{i}.post_norm.weight", decoder.layer(i, "post_per_layer_input_norm.weight"), (n_embd,)),
        ]
    return keys, tensors


def _experts(config: Config, decoder: Decoder) -> tuple[dict[str, Any], list[Tensor]]:
    """Keys and tensors of the experts, which work beside the usual feed-forward network; nothing without them."""
    if not config.get("enable_moe_block", False):
        return {}, []
    n, n_ff, n_embd = config.integer("num_experts"), config.integer("moe_intermediate_size"), decoder.n_embd
    keys = {"expert_count": n, "expert_used_count": config.integer("top_k_experts"), "expert_feed_forward_length": n_ff}
    tensors = []
    norms = {
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    }
    for i in range(decoder.n_layer):
        tensors += [
            Tensor(f"blk.{i}.ffn_gate_inp.weight", decoder.layer(i, "router.proj.weight"), (n, n_embd), exact=True),
            Tensor(f"blk.{i}.ffn_gate_inp.scale", decoder.layer(i, "router.scale"), (n_embd,)),
            Tensor(f"blk.{i}.ffn_gate_up_exps.weight", decoder.layer(i, "experts.gate_up_proj"), (n, 2 * n_ff, n_embd)),
            Tensor(f"blk.{i}.ffn_down_exps.weight", decoder.layer(i, "experts.down_proj"), (n, n_embd, n_ff)),
            Tensor(f"blk.{i}.ffn_down_exps.scale", decoder.layer(i, "router.per_expert_scale"), (n,)),
        ]
        tensors += decoder.norms(i, norms)
    return keys, tensors


def _rope_factors(config: Config, head_dim: int) -> np.ndarray:
    """f32[head_dim / 2]: layers that see all turn the first part of the frequencies and leave the others still."""
    share = config.rope().get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise config.error(f"has no usable partial_rotary_factor in its rope settings: {share!r}")
    turned = int(share * head_dim // 2)
    return np.array([1.0] * turned + [_STOPPED] * (head_dim // 2 - turned), np.float32)


def _count(config: Config, key: str) -> int:
    """A whole number that may be 0."""
    return 0 if config.get(key, 0) == 0 else config.integer(key)


def _global_sizes(config: Config, windowed: list[bool]) -> tuple[int, int | None]:
    """Length of a head and number of key-value heads in the layers that see all; None: as many as elsewhere.

    Older configurations name them, newer ones list them for each such layer (per_layer_config).
    """
    per_layer = config.get("per_layer_config", {})
    if not isinstance(per_layer, dict):
        raise config.error("has no usable per_layer_config in config.json")
    given = [per_layer.get(str(i), per_layer.get(i)) for i, window in enumerate(windowed) if not window]
    if per_layer and any(entry != given[0] for entry in given):
        raise config.unsupported("has layers of full attention that differ in size")
    entry = given[0] if given and isinstance(given[0], dict) else {}
    sizes = Config(config.path, {
        "global_head_dim": config.get("global_head_dim", entry.get("head_dim", _GLOBAL_HEAD_DIM)),
        "num_global_key_value_heads": config.get("num_global_key_value_heads", entry.get("num_key_value_heads")),
    })  # fmt: skip
    kv = sizes.integer("num_global_key_value_heads") if sizes.get("num_global_key_value_heads") else None
    return sizes.integer("global_head_dim"), kv
