"""Attention of the training-time test: causal over the first step's keys, and along each chain over its later steps' keys.

A chain that starts at position P (EAGLE-3, arXiv 2503.01840, section 3) attends, at its step s, to the first step's keys of
the positions up to P, as at run time to the pairs already committed, and to its own keys of the steps 1 to s. The latter
are one key per row and step: no matrix, a few products. Rows may be any subset, sorted; they are worked on in blocks
that only see the keys they can reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 256


@dataclass(frozen=True)
class Block:
    """Rows [start, end) of the queries and the keys [low, high) that they reach. `hidden` bool[rows, high - tail] marks
    those of the keys [tail, high) that a row must not see; None where all of them may be seen."""

    start: int
    end: int
    low: int
    high: int
    tail: int
    hidden: Tensor | None


def blocks(
    rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], window: int, step: int, device: torch.device | str = "cpu"
) -> list[Block]:
    """The work of one step. `rows` i64[R]: chain starts, sorted; `starts` i64[D + 1]: bounds of the samples that they lie
    in. At `step` a row at P sees the keys P + step - `window` < k <= P of its sample (`window` 0: all up to P)."""
    made = []
    cuts = np.searchsorted(rows, starts)
    for sample, (a, b) in enumerate(pairwise(cuts)):
        for start in range(int(a), int(b), BLOCK):
            end = min(start + BLOCK, int(b))
            own = rows[start:end]
            low = tail = int(starts[sample])
            if window:
                low = tail = max(low, int(own[0]) + step - window + 1)
            high = int(own[-1]) + 1
            if not window or int(own[-1]) + step - window < low:
                tail = int(own[0]) + 1  # every row sees all keys before this one
            keys = np.arange(tail, high)
            hidden = keys[None, :] > own[:, None]
            if window:
                hidden |= keys[None, :] <= own[:, None] + step - window
            made.append(Block(start, end, low, high, tail, torch.from_numpy(hidden).to(device) if hidden.any() else None))
    return made


class _ChainAttention(torch.autograd.Function):
    """Softmax over block keys and chain keys together. The backward pass is written out: autograd's own would keep and
    copy each block's scores several times over."""

    @staticmethod
    def forward(ctx: Any, work: list[Block], q: Tensor, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
        n_rows, n_head, dim = q.shape
        n_kv = k.shape[1]
        group = n_head // n_kv
        scale = dim**-0.5
        out = torch.empty_like(q)
        chain_k, chain_v = chain[::2], chain[1::2]
        grouped = q.view(n_rows, n_kv, group, dim)
        # [R, kv, group, steps]: scores against the chain's own keys
        own = [(grouped * key[:, :, None]).sum(-1, dtype=torch.float32) * scale for key in chain_k]
        scores = torch.stack(own, -1) if own else None
        saved: list[Tensor] = []
        weights = torch.empty_like(scores) if scores is not None else None
        for block in work:
            m = block.end - block.start
            queries = grouped[block.start : block.end].permute(1, 2, 0, 3).reshape(n_kv, group * m, dim)
            s = torch.bmm(queries * scale, k[block.low : block.high].permute(1, 2, 0))  # [kv, group * m, keys]
            if block.hidden is not None:
                view = s.view(n_kv, group, m, -1)[..., block.tail - block.low :]
                view.masked_fill_(block.hidden, float("-inf"))
            top = s.amax(-1, keepdim=True)
            if scores is not None and weights is not None:
                mine = scores[block.start : block.end].permute(1, 2, 0, 3).reshape(n_kv, group * m, -1)
                top = torch.maximum(top, mine.amax(-1, keepdim=True).to(top.dtype))
                mine = (mine - top.float()).exp_()
            p = s.sub_(top).exp_()
            total = p.sum(-1, keepdim=True, dtype=torch.float32)
            if scores is not None and weights is not None:
                total = total + mine.sum(-1, keepdim=True)
                mine = mine / total
                weights[block.start : block.end] = mine.view(n_kv, group, m, -1).permute(2, 0, 1, 3)
            p.mul_(total.reciprocal().to(p.dtype))
            o = torch.bmm(p, v[block.low : block.high].transpose(0, 1))
            out.view(n_rows, n_kv, group, dim)[block.start : block.end] = o.view(n_kv, group, m, dim).permute(2, 0, 1, 3)
            saved.append(p)
        if weights is not None:
            grouped_out = out.view(n_rows, n_kv, group, dim)
            for i, value in enumerate(chain_v):
                grouped_out += (weights[..., i, None] * value[:, :, None]).to(out.dtype)
        ctx.work, ctx.n_chain = work, len(chain_k)
        ctx.save_for_backward(q, k, v, out, *chain, *saved, *([weights] if weights is not None else []))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *rest = ctx.saved_tensors
        chain, rest = rest[: 2 * ctx.n_chain], rest[2 * ctx.n_chain :]
        probabilities, weights = rest[: len(ctx.work)], rest[-1] if ctx.n_chain else None
        n_rows, n_head, dim = q.shape
        n_kv = k.shape[1]
        group = n_head // n_kv
        scale = dim**-0.5
        d_out = grads[0].view(n_rows, n_kv, group, dim)
        inner = (d_out * out.view_as(d_out)).sum(-1, dtype=torch.float32)  # [R, kv, group]
        d_q = torch.empty_like(q).view(n_rows, n_kv, group, dim)
        d_k, d_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        grouped = q.view(n_rows, n_kv, group, dim)
        for block, p in zip(ctx.work, probabilities):
            m = block.end - block.start

            def rows(x: Tensor, block: Block = block, m: int = m) -> Tensor:
                return x[block.start : block.end].permute(1, 2, 0, 3).reshape(n_kv, group * m, dim)

            go = rows(d_out)
            keys = slice(block.low, block.high)
            d_v[keys] += torch.bmm(p.transpose(1, 2), go).transpose(0, 1)
            ds = torch.bmm(go, v[keys].permute(1, 2, 0))
            ds -= inner[block.start : block.end].permute(1, 2, 0).reshape(n_kv, group * m, 1).to(ds.dtype)
            ds *= p
            dq = torch.bmm(ds, k[keys].transpose(0, 1)) * scale
            d_q[block.start : block.end] = dq.view(n_kv, group, m, dim).permute(2, 0, 1, 3)
            d_k[keys] += torch.bmm(ds.transpose(1, 2), rows(grouped) * scale).transpose(0, 1)
        chain_grads: list[Tensor] = []
        if weights is not None:
            for i in range(ctx.n_chain):
                key, value = chain[2 * i], chain[2 * i + 1]
                w = weights[..., i]
                ds = (w * ((d_out * value[:, :, None]).sum(-1, dtype=torch.float32) - inner) * scale)[..., None]
                d_q += (ds * key[:, :, None]).to(d_q.dtype)
                chain_grads.append((ds * grouped).sum(2).to(key.dtype))
                chain_grads.append((w[..., None] * d_out).sum(2).to(value.dtype))
        return None, d_q.view_as(q), d_k.to(k.dtype), d_v.to(v.dtype), *chain_grads


def chain_attention(work: list[Block], q: Tensor, k: Tensor, v: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention output [R, heads, d] of queries `q` [R, heads, d] over `k`, `v` [N, kv heads, d] as `work` (of `blocks`)
    allows, and over `chain`: for each later step its keys and values [R, kv heads, d]."""
    flat = [part for pair in chain for part in pair]
    result: Tensor = _ChainAttention.apply(work, q, k, v, *flat)
    return result
