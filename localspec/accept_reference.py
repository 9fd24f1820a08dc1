"""The numpy twin of native/verify: one row of logits at a time, slow and readable. The two agree bit for bit.

**Filters**, in llama.cpp's order: penalties, top-k, top-p, min-p, temperature. Candidates are ranked by logit, largest
first, the lower id first among equals. What is left of a row is a `Kept`: ids and weights exp((logit - max) / T).

**Random numbers** are counter-based. mix(x) is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", 2014) applied to x + G, G = 0x9E3779B97F4A7C15, all modulo 2^64:

    key  = mix(mix(mix(mix(seed) + sequence) + position) + stream)
    bits = mix(key + token * G)                                           so a row is one SplitMix64 sequence
    u    = ((bits >> 12) + 1/2) / 2^52                                    strictly inside (0, 1), exact in a double
    E    = -log(u)                                                        standard exponential; g = -log(E) is Gumbel

**Drawing**: argmax(log w + g) = argmax(w / E): the Gumbel-max trick without its second logarithm, and the form used here.
What comes first in rank wins a tie.

**Exactness**: `log` and `exp` are polynomials over IEEE additions and multiplications in one fixed order, sums run in one
fixed order, and nothing is contracted into fused operations; so every instruction set gives the same bits as numpy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.errors import NativeError

if TYPE_CHECKING:
    from localspec.accept import Sampling

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# Streams: what a number is for. Two streams at one position are independent.
TOKEN, ACCEPT, RESIDUAL, DRAFT = range(4)

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 33 bits: n * _LN2_HIGH is exact for |n| < 2^20
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_EXP_LOWEST = -708.0  # below, exp counts as 0: nothing there is ever drawn
_EXP_TERMS = [1.0 / math.factorial(n) for n in range(13, -1, -1)]
_LOG_TERMS = [2.0 / (2 * n + 1) for n in range(10, -1, -1)]


class Kept(NamedTuple):
    """What is left of a row: ids i64[n] by rank (or all of them by id), weights f64[n] not normalised, their sum."""

    ids: I64
    weights: F64
    total: float

    def probability(self, token: int) -> float:
        """Of one token; 0 where the filters removed it."""
        at = np.flatnonzero(self.ids == token)
        return float(self.weights[at[0]]) / self.total if len(at) else 0.0


# -- random numbers -----------------------------------------------------------------------------------------------------


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def row_key(seed: int, sequence: int, position: int, stream: int) -> int:
    """The key of one row's numbers; its parts are taken modulo 2^64."""
    return _mix_int(_mix_int(_mix_int(_mix_int(seed & _MASK) + sequence) + position) + stream)


def uniforms(key: int, ids: I64) -> F64:
    """u in (0, 1) for each token id: f64[n]."""
    bits = _mix(np.uint64(key) + ids.astype(np.uint64) * np.uint64(_GOLDEN))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def log(x: F64) -> F64:
    """Natural logarithm of normal positive numbers: 2 atanh((m - 1) / (m + 1)) + e ln 2, m in [1/sqrt 2, sqrt 2)."""
    bits = x.view(np.int64)
    e = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(np.float64)
    high = m >= float.fromhex("0x1.6a09e667f3bcdp+0")
    m = np.where(high, m * 0.5, m)
    e = (e + high).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = np.full_like(z, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        p = p * z + term
    return (s * p + e * _LN2_LOW) + e * _LN2_HIGH


def exp(x: F64) -> F64:
    """e^x for x <= 0; 0 below -708 and for NaN."""
    inside = x >= _EXP_LOWEST
    x = np.where(inside, x, 0.0)
    n = np.rint(x * _LOG2_E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = p * r + term
    scale = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(inside, p * scale, 0.0)


def lane_sum(x: F64) -> float:
    """Sum as eight running sums (element i goes to sum i mod 8), then pairwise: the order of the vector code."""
    lanes = np.zeros((-(-len(x) // 8), 8))
    lanes.reshape(-1)[: len(x)] = x
    s = lanes.cumsum(axis=0)[-1]
    return float(((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])))


def race(key: int, ids: I64, weights: F64) -> int:
    """Index of the winner: argmax(weights / E)."""
    return int(np.argmax(weights / -log(uniforms(key, ids))))


# -- filters ------------------------------------------------------------------------------------------------------------


def penalised(row: npt.NDArray[np.float32], s: Sampling, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The row after repeat, frequency and presence penalties for `tokens` (the history and the drafted tokens before it).

    In float32, as llama.cpp has it. Ids that this vocabulary lacks are passed over.
    """
    if not s.needs_history:
        return row
    window = tokens if s.penalty_last_n < 0 else tokens[-s.penalty_last_n :]
    ids, counts = np.unique(window[(window >= 0) & (window < len(row))], return_counts=True)
    row = row.copy()
    x = row[ids]
    repeat = np.float32(s.repeat_penalty)
    x = np.where(x > 0, x / repeat, x * repeat)
    row[ids] = x - (counts.astype(np.float32) * np.float32(s.frequency_penalty) + np.float32(s.presence_penalty))
    return row


def largest(row: npt.NDArray[np.float32], at: int) -> np.float32:
    """Largest logit, NaN passed over. Raises NativeError where it is infinite; `at` is the row's number, for the message."""
    top = np.fmax.reduce(row)
    if not np.isfinite(top):
        raise NativeError(f"row {at} of the logits has no largest finite value ({top}): the model's output can't be used")
    return np.float32(top)


def argmax(row: npt.NDArray[np.float32], at: int) -> int:
    """The lowest id among the largest logits."""
    return int(np.argmax(row == largest(row, at)))


def kept(row: npt.NDArray[np.float32], s: Sampling, at: int) -> Kept:
    """Filter a penalised row: f32[V] to its candidates. For temperature > 0."""
    top = float(largest(row, at))
    n_vocab = len(row)
    inverse = 1.0 / max(s.temperature, 1e-30)
    limited = 0 < s.top_k < n_vocab
    if not limited and s.top_p >= 1.0 and s.min_p <= 0.0:
        weights = exp((row.astype(np.float64) - top) * inverse)
        return Kept(np.arange(n_vocab), weights, lane_sum(weights))

    x = np.where(np.isnan(row), np.float32(-np.inf), row)
    lowest = np.partition(x, n_vocab - s.top_k)[n_vocab - s.top_k] if limited else -np.inf
    ids = np.flatnonzero((x >= lowest) & (x > -np.inf))
    ids = ids[np.argsort(-x[ids], kind="stable")]  # stable: the lower id first
    if limited:
        ids = ids[: s.top_k]
    below = x[ids].astype(np.float64) - top
    n = len(ids)
    if s.top_p < 1.0:
        weights = exp(below)
        running = np.cumsum(weights)
        total = float(running[-1]) if limited else lane_sum(exp(row.astype(np.float64) - top))
        n = min(n, int(np.searchsorted(running, s.top_p * total)) + 1)
    if s.min_p > 0.0:
        n = min(n, int(np.count_nonzero(below >= log(np.array([s.min_p]))[0])))
    weights = exp(below[:n] * inverse)
    return Kept(ids[:n], weights, float(np.cumsum(weights)[-1]))


# -- the two rules ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What one row decides: the drafted token's probability, whether it is kept, and else the token in its place."""

    p_drafted: float
    accepted: bool
    token: int


class Key(NamedTuple):
    """Where a row stands: sampling seed, sequence, absolute position of the token it produces."""

    seed: int
    sequence: int
    position: int

    def stream(self, stream: int) -> int:
        """Key of one stream's numbers."""
        return row_key(*self, stream)


def judge(
    row: npt.NDArray[np.float32],
    s: Sampling,
    key: Key,
    rule: str,
    drafted: int | None,
    q: tuple[I64, F64] | None,
    at: int,
) -> Row:
    """Judge one drafted token on a penalised row, or (drafted None) produce the row's token.

    `q` are ids and probabilities of the distribution that the drafted token came from; None: a point mass on it.
    """
    if s.greedy:
        token = argmax(row, at)
        return Row(float(token == drafted), token == drafted, token)
    have = kept(row, s, at)
    p = 0.0 if drafted is None else have.probability(drafted)
    if rule == "match" or drafted is None:
        token = int(have.ids[race(key.stream(TOKEN), have.ids, have.weights)])
        return Row(p, token == drafted, token)
    q_ids, q_probs = q if q is not None else (np.array([drafted]), np.ones(1))
    q_drafted = float(q_probs[q_ids == drafted][0])
    u = float(uniforms(key.stream(ACCEPT), np.zeros(1, np.int64))[0])
    if u * q_drafted < p:
        return Row(p, True, drafted)
    place = dict(zip(q_ids.tolist(), q_probs.tolist()))
    q_here = np.array([place.get(token, 0.0) for token in have.ids.tolist()])
    residual = np.maximum(have.weights / have.total - q_here, 0.0)
    if not residual.any():
        residual = have.weights
    return Row(p, False, int(have.ids[race(key.stream(RESIDUAL), have.ids, residual)]))


def judge_several(
    row: npt.NDArray[np.float32], s: Sampling, key: Key, drafted: list[int], q: tuple[I64, F64], at: int
) -> tuple[int, int]:
    """Rejection sampling with several candidates, drawn from q one after another without replacement, on a penalised row:
    (which of them is kept, -1 for none; the token). For temperature > 0.

    Each is judged as if it were the only one, against what the refused ones before it left of p and of q: p becomes
    max(p - q, 0), q loses the token, both are scaled to sum to 1 (SpecInfer, Miao et al., 2024; Yang et al.,
    "Multi-candidate speculative decoding", 2024). With one candidate it is `judge`.
    """
    have = kept(row, s, at)
    p = have.weights / have.total
    ids, left = q[0], q[1].copy()
    numbers = uniforms(key.stream(ACCEPT), np.arange(len(drafted)))
    places = {token: i for i, token in enumerate(have.ids.tolist())}
    for i, token in enumerate(drafted):
        place = np.flatnonzero(ids == token)[0]
        mine = p[places[token]] if token in places else 0.0
        if float(numbers[i]) * float(left[place]) < mine:
            return i, token
        of = dict(zip(ids.tolist(), left.tolist()))
        residual = np.maximum(p - np.array([of.get(each, 0.0) for each in have.ids.tolist()]), 0.0)
        p = residual if residual.any() else p
        left[place] = 0.0
        if i + 1 < len(drafted):
            p = p / p.sum()
            left = left / left.sum()
    return -1, int(have.ids[race(key.stream(RESIDUAL), have.ids, p)])


def draw_several(
    s: Sampling, key: Key, rule: str, place: int, ids: I64, probs: F64, n: int
) -> tuple[I64, F64]:
    """The first n of a race (Gumbel-top-k: tokens drawn one after another without replacement, Kool et al., 2019), and each
    one's share of all finishing speeds: how clear its lead is. `place` numbers the places of a tree, 0 its root.

    match: with the noise of the target's token, wherever in the tree. reject: with noise of the place's own, since what was
    drawn at one must not tell anything about another.
    """
    if s.greedy:
        order = np.argsort(-probs, kind="stable")[:n]
        return ids[order], probs[order]
    stream = TOKEN if rule == "match" else DRAFT + 4 * place
    speed = probs / -log(uniforms(key.stream(stream), ids))
    order = np.argsort(-speed, kind="stable")[:n]
    return ids[order], (speed / speed.sum() if rule == "match" else probs)[order]


def draw(
    row: npt.NDArray[np.float32], s: Sampling, key: Key, rule: str, at: int
) -> tuple[int, float, I64, F64]:
    """Draw from a penalised row: token, its probability, and the distribution (ids ascending, probabilities > 0)."""
    if s.greedy:
        token = argmax(row, at)
        weights = exp(row.astype(np.float64) - float(row[token]))
        return token, 1.0 / lane_sum(weights), np.array([token]), np.ones(1)
    have = kept(row, s, at)
    winner = race(key.stream(TOKEN if rule == "match" else DRAFT), have.ids, have.weights)
    probs = have.weights / have.total
    order = np.argsort(have.ids)
    order = order[have.weights[order] > 0.0]
    return int(have.ids[winner]), float(probs[winner]), have.ids[order], probs[order]
