"""Tiny random models with a recurrent state beside attention: qwen35 (with a next-token head), lfm2 and falcon-h1. Mamba and
Jamba are in gguf_maker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests import gguf_maker

E, N_HEAD, N_KV, N_FF, VOCAB = 64, 4, 2, 128, 320
_SIZE = E // N_HEAD
_ADDS = ("attn_output", "ssm_out", "ffn_down")


def _weights(seed: int, norm: str = "output_norm") -> gguf_maker._Weights:
    w = gguf_maker._Weights(seed, "f32")
    w.matrix("token_embd.weight", VOCAB, E, 1.0)
    w.ones(f"{norm}.weight", E)
    w.matrix("output.weight", VOCAB, E, 2.0 * E**-0.5)
    return w


def _feed_forward(w: gguf_maker._Weights, p: str) -> None:
    w.matrix(p + "ffn_gate.weight", N_FF, E)
    w.matrix(p + "ffn_up.weight", N_FF, E)
    w.matrix(p + "ffn_down.weight", E, N_FF)


def _attention(w: gguf_maker._Weights, p: str, gated: bool = False, norms: bool = True) -> None:
    w.matrix(p + "attn_q.weight", E * (2 if gated else 1), E)
    w.matrix(p + "attn_k.weight", N_KV * _SIZE, E)
    w.matrix(p + "attn_v.weight", N_KV * _SIZE, E)
    w.matrix(p + "attn_output.weight", E, E)
    if norms:
        w.ones(p + "attn_q_norm.weight", _SIZE)
        w.ones(p + "attn_k_norm.weight", _SIZE)


def _write(path: Path, arch: str, w: gguf_maker._Weights, config: dict[str, Any]) -> Path:
    common = {
        "context_length": 512, "embedding_length": E, "feed_forward_length": N_FF, "attention.head_count": N_HEAD,
        "attention.key_length": _SIZE, "attention.value_length": _SIZE, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": _SIZE, "rope.freq_base": 10000.0, "vocab_size": VOCAB,
    }  # fmt: skip
    general = {"general.type": "model", "general.name": f"tiny {arch}", "general.file_type": 0}
    keys = {f"{arch}.{name}": value for name, value in (common | config).items()}
    return gguf_maker.write(path, arch, general | keys | gguf_maker.tokenizer_keys(VOCAB), w.out)


def tiny_qwen35(path: Path, seed: int = 0, n_heads: int = 1, quiet: float = 1.0) -> Path:
    """Three layers of linear attention, one of attention, and `n_heads` next-token heads. `quiet` scales what layers add:
    with little, the next token follows from the last one, and a head that passes it on is often right."""
    w, size, n_k, n_v, conv = _weights(seed), 16, 2, 4, 4
    width = 2 * n_k * size + n_v * size
    for i in range(4 + n_heads):
        p = f"blk.{i}."
        w.ones(p + "attn_norm.weight", E)
        w.ones(p + "post_attention_norm.weight", E)
        _feed_forward(w, p)
        if i >= 3:
            _attention(w, p, gated=True)
        else:
            w.matrix(p + "attn_qkv.weight", width, E)
            w.matrix(p + "attn_gate.weight", n_v * size, E)
            w.exact(p + "ssm_conv1d.weight", w.rng.standard_normal((width, conv)) * 0.5)
            w.exact(p + "ssm_dt.bias", np.full(n_v, -2.0))
            w.exact(p + "ssm_a", -np.arange(1, n_v + 1))
            w.matrix(p + "ssm_beta.weight", n_v, E)
            w.matrix(p + "ssm_alpha.weight", n_v, E)
            w.ones(p + "ssm_norm.weight", size)
            w.matrix(p + "ssm_out.weight", E, n_v * size)
        if i >= 4:
            w.matrix(p + "nextn.eh_proj.weight", E, 2 * E)
            if quiet != 1.0:
                w.exact(p + "nextn.eh_proj.weight", np.eye(E, 2 * E))
            for name in ("enorm", "hnorm", "shared_head_norm"):
                w.ones(f"{p}nextn.{name}.weight", E)
    for name in [name for name in w.out if name.split(".")[2:3] and name.split(".")[2] in _ADDS]:
        w.out[name] *= np.float32(quiet)
    config: dict[str, Any] = {
        "block_count": 4 + n_heads, "attention.head_count_kv": N_KV, "full_attention_interval": 4,
        "rope.dimension_sections": [4, 2, 2, 0], "ssm.conv_kernel": conv, "ssm.inner_size": n_v * size,
        "ssm.state_size": size, "ssm.time_step_rank": n_v, "ssm.group_count": n_k,
    }  # fmt: skip
    if n_heads:
        config["nextn_predict_layers"] = n_heads
    return _write(path, "qwen35", w, config)


def tiny_lfm2(path: Path, seed: int = 0) -> Path:
    """Two layers of short convolutions, one of attention, another convolution."""
    w = _weights(seed, "token_embd_norm")
    kinds = (0, 0, N_KV, 0)
    for i, n_kv in enumerate(kinds):
        p = f"blk.{i}."
        w.ones(p + "attn_norm.weight", E)
        w.ones(p + "ffn_norm.weight", E)
        _feed_forward(w, p)
        if n_kv:
            _attention(w, p)
        else:
            w.exact(p + "shortconv.conv.weight", w.rng.standard_normal((E, 3)) * 0.5)
            w.matrix(p + "shortconv.in_proj.weight", 3 * E, E)
            w.matrix(p + "shortconv.out_proj.weight", E, E)
    return _write(path, "lfm2", w, {
        "block_count": len(kinds), "attention.head_count_kv": list(kinds), "shortconv.l_cache": 3,
    })  # fmt: skip


def tiny_falcon_h1(path: Path, seed: int = 0) -> Path:
    """Two layers, each with attention and a recurrent part."""
    w, state, heads, groups, conv = _weights(seed), 16, 4, 1, 4
    inner = 2 * E
    width = inner + 2 * groups * state
    for i in range(2):
        p = f"blk.{i}."
        w.ones(p + "attn_norm.weight", E)
        w.ones(p + "ffn_norm", E)
        _feed_forward(w, p)
        _attention(w, p, norms=False)
        w.matrix(p + "ssm_in.weight", 2 * inner + 2 * groups * state + heads, E)
        w.exact(p + "ssm_conv1d.weight", w.rng.standard_normal((width, conv)) * 0.5)
        w.exact(p + "ssm_conv1d.bias", np.zeros(width))
        w.exact(p + "ssm_dt.bias", np.full(heads, -2.0))
        w.exact(p + "ssm_a", -np.arange(1, heads + 1).reshape(heads, 1))
        w.exact(p + "ssm_d", np.ones((heads, 1)))
        w.matrix(p + "ssm_out.weight", E, inner)
    return _write(path, "falcon-h1", w, {
        "block_count": 2, "attention.head_count_kv": N_KV, "ssm.conv_kernel": conv, "ssm.inner_size": inner,
        "ssm.state_size": state, "ssm.time_step_rank": heads, "ssm.group_count": groups,
    })  # fmt: skip
