"""Small EAGLE checkpoints in the names, shapes and config keys of their trainers, of values that any machine makes alike.

Each is what its trainer saves: SafeAILab's EAGLE (traineagle3, train), SpecForge, vLLM's speculators.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

E, HEADS, KV, DIM, FF, VOCAB, DRAFT_VOCAB, N_LAYER = 64, 4, 2, 16, 96, 320, 96, 8

Tensors = dict[str, np.ndarray]


def counted(name: str, *shape: int) -> np.ndarray:
    """Numbers from -0.125 to 0.125, around 1 for a vector: f32, the same everywhere."""
    n = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    bits = (n * np.uint64(2654435761)) % np.uint64(1 << 32) >> np.uint64(16)
    values = bits.astype(np.float32) / 65536 * 0.25 - 0.125
    return (values + (len(shape) == 1)).reshape(shape).astype(np.float32)


def eagle3_tensors(layer: str, n_taps: int = 3, embedding: bool = False, norm_before_fc: bool = False) -> Tensors:
    """One EAGLE-3 draft with its decoder layer under the prefix `layer`."""
    sizes = {
        "fc.weight": (E, n_taps * E), "norm.weight": (E,), "lm_head.weight": (DRAFT_VOCAB, E),
        "self_attn.q_proj.weight": (HEADS * DIM, 2 * E), "self_attn.k_proj.weight": (KV * DIM, 2 * E),
        "self_attn.v_proj.weight": (KV * DIM, 2 * E), "self_attn.o_proj.weight": (E, HEADS * DIM),
        "mlp.gate_proj.weight": (FF, E), "mlp.up_proj.weight": (FF, E), "mlp.down_proj.weight": (E, FF),
        "hidden_norm.weight": (E,), "input_layernorm.weight": (E,), "post_attention_layernorm.weight": (E,),
    }  # fmt: skip
    if embedding:
        sizes["embed_tokens.weight"] = (VOCAB, E)
    if norm_before_fc:
        sizes["input_norm.weight"] = (n_taps * E,)
    own = ("self_attn.", "mlp.", "hidden_norm", "input_layernorm", "post_attention")
    tensors = {(layer + n if n.startswith(own) else n): counted(n, *shape) for n, shape in sizes.items()}
    ids = np.arange(DRAFT_VOCAB) * 3 + 2
    tensors["d2t"] = ids - np.arange(DRAFT_VOCAB)
    tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return tensors


def eagle2_tensors() -> Tensors:
    """EAGLE-1 and EAGLE-2: the embedding and one state, joined, then an ordinary layer that lacks its first norm."""
    sizes = {
        "embed_tokens.weight": (VOCAB, E), "fc.weight": (E, 2 * E),
        "layers.0.self_attn.q_proj.weight": (HEADS * DIM, E), "layers.0.self_attn.k_proj.weight": (KV * DIM, E),
        "layers.0.self_attn.v_proj.weight": (KV * DIM, E), "layers.0.self_attn.o_proj.weight": (E, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": (FF, E), "layers.0.mlp.up_proj.weight": (FF, E),
        "layers.0.mlp.down_proj.weight": (E, FF), "layers.0.post_attention_layernorm.weight": (E,),
    }  # fmt: skip
    return {n: counted(n, *shape) for n, shape in sizes.items()}


LAYER: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": E, "intermediate_size": FF, "max_position_embeddings": 512, "model_type": "llama",
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": 1, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
SAFEAILAB = {
    **LAYER, "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    "pad_token_id": 0, "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True,
    "draft_vocab_size": DRAFT_VOCAB,
}  # fmt: skip
SPECFORGE = {
    **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": DIM,
    "max_window_layers": 36, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "mlp_bias": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "draft_vocab_size": DRAFT_VOCAB,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
    "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True, "norm_before_fc": True, "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 6], "fc_norm": False, "norm_output": False, "embed_requires_grad": False,
    "transformer_layer_config": {
        **LAYER, "architectures": ["LlamaForCausalLM"], "head_dim": DIM,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
}  # fmt: skip


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """A safetensors file by hand, floats as `dtype` (F32, F16, BF16 by cutting off bits, F8_E4M3 filled with zeros)."""
    header: dict[str, Any] = {}
    data = b""
    for name, value in tensors.items():
        kind = {"f": dtype, "i": "I64", "b": "BOOL"}[value.dtype.kind]
        if kind == "BF16":
            value = (np.ascontiguousarray(value).view(np.uint32) >> 16).astype(np.uint16)
        elif kind == "F16":
            value = value.astype(np.float16)
        elif kind == "F8_E4M3":
            value = np.zeros(value.shape, np.uint8)
        raw = value.tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> Path:
    """A checkpoint's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder / "model.safetensors", tensors, dtype)
    return folder


def safeailab(folder: Path) -> Path:
    return write(folder, SAFEAILAB, eagle3_tensors("midlayer."), "F16")


def specforge(folder: Path) -> Path:
    return write(folder, SPECFORGE, eagle3_tensors("midlayer."), "BF16")


def speculators(folder: Path) -> Path:
    return write(folder, SPECULATORS, eagle3_tensors("layers.0.", embedding=True, norm_before_fc=True), "F32")


FORMATS = {"safeailab": safeailab, "specforge": specforge, "speculators": speculators}
