"""The written-out forward and backward passes of training against plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from localspec.train import attention, block_attention  # noqa: E402
from localspec.train.attention import blocks, chain_attention  # noqa: E402
from localspec.train.block_attention import groups, work  # noqa: E402
from localspec.train.losses import best_tokens, head_loss  # noqa: E402


def plain_attention(rows, starts, window, step, q, k, v, chain):  # type: ignore[no-untyped-def]
    """One row, one head at a time."""
    out = []
    for i, position in enumerate(rows):
        low = max(s for s in starts if s <= position)
        if window:
            low = max(low, position + step - window + 1)
        heads = []
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            keys = torch.cat([k[low : position + 1, kv], *[a[i : i + 1, kv] for a, _ in chain]])
            values = torch.cat([v[low : position + 1, kv], *[b[i : i + 1, kv] for _, b in chain]])
            heads.append(torch.softmax(keys @ q[i, head] * q.shape[2] ** -0.5, -1) @ values)
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize(("window", "n_chain"), [(0, 0), (0, 2), (7, 0), (5, 2)])
def test_chain_attention_is_plain_attention(window: int, n_chain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 8)
    torch.manual_seed(0)
    starts = np.array([0, 23, 24, 60])
    rows = np.array([3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 20, 21, 23, 30, 31, 40, 41, 42, 57])

    def tensor(*shape: int):  # type: ignore[no-untyped-def]
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    q, k, v = tensor(len(rows), 4, 6), tensor(60, 2, 6), tensor(60, 2, 6)
    chain = [(tensor(len(rows), 2, 6), tensor(len(rows), 2, 6)) for _ in range(n_chain)]
    found = chain_attention(blocks(rows, starts, window, n_chain, "cpu"), q, k, v, chain)
    wanted = plain_attention(rows, starts, window, n_chain, q, k, v, chain)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(wanted)
    leaves = [q, k, v, *[x for pair in chain for x in pair]]
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    plain = torch.autograd.grad((wanted * weights).sum(), leaves)
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [[4], [2, 3, 5]])
@pytest.mark.parametrize("window", [0, 6, 9])
def test_block_attention_is_plain_attention(sizes: list[int], window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "ROWS", 11)
    torch.manual_seed(0)
    starts, anchors = np.array([0, 23, 24, 60]), np.array([1, 2, 5, 9, 10, 11, 20, 22, 25, 30, 31, 40, 57, 59])
    cut = groups(anchors, starts, sizes, np.random.default_rng(0))
    size_of = np.concatenate([[g.size] * (g.last - g.first) for g in cut])
    assert set(size_of) == set(sizes)
    n_rows = int(size_of.sum())

    def tensor(*shape: int):  # type: ignore[no-untyped-def]
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    q, k, v = tensor(n_rows, 4, 6), tensor(60, 2, 6), tensor(60, 2, 6)
    own_k, own_v = tensor(n_rows, 2, 6), tensor(n_rows, 2, 6)
    found = block_attention.block_attention(work(cut, anchors, window), q, k, v, own_k, own_v)
    out, at = [], 0
    for anchor, size in zip(anchors, size_of):
        first = max(s for s in starts if s <= anchor)
        for slot in range(size):
            low = max(first, anchor + slot - window + 1) if window else first
            heads = []
            for head in range(4):
                keys = torch.cat([k[min(low, anchor) : anchor, head // 2], own_k[at : at + size, head // 2]])
                values = torch.cat([v[min(low, anchor) : anchor, head // 2], own_v[at : at + size, head // 2]])
                heads.append(torch.softmax(keys @ q[at + slot, head] * 6**-0.5, -1) @ values)
            out.append(torch.stack(heads))
        at += size
    wanted = torch.stack(out)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    weights, leaves = torch.randn_like(wanted), [q, k, v, own_k, own_v]
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (found, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_head_loss_is_plain_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.train.losses.CHUNK", 5)
    torch.manual_seed(0)
    h = torch.randn(13, 8, requires_grad=True)
    weight = torch.randn(30, 8, requires_grad=True)
    ids = torch.stack([torch.randperm(30)[:6] for _ in range(13)])
    ids[torch.rand(13, 6) < 0.3] = -1
    p = torch.rand(13, 6) / 6
    logits = h @ weight.t()
    wanted = logits.argmax(-1)
    wanted[::2] = (wanted[::2] + 1) % 30
    wanted[4] = -1
    log_q = torch.log_softmax(logits, -1)
    plain = -(torch.where(ids >= 0, p, 0) * log_q.gather(1, ids.clamp(min=0))).sum()
    got = head_loss(h, weight, weight.detach(), ids, p, wanted)
    torch.testing.assert_close(got.loss, plain)
    assert torch.equal(got.right, logits.argmax(-1) == wanted)
    assert got.right.sum() == 6
    ours = torch.autograd.grad(got.loss * 3, [h, weight])
    for a, b in zip(ours, torch.autograd.grad(plain * 3, [h, weight])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(head_loss(h, weight, weight, ids, p, wanted).loss, plain.detach())


def test_head_loss_weighs_rows_that_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.train.losses.CHUNK", 5)
    torch.manual_seed(0)
    h, weight = torch.randn(12, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    ids = torch.stack([torch.randperm(30)[:6] for _ in range(12)])
    p, wanted = torch.rand(12, 6) / 6, torch.randint(-1, 30, (12,))
    seen = []

    def weigh(rows: slice, said):  # type: ignore[no-untyped-def]
        seen.append((rows.start, rows.stop))
        return said + 0.5

    got = head_loss(h, weight, weight.detach(), ids, p, wanted, weigh, [3, 4, 10, 12])
    assert seen == [(0, 4), (4, 10), (10, 12)]
    log_q = torch.log_softmax(h @ weight.t(), -1)
    said = torch.where(wanted >= 0, log_q.gather(1, wanted.clamp(min=0)[:, None])[:, 0].exp(), 0).detach()
    each = -(p * log_q.gather(1, ids)).sum(-1)
    torch.testing.assert_close(got.each, each.detach())
    plain = (each * (said + 0.5)).sum()
    torch.testing.assert_close(got.loss, plain)
    for a, b in zip(*(torch.autograd.grad(x, [h, weight]) for x in (got.loss, plain))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab", [100, 128])
def test_best_tokens_is_argmax(vocab: int) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(9, 4), torch.randn(vocab, 4)
    assert torch.equal(best_tokens(h, weight), (h @ weight.t()).argmax(-1))
