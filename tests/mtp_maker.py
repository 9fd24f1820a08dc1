"""Files with next-token heads and random weights: a Gemma 4 assistant, and a GLM-4.5 with a head of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from localspec.gemma4 import head_sizes, layers_read
from localspec.gguf_file import GGUFFile
from tests import gguf_maker


def random_assistant(
    path: Path, like: Path, n_embd: int = 32, seed: int = 0, change: dict[str, Any] | None = None,
    clusters: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Three windowed layers and a full one. `change` replaces keys, by their name behind the architecture; `clusters` are
    those of a clustered head."""
    target = GGUFFile.open(like)
    windowed = [True, True, True, False]
    layers = dict(zip((True, False), layers_read(target)))
    w = gguf_maker._Weights(seed, "f32")
    n_vocab, b, n_head, n_ff = target.vocab_size, target.n_embd, 4, 2 * n_embd
    w.matrix("token_embd.weight", n_vocab, n_embd, 1.0)
    w.ones("output_norm.weight", n_embd)
    w.matrix("nextn.post_projection.weight", b, n_embd)
    w.matrix("nextn.pre_projection.weight", n_embd, 2 * b)
    for i, kind in enumerate(windowed):
        size = head_sizes(target, kind)[0]
        p = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.ones(f"{p}{name}.weight", n_embd)
        w.ones(p + "layer_output_scale.weight", 1)
        w.ones(p + "attn_q_norm.weight", size)
        w.matrix(p + "attn_q.weight", n_head * size, n_embd)
        w.matrix(p + "attn_output.weight", n_embd, n_head * size)
        w.matrix(p + "ffn_gate.weight", n_ff, n_embd)
        w.matrix(p + "ffn_up.weight", n_ff, n_embd)
        w.matrix(p + "ffn_down.weight", n_embd, n_ff)
    factors = np.ones(head_sizes(target, False)[0] // 2, np.float32)
    factors[len(factors) // 4 :] = 1e30
    w.exact("rope_freqs.weight", factors)
    full, window = head_sizes(target, False)[0], head_sizes(target, True)[0]
    config = {
        "block_count": len(windowed), "nextn_predict_layers": len(windowed), "context_length": target.n_ctx_train,
        "embedding_length": n_embd, "embedding_length_out": b, "feed_forward_length": n_ff, "attention.head_count": n_head,
        "attention.head_count_kv": [target.n_head_kv[layers[kind]] for kind in windowed],
        "attention.key_length": full, "attention.value_length": full, "attention.key_length_swa": window,
        "attention.value_length_swa": window, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": target.sliding_window, "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": len(windowed), "rope.dimension_count": full, "rope.dimension_count_swa": window,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    }  # fmt: skip
    keys: dict[str, Any] = {"general.type": "model", "general.name": "random assistant", "general.file_type": 0}
    keys |= {f"gemma4-assistant.{name}": value for name, value in (config | (change or {})).items()}
    keys |= {f"localspec.clusters.{name}": value for name, value in (clusters or {}).items()}
    return gguf_maker.write(path, "gemma4-assistant", keys | gguf_maker.copied_tokenizer(like), w.out)


def tiny_glm4moe(path: Path, arch: str = "glm4moe", n_heads: int = 1, seed: int = 0) -> Path:
    """Two dense layers and a next-token head with two experts. Another `arch` is the same file under that name: enough for
    what looks at the metadata."""
    keys, e, n_head, n_kv, n_ff, n_expert = gguf_maker.tokenizer_keys(320), 64, 4, 2, 128, 2
    size, n_layer = e // n_head, 2
    w = gguf_maker._Weights(seed, "f32")
    w.matrix("token_embd.weight", 320, e, 1.0)
    w.ones("output_norm.weight", e)
    w.matrix("output.weight", 320, e, 2.0 * e**-0.5)
    for i in range(n_layer + n_heads):
        p = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm"):
            w.ones(f"{p}{name}.weight", e)
        for name, rows in (("q", e), ("k", n_kv * size), ("v", n_kv * size)):
            w.matrix(f"{p}attn_{name}.weight", rows, e)
            w.exact(f"{p}attn_{name}.bias", np.zeros(rows))
        w.matrix(p + "attn_output.weight", e, e)
        if i < n_layer:
            w.matrix(p + "ffn_gate.weight", n_ff, e)
            w.matrix(p + "ffn_up.weight", n_ff, e)
            w.matrix(p + "ffn_down.weight", e, n_ff)
            continue
        w.matrix(p + "ffn_gate_inp.weight", n_expert, e)
        w.exact(p + "exp_probs_b.bias", np.zeros(n_expert))
        for name, shape in (("gate", (n_expert, 32, e)), ("up", (n_expert, 32, e)), ("down", (n_expert, e, 32))):
            w.exact(f"{p}ffn_{name}_exps.weight", w.rng.standard_normal(shape) * shape[2] ** -0.5)
            w.matrix(f"{p}ffn_{name}_shexp.weight", *shape[1:])
        w.matrix(p + "nextn.eh_proj.weight", e, 2 * e)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            w.ones(f"{p}nextn.{name}.weight", e)
    config = {
        "block_count": n_layer + n_heads, "nextn_predict_layers": n_heads, "context_length": 512, "embedding_length": e,
        "feed_forward_length": n_ff, "attention.head_count": n_head, "attention.head_count_kv": n_kv,
        "attention.key_length": size, "attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": size, "rope.freq_base": 10000.0, "expert_count": n_expert, "expert_used_count": 1,
        "expert_feed_forward_length": 32, "expert_shared_count": 1, "leading_dense_block_count": n_layer,
        "expert_weights_norm": True, "expert_weights_scale": 1.0,
    }  # fmt: skip
    general = {"general.type": "model", "general.name": f"tiny {arch}", "general.file_type": 0}
    return gguf_maker.write(path, arch, general | {f"{arch}.{k}": v for k, v in config.items()} | keys, w.out)
