"""What the tests of training do alike: a folder to train in, a run, and what it says of its losses. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.train import evaluate, loop, metrics
from tests import train_data


def place_for(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder with target.gguf and shards in data."""
    folder = tmp_path_factory.mktemp(name)
    train_data.shards(folder / "data", train_data.target(folder))
    return folder


def go(run: loop.Run) -> tuple[evaluate.Report, list[str]]:
    """The report of a run, and what was said to the person."""
    said: list[str] = []
    return loop.train(run, said.append, lambda _: None), said


def losses(out: Path) -> list[float]:
    """Of each step."""
    return [line["loss"] for line in metrics.read(out / "metrics.jsonl") if "loss" in line]
