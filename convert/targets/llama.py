"""Llama and what shares its class: Llama 2, Llama 3, SmolLM2, TinyLlama..."""

from __future__ import annotations

from localspec.convert.rope_rows import pairs_from_halves
from localspec.convert.targets.config import Config, Plan, Tensor
from localspec.convert.targets.decoder import Decoder
from localspec.convert.weights import Weights

ARCHITECTURES = ("LlamaForCausalLM",)
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FFN = ("ffn_gate", "ffn_up", "ffn_down")


def plan(config: Config, weights: Weights) -> Plan:
    """Raises ModelFileError for a model that llama.cpp's llama graph can't compute."""
    config.refuse(hidden_act="silu", pretraining_tp=1, rope_interleaved=False, num_local_experts=1, draft_vocab_size=())
    decoder = Decoder(config, weights)
    tensors = decoder.outer()
    for index in range(decoder.n_layer):
        layer = decoder.matrices(index)
        if config.get("attention_bias", False):
            layer += decoder.biases(index, _ATTENTION)
        if config.get("mlp_bias", False):
            layer += decoder.biases(index, _FFN)
        tensors += [_rotated(tensor, decoder) for tensor in layer]
        tensors += decoder.norms(index, {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
    keys = decoder.keys() | {"vocab_size": decoder.n_vocab, "rope.dimension_count": decoder.head_dim} | decoder.rope_keys()
    return Plan("llama", keys, tensors, decoder.n_vocab, decoder.rope_factors(), decoder.is_ignored)


def _rotated(tensor: Tensor, decoder: Decoder) -> Tensor:
    """Queries and keys with the rows as llama.cpp's rope for this architecture wants them; other tensors as they are."""
    heads = {"attn_q": decoder.n_head, "attn_k": decoder.n_head_kv}.get(tensor.name.split(".")[2])
    if heads is None:
        return tensor
    return Tensor(tensor.name, tensor.source, tensor.shape, lambda values: pairs_from_halves(values, heads))
