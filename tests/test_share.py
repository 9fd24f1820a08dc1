"""What can be shared, what its card says, and the tags by which it is found: without any hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from localspec.data.shards import Manifest
from localspec.errors import DataError, LocalspecError, ModelFileError, PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.share import card
from localspec.share.artefact import read, target_tag, tokenizer_tag
from localspec.shipped import FOLDER
from localspec.speculator import TargetIdentity
from tests import gguf_maker, share_things


def front(text: str) -> dict[str, object]:
    """The front matter as YAML's own reader has it."""
    keys = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(keys, dict)
    return keys


def test_the_card_of_a_draft(tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    draft = share_things.draft(tmp_path / "my draft.gguf", target)
    artefact = read(draft, GGUFFile.open(target, "target"))
    identity = TargetIdentity.of(GGUFFile.open(target))
    assert (artefact.kind, artefact.method, artefact.target, artefact.repo_kind) == ("draft", "eagle3", identity, "model")
    text = card.card(artefact, "user/repo", "apache-2.0", "org/base")
    keys = front(text)
    tags = keys["tags"]
    assert isinstance(tags, list)
    assert {"localspec", "localspec-draft", "localspec-eagle3", target_tag(identity), tokenizer_tag(identity)} <= set(tags)
    assert (keys["license"], keys["base_model"]) == ("apache-2.0", "org/base")
    about = keys["localspec"]
    assert isinstance(about, dict)
    assert about["target"] == {
        "name": "tiny llama", "layers": 2, "width": 64, "vocabulary": 320, "tokenizer": identity.tokenizer_hash,
    }  # fmt: skip
    assert (about["file"], about["bytes"]) == ("my draft.gguf", draft.stat().st_size)
    assert (about["tokens_per_verify"], about["by_source"]) == (2.25, {"gsm8k": 2.5, "chat|<b>": 1.5})

    for words in (
        "tiny llama: 2 layers of width 64, 320 tokens", "after layers 1, 1, 1", "123,456 tokens of data", "optimizer muon",
        "| gsm8k | 2.50 | 70 % 60 % 50 % |", "| chat\\|&lt;b&gt; | 1.50 |  |", "| all | 2.25 | 60 % 55 % 50 % |",
        "localspec run --target TARGET.gguf -hfd 'user/repo:my draft.gguf'", "Licence: apache-2.0",
        "llama-server -m TARGET.gguf -md 'my draft.gguf' --spec-type draft-eagle3 --spec-draft-n-max 3",
    ):  # fmt: skip
        assert words in text
    assert card.is_ours(text)
    assert str(tmp_path) not in text


def test_the_card_of_the_draft_that_comes_with_localspec() -> None:
    text = card.card(read(next(FOLDER.glob("*.gguf"))), "u/r")
    about = front(text)["localspec"]
    assert isinstance(about, dict)
    assert about["tokens_per_verify"] > 2
    assert "| gsm8k | 3.03 |" in text
    assert "says 8,192 of 49,152 tokens" in text
    assert "license" not in front(text)


def test_a_small_model_drafts_for_its_whole_family(tmp_path: Path) -> None:
    small = gguf_maker.tiny_llama(tmp_path / "small.gguf", n_layer=1, seed=3)
    artefact = read(small)
    keys = front(card.card(artefact, "u/r"))
    assert artefact.method == "lm"
    assert not any(str(tag).startswith("localspec-target-") for tag in keys["tags"])  # type: ignore[attr-defined]
    assert tokenizer_tag(TargetIdentity.of(GGUFFile.open(share_things.target(tmp_path)))) in keys["tags"]  # type: ignore[operator]


def test_a_head_that_does_not_say_for_whom_takes_it_from_the_target(tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    stub = gguf_maker.eagle3_stub(tmp_path / "foreign.gguf", target)
    with pytest.raises(UsageError, match="does not say for which model it was made: give that as --target FILE"):
        read(stub)
    assert read(stub, GGUFFile.open(target, "target")).target == TargetIdentity.of(GGUFFile.open(target))
    other = share_things.target(tmp_path, "other.gguf", n_layer=3)
    with pytest.raises(PairingError, match="can't draft for other"):
        read(share_things.draft(tmp_path / "d.gguf", target), GGUFFile.open(other, "target"))


def test_the_base_model_is_taken_from_the_target(tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    draft = share_things.draft(tmp_path / "d.gguf", target)
    url = "https://huggingface.co/org/Base-1B"
    named = gguf_maker.edit(target, tmp_path / "named.gguf", put={"general.base_model.0.repo_url": url})
    text = card.card(read(draft, GGUFFile.open(named, "target")), "u/r")
    assert front(text)["base_model"] == "org/Base-1B"
    assert "base_model" not in front(card.card(read(draft, GGUFFile.open(target, "target")), "u/r"))


def test_a_checkpoint_goes_without_its_trainer(tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    run = tmp_path / "run"
    share_things.checkpoint(run / "best", target)
    for path in (run, run / "best"):
        artefact = read(path)
        assert [item.name for item in artefact.items] == ["config.json", "model.safetensors", "localspec.json"]
    text = card.card(artefact, "user/my-draft")
    assert "localspec convert my-draft --target TARGET.gguf -o my-draft.gguf" in text
    (run / "best" / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no config\.json"):
        read(run)


def test_shards_go_without_the_names_of_folders(tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    folder = share_things.shards(tmp_path / "data", target)
    manifest = Manifest.load(folder)
    settings = {"target_file": f"{tmp_path}/target.gguf", "temperature": 0.7}
    replace(manifest, settings=settings).save(folder)
    (folder / "prompts-self.jsonl").write_text("{}\n")
    artefact = read(folder, GGUFFile.open(target, "target"))
    assert artefact.repo_kind == "dataset"
    assert [item.name for item in artefact.items][-2:] == ["prompts-self.jsonl", "manifest.json"]
    sent = json.loads(artefact.items[-1].content or b"")
    assert sent["settings"] == {"target_file": "target.gguf", "temperature": 0.7}
    assert sent["shards"] == manifest.shards
    text = card.card(artefact, "u/shards")
    assert "| letters | 30 |" in text
    assert "temperature 0.7" in text
    assert str(tmp_path) not in text
    assert front(text)["localspec"]["kind"] == "data"  # type: ignore[index]

    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="checksum is wrong"):
        read(folder)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("absent.gguf", ModelFileError, "does not exist"),
        ("empty", UsageError, "holds neither a checkpoint"),
        ("ggufs", UsageError, "give a file in it, such as x.gguf"),
        ("text.gguf", ModelFileError, "is not a GGUF file"),
    ],
)
def test_what_cannot_be_shared(name: str, kind: type[LocalspecError], said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "x.gguf").touch()
    (tmp_path / "text.gguf").write_text("hello, this is no model at all")
    with pytest.raises(kind, match=said):
        read(tmp_path / name)


@pytest.mark.parametrize("text", ["yes", "null", "ümlaut 🎲", 'a "b": {c} # d', "line\nbreak\x07", "1e3", "", "é" * 90])
def test_texts_survive_yaml(text: str) -> None:
    keys = {"tags": [text], "localspec": {"name": text, text: 1.5, "no": {"on": 2}, "null": 3}}
    assert yaml.safe_load(card.front_matter(keys).split("---\n")[1]) == keys


def test_provenance_in_another_form_does_no_harm(tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    artefact = read(share_things.draft(tmp_path / "d.gguf", target))
    assert artefact.config is not None
    for evaluation in (None, 3, {}, {"tokens_per_verify": "many"}, {"tokens_per_verify": float("nan")},
                       {"tokens_per_verify": 2.0, "by_source": [1], "acceptance": ["x"]}):  # fmt: skip
        config = replace(artefact.config, provenance={"evaluation": evaluation, "steps": "many", "new": {"a": 1}})
        about = front(card.card(replace(artefact, config=config), "u/r"))["localspec"]
        assert isinstance(about, dict)
        assert about.get("tokens_per_verify") in (None, 2.0)


def test_another_target_has_another_tag(tmp_path: Path) -> None:
    one = TargetIdentity.of(GGUFFile.open(share_things.target(tmp_path)))
    assert target_tag(replace(one, name="renamed", architecture="qwen2")) == target_tag(one)
    others = [replace(one, **{name: 65}) for name in ("n_layer", "n_embd", "n_vocab")]
    others.append(replace(one, tokenizer_hash="0" * 64))
    assert len({target_tag(other) for other in [one, *others]}) == 5
