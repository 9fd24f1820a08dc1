"""Settings of a small model."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.train.settings import setting

MAX_DEPTH = 64  # tokens that --spec-draft-n-max allows


@dataclass(frozen=True)
class Settings:
    """Of the small model alone."""

    layers: str = setting("", "Layers taken from the target, such as 0,1,14,28,29, or their number, spread evenly; without, "
                              "the first sixth of them.")  # fmt: skip
    depth: int = setting(4, "Tokens in a row that evaluations draft.", at_least=1, at_most=MAX_DEPTH)
    frequent: int = setting(4096, "Frequent tokens whose logits every step computes; 0: all tokens'.", at_least=0)
    sampled: int = setting(2048, "Tokens drawn anew for each batch to stand for all others.", at_least=1)
    train_head: bool = setting(False, "Train the head, too, and the embedding where the target ties the two.")
