"""The gate, by simulation: it never sees a clock."""

from __future__ import annotations

import random

from localspec.control import FixedBlock, Gate


def simulate(gate: Gate, n_tokens: int, p: float, t_plain: float, t_drafted: float, seed: int = 0) -> tuple[float, int]:
    """(seconds for n_tokens, drafted tokens) on a machine where each draft is kept with probability p."""
    rng = random.Random(seed)
    seconds, gained, drafted = 0.0, 0, 0
    while gained < n_tokens:
        k = gate.choose()
        kept = 0
        while kept < k and rng.random() < p:
            kept += 1
        step = (t_drafted if k else t_plain) * rng.uniform(0.95, 1.05)
        gate.record(k, k, kept + 1, step)
        seconds += step
        gained += kept + 1
        drafted += k
    return seconds, drafted


def test_fixed_block_always_drafts() -> None:
    assert [FixedBlock(5).choose() for _ in range(3)] == [5, 5, 5]


def test_gate_measures_plain_decoding_first() -> None:
    gate = Gate(4)
    for _ in range(3):
        assert gate.choose() == 0
        gate.record(0, 0, 1, 1.0)
    assert gate.choose() == 4


def test_gate_stays_open_where_drafting_pays() -> None:
    seconds, drafted = simulate(Gate(3), 2000, p=0.8, t_plain=1.0, t_drafted=1.3)
    assert seconds < 0.6 * 2000
    assert drafted > 1500


def test_steps_that_the_system_interrupted_do_not_close_the_gate() -> None:
    gate = Gate(3)
    for i in range(400):
        asked = gate.choose()
        stalled = 40.0 if i % 10 == 7 else 1.0
        gate.record(asked, asked, 3 if asked else 1, stalled * (1.3 if asked else 1.0))
        assert gate.is_open


def test_gate_closes_where_drafting_loses() -> None:
    seconds, _ = simulate(Gate(3), 4000, p=0.05, t_plain=1.0, t_drafted=2.5)
    assert seconds < 1.05 * 4000


def test_trials_become_rarer() -> None:
    first = simulate(Gate(3), 4000, p=0.0, t_plain=1.0, t_drafted=2.0)[1]
    twice = simulate(Gate(3), 8000, p=0.0, t_plain=1.0, t_drafted=2.0)[1]
    assert twice < 1.6 * first


def test_gate_reopens_when_things_change() -> None:
    gate = Gate(3, longest_pause=256)
    simulate(gate, 1000, p=0.0, t_plain=1.0, t_drafted=2.0)
    seconds, _ = simulate(gate, 3000, p=0.9, t_plain=1.0, t_drafted=1.5)
    assert seconds < 0.75 * 3000


def test_steps_in_which_the_drafter_had_nothing_to_say_prove_nothing() -> None:
    gate = Gate(3)
    for _ in range(3):
        gate.record(0, 0, 1, 1.0)
    for _ in range(100):
        gate.record(3, 0, 1, 5.0)
    assert gate.is_open


def test_n_max_zero_never_drafts() -> None:
    gate = Gate(0)
    for _ in range(10):
        assert gate.choose() == 0
        gate.record(0, 0, 1, 1.0)
