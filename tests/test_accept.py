"""What accept and reject promise: filters as llama.cpp has them, checks, end-of-generation, drafter invariance, noise.

Everything runs on the extension and on its numpy twin; tests/native/test_verify_twin.py holds the two equal in depth.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy import stats

from localspec import accept_reference as twin
from localspec.accept import RULES, Block, Draft, Sampling, draw, verify
from localspec.errors import LocalspecError, UsageError

NOTHING = np.zeros(0, np.int32)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

both = pytest.mark.parametrize("reference", [False, True], ids=["extension", "numpy"])


def row(*logits: float) -> np.ndarray:
    return np.array([logits], np.float32)


def drafted(*tokens: int) -> Draft:
    return Draft(np.array(tokens, np.int32), np.ones(len(tokens), np.float32))


def distribution(logits: np.ndarray, s: Sampling, reference: bool, history: np.ndarray = NOTHING) -> dict[int, float]:
    d = draw(logits, [0], [0], [s], [history], with_q=True, reference=reference)
    assert d.q_ids is not None
    assert d.q_probs is not None
    return dict(zip(d.q_ids.tolist(), d.q_probs.tolist()))


def softmax(*logits: float) -> list[float]:
    e = [math.exp(x) for x in logits]
    return [x / sum(e) for x in e]


# -- filters ------------------------------------------------------------------------------------------------------------


@both
def test_no_filter_is_softmax(reference: bool) -> None:
    got = distribution(row(1, 2, -3, 0.5), Sampling(temperature=0.7, **OFF), reference)
    assert list(got.values()) == pytest.approx(softmax(1 / 0.7, 2 / 0.7, -3 / 0.7, 0.5 / 0.7), rel=1e-6)


@both
def test_top_k_keeps_the_lower_id_among_equals(reference: bool) -> None:
    got = distribution(row(1, 3, 2, 2, 2), Sampling(temperature=1, top_k=3, top_p=1, min_p=0), reference)
    assert list(got) == [1, 2, 3]
    assert list(got.values()) == pytest.approx(softmax(3, 2, 2), rel=1e-6)


@both
def test_top_p_is_taken_over_what_top_k_left_and_before_temperature(reference: bool) -> None:
    x = np.log([0.4, 0.3, 0.2, 0.1])
    # Of all four, 0.75 takes three tokens; of the two that top-k leaves (4/7, 3/7), two; 0.5 takes one.
    settings = {"temperature": 5.0, "min_p": 0.0}
    assert list(distribution(row(*x), Sampling(top_k=0, top_p=0.75, **settings), reference)) == [0, 1, 2]
    assert list(distribution(row(*x), Sampling(top_k=2, top_p=0.75, **settings), reference)) == [0, 1]
    assert list(distribution(row(*x), Sampling(top_k=2, top_p=0.5, **settings), reference)) == [0]
    # At temperature 5 the four are nearly equal: taken after it, 0.75 would have needed all of them.


@both
def test_min_p_is_a_share_of_the_largest(reference: bool) -> None:
    x = np.log([0.5, 0.3, 0.12, 0.08])
    assert list(distribution(row(*x), Sampling(top_k=0, top_p=1, min_p=0.2), reference)) == [0, 1, 2]
    assert list(distribution(row(*x), Sampling(top_k=0, top_p=1, min_p=1.0), reference)) == [0]


@both
def test_penalties(reference: bool) -> None:
    s = Sampling(temperature=1, repeat_penalty=2, frequency_penalty=0.25, presence_penalty=0.5, penalty_last_n=4, **OFF)
    history = np.array([0, 2, 1, 1, 2, 99], np.int32)  # the last four: 1 1 2 and an id that this vocabulary lacks
    got = distribution(row(1, 3, -1, 0), s, reference, history)
    assert list(got.values()) == pytest.approx(softmax(1, 3 / 2 - 1.0, -1 * 2 - 0.75, 0), rel=1e-6)


@both
def test_penalties_count_the_drafted_tokens_before_a_row(reference: bool) -> None:
    s = Sampling(temperature=0, presence_penalty=2)
    logits = np.array([[5, 4, 0]] * 4, np.float32)
    # Row 0: 5 4 0 -> 0. Row 1, after 0: 3 4 0 -> 1. Row 2, after 0 1: 3 2 0 -> 0, drafted was 1.
    verdict = verify(logits, [Block(0, 10, drafted(0, 1, 1), s, NOTHING)], reference=reference)[0]
    assert (verdict.n_accepted, verdict.tokens.tolist()) == (2, [0, 1, 0])
    assert verdict.p_drafted.tolist() == [1, 1, 0]
    with_history = verify(logits, [Block(0, 10, drafted(0, 1, 1), s, np.array([0], np.int32))], reference=reference)[0]
    assert (with_history.n_accepted, with_history.tokens.tolist()) == (0, [1])


# -- rules --------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("rule", RULES)
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(rule: str, reference: bool) -> None:
    logits = np.array([[0, 2, 2], [np.nan, -1, -1], [3, 1, 0]], np.float32)
    verdict = verify(logits, [Block(0, 0, drafted(1, 1), Sampling(temperature=0), NOTHING)], rule, reference=reference)[0]
    assert (verdict.n_drafted, verdict.n_accepted, verdict.tokens.tolist(), verdict.stop) == (2, 2, [1, 1, 0], None)
    verdict = verify(logits, [Block(0, 0, drafted(2, 1), Sampling(temperature=0), NOTHING)], rule, reference=reference)[0]
    assert (verdict.n_accepted, verdict.tokens.tolist()) == (0, [1])
    assert verdict.p_drafted[0] == 0
    assert np.isnan(verdict.p_drafted[1])


@dataclass
class Writer:
    """Writes 60 tokens of a Markov chain (row i: what follows token i) with drafts of one kind."""

    table: np.ndarray
    s: Sampling
    reference: bool
    noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(8))

    def guess(self, text: list[int], kind: str) -> int:
        """A draft for the next token: anything, or drawn from a row like the target's, or from the target's own."""
        if kind == "random":
            return int(self.noise.integers(len(self.table)))
        logits = self.table[text[-1] :][:1]
        if kind == "near":
            logits = logits + self.noise.normal(0, 1, logits.shape).astype(np.float32)
        history = [np.array(text, np.int32)]
        return int(draw(logits, [77], [len(text)], [self.s], history, reference=self.reference).tokens[0])

    def write(self, k: int, kind: str) -> tuple[list[int], int]:
        """(text, number of accepted drafts)"""
        text, n_accepted = [0], 0
        while len(text) < 60:
            proposed: list[int] = []
            for _ in range(k):
                proposed.append(self.guess(text + proposed, kind))
            block = Block(77, len(text), drafted(*proposed), self.s, np.array(text, np.int32))
            verdict = verify(self.table[[text[-1], *proposed]], [block], reference=self.reference)[0]
            text += verdict.tokens.tolist()
            n_accepted += verdict.n_accepted
        return text[:60], n_accepted


@both
@pytest.mark.parametrize(
    "s",
    [
        Sampling(seed=1),
        Sampling(temperature=1.5, seed=2, top_k=0, top_p=1, min_p=0),
        Sampling(temperature=0.7, repeat_penalty=1.2, seed=3),
    ],
    ids=["default", "unfiltered", "penalty"],
)
def test_match_gives_the_same_text_whoever_drafts(s: Sampling, reference: bool) -> None:
    table = np.random.default_rng(4).normal(0, 2, (30, 30)).astype(np.float32)
    writer = Writer(table, s, reference)
    plain, _ = writer.write(0, "none")
    assert len(set(plain)) > 5
    for k in (1, 2, 5):
        for kind in ("random", "near", "same"):
            text, n_accepted = writer.write(k, kind)
            assert text == plain
            if kind == "same":  # every draft is kept
                assert n_accepted >= 59 * k // (k + 1)


@both
def test_blocks_of_many_sequences_do_not_see_each_other(reference: bool) -> None:
    rng = np.random.default_rng(0)
    ks = [0, 3, 1, 0, 4]
    logits = rng.normal(0, 2, (sum(ks) + len(ks), 50)).astype(np.float32)
    blocks, starts, at = [], [], 0
    for i, k in enumerate(ks):
        s = Sampling(seed=i, presence_penalty=0.1 * (i % 2), temperature=0 if i == 3 else 0.9)
        blocks.append(Block(i, 5 * i, drafted(*rng.integers(50, size=k)), s, rng.integers(50, size=i).astype(np.int32)))
        starts.append(at)
        at += k + 1
    for rule in RULES:
        together = verify(logits, blocks, rule, reference=reference)
        for block, start, verdict in zip(blocks, starts, together):
            alone = verify(logits[start : start + len(block.draft.tokens) + 1], [block], rule, reference=reference)[0]
            assert alone.tokens.tolist() == verdict.tokens.tolist()
            assert alone.p_drafted.tobytes() == verdict.p_drafted.tobytes()


@both
@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_kept_after_the_end_of_generation(rule: str, reference: bool) -> None:
    s = Sampling(temperature=0)
    logits = np.eye(4, 6, dtype=np.float32)
    eog = np.zeros(6, bool)
    eog[1] = True
    verdict = verify(logits, [Block(0, 0, drafted(0, 1, 2), s, NOTHING)], rule, eog, reference)[0]
    assert (verdict.n_accepted, verdict.tokens.tolist(), verdict.stop) == (2, [0, 1], "eog")
    assert verdict.p_drafted[:2].tolist() == [1, 1]
    assert np.isnan(verdict.p_drafted[2])
    verdict = verify(logits[:2], [Block(0, 0, drafted(0), s, NOTHING)], rule, eog.view(np.uint8), reference)[0]
    assert (verdict.n_accepted, verdict.tokens.tolist(), verdict.stop) == (1, [0, 1], "eog")
    verdict = verify(logits[:2], [Block(0, 0, drafted(0), s, NOTHING)], rule, None, reference)[0]
    assert verdict.stop is None


@both
def test_reject_with_p_equal_to_q_accepts(reference: bool) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (400, 40)).astype(np.float32)
    keys, s = list(range(200)), Sampling(temperature=1, **OFF)
    d = draw(logits[::2].copy(), keys, [3] * 200, [s] * 200, [NOTHING] * 200, "reject", True, reference)
    assert d.q_starts is not None
    assert d.q_ids is not None
    assert d.q_probs is not None
    blocks = []
    for i in keys:
        a, b = d.q_starts[i], d.q_starts[i + 1]
        q = (d.q_ids[a:b][::-1], d.q_probs[a:b][::-1], np.array([0, b - a], np.int32))  # the order must not matter
        blocks.append(Block(i, 3, Draft(d.tokens[i : i + 1], d.probs[i : i + 1], *q), s, NOTHING))
    assert sum(v.n_accepted for v in verify(logits, blocks, "reject", reference=reference)) == 200


@both
def test_reject_where_p_is_certain_of_the_refused_token(reference: bool) -> None:
    """p lies on one token that q has too: nothing is left of max(p - q, 0), and p itself is what is sampled."""
    logits = np.array([[0, 50], [0, 50]], np.float32)
    s = Sampling(temperature=1, top_k=1, top_p=1, min_p=0)
    for key in range(50):
        verdict = verify(logits, [Block(key, 0, drafted(0), s, NOTHING)], "reject", reference=reference)[0]
        assert (verdict.n_accepted, verdict.tokens.tolist()) == (0, [1])
        verdict = verify(logits, [Block(key, 0, drafted(1), s, NOTHING)], "reject", reference=reference)[0]
        assert (verdict.n_accepted, verdict.tokens.tolist()) == (1, [1, 1])


# -- errors -------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31)])
def test_a_drafted_id_outside_the_vocabulary_is_named(bad: int, reference: bool) -> None:
    with pytest.raises(LocalspecError, match=f"drafted token {bad} is not in the target's vocabulary of 8"):
        verify(np.zeros((3, 8), np.float32), [Block(0, 0, drafted(1, bad), Sampling(), NOTHING)], reference=reference)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 1.5}, "--top-p must be between 0 and 1, not 1.5"),
        ({"top_p": math.nan}, "--top-p must be between 0 and 1, not nan"),
        ({"min_p": -0.1}, "--min-p must be between 0 and 1, not -0.1"),
        ({"temperature": math.inf}, "--temp must be between .*, not inf"),
        ({"temperature": math.nan}, "--temp must be between .*, not nan"),
        ({"repeat_penalty": 0.0}, "--repeat-penalty must be between 0.001 and 1000, not 0"),
        ({"presence_penalty": math.nan}, "--presence-penalty"),
        ({"frequency_penalty": -math.inf}, "--frequency-penalty"),
        ({"penalty_last_n": -2}, "--repeat-last-n must be between -1 and"),
        ({"top_k": 2**40}, "--top-k"),
        ({"seed": -1}, "--seed must be between 0 and"),
        ({"seed": 2**64}, "--seed"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**settings)


def test_derived_settings() -> None:
    assert Sampling(temperature=0).greedy
    assert Sampling(temperature=-1).greedy
    assert not Sampling().greedy
    assert not Sampling().needs_history
    assert Sampling(repeat_penalty=1.1).needs_history
    assert not Sampling(repeat_penalty=1.1, penalty_last_n=0).needs_history
    assert dataclasses.replace(Sampling(), seed=2**64 - 1).seed == 2**64 - 1


def test_arguments_that_do_not_fit() -> None:
    logits = np.zeros((2, 8), np.float32)
    block = Block(0, 0, drafted(1), Sampling(), NOTHING)
    q = drafted(1)
    q.q_ids, q.q_probs, q.q_starts = np.array([1, 2], np.int32), np.array([0.5, 0.5], np.float32), np.array([0, 2], np.int32)
    verify(logits, [Block(0, 0, q, Sampling(), NOTHING)], "reject")

    def with_q(**changes: object) -> list[Block]:
        return [Block(0, 0, dataclasses.replace(q, **changes), Sampling(), NOTHING)]

    for message, call in {
        "rule is 'match' or 'reject', not 'maybe'": lambda: verify(logits, [block], "maybe"),
        "need 2 rows of logits, there are 3": lambda: verify(np.zeros((3, 8), np.float32), [block]),
        "float32": lambda: verify(logits.astype(np.float64), [block]),
        "C-contiguous": lambda: verify(np.zeros((8, 2), np.float32).T, [block]),
        r"eog must be bool or uint8 \[8\]": lambda: verify(logits, [block], eog=np.zeros(7, bool)),
        "drafted tokens must be int32": lambda: verify(
            logits, [Block(0, 0, Draft(np.array([1]), np.ones(1, np.float32)), Sampling(), NOTHING)]
        ),
        "history must be int32": lambda: verify(
            logits, [Block(0, 0, drafted(1), Sampling(presence_penalty=1), np.zeros(1))]
        ),
        "2 rows of logits with 1 sequences": lambda: draw(logits, [1], [2], [Sampling()], [NOTHING]),
        "needs q_ids, q_probs and q_starts": lambda: verify(logits, with_q(q_probs=None), "reject"),
        "q_starts must rise from 0 to 2 in 2": lambda: verify(logits, with_q(q_starts=np.array([0, 1], np.int32)), "reject"),
        "2 q_ids with 1 q_probs": lambda: verify(logits, with_q(q_probs=np.ones(1, np.float32)), "reject"),
        "1 is not in its own": lambda: verify(logits, with_q(q_ids=np.array([2, 3], np.int32)), "reject"),
        "names an id twice": lambda: verify(logits, with_q(q_ids=np.array([1, 1], np.int32)), "reject"),
        "sum to 1, not 0.8": lambda: verify(logits, with_q(q_probs=np.array([0.5, 0.3], np.float32)), "reject"),
        "sum to 1, not nan": lambda: verify(logits, with_q(q_probs=np.array([0.5, np.nan], np.float32)), "reject"),
    }.items():
        with pytest.raises(UsageError, match=message):
            call()


# -- noise --------------------------------------------------------------------------------------------------------------


def numbers(vary: str, n: int) -> np.ndarray:
    """n uniforms that differ in one part of their key, by one."""
    if vary == "token":
        return twin.uniforms(twin.row_key(1, 2, 3, 0), np.arange(n))
    parts = {"seed": 7, "sequence": 11, "position": 100, "stream": 0}
    found = np.empty(n)
    for i in range(n):
        found[i] = twin.uniforms(twin.row_key(**(parts | {vary: parts[vary] + i})), np.array([1234]))[0]
    return found


@pytest.mark.parametrize("vary", ["token", "position", "sequence", "seed", "stream"])
def test_noise_is_uniform_and_neighbours_are_independent(vary: str) -> None:
    n = 200_000 if vary == "token" else 20_000
    u = numbers(vary, n)
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    for lag in (1, 2, 3, 8, 64):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / math.sqrt(n)
        pairs = np.histogram2d(u[:-lag], u[lag:], bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
    for bit in range(16):  # the upper bits decide, but each of them should be a fair coin
        ones = int(((u * 2.0 ** (bit + 1)).astype(np.int64) & 1).sum())
        assert abs(ones - n / 2) < 4.5 * math.sqrt(n) / 2


def test_streams_and_rows_are_independent() -> None:
    ids = np.arange(50_000)
    keys = [(1, 2, 3, s) for s in range(4)] + [(1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0), (3, 2, 1, 0), (2, 1, 3, 0)]
    rows = np.array([twin.uniforms(twin.row_key(*key), ids) for key in keys])
    correlation = np.corrcoef(rows) - np.eye(len(keys))
    assert np.abs(correlation).max() < 4.5 / math.sqrt(len(ids))


def test_the_tail_reaches_far_enough_for_a_large_vocabulary() -> None:
    """The smallest of V standard exponentials, times V, is one again."""
    n_vocab = 151_936
    ids = np.arange(n_vocab)
    smallest = [n_vocab * float(-np.log(twin.uniforms(twin.row_key(0, 0, p, 0), ids).max())) for p in range(400)]
    assert stats.kstest(smallest, "expon").pvalue > 1e-3


def test_log_and_exp() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(50_000), 1 - rng.random(50_000) * 1e-9, 2.0 ** rng.uniform(-53, 0, 50_000)])
    assert np.abs(twin.log(x) / np.log(x) - 1).max() < 1e-15
    x = np.concatenate([-rng.random(50_000) * 708, -rng.random(1000) * 1e-9, [0.0]])
    assert np.abs(twin.exp(x) / np.exp(x) - 1).max() < 1e-15
    assert twin.exp(np.array([-709.0, -np.inf, np.nan])).tolist() == [0, 0, 0]
