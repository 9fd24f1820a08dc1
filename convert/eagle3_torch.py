"""An EAGLE-3 checkpoint read by PyTorch, in plain dense tensors: the reference for what is exported.

It shares nothing with the trainer's model nor with the file's network: Hugging Face's order of rows, attention over all
positions with a mask, fp32 throughout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localspec.convert.checkpoint import Checkpoint
from localspec.convert.foreign import rope_factors
from localspec.convert.methods import Text
from localspec.convert.output import dequantised
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
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


class TorchDraft:
    """One checkpoint's weights, f32."""

    def __init__(self, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile):
        self.config = config
        self.w = {name: torch.from_numpy(source.tensor(name)) for name in source.names if name not in ("d2t", "t2d")}
        if "embed_tokens.weight" not in self.w:
            self.w["embed_tokens.weight"] = torch.tensor(dequantised(target, "token_embd.weight"))
        if "lm_head.weight" not in self.w:
            head = "output.weight" if "output.weight" in target.tensors else "token_embd.weight"
            self.w["lm_head.weight"] = torch.tensor(dequantised(target, head))
        n = len(self.w["lm_head.weight"])
        offsets = torch.from_numpy(source.integers("d2t")) if "d2t" in source.names else torch.zeros(n, dtype=torch.int64)
        self.ids = offsets + torch.arange(n)
        factors = rope_factors(config)
        linear = float(config.extra.get("rope.scaling.factor", 1.0))  # type: ignore[arg-type]
        self.stretch = torch.tensor(linear) if factors is None else torch.from_numpy(factors)

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """As methods.Reading says; the pair before each start is the first that predicts."""
        with torch.no_grad():
            return self._roll_out(torch.from_numpy(text.tokens.astype(np.int64)), torch.tensor(text.taps), starts - 1, depth)

    def close(self) -> None:
        """Nothing is held open."""

    def _roll_out(
        self, text: Tensor, taps: Tensor, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        n, rows = len(text), torch.from_numpy(starts)
        x = self._norm(taps, "input_norm.weight") if self.config.norm_before_fc else taps
        g = F.linear(x, self.w["fc.weight"])
        everywhere = torch.arange(n)
        keys, values = self._keys(self._joined(text.roll(-1), g), everywhere)  # the last pair has no token: never seen
        state, token = g[rows], text[rows + 1]
        own: list[tuple[Tensor, Tensor]] = []
        alive = torch.ones(len(rows), dtype=torch.bool)
        accepted = torch.zeros(len(rows), dtype=torch.int64)
        first = torch.empty(0)
        for step in range(depth):
            at = rows + step
            joined = self._joined(token, state)
            if step:
                own.append(self._keys(joined, at))
            seen = (everywhere[None] <= rows[:, None]) & self._inside(at[:, None] - everywhere[None])
            logits, state = self._layer(joined, state, at, keys, values, seen, own, rows)
            if step == 0:
                first = logits
            token = self.ids[logits.argmax(-1)]
            place = rows + 2 + step
            alive &= (place < n) & (token == text[place.clamp(max=n - 1)])
            accepted += alive
        return first.numpy(), accepted.numpy()

    def _inside(self, distance: Tensor) -> Tensor:
        """Which keys so many positions back are inside the window."""
        return distance < (self.config.window or 1 << 30)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.w[name], self.config.rms_eps)

    def _joined(self, tokens: Tensor, state: Tensor) -> Tensor:
        """[R, 2E]: what attention reads of (token, state)."""
        embedded = self._norm(self.w["embed_tokens.weight"][tokens], "layers.0.input_layernorm.weight")
        return torch.cat([embedded, self._norm(state, "layers.0.hidden_norm.weight")], -1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Halves of a head belong together: x[R, heads, d], positions [R]."""
        half = x.shape[-1] // 2
        speed = self.config.rope_base ** (torch.arange(half) / -half) / self.stretch
        angle = positions[:, None, None] * speed
        a, b = x.split(half, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _keys(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(joined), self.config.n_head_kv, self.config.head_dim)
        k = F.linear(joined, self.w["layers.0.self_attn.k_proj.weight"]).view(shape)
        return self._rotate(k, positions), F.linear(joined, self.w["layers.0.self_attn.v_proj.weight"]).view(shape)

    def _layer(
        self, joined: Tensor, state: Tensor, at: Tensor, keys: Tensor, values: Tensor, seen: Tensor,
        own: list[tuple[Tensor, Tensor]], rows: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Logits [R, Vd] and the state before the last norm [R, E]. `seen` bool[R, n]; `own`: keys and values [R, kv, d] of
        each chain's own earlier steps, at rows + 1 ... ."""
        c, r = self.config, len(joined)
        q = F.linear(joined, self.w["layers.0.self_attn.q_proj.weight"]).view(r, c.n_head, c.head_dim)
        q = self._rotate(q, at).view(r, c.n_head_kv, -1, c.head_dim)
        scores = torch.einsum("rkgd,nkd->rkgn", q, keys).masked_fill(~seen[:, None, None], -torch.inf)
        for i, (k, _) in enumerate(own):
            inside = self._inside(at - (rows + 1 + i))[:, None, None, None]
            score = (q * k[:, :, None]).sum(-1, keepdim=True)
            scores = torch.cat([scores, torch.where(inside, score, -torch.inf)], -1)
        weights = (scores * c.head_dim**-0.5).softmax(-1)
        mixed = torch.einsum("rkgn,nkd->rkgd", weights[..., : len(keys)], values)
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., len(keys) + i, None] * v[:, :, None]
        residual = self._norm(state, "layers.0.hidden_norm.weight") if c.norm_before_residual else state
        h = residual + F.linear(mixed.reshape(r, -1), self.w["layers.0.self_attn.o_proj.weight"])
        y = self._norm(h, "layers.0.post_attention_layernorm.weight")
        gate = F.silu(F.linear(y, self.w["layers.0.mlp.gate_proj.weight"]))
        h = h + F.linear(gate * F.linear(y, self.w["layers.0.mlp.up_proj.weight"]), self.w["layers.0.mlp.down_proj.weight"])
        return F.linear(self._norm(h, "norm.weight"), self.w["lm_head.weight"]), h
