"""DFlash and DSpark drafts the plain way, from a checkpoint's files alone: one block at a time, every position's key, one
mask that is written down, numpy in fp64. It shares nothing with the trainer's model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from localspec.speculator import SpeculatorConfig

Array = npt.NDArray[np.float64]


class Reference:
    def __init__(self, checkpoint: Path, embedding: npt.NDArray[np.float32]):
        self.config = SpeculatorConfig.load(checkpoint)
        found = load_file(checkpoint / "model.safetensors")
        self.w = {name: value.astype(np.float64) for name, value in found.items() if name not in ("d2t", "t2d")}
        self.embedding = embedding.astype(np.float64)
        self.ids = found["d2t"] + np.arange(len(found["d2t"])) if "d2t" in found else np.arange(len(embedding))
        extra = self.config.extra
        self.mask = int(extra["mask_token_id"])  # type: ignore[arg-type]
        pattern = extra.get("attention.sliding_window_pattern", [0] * self.config.n_layer)
        self.windows = [self.config.window if on else 10**6 for on in pattern]  # type: ignore[union-attr]
        self.is_spark = "markov_head.markov_w1.weight" in self.w
        self.first = 0 if self.is_spark else 1

    def states(self, tokens: npt.NDArray[np.int64], taps: Array, anchor: int, size: int) -> Array:
        """[size, H] behind the last norm: a block whose anchor is token `anchor` of a text."""
        c = self.config
        fused = self.norm(taps[:anchor].reshape(anchor, -1) @ self.w["fc.weight"].T, "hidden_norm.weight")
        x = self.embedding[[int(tokens[anchor]), *[self.mask] * (size - 1)]]
        at = np.arange(anchor + size)
        for i, window in enumerate(self.windows):
            p = f"layers.{i}."
            y = self.norm(x, p + "input_layernorm.weight")
            both = np.concatenate([fused, y])  # a position's key is that of its taps, or of its row
            k = self.heads(both, p + "self_attn.k_proj.weight", c.n_head_kv, p + "self_attn.k_norm.weight", at)
            v = (both @ self.w[p + "self_attn.v_proj.weight"].T).reshape(len(both), c.n_head_kv, c.head_dim)
            q = self.heads(y, p + "self_attn.q_proj.weight", c.n_head, p + "self_attn.q_norm.weight", at[anchor:])
            seen = at[anchor:, None] - at[None, :] < window
            mixed = np.empty((size, c.n_head, c.head_dim))
            for head in range(c.n_head):
                kv = head // (c.n_head // c.n_head_kv)
                scores = np.where(seen, q[:, head] @ k[:, kv].T * c.head_dim**-0.5, -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                mixed[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, kv]
            x = x + mixed.reshape(size, -1) @ self.w[p + "self_attn.o_proj.weight"].T
            y = self.norm(x, p + "post_attention_layernorm.weight")
            gate, up = (y @ self.w[p + f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[p + "mlp.down_proj.weight"].T
        return self.norm(x, "norm.weight")

    def logits(self, states: Array, before: npt.NDArray[np.int64]) -> Array:
        """[R, Vd] of states that are each behind a token."""
        out = states @ self.w["lm_head.weight"].T
        if self.is_spark:
            for row, token in enumerate(before):
                out[row] += self.w["markov_head.markov_w2.weight"] @ self.w["markov_head.markov_w1.weight"][token]
        return out

    def confidence(self, states: Array, before: npt.NDArray[np.int64]) -> Array:
        """[R]"""
        features = np.concatenate([states, self.w["markov_head.markov_w1.weight"][before]], 1)
        logits = features @ self.w["confidence_head.proj.weight"][0] + self.w["confidence_head.proj.bias"][0]
        out: Array = 1 / (1 + np.exp(-logits))
        return out

    def draft(self, tokens: npt.NDArray[np.int64], taps: Array, anchor: int, n: int) -> list[int]:
        """`n` tokens behind token `anchor`."""
        states = self.states(tokens, taps, anchor, n + self.first)[self.first :]
        said = [int(tokens[anchor])]
        for row in states:
            said.append(int(self.ids[self.logits(row[None], np.array(said[-1:]))[0].argmax()]))
        return said[1:]

    def norm(self, x: Array, name: str) -> Array:
        out: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_eps) * self.w[name]
        return out

    def heads(self, x: Array, matrix: str, n: int, norm: str, at: npt.NDArray[np.int64]) -> Array:
        y = self.norm((x @ self.w[matrix].T).reshape(len(x), n, self.config.head_dim), norm)
        half = self.config.head_dim // 2
        angle = at[:, None, None] * self.config.rope_base ** (np.arange(half) / -half)
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
