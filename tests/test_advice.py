"""`localspec tune`: the advice from a controller's state, its picture, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from localspec.advice import advise
from localspec.blocks import Look, Outcome
from localspec.control import Adaptive
from localspec.errors import UsageError
from localspec.picture import need_picture
from tests.test_control import CLIFFS, FLAT, STEEP, World


def settled(cost: dict[int, float], p: float, draft_cost: float = 0.05, n_max: int = 8) -> Adaptive:
    controller = Adaptive(n_max, prior={n: ratio / cost[1] for n, ratio in cost.items()})
    World(cost, lambda j, at: p, draft_cost).run(controller, 3000)
    return controller


def test_the_table_is_what_its_parts_come_to() -> None:
    advice = advise(settled(FLAT, 0.8))
    assert advice is not None
    assert [cost.n for cost in advice.costs] == list(range(1, 10))
    assert [cost.ratio for cost in advice.costs] == pytest.approx([FLAT[n] for n in range(1, 10)], rel=0.1)
    assert all(cost.ceiling == pytest.approx(cost.n / cost.ratio) for cost in advice.costs)
    assert advice.ceiling.n == 9
    assert advice.chances[0] == pytest.approx(0.8, abs=0.15)
    kept = 1.0
    for chance, alive in zip(advice.chances, advice.survival, strict=True):
        kept *= chance
        assert alive == pytest.approx(kept)
    assert [choice.k for choice in advice.choices] == list(range(9))
    for choice in advice.choices:
        assert choice.tokens == pytest.approx(1 + sum(advice.survival[: choice.k]))
        assert choice.ms == pytest.approx(advice.costs[choice.k].ms + choice.draft_ms)
        assert choice.tok_s == pytest.approx(1e3 * choice.tokens / choice.ms)
        assert choice.speedup == pytest.approx(choice.tok_s / advice.choices[0].tok_s)
    assert advice.choices[0].speedup == 1
    assert sum(n for _, _, n in advice.calibration) > 0


def test_it_advises_what_pays_and_says_why() -> None:
    advice = advise(settled(FLAT, 0.8))
    assert advice is not None
    assert advice.k == max(advice.choices, key=lambda choice: choice.tok_s).k > 2
    assert advice.speedup == advice.choices[advice.k].speedup > 1.5
    assert "most per second" in advice.reason
    assert advice.gained is not None
    assert advice.gained > 0


def test_a_limit_that_binds_is_named() -> None:
    advice = advise(settled(FLAT, 0.95, n_max=2))
    assert advice is not None
    assert advice.k == 2
    assert "--spec-draft-n-max" in advice.reason


def test_it_advises_nothing_where_nothing_pays() -> None:
    advice = advise(settled(STEEP, 0.5))
    assert advice is not None
    assert (advice.k, advice.speedup) == (0, 1.0)
    assert advice.reason.startswith("no block pays")
    assert "would give 0." in advice.reason


def test_a_step_down_in_the_costs_is_seen() -> None:
    advice = advise(settled(CLIFFS, 0.97))
    assert advice is not None
    assert advice.costs[7].ms < advice.costs[6].ms
    assert advice.k >= 7


def test_what_was_measured_has_the_last_word() -> None:
    controller = settled(FLAT, 0.8)
    controller.settle()
    controller.advantage = -0.3
    advice = advise(controller)
    assert advice is not None
    assert (advice.k, advice.speedup) == (0, 1.0)
    assert "-0.30" in advice.reason
    controller = settled(STEEP, 0.5)
    for _ in range(8):  # seldom as it drafts here
        controller.record([Outcome(0, [0.5], 0, 1)], 1, 0.05, STEEP[2])
    controller.advantage = 0.2
    advice = advise(controller)
    assert advice is not None
    assert advice.k > 0
    assert "+0.20" in advice.reason


def test_before_anything_is_known() -> None:
    assert advise(Adaptive()) is None
    controller = Adaptive()
    controller.choose([Look(0, 8)])
    controller.record([Outcome(0, [], 0, 1)], -1, 0.0, 1.0)
    advice = advise(controller)
    assert advice is not None
    assert advice.gained is None
    assert advice.calibration == ()
    off = Adaptive(0)
    off.record([Outcome(0, [], 0, 1)], -1, 0.0, 1.0)
    advice = advise(off)
    assert advice is not None
    assert (advice.k, len(advice.choices)) == (0, 1)


def test_as_json_is_json() -> None:
    advice = advise(settled(FLAT, 0.8))
    assert advice is not None
    data = json.loads(json.dumps(advice.as_json(), allow_nan=False))
    assert data["k"] == advice.k
    assert len(data["choices"]) == 9
    assert data["costs"][1]["ratio"] == pytest.approx(1.05, rel=0.1)


def test_tune(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    done = cli("tune", "-m", smollm2, "-t", 1, "--tokens", 60, "--spec-draft-n-max", 3)
    assert done.rc == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    data = json.loads(lines[-1])
    assert data["settings"]["spec_type"] == "ngram,eagle3"
    assert data["settings"]["tokens"] == 60
    assert [c["n"] for c in data["costs"]] == [1, 2, 3, 4]
    assert [c["k"] for c in data["choices"]] == [0, 1, 2, 3]
    assert min(c["ms"] for c in data["costs"]) > 0
    assert 0 <= data["k"] <= 3
    assert data["reason"] in lines[-3]
    assert lines[-2] == f"expected speed-up against plain: {data['speedup']:.2f}x"
    for part in ("costs of a decode", "drafted tokens", "confidence", "k drafted tokens", "ceiling", "drafting costs"):
        assert part in done.stdout
    (kept,) = (tmp_path / "home" / "localspec" / "profiles").glob("*.json")
    assert set(json.loads(kept.read_text())["ratios"]) == {"1", "2", "3", "4"}


def test_tune_draws(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install matplotlib")
    done = cli(
        "tune", "-m", smollm2, "-t", 1, "--tokens", 8, "--spec-type", "ngram", "--spec-draft-n-max", 2, "--plot", "t.png",
        "-c", 100,
    )  # fmt: skip
    assert done.rc == 0, done.stderr
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not (tmp_path / "t.png.part").exists()
    (tmp_path / "notes.txt").write_text("mine")
    done = cli("tune", "-m", "none.gguf", "--plot", "notes.txt")
    assert (done.rc, len(done.stderr.splitlines())) == (2, 1)
    assert "no picture" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        need_picture(tmp_path / "t.png")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--spec-type", "none"], "no drafter"),
        (["--spec-draft-n-max", "0"], "no drafter"),
        (["--no-spec-adapt"], "--no-spec-adapt"),
        (["--tokens", "0"], "--tokens"),
        (["--plot", "nowhere/t.png"], "--plot"),
        (["--plot", ""], "--plot"),
        (["-c", "8"], "ctx-size"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_line(cli: Any, smollm2: Path, arguments: list[str], says: str) -> None:
    done = cli("tune", "-m", smollm2, "-t", 1, *arguments)
    assert done.rc == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
