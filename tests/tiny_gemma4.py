"""A small Gemma 4 in PyTorch, pretrained in moments on the standard library's documentation, and its GGUF file.

No Gemma 4 weights are small enough for tests, and noise can't be drafted for. This one has all that a draft reads:
windowed and full layers with heads of different sizes, layers that read the keys and values of earlier ones, per-layer
embeddings, unrotated dimensions, a soft cap on the logits. `python -m tests.tiny_gemma4 OUT.gguf SECONDS` makes a
better one.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.data import library
from localspec.model import Model
from tests import gguf_maker

EPS = 1e-6
FULL_BASE, WINDOW_BASE = 1_000_000.0, 10_000.0
SOFTCAP = 30.0
PEAK = 1e-2  # learning rate


@dataclass(frozen=True)
class Shape:
    """`windowed[i]`: whether layer i sees the window only. The last `n_shared` layers have no keys of their own."""

    windowed: tuple[bool, ...] = (True, True, True, False, True, False)
    n_shared: int = 2
    n_embd: int = 64
    n_head: int = 4
    kv_full: int = 1
    kv_window: int = 2
    size_full: int = 32
    size_window: int = 16
    n_ff: int = 128
    per_layer: int = 8
    window: int = 48
    n_ctx: int = 1024

    def heads_kv(self, i: int) -> int:
        return self.kv_window if self.windowed[i] else self.kv_full

    def size(self, i: int) -> int:
        return self.size_window if self.windowed[i] else self.size_full

    def read_from(self, i: int) -> int:
        """The layer whose keys and values layer i reads."""
        n_own = len(self.windowed) - self.n_shared
        return i if i < n_own else n_own - (2 if self.windowed[i] else 1)


# -- tokenizer ------------------------------------------------------------------------------------------------------------


def tokenizer_keys(text: str, n_merges: int) -> dict[str, Any]:
    """``tokenizer.*`` of a byte-level BPE made from a text, with ChatML's special tokens."""
    base, _ = gguf_maker.bpe(1)
    tokens, letters = list(base[:256]), dict(enumerate(base[:256]))
    counts = Counter(re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+", text))
    words = [([letters[b] for b in word.encode()], n) for word, n in counts.items()]
    merges: list[str] = []
    for _ in range(n_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words:
            for pair in pairwise(word):
                pairs[pair] += n
        a, b = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(f"{a} {b}")
        tokens.append(a + b)
        for word, _n in words:
            i = 0
            while i < len(word) - 1:
                if word[i] == a and word[i + 1] == b:
                    word[i : i + 2] = [a + b]
                i += 1
    n = len(tokens)
    texts = [*tokens, *gguf_maker.SPECIAL]
    kinds = [gguf_maker.NORMAL] * n + [gguf_maker.CONTROL] * len(gguf_maker.SPECIAL)
    while len(texts) % 32:
        texts.append(f"[PAD{len(texts)}]")
        kinds.append(gguf_maker.UNUSED)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n, "tokenizer.ggml.eos_token_id": n + 2, "tokenizer.ggml.padding_token_id": n,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": gguf_maker.CHATML,
    }  # fmt: skip


# -- model ----------------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def rotated(x: Tensor, base: float, factors: Tensor | None) -> Tensor:
    """Rotary positions 0 ... n - 1 for x [..., n, heads, d]; halves of a head belong together."""
    half = x.shape[-1] // 2
    speed = base ** (torch.arange(half) / -half)
    if factors is not None:
        speed = speed / factors
    angle = torch.arange(x.shape[-3])[:, None, None] * speed
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class TinyGemma4(nn.Module):
    """Parameters by their names in the file, dots written as two underscores."""

    def __init__(self, shape: Shape, n_vocab: int, seed: int = 0):
        super().__init__()
        self.shape, self.n_vocab = shape, n_vocab
        s, random = shape, torch.Generator().manual_seed(seed)

        def matrix(name: str, rows: int, columns: int, spread: float | None = None) -> None:
            value = torch.randn(rows, columns, generator=random) * (spread or columns**-0.5)
            self.register_parameter(f"{name}.weight".replace(".", "__"), nn.Parameter(value))

        def ones(name: str, n: int) -> None:
            self.register_parameter(f"{name}.weight".replace(".", "__"), nn.Parameter(torch.ones(n)))

        n_layer, e = len(s.windowed), s.n_embd
        matrix("token_embd", n_vocab, e, e**-0.5)
        matrix("per_layer_token_embd", n_vocab, s.per_layer * n_layer, s.per_layer**-0.5)
        matrix("per_layer_model_proj", s.per_layer * n_layer, e, 1.0)
        ones("per_layer_proj_norm", s.per_layer)
        ones("output_norm", e)
        for i in range(n_layer):
            b, d = f"blk.{i}", s.size(i)
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
                ones(f"{b}.{name}", e)
            ones(f"{b}.layer_output_scale", 1)
            ones(f"{b}.attn_q_norm", d)
            matrix(f"{b}.attn_q", s.n_head * d, e)
            if s.read_from(i) == i:
                ones(f"{b}.attn_k_norm", d)
                matrix(f"{b}.attn_k", s.heads_kv(i) * d, e)
                if s.windowed[i]:  # full layers take their keys as values, as in the larger Gemma 4
                    matrix(f"{b}.attn_v", s.heads_kv(i) * d, e)
            matrix(f"{b}.attn_output", e, s.n_head * d)
            matrix(f"{b}.ffn_gate", s.n_ff, e)
            matrix(f"{b}.ffn_up", s.n_ff, e)
            matrix(f"{b}.ffn_down", e, s.n_ff)
            matrix(f"{b}.inp_gate", s.per_layer, e)
            matrix(f"{b}.proj", e, s.per_layer)
        factors = torch.ones(s.size_full // 2)
        factors[s.size_full // 8 :] = 1e30  # a quarter of the dimensions turns
        self.factors = factors

    def w(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, f"{name}.weight".replace(".", "__"))
        return weight

    def _keys(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        s, b = self.shape, f"blk.{i}"
        shape = (*x.shape[:-1], s.heads_kv(i), s.size(i))
        raw = F.linear(x, self.w(f"{b}.attn_k")).view(shape)
        v = F.linear(x, self.w(f"{b}.attn_v")).view(shape) if s.windowed[i] else raw
        return self._rotated(i, norm(raw, self.w(f"{b}.attn_k_norm"))), norm(v)

    def _rotated(self, i: int, x: Tensor) -> Tensor:
        windowed = self.shape.windowed[i]
        return rotated(x, WINDOW_BASE if windowed else FULL_BASE, None if windowed else self.factors)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, n, heads, d], k and v [B, n, kv, d]."""
        n = q.shape[1]
        at = torch.arange(n)
        distance = at[:, None] - at
        seen = distance >= 0
        if self.shape.windowed[i]:
            seen &= distance < self.shape.window
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, scale=1.0)
        return out.transpose(1, 2).flatten(2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """tokens [B, n]: (logits [B, n, V], states after the last norm [B, n, E], inputs of the layers)."""
        s, n_layer = self.shape, len(self.shape.windowed)
        x = self.w("token_embd")[tokens] * s.n_embd**0.5
        own = self.w("per_layer_token_embd")[tokens].view(*tokens.shape, n_layer, s.per_layer) * s.per_layer**0.5
        mixed = F.linear(x, self.w("per_layer_model_proj")).view(own.shape) * s.n_embd**-0.5
        own = (norm(mixed, self.w("per_layer_proj_norm")) + own) * 2**-0.5
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        inputs = []
        for i in range(n_layer):
            b = f"blk.{i}"
            inputs.append(x)
            y = norm(x, self.w(f"{b}.attn_norm"))
            q = F.linear(y, self.w(f"{b}.attn_q")).view(*y.shape[:-1], s.n_head, s.size(i))
            if s.read_from(i) == i:
                kept[i] = self._keys(i, y)
            k, v = kept[s.read_from(i)]
            out = self._attend(i, self._rotated(i, norm(q, self.w(f"{b}.attn_q_norm"))), k, v)
            x = x + norm(F.linear(out, self.w(f"{b}.attn_output")), self.w(f"{b}.post_attention_norm"))
            y = norm(x, self.w(f"{b}.ffn_norm"))
            y = F.gelu(F.linear(y, self.w(f"{b}.ffn_gate")), approximate="tanh") * F.linear(y, self.w(f"{b}.ffn_up"))
            x = x + norm(F.linear(y, self.w(f"{b}.ffn_down")), self.w(f"{b}.post_ffw_norm"))
            y = F.gelu(F.linear(x, self.w(f"{b}.inp_gate")), approximate="tanh") * own[..., i, :]
            x = x + norm(F.linear(y, self.w(f"{b}.proj")), self.w(f"{b}.post_norm"))
            x = x * self.w(f"{b}.layer_output_scale")
        h = norm(x, self.w("output_norm"))
        return torch.tanh(F.linear(h, self.w("token_embd")) / SOFTCAP) * SOFTCAP, h, inputs

    def write(self, path: Path, tokenizer: dict[str, Any]) -> Path:
        """The GGUF file, f32."""
        s = self.shape
        config = {
            "block_count": len(s.windowed), "context_length": s.n_ctx, "embedding_length": s.n_embd,
            "feed_forward_length": s.n_ff, "attention.head_count": s.n_head,
            "attention.head_count_kv": [s.heads_kv(i) for i in range(len(s.windowed))],
            "attention.key_length": s.size_full, "attention.value_length": s.size_full,
            "attention.key_length_swa": s.size_window, "attention.value_length_swa": s.size_window,
            "attention.layer_norm_rms_epsilon": EPS, "attention.sliding_window": s.window,
            "attention.sliding_window_pattern": [bool(w) for w in s.windowed],
            "attention.shared_kv_layers": s.n_shared, "embedding_length_per_layer_input": s.per_layer,
            "rope.dimension_count": s.size_full, "rope.dimension_count_swa": s.size_window,
            "rope.freq_base": FULL_BASE, "rope.freq_base_swa": WINDOW_BASE, "final_logit_softcapping": SOFTCAP,
        }  # fmt: skip
        keys: dict[str, Any] = {"general.type": "model", "general.name": "tiny gemma4", "general.file_type": 0}
        keys |= {f"gemma4.{name}": value for name, value in config.items()} | tokenizer
        tensors = {name.replace("__", "."): p.detach().numpy() for name, p in self.named_parameters()}
        return gguf_maker.write(path, "gemma4", keys, {**tensors, "rope_freqs.weight": self.factors.numpy()})


# -- pretraining ----------------------------------------------------------------------------------------------------------


def documentation(n_chars: int, package: str = "asyncio") -> list[tuple[str, str]]:
    """(asked, answered) of conversations about a package of the standard library (empty: all of it), so many characters."""
    found: list[tuple[str, str]] = []
    size = 0
    for conversation in library.conversations(Path(sysconfig.get_paths()["stdlib"]) / package):
        if not conversation.source.endswith("prose"):
            continue
        asked, answered = (m.content for m in conversation.messages)
        if not answered.isascii():
            continue
        found.append((asked, answered))
        size += len(asked) + len(answered)
        if size >= n_chars:
            break
    return found


def as_text(asked: str, answered: str) -> str:
    """ChatML, as the tokenizer's template writes it."""
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answered}<|im_end|>\n"


def pretrain(model: TinyGemma4, tokens: Sequence[int], seconds: float, steps: int, length: int = 96, rows: int = 4) -> float:
    """Train for so many steps, or as long as the seconds last; returns the last loss."""
    text = torch.tensor(tokens)
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK, (0.9, 0.95), weight_decay=0.01)
    began, loss = time.monotonic(), torch.zeros(())
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / seconds)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / 20) * min(1.0, 2.5 * (1 - done) + 0.02)
        at = torch.randint(len(text) - length - 1, (rows,), generator=random)
        chosen = text[at[:, None] + torch.arange(length + 1)]
        logits = model(chosen[:, :-1])[0]
        loss = F.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def make(
    path: Path, n_chars: int = 2000, n_merges: int = 125, steps: int = 110, seconds: float = 1e9, shape: Shape = Shape(),
    package: str = "asyncio",
) -> tuple[TinyGemma4, float]:  # fmt: skip
    """Write a pretrained model to `path`; returns it with its last loss. So little text is soon known by heart, so that
    even a moment gives sure tokens."""
    said = documentation(n_chars, package)
    tokenizer = tokenizer_keys("\n".join(f"{a}\n{b}" for a, b in said), n_merges)
    model = TinyGemma4(shape, len(tokenizer["tokenizer.ggml.tokens"]))
    model.write(path, tokenizer)
    with Model(path) as written:
        tokens = [t for a, b in said for t in written.tokenizer.encode(as_text(a, b))]
    loss = pretrain(model, tokens, seconds, steps)
    model.write(path, tokenizer)
    return model, loss


if __name__ == "__main__":
    large = Shape(n_embd=128, size_full=64, size_window=32, n_ff=256, per_layer=16)
    _, last = make(Path(sys.argv[1]), 600_000, 765, 1_000_000, float(sys.argv[2]), large, "")
    print(f"loss {last:.3f}")
