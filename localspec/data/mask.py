"""Which tokens the assistant said: the loss mask, from a chat template rendered with and without each answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localspec.tokenizer import Tokenizer

#: Tags that models put around what they think before they answer.
_OPEN, _CLOSE = rb"<(?:think|thinking|seed:think)>", rb"</(?:think|thinking|seed:think)>"
_THINKING = re.compile(_OPEN + rb".*?(?:" + _CLOSE + rb"|$)", re.DOTALL)


def drop_thinking(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> npt.NDArray[np.uint8]:
    """u8[n]: 0 for tokens inside a thinking block of one of the assistant's `spans`, 1 elsewhere. A block that never ends
    goes on to the end of its span."""
    keep = np.ones(len(tokens), np.uint8)
    for start, end in spans:
        pieces = [tokenizer.piece(int(t), special=True) for t in tokens[start:end]]
        ends = np.cumsum([len(p) for p in pieces])
        starts = ends - [len(p) for p in pieces]
        for found in _THINKING.finditer(b"".join(pieces)):
            inside = (starts < found.end()) & (ends > found.start())
            keep[start:end][inside] = 0
    return keep
