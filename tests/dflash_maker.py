"""Random DFlash and DSpark drafts as GGUF files, for a target of any kind; nothing in them is as it is by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.gguf_file import GGUFFile
from tests.gguf_maker import _general, _Weights, copied_tokenizer, write


def dflash_draft(
    path: Path | str,
    like: Path | str,
    draft_vocab: int = 128,
    seed: int = 0,
    ftype: str = "f32",
    taps: Sequence[int] = (1, 3),
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 24,
    n_ff: int = 96,
    window: int = 0,
    windowed: Sequence[int] | None = None,
    block_size: int = 8,
    mask: int = 5,
    causal: bool = False,
    own_embedding: bool = False,
    rope_factors: bool = False,
    logit_std: float = 3.0,
    rank: int = 0,
    confidence: bool = True,
    from_anchor: bool | None = None,
) -> Path:
    """``rank`` > 0: a DSpark draft, with a confidence head unless told otherwise. ``windowed``: which layers have the
    window, every one by default. The embedding is the target's unless it is to be its own, the head too where there is no
    draft vocabulary and no embedding of its own."""
    target = GGUFFile.open(like)
    e, kv, q = target.n_embd, n_head_kv * head_dim, n_head * head_dim
    w = _Weights(seed, ftype)
    w.matrix("fc.weight", e, len(taps) * e)
    for i in range(n_layer):
        b = f"blk.{i}."
        for name, n in (("attn_norm", e), ("attn_q_norm", head_dim), ("attn_k_norm", head_dim), ("ffn_norm", e)):
            w.exact(f"{b}{name}.weight", w.rng.uniform(0.5, 1.5, n))
        w.matrix(b + "attn_q.weight", q, e)
        w.matrix(b + "attn_k.weight", kv, e)
        w.matrix(b + "attn_v.weight", kv, e)
        w.matrix(b + "attn_output.weight", e, q)
        w.matrix(b + "ffn_gate.weight", n_ff, e)
        w.matrix(b + "ffn_up.weight", n_ff, e)
        w.matrix(b + "ffn_down.weight", e, n_ff)
    for name in ("enc.output_norm", "output_norm"):
        w.exact(f"{name}.weight", w.rng.uniform(0.5, 1.5, e))
    n_said = draft_vocab or target.vocab_size
    if draft_vocab or own_embedding:
        w.matrix("output.weight", n_said, e, logit_std * e**-0.5)
    if own_embedding:
        w.matrix("token_embd.weight", target.vocab_size, e, 1.0)
    if draft_vocab:
        w.out["d2t"] = np.sort(w.rng.choice(target.vocab_size, draft_vocab, replace=False)).astype(np.int64)
    if rope_factors:
        w.exact("rope_freqs.weight", w.rng.uniform(1.0, 4.0, head_dim // 2))
    if rank:
        w.matrix("markov_w1.weight", target.vocab_size, rank, 1.0)
        w.matrix("markov_w2.weight", n_said, rank, logit_std * rank**-0.5)
        if confidence:
            w.exact("conf_proj.weight", (w.rng.standard_normal((1, e + rank)) * (e + rank) ** -0.5).astype(np.float32))
            w.exact("conf_proj.bias", np.array([0.3], np.float32))
    config: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": target.n_ctx_train,
        "embedding_length": e,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": head_dim,
        "vocab_size": target.vocab_size,
        "target_layers": list(taps),
        "block_size": block_size,
    }
    if window:
        config["attention.sliding_window"] = window
        config["attention.sliding_window_pattern"] = list(windowed if windowed is not None else [1] * n_layer)
    if causal:
        config["attention.causal"] = True
    if from_anchor is not None:
        config["sample_from_anchor"] = from_anchor
    named = {f"dflash.{k}": v for k, v in config.items()} | {"tokenizer.ggml.mask_token_id": mask}
    return write(path, "dflash", _general("random dflash", ftype) | copied_tokenizer(like) | named, w.out)
