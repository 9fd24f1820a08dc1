"""docs/stock_acceptance.py: what it counts and how it judges. Whether stock llama-server does as we do is a run of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.engine import Stats
from localspec.peer import draft_arguments
from localspec.target import SessionSettings

SCRIPT = Path(__file__).parent.parent / "docs" / "stock_acceptance.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("stock_acceptance", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stock_acceptance"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


class Ours:
    """An engine that says a text: three tokens drafted for each, `kept` of them kept."""

    def __init__(self, text: list[int], kept: int):
        self.text, self.kept = text, kept
        self.session = SimpleNamespace(rollback=lambda *_: None)
        self.engine = self

    def generate(self, request: Any) -> Iterator[None]:
        self.prompt, self.said = request.prompt, self.text[: request.max_tokens]
        yield None

    def tokens(self, _slot: int) -> list[int]:
        return [*self.prompt, *self.said]

    def finish(self, _slot: int) -> Any:
        n = len(self.said)
        return SimpleNamespace(n_drafted=3 * n, n_accepted=self.kept * n)


class Server:
    def __init__(self, text: list[int], kept: int):
        self.text, self.kept, self.asked = text, kept, []

    def complete(self, _tokens: list[int], _sampling: Any, n_predict: int) -> dict[str, Any]:
        self.asked.append(n_predict)
        said = self.text[:n_predict]
        timings = {"draft_n": 3 * len(said), "draft_n_accepted": self.kept * len(said)}
        return {"tokens": said, "timings": timings}


def test_the_same_text_is_asked_for_once(script: Any) -> None:
    text = list(range(20))
    for theirs in (text, text[:-1]):  # the end of generation is left out
        server = Server(theirs, 2)
        whole, equal = script.measure(Ours(text, 2), server, [1, 2], 20, 0)
        assert server.asked == [20]
        assert whole is equal
        assert (whole.n, whole.n_tokens, whole.ours_drafted, whole.ours_kept) == (1, 20, 60, 40)
        assert (whole.theirs_drafted, whole.theirs_kept) == (3 * len(theirs), 2 * len(theirs))
        assert whole.points == pytest.approx(0)


def test_texts_that_part_are_compared_up_to_there(script: Any) -> None:
    text = list(range(20))
    server = Server([*text[:12], 99, 98], 1)
    whole, equal = script.measure(Ours(text, 2), server, [1, 2], 20, 0)
    assert server.asked == [20, 12]
    assert (whole.n_tokens, whole.ours_drafted, whole.theirs_drafted) == (20, 60, 42)
    assert (equal.n_tokens, equal.ours_drafted, equal.theirs_drafted) == (12, 36, 36)
    assert equal.points == pytest.approx(-100 / 3)
    whole, equal = script.measure(Ours(text, 2), Server([0, 1, 99], 1), [1, 2], 20, 0)
    assert (whole.n, equal.n, equal.ours_drafted) == (1, 0, 0)


def test_counts_are_summed(script: Any) -> None:
    total = script.Count()
    for kept in (1, 2):
        total.add(script.Count(1, 10, 30, kept * 10, 30, kept * 10 + 3))
    assert (total.n, total.n_tokens, total.ours, total.theirs) == (2, 20, 50.0, 60.0)
    assert total.row("all").split()[:3] == ["all", "2", "20"]


def test_names_of_statistics_are_the_engines() -> None:
    assert {"n_drafted", "n_accepted"} <= set(Stats.__dataclass_fields__)


def test_what_is_missing_is_said_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--llama-server", str(tmp_path / "none"), "--target", "x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"stock_acceptance: {tmp_path / 'none'}: no such file\n"


def test_the_servers_flags_are_a_fixed_number_of_drafted_tokens(script: Any, tmp_path: Path) -> None:
    session = SimpleNamespace(n_ctx=256, n_batch=64, settings=SessionSettings(256))
    loaded = SimpleNamespace(drafter=SimpleNamespace(name="ngram"), session=session)
    args = SimpleNamespace(target=tmp_path / "t.gguf", draft=None, n_max=5, threads=1)
    flags = draft_arguments(script.settings(loaded, args))
    assert flags[:2] == ["--spec-type", "ngram-simple"]
    assert flags[-1] == "5"
