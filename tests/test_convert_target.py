"""Models in Hugging Face's layout to GGUF: llama.cpp must compute what transformers computes, and cut text alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localspec.convert.target import convert_target
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
