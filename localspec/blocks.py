"""What the engine and whoever chooses its blocks tell each other, and the simplest chooser: always as many tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: llama.cpp's default of --spec-draft-n-max, and ours of a fixed block
DEFAULT_N_MAX = 3
#: the most that is drafted where the number is chosen as the text goes
ADAPTIVE_N_MAX = 8


@dataclass(slots=True)
class Look:
    """A sequence before a step. `key` tells it from the others, `room` is the most that may be drafted for it, `may_cut`
    whether drafted tokens may be dropped after a look at them."""

    key: int
    room: int
    may_cut: bool = True


@dataclass(slots=True)
class Outcome:
    """What became of a sequence's block: `confidence` of the tokens that were verified, in order, and how many of them were
    kept; `gained` counts the tokens of the text."""

    key: int
    confidence: Sequence[float]
    n_accepted: int
    gained: int
    again: int = 0  # further rows: tokens kept from a side branch of a tree, which had to be read again


#: rows of each pass that a decode of blocks (sequence, rows) takes
Passes = Callable[[tuple[tuple[int, int], ...]], tuple[int, ...]]


def one_pass(blocks: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Where a decode is never cut."""
    return (sum([rows for _, rows in blocks]),)


class Controller(Protocol):
    """Chooses a step's blocks and learns from what came of them."""

    n_max: int

    @property
    def asleep(self) -> bool:
        """Whether nothing has paid for long and nothing is drafted soon: what drafts are made from need not be read."""

    def begins(self) -> None:
        """A text is taken up, and no other is being written."""

    def rests(self, n: int) -> bool:
        """Whether the next step, of n sequences, is a plain one whatever they look like: then nothing is asked."""

    def choose(self, looks: Sequence[Look], passes: Passes = one_pass) -> list[int]:
        """Tokens to draft for each sequence, 0 to n_max. `passes`: how decodes are cut on this session."""

    def floor(self) -> float:
        """Confidence below which a chain of drafts may end, for drafters that can stop by themselves."""

    def cut(self, looks: Sequence[Look], confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each draft to verify."""

    def record(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        """A finished step: tokens proposed for all sequences, seconds of drafting and of everything else. `proposed` is -1
        where the drafter was not asked."""

    def trace(self) -> dict[str, Any]:
        """What was decided in the last step, and why: for --trace."""


@dataclass
class FixedBlock:
    """Always n_max tokens."""

    n_max: int = DEFAULT_N_MAX
    asleep: bool = False

    def begins(self) -> None:
        pass

    def rests(self, n: int) -> bool:
        return False

    def choose(self, looks: Sequence[Look], passes: Passes = one_pass) -> list[int]:
        return [max(0, min(self.n_max, look.room)) for look in looks]

    def floor(self) -> float:
        return 0.0

    def cut(self, looks: Sequence[Look], confidences: Sequence[Sequence[float]]) -> list[int]:
        return [len(c) for c in confidences]

    def record(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        pass

    def trace(self) -> dict[str, Any]:
        return {"why": "fixed"}
