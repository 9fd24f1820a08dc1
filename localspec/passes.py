"""How llama.cpp cuts a decode of several sequences into passes over the weights, and how to have fewer of them.

Each sequence has its own stream in the cache. A pass (llama_batch_allocr::split_equal, sequential) takes sequences whose
numbers follow one another, and of each the same number of tokens, the smallest that one of them has left:

    sequence   0 1 2 4 5       passes   0 1 2      sequences 4 and 5 are not reached from 2
    tokens     1 3 1 1 1                4 5
                                        1 1        what sequence 1 has left

One row too many costs less than another pass. So rows may be added, of sequences that have nothing to say or less than the
others: what they compute is dropped, and taken out of the cache again. Pure arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

Blocks = tuple[tuple[int, int], ...]  # (seq, tokens), by ascending seq

#: rows that cost as much as a pass without any: 4 of SmolLM2-135M, about 12 of a model of 0.5B (2 cores, docs/LOG.md)
PASS_ROWS = 4


def passes(blocks: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """The passes of a decode of blocks (seq, tokens): of each, (block, first token, end)."""
    left = [[i, seq, 0, n] for i, (seq, n) in enumerate(blocks) if n]
    found = []
    while left:
        group: list[list[int]] = []
        for entry in left:
            if not group or entry[1] == group[-1][1] + 1:
                group.append(entry)
        length = min(end - start for _, _, start, end in group)
        found.append([(i, start, start + length) for i, _, start, _ in group])
        for entry in group:
            entry[2] += length
        left = [entry for entry in left if entry[2] < entry[3]]
    return found


def rows_of(blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The rows of each pass of a decode."""
    return tuple([sum([end - start for _, start, end in group]) for group in passes(blocks)])


@functools.lru_cache(maxsize=4096)
def with_room(blocks: Blocks, most: int) -> tuple[Blocks, tuple[int, ...]]:
    """What `padded` makes of blocks where every sequence has room, and the rows of each pass of it."""
    more = padded(blocks, lambda seq: most, most)
    return tuple(more), rows_of(more)


def padded(blocks: Sequence[tuple[int, int]], room: Callable[[int], int], most: int) -> list[tuple[int, int]]:
    """`blocks` (seq, tokens), by ascending seq, with the rows that are worth adding: tokens more, and sequences more.

    `room(seq)`: tokens that a sequence can take; `most`: of one decode.
    """
    lengths = {n for _, n in blocks}
    first, last = blocks[0][0], blocks[-1][0]
    if len(lengths) == 1 and last - first == len(blocks) - 1:
        return list(blocks)
    best, least = list(blocks), _cost(blocks)
    for level in sorted({1, *lengths}):
        raised = _raised(blocks, level, room)
        cost = _cost(raised)
        if cost < least and sum(n for _, n in raised) <= most:
            best, least = raised, cost
    return best


def _cost(blocks: Sequence[tuple[int, int]]) -> int:
    return sum(n for _, n in blocks) + PASS_ROWS * len(passes(blocks))


def _raised(blocks: Sequence[tuple[int, int]], level: int, room: Callable[[int], int]) -> list[tuple[int, int]]:
    """No block has fewer than `level` tokens, nor has a sequence in a gap that is cheaper to fill than to leave."""
    raised: list[tuple[int, int]] = []
    for seq, n in blocks:
        gap = range(raised[-1][0] + 1, seq) if raised else range(0)
        if gap and len(gap) * level <= PASS_ROWS and all(room(other) >= level for other in gap):
            raised += [(other, level) for other in gap]
        raised.append((seq, max(n, min(level, room(seq)))))
    return raised
