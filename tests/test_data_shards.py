"""Shards: what is written is read back, in few bytes, and never half."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localspec.data import states as codec
from localspec.data.shards import Manifest, Sample, Shards
from localspec.data.writer import ShardWriter
from localspec.errors import DataError, PairingError
from localspec.speculator import TargetIdentity

IDENTITY = TargetIdentity("tiny", "llama", 4, 48, 300, "ab" * 32)
TARGET = {**{f: getattr(IDENTITY, f) for f in IDENTITY.__dataclass_fields__}, "file_hash": "cd" * 32}
rng = np.random.default_rng(0)
SIZES = np.exp(rng.normal(size=(3, 48)) * 1.5)


def manifest(states: str = "q4", **other: object) -> Manifest:
    return Manifest(**{"target": TARGET, "taps": [1, 2, 3], "states": states, "teacher_k": 4, **other})  # type: ignore[arg-type]


def states_like_a_models(n: int, n_taps: int = 3, n_embd: int = 48) -> np.ndarray:
    """Normally distributed, each dimension of its own size, a few values far out, the first row far beyond."""
    taps = rng.normal(size=(n, n_taps, n_embd)) * SIZES[:n_taps, :n_embd]
    if not n_taps:
        return taps.astype(np.float32)
    taps[n // 2, 0, 7] *= 40
    taps[0] *= 300
    return taps.astype(np.float32)


def sample(n: int = 20, source: str = "gsm8k", n_taps: int = 3) -> Sample:
    mask = np.zeros(n, np.uint8)
    mask[n // 3 :] = 1
    m = int(mask.sum())
    logits = -np.sort(rng.exponential(3, size=(m, 4)).astype(np.float32)) + 30
    return Sample(
        rng.integers(0, 300, n).astype(np.int32), mask, states_like_a_models(n, n_taps), np.flatnonzero(mask) - 1,
        rng.integers(0, 300, (m, 4)).astype(np.int32), logits, logits[:, 0] + 0.3, source,
    )  # fmt: skip


@pytest.mark.parametrize(("states", "most"), [("q4", 0.11), ("q8", 0.007), ("f16", 0.0005), ("none", 0.0)])
def test_samples_come_back(states: str, most: float, tmp_path: Path) -> None:
    samples = [sample(20 + 13 * i, f"s{i % 2}", 0 if states == "none" else 3) for i in range(9)]
    writer = ShardWriter(tmp_path, manifest(states), shard_tokens=200)
    for i, one in enumerate(samples):
        writer.add(one, f"k{i}#0")
    writer.flush()
    shards = Shards.open(tmp_path, IDENTITY)
    assert len(shards.manifest.shards) > 2
    assert len(shards) == 9 == shards.manifest.n_samples
    assert shards.keys() == [f"k{i}#0" for i in range(9)]
    assert shards.sources() == [s.source for s in samples]
    assert shards.lengths().tolist() == [len(s.tokens) for s in samples]
    shards.verify()
    for i, one in enumerate(samples):
        back = shards.sample(i)
        for name in ("tokens", "mask", "teacher_rows", "teacher_ids"):
            np.testing.assert_array_equal(getattr(back, name), getattr(one, name))
        np.testing.assert_array_equal(shards.tokens(i)[0], one.tokens)
        np.testing.assert_allclose(back.teacher_logits, one.teacher_logits, atol=0.02)
        np.testing.assert_allclose(back.teacher_lse, one.teacher_lse, atol=1e-4)
        assert back.taps.shape == one.taps.shape
        assert back.taps.dtype == np.float32
        if states != "none":
            np.testing.assert_allclose(back.taps[0], one.taps[0], rtol=1e-3)  # the first row is kept whole
            scale = np.sqrt(np.square(one.taps[1:]).mean(axis=0))
            assert np.square((back.taps - one.taps)[1:] / scale).mean() < most**2


def test_far_values_and_huge_rows_stay_what_they_are() -> None:
    taps = rng.normal(size=(1000, 2, 96)).astype(np.float32)
    taps[500, 1, 3] = 47.0
    taps[700] *= 1e6  # beyond fp16
    taps[:, 0, 5] = 0.0  # a dead dimension
    first = np.zeros(1000, bool)
    first[0] = True
    rms = codec.rms_of(taps, first)
    back = codec.decode(codec.encode(taps, first, "q4", rms), "q4", 400, 800, 2, 96)
    assert back[100, 1, 3] == pytest.approx(47.0, rel=1e-3)
    np.testing.assert_allclose(back[300], taps[700], rtol=2e-3, atol=1e3)
    others = np.delete(back - taps[400:800], 300, axis=0)
    assert np.sqrt(np.square(others).mean()) < 0.1


def test_a_slice_is_decoded_as_the_whole() -> None:
    taps = states_like_a_models(200)
    first = np.zeros(200, bool)
    first[[0, 50, 120]] = True
    for states in ("q4", "q8", "f16"):
        arrays = codec.encode(taps, first, states, codec.rms_of(taps, first))
        whole = codec.decode(arrays, states, 0, 200, 3, 48)
        np.testing.assert_allclose(codec.decode(arrays, states, 50, 121, 3, 48), whole[50:121], rtol=1e-5, atol=1e-5)


def test_a_second_writer_goes_on(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path, manifest(), shard_tokens=50)
    first.add(sample(60), "a#0")
    first.add(sample(20), "b#0")  # never written: as if killed here
    with pytest.raises(DataError, match="another localspec writes there"):
        ShardWriter(tmp_path, manifest())
    del first
    (tmp_path / "shard-00001.safetensors").write_bytes(b"half")
    (tmp_path / "shard-00001.safetensors.part").write_bytes(b"half")
    second = ShardWriter(tmp_path, manifest(), shard_tokens=50)
    assert second.done == {"a#0"}
    with pytest.raises(DataError, match="there already"):
        second.add(sample(20), "a#0")
    second.add(sample(20), "b#0")
    second.flush()
    assert Shards.open(tmp_path).keys() == ["a#0", "b#0"]
    assert sorted(p.name for p in tmp_path.glob("shard*")) == ["shard-00000.safetensors", "shard-00001.safetensors"]


@pytest.mark.parametrize(
    ("other", "words"),
    [({"taps": [1, 2]}, "--taps 1,2,3, not 1,2"), ({"states": "f16"}, "--states q4, not f16"),
     ({"target": {**TARGET, "file_hash": "ef" * 32}}, "another target")],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(other: dict, words: str, tmp_path: Path) -> None:
    first = ShardWriter(tmp_path, manifest())
    first.add(sample(), "a#0")
    first.close()
    with pytest.raises(DataError, match=words):
        ShardWriter(tmp_path, manifest(**other))


def test_settings_of_a_call_that_wrote_nothing_do_not_bind(tmp_path: Path) -> None:
    """A mistyped --taps is mended by the right one, in the same directory."""
    ShardWriter(tmp_path, manifest(taps=[1, 2, 99])).close()
    (tmp_path / "shard-00000.safetensors.part").write_bytes(b"half")
    writer = ShardWriter(tmp_path, manifest())
    writer.add(sample(), "a#0")
    writer.close()
    assert Shards.open(tmp_path).manifest.taps == [1, 2, 3]
    assert not list(tmp_path.glob("*.part"))


def test_shards_without_a_manifest_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors").write_bytes(b"somebody's")
    with pytest.raises(DataError, match=r"shards but no manifest\.json"):
        ShardWriter(tmp_path, manifest())
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == b"somebody's"


def test_another_target_is_refused_by_the_reader(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, manifest())
    writer.add(sample(), "a#0")
    writer.flush()
    other = TargetIdentity("other", "llama", 5, 48, 300, "ab" * 32)
    with pytest.raises(PairingError, match="5 layers, not 4"):
        Shards.open(tmp_path, other)


def test_empty_masks_and_odd_sizes_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, manifest())
    empty = sample()
    empty.mask = np.zeros_like(empty.mask)
    with pytest.raises(DataError, match=r"sample q7#1 \(gsm8k\): the assistant says nothing"):
        writer.add(empty, "q7#1")
    short = sample()
    short.teacher_ids = short.teacher_ids[1:]
    with pytest.raises(DataError, match="teacher rows"):
        writer.add(short, "q7#2")
    with pytest.raises(DataError, match=r"has states of \[2, 48\], the data \[3, 48\]"):
        writer.add(sample(n_taps=2), "q7#3")


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json"):
        Shards.open(tmp_path)
    writer = ShardWriter(tmp_path, manifest())
    with pytest.raises(DataError, match="no shard there yet"):
        Shards.open(tmp_path)
    writer.add(sample(), "a#0")
    writer.flush()
    path = tmp_path / "shard-00000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="checksum"):
        Shards.open(tmp_path).verify()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"shard-00000\.safetensors is damaged"):
        Shards.open(tmp_path).sample(0)
    path.write_bytes(whole)
    said = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(said.replace('"n_embd": 48', '"n_embd": 64'))
    with pytest.raises(DataError, match=r"its states are not \[3, 64\] each"):
        Shards.open(tmp_path).sample(0)
    (tmp_path / "manifest.json").write_text(said)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        Shards.open(tmp_path).sample(0)
    entries = json.loads((tmp_path / "manifest.json").read_text())
    del entries["taps"]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    with pytest.raises(DataError, match="is damaged"):
        Shards.open(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_samples", 2), ("n_samples", "many"), ("n_tokens", -1), ("states", "q5"), ("states", ["q4"]), ("teacher_k", "4"),
     ("taps", [1.5, 2, 3]), ("taps", 3), ("settings", []), ("shards", {"a": 1}), ("shards", [[]]), ("target", [])],
)  # fmt: skip
def test_a_manifest_edited_by_hand_is_damaged(key: str, value: object, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, manifest())
    writer.add(sample(), "a#0")
    writer.close()
    entries = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(entries | {key: value}))
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        Shards.open(tmp_path)


def test_a_manifest_that_counts_otherwise_than_its_shard_is_damaged(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, manifest())
    writer.add(sample(), "a#0")
    writer.close()
    entries = json.loads((tmp_path / "manifest.json").read_text())
    entries["n_samples"] = entries["shards"][0]["n_samples"] = 2
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    with pytest.raises(DataError, match="don't fit together"):
        Shards.open(tmp_path).lengths()


def test_a_full_disk_loses_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, manifest())
    writer.add(sample(), "a#0")
    writer.flush()
    writer.add(sample(), "b#0")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DataError, match=r"shard-00001.* can't be written: No space left"):
            writer.flush()
    assert Shards.open(tmp_path).keys() == ["a#0"]
    assert not list(tmp_path.glob("*.part"))
    writer.flush()
    assert Shards.open(tmp_path).keys() == ["a#0", "b#0"]
