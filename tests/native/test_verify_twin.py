"""The extension against its numpy twin: every instruction set, filter, penalty and rule, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localspec import _verify
from localspec.accept import RULES, Block, Draft, Drawn, Sampling, Verdict, draw, verify
from localspec.errors import NativeError, UsageError
from localspec.topk import top_k

QUICK = settings(
    deadline=None, derandomize=True, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=_verify.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _verify.set_isa(request.param)
    yield request.param
    _verify.set_isa(_verify.isas()[0])


@pytest.fixture
def threads() -> Iterator[None]:
    _verify.set_threads(3)
    yield
    _verify.set_threads(0)


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5, 1e-5]),
        top_k=st.sampled_from([0, 1, 2, 7, 40, 300, 5000]),
        top_p=st.sampled_from([0.0, 0.3, 0.95, 0.999999, 1.0]),
        min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
        repeat_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.4, -1.1]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.3]),
        penalty_last_n=st.sampled_from([0, 1, 5, 64, -1]),
        seed=st.integers(0, 2**64 - 1),
    )


def make_logits(rng: np.random.Generator, m: int, n_vocab: int, kind: str) -> np.ndarray:
    """f32[m, V] with at least one finite value in each row."""
    x = rng.normal(0, 3, (m, n_vocab)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)  # many equal logits, and both zeros
    elif kind == "holes":
        x[rng.random(x.shape) < 0.3] = -np.inf
        x[rng.random(x.shape) < 0.2] = np.nan
    elif kind == "peaked":
        x *= 30
    elif kind == "rising":
        x.sort(axis=1)
    elif kind == "huge":
        x *= 1e37
    x[np.arange(m), rng.integers(n_vocab, size=m)] = np.float32(1.5)
    return np.ascontiguousarray(x)


KINDS = ("normal", "ties", "holes", "peaked", "rising", "huge")


@st.composite
def work(draw_: st.DrawFn) -> tuple[np.ndarray, list[Block], str, np.ndarray | None]:
    """Logits, ragged blocks whose drafts are partly right, a rule, an end-of-generation mask."""
    n_vocab = draw_(st.one_of(st.integers(1, 40), st.integers(41, 3000)))
    ks = draw_(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    rule = draw_(st.sampled_from(RULES))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32)))
    logits = make_logits(rng, sum(ks) + len(ks), n_vocab, draw_(st.sampled_from(KINDS)))
    blocks, at = [], 0
    for k in ks:
        s = draw_(samplings())
        history = rng.integers(-1, n_vocab + 2, rng.integers(0, 90)).astype(np.int32)
        sequence, position = int(rng.integers(2**63)), int(rng.integers(2**20))
        source = logits[at : at + k] if rng.random() < 0.6 else make_logits(rng, k, n_vocab, "normal")
        draft = Draft.empty()
        if k:
            histories = [np.concatenate([history, np.zeros(i, np.int32)]) for i in range(k)]
            d = draw(source, [sequence] * k, range(position, position + k), [s] * k, histories, rule, True, True)
            draft = Draft(d.tokens.copy(), d.probs)
            if rng.random() < 0.6:
                draft.q_ids, draft.q_probs, draft.q_starts = d.q_ids, d.q_probs, d.q_starts
            elif rng.random() < 0.5:
                draft.tokens[:] = rng.integers(n_vocab, size=k)
        blocks.append(Block(sequence, position, draft, s, history))
        at += k + 1
    eog = rng.random(n_vocab) < 0.1 if rng.random() < 0.5 else None
    return logits, blocks, rule, eog


def same_verdicts(one: list[Verdict], other: list[Verdict]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.n_drafted, a.n_accepted, a.stop) == (b.n_drafted, b.n_accepted, b.stop)
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.p_drafted.tobytes() == b.p_drafted.tobytes()


def same_draws(a: Drawn, b: Drawn) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.probs.tobytes() == b.probs.tobytes()
    for x, y in ((a.q_ids, b.q_ids), (a.q_probs, b.q_probs), (a.q_starts, b.q_starts)):
        assert (x is None and y is None) or (x is not None and y is not None and x.tobytes() == y.tobytes())


@QUICK
@given(work())
def test_verify_equals_numpy(isa: str, given_: tuple[np.ndarray, list[Block], str, np.ndarray | None]) -> None:
    logits, blocks, rule, eog = given_
    before = logits.tobytes()
    same_verdicts(verify(logits, blocks, rule, eog), verify(logits, blocks, rule, eog, reference=True))
    assert logits.tobytes() == before


@QUICK
@given(work(), st.booleans())
def test_draw_equals_numpy(
    isa: str, given_: tuple[np.ndarray, list[Block], str, np.ndarray | None], with_q: bool
) -> None:
    logits, blocks, rule, _ = given_
    logits = np.ascontiguousarray(logits[: len(blocks)])
    arguments = (
        [b.sequence for b in blocks],
        [b.position for b in blocks],
        [b.sampling for b in blocks],
        [b.history for b in blocks],
        rule,
        with_q,
    )
    same_draws(draw(logits, *arguments), draw(logits, *arguments, reference=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "s",
    [
        Sampling(seed=5),
        Sampling(top_k=0, top_p=1, min_p=0),
        Sampling(top_k=0, top_p=0.9, min_p=0),
        Sampling(top_k=0, top_p=1, min_p=0.02, temperature=1.7),
        Sampling(top_k=2000, top_p=1, min_p=0),
        Sampling(temperature=0),
    ],
    ids=str,
)
def test_a_real_vocabulary(isa: str, kind: str, s: Sampling) -> None:
    """Sizes where chunks, thresholds and vector tails all matter; the last chunk is not full."""
    rng = np.random.default_rng(7)
    n_vocab = 49_152 + 77
    logits = make_logits(rng, 3, n_vocab, kind)
    nothing = [np.zeros(0, np.int32)] * 3
    arguments = ([1] * 3, [4, 5, 6], [s] * 3, nothing, "match", True)
    d = draw(logits, *arguments)
    same_draws(d, draw(logits, *arguments, reference=True))
    for rule in RULES:
        blocks = [Block(1, 4, Draft(d.tokens[:2], d.probs[:2]), s, nothing[0])]
        same_verdicts(verify(logits, blocks, rule), verify(logits, blocks, rule, reference=True))


def many_blocks(n: int, n_vocab: int) -> tuple[np.ndarray, list[Block]]:
    rng = np.random.default_rng(3)
    logits = make_logits(rng, 2 * n, n_vocab, "normal")
    s = Sampling(top_k=0, top_p=1, min_p=0, repeat_penalty=1.1, seed=9)
    history = np.arange(9, dtype=np.int32)
    tokens = rng.integers(n_vocab, size=(n, 1)).astype(np.int32)
    return logits, [Block(i, i, Draft(tokens[i], np.ones(1, np.float32)), s, history) for i in range(n)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", RULES)
def test_threads_change_nothing(rule: str) -> None:
    logits, blocks = many_blocks(64, 900)
    expected = verify(logits, blocks, rule, reference=True)
    for _ in range(30):
        same_verdicts(verify(logits, blocks, rule), expected)


@pytest.mark.usefixtures("threads")
def test_called_from_several_python_threads() -> None:
    logits, blocks = many_blocks(40, 700)
    expected = verify(logits, blocks, reference=True)
    wrong: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(40):
                same_verdicts(verify(logits, blocks), expected)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            wrong.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
        assert not caller.is_alive()
    assert not wrong


def test_works_on_after_a_fork() -> None:
    """In a process of its own: forking pytest would take its threads' locks along."""
    code = """
import os, sys
import numpy as np
from localspec import _verify
from localspec.accept import Block, Draft, Sampling, verify
_verify.set_threads(3)
logits = np.random.default_rng(0).normal(size=(8, 500)).astype(np.float32)
blocks = [Block(i, 0, Draft.empty(), Sampling(), np.zeros(0, np.int32)) for i in range(8)]
tokens = lambda: [v.tokens.tolist() for v in verify(logits, blocks)]
first = tokens()
child = os.fork()
if child == 0:
    os._exit(0 if tokens() == first else 1)
_, status = os.waitpid(child, 0)
assert tokens() == first
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_equals_numpy(isa: str, threads: None, kind: str) -> None:
    rng = np.random.default_rng(5)
    for n_vocab, k in ((1, 1), (7, 7), (127, 5), (300, 32), (5000, 32), (49152, 32)):
        logits = make_logits(rng, 4, n_vocab, kind)
        native, plain = top_k(logits, k), top_k(logits, k, reference=True)
        for name in ("ids", "logits", "lse"):
            assert np.array_equal(getattr(native, name), getattr(plain, name)), (kind, n_vocab, name)
        if kind == "normal":
            order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
            assert np.array_equal(native.ids, order)
            np.testing.assert_allclose(native.logits, np.take_along_axis(logits, order, 1), atol=1e-5)
            whole = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
            np.testing.assert_allclose(native.lse, whole, atol=1e-5)


def test_top_k_refuses_what_it_cannot_do() -> None:
    logits = np.zeros((2, 8), np.float32)
    for k in (0, 9):
        with pytest.raises(UsageError, match="likeliest"):
            top_k(logits, k)
    with pytest.raises(UsageError, match="float32"):
        top_k(logits.astype(np.float64), 2)
    logits[1] = np.nan
    for reference in (False, True):
        with pytest.raises(NativeError, match="row 1 "):
            top_k(logits, 2, reference)
    out = np.zeros(4, np.int32), np.zeros(4, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    for changes in ((7, 2), (8, 9), (8, 0), (8, 1)):
        with pytest.raises(ValueError, match=r"."):
            _verify.top_k(np.zeros((2, 8), np.float32), *changes, *out)


def test_a_row_without_a_largest_finite_logit_is_named(isa: str) -> None:
    for bad in (np.nan, -np.inf, np.inf):
        for s in (Sampling(), Sampling(temperature=0), Sampling(top_k=0, top_p=1, min_p=0)):
            logits = np.zeros((3, 300), np.float32)
            logits[2] = bad
            blocks = [Block(i, 0, Draft.empty(), s, np.zeros(0, np.int32)) for i in range(3)]
            for reference in (False, True):
                with pytest.raises(NativeError, match="row 2 "):
                    verify(logits, blocks, reference=reference)


def test_the_binding_refuses_arrays_that_do_not_fit() -> None:
    """`accept` never sends such; memory safety must not rest on that."""
    record = np.zeros(14, np.int64)  # greedy, nothing drafted
    logits, i32, f32 = np.zeros((1, 8), np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    none_i, none_f, counts = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(3, np.int32)

    def call(**changes: object) -> object:
        a = {
            "logits": logits, "n_vocab": 8, "packed": record, "tokens": none_i, "history": none_i, "q_ids": none_i,
            "q_probs": none_f, "q_starts": none_i, "rule": 0, "eog": None, "out": i32, "p": f32, "counts": counts,
        } | changes  # fmt: skip
        return _verify.verify(*a.values())

    assert call() is None
    drafted, long_history, with_q = record.copy(), record.copy(), record.copy()
    drafted[3], long_history[4], with_q[5] = 1, 1 << 60, 1
    two_rows = {"logits": np.zeros((2, 8), np.float32), "out": np.zeros(2, np.int32), "p": np.zeros(2, np.float32)}
    for changes in (
        {"n_vocab": 3},
        {"n_vocab": 0},
        {"rule": 2},
        {"tokens": i32},
        {"history": i32},
        {"packed": drafted},
        {"packed": long_history},
        {"packed": with_q},
        {"q_starts": i32},
        {"q_ids": i32},
        {"eog": np.zeros(7, np.uint8)},
        {"out": none_i},
        {"p": none_f},
        {"counts": i32},
        {"packed": drafted, "tokens": np.array([8], np.int32), **two_rows},
        {"packed": drafted, "tokens": np.array([-1], np.int32), **two_rows},
    ):
        with pytest.raises(ValueError, match=r"."):
            call(**changes)
    with pytest.raises(TypeError):
        call(logits=3)
    with pytest.raises(ValueError, match="no kernels"):
        _verify.set_isa("abacus")
