"""The likeliest tokens of many rows of logits at once, with what their probabilities need: the teacher's view.

By native/verify, threaded and without the interpreter's lock; `reference` and a checkout without the extension use numpy.
Both give the same bits.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import accept_reference as twin
from localspec.errors import NativeError, UsageError

_verify: Any
try:
    _verify = importlib.import_module("localspec._verify")
except ImportError:  # a checkout that was not built
    _verify = None

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Tops:
    """For each of m rows the k largest logits: ids i32[m, k] by rank (of equals the lower id first), logits f32[m, k], and
    the logarithm of the sum of all exponentials of the row, lse f32[m]. Where a row has fewer numbers, -inf with id 0."""

    ids: I32
    logits: F32
    lse: F32


def top_k(logits: F32, k: int, reference: bool = False) -> Tops:
    """The k largest of each row of logits, f32[m, V], C-contiguous; NaN and -inf are passed over.

    Raises UsageError unless 1 <= k <= V, NativeError for a row without a finite largest logit.
    """
    if not (logits.ndim == 2 and logits.dtype == np.float32 and logits.flags.c_contiguous):
        raise UsageError(f"logits must be C-contiguous float32 [rows, vocabulary], not {logits.dtype} {list(logits.shape)}")
    m, n_vocab = logits.shape
    if not 1 <= k <= n_vocab:
        raise UsageError(f"the {k} likeliest of a vocabulary of {n_vocab} tokens can't be had")
    ids, below = np.empty((m, k), np.int32), np.empty((m, k), np.float32)
    largest, log_sum = np.empty(m, np.float32), np.empty(m, np.float32)
    if reference or _verify is None:
        _reference(logits, k, ids, below, largest, log_sum)
    else:
        bad = _verify.top_k(logits, n_vocab, k, ids, below, largest, log_sum)
        if bad is not None:
            twin.largest(logits[bad], bad)
            raise NativeError(f"row {bad} of the logits has no largest finite value: the model's output can't be used")
    return Tops(ids, below + largest[:, None], log_sum + largest)


def _reference(logits: F32, k: int, ids: I32, below: F32, largest: F32, log_sum: F32) -> None:
    for i, row in enumerate(logits):
        top = twin.largest(row, i)
        numbers = np.where(np.isnan(row), -np.inf, row).astype(np.float32)
        order = np.argsort(-numbers, kind="stable")[:k]
        there = numbers[order] > -np.inf
        ids[i] = np.where(there, order, 0)
        below[i] = np.where(there, numbers[order] - top, -np.inf)
        largest[i] = top
        log_sum[i] = twin.log(np.array([_sum_exp(numbers - top)]))[0]


_EXP_TERMS = [np.float32(1.0 / f) for f in (5040, 720, 120, 24, 6, 2, 1, 1)]
_SHIFT = np.float32(1.5 * 2**23)


def _sum_exp(x: F32) -> float:
    """The sum of e^x, x <= 0, in single precision and in the vector code's order: 16 running sums, then pairwise."""
    x = np.where(x >= np.float32(-87), x, np.float32(-np.inf))
    inside = x > -np.inf
    x = np.where(inside, x, np.float32(0))
    shifted = x * np.float32(float.fromhex("0x1.715476p+0")) + _SHIFT
    n = shifted - _SHIFT
    r = (x - n * np.float32(float.fromhex("0x1.62e4p-1"))) - n * np.float32(float.fromhex("0x1.7f7d1cp-20"))
    p = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = p * r + term
    scale = ((shifted.view(np.int32) + np.int32(127)) << 23).view(np.float32)
    lanes = np.zeros((-(-len(x) // 16), 16), np.float32)
    lanes.reshape(-1)[: len(x)] = np.where(inside, p * scale, np.float32(0))
    sums = np.cumsum(lanes, axis=0, dtype=np.float32)[-1].astype(np.float64)
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return float(sums[0])
