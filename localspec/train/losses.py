"""The head and the loss over the draft vocabulary in one pass.

A row's loss is the cross-entropy of the teacher's k likeliest tokens under the draft, -sum p_i log q_i over those of them
that the draft can say: what the teacher gives to others weighs nothing, so a row counts as much as the draft could be
right about it. Its gradient in the logits is mass * q - p, and needs the softmax once: rows go through in chunks, forward
and backward together, and no logits [rows, vocabulary] are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 1024

#: (rows, f32[n] the draft's probabilities of their wanted tokens) -> f32[n] the weights of their losses
Weigh = Callable[[slice, Tensor], Tensor]


class HeadLoss(NamedTuple):
    """`loss`: the sum over rows. `right` bool[R]: the draft's likeliest token is `wanted`. `each` f32[R]: the rows' losses,
    not weighted, without gradients."""

    loss: Tensor
    right: Tensor
    each: Tensor


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, low: Tensor, ids: Tensor, p: Tensor, wanted: Tensor, bias: Tensor | None,
        train: bool, weigh: Weigh | None, ends: Sequence[int],
    ) -> Any:  # fmt: skip
        d_h = torch.empty_like(h) if train else None
        d_weight = torch.zeros_like(weight) if train and weight.requires_grad else None
        each = torch.zeros(len(h), dtype=torch.float32, device=h.device)
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        right = torch.empty(len(h), dtype=torch.bool, device=h.device)
        vocab = len(low)
        for rows in _chunks(ends):
            q = torch.softmax(torch.nn.functional.linear(h[rows], low, bias), -1)
            n = len(q)
            flat = q.view(-1)
            first = torch.arange(n, device=h.device)[:, None] * vocab
            said = flat[(first[:, 0] + wanted[rows].clamp(min=0))]
            right[rows] = (said >= q.amax(-1)) & (wanted[rows] >= 0)
            known = ids[rows] >= 0
            place = (first + ids[rows])[known]
            share = p[rows][known]
            had = flat[place]
            lost = torch.zeros_like(p[rows])
            lost[known] = share * had.float().clamp_(min=1e-30).log_()
            each[rows] = -lost.sum(-1)
            mass = (p[rows] * known).sum(-1, keepdim=True)
            if weigh is not None:
                heavy = weigh(rows, said.float() * (wanted[rows] >= 0))[:, None]
                loss += (each[rows] * heavy[:, 0]).sum()
                mass, share = mass * heavy, (p[rows] * heavy)[known]
            else:
                loss += each[rows].sum()
            if not train:
                continue
            q *= mass.to(q.dtype)
            # ids of a row are different from each other: no two writes meet
            flat[place] -= share.to(q.dtype)
            if d_h is not None:
                torch.mm(q, low, out=d_h[rows])
            if d_weight is not None:
                d_weight += q.t() @ h[rows]
        ctx.save_for_backward(d_h, d_weight)
        ctx.mark_non_differentiable(right, each)
        return loss, right, each

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_h, d_weight = ctx.saved_tensors
        scale = grads[0]
        d_weight = d_weight * scale if d_weight is not None else None
        return d_h * scale.to(d_h.dtype), d_weight, None, None, None, None, None, None, None, None


def _chunks(ends: Sequence[int]) -> list[slice]:
    """Rows in chunks of CHUNK at most, cut at some of `ends` (ascending, the last one is all)."""
    made, at, last = [], 0, 0
    for end in ends:
        if end - at > CHUNK and last > at:
            made.append(slice(at, last))
            at = last
        last = end
    return [*made, slice(at, last)] if last > at else made


def head_loss(
    h: Tensor, weight: Tensor, low: Tensor, ids: Tensor, p: Tensor, wanted: Tensor, weigh: Weigh | None = None,
    ends: Sequence[int] | None = None, bias: Tensor | None = None,
) -> HeadLoss:  # fmt: skip
    """`h` [R, H] normalised states; `weight` f32[V, H] the head and `low` the same in h's type; `ids` i64[R, k] the
    teacher's tokens as draft ids (-1: the draft can't say it), with probabilities `p` f32[R, k]; `wanted` i64[R]: the
    text's token as draft id, or -1. `weigh` says what each row's loss weighs; it gets rows up to one of `ends` at a time, so
    that those which are weighed together stay together. `bias` [V] in h's type is added to the logits."""
    cuts = ends if ends is not None else [*range(CHUNK, len(h), CHUNK), len(h)]
    return HeadLoss(*_HeadLoss.apply(h, weight, low, ids, p, wanted, bias, torch.is_grad_enabled(), weigh, cuts))


def best_tokens(h: Tensor, low: Tensor) -> Tensor:
    """i64[R]: the likeliest draft id of each row. The largest of 64 groups first: argmax over a long row is slow on CPUs."""
    found = []
    for rows in h.split(CHUNK):
        logits = torch.nn.functional.linear(rows, low)
        n, vocab = logits.shape
        if vocab % 64:
            found.append(logits.argmax(-1))
            continue
        groups = logits.view(n, 64, -1)
        group = groups.amax(-1).argmax(-1)
        inside = groups[torch.arange(n, device=h.device), group].argmax(-1)
        found.append(group * (vocab // 64) + inside)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=h.device)
