"""Models in Hugging Face's layout to GGUF: llama.cpp must compute what transformers computes, and cut text alike."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from localspec.convert.target import convert_target
from localspec.convert.targets.pretokenizers import pre_tokenizer_name
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests import hf_maker
from tests.hf_maker import TEXTS


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits of every position, f32[n, V], with a cache of 32 bits and attention computed in 32 bits."""
    settings = SessionSettings(
        n_ctx=512, n_batch=64, n_threads=1, type_k="f32", type_v="f32", flash_attention="off"
    )  # fmt: skip
    with Model(path) as model, TargetSession(model, settings) as session:
        rows = [np.array(session.decode([(0, tokens[i : i + 32])]).logits) for i in range(0, len(tokens), 32)]
    return np.concatenate(rows)


def expected_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0])


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference at a position over the largest logit there, of all positions the worst."""
    return float(np.max(np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)))


@pytest.mark.parametrize("name", hf_maker.MODELS)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model, source = hf_maker.made(name, tmp_path / "hf")
    tokens = np.random.default_rng(0).integers(5, 400, 160).tolist()
    wanted = expected_logits(model, tokens)
    convert_target(source, tmp_path / "f32.gguf", "F32")
    # llama.cpp looks GELU up in a table of half precision
    assert error(logits(tmp_path / "f32.gguf", tokens), wanted) < (5e-3 if "gemma" in name else 1e-4)
    convert_target(source, tmp_path / "f16.gguf", "f16")
    assert 1e-6 < error(logits(tmp_path / "f16.gguf", tokens), wanted) < 3e-2


@pytest.mark.parametrize("kind", ["llama-bpe", "smaug-bpe", "qwen2", "smollm", "gpt-2"])
@pytest.mark.parametrize("bos", [True, False])
def test_byte_level_tokenizers_cut_text_alike(kind: str, bos: bool, tmp_path: Path) -> None:
    tokenizer = hf_maker.byte_level(kind, bos)
    source = hf_maker.save(hf_maker.llama(), tmp_path / "hf", tokenizer)
    convert_target(source, tmp_path / "out.gguf", "F16")
    assert GGUFFile.open(tmp_path / "out.gguf").tokenizer.pre == kind
    with Model(tmp_path / "out.gguf") as model:
        for text in TEXTS:
            assert model.tokenizer.encode(text) == tokenizer.encode(text).ids, text
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert model.tokenizer.decode(ids, special=True) == tokenizer.decode(ids, skip_special_tokens=False), text


EXPECTED = json.loads((Path(__file__).parent / "expected_targets.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_keys_and_tensors_are_those_of_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    """expected_targets.json holds what llama.cpp's convert_hf_to_gguf.py, of the version that llama-cpp-python 0.3.36
    brings, made of the same directories as F32: keys of the architecture, and of each tensor the begin of its SHA-256."""
    _, source = hf_maker.made(name, tmp_path / "hf")
    convert_target(source, tmp_path / "out.gguf", "F32")
    got, wanted = GGUFFile.open(tmp_path / "out.gguf"), EXPECTED[name]
    assert got.architecture == wanted["architecture"]
    prefix = f"{got.architecture}."
    keys = {key.removeprefix(prefix): value for key, value in got.metadata.items() if key.startswith(prefix)}
    assert set(keys) == set(wanted["keys"])
    for key, value in wanted["keys"].items():
        assert np.array_equal(keys[key], value), key
    assert set(got.tensors) == set(wanted["tensors"])
    for tensor, value in wanted["tensors"].items():
        data = bytes(got.tensor_bytes(tensor))
        if isinstance(value, list):  # of rope: worked out, not copied
            assert np.allclose(np.frombuffer(data, np.float32), value, rtol=1e-6)
        else:
            assert hashlib.sha256(data).hexdigest().startswith(value), tensor


def test_a_split_that_removes_what_is_between_is_the_same_split() -> None:
    tokenizer = json.loads(hf_maker.byte_level("qwen2").to_str())
    split = tokenizer["pre_tokenizer"]["pretokenizers"][0]
    split |= {"behavior": "Removed", "invert": True}
    assert pre_tokenizer_name(tokenizer["pre_tokenizer"], False) == "qwen2"
    again = Tokenizer.from_str(json.dumps(tokenizer))
    for text in TEXTS:
        assert again.encode(text).ids == hf_maker.byte_level("qwen2").encode(text).ids
    assert pre_tokenizer_name(tokenizer["pre_tokenizer"], True) is None
    split["invert"] = False
    assert pre_tokenizer_name(tokenizer["pre_tokenizer"], False) is None


def odd(text: str) -> bool:
    """Where a space goes before a text, Hugging Face's puts one behind added tokens inside of it, too; llama.cpp doesn't."""
    return not text or "<tool>" in text


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4"])
def test_tokenizers_over_spaces_cut_text_alike(kind: str, tmp_path: Path) -> None:
    tokenizer = hf_maker.spaced(prefix=kind == "llama")
    model = getattr(hf_maker, kind)()
    source = hf_maker.save(model, tmp_path / "hf", tokenizer, unk_token="<unk>", pad_token="<pad>")
    convert_target(source, tmp_path / "out.gguf", "F16")
    assert GGUFFile.open(tmp_path / "out.gguf").tokenizer.model == ("gemma4" if kind == "gemma4" else "llama")
    with Model(tmp_path / "out.gguf") as loaded:
        for text in TEXTS:
            if not (kind == "llama" and odd(text)):
                assert loaded.tokenizer.encode(text) == tokenizer.encode(text).ids, text


def test_tokenizer_model_gives_the_same_as_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = hf_maker.spaced(prefix=True)
    source = hf_maker.save(hf_maker.llama(), tmp_path / "hf", tokenizer, unk_token="<unk>", pad_token="<pad>")
    convert_target(source, tmp_path / "json.gguf", "F16")
    (source / "tokenizer.model").write_bytes(hf_maker.sentencepiece(tokenizer))
    convert_target(source, tmp_path / "both.gguf", "F16")
    (source / "tokenizer.json").unlink()
    convert_target(source, tmp_path / "model.gguf", "F16")
    of_json, of_both, of_model = (GGUFFile.open(tmp_path / f"{name}.gguf") for name in ("json", "both", "model"))
    assert of_both.tokenizer_hash() == of_json.tokenizer_hash()
    for gguf in (of_both, of_model):
        assert list(gguf.tokenizer.tokens) == list(of_json.tokenizer.tokens)
        assert gguf.tokenizer.ids["bos"] == 0
        assert gguf.get("tokenizer.ggml.add_space_prefix", bool) is True
    with Model(tmp_path / "both.gguf") as both, Model(tmp_path / "model.gguf") as alone:
        for text in TEXTS:
            assert both.tokenizer.encode(text, parse_special=False) == alone.tokenizer.encode(text, parse_special=False)
            if not odd(text):
                assert both.tokenizer.encode(text) == tokenizer.encode(text).ids, text
