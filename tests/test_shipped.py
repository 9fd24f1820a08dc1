"""The draft that comes with localspec: whom it is found for, and that the default model writes the same text with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localspec import shipped
from localspec.gguf_file import GGUFFile
from localspec.shipped import FOLDER, shipped_draft
from localspec.speculator import SpeculatorConfig
from tests import gguf_maker

PROMPT = ("-p", "Write a Python function that adds two numbers, and explain it.", "--temp", "0", "-n", "60", "--json")


def test_it_is_small_and_says_whom_it_is_for_and_how_it_was_made(smollm2: Path) -> None:
    path = shipped_draft(GGUFFile.open(smollm2, "target"))
    assert path is not None
    assert path.stat().st_size <= 8_000_000
    config = SpeculatorConfig.from_gguf(GGUFFile.open(path, "draft"))
    assert config.method == "eagle3"
    assert config.target.n_vocab == 49152
    assert config.provenance["data_tokens"] > 1e6
    assert config.provenance["steps"] > 0
    card = path.with_suffix(".md").read_text()
    for word in ("demo-draft", "Apache-2.0", "tokens per verify", str(path.stat().st_size)):
        assert word in card


def test_other_models_have_none(gemma3: Path, tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped_draft(GGUFFile.open(gemma3, "target")) is None
    assert shipped_draft(GGUFFile.open(gguf_maker.tiny_llama(tmp_path / "tiny.gguf"), "target")) is None
    # The same shape with another tokenizer, too.
    other = gguf_maker.edit(smollm2, tmp_path / "other.gguf", put={"tokenizer.ggml.pre": "qwen2"})
    assert shipped_draft(GGUFFile.open(other, "target")) is None
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "nothing")
    assert shipped_draft(GGUFFile.open(smollm2, "target")) is None


def test_the_default_model_drafts_with_it_and_writes_the_same_text(cli: Any, smollm2: Path) -> None:
    drafted = cli("run", "-m", smollm2, *PROMPT)
    drafted = json.loads(drafted.stdout)
    assert drafted["drafter"] == "ngram,eagle3"
    assert Path(drafted["draft"]).parent == FOLDER
    assert drafted["n_accepted"] > 10
    plain = cli("run", "-m", smollm2, *PROMPT, "--spec-type", "none")
    assert json.loads(plain.stdout)["ids"] == drafted["ids"]
    assert json.loads(cli("run", "-m", smollm2, *PROMPT, "--spec-type", "ngram").stdout)["drafter"] == "ngram"
    assert json.loads(cli("run", "-m", smollm2, *PROMPT, "--spec-draft-n-max", "0").stdout)["drafter"] == "none"


def test_inspect_shows_the_pair(cli: Any, smollm2: Path) -> None:
    report = json.loads(cli("inspect", smollm2, "--json").stdout)
    assert report["pair"]["drafter"] == "eagle3"
    assert str(FOLDER) in report["commands"]["localspec run"]
    assert "draft-eagle3" in report["commands"]["llama-server"]
