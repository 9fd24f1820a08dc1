"""Taps: both ways of reading them give the same states, in the order of the batch, for any blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec import llama_arch, taps
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests import gguf_maker

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(gguf_maker.tiny_llama(tmp_path_factory.mktemp("m") / "tiny.gguf", n_layer=5)) as loaded:
        yield loaded


def session(model: Model, wanted: tuple[int, ...], n_sequences: int = 1) -> TargetSession:
    settings = SessionSettings(n_ctx=256, n_sequences=n_sequences, n_batch=96, n_threads=1, taps=wanted)
    return TargetSession(model, settings)


def weights(path: Path, name: str) -> np.ndarray:
    """A tensor of the file in f32, [rows, columns]."""
    import gguf

    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_arch, "LAYER_INPUTS", frozenset())


def test_tap_0_is_the_embedding(model: Model) -> None:
    tokens = model.tokenizer.encode(TEXT)[:8]
    rows = weights(model.path, "token_embd.weight")[tokens]
    with session(model, (0, 1)) as s:
        np.testing.assert_allclose(s.decode([(0, tokens)]).taps[:, 0], rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "blocks", [[(0, 5)], [(0, 3), (1, 3), (2, 3)], [(0, 2), (1, 7), (3, 1), (4, 4)], [(3, 2), (1, 5), (2, 4)]]
)
def test_both_ways_agree(model: Model, blocks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = model.tokenizer.encode(TEXT)
    given = [(seq, tokens[seq : seq + n]) for seq, n in blocks]
    with session(model, (1, 3, 4), 5) as s:
        handed = np.array(s.decode(given).taps)
    by_name(monkeypatch)
    with session(model, (1, 3, 4, 5), 5) as s:
        rows = s.decode(given)
        np.testing.assert_array_equal(rows.taps[:, :3], handed)
        assert rows.taps.shape == (sum(n for _, n in blocks), 4, model.n_embd)
        last, logits = np.array(rows.taps[:, 3]), np.array(rows.logits)
    # The last tap is what the norm and the head turn into logits.
    norm, head = weights(model.path, "output_norm.weight"), weights(model.path, "output.weight")
    normed = last / np.sqrt(np.square(last).mean(axis=1, keepdims=True) + 1e-5) * norm
    np.testing.assert_allclose(normed @ head.T, logits, rtol=1e-4, atol=1e-4)


def test_the_default_model(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Model(smollm2) as model:
        tokens = model.tokenizer.encode(TEXT)[:12]
        with session(model, (2, 15, 27), 2) as s:
            handed = np.array(s.decode([(0, tokens), (1, tokens[:3])]).taps)
        by_name(monkeypatch)
        with session(model, (2, 15, 27), 2) as s:
            np.testing.assert_array_equal(s.decode([(0, tokens), (1, tokens[:3])]).taps, handed)
    np.testing.assert_allclose(handed[:3], handed[12:], rtol=0.05, atol=0.5)  # the same tokens
    assert np.abs(handed[0]).max() > 20 * np.abs(handed[4:12]).max(axis=(1, 2)).mean()


@pytest.mark.parametrize("way", ["input", "name"])
def test_prefill_hands_over_what_it_computes(model: Model, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "name":
        by_name(monkeypatch)
    tokens = (model.tokenizer.encode(TEXT) * 6)[:150]
    got: list[tuple[int, np.ndarray]] = []
    with session(model, (2, 3, 5)) as s:
        s.prefill(0, tokens[:40])
        s.prefill(0, tokens, tapped=lambda start, rows: got.append((start, np.array(rows))))
        assert [(start, rows.shape) for start, rows in got] == [(40, (96, 3, 64)), (136, (14, 3, 64))]
        s.rollback(0, 136)
        np.testing.assert_allclose(s.decode([(0, tokens[136:])]).taps, got[1][1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("way", ["input", "name"])
def test_what_is_not_read_is_read_again_when_asked_for(model: Model, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "name":
        by_name(monkeypatch)
    tokens = model.tokenizer.encode(TEXT)[:12]
    with session(model, (2, 3, 5)) as s:
        whole = s.decode([(0, tokens)])
        logits, rows = np.array(whole.logits), np.array(whole.taps)
        s.rollback(0, 0)
        s.reads_taps = False
        some = s.decode([(0, tokens[:5])])
        assert some.taps is None
        np.testing.assert_allclose(some.logits, logits[:5], rtol=1e-2, atol=1e-2)
        got: list[np.ndarray] = []
        s.prefill(0, tokens[:8], tapped=lambda _, taps: got.append(np.array(taps)))
        np.testing.assert_allclose(got[0], rows[5:8], rtol=1e-2, atol=1e-2)
        s.reads_taps = True
        np.testing.assert_allclose(s.decode([(0, tokens[8:])]).taps, rows[8:], rtol=1e-2, atol=1e-2)


def test_a_graph_that_does_not_mark_its_inputs(tmp_path: Path) -> None:
    path = gguf_maker.tiny_gemma3(tmp_path / "gemma3.gguf")
    with Model(path) as model, session(model, (1, model.n_layer), 2) as s:
        rows = s.decode([(0, [5, 6, 7]), (1, [5, 6])])
        assert np.isfinite(rows.taps).all()
        np.testing.assert_allclose(rows.taps[:2], rows.taps[3:], rtol=1e-5, atol=1e-5)  # the same tokens
        assert not np.allclose(rows.taps[0], rows.taps[1])
        with pytest.raises(UsageError, match="from tap 1 on"):
            session(model, (0,))


def test_taps_that_are_not_there(model: Model) -> None:
    for wanted, words in (((6,), r"taps 0 \(embeddings\) to 5"), ((-1,), "--taps -1"), ((2, 2), "named twice")):
        with pytest.raises(UsageError, match=words):
            session(model, wanted)


@pytest.mark.parametrize(
    ("n_layer", "expected"), [(30, (2, 15, 27)), (24, (2, 12, 21)), (6, (2, 3, 4)), (4, (1, 2, 3)), (3, (0, 1, 2))]
)
def test_default_taps(n_layer: int, expected: tuple[int, ...]) -> None:
    found = taps.default_taps(n_layer)
    assert found == expected
    assert len(set(found)) == 3
    assert max(found) < n_layer


def test_without_taps_there_are_none(model: Model) -> None:
    with session(model, ()) as s:
        assert s.decode([(0, [5])]).taps is None


def test_identity_of_the_list_with_the_models_that_are_tested(smollm2: Path, gemma3: Path) -> None:
    assert GGUFFile.open(smollm2).architecture in llama_arch.LAYER_INPUTS
    assert GGUFFile.open(gemma3).architecture not in llama_arch.LAYER_INPUTS
