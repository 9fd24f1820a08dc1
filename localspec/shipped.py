"""Drafts that come with localspec, in ``localspec/drafts/``: found by the target that they were made for."""

from __future__ import annotations

from pathlib import Path

from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig, TargetIdentity

FOLDER = Path(__file__).parent / "drafts"


def shipped_draft(target: GGUFFile) -> Path | None:
    """The draft for `target`, None where there is none.

    Raises ModelFileError where a file of ours is damaged.
    """
    for path in sorted(FOLDER.glob("*.gguf")):
        made_for = SpeculatorConfig.from_gguf(GGUFFile.open(path, "draft")).target
        same_shape = (made_for.n_layer, made_for.n_embd) == (target.n_layer, target.n_embd)  # known at once: asked first
        if same_shape and made_for.difference(TargetIdentity.of(target)) is None:
            return path
    return None
