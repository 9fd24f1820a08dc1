"""Training beside a target that writes: nothing on disk, or the shards of a first pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from localspec.data.shards import Manifest, Shards
from localspec.errors import TrainError
from localspec.train import live, loop, metrics, models
from localspec.train.settings import TrainSettings
from tests import gguf_maker, train_data

SETTINGS = TrainSettings(
    steps=12, batch_tokens=256, held_out=0.3, lr=0.004, eval_every=12, save_every=12, warmup=2, threads=1, dtype="fp32"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target.gguf, of four layers, and prompts.jsonl."""
    folder = tmp_path_factory.mktemp("live")
    gguf_maker.tiny_llama(folder / "target.gguf", n_layer=4)
    prompts = [{"source": "words", "prompt": f"the cat number {i} sat on the mat"} for i in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


def settings(place: Path, **changes: object) -> live.LiveSettings:
    prompts = (place / "prompts.jsonl",)
    plain = live.LiveSettings(prompts, max_tokens=24, parallel=4, n_threads=1, kernels="stock", n_ctx=256, first=600)
    return replace(plain, taps=(1, 2, 3), **changes)  # type: ignore[arg-type]


def run(place: Path, out: Path, data: Path | None, **changes: object) -> loop.Run:
    kind = models.find("eagle3")
    own = kind.Settings(ttt=2, draft_vocab=64, n_ff=48)
    return loop.Run("eagle3", place / "target.gguf", data, out, SETTINGS, own, live=settings(place, **changes))


def test_online_trains_on_what_is_written_and_writes_nothing(place: Path, tmp_path: Path) -> None:
    report = loop.train(run(place, tmp_path / "out", None), lambda _: None, lambda _: None)
    lines = [line for line in metrics.read(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["epoch"] >= 1
    # The first token's loss: the mean over all depths has more of the hard, later ones the more chains are kept.
    firsts = [line["loss_by_depth"][0] for line in lines]
    assert sum(firsts[-3:]) < sum(firsts[:3])
    assert report.total[2].verifies > 0
    assert not list(tmp_path.rglob("*shard*"))


def test_hybrid_leaves_the_shards_that_localspec_data_would_write(place: Path, tmp_path: Path) -> None:
    loop.train(run(place, tmp_path / "out", tmp_path / "data", first=300), lambda _: None, lambda _: None)
    manifest = Manifest.load(tmp_path / "data")
    assert manifest.taps == [1, 2, 3]
    assert manifest.n_tokens >= 300
    sample = Shards.open(tmp_path / "data").sample(0)
    assert sample.mask.sum() == len(sample.teacher_ids) > 0


def test_a_target_that_cannot_write_is_an_error_of_the_run(place: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"the target can't go on: .*nowhere"):
        loop.train(run(place, tmp_path / "a", None, prompts=(tmp_path / "nowhere",)), lambda _: None, lambda _: None)
    with pytest.raises(TrainError, match=r"localspec data ended: .*nowhere"):
        loop.train(
            run(place, tmp_path / "b", tmp_path / "d", prompts=(tmp_path / "nowhere",)), lambda _: None, lambda _: None
        )
    no_end = replace(run(place, tmp_path / "c", None), settings=replace(SETTINGS, steps=0))
    with pytest.raises(TrainError, match="give --steps"):
        loop.train(no_end, lambda _: None, lambda _: None)


def test_memory_keeps_the_last_samples(tmp_path: Path) -> None:
    shards = Shards.open(train_data.shards(tmp_path / "data", train_data.target(tmp_path), 20))
    memory = live.Memory(shards.manifest, keep=200)
    for i, key in enumerate(shards.keys()):
        memory.add(shards.sample(i), key)
    assert 100 < memory.n_tokens <= 200
    assert memory.n_tokens == memory.lengths().sum()
    n = len(memory)
    assert memory.keys() == shards.keys()[-n:]
    a, b = memory.sample(n - 1), shards.sample(len(shards) - 1)
    assert np.array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.taps, b.taps, atol=2e-3 * np.abs(b.taps).max(axis=(1, 2)).max())
    copied = memory.copy([0])
    for _ in range(3):
        memory.add(shards.sample(0), "again")
    assert np.array_equal(copied.tokens(0)[0], shards.tokens(len(shards) - n)[0])
