"""Models in Hugging Face's layout that can become GGUF: one file per family, found by the class that config.json names.

A family is a module here with ``ARCHITECTURES``, the names of the classes in transformers, and a function
``plan(config: Config, weights: Weights) -> Plan``. Adding one edits nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from localspec.convert.targets.config import Config


def families() -> dict[str, ModuleType]:
    """Architecture, as config.json calls it -> the family's module."""
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found |= {name: module for name in getattr(module, "ARCHITECTURES", ())}
    return found


def family_of(config: Config) -> ModuleType:
    """The family that converts this model. Raises ModelFileError that names llama.cpp's converter where there is none."""
    known = families()
    if config.architecture not in known:
        raise config.unsupported(f"is of the architecture {config.architecture or 'unknown'}")
    return known[config.architecture]
