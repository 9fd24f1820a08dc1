"""EAGLE-3 one token at a time, in numpy from an exported checkpoint: llama.cpp's graph read off line by line. Slow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from localspec.speculator import SpeculatorConfig


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + eps) * weight


Pair = tuple[np.ndarray, np.ndarray]


class Reference:
    """`embedding` f32[V, H]. Keys and values of pairs that count are kept in `cache`, one for each position."""

    def __init__(self, checkpoint: Path, embedding: np.ndarray):
        stored = load_file(checkpoint / "model.safetensors")
        self.w = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in stored.items()}
        self.c = SpeculatorConfig.load(checkpoint)
        self.embedding = embedding.astype(np.float64)
        self.ids = self.w["d2t"] + np.arange(len(self.w["d2t"])) if "d2t" in self.w else np.arange(len(embedding))
        self.cache: list[Pair] = []

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = position * self.c.rope_base ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def decode(self, token: int, g: np.ndarray, position: int, own: list[Pair]) -> Pair:
        """(logits over the draft vocabulary, state before the last norm) for a pair; its key and value go into `own`, the
        cache of this chain, behind those of `cache`."""
        w, c = self.w, self.c
        p = "layers.0."
        x = np.concatenate([
            rms(self.embedding[token], w[p + "input_layernorm.weight"], c.rms_eps),
            rms(g, w[p + "hidden_norm.weight"], c.rms_eps),
        ])  # fmt: skip
        q = self.rotate((w[p + "self_attn.q_proj.weight"] @ x).reshape(c.n_head, c.head_dim), position)
        k = self.rotate((w[p + "self_attn.k_proj.weight"] @ x).reshape(c.n_head_kv, c.head_dim), position)
        v = (w[p + "self_attn.v_proj.weight"] @ x).reshape(c.n_head_kv, c.head_dim)
        own.append((k, v))
        seen = [*self.cache, *own]
        if c.window:
            seen = seen[-c.window :]
        heads = []
        for h in range(c.n_head):
            kv = h // (c.n_head // c.n_head_kv)
            scores = np.array([q[h] @ key[kv] for key, _ in seen]) / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            heads.append((weights / weights.sum()) @ np.stack([value[kv] for _, value in seen]))
        h = g + w[p + "self_attn.o_proj.weight"] @ np.concatenate(heads)
        y = rms(h, w[p + "post_attention_layernorm.weight"], c.rms_eps)
        gate = w[p + "mlp.gate_proj.weight"] @ y
        h = h + w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ y))
        return w["lm_head.weight"] @ rms(h, w["norm.weight"], c.rms_eps), h

    def fuse(self, taps: np.ndarray) -> np.ndarray:
        return self.w["fc.weight"] @ taps.reshape(-1).astype(np.float64)

    def commit(self, token: int, g: np.ndarray) -> None:
        """A pair that counts: (token[P + 1], g[P]) at the next position P."""
        own: list[Pair] = []
        self.decode(token, g, len(self.cache), own)
        self.cache += own

    def draft(
        self, last: int, g: np.ndarray, n: int, forced: np.ndarray | None = None
    ) -> tuple[list[int], list[np.ndarray]]:
        """`n` tokens after `last`, the draft's own greedy choices or those of `forced`; and each one's logits."""
        own: list[Pair] = []
        tokens, logits = [], []
        for i in range(n):
            scores, g = self.decode(last, g, len(self.cache) + i, own)
            last = int(self.ids[scores.argmax()]) if forced is None else int(forced[i])
            tokens.append(last)
            logits.append(scores)
        return tokens, logits


def decode_again(
    reference: Reference, tokens: np.ndarray, mask: np.ndarray, taps: np.ndarray, n_max: int
) -> tuple[int, int]:
    """(verifies, tokens gained) of one text with one masked turn, decoded as an engine would."""
    first, last = int(np.flatnonzero(mask)[0]), int(np.flatnonzero(mask)[-1])
    reference.cache = []
    for p in range(first - 1):
        reference.commit(int(tokens[p + 1]), reference.fuse(taps[p]))
    at, verifies = first, 0
    while at < last:
        drafted, _ = reference.draft(int(tokens[at]), reference.fuse(taps[at - 1]), n_max)
        n = 0
        while n < n_max and at + n + 1 <= last and drafted[n] == tokens[at + 1 + n]:
            n += 1
        gained = min(n + 1, last - at)
        for p in range(at - 1, at - 1 + gained):
            reference.commit(int(tokens[p + 1]), reference.fuse(taps[p]))
        at += gained
        verifies += 1
    return verifies, last - first
