"""What a place in a drafted block weighs in the loss: a token only counts if all before it are right.

`decay` is DFlash's exp(-j / gamma) at the j-th drafted token (arXiv 2602.06036, equation 4; gamma 4 for blocks of 8).
`dpace` is D-PACE's (Wu et al., arXiv 2605.18810): with q_i the draft's probability of the i-th token, smoothed to
s_i = (1 - alpha) q_i + alpha, the expected length of what is kept is about the sum over j of s_1 ... s_j; its gradient in
the log-probability of token k is about the sum over j >= k of s_1 ... s_j, and that, held constant, is the token's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localspec.train.losses import CHUNK, Weigh


def weigher(settings: Any, depth: Tensor, block: Tensor) -> tuple[Weigh, list[int]]:
    """(what `head_loss` asks, where it may cut) for rows of which each is the `depth`-th (i64[R], 0 the first) of its
    `block` (i64[R], ascending). A block's rows are all there up to its last."""
    if settings.weights == "dpace":
        ends = torch.nonzero(torch.diff(block)).flatten() + 1
        return (lambda rows, said: dpace(said, depth[rows], block[rows], settings.dpace_alpha)), [*ends.tolist(), len(block)]
    fixed = torch.exp(-depth / settings.gamma) if settings.weights == "decay" else torch.ones_like(depth).float()
    return (lambda rows, _: fixed[rows]), [*range(CHUNK, len(depth), CHUNK), len(depth)]


def dpace(said: Tensor, depth: Tensor, block: Tensor, alpha: float) -> Tensor:
    """f32[n]: D-PACE's weights of whole blocks; `said` f32[n] are the draft's probabilities of the text's tokens."""
    row = torch.unique_consecutive(block, return_inverse=True)[1]
    table = torch.zeros(int(row[-1]) + 1, int(depth.max()) + 1, device=said.device)
    table[row, depth] = (1 - alpha) * said + alpha
    kept = table.cumprod(1)
    return kept.flip(1).cumsum(1).flip(1)[row, depth]
