"""The draft that comes with localspec: whom it is found for, and that the default model writes the same text with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from localspec import shipped
from localspec.cli.loading import pick
from localspec.cli.options import ModelChoice
from localspec.errors import PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.shipped import FOLDER, shipped_draft
from localspec.speculator import SpeculatorConfig
from localspec.target import SessionSettings
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
    alone = json.loads(cli("run", "-m", smollm2, *PROMPT, "--spec-type", "eagle3").stdout)
    assert (alone["drafter"], alone["draft"]) == ("eagle3", drafted["draft"])
    assert alone["ids"] == drafted["ids"]
    assert json.loads(cli("run", "-m", smollm2, *PROMPT, "--spec-type", "ngram").stdout)["drafter"] == "ngram"
    assert json.loads(cli("run", "-m", smollm2, *PROMPT, "--spec-draft-n-max", "0").stdout)["drafter"] == "none"


@pytest.mark.parametrize(
    ("spec_type", "drafter"),
    [("auto", "ngram,eagle3"), ("eagle3", "eagle3"), ("ngram,eagle3", "ngram,eagle3"), ("eagle3,ngram", "ngram,eagle3"),
     ("draft-eagle3", "eagle3")],
)  # fmt: skip
def test_it_is_taken_where_its_kind_is_asked_for(smollm2: Path, spec_type: str, drafter: str) -> None:
    choice = ModelChoice(str(smollm2), None, SessionSettings(), 0, spec_type=spec_type)
    name, draft = pick(choice, None, smollm2)
    assert name == drafter
    assert draft is not None
    assert draft.parent == FOLDER


def test_it_is_not_taken_for_another_kind_or_target(smollm2: Path, tmp_path: Path) -> None:
    tiny = gguf_maker.tiny_llama(tmp_path / "tiny.gguf")
    for target, spec_type in ((smollm2, "lm"), (smollm2, "dflash"), (smollm2, "ngram,dspark"), (tiny, "eagle3")):
        choice = ModelChoice(str(target), None, SessionSettings(), 0, spec_type=spec_type)
        with pytest.raises(UsageError, match=f"--spec-type {spec_type} needs a draft model: give --draft FILE"):
            pick(choice, None, target)
    for spec_type in ("none", "ngram"):
        assert pick(ModelChoice(None, None, SessionSettings(), 0, spec_type=spec_type), None, smollm2) == (spec_type, None)


def test_types_that_need_another_draft_are_refused_before_anything_is_fetched(cli: Any) -> None:
    done = cli("run", "-p", "x", "--spec-type", "lm")  # the default model is not in this cache
    assert (done.rc, "needs a draft model" in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)


def test_kinds_of_training_and_types_of_drafting(smollm2: Path) -> None:
    (eagle3,) = FOLDER.glob("smollm2*.gguf")
    choice = ModelChoice(str(smollm2), None, SessionSettings(), 0, spec_type="small")
    with pytest.raises(PairingError, match=r"there are auto, none, .*, dspark, .*; a draft of the kind small is run by lm"):
        pick(choice, None, smollm2)
    choice = ModelChoice(str(smollm2), None, SessionSettings(), 0, spec_type="dspark")
    with pytest.raises(PairingError, match="is no DSpark draft"):
        pick(choice, eagle3, smollm2)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_it_can_be_made_a_second_time() -> None:
    """Every step of demo-draft goes on or has nothing to do; the last one replaces what it wrote."""
    done = subprocess.run(["make", "-n", "demo-draft"], cwd=FOLDER.parent.parent, capture_output=True, text=True, check=True)
    (convert,) = (line for line in done.stdout.splitlines() if "localspec convert" in line)
    assert "--force" in convert.split()


def test_inspect_shows_the_pair(cli: Any, smollm2: Path) -> None:
    report = json.loads(cli("inspect", smollm2, "--json").stdout)
    assert report["pair"]["drafter"] == "ngram,eagle3"
    assert str(FOLDER) in report["commands"]["localspec run"]
    assert "draft-eagle3" in report["commands"]["llama-server"]
