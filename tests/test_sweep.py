"""`localspec bench --sweep`: the grid, what is made of it, the page, going on after a kill, and mistakes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from localspec.accept import Sampling
from localspec.charts import Series, bars, lines
from localspec.cli.bench_cmd import bench_cmd
from localspec.cli.bench_sweep import _keep_results
from localspec.drafters import DrafterSettings, load
from localspec.errors import UsageError
from localspec.model import Model
from localspec.prompts import BUILT_IN
from localspec.sweep import Grid, Sweep
from localspec.sweep_page import page
from localspec.sweep_result import cells, judge
from localspec.sweep_state import State
from localspec.target import SessionSettings, TargetSession
from tests.gguf_maker import tiny_llama
from tests.test_bench import FAKE_SERVER, script

PROMPTS = list(BUILT_IN[:3])
GRID = Grid((1, 3), (1, 2), (0.0, 0.8), 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=1024)


@pytest.fixture
def session(tiny: Path) -> Iterator[TargetSession]:
    with Model(tiny) as model, TargetSession(model, SessionSettings(n_ctx=512, n_sequences=2, n_threads=1)) as opened:
        yield opened


def measured(session: TargetSession, state: State, progress: Any = lambda note: None, grid: Grid = GRID) -> None:
    drafter = load("ngram", session, DrafterSettings())
    sampling = Sampling(temperature=0)
    Sweep(session, drafter, "match", grid, PROMPTS, sampling, 12, state, {}).run(progress)
    drafter.close()


# -- a whole sweep -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Every tag that is opened is closed, and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "srcset", "data", "xlink:href"}, tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Page:
    reader = Page()
    reader.feed(text)
    assert reader.open == []
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    return reader


def test_a_sweep_from_the_command_line(cli: Any, tiny: Path, tmp_path: Path) -> None:
    server = script(tmp_path / "llama-server", FAKE_SERVER)
    arguments = ["bench", "-m", str(tiny), "-t", "1", "-n", "8", "--limit", "2", "--sweep", "--n-max-list", "3,1"]
    arguments += ["--concurrency", "1,2", "--temps", "0,0.8", "--peer-llama-server", str(server)]
    done = cli(*arguments, "--json", "s.json", "--html", "s.html")
    assert done.rc == 0, done.stderr
    assert "2 at once, temperature 0.8" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert sorted(p.name for p in tmp_path.glob("s.*")) == ["s.html", "s.json"], "the state is gone, nothing half written"
    result = json.loads((tmp_path / "s.json").read_text())
    assert (result["complete"], result["identical"]) == (True, True)
    assert {"machine", "versions", "command", "when", "curve"} <= set(result)
    assert result["settings"]["n_max_list"] == [1, 3]
    sides = ["plain", "fixed 1", "fixed 3", "adaptive", "llama-server", "llama-server 1", "llama-server 3"]
    assert [c["side"] for c in result["cells"]] == sides * 4
    for c in result["cells"]:
        assert (c["n_requests"], set(c["by_source"])) == (2 * c["concurrency"], {"code", "maths"})  # two waves
        plain = next(p for p in result["cells"] if p["side"] == "plain"
                     and (p["concurrency"], p["temperature"]) == (c["concurrency"], c["temperature"]))  # fmt: skip
        if c["kind"] == "llama-server":
            assert c["n_other_text_than_ours"] == (c["n_requests"] if c["temperature"] == 0 else None)
            continue
        assert c["speedup"] == pytest.approx(c["tok_per_s"] / plain["tok_per_s"])
        assert c["over_server"] > 0
        assert (c["over_server_drafting"] is None) == (c["kind"] != "fixed")
        assert c["n_generated"] == plain["n_generated"]
    text = (tmp_path / "s.html").read_text()
    reader = parsed(text)
    assert (reader.seen.count("svg"), reader.seen.count("script")) == (6, 0)
    assert "Identical text" in text
    assert "llama-cpp-python" in text
    assert "--n-max-list 3,1" in text
    again = cli(*arguments, "--json", "s.json", "--html", "s.html")
    assert (again.rc, len(again.stderr.splitlines())) == (2, 1)
    assert "--json s.json exists: name another file or give --force" in again.stderr
    assert json.loads((tmp_path / "s.json").read_text()) == result


def test_results_are_replaced_where_that_is_asked_for_or_a_sweep_goes_on(tmp_path: Path) -> None:
    done, state = tmp_path / "s.json", tmp_path / "s.json.state"
    files = {"--json": done, "--html": tmp_path / "s.html"}
    done.touch()
    _keep_results(files, state)  # nothing is lost
    done.write_text("{}")
    with pytest.raises(UsageError, match=r"--json .*s\.json exists: .*--force"):
        _keep_results(files, state)
    state.touch()
    _keep_results(files, state)


def test_force_replaces_the_results(cli: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{}")
    done = cli("bench", "-m", tiny, "-t", 1, "-n", 4, "--limit", 1, "--sweep", "--n-max-list", 1, "--concurrency", 1,
               "--temps", 0, "--no-spec-adapt", "--json", "s.json", "--force")  # fmt: skip
    assert done.rc == 0, done.stderr
    assert json.loads((tmp_path / "s.json").read_text())["complete"] is True
    assert sorted(p.name for p in tmp_path.glob("s.*")) == ["s.json"]


def test_without_files_the_json_is_the_last_line(cli: Any, tiny: Path, tmp_path: Path) -> None:
    done = cli("bench", "-m", str(tiny), "-t", "1", "-n", "4", "--limit", "1", "--sweep", "--n-max-list", "1",
               "--concurrency", "1", "--temps", "0", "--no-spec-adapt")  # fmt: skip
    assert done.rc == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    assert [c["side"] for c in result["cells"]] == ["plain", "fixed 1"]
    assert not list(tmp_path.glob("*.state"))


# -- what is made of it ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tiny: Path) -> dict[str, Any]:
    state = State(None, {})
    with Model(tiny) as model, TargetSession(model, SessionSettings(n_ctx=512, n_sequences=2, n_threads=1)) as session:
        measured(session, state)
    found = cells(GRID, state.units, [p.source for p in PROMPTS])
    identical = judge(found, "match")
    settings = {"target": "a/<tiny>.gguf", "spec_type": "ngram", "kernels": "stock", "threads": 1}
    return {
        "complete": True, "identical": identical, "when": "today", "command": ["localspec", "a b"], "machine": {},
        "versions": {}, "settings": settings, "curve": state.units["curve"], "cells": found,
    }  # fmt: skip


def test_waves_are_filled_up(result: dict[str, Any]) -> None:
    assert {(c["concurrency"], c["n_requests"]) for c in result["cells"]} == {(1, 3), (2, 4)}
    assert GRID.n_units(3) == 1 + (3 + 2) * 2 * 4


def test_a_difference_is_said_aloud(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    cell = next(c for c in changed["cells"] if c["side"] == "fixed 3")
    cell["differences"] = [{"request": 1, "token": 5, "margin": 0.25}]
    changed["identical"] = judge(changed["cells"], "match")
    assert changed["identical"] is False
    text = page(changed)
    parsed(text)
    assert "TEXTS DIFFER: 1 " in text
    assert "Identical text" not in text
    assert "request 1 parts at token 5" in text
    assert "NO (1)" in text
    assert judge([c for c in copy.deepcopy(changed["cells"]) if c["temperature"] > 0], "reject") is None


def test_names_from_outside_are_no_markup(result: dict[str, Any]) -> None:
    text = page({**result, "complete": False})
    parsed(text)
    assert "&lt;tiny&gt;.gguf" in text
    assert "Not complete" in text


@pytest.mark.parametrize("values", [[], [None], [0.0], [1e-4, 3e5], [2.0, None, 1.0]])
def test_charts_of_any_values(values: list[float | None]) -> None:
    names = [f"<{i}>" for i in range(len(values))]
    for svg in (lines(names, [Series("a&b", values)], "x", "y"), bars(names, [Series("a&b", values)], "y", [(1.0, "one")])):
        parsed(svg)
        assert "nan" not in svg
        assert svg.count("<title>") == sum(v is not None for v in values)


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_killed_sweep_goes_on(session: TargetSession, tmp_path: Path) -> None:
    path, seen = tmp_path / "s.state", []

    def stop(note: str) -> None:
        seen.append(note)
        if len(seen) == 8:
            raise KeyboardInterrupt

    state = State(path, {"target": "t"})
    with pytest.raises(KeyboardInterrupt):
        measured(session, state, stop)
    before = dict(state.units)
    with path.open("ab") as file:
        file.write(b'{"unit": "1/0/2/plain", "measu')  # cut off by the kill
    state = State(path, {"target": "t"})
    assert state.units == before
    notes: list[str] = []
    measured(session, state, notes.append)
    assert {name: state.units[name] for name in before} == before, "nothing is measured again"
    assert len(notes) == GRID.n_units(3)
    again = State(path, {"target": "t"})
    assert again.units == state.units
    found = cells(GRID, again.units, ["a", "b", "c"])
    assert len(found) == 16
    wider = Grid((1, 2, 3), (1, 2), (0.0, 0.8), 4)
    n = len(again.units)
    measured(session, again, grid=wider)
    assert len(again.units) - n == 2 * (3 + 2) * 2, "each wave of the new side, and how it compares"
    assert len(cells(wider, again.units, ["a", "b", "c"])) == 20


def test_the_state_of_another_sweep(tmp_path: Path) -> None:
    path = tmp_path / "s.state"
    State(path, {"target": "t", "draft": "d"}).add("curve", {"n": [1]})
    with pytest.raises(UsageError, match=r"s\.state: a sweep was begun there with another setting \(draft\)"):
        State(path, {"target": "t", "draft": "e"})
    path.write_text("notes of mine\n")
    with pytest.raises(UsageError, match="no state of a sweep"):
        State(path, {})
    assert path.read_text() == "notes of mine\n"
    with pytest.raises(UsageError, match=r"s\.state"):
        State(tmp_path / "none" / "s.state", {})


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["--sweep", "--n-max-list", "1,x"], "--n-max-list '1,x'"),
        (["--sweep", "--n-max-list", "0"], "numbers from 1 to 64"),
        (["--sweep", "--concurrency", "99"], "numbers from 1 to 64"),
        (["--sweep", "--temps", "-1"], "temperatures are 0 or more"),
        (["--sweep", "--temps", "nan"], "temperatures are 0 or more"),
        (["--sweep", "--temp", "0.5"], "--temps"),
        (["--sweep", "--json", "no/where/s.json"], "--json no/where/s.json"),
        (["--sweep", "--json", "no-such", "--html", "./no-such"], "the same file"),
        (["--sweep", "--html", ""], "--html ''"),
        (["--sweep", "--temps", ""], "--temps ''"),
        (["--sweep", "--json", __file__], "that file is no JSON"),
        (["--sweep", "--spec-draft-n-max", "0"], "something to draft"),
        (["--html", "s.html"], "add --sweep"),
        (["--force"], "--force is for a sweep: add --sweep"),
    ],
)
def test_mistakes(tiny: Path, arguments: list[str], needle: str) -> None:
    """Found before any model is loaded."""
    done = CliRunner().invoke(bench_cmd, ["-m", str(tiny), *arguments])
    assert isinstance(done.exception, UsageError)
    assert needle in str(done.exception)


def test_a_mistake_is_one_line(cli: Any, tiny: Path) -> None:
    done = cli("bench", "-m", str(tiny), "--sweep", "--spec-type", "none")
    assert (done.rc, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "nothing to sweep" in done.stderr
