"""What a speculator takes from its target's file: embedding, head, norms and shapes, dequantised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile, require_model
from localspec.speculator import TargetIdentity

_PIECE = 1 << 24  # numbers dequantised at a time: a big vocabulary never stands in memory as fp32 whole


class TargetWeights:
    """The target's GGUF, opened for its weights. llama.cpp is not loaded."""

    def __init__(self, path: Path):
        """Raises ModelFileError."""
        self.gguf = GGUFFile.open(path, "target")
        require_model(self.gguf, "target")
        self.identity = TargetIdentity.of(self.gguf)
        self.rms_eps = float(self.gguf.arch("attention.layer_norm_rms_epsilon", 1e-5))
        self.rope_base = float(self.gguf.arch("rope.freq_base", 10000.0))

    @property
    def path(self) -> Path:
        return self.gguf.path

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in PyTorch's order of dimensions. Raises ModelFileError where it is missing or can't be read."""
        info = self.gguf.tensors.get(name)
        if info is None:
            raise self.gguf.error(f"has no tensor {name}")
        shape = info.shape[::-1]
        row = info.shape[0]
        n_rows = info.n_elements // row
        raw = np.frombuffer(self.gguf.tensor_bytes(name), np.uint8).reshape(n_rows, -1)
        out = torch.empty(n_rows, row, dtype=dtype)
        step = max(1, _PIECE // row)
        for at in range(0, n_rows, step):
            out[at : at + step] = torch.from_numpy(self._numbers(raw[at : at + step], info.type, name))
        return out.view(shape)

    def _numbers(self, raw: npt.NDArray[np.uint8], kind: str, name: str) -> npt.NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            numbers = dequantize(raw, GGMLQuantizationType[kind])
        except (KeyError, NotImplementedError):
            raise self.gguf.error(f"has {name} in {kind}, which can't be read here; take a Q8_0 or F16 file") from None
        return np.array(numbers, np.float32, order="C")  # its own: F32 tensors come back as views into the file

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """[V, H]"""
        return self.tensor("token_embd.weight", dtype)

    def head(self) -> Tensor:
        """f32 [V, H]: the output projection, or the embedding where that serves as both."""
        name = "output.weight" if "output.weight" in self.gguf.tensors else "token_embd.weight"
        return self.tensor(name)

    def output_norm(self) -> Tensor:
        """f32 [H]: the weights of the norm before the head."""
        norm = self.tensor("output_norm.weight")
        if norm.shape != (self.identity.n_embd,):
            raise ModelFileError(f"{self.path}: output_norm.weight has the shape {tuple(norm.shape)}")
        return norm

    def layer_int(self, key: str, default: int) -> int:
        """A number that a file gives once or for each layer: the last layer's."""
        values = self.gguf.per_layer(key, default)
        return values[-1] if values else default
