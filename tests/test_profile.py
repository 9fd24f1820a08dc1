"""Stored cost curves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec import profile
from localspec.control import Adaptive
from localspec.prior import DraftPrior
from localspec.profile import Key
from tests.test_control import FLAT, STEEP, World

KEY = Key("a model.gguf", 1000, "llama", 2, 64, 300, "abc", "localspec", 4)
RATIOS = {1: 1.0, 2: 1.25, 4: 2.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))


def test_what_is_stored_comes_back_for_the_same_key_alone(tmp_path: Path) -> None:
    path = profile.store(KEY, RATIOS)
    assert path is not None
    assert path.parent == tmp_path / "cache" / "profiles"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert profile.load(KEY) == RATIOS
    for other in (
        replace(KEY, threads=2), replace(KEY, kernels="stock"), replace(KEY, size=1001), replace(KEY, tokenizer="abd"),
        replace(KEY, n_layer=3), replace(KEY, n_gpu_layers=-1), replace(KEY, file="b.gguf"),
    ):  # fmt: skip
        assert profile.load(other) is None


DRAFT = DraftPrior((0.1, 0.05), (0.7, 0.6), (None, *[0.5] * 11))


def test_what_is_known_of_drafts_is_kept_by_draft_and_mixed(tmp_path: Path) -> None:
    profile.store(KEY, RATIOS, draft=("eagle3:a.gguf:5", DRAFT))
    assert profile.load_draft(KEY, "eagle3:a.gguf:5") == DRAFT
    assert profile.load_draft(KEY, "eagle3:a.gguf:6") is None
    assert profile.load_draft(replace(KEY, threads=2), "eagle3:a.gguf:5") is None
    profile.store(KEY, RATIOS)  # as `curve` does
    profile.store(KEY, RATIOS, 0.5, ("ngram", DRAFT))
    newer = DraftPrior((0.3, 0.05), (0.9,), (0.4, *[None] * 11))
    profile.store(KEY, RATIOS, 0.5, ("eagle3:a.gguf:5", newer))
    mixed = profile.load_draft(KEY, "eagle3:a.gguf:5")
    assert mixed is not None
    assert mixed.cost == pytest.approx((0.2, 0.05))
    assert mixed.kept == pytest.approx((0.8, 0.6))
    assert mixed.sure == pytest.approx((0.4, *[0.5] * 11))
    assert profile.load_draft(KEY, "ngram") == DRAFT
    for i in range(profile.MOST_DRAFTS):
        profile.store(KEY, RATIOS, 0.5, (f"lm:{i}.gguf:1", DRAFT))
    assert profile.load_draft(KEY, "ngram") is None
    file = tmp_path / "d.gguf"
    file.write_bytes(b"12345")
    assert profile.draft_name("lm", file) == "lm:d.gguf:5"
    assert profile.draft_name("ngram", None) == "ngram"


@pytest.mark.parametrize(
    "change",
    [
        {"cost": [0.1]}, {"cost": [0.1, float("nan")]}, {"cost": [-1, 0]}, {"cost": "ab"}, {"kept": [1.5]}, {"kept": [None]},
        {"sure": [True]}, {"sure": None}, {"kept": [0.5] * 65},
    ],
)  # fmt: skip
def test_a_draft_of_which_nonsense_is_kept_is_unknown(change: dict[str, Any]) -> None:
    path = profile.store(KEY, RATIOS, draft=("ngram", DRAFT))
    assert path is not None
    data = json.loads(path.read_text())
    data["drafts"]["ngram"] |= change
    path.write_text(json.dumps(data))
    assert profile.load_draft(KEY, "ngram") is None
    assert profile.load(KEY) == RATIOS
    path.write_text(json.dumps(data | {"drafts": [1]}))
    assert profile.load_draft(KEY, "ngram") is None


def test_runs_correct_a_curve_and_a_curve_replaces_what_runs_said() -> None:
    profile.store(KEY, RATIOS)
    profile.store(KEY, {1: 1.0, 2: 5.0, 8: 3.0}, weight=0.5)
    assert profile.load(KEY) == pytest.approx({1: 1.0, 2: 2.5, 4: 2.0, 8: 3.0})
    profile.store(KEY, {1: 1.0, 2: 1.3})
    assert profile.load(KEY) == pytest.approx({1: 1.0, 2: 1.3, 4: 2.0, 8: 3.0})


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1}, {"version": "2"}, {"key": {}}, {"key": None}, {"ratios": []}, {"ratios": {}},
        {"ratios": {"1": 1.0, "2": float("nan")}}, {"ratios": {"1": 1.0, "2": float("inf")}},
        {"ratios": {"1": 1.0, "2": 0.1}}, {"ratios": {"1": 1.0, "2": 201}}, {"ratios": {"1": 1.0, "2": "1.2"}},
        {"ratios": {"1": 1.0, "2": True}}, {"ratios": {"1": 1.0, "x": 1.2}}, {"ratios": {"1": 1.0, "0": 1.2}},
        {"ratios": {"1": 1.1, "2": 1.2}}, {"ratios": {"2": 1.2}}, {"ratios": {"1": 1.0, "5000": 1.2}},
    ],
)  # fmt: skip
def test_what_no_run_of_ours_wrote_is_ignored(change: dict[str, Any]) -> None:
    path = profile.store(KEY, RATIOS)
    assert path is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert profile.load(KEY) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"version": ' + b"1" * 10_000 + b"}"])
def test_a_damaged_profile_is_ignored_and_replaced(data: bytes) -> None:
    path = profile.store(KEY, RATIOS)
    assert path is not None
    path.write_bytes(data)
    assert profile.load(KEY) is None
    assert profile.store(KEY, {1: 1.0, 2: 1.5}) == path
    assert profile.load(KEY) == {1: 1.0, 2: 1.5}


def test_a_later_version_stays_as_it_is() -> None:
    path = profile.store(KEY, RATIOS)
    assert path is not None
    path.write_text('{"version": 3}')
    assert profile.store(KEY, RATIOS) is None
    assert path.read_text() == '{"version": 3}'


@pytest.mark.parametrize("ratios", [{}, {1: 1.0}, {2: 1.2, 3: 1.3}, {1: 1.5, 2: 1.2}, {1: float("nan"), 2: 1.0}])
def test_what_says_nothing_is_not_stored(ratios: dict[int, float]) -> None:
    assert profile.store(KEY, ratios) is None
    assert profile.load(KEY) is None


def test_sizes_that_were_disturbed_beyond_belief_are_left_out() -> None:
    profile.store(KEY, RATIOS | {3: 1e9, 5: float("inf"), 6: 0.0})
    assert profile.load(KEY) == RATIOS


def test_no_place_to_keep_it_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "file" / "below"))
    assert profile.store(KEY, RATIOS) is None
    assert profile.load(KEY) is None
    monkeypatch.setenv("LOCALSPEC_CACHE", "~nobody-of-this-name/x")
    assert profile.store(KEY, RATIOS) is None
    assert profile.load(KEY) is None


def test_a_rename_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    path = profile.store(KEY, RATIOS)
    assert path is not None

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    assert profile.store(KEY, {1: 1.0, 2: 9.0}) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert profile.load(KEY) == RATIOS


@pytest.mark.parametrize("prior", [{1: 1.0, 2: 0.2, 4: 0.2, 8: 0.2}, {1: 1.0, 2: 200.0}])
@pytest.mark.parametrize("p", [0.05, 0.9])
def test_a_wrong_profile_is_overcome(prior: dict[int, float], p: float) -> None:
    """A draft that seldom helps on a steep curve stays within the loss allowed; a good one on a flat curve is found."""
    world = World(STEEP if p < 0.5 else FLAT, lambda j, at: p)
    controller = Adaptive(prior=prior)
    per_token = world.run(controller, 3000)
    if p < 0.5:
        assert per_token < 1.03 * STEEP[1]
    else:
        assert per_token < 0.5 * FLAT[1]


def test_what_a_run_learns_is_what_is_kept() -> None:
    world = World(FLAT, lambda j, at: 0.8)
    controller = Adaptive()
    world.run(controller, 2000)
    assert controller.steps >= profile.ENOUGH_STEPS
    learnt = controller.decode.curve(profile.ENOUGH_SAMPLES)
    assert set(learnt) <= set(controller.decode.curve())
    assert all(controller.decode.samples(n) >= profile.ENOUGH_SAMPLES for n in learnt)
    assert profile.store(KEY, learnt, profile.RUN_WEIGHT) is not None
    kept = profile.load(KEY)
    assert kept is not None
    assert len(kept) > 2
    assert kept == pytest.approx({n: FLAT[n] for n in kept}, rel=0.05)


def profiles(home: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((home / "localspec" / "profiles").glob("*.json"))]


def test_curve_keeps_what_it_measured_and_run_begins_with_it(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = cli("curve", "-m", smollm2, "-t", 1, "--sizes", "2,4", "--rounds", 1, "--context", 16, "--kernels", "stock")
    assert done.rc == 0, done.stderr
    assert done.stderr == ""
    (first,) = profiles(home)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert first["ratios"] == pytest.approx({str(n): r for n, r in zip(measured["n"], measured["ratio"])}, rel=1e-3)
    assert (first["key"]["kernels"], first["key"]["threads"]) == ("stock", 1)
    run = ("run", "-m", smollm2, "-t", 1, "--kernels", "stock", "--spec-type", "ngram", "--temp", 0, "--json", "-p", "Hi")
    done = cli(*run, "-n", 20)
    assert done.rc == 0, done.stderr
    assert profiles(home) == [first], "a short run keeps nothing"
    # What was learnt of the costs never changes a text.
    (path,) = (home / "localspec" / "profiles").glob("*.json")
    path.write_text(path.read_text().replace('"version": 2', '"version": 7'))
    again = cli(*run, "-n", 20)
    assert json.loads(again.stdout)["ids"] == json.loads(done.stdout)["ids"]
    assert path.read_text().count('"version": 7') == 1


def test_a_long_run_keeps_what_it_saw(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    # A text that goes round and round, and at most two tokens of it in a step.
    arguments = ("-m", smollm2, "-t", 1, "--spec-type", "ngram", "--spec-draft-n-max", 1, "--temp", 0, "--raw", "-c", 512)
    prompt = ("-p", "one two three one two three one two three one two", "--json", "-n")
    done = cli("run", *arguments, "--no-spec-adapt", *prompt, 440)
    assert done.rc == 0, done.stderr
    assert not (tmp_path / "home" / "localspec" / "profiles").exists(), "a fixed block learns nothing"
    done = cli("run", *arguments, *prompt, 440)
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout)["n_verify"] >= profile.ENOUGH_STEPS
    (kept,) = profiles(tmp_path / "home")
    assert kept["key"]["threads"] == 1
    assert set(kept["ratios"]) > {"1"}
    assert len(kept["drafts"]["ngram"]["kept"]) >= 1


def test_a_cache_that_cannot_be_written_to_is_said_once(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "no-folder").write_text("")
    done = cli(
        "curve", "-m", smollm2, "-t", 1, "--sizes", "2", "--rounds", 1, "--context", 4,
        env={"LOCALSPEC_CACHE": str(tmp_path / "no-folder")},
    )  # fmt: skip
    assert done.rc == 0
    assert len(done.stderr.splitlines()) == 1
    assert "not kept" in done.stderr
