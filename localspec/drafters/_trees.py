"""Trees drafted layer by layer: what all drafters share that can go on at several places at once."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from localspec import accept_reference as twin
from localspec.accept import draw
from localspec.drafters import Sequence
from localspec.errors import LocalspecError
from localspec.topk import top_k
from localspec.tree import Growing, Shape, Tree

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class Layers(Protocol):
    """A draft that goes on at several places of a tree."""

    logits: F32
    """f32[m, V] over the target's vocabulary: of the root at first, then of the places last gone on from."""

    def go_on(self, nodes: list[int], tree: Growing) -> None:
        """Read these nodes, whose parents have been read; `logits` are theirs afterwards."""


def grow(layers: Layers, seq: Sequence, shape: Shape, rule: str) -> Tree:
    """A tree behind seq.tokens, with the target's settings and, under `match`, its noise."""
    tree = Growing(shape, exact=rule == "reject" and not seq.sampling.greedy)
    places, depth = [-1], 0
    while places:
        _add_children(tree, layers.logits, places, depth, seq, rule)
        depth += 1
        places = tree.next_layer(depth)
        if places:
            layers.go_on(places, tree)
    return tree.finished()


def _add_children(tree: Growing, logits: F32, places: list[int], depth: int, seq: Sequence, rule: str) -> None:
    s, position = seq.sampling, len(seq.tokens) + depth
    histories = [_history(seq, tree, place) for place in places]
    if s.greedy:
        if s.needs_history:
            logits = np.stack([twin.penalised(row, s, history) for row, history in zip(logits, histories)])
        tops = top_k(logits, min(tree.shape.width, logits.shape[1]))
        for i, place in enumerate(places):
            said = np.isfinite(tops.logits[i])
            tree.add(place, tops.ids[i][said], np.exp(tops.logits[i] - tops.lse[i])[said])
        return
    m = len(places)
    drawn = draw(logits, [seq.key] * m, [position] * m, [s] * m, histories, rule, with_q=True)
    if drawn.q_ids is None or drawn.q_probs is None or drawn.q_starts is None:
        raise LocalspecError("no draft distribution")
    for i, place in enumerate(places):
        here = slice(drawn.q_starts[i], drawn.q_starts[i + 1])
        ids, probs = drawn.q_ids[here], drawn.q_probs[here]
        n = tree.wanted(place, probs)
        key = twin.Key(s.seed, seq.key, position)
        tokens, sure = twin.draw_several(s, key, rule, place + 1, ids.astype(np.int64), probs.astype(np.float64), n)
        tree.add(place, tokens.astype(np.int32), sure.astype(np.float32), (ids, probs) if tree.exact else None)


def _history(seq: Sequence, tree: Growing, place: int) -> I32:
    if not seq.sampling.needs_history:
        return _NO_HISTORY
    said: list[int] = []
    while place >= 0:
        said.append(tree.tokens[place])
        place = tree.parents[place]
    n = seq.sampling.penalty_last_n
    return np.array((seq.tokens if n < 0 else seq.tokens[-n:]) + said[::-1], np.int32)


_NO_HISTORY = np.zeros(0, np.int32)
