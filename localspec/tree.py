"""Draft trees: several continuations of a text, checked in one decode. Pure arithmetic.

A tree is drafted layer by layer, the places with the likeliest ways to them first, and cut down to its likeliest tokens
(EAGLE-2, Li et al., 2024, sections 3.1 and 3.2). Cutting away tokens after a look at them is lossless where the text is
the target's own whatever was drafted (greedy, and `match`). Under `reject` every token that was drawn must be judged, so
there how many are drawn at a place is settled before (`wanted`), and nothing is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localspec.errors import UsageError

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

#: The most tokens of a tree: the kernels number what a row sees over so many cells (native/backend/attention.h).
MOST_NODES = 48
_SEEN = 0.04  # under `reject`: the least chance, of the way and a token together, for which one is drawn


@dataclass(frozen=True, slots=True)
class Shape:
    """At most `nodes` tokens, `depth` behind one another, `width` at one place; `width` places go on in each layer."""

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES or self.depth < 1 or self.width < 1:
            raise UsageError(f"a draft tree has 1 to {MOST_NODES} tokens, a depth and a width, not {self}")


@dataclass(slots=True)
class Tree:
    """A draft that branches. Node i follows node parents[i], -1: the pending token. Parents come before their children,
    children of one place in the order in which they were drawn, the line of first children before all others.

    `confidence`: the draft's probability of each token, those before it given. `dists`: of each place (-1 or a node) the
    distribution its children were drawn from without replacement, ids i32[n] and probabilities f32[n]; only under `reject`.
    """

    tokens: I32  # [n]
    parents: I32  # [n]
    confidence: F32  # [n]
    dists: dict[int, tuple[I32, F32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, place: int) -> list[int]:
        """Nodes that follow a node, or the pending token (-1)."""
        return np.flatnonzero(self.parents == place).tolist()

    def line(self) -> list[int]:
        """The line of first children: what a chain would have drafted."""
        line: list[int] = []
        while found := self.children(line[-1] if line else -1):
            line.append(found[0])
        return line

    def way(self, node: int) -> list[int]:
        """The nodes from the root to this one; none for -1."""
        way: list[int] = []
        while node >= 0:
            way.append(node)
            node = int(self.parents[node])
        return way[::-1]


def empty_tree() -> Tree:
    """Nothing drafted."""
    return Tree(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


class Growing:
    """A tree under way. Nodes are numbered as they are added; `finished` puts them in order."""

    def __init__(self, shape: Shape, exact: bool):
        """`exact`: every token added must stay (`reject`)."""
        self.shape, self.exact = shape, exact
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []  # of the way to the node, itself included
        self._confidence: list[float] = []
        self._dists: dict[int, tuple[I32, F32]] = {}
        self._layer: list[int] = []

    def chance(self, place: int) -> float:
        """Of the way to this place."""
        return self.chances[place] if place >= 0 else 1.0

    def wanted(self, place: int, q: F32) -> int:
        """How many tokens to draw from q behind this place: under `reject` as many as q, not the draw, makes worth it."""
        if not self.exact:
            return min(self.shape.width, len(q))
        room = self.shape.nodes - len(self.tokens)
        return max(0, min(self.shape.width, room, int(np.count_nonzero(q * self.chance(place) >= _SEEN))))

    def add(self, place: int, tokens: I32, confidence: F32, dist: tuple[I32, F32] | None = None) -> None:
        """Children of a place, in the order in which they were drawn."""
        if dist is not None and len(tokens):
            self._dists[place] = dist
        for token, sure in zip(tokens.tolist(), confidence.tolist()):
            self._layer.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(place)
            self._confidence.append(sure)
            self.chances.append(self.chance(place) * sure)

    def next_layer(self, depth: int) -> list[int]:
        """The nodes behind which to go on after layer `depth` (1 is the first); none where the tree is done. Ordered by
        number: first children before their siblings."""
        layer, self._layer = self._layer, []
        if depth >= self.shape.depth:
            return []
        order = sorted(layer, key=lambda node: -self.chances[node])
        if self.exact:
            order = order if len(self.tokens) < self.shape.nodes else []
        elif len(self.chances) >= self.shape.nodes:  # what can't be among the best any more need not go on
            floor = sorted(self.chances, reverse=True)[self.shape.nodes - 1]
            order = [node for node in order if self.chances[node] > floor]
        return sorted(order[: self.shape.width])

    def finished(self) -> Tree:
        """The best nodes, in order: the likelier child first (not under `reject`, where the order of drawing counts)."""
        kept = list(range(len(self.tokens)))
        if len(kept) > self.shape.nodes:
            kept = sorted(sorted(kept, key=lambda node: -self.chances[node])[: self.shape.nodes])
        children: dict[int, list[int]] = {}
        for node in kept:
            children.setdefault(self.parents[node], []).append(node)
        order: list[int] = []
        # Whole lines, the first one first: on the stack the next line to follow is on top.
        stack = children.get(-1, [])[::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(children.get(node, [])[::-1])
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        return Tree(
            np.array([self.tokens[node] for node in order], np.int32),
            np.array([place[self.parents[node]] for node in order], np.int32),
            np.array([self._confidence[node] for node in order], np.float32),
            {place[at]: dist for at, dist in self._dists.items() if at in place},
        )
