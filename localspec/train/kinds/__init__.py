"""The kinds of speculators and the settings of each, without PyTorch: what the command line shows. The models themselves, of
the same names, stand in localspec/train/models."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

_MODELS = Path(__file__).parent.parent / "models"


def names() -> list[str]:
    """The kinds there are."""
    return sorted(p.stem for p in _MODELS.glob("*.py") if p.stem != "__init__")


def title(name: str) -> str:
    """What a kind is, from the first words of its file: "EAGLE-3 (Li et al., arXiv 2503.01840) as llama.cpp runs it"."""
    text = ast.get_docstring(ast.parse((_MODELS / f"{name}.py").read_text("utf-8"))) or name
    return text.split(".\n")[0].split("\n\n")[0].replace("\n", " ").split(", and ")[0].rstrip(".")


def settings_of(name: str) -> Any:
    """The dataclass of a kind's own settings."""
    return importlib.import_module(f"{__name__}.{name}").Settings
