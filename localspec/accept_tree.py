"""Accept or reject a draft tree: the walk from its root along what the target says.

Under `match`, and greedy, a child is kept iff it is the token that the target draws at that place, so the text is the one
without a draft. Under `reject` the children of a place are candidates of multi-candidate rejection sampling without
replacement (accept_reference.judge_several).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import accept_reference as twin
from localspec.accept import Block, Draft, Sampling, Verdict, verify
from localspec.errors import UsageError
from localspec.tree import Tree

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class TreeVerdict:
    """What became of a tree. `nodes`: those kept, from the root on. `verdict` counts the whole tree as drafted; it has no
    probabilities of drafted tokens."""

    nodes: list[int]
    verdict: Verdict


def verify_tree(
    logits: F32,
    tree: Tree,
    sequence: int,
    position: int,
    sampling: Sampling,
    history: I32,
    rule: str = "match",
    eog: npt.NDArray[Any] | None = None,
) -> TreeVerdict:
    """Judge a tree of n nodes. logits f32[n + 1, V]: of the pending token, then of each node.

    `position`: the absolute one of the token that row 0 produces; `history` as in accept.Block. Raises as accept.verify
    does.
    """
    if len(logits) != len(tree) + 1:
        raise UsageError(f"a tree of {len(tree)} tokens needs {len(tree) + 1} rows of logits, there are {len(logits)}")
    nodes: list[int] = []
    tokens: list[int] = []
    stop = None
    place = -1
    while True:
        row = logits[place + 1 : place + 2]
        children = tree.children(place)
        seen = np.concatenate([history, np.array(tokens, np.int32)]) if sampling.needs_history else history
        if rule == "reject" and children and not sampling.greedy:
            which, token = _judge(row[0], tree, place, children, twin.Key(sampling.seed, sequence, position), sampling, seen)
        else:
            alone = Block(sequence, position, Draft.empty(), sampling, seen)
            token = int(verify(row, [alone], rule)[0].tokens[0])
            which = next((i for i, child in enumerate(children) if tree.tokens[child] == token), -1)
        tokens.append(token)
        if which >= 0:
            place = children[which]
            nodes.append(place)
            position += 1
        if eog is not None and eog[token]:
            stop = "eog"
        if stop or which < 0:
            break
    nothing = np.full(len(tree), np.nan, np.float32)
    return TreeVerdict(nodes, Verdict(len(tree), len(nodes), np.array(tokens, np.int32), nothing, stop))


def _judge(
    row: F32, tree: Tree, place: int, children: list[int], key: twin.Key, sampling: Sampling, seen: I32
) -> tuple[int, int]:
    ids, probs = tree.dists[place]
    drafted = tree.tokens[children].tolist()
    missing = set(drafted) - set(ids.tolist())
    if missing:
        raise UsageError(f"drafted token {missing.pop()} is not in its own draft distribution")
    penalised = twin.penalised(row, sampling, seen)
    return twin.judge_several(penalised, sampling, key, drafted, (ids.astype(np.int64), probs.astype(np.float64)), place + 1)
