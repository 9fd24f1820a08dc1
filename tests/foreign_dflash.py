"""Small DFlash and DSpark checkpoints of other trainers, in exactly their names, shapes and config.json, for a target of 512
tokens, 64 wide, with 4 layers. The values come from a seed, so that what llama.cpp's converter made of them can be kept as
hashes (test_convert_dflash.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

V, E, HEADS, KV, D, FF, LAYERS, RANK, DRAFT_V = 512, 64, 4, 2, 32, 96, 2, 32, 128

LAYER: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": E, "intermediate_size": FF, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6, "vocab_size": V,
    "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}  # fmt: skip
WINDOWED: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def backbone(rng: np.random.Generator, n_taps: int) -> dict[str, np.ndarray]:
    """Tensors f32 under the names that all of them share."""

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm(n: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, n).astype(np.float32)

    out = {"fc.weight": matrix(E, n_taps * E), "hidden_norm.weight": norm(E), "norm.weight": norm(E)}
    for i in range(LAYERS):
        p = f"layers.{i}."
        out |= {
            p + "input_layernorm.weight": norm(E), p + "post_attention_layernorm.weight": norm(E),
            p + "self_attn.q_proj.weight": matrix(HEADS * D, E), p + "self_attn.k_proj.weight": matrix(KV * D, E),
            p + "self_attn.v_proj.weight": matrix(KV * D, E), p + "self_attn.o_proj.weight": matrix(E, HEADS * D),
            p + "self_attn.q_norm.weight": norm(D), p + "self_attn.k_norm.weight": norm(D),
            p + "mlp.gate_proj.weight": matrix(FF, E), p + "mlp.up_proj.weight": matrix(FF, E),
            p + "mlp.down_proj.weight": matrix(E, FF),
        }  # fmt: skip
    return out


def heads(rng: np.random.Generator, n_said: int) -> dict[str, np.ndarray]:
    """DSpark's two heads."""
    return {
        "markov_head.markov_w1.weight": rng.standard_normal((V, RANK)).astype(np.float32),
        "markov_head.markov_w2.weight": (rng.standard_normal((n_said, RANK)) * RANK**-0.5).astype(np.float32),
        "confidence_head.proj.weight": (rng.standard_normal((1, E + RANK)) * 0.1).astype(np.float32),
        "confidence_head.proj.bias": np.array([0.25], np.float32),
    }


def reduced(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A vocabulary of its own, as offsets, and its head."""
    ids = np.sort(rng.choice(V, DRAFT_V, replace=False))
    head = (rng.standard_normal((DRAFT_V, E)) * E**-0.5).astype(np.float32)
    return {"d2t": ids - np.arange(DRAFT_V), "t2d": np.isin(np.arange(V), ids), "lm_head.weight": head}


def write_bf16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """safetensors by hand: numpy has no bf16. Floats are cut, not rounded."""
    header: dict[str, Any] = {}
    data = b""
    for name, value in tensors.items():
        kind = {"f": "BF16", "i": "I64", "b": "BOOL"}[value.dtype.kind]
        raw = (value.view(np.uint32) >> 16).astype(np.uint16).tobytes() if kind == "BF16" else value.tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    write_bf16(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def z_lab(folder: Path) -> Path:
    """DFlash as z-lab publishes it: no embedding and no head of its own; layers counted by their outputs."""
    config = LAYER | WINDOWED | {
        "architectures": ["DFlashDraftModel"], "block_size": 8, "num_target_layers": 4, "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
    }  # fmt: skip
    return save(folder, config, backbone(np.random.default_rng(1), 2))


def deepspec(folder: Path, more: dict[str, np.ndarray] | None = None) -> Path:
    """DSpark as DeepSpec writes it: flat, the keys of DFlash on the first level, every row predicting. `more`: the target's
    embedding and head, which it stores too (and which llama.cpp's converter takes for the draft's own)."""
    rng = np.random.default_rng(2)
    config = LAYER | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 9, "target_layer_ids": [0, 1, 2],
        "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "num_target_layers": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    return save(folder, config, backbone(rng, 3) | heads(rng, V) | (more or {}))


def speculators_dspark(folder: Path) -> Path:
    """DSpark of vLLM's `speculators`: the layer's config nested, layers counted by their inputs, a reduced vocabulary."""
    rng = np.random.default_rng(3)
    config = {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "transformer_layer_config": LAYER,
        "draft_vocab_size": DRAFT_V, "block_size": 6, "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 7,
        "sliding_window_non_causal": False, "sample_from_anchor": True, "markov_rank": RANK, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    return save(folder, config, backbone(rng, 2) | heads(rng, DRAFT_V) | reduced(rng))


def speculators_dflash(folder: Path) -> Path:
    """DFlash of vLLM's `speculators`, which llama.cpp's converter does not read."""
    rng = np.random.default_rng(4)
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
        "transformer_layer_config": LAYER | WINDOWED, "draft_vocab_size": DRAFT_V, "block_size": 8,
        "aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": 7, "sliding_window_non_causal": True,
        "sample_from_anchor": False,
    }  # fmt: skip
    return save(folder, config, backbone(rng, 3) | reduced(rng))
