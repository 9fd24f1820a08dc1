"""Pictures as PNG files, where matplotlib is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from localspec.errors import UsageError

_PNG = b"\x89PNG"


def need_picture(picture: Path) -> None:
    """Raise UsageError where `picture` can't be drawn: before the work, not after it. What is no picture is not replaced."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from None
    if not picture.name or picture.is_dir() or not os.access(picture.parent, os.W_OK):
        raise UsageError(f"--plot {picture}: name a file in a directory that can be written to, such as run.png")
    try:
        lost = picture.exists() and picture.open("rb").read(len(_PNG)) not in (_PNG, b"")
    except OSError as error:
        raise UsageError(f"--plot {picture}: {error.strerror or error}") from None
    if lost:
        raise UsageError(f"--plot {picture}: that file is no picture and would be lost: name another, such as run.png")


def save(figure: Any, picture: Path) -> None:
    """Write a matplotlib figure under a temporary name and rename it. Raises UsageError."""
    part = picture.with_name(picture.name + ".part")
    try:
        figure.savefig(part, format="png", dpi=130)
        os.replace(part, picture)
    except OSError as error:
        raise UsageError(f"{picture} can't be written: {error.strerror or error}") from None
