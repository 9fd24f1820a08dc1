"""A small model's checkpoint read by PyTorch, in plain dense tensors: the reference for what is exported.

It shares nothing with the trainer's model: attention over all positions with a mask, fp32 throughout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localspec.convert.checkpoint import Checkpoint
from localspec.convert.methods import Text
from localspec.errors import UsageError
from localspec.speculator import SpeculatorConfig

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
except ImportError as error:  # pragma: no cover
    from localspec.train import INSTALL

    raise UsageError(
        f"PyTorch can't be imported ({error}), and the comparison needs it: {INSTALL}, or --no-parity"
    ) from None

Pair = tuple[Tensor, Tensor]


class TorchLlama:
    """One checkpoint's weights, f32."""

    def __init__(self, source: Checkpoint, config: SpeculatorConfig):
        self.config = config
        self.w = {name: torch.from_numpy(source.tensor(name)) for name in source.names}
        self.head = self.w.get("lm_head.weight", self.w["embed_tokens.weight"])

    def close(self) -> None:
        """Nothing is held open."""

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """As methods.Reading says."""
        tokens, rows = torch.from_numpy(text.tokens.astype(np.int64)), torch.from_numpy(starts)
        n = len(tokens)
        everywhere = torch.arange(n)
        with torch.no_grad():
            x, known = self.w["embed_tokens.weight"][tokens], []
            for i in range(self.config.n_layer):
                x, pair = self._layer(i, x, everywhere, everywhere[None] <= everywhere[:, None], None, [])
                known.append(pair)
            first = logits = self._logits(x[rows])
            chains: list[list[Pair]] = [[] for _ in known]
            alive = torch.ones(len(rows), dtype=torch.bool)
            kept = torch.zeros(len(rows), dtype=torch.int64)
            for step in range(1, depth + 1):
                token, place = logits.argmax(-1), rows + step
                alive &= (place < n) & (token == tokens[place.clamp(max=n - 1)])
                kept += alive
                if step == depth:
                    break
                x = self.w["embed_tokens.weight"][token]
                for i, pair in enumerate(known):
                    x, own = self._layer(i, x, place, everywhere[None] <= rows[:, None], pair, chains[i])
                    chains[i].append(own)
                logits = self._logits(x)
        return first.numpy(), kept.numpy()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_eps).rsqrt() * self.w[name]

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, "norm.weight"), self.head)

    def _projected(self, i: int, what: str, y: Tensor) -> Tensor:
        name = f"layers.{i}.self_attn.{what}_proj"
        return F.linear(y, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Halves of a head belong together: x [R, heads, d], positions [R]."""
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * self.config.rope_base ** (torch.arange(half) / -half)
        a, b = x.split(half, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _layer(
        self, i: int, x: Tensor, at: Tensor, seen: Tensor, known: Pair | None, chain: list[Pair]
    ) -> tuple[Tensor, Pair]:
        """One layer of rows x [R, E] at positions `at`: what comes out, and their own keys and values [R, kv, d]. They see
        of the keys `known` (their own, where that is None) those marked in `seen` bool[R, n]; and besides `known` those of
        `chain`, one per row, and their own."""
        c, r = self.config, len(x)
        y = self._norm(x, f"layers.{i}.input_layernorm.weight")
        q = self._rotate(self._projected(i, "q", y).view(r, c.n_head, c.head_dim), at).view(r, c.n_head_kv, -1, c.head_dim)
        k = self._rotate(self._projected(i, "k", y).view(r, c.n_head_kv, c.head_dim), at)
        v = self._projected(i, "v", y).view(r, c.n_head_kv, c.head_dim)
        keys, values = known or (k, v)
        scores = torch.einsum("rkgd,nkd->rkgn", q, keys).masked_fill(~seen[:, None, None], -torch.inf)
        own = [*chain, (k, v)] if known else []
        scores = torch.cat([scores, *[(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]], -1)
        weights = (scores * c.head_dim**-0.5).softmax(-1)
        mixed = torch.einsum("rkgn,nkd->rkgd", weights[..., : len(keys)], values)
        for j, (_, value) in enumerate(own):
            mixed = mixed + weights[..., len(keys) + j, None] * value[:, :, None]
        x = x + self._projected(i, "o", mixed.reshape(r, -1))
        y = self._norm(x, f"layers.{i}.post_attention_layernorm.weight")
        gate, up, down = (self.w[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down), (k, v)
