"""A DFlash or DSpark checkpoint read by PyTorch, in plain dense tensors: the reference for what is exported.

It shares nothing with the trainer's model nor with the file's network: attention over all positions with a mask, fp32
throughout, one block for each place where a draft begins.

A block stands behind the n tokens whose states are known (positions 0 to n - 1): the pending token at position n, the
anchor, then masks. Every row of it sees the injected keys before n, as far as the layer's window reaches back from that row,
and every row of the block. A mask's row predicts the token of its own position; in a DSpark draft that samples from the
anchor, every row predicts the token after it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localspec.convert.checkpoint import Checkpoint, head_name
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

_CHUNK = 32  # blocks at once


class TorchDraft:
    """One checkpoint's weights, f32."""

    def __init__(self, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile):
        self.config = config
        self.w = {name: torch.from_numpy(source.tensor(name)) for name in source.names if name not in ("d2t", "t2d")}
        for name, given in (("embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", head_name(target))):
            if name not in self.w:
                self.w[name] = torch.tensor(dequantised(target, given))
        n = len(self.w["lm_head.weight"])
        offsets = torch.from_numpy(source.integers("d2t")) if "d2t" in source.names else torch.zeros(n, dtype=torch.int64)
        self.ids = offsets + torch.arange(n)
        self.mask = int(config.extra["mask_token_id"])  # type: ignore[arg-type]
        self.is_causal = bool(config.extra.get("attention.causal", False))
        self.has_markov = "markov_head.markov_w1.weight" in self.w
        self.from_anchor = self.has_markov and bool(config.extra.get("sample_from_anchor", True))
        pattern = config.extra.get("attention.sliding_window_pattern", [1] * config.n_layer)
        self.windows = [config.window if on else 0 for on in pattern]  # type: ignore[union-attr]

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """As methods.Reading says."""
        tokens, taps = torch.from_numpy(text.tokens.astype(np.int64)), torch.tensor(text.taps)
        with torch.no_grad():
            injected = self._inject(taps)
            parts = [
                self._drafts(tokens, injected, torch.from_numpy(starts[i : i + _CHUNK]), depth)
                for i in range(0, len(starts), _CHUNK)
            ]
        return torch.cat([first for first, _ in parts]).numpy(), torch.cat([kept for _, kept in parts]).numpy()

    def close(self) -> None:
        """Nothing is held open."""

    def blocks(self, tokens: Tensor, injected: list[tuple[Tensor, Tensor]], starts: Tensor, n_rows: int) -> Tensor:
        """Hidden states [R, n_rows, E] behind the last norm, of blocks whose anchors stand at `starts`."""
        ids = torch.full((len(starts), n_rows), self.mask)
        ids[:, 0] = tokens[starts]
        positions = starts[:, None] + torch.arange(n_rows)
        h = self.w["embed_tokens.weight"][ids]
        for layer, (keys, values) in enumerate(injected):
            h = self._layer(layer, h, positions, keys, values)
        return self._norm(h, "norm.weight")

    def _drafts(
        self, tokens: Tensor, injected: list[tuple[Tensor, Tensor]], starts: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        lead = 0 if self.from_anchor else 1
        hidden = self.blocks(tokens, injected, starts, depth + lead)[:, lead:]
        logits = F.linear(hidden, self.w["lm_head.weight"])
        previous = tokens[starts]
        alive, kept = torch.ones(len(starts), dtype=torch.bool), torch.zeros(len(starts), dtype=torch.int64)
        for i in range(depth):
            if self.has_markov:
                state = self.w["markov_head.markov_w1.weight"][previous]
                logits[:, i] += F.linear(state, self.w["markov_head.markov_w2.weight"])
            previous = self.ids[logits[:, i].argmax(-1)]
            place = starts + 1 + i
            alive &= (place < len(tokens)) & (previous == tokens[place.clamp(max=len(tokens) - 1)])
            kept += alive
        return logits[:, 0], kept

    def _inject(self, taps: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [n, kv, d] of the target's rows, for each layer."""
        fused = self._norm(F.linear(taps, self.w["fc.weight"]), "hidden_norm.weight")
        positions = torch.arange(len(taps))
        return [self._keys(layer, fused, positions) for layer in range(self.config.n_layer)]

    def _keys(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        p, shape = f"layers.{layer}.self_attn.", (*x.shape[:-1], self.config.n_head_kv, self.config.head_dim)
        k = self._norm(F.linear(x, self.w[p + "k_proj.weight"]).view(shape), p + "k_norm.weight")
        return self._rotate(k, positions), F.linear(x, self.w[p + "v_proj.weight"]).view(shape)

    def _layer(self, layer: int, h: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        c, p = self.config, f"layers.{layer}."
        r, b, _ = h.shape
        x = self._norm(h, p + "input_layernorm.weight")
        q = F.linear(x, self.w[p + "self_attn.q_proj.weight"]).view(r, b, c.n_head, c.head_dim)
        q = self._rotate(self._norm(q, p + "self_attn.q_norm.weight"), positions)
        q = q.view(r, b, c.n_head_kv, -1, c.head_dim)
        own_keys, own_values = self._keys(layer, x, positions)
        outside = torch.einsum("rbkgd,nkd->rbkgn", q, keys)
        inside = torch.einsum("rbkgd,rmkd->rbkgm", q, own_keys)
        anchors = positions[:, :1, None]
        everywhere = torch.arange(len(keys))
        seen = (everywhere < anchors) & self._reaches(layer, positions[:, :, None] - everywhere)
        seen_own = self._reaches(layer, positions[:, :, None] - positions[:, None, :])
        if self.is_causal:
            seen_own &= positions[:, None, :] <= positions[:, :, None]
        seen = torch.cat([seen, seen_own], -1)[:, :, None, None]
        scores = torch.cat([outside, inside], -1) * c.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("rbkgn,nkd->rbkgd", weights[..., : len(keys)], values)
        mixed = mixed + torch.einsum("rbkgm,rmkd->rbkgd", weights[..., len(keys) :], own_values)
        h = h + F.linear(mixed.reshape(r, b, -1), self.w[p + "self_attn.o_proj.weight"])
        y = self._norm(h, p + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(y, self.w[p + "mlp.gate_proj.weight"]))
        return h + F.linear(gate * F.linear(y, self.w[p + "mlp.up_proj.weight"]), self.w[p + "mlp.down_proj.weight"])

    def _reaches(self, layer: int, distance: Tensor) -> Tensor:
        """Whether a layer's window reaches so many positions back; forward it always does."""
        return distance < (self.windows[layer] or 1 << 30)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.w[name], self.config.rms_eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Halves of a head belong together: x[..., heads, d], positions [...]."""
        half = x.shape[-1] // 2
        angle = positions[..., None, None] * self.config.rope_base ** (torch.arange(half) / -half)
        a, b = x.split(half, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
