"""Hidden states in few bytes: normalised, rotated, rounded to 4 or 8 bits, what is too large kept as it is.

A state's dimensions differ in size by two orders of magnitude, and the first token's state is larger still by three. So:

1. every dimension is divided by its own rms over the shard (the training divides by it anyway);
2. rows that are far out (the first tokens of a sample above all) are kept whole in fp16, and so are single values beyond
   six rms, up to a small share;
3. what remains is rotated by a Hadamard matrix over 64 values, which makes it nearly normally distributed (QuaRot, Ashkboos
   et al., 2024, section 3), and rounded in groups of 64 with one fp16 scale each.

Layout for N tokens, taps f32[N, T, H], flattened to T * H values and padded with zeros to B groups of 64:

    taps.q        u8[N, B * 32] two values a byte, the lower half first (q4); i8[N, B * 64] (q8)
    taps.scale    f16[N, B]
    taps.rms      f32[T, H]     by which the dimensions were divided
    taps.row      i32[E]        rows kept whole, ascending
    taps.whole    f16[E, T, H], taps.whole_unit f32[E] the factor that keeps them inside fp16
    taps.far      i32[N + 1]    row n's far values are [far[n], far[n + 1])
    taps.far_at   u16 or u32    where in the row, taps.far_value f16 in rms
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import UsageError

F32 = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

PRECISIONS = ("q4", "q8", "f16", "none")
GROUP = 64
#: Tokens at the beginning of a sample whose states are kept whole: attention rests there, and they are far out.
N_FIRST = 1
_FAR = 6.0  # rms; normally distributed values never get there
_FAR_SHARE = 0.003  # of all values; four bytes each
_ROW_FAR = 60.0  # rms: a row with a value beyond it is kept whole ...
_ROW_SHARE = 0.003  # ... up to this share of the rows, the farthest first
_HALF_MOST = 32768.0


def check_precision(states: str) -> None:
    """Raise UsageError unless `states` is one of PRECISIONS."""
    if states not in PRECISIONS:
        raise UsageError(f"--states {states}: one of {', '.join(PRECISIONS)}")


def bytes_per_token(states: str, n_taps: int, n_embd: int) -> float:
    """About how many bytes the states of one token take."""
    values = n_taps * n_embd
    if states == "none":
        return 0.0
    if states == "f16":
        return 2.0 * values + 4.0
    bits = 4 if states == "q4" else 8
    groups = -(-values // GROUP)
    return groups * (GROUP * bits / 8 + 2) + 4 + 4 * _FAR_SHARE * values + 2 * values * _ROW_SHARE


def rms_of(taps: F32, first: npt.NDArray[np.bool_]) -> F32:
    """f32[T, H]: the size of each dimension over rows that are not a sample's first and not far out."""
    rows = taps[~first] if not first.all() else taps
    typical = np.median(np.abs(rows), axis=0).astype(np.float32) * 1.4826  # of a normal distribution, its deviation
    capped = np.minimum(np.abs(rows), 20.0 * np.where(typical > 0, typical, np.inf))
    rms = np.sqrt(np.mean(np.square(capped, dtype=np.float32), axis=0))
    return np.where(rms > 0, rms, 1.0).astype(np.float32)


def encode(taps: F32, first: npt.NDArray[np.bool_], states: str, rms: F32) -> Arrays:
    """The arrays of the module's layout for taps f32[N, T, H]; `first` bool[N] marks the rows to be kept whole."""
    check_precision(states)
    n, n_taps, n_embd = taps.shape
    if states == "none":
        return {}
    if states == "f16":
        half, unit = _to_half(taps.reshape(n, -1))
        return {"taps.half": half.reshape(taps.shape), "taps.unit": unit}
    values = n_taps * n_embd
    z = np.zeros((n, -(-values // GROUP) * GROUP), np.float32)
    np.divide(taps.reshape(n, -1), rms.reshape(-1), out=z[:, :values])
    whole = np.flatnonzero(first | _far_rows(z))
    half, unit = _to_half(taps[whole].reshape(len(whole), -1))
    z[whole] = 0.0
    far, far_at, far_value = _take_far(z)
    groups = z.reshape(n, -1, GROUP) @ _hadamard()
    scale, q = _round(groups, 8 if states == "q4" else 128)
    if states == "q4":
        nibbles = (q.reshape(n, -1, GROUP) + 8).astype(np.uint8)
        packed = nibbles[:, :, : GROUP // 2] | (nibbles[:, :, GROUP // 2 :] << 4)
    else:
        packed = q.astype(np.int8)
    return {
        "taps.q": packed.reshape(n, -1),
        "taps.scale": scale,
        "taps.rms": rms,
        "taps.row": whole.astype(np.int32),
        "taps.whole": half.reshape(len(whole), n_taps, n_embd),
        "taps.whole_unit": unit,
        "taps.far": far,
        "taps.far_at": far_at.astype(np.uint16 if values <= 1 << 16 else np.uint32),
        "taps.far_value": far_value.astype(np.float16),
    }


def decode(arrays: Mapping[str, npt.NDArray[Any]], states: str, start: int, end: int, n_taps: int, n_embd: int) -> F32:
    """taps f32[end - start, T, H] of rows start to end of what `encode` gave."""
    n, values = end - start, n_taps * n_embd
    if states == "none":
        return np.zeros((n, 0, n_embd), np.float32)
    if states == "f16":
        half = arrays["taps.half"][start:end].astype(np.float32)
        return half * arrays["taps.unit"][start:end, None, None]
    stored = arrays["taps.q"][start:end]
    if states == "q4":
        nibbles = np.empty((n, stored.shape[1] // 32, GROUP), np.float32)
        packed = stored.reshape(n, -1, GROUP // 2)
        nibbles[:, :, : GROUP // 2] = packed & 15
        nibbles[:, :, GROUP // 2 :] = packed >> 4
        nibbles -= 8.0
    else:
        nibbles = stored.view(np.int8).reshape(n, -1, GROUP).astype(np.float32)
    nibbles *= arrays["taps.scale"][start:end, :, None]
    z = (nibbles.reshape(-1, GROUP) @ _hadamard()).reshape(n, -1)
    far = arrays["taps.far"][start : end + 1].astype(np.int64)
    rows = np.repeat(np.arange(n), np.diff(far))
    z[rows, arrays["taps.far_at"][far[0] : far[-1]]] = arrays["taps.far_value"][far[0] : far[-1]]
    taps = z[:, :values] * arrays["taps.rms"].reshape(-1)
    low, high = np.searchsorted(arrays["taps.row"], (start, end))
    whole = arrays["taps.whole"][low:high].reshape(high - low, values).astype(np.float32)
    taps[arrays["taps.row"][low:high] - start] = whole * arrays["taps.whole_unit"][low:high, None]
    return taps.reshape(n, n_taps, n_embd)


@cache
def _hadamard() -> F32:
    """The orthonormal, symmetric Hadamard matrix: its own inverse."""
    h = np.ones((1, 1), np.float32)
    while len(h) < GROUP:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(GROUP)).astype(np.float32)


def _to_half(rows: F32) -> tuple[npt.NDArray[np.float16], F32]:
    """(rows in fp16, the factor f32[n] that each must be multiplied with to be itself again): 1 where it fits."""
    most = np.abs(rows).max(axis=1, initial=0.0)
    unit = np.maximum(1.0, most / _HALF_MOST).astype(np.float32)
    return (rows / unit[:, None]).astype(np.float16), unit


def _far_rows(z: F32) -> npt.NDArray[np.bool_]:
    """Rows with a value beyond _ROW_FAR, the farthest where there are too many."""
    most = np.abs(z).max(axis=1, initial=0.0)
    limit = max(1, int(len(z) * _ROW_SHARE))
    far = most > _ROW_FAR
    if far.sum() > limit:
        far &= most >= np.partition(most, -limit)[-limit]
    return far


def _take_far(z: F32) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], F32]:
    """Take single far values out of z (set to 0): (starts i32[n + 1], place in the row, value)."""
    size = np.abs(z)
    limit = max(1, int(z.size * _FAR_SHARE))
    bound = _FAR
    beyond = size[size > bound]
    if len(beyond) > limit:
        bound = float(np.partition(beyond, -limit)[-limit])
    rows, at = np.nonzero(size > bound)
    values = np.clip(z[rows, at], -65504.0, 65504.0)
    z[rows, at] = 0.0
    starts = np.zeros(len(z) + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=len(z)), out=starts[1:])
    return starts, at, values


def _round(groups: F32, levels: int) -> tuple[npt.NDArray[np.float16], F32]:
    """(scale f16[n, B], whole numbers f32[n, B, GROUP] from -levels to levels - 1): groups are about scale * numbers."""
    high, low = groups.max(axis=2), groups.min(axis=2)
    # The value farthest from 0 becomes -levels: there is one level more on that side.
    scale = (np.where(high >= -low, high, low) / -levels).astype(np.float16)
    used = scale.astype(np.float32)
    inverse = np.divide(1.0, used, out=np.zeros_like(used), where=used != 0)
    q = groups * inverse[:, :, None]
    np.rint(q, out=q)
    np.clip(q, -levels, levels - 1, out=q)
    return scale, q
