"""Gemma 3, the text part."""

from __future__ import annotations

from typing import Any

import numpy as np

from localspec.convert.targets.config import Config, Plan
from localspec.convert.targets.decoder import GEMMA_NORMS, Decoder, is_beside_the_text
from localspec.convert.weights import Weights

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
#: what transformers takes where config.json says nothing: large models on the hub leave most of it out
_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
#: every sixth layer sees everything, which llama.cpp takes for granted, too
_PATTERN = 6
#: with so many layers llama.cpp scales attention by the hidden size over the heads, as the model of 27B wants it
_LAYERS_27B = 62


def plan(config: Config, weights: Weights) -> Plan:
    """Raises ModelFileError for a model that llama.cpp's gemma3 graph can't compute."""
    config.fill(_DEFAULTS)
    config.refuse(hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)
    config.refuse(attn_logit_softcapping=())
    decoder = Decoder(config, weights)
    scale = decoder.n_embd // decoder.n_head if decoder.n_layer == _LAYERS_27B else decoder.head_dim
    config.refuse(query_pre_attn_scalar=scale)
    tensors = decoder.outer(_plus_one)
    norms = GEMMA_NORMS | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    for index in range(decoder.n_layer):
        tensors += decoder.matrices(index) + decoder.norms(index, norms, _plus_one)
    keys = decoder.keys() | decoder.rope_keys() | _window_keys(config, decoder)
    if config.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
    return Plan(
        "gemma3", keys, tensors, decoder.n_vocab, ignored=lambda name: decoder.is_ignored(name) or is_beside_the_text(name)
    )


def _window_keys(config: Config, decoder: Decoder) -> dict[str, Any]:
    """The sliding window, and which layers have it where that is not the usual pattern."""
    every = config.integer("sliding_window_pattern", _PATTERN)
    types = config.layer_types(
        ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(decoder.n_layer)]
    )
    windowed = [kind == "sliding_attention" for kind in types]
    if not any(windowed):
        return {}
    local = config.rope("sliding_attention")
    if local["rope_type"] != "default":
        raise config.unsupported(f"scales the rope of its sliding layers by {local['rope_type']!r}")
    keys: dict[str, Any] = {
        "attention.sliding_window": config.integer("sliding_window"),
        "rope.freq_base_swa": decoder.rope_number(local, "rope_theta", config.number("rope_local_base_freq")),
    }
    if windowed != [(i + 1) % _PATTERN != 0 for i in range(decoder.n_layer)]:
        keys["attention.sliding_window_pattern"] = windowed
    return keys


def _plus_one(values: np.ndarray) -> np.ndarray:
    """Gemma's norms multiply by one more than their weights."""
    return values + np.float32(1.0)
