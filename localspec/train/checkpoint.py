"""Checkpoints: a run's directory has `last` and `best`, each a draft in the format of vLLM's speculators.

    OUT/run.json          the settings that the run was begun with
    OUT/metrics.jsonl     a line for each step and each evaluation
    OUT/last/  OUT/best/  config.json, model.safetensors, localspec.json
    OUT/last/trainer.pt   parameters, optimisers and place in the data: what resuming needs

A checkpoint is written beside the old one and takes its place in two renames; a run that is killed between them finds it
where it stands.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from localspec.data.shards import write_whole
from localspec.errors import TrainError
from localspec.speculator import CHECKPOINT_FILE
from localspec.train.models import Speculator

TRAINER = "trainer.pt"
WEIGHTS = "model.safetensors"


def save(folder: Path, model: Speculator, provenance: Mapping[str, Any], trainer: Mapping[str, Any] | None) -> None:
    """Write a checkpoint, whole or not at all. Raises TrainError where the disk refuses."""
    fresh, old = _beside(folder, "new"), _beside(folder, "old")
    try:
        for path in (fresh, old):
            if path.exists() and (folder.exists() or path is fresh):
                shutil.rmtree(path)
        fresh.mkdir(parents=True)
        tensors, config = model.export()
        save_file(tensors, fresh / WEIGHTS, {"format": "pt"})
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        (fresh / CHECKPOINT_FILE).write_text(model.config(provenance).to_json(), "utf-8")
        if trainer is not None:
            torch.save(dict(trainer), fresh / TRAINER)
        (fresh / "whole").touch()
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as a RuntimeError
        if not (fresh / "whole").exists():
            shutil.rmtree(fresh, ignore_errors=True)  # it would keep the disk full
        raise TrainError(f"the checkpoint {folder} can't be written: {error}") from None


def settled(folder: Path) -> Path | None:
    """Where the checkpoint stands: `folder`, or what a killed run had not yet renamed; None where there is none."""
    for path in (folder, _beside(folder, "new"), _beside(folder, "old")):
        if (path / "whole").exists():
            return path
    return None


def load_trainer(folder: Path, device: torch.device) -> dict[str, Any]:
    """What `save` was given as `trainer`. Raises TrainError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd pickles, to torch's developers
            state = torch.load(folder / TRAINER, map_location=device, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
        if isinstance(error, OSError) and error.strerror and error.errno != errno.ENOENT:
            raise TrainError(f"{folder / TRAINER} can't be read: {error.strerror}") from None
        raise damaged(folder) from None
    if not isinstance(state, dict):
        raise damaged(folder)
    return state


def damaged(folder: Path) -> TrainError:
    """The error about a checkpoint from which a run can't go on. What torch says of such a file is no help, or worse: it
    advises to load it in the way that runs the code in it."""
    state = folder / TRAINER
    why = "is damaged, or none that localspec wrote" if state.exists() else "is missing"
    keep = f", with --init {folder.parent} to keep the best weights" if (folder.parent / "best").is_dir() else ""
    return TrainError(f"{state} {why}: delete {folder} to begin again{keep}")


def load_weights(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's exported tensors. Raises TrainError."""
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{folder / WEIGHTS} can't be read ({error}): give a checkpoint's directory") from None


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def _beside(folder: Path, which: str) -> Path:
    return folder.with_name(f"{folder.name}.{which}")
