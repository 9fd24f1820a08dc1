"""Keys and values of a Gemma 4 target as its assistant reads them: computed again, from the states that the shards hold.

A layer's keys are a norm, a matrix, a norm and a rotation away from the state that goes into the layer, its values two
norms and a matrix; the states were read in the target's own pass (taps), and the weights are the target's file. So nothing
but taps has to be stored, and what comes out is what the target's cache holds, up to the rounding of its products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.errors import TrainError
from localspec.gemma4 import head_sizes, layers_read
from localspec.train.target_weights import TargetWeights

KINDS = (True, False)  # windowed, full: in the order of their taps


class Rotation:
    """Rotary positions of one kind of layer: the first `n` elements of a head turn, halves of them together."""

    def __init__(self, target: TargetWeights, windowed: bool):
        gguf = target.gguf
        size = head_sizes(gguf, windowed)[0]
        self.n = int(gguf.arch("rope.dimension_count_swa" if windowed else "rope.dimension_count", size))
        base = float(gguf.arch("rope.freq_base_swa", 10000.0)) if windowed else target.rope_base
        self.speed = base ** (torch.arange(self.n // 2, dtype=torch.float64) * -2 / self.n)
        if not windowed:
            self.speed = self.speed / target.tensor("rope_freqs.weight")[: self.n // 2]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [R, heads, d], positions [R]."""
        angle = positions[:, None, None] * self.speed.to(x.device, torch.float32)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b, rest = x[..., : self.n // 2], x[..., self.n // 2 : self.n], x[..., self.n :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class TargetKeys(nn.Module):
    """The two layers' weights, fixed. Raises TrainError for a target with a scaled rope, PairingError for another model."""

    def __init__(self, target: TargetWeights):
        super().__init__()
        gguf, eps = target.gguf, target.rms_eps
        if gguf.arch("rope.scaling.factor", 0.0) or str(gguf.arch("rope.scaling.type", "none")) != "none":
            raise TrainError(f"{target.path} scales its rope, which an MTP assistant can't be trained for yet")
        self.eps = eps
        self.heads: dict[bool, tuple[int, int]] = {}
        self.rotations: dict[bool, Rotation] = {}
        self.stored: dict[bool, list[str]] = {kind: [] for kind in KINDS}
        for kind, layer in zip(KINDS, layers_read(gguf)):
            names = {"norm": "attn_norm", "k": "attn_k", "k_norm": "attn_k_norm", "v": "attn_v"}
            for name, stored in names.items():
                full = f"blk.{layer}.{stored}.weight"
                if name == "v" and full not in gguf.tensors:
                    continue  # keys serve as values
                self.stored[kind].append(name)
                self.register_buffer(f"{name}_{kind}", target.tensor(full), persistent=False)
            self.heads[kind] = (gguf.n_head_kv[layer], head_sizes(gguf, kind)[0])
            self.rotations[kind] = Rotation(target, kind)

    def forward(self, kind: bool, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values), each [N, kv, d], of the states x [N, H] that went into the layer."""
        low = {name: self.get_buffer(f"{name}_{kind}").to(x.dtype) for name in self.stored[kind]}
        y = F.rms_norm(x, (x.shape[-1],), low["norm"], self.eps)
        n_kv, size = self.heads[kind]
        raw = F.linear(y, low["k"]).view(-1, n_kv, size)
        v = F.linear(y, low["v"]).view(-1, n_kv, size) if "v" in low else raw
        k = self.rotations[kind](F.rms_norm(raw, (size,), low["k_norm"], self.eps), positions)
        return k, F.rms_norm(v, (size,), None, self.eps)


def main_directions(embedding: Tensor, n: int) -> Tensor:
    """f32[H, n]: the directions in which the embeddings [V, H] differ most, orthonormal."""
    square = torch.zeros(embedding.shape[1], embedding.shape[1])
    for piece in embedding.split(1 << 14):
        square += piece.float().t() @ piece.float()
    _, directions = torch.linalg.eigh(square)
    return directions[:, -n:].flip(1).contiguous()
