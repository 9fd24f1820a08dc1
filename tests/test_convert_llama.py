"""qwen2 files as llama files: rows are moved, values are not, and the model says the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from localspec.convert.as_llama import as_llama
from localspec.convert.output import TYPE_NUMBERS, dequantised, stored_rows
from localspec.errors import ModelFileError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import StringArray
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests.conftest import Cli
from tests.gguf_maker import tiny_llama, write


def tiny_qwen2(path: Path, ftype: str = "f32") -> Path:
    """A random qwen2: biases on q, k and v, which llama files may have, too."""
    plain = GGUFFile.open(tiny_llama(path.with_name("plain.gguf"), arch="qwen2", ftype=ftype, n_layer=3, vocab=320))
    rng = np.random.default_rng(1)
    tensors: dict[str, object] = {}
    for name, info in plain.tensors.items():
        kind = gguf.GGMLQuantizationType(TYPE_NUMBERS[info.type])
        tensors[name] = (stored_rows(plain, name), kind)
    for i in range(3):
        for part, n in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"blk.{i}.attn_{part}.bias"] = rng.standard_normal(n).astype(np.float32)
    return write(path, "qwen2", dict(plain.metadata), tensors)  # type: ignore[arg-type]


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    with Model(path) as model, TargetSession(model, SessionSettings(n_ctx=128, flash_attention="off")) as session:
        return session.decode([(0, tokens)]).logits.copy()


@pytest.mark.parametrize("ftype", ["f32", "q4_0", "q8_0"])
def test_the_same_model(tmp_path: Path, ftype: str) -> None:
    source = tiny_qwen2(tmp_path / "qwen2.gguf", ftype)
    size = as_llama(source, tmp_path / "llama.gguf")
    old, new = GGUFFile.open(source), GGUFFile.open(tmp_path / "llama.gguf")
    assert new.architecture == "llama"
    assert size == new.size
    assert new.tokenizer_hash() == old.tokenizer_hash()
    assert set(new.tensors) == set(old.tensors)
    moved = 0
    for name, info in old.tensors.items():
        assert (new.tensors[name].type, new.tensors[name].shape) == (info.type, info.shape)
        before, after = dequantised(old, name), dequantised(new, name)
        if "attn_q" in name or "attn_k" in name:
            heads, rest = (4 if "attn_q" in name else 2), before.shape[1:]
            # row i and row 8 + i of a head of 16 become neighbours
            wanted = before.reshape(heads, 2, 8, *rest).swapaxes(1, 2).reshape(before.shape)
            assert (after == wanted).all()
            moved += not (after == before).all()
        else:
            assert (after == before).all()
    assert moved == 3 * 4  # q and k, weight and bias, of three layers
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 300, 50)]
    a, b = logits(source, tokens), logits(tmp_path / "llama.gguf", tokens)
    assert np.abs(a - b).max() < (1e-3 if ftype == "f32" else 0.05 * np.abs(a).max())
    # with the rows left where they were, it would be another model
    keys = {k.replace("qwen2.", "llama."): v for k, v in old.metadata.items()}
    raw = {n: (stored_rows(old, n), gguf.GGMLQuantizationType(TYPE_NUMBERS[t.type])) for n, t in old.tensors.items()}
    wrong = write(tmp_path / "wrong.gguf", "llama", keys, raw)
    assert np.abs(logits(wrong, tokens) - a).max() > 0.1 * np.abs(a).max()


def test_metadata_is_kept_as_it_is(tmp_path: Path) -> None:
    source = tiny_qwen2(tmp_path / "qwen2.gguf")
    as_llama(source, tmp_path / "llama.gguf")
    old, new = GGUFFile.open(source), GGUFFile.open(tmp_path / "llama.gguf")
    for key, value in old.metadata.items():
        other = key.replace("qwen2.", "llama.")
        if key == "general.architecture":
            continue
        assert new.types[other] == old.types[key]
        same = new.metadata[other]
        if isinstance(value, StringArray):
            assert isinstance(same, StringArray)
            assert list(same) == list(value)
        else:
            assert np.array_equal(np.asarray(same), np.asarray(value))


def test_refusals(tmp_path: Path, cli: Cli) -> None:
    llama = tiny_llama(tmp_path / "llama.gguf")
    with pytest.raises(ModelFileError, match="has the architecture llama; --as-llama rewrites qwen2 only"):
        as_llama(llama, tmp_path / "out.gguf")
    source = tiny_qwen2(tmp_path / "qwen2.gguf")
    with pytest.raises(UsageError, match="exists"):
        as_llama(source, llama)
    with pytest.raises(UsageError, match="is read for this"):
        as_llama(source, source, overwrite=True)
    refused = cli("convert", source, "-o", tmp_path / "out.gguf", "--as-llama", "--quant", "q4_0")
    assert (refused.rc, "in a second step" in refused.stderr) == (2, True)
    done = cli("convert", source, "-o", tmp_path / "out.gguf", "--as-llama")
    assert (done.rc, "values untouched" in done.stderr) == (0, True)
    quantised = cli("quantize", tmp_path / "out.gguf", tmp_path / "small.gguf", "q8_0")
    assert quantised.rc == 0, quantised.stderr
    assert GGUFFile.open(tmp_path / "small.gguf").quant_label == "Q8_0"


@pytest.mark.big
def test_the_same_greedy_text(qwen05: Path, tmp_path: Path, cli: Cli) -> None:
    as_llama(qwen05, tmp_path / "llama.gguf")
    common = ("--temp", "0", "-n", "60", "--spec-type", "none", "-p", "Write a python function to add two numbers.")
    texts = [cli("run", "--target", path, *common).stdout for path in (qwen05, tmp_path / "llama.gguf")]
    assert texts[0] == texts[1]
    assert "def" in texts[0]
