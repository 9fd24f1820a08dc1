"""The command line of training: options made from the settings, and combinations that are refused in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from localspec.cli.train_cmd import train_cmd
from localspec.errors import LocalspecError
from localspec.train import kinds, models
from localspec.train.settings import TrainSettings
from tests import train_data
from tests.conftest import Cli


def call(*arguments: str) -> tuple[int, str]:
    """(exit code, what was said); a LocalspecError is what the command line shows of it."""
    done = CliRunner().invoke(train_cmd, list(arguments))
    if isinstance(done.exception, LocalspecError):
        return 2, str(done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_every_setting_is_an_option_with_its_default() -> None:
    code, text = call("eagle3", "--help")
    assert code == 0
    flat = " ".join(text.split())
    assert "-t, --threads" in flat
    for cls in (TrainSettings, models.find("eagle3").Settings):
        for f in dataclasses.fields(cls):
            assert f"--{f.name.replace('_', '-')}" in flat
    assert "[default: 8192]" in flat
    assert call("--help")[1].count("eagle3") >= 1


def test_each_kind_has_a_model_and_the_settings_that_are_shown() -> None:
    folder = Path(kinds.__file__).parent
    assert sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__") == models.names()
    for name in models.names():
        assert models.find(name).Settings is kinds.settings_of(name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --data, or --states online"),
        (["--data", "D", "--prompts", "P"], "--prompts is for --states online and hybrid"),
        (["--states", "online"], "give the --prompts"),
        (["--states", "online", "--prompts", "P", "--data", "D"], "leave --data out"),
        (["--states", "hybrid", "--prompts", "P"], "--states hybrid needs --data"),
        (["--data", "D", "--batch-tokens", "3"], "--batch-tokens 3: at least 16"),
        (["--data", "D", "--ttt", "0"], "--ttt 0: at least 1"),
        (["--data", "D", "--ttt", "65"], "--ttt 65: at most 64"),
        (["--data", "D", "--epochs", "inf"], "--epochs inf: at most"),
        (["--data", "D", "--seed", "-1"], "--seed -1: at least 0"),
        (["--data", "D", "--seed", str(1 << 64)], f"--seed {1 << 64}: at most"),
        (["--data", "D", "--decay", "5"], "--decay 5.0: at most 1"),
        (["--data", "D", "--threads", "100000"], "--threads 100000: at most 512"),
        (["--data", "D", "--noise", "inf"], "--noise inf: give a number"),
        (["--data", "D"], "no training data there"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    target = train_data.target(tmp_path)
    code, text = call("eagle3", "-m", str(target), "-o", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert says in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("picture", [".", "nowhere/run.png"])
def test_a_picture_that_cannot_be_written_is_said_before_the_run(
    tmp_path: Path, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, text = call("eagle3", "-m", "none.gguf", "-o", "out", "--data", "D", "--plot", picture)
    assert (code, f"--plot {picture}: name a file" in text) == (2, True)


def test_a_picture_replaces_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = train_data.target(tmp_path)
    code, text = call("eagle3", "-m", str(model), "-o", str(tmp_path / "out"), "--data", "D", "--plot", str(model))
    assert (code, "that file is no picture" in text) == (2, True)


def test_the_group_wants_a_kind_or_a_look() -> None:
    assert "give a kind to train" in call("--target", "x")[1]
    assert "options stand behind the kind" in call("--target", "x", "eagle3", "-m", "x", "-o", "y")[1]
    assert "options stand behind the kind" in call("-t", "1", "eagle3", "-m", "x", "-o", "y")[1]
    assert call("eagle4")[0] == 2


def test_a_look_ahead_needs_no_data_and_no_place(cli: Cli, smollm2: Path) -> None:
    done = cli("train", "eagle3", "--preflight", "--target", smollm2, "-t", 1)
    assert done.rc == 0, done.stderr
    assert "tokens per verify" in done.stderr
    refused = cli("train", "eagle3", "--target", smollm2, "--data", "nowhere")
    assert (refused.rc, "give -o DIR" in refused.stderr) == (2, True)


def test_the_look_ahead_takes_as_many_threads_as_asked_for(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def child(arguments: list[str]) -> None:
        asked.append(arguments)
        raise LocalspecError("not measured here")

    monkeypatch.setattr("localspec.train.preflight.Child", child)
    target = str(smollm2)
    for arguments in (("--preflight", "-m", target, "-t", "3"), ("eagle3", "--preflight", "-m", target, "--threads", "3"),
                      ("eagle3", "--preflight", "-m", target, "-t", "3")):  # fmt: skip
        code, said = call(*arguments)
        assert (code, "not measured here" in said) == (0, True), said
    assert [arguments[arguments.index("-t") + 1] for arguments in asked] == ["3", "3", "3"]
