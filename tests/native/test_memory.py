"""What our kernels take in memory: one copy of the weights in place of the mapped one, given back when a model is closed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.native.bench_memory import child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20
#: What two runs of the same program may differ by.
ROOM = 30.0


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "no mmap"])
def test_no_second_copy_of_the_weights(use_mmap: bool, smollm2: Path) -> None:
    weights = smollm2.stat().st_size / MIB
    ours, stock = (child([smollm2], kernels, use_mmap) for kernels in ("localspec", "stock"))
    assert (ours["kernels"], stock["kernels"]) == ("localspec", "stock")
    # The embedding is the output matrix, too: it is there as the file has it, for look-ups, and packed.
    embedding = 49_152 * 576 * 20 / 32 / MIB
    assert weights < ours["total"] < stock["total"] + 1.5 * embedding + ROOM
    assert ours["left"] < stock["left"] + ROOM


def test_two_models_with_three_contexts_each_are_given_back(smollm2: Path, gemma3: Path) -> None:
    weights = sum(path.stat().st_size for path in (smollm2, gemma3)) / MIB
    several = child([smollm2, gemma3], "localspec", True, 3)
    assert weights < several["total"]
    # Vocabularies are many small pieces, of which the allocator keeps the most.
    assert several["left"] < child([smollm2, gemma3], "stock", True, 3)["left"] + ROOM
    # Each context computes the same with others beside it.
    first, second = several["picked"][:3], several["picked"][3:]
    assert first == child([smollm2], "localspec", True)["picked"] * 3
    assert second == child([gemma3], "localspec", False)["picked"] * 3
