"""Attention of drafts that are made a block at a time (DFlash, Chen, Liang and Liu, arXiv 2602.06036, section 4).

A block stands behind the positions whose states of the target are known: its anchor, the last token known, then masks. Each
row sees those positions' keys, as far back as the layer's window reaches from that row, and every row of its block, before
and behind it. Blocks of one size in a sample are worked on together: their rows against the keys that any of them reaches,
and against each other's, most of which are then hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROWS = 96  # of a group, about


@dataclass(frozen=True)
class Group:
    """Blocks [first, last) of those laid out, all of `size` rows, in the sample that begins at `sample`."""

    first: int
    last: int
    size: int
    sample: int


@dataclass(frozen=True)
class Work:
    """Rows [start, end) and the known keys [low, high) that they reach. `hidden` bool[rows, columns - tail]: what a row must
    not see of the columns from `tail` on, the columns being those keys and then the rows themselves."""

    start: int
    end: int
    low: int
    high: int
    tail: int
    hidden: Tensor


def groups(
    anchors: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], sizes: Sequence[int], random: np.random.Generator
) -> list[Group]:
    """Cut the blocks of `anchors` i64[A], sorted, into groups that each have one of `sizes` at random. `starts` i64[D + 1]:
    bounds of the samples that they lie in."""
    made = []
    cuts = np.searchsorted(anchors, starts)
    for sample, (a, b) in enumerate(pairwise(cuts.tolist())):
        while a < b:
            size = int(random.choice(sizes)) if len(sizes) > 1 else sizes[0]
            last = min(b, a + max(1, ROWS // size))
            made.append(Group(a, last, size, int(starts[sample])))
            a = last
    return made


def work(
    cut: list[Group], anchors: npt.NDArray[np.int64], window: int, device: torch.device | str = "cpu"
) -> list[Work]:
    """What each group's rows see, in a layer with this `window` (0: none): of the known keys k those before the anchor with
    row - k < window, and of the rows those of the same block. The window must be larger than a block."""
    made = []
    at = 0
    for group in cut:
        own = anchors[group.first : group.last]
        rows = (own[:, None] + np.arange(group.size)).ravel()
        ends = np.repeat(own, group.size)
        low, high = group.sample, int(own[-1])
        if window:
            low = min(high, max(low, int(own[0]) - window + 1))
        # keys before the first anchor are seen by all, unless the last row's window has left them
        tail = low if window and int(rows[-1]) - low >= window else min(high, int(own[0]))
        keys = np.arange(tail, high)
        hidden = keys[None, :] >= ends[:, None]
        if window:
            hidden |= rows[:, None] - keys[None, :] >= window
        apart = ends[:, None] != ends[None, :]
        both = np.concatenate([hidden, apart], 1)
        made.append(Work(at, at + len(rows), low, high, tail - low, torch.from_numpy(both).to(device)))
        at += len(rows)
    return made


class _BlockAttention(torch.autograd.Function):
    """The backward pass is written out: autograd's own would make a gradient of all known keys for each group."""

    @staticmethod
    def forward(ctx: Any, todo: list[Work], q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        n_rows, n_head, dim = q.shape
        n_kv = k.shape[1]
        share = n_head // n_kv
        out = torch.empty_like(q)
        grouped, shown = q.view(n_rows, n_kv, share, dim), out.view(n_rows, n_kv, share, dim)
        saved = []
        for part in todo:
            m = part.end - part.start
            queries = grouped[part.start : part.end].permute(1, 2, 0, 3).reshape(n_kv, share * m, dim)
            keys = torch.cat([k[part.low : part.high], own_k[part.start : part.end]])
            values = torch.cat([v[part.low : part.high], own_v[part.start : part.end]])
            scores = torch.bmm(queries * dim**-0.5, keys.permute(1, 2, 0))
            scores.view(n_kv, share, m, -1)[..., part.tail :].masked_fill_(part.hidden, float("-inf"))
            p = torch.softmax(scores, -1)
            o = torch.bmm(p, values.transpose(0, 1))
            shown[part.start : part.end] = o.view(n_kv, share, m, dim).permute(2, 0, 1, 3)
            saved.append(p)
        ctx.todo = todo
        ctx.save_for_backward(q, k, v, own_k, own_v, out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out, *saved = ctx.saved_tensors
        n_rows, n_head, dim = q.shape
        n_kv = k.shape[1]
        share = n_head // n_kv
        scale = dim**-0.5
        d_out, grouped = grads[0].reshape(n_rows, n_kv, share, dim), q.view(n_rows, n_kv, share, dim)
        inner = (d_out * out.view_as(d_out)).sum(-1, dtype=torch.float32)
        d_q = torch.empty_like(grouped)
        d_k, d_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        d_own_k, d_own_v = torch.empty_like(own_k), torch.empty_like(own_v)
        for part, p in zip(ctx.todo, saved):
            m = part.end - part.start
            rows, known = slice(part.start, part.end), slice(part.low, part.high)
            n = part.high - part.low
            queries = grouped[rows].permute(1, 2, 0, 3).reshape(n_kv, share * m, dim)
            keys, values = torch.cat([k[known], own_k[rows]]), torch.cat([v[known], own_v[rows]])
            go = d_out[rows].permute(1, 2, 0, 3).reshape(n_kv, share * m, dim)
            dv = torch.bmm(p.transpose(1, 2), go).transpose(0, 1)
            ds = torch.bmm(go, values.permute(1, 2, 0))
            ds -= inner[rows].permute(1, 2, 0).reshape(n_kv, share * m, 1).to(ds.dtype)
            ds *= p
            dk = torch.bmm(ds.transpose(1, 2), queries * scale).transpose(0, 1)
            dq = torch.bmm(ds, keys.transpose(0, 1)) * scale
            d_q[rows] = dq.view(n_kv, share, m, dim).permute(2, 0, 1, 3)
            d_k[known] += dk[:n]
            d_v[known] += dv[:n]
            d_own_k[rows], d_own_v[rows] = dk[n:], dv[n:]
        return None, d_q.view_as(q), d_k.to(k.dtype), d_v.to(v.dtype), d_own_k, d_own_v


def block_attention(todo: list[Work], q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """Attention output [R, heads, d] of the rows `q` [R, heads, d] over the known positions' `k`, `v` [N, kv heads, d] and
    the rows' own `own_k`, `own_v` [R, kv heads, d], as `todo` (of `work`) allows."""
    result: Tensor = _BlockAttention.apply(todo, q, k, v, own_k, own_v)
    return result
