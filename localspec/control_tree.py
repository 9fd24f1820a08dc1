"""Which steps draft a tree instead of a chain, and of what shape. Pure arithmetic, as control.py.

`FixedTree` always asks for one. `TreesThatPay` stands beside an `Adaptive`, and asks for one only where a tree has been
worth more tokens a second than the chains that are drafted otherwise, which trials of single steps find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from localspec.blocks import Look
from localspec.control import Adaptive
from localspec.tree import Shape, Tree

#: Nodes, depth and width of trees; the first is what --spec-tree on drafts. With the pending token 8, 4 and 16 rows, where
#: the kernels' cost has its steps.
SHAPES = (Shape(7, 4, 3), Shape(3, 2, 2), Shape(15, 5, 4))


@dataclass(slots=True)
class TreeOutcome:
    """A tree that was verified: `nodes` were kept, `gained` counts the tokens of the text, `again` further rows."""

    key: int
    tree: Tree
    shape: Shape
    nodes: Sequence[int]
    gained: int
    again: int


class TreeChooser(Protocol):
    """Chooses which steps draft a tree, and learns from what came of them."""

    def choose(self, look: Look, again: int) -> Shape | None:
        """The tree of a step, None for a chain. `again` of its nodes give way to tokens that are read again."""

    def record(self, outcome: TreeOutcome, draft: float, rest: float) -> None:
        """A finished step: seconds of drafting and of everything else."""

    def trace(self) -> dict[str, Any]:
        """What was decided in the last step, and why: for --trace."""


_HOPE = 0.5  # of the tokens that a chain misses, the share that a tree's side branches catch at best
_GAPS = (8, 512)  # steps between trials of a shape: at first, and at most while it does not pay
_JUDGED = 6  # trees of a shape before what they gained is believed
_AHEAD = 1.02  # times the rate of chains, that trees must reach
_FOLLOW = 0.05  # of the moving averages


@dataclass
class FixedTree:
    """Always a tree of one shape."""

    shape: Shape = SHAPES[0]

    def choose(self, look: Look, again: int) -> Shape | None:
        return self.shape

    def record(self, outcome: TreeOutcome, draft: float, rest: float) -> None:
        pass

    def trace(self) -> dict[str, Any]:
        return {"why": "a tree, fixed", "nodes": self.shape.nodes}


@dataclass
class _Trials:
    """What came of the trees of one shape."""

    seen: int = 0
    gained: float = 0.0  # tokens and seconds of one, moving averages
    seconds: float = 0.0
    draft: float = 0.0
    gap: int = _GAPS[0]
    since: int = 0

    def add(self, gained: int, seconds: float, draft: float) -> None:
        self.seen += 1
        follow = max(_FOLLOW, 1 / self.seen)
        self.gained += follow * (gained - self.gained)
        self.seconds += follow * (seconds - self.seconds)
        self.draft += follow * (draft - self.draft)


class TreesThatPay:
    """A tree where it pays over the chains of `chains`. Its steps count in their ledger: together they may lose no more."""

    def __init__(self, chains: Adaptive, shapes: Sequence[Shape] = SHAPES):
        self.chains = chains
        self.trials = {shape: _Trials() for shape in shapes}
        self._last: dict[str, Any] = {}

    def rate(self, shape: Shape) -> float:
        """Tokens per second of trees of this shape: measured, or what they could reach at best."""
        found = self.trials[shape]
        if found.seen >= _JUDGED:
            return found.gained / found.seconds
        return self._hope(shape) / self._cost(shape)

    def _hope(self, shape: Shape) -> float:
        """Tokens of a step at best: at every place the first token, or half of what it misses."""
        gain = alive = 1.0
        for j in range(shape.depth):
            chance = self.chains.position.chance(j)
            alive *= chance + (1 - chance) * _HOPE
            gain += alive
        return gain

    def _cost(self, shape: Shape) -> float:
        """Seconds of a step, in which rows to be read again take the place of nodes. Its draft: until one was made, that of
        a chain as deep."""
        found = self.trials[shape]
        draft = found.draft if found.seen else self.chains.draft.seconds(shape.depth)
        return self.chains.decode.seconds(1 + shape.nodes) + draft

    def choose(self, look: Look, again: int) -> Shape | None:
        self._last = {"why": "no tree"}
        beat = self.chains.to_beat
        if not beat:
            return None
        best: Shape | None = max(self.trials, key=self.rate)
        worth = best is not None and self.trials[best].seen >= _JUDGED and self.rate(best) > _AHEAD * beat
        if not worth:
            best = self._trial(beat)
        if best is None or look.room < 2 or not self.chains.allows(self._cost(best)):
            return None
        self.trials[best].since = 0
        why = "a tree pays" if worth else "a tree, a trial"
        self._last = {"why": why, "nodes": best.nodes, "predicted_tok_s": round(self.rate(best), 1)}
        return best

    def _trial(self, beat: float) -> Shape | None:
        """A shape whose time for a trial has come, if it could pay at all."""
        for found in self.trials.values():
            found.since += 1
        for shape, found in self.trials.items():
            if found.since >= found.gap and self._hope(shape) / self._cost(shape) > _AHEAD * beat:
                return shape
        return None

    def record(self, outcome: TreeOutcome, draft: float, rest: float) -> None:
        tree, found = outcome.tree, self.trials[outcome.shape]
        rows = 1 + len(tree) + outcome.again
        took = self.chains.record_other(rows, outcome.gained, draft, rest)
        # Tokens kept from a side branch are read again in the next step.
        later = len(outcome.nodes) - sum(a == b for a, b in zip(outcome.nodes, tree.line()))
        decode = self.chains.decode
        found.add(outcome.gained, took + max(0.0, decode.seconds(2 + later) - decode.seconds(2)), draft)
        if found.seen >= _JUDGED:
            pays = self.rate(outcome.shape) > _AHEAD * self.chains.to_beat
            found.gap = _GAPS[0] if pays else min(2 * found.gap, _GAPS[1])
        self._last |= {"gained": outcome.gained, "rows": rows, "ms": round(1e3 * (draft + rest), 3)}

    def trace(self) -> dict[str, Any]:
        return self._last
