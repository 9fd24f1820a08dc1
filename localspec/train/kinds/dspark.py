"""Settings of DSpark."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.train.kinds import dflash
from localspec.train.settings import setting


@dataclass(frozen=True)
class Settings(dflash.Settings):
    """DFlash's, and those of the two heads."""

    block: int = setting(5, "Rows of a block at most, and tokens that it drafts.", at_least=1, at_most=dflash.MAX_BLOCK - 1)
    markov_rank: int = setting(64, "Rank of the Markov head.", at_least=1, at_most=4096)
    confidence: float = setting(1.0, "Weight of the confidence head's loss; 0: no such head.", at_least=0)
