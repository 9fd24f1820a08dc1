"""Drafts that come with localspec, in ``localspec/drafts/``: found by the target that they were made for."""

from __future__ import annotations

from pathlib import Path

from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig, TargetIdentity

FOLDER = Path(__file__).parent / "drafts"


def shipped_draft(target: GGUFFile, kind: str | None = None) -> Path | None:
    """The draft for `target`, None where there is none; of one `kind` (`shipped_kinds`) where that is given.

    Raises ModelFileError where a file of ours is damaged.
    """
    for path in _files():
        config = SpeculatorConfig.from_gguf(GGUFFile.open(path, "draft"))
        made_for = config.target
        if kind not in (None, config.method):
            continue
        same_shape = (made_for.n_layer, made_for.n_embd) == (target.n_layer, target.n_embd)  # known at once: asked first
        if same_shape and made_for.difference(TargetIdentity.of(target)) is None:
            return path
    return None


def shipped_kinds() -> set[str]:
    """The kinds of which there is a draft for some target: --spec-type's names."""
    return {SpeculatorConfig.from_gguf(GGUFFile.open(path, "draft")).method for path in _files()}


def _files() -> list[Path]:
    return sorted(FOLDER.glob("*.gguf"))
