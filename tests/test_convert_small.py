"""The small model as a file: an ordinary llama that drafts as it was trained, and mistakes that the gate finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from safetensors.torch import load_file, save_file  # noqa: E402

from localspec.accept import Sampling  # noqa: E402
from localspec.blocks import FixedBlock  # noqa: E402
from localspec.convert import parity  # noqa: E402
from localspec.convert import small as converter  # noqa: E402
from localspec.convert.draft import convert  # noqa: E402
from localspec.convert.output import dequantised  # noqa: E402
from localspec.drafters import DrafterSettings, load  # noqa: E402
from localspec.engine import Engine, Request  # noqa: E402
from localspec.errors import ModelFileError  # noqa: E402
from localspec.gguf_file import GGUFFile  # noqa: E402
from localspec.llama_arch import FILE_TYPES  # noqa: E402
from localspec.model import Model  # noqa: E402
from localspec.pairing import check_pair, drafter_for  # noqa: E402
from localspec.speculator import SpeculatorConfig  # noqa: E402
from localspec.target import SessionSettings, TargetSession  # noqa: E402
from localspec.train import checkpoint, evaluate  # noqa: E402
from tests.conftest import Cli  # noqa: E402
from tests.test_convert_llama import logits  # noqa: E402
from tests.test_train_small import OWN, TARGETS, TOKENS, all_logits, batch_of, made  # noqa: E402


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PROMPTS", parity.PROMPTS[:3])
    monkeypatch.setattr(parity, "N_WRITTEN", 30)


def near(target: Path, noise: float = 0.01) -> Any:
    """The target's own layers, each weight a little off: a draft that is often right."""
    model = made(target, replace(OWN, layers=str(GGUFFile.open(target).n_layer)))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=random) * noise)
    return model


class Place:
    """A target, a model near it, and its checkpoint."""

    def __init__(self, folder: Path, kind: str):
        self.target = TARGETS[kind](folder / "target.gguf")
        self.model = near(self.target)
        self.checkpoint = folder / "checkpoint"
        checkpoint.save(self.checkpoint, self.model, {"steps": 7}, None)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    return {kind: Place(tmp_path_factory.mktemp(kind), kind) for kind in ("llama", "tied", "qwen2")}


# -- what is written ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2"])
def test_the_file_is_the_model_that_was_trained(places: dict[str, Place], tmp_path: Path, kind: str) -> None:
    place = places[kind]
    done = convert(place.checkpoint, place.target, tmp_path / "d.gguf", "f32")
    file = GGUFFile.open(done.path, "draft")
    assert file.architecture == "llama"
    assert ("output.weight" in file.tensors) == (kind != "tied")
    assert ("blk.0.attn_q.bias" in file.tensors) == (kind == "qwen2")
    assert "blk.0.attn_output.bias" not in file.tensors
    wanted = all_logits(place.model, TOKENS)
    np.testing.assert_allclose(logits(done.path, TOKENS), wanted, atol=2e-3 * wanted.std())
    found = parity.check(place.checkpoint, done.path, place.target)
    assert found.error < 1e-3
    assert 0.2 < found.real == found.simulated < 1
    assert found.n_chains > 60


@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0", "q4_k_m"])
def test_quantisations(places: dict[str, Place], tmp_path: Path, quant: str) -> None:
    place = places["tied"]
    done = convert(place.checkpoint, place.target, tmp_path / "d.gguf", quant)
    file, theirs = GGUFFile.open(done.path, "draft"), GGUFFile.open(place.target)
    check_pair(theirs, file)
    assert drafter_for(file) == "lm"
    assert SpeculatorConfig.from_gguf(file) == SpeculatorConfig.load(place.checkpoint)
    assert FILE_TYPES[file.file_type or 0].lower() == quant
    assert file.tokenizer_hash() == theirs.tokenizer_hash()
    assert file.chat_template == theirs.chat_template
    assert file.get("localspec.steps", int) == 7
    found = parity.measure(place.checkpoint, done.path, place.target)
    assert found.error < {"f16": 0.01, "q8_0": 0.04}.get(quant, 0.35)


def test_a_target_of_another_architecture(tmp_path: Path) -> None:
    """Its draft is a llama all the same, with its tables."""
    target = TARGETS["gemma3"](tmp_path / "target.gguf")
    checkpoint.save(tmp_path / "c", made(target), {}, None)
    file = GGUFFile.open(convert(tmp_path / "c", target, tmp_path / "d.gguf", "f16").path, "draft")
    assert (file.architecture, file.n_layer, file.key_length) == ("llama", 1, 16)
    check_pair(GGUFFile.open(target), file)
    assert parity.check(tmp_path / "c", file.path, target).error < 0.01


def test_it_drafts_as_the_evaluation_says(places: dict[str, Place], tmp_path: Path) -> None:
    """A roll-out along a text that the target wrote greedily, against the engine that writes it with the file."""
    place = places["llama"]
    draft = convert(place.checkpoint, place.target, tmp_path / "d.gguf", "f32").path
    with Model(place.target) as model, TargetSession(model, SessionSettings(256, n_threads=1)) as session:
        drafter = load("lm", session, DrafterSettings(draft_path=draft, n_threads=1))
        engine = Engine(session, drafter, FixedBlock(3))
        for prompt in (TOKENS, TOKENS[4:], [100, 101]):
            for _ in engine.generate(Request(prompt, Sampling(temperature=0), 90)):
                pass
            text, stats = engine.tokens(0), engine.finish(0)
            batch = batch_of(place.model, text, first=len(prompt) - 1)
            ((_, found),) = evaluate.walks(batch, place.model.rollout(batch, 3), 3)
            assert (found.verifies, found.tokens) == (stats.n_verify, len(text) - len(prompt))
            assert 1.2 < found.tokens_per_verify < 4
        drafter.close()


def test_the_command(cli: Cli, places: dict[str, Place], tmp_path: Path) -> None:
    place = places["tied"]
    draft = tmp_path / "d.gguf"
    done = cli("convert", place.checkpoint, "-o", draft, "--quant", "q8_0", "--target", place.target)
    assert done.rc == 0, done.stderr
    assert "Small draft for" in done.stderr
    assert "parity: logits differ by" in done.stderr
    common = ("run", "--target", place.target, "--temp", "0", "-n", "40", "--raw", "-p", "the cat sat", "--no-spec-adapt")
    plain = cli(*common, "--spec-type", "none")
    drafted = cli(*common, "--draft", draft)
    assert drafted.rc == plain.rc == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    assert "tokens per verify" in drafted.stderr
    shown = cli("inspect", place.target, draft)
    assert shown.rc == 0, shown.stderr
    assert "--spec-type draft-simple" in shown.stdout


def test_a_large_vocabulary_is_compared_at_fewer_places(
    places: dict[str, Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = places["tied"]
    draft = convert(place.checkpoint, place.target, tmp_path / "d.gguf", "f16").path
    whole = parity.measure(place.checkpoint, draft, place.target)
    monkeypatch.setattr(parity, "N_LOGITS", 10 * 320)
    fewer = parity.measure(place.checkpoint, draft, place.target)
    assert 20 < 2 * fewer.n_chains < whole.n_chains
    assert fewer.error < 0.01


# -- the gate -------------------------------------------------------------------------------------------------------------


def unpermuted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(converter, "pairs_from_halves", lambda weight, _heads: weight)


def swapped(patch: pytest.MonkeyPatch) -> None:
    layer = dict(converter._LAYER)
    layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"] = layer["mlp.up_proj.weight"], layer["mlp.gate_proj.weight"]
    patch.setattr(converter, "_LAYER", layer)


def without_biases(patch: pytest.MonkeyPatch) -> None:
    true = converter.tensors_of
    patch.setattr(converter, "tensors_of", lambda *a: {k: v for k, v in true(*a).items() if not k.endswith(".bias")})


@pytest.mark.parametrize("mistake", [unpermuted, swapped, without_biases])
def test_the_gate_finds_mistakes(
    places: dict[str, Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    place = places["qwen2"]
    with monkeypatch.context() as patch:
        mistake(patch)
        wrong = convert(place.checkpoint, place.target, tmp_path / "wrong.gguf", "q8_0")
    with pytest.raises(ModelFileError, match="would not be the draft in"):
        parity.check(place.checkpoint, wrong.path, place.target)


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.norm.weight", None, "lacks the tensor norm.weight"),
        ("model.embed_tokens.weight", None, "lacks the tensor embed_tokens.weight"),
        ("model.layers.0.self_attn.k_proj.bias", None, "lacks the tensor layers.0.self_attn.k_proj.bias"),
        ("model.norm.weight", lambda w: w * float("nan"), "not finite in norm.weight"),
        ("model.layers.1.mlp.up_proj.weight", lambda w: w[1:].clone(), r"of the shape \[127, 64\]; its config asks for"),
        ("model.layers.9.mlp.up_proj.weight", lambda _: torch.zeros(2), "has the tensor layers.9.mlp.up_proj.weight"),
        ("fc.weight", lambda _: torch.zeros(2), "has the tensor fc.weight"),
    ],
)
def test_broken_checkpoints(
    places: dict[str, Place], tmp_path: Path, name: str, change: Callable[[Any], Any] | None, says: str
) -> None:
    place = places["qwen2"]
    shutil.copytree(place.checkpoint, tmp_path / "c")
    weights = load_file(tmp_path / "c" / "model.safetensors")
    if change is None:
        del weights[name]
    else:
        weights[name] = change(weights.get(name))
    save_file(weights, tmp_path / "c" / "model.safetensors")
    with pytest.raises(ModelFileError, match=says):
        convert(tmp_path / "c", place.target, tmp_path / "d.gguf")
    assert not (tmp_path / "d.gguf").exists()


def test_anothers_llama_is_left_to_llama_cpp(places: dict[str, Place], tmp_path: Path) -> None:
    shutil.copytree(places["tied"].checkpoint, tmp_path / "c")
    (tmp_path / "c" / "localspec.json").unlink()
    with pytest.raises(ModelFileError, match="is of no kind that can be converted here"):
        convert(tmp_path / "c", places["tied"].target, tmp_path / "d.gguf")


def test_tables_are_what_the_target_has(places: dict[str, Place], tmp_path: Path) -> None:
    place = places["llama"]
    file = GGUFFile.open(convert(place.checkpoint, place.target, tmp_path / "d.gguf", "f32").path)
    for name in ("token_embd.weight", "output.weight"):
        theirs = dequantised(GGUFFile.open(place.target), name)
        np.testing.assert_allclose(dequantised(file, name), theirs, rtol=1e-3, atol=1e-6)
