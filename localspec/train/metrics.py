"""Loss curves: always as JSON lines, for TensorBoard where it is installed, and as a picture."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from localspec.errors import TrainError
from localspec.picture import need_picture, save

FILE = "metrics.jsonl"


class Metrics:
    """Writes a run's lines as they come. `step`: the steps already done, whose lines are kept; later ones, of a run that was
    killed after its last checkpoint, are dropped: they come again."""

    def __init__(self, folder: Path, step: int):
        path = self._path = folder / FILE
        kept = [line for line in read(path) if line["step"] <= step] if path.exists() and step else []
        part = path.with_name(FILE + ".part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            os.replace(part, path)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from None
        self._board = _board(folder, step)

    def _refused(self, error: OSError) -> TrainError:
        return TrainError(f"{self._path} can't be written: {error.strerror or error}; the last checkpoint is safe")

    def write(self, line: dict[str, Any]) -> None:
        """Add a line. Raises TrainError where the disk refuses."""
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from None
        if self._board is not None:
            for name, value in _scalars(line):
                self._board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said
            self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """A run's lines; one cut off by a kill, or damaged, is left out. Raises TrainError where there is no such file."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise TrainError(f"{path} can't be read ({error.strerror}): give a training run's directory") from None
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                lines.append(found)
    return lines


def _scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    kind = "eval" if "eval" in line else "train"
    for name, value in line.get("eval", line).items():
        if isinstance(value, int | float) and name != "step":
            yield f"{kind}/{name}", value
        elif isinstance(value, list):
            yield from ((f"{kind}/{name}/{i + 1}", v) for i, v in enumerate(value) if v is not None)
        elif name == "by_source":
            yield from ((f"eval/{source}", walk["tokens_per_verify"]) for source, walk in value.items())


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def plot(folder: Path, picture: Path) -> None:
    """Draw the run in `folder` as a PNG: loss and, beside it, tokens per verify on held-out prompts by source."""
    need_picture(picture)
    from matplotlib.figure import Figure

    lines = read(folder / FILE)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval" in line]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([s["step"] for s in steps], [s["loss"] for s in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title="training loss")
    at = [e["step"] for e in evaluations]
    right.plot(at, [e["eval"]["tokens_per_verify"] for e in evaluations], "ko-", linewidth=2, markersize=4, label="all")
    for source in sorted({s for e in evaluations for s in e["eval"]["by_source"]}):
        values = [e["eval"]["by_source"].get(source, {}).get("tokens_per_verify") for e in evaluations]
        right.plot(at, [float("nan") if v is None else v for v in values], ".-", linewidth=1, label=source)
    right.set(xlabel="step", ylabel="tokens per verify", title="held-out prompts, rolled out")
    right.legend(fontsize="small")
    save(figure, picture)
