"""How decodes of several sequences are cut into passes, and rows that are added so that there are fewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec import native
from localspec.model import Model
from localspec.passes import PASS_ROWS, padded, passes
from localspec.target import SessionSettings, TargetSession
from tests.gguf_maker import tiny_gemma3, tiny_llama


@pytest.mark.parametrize(
    ("blocks", "n"),
    [
        ([(0, 1), (1, 1), (2, 1)], 1),
        ([(0, 2), (1, 2)], 1),
        ([(0, 1), (2, 1)], 2),
        ([(2, 1), (0, 1), (1, 1)], 2),  # in another order than that of their numbers
        ([(0, 1), (1, 3), (2, 1), (4, 1), (5, 1)], 3),
        ([(0, 4), (1, 1), (2, 4)], 3),
    ],
)
def test_passes(blocks: list[tuple[int, int]], n: int) -> None:
    found = passes(blocks)
    assert len(found) == n
    rows = sorted((i, at) for one in found for i, a, b in one for at in range(a, b))
    assert rows == [(i, at) for i, (_, length) in enumerate(blocks) for at in range(length)], "each row once"


def everywhere(_seq: int) -> int:
    return 100


@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [
        ([(0, 1), (1, 1)], [(0, 1), (1, 1)]),
        ([(0, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)]),
        ([(0, 1), (1, 2), (2, 1)], [(0, 2), (1, 2), (2, 2)]),
        ([(0, 1), (9, 1)], [(0, 1), (9, 1)]),  # eight rows cost more than a pass
        ([(0, 1), (1, 30)], [(0, 1), (1, 30)]),
    ],
)
def test_rows_are_added_where_they_pay(blocks: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    assert padded(blocks, everywhere, 512) == wanted


def test_no_row_is_added_without_room() -> None:
    assert padded([(0, 1), (2, 1)], lambda seq: 0 if seq == 1 else 9, 512) == [(0, 1), (2, 1)]
    assert padded([(0, 1), (2, 1)], everywhere, 2) == [(0, 1), (2, 1)]
    assert padded([(0, 1), (1, 2), (2, 1)], lambda seq: 1 if seq == 2 else 9, 512) == [(0, 1), (1, 2), (2, 1)]


@given(st.dictionaries(st.integers(0, 15), st.integers(1, 6), min_size=1), st.integers(6, 9))
def test_padding_keeps_blocks_and_never_costs_more(blocks: dict[int, int], room: int) -> None:
    given_blocks = sorted(blocks.items())
    found = padded(given_blocks, lambda _: room, 512)
    assert [seq for seq, _ in found] == sorted(dict(found))
    assert all(dict(found)[seq] >= n for seq, n in given_blocks)
    assert all(n <= room for _, n in found)

    def cost(some: list[tuple[int, int]]) -> int:
        return sum(n for _, n in some) + PASS_ROWS * len(passes(some))

    assert cost(found) <= cost(given_blocks)


BLOCKS = [(1, [40, 41, 42]), (2, [50]), (4, [60, 61])]


@pytest.mark.parametrize(
    ("make", "taps"), [(tiny_llama, ()), (tiny_llama, (0, 1)), (tiny_llama, (1, 2)), (tiny_gemma3, (1,))]
)
def test_added_rows_change_nothing(make: Callable[..., Path], taps: tuple[int, ...], tmp_path: Path) -> None:
    """Logits, taps and caches are those of sequences that are decoded one by one."""
    prompts = [[(7 * seq + 3 * i) % 200 + 5 for i in range(5 + seq)] for seq in range(6)]

    def opened(model: Model) -> TargetSession:
        session = TargetSession(model, SessionSettings(n_ctx=64, n_sequences=6, n_threads=1, taps=taps))
        for seq, prompt in enumerate(prompts[:5]):
            session.prefill(seq, prompt)
        return session

    with Model(make(tmp_path / "tiny.gguf")) as model:
        with opened(model) as session:
            alone, states = [], []
            for block in BLOCKS:
                rows = session.decode([block])
                alone.append(np.array(rows.logits))
                states.append(None if rows.taps is None else np.array(rows.taps))
            after = np.array(session.decode([(3, [70])]).logits)
        with opened(model) as session:
            together = session.decode(BLOCKS)
            np.testing.assert_allclose(together.logits, np.concatenate(alone), rtol=1e-4, atol=1e-4)
            if together.taps is not None:
                np.testing.assert_allclose(together.taps, np.concatenate(states), rtol=1e-4, atol=1e-4)
            assert [len(held) for held in session.tokens] == [5, 9, 8, 8, 11, 0]
            lib, memory = native.lib(), session._memory
            assert [lib.llama_memory_seq_pos_max(memory, seq) + 1 for seq in range(6)] == [5, 9, 8, 8, 11, 0]
            # In sequence 3 rows were added: what it says next is what it would have said.
            np.testing.assert_allclose(session.decode([(3, [70])]).logits, after, rtol=1e-4, atol=1e-4)
