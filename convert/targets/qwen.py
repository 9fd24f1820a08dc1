"""Qwen2, Qwen2.5 and Qwen3 without experts."""

from __future__ import annotations

from localspec.convert.targets.config import Config, Plan
from localspec.convert.targets.decoder import Decoder
from localspec.convert.weights import Weights

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def plan(config: Config, weights: Weights) -> Plan:
    """Raises ModelFileError for a model that llama.cpp's graphs qwen2 and qwen3 can't compute."""
    is_qwen3 = config.architecture.startswith("Qwen3")
    config.refuse(hidden_act="silu", use_sliding_window=False, is_causal=True, num_experts=0)
    if "sliding_attention" in (config.get("layer_types") or []):
        raise config.unsupported("has layers of sliding attention")
    if is_qwen3:
        config.refuse(attention_bias=False)
    decoder = Decoder(config, weights, config.integer("head_dim", 128) if is_qwen3 else None)
    if not is_qwen3 and decoder.head_dim * decoder.n_head != decoder.n_embd:
        raise config.unsupported(f"has {decoder.n_head} heads of {decoder.head_dim} for a hidden size of {decoder.n_embd}")
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if is_qwen3:
        norms |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    tensors = decoder.outer()
    for index in range(decoder.n_layer):
        tensors += decoder.matrices(index) + decoder.norms(index, norms)
        if not is_qwen3:
            tensors += decoder.biases(index, ("attn_q", "attn_k", "attn_v"))
    keys = decoder.keys() | decoder.rope_keys()
    if not is_qwen3 and config.get("head_dim") is None:
        keys = {key: value for key, value in keys.items() if key not in ("attention.key_length", "attention.value_length")}
    factors = decoder.rope_factors()
    if factors:
        raise config.unsupported("scales its rope as Llama 3 does")
    return Plan("qwen2" if not is_qwen3 else "qwen3", keys, tensors, decoder.n_vocab, ignored=decoder.is_ignored)
