"""Tensors out of PyTorch's pickles (pytorch_model.bin), where a person asks for it: a pickle is a program that runs when it
is read.

`torch.load(weights_only=True)` reads tensors and plain containers and refuses everything else; nothing else is used here.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

from localspec.errors import ModelFileError, UsageError
from localspec.gguf_format import clip

PATTERNS = ("*.bin", "*.pt", "*.pth")

#: torch's names of types -> those of safetensors; the bytes of the last are taken through whole numbers
_KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def files(folder: Path) -> list[Path]:
    """The pickles of a checkpoint's directory; what a trainer keeps for itself is not among them."""
    found = sorted(p for pattern in PATTERNS for p in folder.glob(pattern))
    weights = [p for p in found if p.name.startswith(("pytorch_model", "model", "consolidated"))]
    return weights or [p for p in found if not p.name.startswith(("trainer", "training", "optimizer", "scheduler", "rng"))]


def read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor by its name, as safetensors gives them. Raises ModelFileError for a pickle that
    holds anything but tensors, UsageError where PyTorch is not installed."""
    try:
        import torch
    except ImportError as error:
        from localspec.train import INSTALL

        raise UsageError(f"PyTorch can't be imported ({error}), and a pickle needs it: {INSTALL}") from None
    shown = clip(str(path), 400)
    try:
        with warnings.catch_warnings(action="ignore"):  # of old pickle protocols
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelFileError(
            f"{shown} is refused: it is damaged, or holds more than tensors, which would be run when it is read; ask for "
            "it as safetensors"
        ) from None
    except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ModelFileError(f"{shown} can't be read: {clip(reason, 200)}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not (isinstance(loaded, dict) and loaded and all(isinstance(v, torch.Tensor) for v in loaded.values())):
        raise ModelFileError(f"{shown} holds no tensors by name")
    out: dict[str, tuple[str, list[int], bytes]] = {}
    for name, tensor in loaded.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        plain = tensor.detach().contiguous()
        raw = plain.view(torch.int16) if kind == "bfloat16" else plain
        data = raw.numpy().tobytes() if kind in _KINDS else b""  # the reader names a type that it doesn't know
        out[str(name)] = (_KINDS.get(kind, kind), list(tensor.shape), data)
    return out
