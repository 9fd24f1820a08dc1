"""What the networks of trained drafts share: their tensors, read out of a GGUF file for native/draft."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import native
from localspec.errors import ModelFileError, NativeError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
#: type, values of a row, rows, bytes, address of ggml's conversion to floats
Matrix = tuple[int, int, int, memoryview, int]

_TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
#: bytes of weights that one drafted token reads, per thread: below that, waking and meeting another costs more than it saves
_BYTES_PER_THREAD = 16 << 20


def matrix(file: GGUFFile, name: str) -> Matrix:
    """A matrix as it is stored. Raises ModelFileError where there is none of that name."""
    info = file.tensors.get(name)
    if info is None or len(info.shape) != 2:
        raise file.error(f"has no matrix {name}, which a draft of this kind needs")
    number = _TYPE_NUMBERS[info.type]
    return number, info.shape[0], info.shape[1], file.tensor_bytes(name), native.to_float_address(number)


def vector(file: GGUFFile, name: str) -> F32:
    """A vector of floats. Raises ModelFileError where there is none of that name."""
    info = file.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.type not in ("F32", "F16"):
        raise file.error(f"has no vector {name} of floats, which a draft of this kind needs")
    return np.frombuffer(file.tensor_bytes(name), "<f4" if info.type == "F32" else "<f2").astype(np.float32)


def target_ids(draft: GGUFFile, n_tokens: int) -> I32:
    """The target's ids i32[Vd] of the draft's vocabulary. Raises ModelFileError for ids that the target does not have."""
    table = draft.tensors.get("d2t")
    if table is None:
        return np.arange(n_tokens, dtype=np.int32)
    ids = np.frombuffer(draft.tensor_bytes("d2t"), "<i8" if table.type == "I64" else "<i4")
    if len(ids) and not (ids.min() >= 0 and ids.max() < n_tokens):
        raise draft.error("has a table of token ids (d2t) that the target does not have; make it for this target")
    return ids.astype(np.int32)


def embedding(draft: GGUFFile, target: GGUFFile, n_embd: int) -> Matrix:
    """The draft's own embedding, or the target's, of the target's tokens. Raises ModelFileError where it is too small."""
    kind, k, rows, data, convert = matrix(draft if "token_embd.weight" in draft.tensors else target, "token_embd.weight")
    n = target.vocab_size
    if rows < n or k != n_embd:
        raise draft.error(f"needs an embedding of {n} tokens, {n_embd} wide; make it for this target")
    return kind, k, n, data[: len(data) // rows * n], convert


def target_head(target: GGUFFile) -> Matrix:
    """What gives the target's logits: its embedding, where it has no head of its own."""
    return matrix(target, "output.weight" if "output.weight" in target.tensors else "token_embd.weight")


def rope_factors(draft: GGUFFile, head_dim: int) -> tuple[int, F32 | None]:
    """How many values of a head rotate, and by what each pair's angle is divided, f32[n / 2]; None: by 1. Raises
    ModelFileError for a scaling that can't be run."""
    n_rot = int(draft.arch("rope.dimension_count", head_dim))
    name = next((n for n in ("rope_freqs.weight", "blk.0.rope_freqs.weight") if n in draft.tensors), None)
    scale = _linear_scale(draft)
    if name is None and scale == 1.0:
        return n_rot, None
    factors = vector(draft, name) if name is not None else np.ones(n_rot // 2, np.float32)
    return n_rot, factors * np.float32(scale)


def threads_for(n_bytes: int, n_threads: int) -> int:
    """How many threads pay for a draft that reads so many bytes at once; `n_threads` 0: as many as there are."""
    return max(1, min(n_threads or native.default_threads(), n_bytes // _BYTES_PER_THREAD))


def extension() -> Any:
    """localspec._draft. Raises NativeError where it was not built."""
    try:
        return importlib.import_module("localspec._draft")
    except ImportError:
        raise NativeError("localspec was installed without its native part: pip install it again") from None


def _linear_scale(file: GGUFFile) -> float:
    kind = file.arch("rope.scaling.type", "none")
    if kind in ("none", ""):
        return 1.0
    if kind != "linear":
        raise ModelFileError(f"{file.path}: scales its rope by {kind}, which drafts here can't; use llama.cpp's own for it")
    return float(file.arch("rope.scaling.factor", 1.0))
