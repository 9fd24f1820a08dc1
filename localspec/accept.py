"""Accept or reject drafted tokens, and draw new ones: the types, the checks, and the dispatch to native/verify.

Two rules (DESIGN.md). Both keep the target's distribution; at temperature 0 both keep a token iff it is the argmax.

- ``match``: the target's token at a position is argmax(log p + g), with g the Gumbel noise of that position; a drafted
  token is kept iff it is that token. A drafter that draws with the same noise agrees often (Daliri, Musco, Suresh, "Coupling
  without communication and drafter-invariant speculative decoding", 2024). The text does not depend on the drafter.
- ``reject``: speculative rejection sampling (Leviathan et al.; Chen et al., 2023): accept with min(1, p/q), else sample what
  max(p - q, 0) leaves.

Filters, random numbers and the exact arithmetic are written down in accept_reference.py, the numpy twin of the extension;
without the extension it serves in its place.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence as Seq
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

RULES = ("match", "reject")


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request's sampling settings; the defaults are llama.cpp's. Raises UsageError for values out of range."""

    temperature: float = 0.8  # 0 or less: greedy
    top_k: int = 40  # 0 or less: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64  # tokens that the penalties look at; -1: the whole context, 0: none
    seed: int = 0

    def __post_init__(self) -> None:
        for name, flag, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:  # NaN is neither
                raise UsageError(f"{flag} must be between {low:g} and {high:g}, not {value}")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"--seed must be between 0 and 2^64 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        """No sampling: the largest logit."""
        return self.temperature <= 0.0

    @property
    def needs_history(self) -> bool:
        """A penalty is on."""
        return self.penalty_last_n != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


_RANGES = (
    ("temperature", "--temp", -1e6, 1e6),
    ("top_k", "--top-k", -(2**31), 2**31 - 1),
    ("top_p", "--top-p", 0, 1),
    ("min_p", "--min-p", 0, 1),
    ("repeat_penalty", "--repeat-penalty", 1e-3, 1e3),
    ("presence_penalty", "--presence-penalty", -1e3, 1e3),
    ("frequency_penalty", "--frequency-penalty", -1e3, 1e3),
    ("penalty_last_n", "--repeat-last-n", -1, 2**31 - 1),
)


@dataclass(slots=True)
class Draft:
    """What a drafter proposes for one sequence: k tokens, k may be 0.

    The draft distribution is sparse, position i owning [q_starts[i], q_starts[i+1]); absent, it is a point mass on
    `tokens`. Only `reject` reads it: each drafted token must be among its position's ids, no id twice, the sum 1.
    """

    tokens: I32  # [k]
    confidence: F32  # [k]
    q_ids: I32 | None = None  # [nnz]
    q_probs: F32 | None = None  # [nnz]
    q_starts: I32 | None = None  # [k+1]

    @classmethod
    def empty(cls) -> Draft:
        """Nothing drafted."""
        return cls(_NO_TOKENS, _NO_PROBS)

    def first(self, n: int) -> Draft:
        """Its first n tokens."""
        if self.q_starts is None or self.q_ids is None or self.q_probs is None:
            return Draft(self.tokens[:n], self.confidence[:n])
        end = int(self.q_starts[n])
        return Draft(self.tokens[:n], self.confidence[:n], self.q_ids[:end], self.q_probs[:end], self.q_starts[: n + 1])


@dataclass(slots=True)
class Block:
    """One sequence's part of a verification: k drafted tokens, k + 1 rows."""

    sequence: int  # the key for random numbers, not the cache slot
    position: int  # absolute position of the token that row 0 produces
    draft: Draft
    sampling: Sampling
    history: I32  # the tokens before `position`, in order; may be empty when no penalty is on


@dataclass(slots=True)
class Verdict:
    """What became of a block.

    `tokens` are the accepted drafts and one new token. An end-of-generation token is the last one kept: where that is an
    accepted draft, there is no new token and len(tokens) == n_accepted.
    """

    n_drafted: int
    n_accepted: int
    tokens: I32
    p_drafted: F32  # [n_drafted] the target's probability of each drafted token; NaN where the row was not judged
    stop: str | None  # "eog" or None


@dataclass(slots=True)
class Drawn:
    """One token per row. `probs`: its probability under the filtered distribution; greedy: at temperature 1, unfiltered.

    The filtered distributions are sparse as in `Draft`, ids ascending within a row; greedy: a point mass.
    """

    tokens: I32  # [m]
    probs: F32  # [m]
    q_ids: I32 | None = None
    q_probs: F32 | None = None
    q_starts: I32 | None = None  # [m+1]


_NO_TOKENS = np.zeros(0, np.int32)
_NO_PROBS = np.zeros(0, np.float32)


def verify(
    logits: F32, blocks: Seq[Block], rule: str = "match", eog: npt.NDArray[Any] | None = None, reference: bool = False
) -> list[Verdict]:
    """Judge every block in one call.

    logits: f32[m, V], C-contiguous, rows in block order, m = sum(k_i + 1); read in place, never written to.
    eog: bool or uint8 [V], the end-of-generation tokens. reference: use numpy although the extension is there.

    Raises UsageError for arguments that don't fit together, NativeError for a row without a finite largest logit. NaN
    logits count as -inf.
    """
    n_vocab = _check_logits(logits, rule)
    end = _check_eog(eog, n_vocab)
    work = _Work.of_blocks(blocks, n_vocab, rule)
    if work.n_rows != len(logits):
        raise UsageError(f"{len(blocks)} blocks need {work.n_rows} rows of logits, there are {len(logits)}")
    tokens = np.empty(work.n_rows, np.int32)
    p_drafted = np.full(work.n_rows, np.nan, np.float32)
    counts = np.empty((len(blocks), 3), np.int32)  # accepted, kept, stopped
    if reference or _verify is None:
        _verify_reference(logits, work, rule, end, tokens, p_drafted, counts)
    else:
        _native(
            _verify.verify, logits, n_vocab, work.packed, work.tokens, work.history, work.q_ids, work.q_probs,
            work.q_starts, RULES.index(rule), end, tokens, p_drafted, counts,
        )  # fmt: skip
    verdicts = []
    at = 0
    for block, (n_accepted, n_kept, stopped) in zip(blocks, counts.tolist()):
        k = len(block.draft.tokens)
        verdicts.append(
            Verdict(k, n_accepted, tokens[at : at + n_kept], p_drafted[at : at + k], "eog" if stopped else None)
        )
        at += k + 1
    return verdicts


def draw(
    logits: F32,
    sequences: Seq[int],
    positions: Seq[int],
    samplings: Seq[Sampling],
    histories: Seq[I32],
    rule: str = "match",
    with_q: bool = False,
    reference: bool = False,
) -> Drawn:
    """Draw one token from each row of logits, f32[m, V]: what a drafter, or plain decoding, does.

    match: with the noise that `verify` uses, so that drawing from a target's row gives the token that `verify` would give
    for an empty draft. reject: with noise of its own. Raises as `verify` does.
    """
    n_vocab = _check_logits(logits, rule)
    m = len(logits)
    if not len(sequences) == len(positions) == len(samplings) == len(histories) == m:
        raise UsageError(
            f"{m} rows of logits with {len(sequences)} sequences, {len(positions)} positions, {len(samplings)} settings "
            f"and {len(histories)} histories"
        )
    draft = Draft.empty()
    blocks = [Block(a, b, draft, c, d) for a, b, c, d in zip(sequences, positions, samplings, histories)]
    work = _Work.of_blocks(blocks, n_vocab, rule)
    tokens = np.empty(m, np.int32)
    probs = np.empty(m, np.float32)
    drawn = Drawn(tokens, probs)
    room = sum(_most_kept(s, n_vocab) for s in samplings) if with_q else 0
    q_ids, q_probs, q_starts = np.empty(room, np.int32), np.empty(room, np.float32), np.zeros(m + 1, np.int32)
    if reference or _verify is None:
        _draw_reference(logits, work, rule, with_q, tokens, probs, q_ids, q_probs, q_starts)
    else:
        _native(
            _verify.draw, logits, n_vocab, work.packed, work.history, RULES.index(rule), with_q, tokens, probs, q_ids,
            q_probs, q_starts,
        )  # fmt: skip
    if with_q:
        n = int(q_starts[-1])
        drawn.q_ids, drawn.q_probs, drawn.q_starts = q_ids[:n], q_probs[:n], q_starts
    return drawn


def _most_kept(s: Sampling, n_vocab: int) -> int:
    """The most ids that a row's filtered distribution can hold."""
    if s.greedy:
        return 1
    return s.top_k if 0 < s.top_k < n_vocab else n_vocab


# -- checks -------------------------------------------------------------------------------------------------------------


def _check_logits(logits: F32, rule: str) -> int:
    if rule not in RULES:
        raise UsageError(f"the accept rule is 'match' or 'reject', not '{rule}'")
    if not (logits.ndim == 2 and logits.dtype == np.float32 and logits.flags.c_contiguous):
        raise UsageError(f"logits must be C-contiguous float32 [rows, vocabulary], not {logits.dtype} {list(logits.shape)}")
    if not 0 < logits.shape[1] < 1 << 31:
        raise UsageError(f"logits have a vocabulary of {logits.shape[1]} tokens")
    return logits.shape[1]


def _check_eog(eog: npt.NDArray[Any] | None, n_vocab: int) -> npt.NDArray[np.uint8] | None:
    if eog is None:
        return None
    if eog.dtype.itemsize != 1 or eog.shape != (n_vocab,) or not eog.flags.c_contiguous:
        raise UsageError(f"eog must be bool or uint8 [{n_vocab}], not {eog.dtype} {list(eog.shape)}")
    return eog


def _flat(parts: list[npt.NDArray[Any]], dtype: Any, what: str) -> npt.NDArray[Any]:
    """One array out of 1-D arrays of one dtype. A single one is passed on as it is, which is the usual case."""
    for part in parts:
        if part.dtype != dtype or part.ndim != 1:
            raise UsageError(f"{what} must be {np.dtype(dtype)} [n], not {part.dtype} {list(part.shape)}")
    if len(parts) == 1 and parts[0].flags.c_contiguous:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


@dataclass(slots=True)
class _Work:
    """Blocks as flat arrays, checked: what both the extension and the numpy twin work on.

    `packed`: one `_RECORD` per block. `q_starts` holds k + 1 indices into `q_ids` for each block that has a distribution.
    """

    blocks: Seq[Block]
    n_rows: int
    packed: bytes
    tokens: I32
    history: I32
    q_ids: I32
    q_probs: F32
    q_starts: I32

    @classmethod
    def of_blocks(cls, blocks: Seq[Block], n_vocab: int, rule: str) -> _Work:
        records = []
        with_q: list[Draft] = []
        n_rows = 0
        for block in blocks:
            draft, s = block.draft, block.sampling
            k = len(draft.tokens)
            has_q = rule == "reject" and draft.q_ids is not None and k > 0 and not s.greedy
            if has_q:
                with_q.append(draft)
            n_history = len(block.history) if s.needs_history else 0
            n_rows += k + 1
            records.append(
                _RECORD.pack(
                    block.sequence & _U64, block.position & _U64, s.seed, k, n_history, has_q, s.top_k, s.penalty_last_n,
                    s.temperature, s.top_p, s.min_p, s.repeat_penalty, s.presence_penalty, s.frequency_penalty,
                )
            )  # fmt: skip
        tokens = _flat([b.draft.tokens for b in blocks], np.int32, "drafted tokens")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < n_vocab):
            bad = tokens[(tokens < 0) | (tokens >= n_vocab)][0]
            raise UsageError(f"drafted token {bad} is not in the target's vocabulary of {n_vocab} tokens")
        history = [b.history for b in blocks if b.sampling.needs_history]
        work = cls(blocks, n_rows, b"".join(records), tokens, _flat(history, np.int32, "history") if history else _NO_TOKENS,
                   _NO_TOKENS, _NO_PROBS, _NO_TOKENS)
        if with_q:
            work._take_q(with_q)
        return work

    def _take_q(self, drafts: list[Draft]) -> None:
        starts = []
        offset = 0
        for draft in drafts:
            ids, probs, start = draft.q_ids, draft.q_probs, draft.q_starts
            if ids is None or probs is None or start is None:
                raise UsageError("a draft distribution needs q_ids, q_probs and q_starts")
            if len(start) != len(draft.tokens) + 1 or start[0] != 0 or start[-1] != len(ids) or (np.diff(start) < 0).any():
                raise UsageError(f"q_starts must rise from 0 to {len(ids)} in {len(draft.tokens) + 1} steps")
            if len(probs) != len(ids):
                raise UsageError(f"{len(ids)} q_ids with {len(probs)} q_probs")
            starts.append(start + offset)
            offset += len(ids)
        self.q_ids = _flat([d.q_ids for d in drafts if d.q_ids is not None], np.int32, "q_ids")
        self.q_probs = _flat([d.q_probs for d in drafts if d.q_probs is not None], np.float32, "q_probs")
        self.q_starts = _flat(starts, np.int32, "q_starts")
        sizes = np.concatenate([np.diff(start) for start in starts])
        _check_q(np.concatenate([d.tokens for d in drafts]), self.q_ids, self.q_probs, sizes)


_U64 = (1 << 64) - 1
# Native order, 8 bytes each, as native/verify/accept.h declares it.
_RECORD = struct.Struct("=QQQqqqqqdddddd")


def _check_q(tokens: I32, ids: I32, probs: F32, sizes: I32) -> None:
    """Hold the draft distributions of all drafted tokens, one after another with these sizes, against what `Draft` says."""
    present = np.flatnonzero(ids == np.repeat(tokens, sizes))
    place = np.repeat(np.arange(len(tokens), dtype=np.int64), sizes)
    missing = np.setdiff1d(np.arange(len(tokens)), place[present])
    if len(missing):
        raise UsageError(f"drafted token {tokens[missing[0]]} is not in its own draft distribution")
    pairs = (place << 32) + ids
    if not (np.diff(pairs) > 0).all() and not (np.diff(np.sort(pairs)) > 0).all():
        raise UsageError("a draft distribution names an id twice")
    sums = np.add.reduceat(probs, np.cumsum(sizes) - sizes, dtype=np.float64)
    wrong = ~(np.abs(sums - 1.0) <= 1e-3)
    if wrong.any() or probs.min() < 0:
        raise UsageError(f"a draft distribution must not be negative and must sum to 1, not {sums[np.argmax(wrong)]:.6g}")


# -- the extension, and numpy in its place ------------------------------------------------------------------------------


def _native(function: Any, *arguments: Any) -> None:
    """Call the extension. It answers None, or the number of a row whose largest logit is not finite."""
    bad = function(*arguments)
    if bad is not None:
        twin.largest(arguments[0][bad], bad)
        raise NativeError(f"row {bad} of the logits has no largest finite value: the model's output can't be used")


def _tokens_before(block: Block, i: int) -> I32:
    """History and drafted tokens before row i."""
    if not block.sampling.needs_history:
        return _NO_TOKENS
    return np.concatenate([block.history, block.draft.tokens[:i]])


def _verify_reference(
    logits: F32, work: _Work, rule: str, eog: npt.NDArray[np.uint8] | None, tokens: I32, p_drafted: F32, counts: I32
) -> None:
    at = 0
    for number, block in enumerate(work.blocks):
        s, draft, k = block.sampling, block.draft, len(block.draft.tokens)
        n_accepted = n_kept = stopped = 0
        for i in range(k + 1):
            row = twin.penalised(logits[at + i], s, _tokens_before(block, i))
            key = twin.Key(s.seed, block.sequence, block.position + i)
            drafted = int(draft.tokens[i]) if i < k else None
            q = None
            if drafted is not None and draft.q_ids is not None and draft.q_probs is not None and draft.q_starts is not None:
                here = slice(draft.q_starts[i], draft.q_starts[i + 1])
                q = draft.q_ids[here].astype(np.int64), draft.q_probs[here].astype(np.float64)
            ruled = twin.judge(row, s, key, rule, drafted, q, at + i)
            if drafted is not None:
                p_drafted[at + i] = ruled.p_drafted
            tokens[at + i] = ruled.token
            n_kept += 1
            n_accepted += ruled.accepted
            stopped = int(eog is not None and bool(eog[ruled.token]))
            if stopped or not ruled.accepted:
                break
        counts[number] = n_accepted, n_kept, stopped
        at += k + 1


def _draw_reference(
    logits: F32, work: _Work, rule: str, with_q: bool, tokens: I32, probs: F32, q_ids: I32, q_probs: F32, q_starts: I32
) -> None:
    n = 0
    for i, block in enumerate(work.blocks):
        s = block.sampling
        row = twin.penalised(logits[i], s, _tokens_before(block, 0))
        key = twin.Key(s.seed, block.sequence, block.position)
        tokens[i], probs[i], ids, weights = twin.draw(row, s, key, rule, i)
        if with_q:
            q_ids[n : n + len(ids)], q_probs[n : n + len(ids)] = ids, weights
            n += len(ids)
        q_starts[i + 1] = n
