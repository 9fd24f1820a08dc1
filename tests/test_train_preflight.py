"""What is said before a training run: from a known cost curve, and end to end on a tiny target."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from localspec.curve import Curve
from localspec.errors import TrainError
from localspec.gguf_file import GGUFFile
from localspec.train.preflight import Findings, about_disk, about_gain, about_target, needed, preflight
from tests import gguf_maker, train_data

ROOT = Path(__file__).parent.parent
CHEAP = Curve((1, 2, 3, 4), (10.0, 11.0, 12.0, 13.0))
DEAR = Curve((1, 2, 3, 4), (10.0, 20.0, 30.0, 40.0))


def test_what_is_needed_is_verification_and_drafting() -> None:
    assert needed(CHEAP, 1.0) == pytest.approx({1: 1.2, 2: 1.4, 3: 1.6})


def test_a_machine_where_blocks_are_cheap_is_told_its_ceiling() -> None:
    found = Findings()
    about_gain(CHEAP, 100_000_000, 5_000_000, found)  # 10 ms * 5.3 % + 0.05 ms = 0.58 ms
    assert found.warnings == []
    assert "1: 1.16  2: 1.32  3: 1.47" in " ".join(found.lines)
    assert "a perfect draft would be 2.71x as fast, at 3 drafted" in found.lines


def test_a_machine_where_nothing_can_be_won_is_warned_of() -> None:
    found = Findings()
    about_gain(DEAR, 100_000_000, 5_000_000, found)
    assert found.warnings == ["nothing can be won on this machine: even a draft that is always right would be slower"]
    found = Findings()
    about_gain(Curve((1, 2, 3, 4), (10.0, 17.0, 24.0, 28.0)), 100_000_000, 5_000_000, found)
    assert [w.split(":")[0] for w in found.warnings] == ["a gain is unlikely here"]


def test_a_target_whose_refusals_cost_more_or_that_cannot_be_tapped_is_warned_of(tmp_path: Path) -> None:
    found = Findings()
    about_target(GGUFFile.open(gguf_maker.tiny_mamba(tmp_path / "m.gguf")), None, found)
    assert "refused drafts cost more" in found.warnings[0]
    found = Findings()
    about_target(GGUFFile.open(gguf_maker.tiny_gemma3(tmp_path / "g.gguf")), (1, 2, 99), found)
    assert "tap 99 does not exist" in found.warnings[0]
    assert "stock llama.cpp can't tap a gemma3 graph" in found.warnings[1]
    assert "eval callback" in found.lines[0]


def test_a_disk_that_is_too_small_stops_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 100_000_000))
    with pytest.raises(TrainError, match="checkpoints take 400 MB and 300 MB are missing"):
        about_disk(tmp_path / "not" / "there", 10_000_000, Findings())
    about_disk(tmp_path, 1_000_000, Findings())


def test_a_curve_that_cannot_be_measured_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Curve:
        raise TrainError("no room")

    monkeypatch.setattr("localspec.train.preflight.measure", refuse)
    found = preflight(GGUFFile.open(gguf_maker.tiny_llama(tmp_path / "t.gguf")), (0, 1, 2), 3, 1000, None)
    assert found.warnings == ["the cost of verification can't be measured here: no room"]


def test_it_is_said_before_training_and_on_its_own(tmp_path: Path) -> None:
    target = train_data.target(tmp_path)
    train_data.shards(tmp_path / "data", target, 20)
    where = ["eagle3", "-m", str(target), "--data", str(tmp_path / "data"), "-o", str(tmp_path / "out")]
    for arguments in (["--preflight", "-m", str(target)], [*where, "--preflight"]):
        done = subprocess.run(
            [sys.executable, "-m", "localspec", "train", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode in (0, 2), done.stderr
        if arguments[0] == "eagle3":
            assert "a verification of n tokens, in decodes of one:  2: " in done.stderr
            assert "checkpoints take up to" in done.stderr
        else:
            assert "has not three different taps" in done.stderr  # of two layers
    assert not (tmp_path / "out").exists()
