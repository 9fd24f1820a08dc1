"""Both rules give the target's distribution whoever drafts: chi-square over 200,000 texts of two tokens.

The texts are sequences of one call, handed to the extension as flat arrays; seeds are fixed, so nothing here is flaky.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import pytest
from scipy import stats

from localspec import _verify
from localspec.accept import RULES, Sampling

N = 200_000
N_VOCAB = 10
RECORD = np.dtype(
    [(name, np.uint64) for name in ("sequence", "position", "seed")]
    + [(name, np.int64) for name in ("k", "n_history", "has_q", "top_k", "penalty_last_n")]
    + [(name, np.float64) for name in ("temperature", "top_p", "min_p", "repeat", "presence", "frequency")]
)


def records(sequences: np.ndarray, position: int, k: int, has_q: bool, s: Sampling) -> np.ndarray:
    r = np.zeros(len(sequences), RECORD)
    r["sequence"], r["position"], r["k"], r["has_q"] = sequences, position, k, has_q
    (r["temperature"], r["top_k"], r["top_p"], r["min_p"], r["repeat"], r["presence"], r["frequency"], r["penalty_last_n"],
     r["seed"]) = astuple(s)  # fmt: skip
    return r


NONE_I, NONE_F = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass
class Proposed:
    """n drafted tokens of one position and the distributions that they came from (None: a point mass)."""

    tokens: np.ndarray  # int32[n]
    q: tuple[np.ndarray, np.ndarray, np.ndarray] | None


def propose(logits: np.ndarray, sequences: np.ndarray, position: int, rule: str, s: Sampling) -> Proposed:
    n, n_vocab = logits.shape
    tokens, probs = np.empty(n, np.int32), np.empty(n, np.float32)
    most = s.top_k if 0 < s.top_k < n_vocab else n_vocab
    ids, q, starts = np.empty(n * most, np.int32), np.empty(n * most, np.float32), np.zeros(n + 1, np.int32)
    bad = _verify.draw(
        logits, n_vocab, records(sequences, position, 0, False, s), NONE_I, RULES.index(rule), True, tokens, probs, ids, q,
        starts,
    )  # fmt: skip
    assert bad is None
    return Proposed(tokens, (ids[: starts[-1]], q[: starts[-1]], starts) if rule == "reject" else None)


def judge(
    rows: list[np.ndarray], proposed: list[Proposed], sequences: np.ndarray, position: int, rule: str, s: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Verify n blocks of k tokens; returns tokens int32[n, k + 1] and counts int32[n, 3]."""
    n, n_vocab = rows[0].shape
    k = len(proposed)
    logits = np.ascontiguousarray(np.stack(rows, axis=1))
    tokens = np.ascontiguousarray(np.stack([p.tokens for p in proposed], axis=1)) if k else NONE_I
    ids, probs, starts = NONE_I, NONE_F, NONE_I
    has_q = k > 0 and proposed[0].q is not None
    if has_q:
        parts = [p.q for p in proposed if p.q is not None]
        # Position by position in memory, block by block in order: sort the pieces by (block, position).
        sizes = np.stack([np.diff(q[2]) for q in parts], axis=1)
        at = np.repeat(np.arange(n * k).reshape(n, k).T.ravel(), sizes.T.ravel())
        order = np.argsort(at, kind="stable")
        ids, probs = np.concatenate([q[0] for q in parts])[order], np.concatenate([q[1] for q in parts])[order]
        ends = np.cumsum(sizes.ravel()).reshape(n, k)
        starts = np.concatenate([(ends[:, :1] - sizes[:, :1]), ends], axis=1).astype(np.int32)
    out, p = np.empty((n, k + 1), np.int32), np.empty((n, k + 1), np.float32)
    counts = np.empty((n, 3), np.int32)
    bad = _verify.verify(
        logits, n_vocab, records(sequences, position, k, has_q, s), tokens, NONE_I, ids, probs, np.ascontiguousarray(starts),
        RULES.index(rule), None, out, p, counts,
    )  # fmt: skip
    assert bad is None
    return out, counts


def expected(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """The filtered distribution of one row, written anew, without regard to speed or rounding."""
    x = logits.astype(np.float64)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if s.top_k > 0:
        order = order[: s.top_k]
    share = np.exp(x[order]) / np.exp(x[order]).sum()
    n = len(order)
    if s.top_p < 1:
        n = next((i + 1 for i, total in enumerate(np.cumsum(share)) if total >= s.top_p), n)
    order = [i for i in order[:n] if np.exp(x[i] - x.max()) >= s.min_p]
    p = np.zeros(len(x))
    p[order] = np.exp(x[order] / s.temperature)
    return p / p.sum()


RNG = np.random.default_rng(2024)
FIRST = RNG.normal(0, 1.2, N_VOCAB).astype(np.float32)
NEXT = RNG.normal(0, 1.2, (N_VOCAB, N_VOCAB)).astype(np.float32)
DRAFTERS = {
    "bad": (-1.5 * FIRST, -1.5 * NEXT),  # likes best what the target likes least
    "good": (FIRST + RNG.normal(0, 0.3, FIRST.shape), NEXT + RNG.normal(0, 0.3, NEXT.shape)),
    "copied": (np.where(np.arange(N_VOCAB) == 3, 0, -1e4), np.where(np.arange(N_VOCAB) == 3, 0, -1e4) + 0 * NEXT),
}
SETTINGS = {
    "plain": Sampling(temperature=0.9, top_k=0, top_p=1, min_p=0, seed=42),
    "filtered": Sampling(temperature=1.3, top_k=7, top_p=0.9, min_p=0.08, seed=43),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
def test_two_tokens_have_the_targets_joint_distribution(rule: str, drafter: str, settings: str) -> None:
    s = SETTINGS[settings]
    q_first, q_next = (x.astype(np.float32) for x in DRAFTERS[drafter])
    # The drafter does not filter: it proposes what the target would never say.
    q_s = Sampling(temperature=s.temperature, top_k=0, top_p=1, min_p=0, seed=s.seed)
    sequences = np.arange(N)
    d0 = propose(np.tile(q_first, (N, 1)), sequences, 5, rule, q_s)
    d1 = propose(q_next[d0.tokens], sequences, 6, rule, q_s)
    if drafter == "copied":
        d0.q = d1.q = None
    out, counts = judge([np.tile(FIRST, (N, 1)), NEXT[d0.tokens], NEXT[d1.tokens]], [d0, d1], sequences, 5, rule, s)
    text = out[:, :2].copy()
    short = np.flatnonzero(counts[:, 1] == 1)  # the first draft was refused: the second token takes another block
    assert len(short) > 0
    before = text[short, 0]
    again = propose(q_next[before], short, 6, rule, q_s)
    if drafter == "copied":
        again.q = None
    text[short, 1] = judge([NEXT[before], NEXT[again.tokens]], [again], short, 6, rule, s)[0][:, 0]

    p = expected(FIRST, s)[:, None] * np.array([expected(row, s) for row in NEXT])
    seen = np.histogram2d(text[:, 0], text[:, 1], bins=N_VOCAB, range=[[0, N_VOCAB]] * 2)[0]
    assert seen[p == 0].sum() == 0
    possible = p > 0
    assert stats.chisquare(seen[possible], p[possible] * N).pvalue > 1e-3
    # The first token by itself: fewer cells, so a small bias shows sooner.
    assert stats.chisquare(seen.sum(axis=1)[p.sum(axis=1) > 0], (p.sum(axis=1) * N)[p.sum(axis=1) > 0]).pvalue > 1e-3


def test_the_check_itself_notices_a_wrong_distribution() -> None:
    """The same statistics over drafts taken as they come must fail, or passing means nothing."""
    s = SETTINGS["plain"]
    q = DRAFTERS["good"][0].astype(np.float32)
    tokens = propose(np.tile(q, (N, 1)), np.arange(N), 5, "reject", s).tokens
    seen = np.bincount(tokens, minlength=N_VOCAB)
    assert stats.chisquare(seen, expected(FIRST, s) * N).pvalue < 1e-6
    assert stats.chisquare(seen, expected(q, s) * N).pvalue > 1e-3


def acceptance(spread: float, rule: str, n: int = 40_000, n_vocab: int = 64) -> tuple[float, float]:
    """(share of drafts kept, total variation distance) for q = p with log-probabilities moved by normal noise."""
    rng = np.random.default_rng(int(1000 * spread))
    p = rng.normal(0, 2, n_vocab).astype(np.float32)
    q = p + rng.normal(0, spread, n_vocab).astype(np.float32)
    s = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)
    rows = np.tile(p, (n, 1))
    drafted = propose(np.tile(q, (n, 1)), np.arange(n), 9, rule, s)
    _, counts = judge([rows, rows], [drafted], np.arange(n), 9, rule, s)
    return float((counts[:, 0] == 1).mean()), 0.5 * float(np.abs(expected(p, s) - expected(q, s)).sum())


@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0, 3.0])
def test_acceptance_is_what_theory_says(spread: float) -> None:
    """reject keeps 1 - TV (Leviathan et al., 2023), match from (1 - TV) / (1 + TV) (Daliri et al., 2024) to 1 - TV."""
    kept, distance = acceptance(spread, "reject")
    error = 4 * np.sqrt(0.25 / 40_000)
    assert abs(kept - (1 - distance)) < error
    shared, _ = acceptance(spread, "match")
    assert (1 - distance) / (1 + distance) - error < shared < 1 - distance + error


def main() -> None:
    """Print the acceptance of both rules (python -m tests.native.test_verify_distribution)."""
    print("spread   1 - TV   reject   match   (1 - TV)/(1 + TV)")
    for spread in (0.1, 0.3, 0.6, 1.0, 2.0, 3.0):
        reject, distance = acceptance(spread, "reject")
        match, _ = acceptance(spread, "match")
        print(f"{spread:6.1f} {1 - distance:8.3f} {reject:8.3f} {match:7.3f} {(1 - distance) / (1 + distance):12.3f}")


if __name__ == "__main__":
    main()
