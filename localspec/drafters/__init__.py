"""Ways of drafting, one file each, found by its name: `localspec/drafters/<name>.py` with a function `load`.

A drafter is a guest: it sees the sequences, proposes tokens, and is told what was kept. What it says can make decoding
faster or slower, never different.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from localspec.accept import Draft, Sampling
from localspec.errors import PairingError
from localspec.gguf_file import GGUFFile
from localspec.target import Rows, TargetSession
from localspec.tree import Shape, Tree


@dataclass(slots=True)
class Sequence:
    """One text being written: what the engine and the drafter both look at.

    `tokens` holds the prompt and all that was kept, the last of them pending: it is not in the target's cache yet.
    `slot` is its place in the caches; `key` feeds the random numbers, so the text does not depend on the slot.
    """

    slot: int
    key: int
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0


class Drafter(Protocol):
    """What the engine asks of a drafter."""

    name: str

    def begin(self, seq: Sequence) -> None:
        """A text starts in `seq.slot`: `seq.tokens` is its prompt. May share its beginning with the slot's last text."""

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        """At most ks[i] tokens to follow seqs[i].tokens, for each sequence; fewer, or none, is always fine."""

    def commit(self, seq: Sequence, rows: Rows) -> None:
        """`seq.tokens` has grown by what was accepted; `rows` are the target's rows of exactly those positions."""

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        """The sequence goes back to its first n_keep tokens."""

    def close(self) -> None:
        """Free what it holds."""


@runtime_checkable
class Stoppable(Protocol):
    """A drafter that ends a draft before a token in which it has less confidence than `p_min`, which may be changed before
    each `propose`."""

    p_min: float


@runtime_checkable
class TreeDrafter(Protocol):
    """A drafter that can draft trees."""

    def propose_tree(self, seq: Sequence, shape: Shape) -> Tree:
        """A tree of at most this shape behind seq.tokens; empty is always fine."""


@runtime_checkable
class TapReader(Protocol):
    """A drafter that reads the target's hidden states: those of the prompt through this, later ones from `commit`'s rows.
    Where it `may_skip`, some are not read: of a prompt as `skip` says, and of `commit`'s rows that have none."""

    may_skip: bool

    def keep(self, seq: Sequence) -> int:
        """How many tokens of the prompt `seq.tokens` the target may take from its cache; asked before the prompt is
        computed. The states of all later ones but the pending one must be read."""

    def read(self, seq: Sequence, first: int, taps: np.ndarray) -> None:
        """States f32[n, T, H] of seq.tokens[first : first + n], piece by piece, in order; valid until it returns."""

    def skip(self, seq: Sequence) -> None:
        """No states before the pending token's will be read: a draft has to do without them."""


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """What a drafter may need to know to be made."""

    draft_path: Path | None = None
    rule: str = "match"
    p_min: float = 0.0
    n_gpu_layers: int = 0
    n_threads: int = 0
    use_mmap: bool = True
    n_branches: int = 0  # ids for the branches of draft trees, 0: chains only


def names() -> list[str]:
    """The drafters that exist."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def split(name: str) -> tuple[str, ...]:
    """The drafters in a name: itself, or of "ngram,lm" both; in this order, whatever the order in `name`. Raises
    PairingError where there is no such drafter, or no such pair."""
    parts = sorted(name.split(","), key=lambda part: part != "ngram")
    unknown = [part for part in parts if part not in names()]
    if unknown:
        raise PairingError(f"there is no drafter '{unknown[0]}'; there are {', '.join(names())}")
    if len(parts) > 1 and (len(parts) > 2 or parts[0] != "ngram" or parts[1] == "ngram"):
        raise PairingError(f"drafters can't be combined as '{name}': ngram goes with one other, such as ngram,lm")
    return tuple(parts)


def taps(name: str, target: GGUFFile, settings: DrafterSettings) -> tuple[int, ...]:
    """The hidden states that a session must read for the drafter `name` (SessionSettings.taps); none for most. Raises
    PairingError where the draft does not fit the target."""
    parts = [part for part in name.split(",") if part != "ngram"]  # which reads none
    if len(parts) != 1 or parts[0] not in names():
        return ()
    wanted = getattr(importlib.import_module(f"{__name__}.{parts[0]}"), "taps", None)
    return tuple(wanted(target, settings)) if wanted is not None else ()


def load(name: str, target: TargetSession, settings: DrafterSettings) -> Drafter:
    """Make the drafter `name` for `target`, or of two names ("ngram,eagle3") one that is both. Raises PairingError where
    there is none of that name, or it does not fit."""
    parts = split(name)
    drafter: Drafter = importlib.import_module(f"{__name__}.{parts[-1]}").load(target, settings)
    if len(parts) > 1:
        drafter = importlib.import_module(f"{__name__}._ngram_first").ngram_first(drafter, settings.p_min)
    return drafter
