"""EAGLE-3's network from a GGUF file in plain numpy (float64), one pair after another: what native/draft is held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from localspec.convert.output import dequantised
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig


class HeadReference:
    """One text. `pairs` grows by `feed`, which gives the logits over the draft's vocabulary and the state that comes out."""

    def __init__(self, draft: Path, target: Path):
        file, theirs = GGUFFile.open(draft), GGUFFile.open(target)
        self.config = SpeculatorConfig.from_gguf(file)
        self.w = {n: dequantised(file, n).astype(np.float64) for n in file.tensors if n != "d2t"}
        for name in ("token_embd.weight", "output.weight"):
            if name not in self.w:
                given = name if name in theirs.tensors else "token_embd.weight"
                self.w[name] = dequantised(theirs, given).astype(np.float64)
        d2t = "d2t" in file.tensors
        self.ids = np.frombuffer(file.tensor_bytes("d2t"), "<i8") if d2t else np.arange(theirs.vocab_size)
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_eps) * self.w[name]

    def fuse(self, taps: np.ndarray) -> np.ndarray:
        """g[..., E] of taps[..., T * H]."""
        x = taps.astype(np.float64)
        if self.config.norm_before_fc:
            x = self.norm(x, "enc.output_norm.weight")
        return x @ self.w["fc.weight"].T

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """Neighbours belong together: x[heads, size]."""
        size = x.shape[-1]
        angle = position * self.config.rope_base ** (-np.arange(0, size, 2) / size)
        if "rope_freqs.weight" in self.w:
            angle = angle / self.w["rope_freqs.weight"]
        a, b = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 1::2] = a * np.sin(angle) + b * np.cos(angle)
        return out

    def feed(self, token: int, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        c, w, b = self.config, self.w, "blk.0."
        position = len(self.keys)
        normed = self.norm(g, b + "attn_norm_2.weight")
        x = np.concatenate([self.norm(w["token_embd.weight"][token], b + "attn_norm.weight"), normed])
        q = self.rotate((w[b + "attn_q.weight"] @ x).reshape(c.n_head, -1), position)
        self.keys.append(self.rotate((w[b + "attn_k.weight"] @ x).reshape(c.n_head_kv, -1), position))
        self.values.append((w[b + "attn_v.weight"] @ x).reshape(c.n_head_kv, -1))
        seen = slice(-c.window, None) if c.window else slice(None)
        keys, values = np.stack(self.keys[seen]), np.stack(self.values[seen])
        mixed = []
        for h in range(c.n_head):
            kv = h * c.n_head_kv // c.n_head
            scores = keys[:, kv] @ q[h] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            mixed.append(weights / weights.sum() @ values[:, kv])
        h = (normed if c.norm_before_residual else g) + w[b + "attn_output.weight"] @ np.concatenate(mixed)
        y = self.norm(h, b + "ffn_norm.weight")
        gate = w[b + "ffn_gate.weight"] @ y
        h = h + w[b + "ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * (w[b + "ffn_up.weight"] @ y))
        return w["output.weight"] @ self.norm(h, "output_norm.weight"), h

    def cut(self, n: int) -> None:
        """Keep the first n pairs."""
        del self.keys[n:], self.values[n:]

    def chain(self, tokens: list[int], taps: np.ndarray, k: int) -> list[np.ndarray]:
        """Logits of k greedily drafted tokens after `tokens` (n of them), with the target's taps[n - 1, T * H]."""
        self.cut(0)
        g = self.fuse(taps)
        for p in range(len(tokens) - 2):
            self.feed(tokens[p + 1], g[p])
        out, token, state = [], tokens[-1], g[len(tokens) - 2]
        for _ in range(k):
            logits, state = self.feed(token, state)
            out.append(logits)
            token = int(self.ids[logits.argmax()])
        return out
