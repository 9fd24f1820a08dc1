"""Which steps draft a tree instead of a chain, and of what shape. Pure arithmetic, as control.py.

`FixedTree` always asks for one. `TreesThatPay` stands beside an `Adaptive`, and asks for one only where a tree has been
worth more tokens a second than the chains that are drafted otherwise, which trials of single steps find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from localspec.control import Adaptive, Look
from localspec.tree import Shape, Tree

#: nodes, depth and width of trees; the first is what --spec-tree on drafts
SHAPES = (Shape(8, 4, 3), Shape(4, 3, 2), Shape(16, 5, 4))


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
        """The tree of a step that decodes `again` rows beside it, None for a chain."""

    def record(self, outcome: TreeOutcome, draft: float, rest: float) -> None:
        """A finished step: seconds of drafting and of everything else."""

    def trace(self) -> dict[str, Any]:
        """What was decided in the last step, and why: for --trace."""


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
