"""Settings of an MTP assistant."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.train.settings import setting

MAX_TTT = 64


@dataclass(frozen=True)
class Settings:
    """Of the assistant alone."""

    ttt: int = setting(4, "Steps of the training-time test: tokens in a row that it learns to draft.", at_least=1,
                       at_most=MAX_TTT)  # fmt: skip
    width: int = setting(0, "Width of its layers; 0: a quarter of the target's, at least 32.", at_least=0)
    layers: int = setting(4, "Layers, the last one full, the others windowed.", at_least=2, at_most=64)
    heads: int = setting(0, "Query heads of each layer; 0: the target's.", at_least=0)
    n_ff: int = setting(0, "Width of the feed-forward layers; 0: eight times its own.", at_least=0)
    chains: str = setting("kept", "kept: only chains right so far go on a step; all: every chain.", ("kept", "all"))
    step_decay: float = setting(1.0, "Weight of each step's loss against the step before.", at_least=0)
