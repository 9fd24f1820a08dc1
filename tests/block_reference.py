"""DFlash's and DSpark's network from a GGUF file in plain numpy (float64), one block after another: what native/draft is
held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from localspec.convert.output import dequantised
from localspec.gguf_file import GGUFFile


class BlockReference:
    """One file; every call starts from nothing but tokens and taps."""

    def __init__(self, draft: Path, target: Path):
        file, theirs = GGUFFile.open(draft), GGUFFile.open(target)
        self.file = file
        self.w = {n: dequantised(file, n).astype(np.float64) for n in file.tensors if n != "d2t"}
        if "token_embd.weight" not in self.w:
            self.w["token_embd.weight"] = dequantised(theirs, "token_embd.weight").astype(np.float64)
        if "output.weight" not in self.w:
            given = "output.weight" if "output.weight" in theirs.tensors else "token_embd.weight"
            self.w["output.weight"] = dequantised(theirs, given).astype(np.float64)
        d2t = "d2t" in file.tensors
        self.ids = np.frombuffer(file.tensor_bytes("d2t"), "<i8") if d2t else np.arange(theirs.vocab_size)
        self.n_head, self.n_kv, self.size = max(file.n_head), max(file.n_head_kv), file.key_length
        self.eps, self.base = file.arch("attention.layer_norm_rms_epsilon"), file.arch("rope.freq_base")
        self.has_markov = "markov_w1.weight" in self.w
        self.lead = 0 if self.has_markov and file.arch("sample_from_anchor", True) else 1

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Halves belong together: x[n, heads, size]."""
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * self.base ** (-np.arange(half) / half)
        if "rope_freqs.weight" in self.w:
            angle = angle / self.w["rope_freqs.weight"]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)

    def keys(self, layer: int, x: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        b, n = f"blk.{layer}.", len(x)
        k = self.norm((x @ self.w[b + "attn_k.weight"].T).reshape(n, self.n_kv, self.size), b + "attn_k_norm.weight")
        return self.rotate(k, positions), (x @ self.w[b + "attn_v.weight"].T).reshape(n, self.n_kv, self.size)

    def hidden(self, taps: np.ndarray, anchor: int, k: int) -> np.ndarray:
        """States [k, E] of the drafted places, behind the last norm; taps[n, T * H] of all tokens before the anchor."""
        w, n, file = self.w, len(taps), self.file
        fused = self.norm(taps.astype(np.float64) @ w["fc.weight"].T, "enc.output_norm.weight")
        ids = [anchor] + [file.get("tokenizer.ggml.mask_token_id", int)] * (k + self.lead - 1)
        at = np.arange(n, n + len(ids))
        h = w["token_embd.weight"][ids]
        for layer in range(file.n_layer):
            b = f"blk.{layer}."
            x = self.norm(h, b + "attn_norm.weight")
            q = self.norm((x @ w[b + "attn_q.weight"].T).reshape(len(ids), self.n_head, self.size), b + "attn_q_norm.weight")
            q = self.rotate(q, at)
            before, own = self.keys(layer, fused, np.arange(n)), self.keys(layer, x, at)
            keys, values = np.concatenate([before[0], own[0]]), np.concatenate([before[1], own[1]])
            mixed = np.zeros((len(ids), self.n_head, self.size))
            for r, position in enumerate(at):
                seen = np.arange(len(keys))
                pattern = file.arch("attention.sliding_window_pattern")
                if file.sliding_window and pattern[layer]:
                    seen = seen[position - seen < file.sliding_window]
                if file.arch("attention.causal", False):
                    seen = seen[seen <= position]
                for head in range(self.n_head):
                    kv = head * self.n_kv // self.n_head
                    scores = keys[seen, kv] @ q[r, head] / np.sqrt(self.size)
                    weights = np.exp(scores - scores.max())
                    mixed[r, head] = weights / weights.sum() @ values[seen, kv]
            h = h + mixed.reshape(len(ids), -1) @ w[b + "attn_output.weight"].T
            y = self.norm(h, b + "ffn_norm.weight")
            gate = y @ w[b + "ffn_gate.weight"].T
            h = h + (gate / (1 + np.exp(-gate)) * (y @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
        return self.norm(h, "output_norm.weight")[self.lead :]

    def draft(
        self, taps: np.ndarray, anchor: int, k: int, forced: list[int] | None = None
    ) -> tuple[list[np.ndarray], list[int], list[float]]:
        """For each drafted place its logits over the draft's vocabulary, the token chosen and the confidence; `forced`: what
        was chosen in its stead."""
        hidden, w = self.hidden(taps, anchor, k), self.w
        rows, tokens, sure = [], [], []
        previous = anchor
        for i in range(k):
            row = w["output.weight"] @ hidden[i]
            if self.has_markov:
                row = row + w["markov_w2.weight"] @ w["markov_w1.weight"][previous]
            share = np.exp(row - row.max())
            if "conf_proj.weight" in w:
                x = w["conf_proj.weight"].reshape(-1) @ np.concatenate([hidden[i], w["markov_w1.weight"][previous]])
                sure.append(float(1 / (1 + np.exp(-(x + w["conf_proj.bias"][0])))))
            else:
                sure.append(float(1 / share.sum()))
            previous = int(self.ids[row.argmax()]) if forced is None else forced[i]
            rows.append(row)
            tokens.append(previous)
        return rows, tokens, sure
