"""Drafts as checkpoints of vLLM's speculators: that package loads them with equal values, and the way back is exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localspec.convert.draft import convert
from localspec.convert.output import dequantised, write_gguf
from localspec.convert.rope_rows import halves_from_pairs, pairs_from_halves
from localspec.convert.speculators import export
from localspec.errors import ModelFileError, PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.speculator import JSON_KEY, SpeculatorConfig
from tests import foreign_checkpoints as foreign
from tests.conftest import Cli
from tests.gguf_maker import tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("to") / "target.gguf", n_layer=foreign.N_LAYER, vocab=foreign.VOCAB)


def verifier(folder: Path, target: Path) -> Path:
    """What the package reads of a target: its config and three tensors."""
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": foreign.VOCAB, "hidden_size": foreign.E,
        "intermediate_size": 128, "num_hidden_layers": foreign.N_LAYER, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    file = GGUFFile.open(target)
    names = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
             "model.norm.weight": "output_norm.weight"}  # fmt: skip
    save_file({a: dequantised(file, b).copy() for a, b in names.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def loaded(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint as the package holds them."""
    speculators = pytest.importorskip("speculators", reason="vLLM's speculators is not installed: pip install speculators")
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return dict(speculators.SpeculatorModel.from_pretrained(str(folder), config=config).float().state_dict())


@pytest.mark.parametrize("name", foreign.FORMATS)
def test_speculators_loads_every_checkpoint_with_equal_tensors(name: str, target: Path, tmp_path: Path) -> None:
    source = foreign.FORMATS[name](tmp_path / name)
    done = export(source, tmp_path / "out", target, str(verifier(tmp_path / "verifier", target)))
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = loaded(done.path)
    for key, value in ours.items():
        assert np.array_equal(theirs[key].numpy(), value), key
    assert set(theirs) <= set(ours) | {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    # and they are the values that its trainer wrote
    wrote = foreign.eagle3_tensors("layers.0.", embedding=name == "speculators", norm_before_fc=name == "speculators")
    assert set(ours) == set(wrote)
    for key, value in wrote.items():
        assert np.allclose(ours[key], value, atol=0 if name == "speculators" else 0.01), key
    said = json.loads((done.path / "config.json").read_text())
    assert said["transformer_layer_config"]["rope_parameters"]["rope_type"] == (
        "llama3" if name == "speculators" else "default"
    )


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("ours", [True, False])
def test_there_and_back(target: Path, tmp_path: Path, quant: str, ours: bool) -> None:
    """GGUF, speculators, GGUF: the same bytes. Without our JSON, as other converters write a file, the target's name alone
    is lost, and it must be given again."""
    first = convert(foreign.specforge(tmp_path / "c"), target, tmp_path / "a.gguf", quant).path
    if not ours:
        file = GGUFFile.open(first)
        keys = {k: v for k, v in file.metadata.items() if k.startswith("eagle3.")}
        tensors = {n: (t.type, _rows(file, n)) for n, t in file.tensors.items()}
        first = tmp_path / "foreign.gguf"
        write_gguf(first, "eagle3", keys, tensors)
        assert JSON_KEY not in GGUFFile.open(first).metadata
    export(first, tmp_path / "out")
    assert (tmp_path / "out" / "localspec.json").is_file() == ours
    second = convert(tmp_path / "out", target, tmp_path / "b.gguf", quant).path
    a, b = GGUFFile.open(first), GGUFFile.open(second)
    assert {n: bytes(a.tensor_bytes(n)) for n in a.tensors} == {n: bytes(b.tensor_bytes(n)) for n in b.tensors}
    before, after = SpeculatorConfig.from_gguf(a), SpeculatorConfig.from_gguf(b)
    assert after == (before if ours else replace(before, target=after.target, rms_eps=after.rms_eps))
    assert after.rms_eps == pytest.approx(before.rms_eps)


def _rows(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    if info.type == "I64":
        return np.frombuffer(file.tensor_bytes(name), np.int64)
    if info.type == "F32":
        return np.frombuffer(file.tensor_bytes(name), np.float32).reshape(info.shape[::-1])
    return np.frombuffer(file.tensor_bytes(name), np.uint8).reshape(*info.shape[:0:-1], -1)


def test_a_draft_that_uses_the_targets_head(target: Path, tmp_path: Path) -> None:
    config = {k: v for k, v in foreign.SPECFORGE.items() if k != "draft_vocab_size"}
    tensors = foreign.eagle3_tensors("midlayer.")
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    draft = convert(foreign.write(tmp_path / "c", config, tensors), target, tmp_path / "d.gguf", "f16").path
    with pytest.raises(UsageError, match="no head of its own: give its target"):
        export(draft, tmp_path / "out")
    export(draft, tmp_path / "out", target, str(verifier(tmp_path / "verifier", target)))
    theirs = loaded(tmp_path / "out")
    assert np.array_equal(theirs["lm_head.weight"].numpy(), dequantised(GGUFFile.open(target), "output.weight"))
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")


def test_linear_ropes_and_windows_are_kept(target: Path, tmp_path: Path) -> None:
    more = {"rope_scaling": {"type": "linear", "factor": 4.0}, "sliding_window": 32, "use_sliding_window": True}
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE | more, foreign.eagle3_tensors("midlayer."))
    first = convert(folder, target, tmp_path / "a.gguf", "f32").path
    export(first, tmp_path / "out")
    for kept in (True, False):
        if not kept:
            (tmp_path / "out" / "localspec.json").unlink()  # config.json alone says it, too
        second = convert(tmp_path / "out", target, tmp_path / "b.gguf", "f32", overwrite=True).path
        config = SpeculatorConfig.from_gguf(GGUFFile.open(second))
        assert config == SpeculatorConfig.from_gguf(GGUFFile.open(first))
        assert (config.window, config.extra["rope.scaling.factor"]) == (32, 4.0)


def test_rows_come_back() -> None:
    rows = np.arange(48).reshape(24, 2)
    assert np.array_equal(halves_from_pairs(pairs_from_halves(rows, 3), 3), rows)
    assert not np.array_equal(pairs_from_halves(rows, 3), halves_from_pairs(rows, 3))


def test_what_is_refused(target: Path, tmp_path: Path) -> None:
    source = foreign.specforge(tmp_path / "c")
    with pytest.raises(UsageError, match="is a checkpoint: give the target"):
        export(source, tmp_path / "out")
    with pytest.raises(ModelFileError, match="was trained for 320 tokens"):
        export(source, tmp_path / "out", tiny_llama(tmp_path / "other.gguf", n_layer=8, vocab=400))
    with pytest.raises(UsageError, match="can't be converted by this version"):
        export(target, tmp_path / "out")
    with pytest.raises(UsageError, match="is read for this"):
        export(source, source, target, overwrite=True)
    with pytest.raises(UsageError, match="is read for this"):
        export(source, tmp_path, target, overwrite=True)
    with pytest.raises(UsageError, match="no such directory"):
        export(source, tmp_path / "no" / "out", target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").touch()
    with pytest.raises(UsageError, match="holds something else than a checkpoint"):
        export(source, tmp_path / "full", target, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"exists: name another directory$"):
        export(source, tmp_path / "file", target, overwrite=True)
    assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", target)
    with pytest.raises(UsageError, match="exists: name another directory or give --force"):
        export(source, tmp_path / "out", target)
    done = export(source, tmp_path / "out", target, overwrite=True)
    other = tiny_llama(tmp_path / "deep.gguf", n_layer=9, vocab=foreign.VOCAB)
    with pytest.raises(PairingError, match="9 layers, not 8"):
        export(done.path, tmp_path / "again", other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "deep.gguf", "file", "full", "other.gguf", "out"]


def test_a_width_of_its_own_is_named(target: Path, tmp_path: Path) -> None:
    wide = tiny_llama(tmp_path / "wide.gguf", n_layer=8, vocab=foreign.VOCAB, n_embd=128)
    tensors = foreign.eagle3_tensors("midlayer.", n_taps=6, embedding=True)  # 3 states of 128
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE | {"target_hidden_size": 128}, tensors)
    draft = GGUFFile.open(convert(folder, wide, tmp_path / "d.gguf", "f32").path)
    assert (draft.n_embd, draft.get("eagle3.target_hidden_size", int)) == (64, 128)
    with pytest.raises(UsageError, match="64 wide and reads states 128 wide"):
        export(draft.path, tmp_path / "out")


def test_the_command(cli: Cli, target: Path, tmp_path: Path) -> None:
    source = foreign.safeailab(tmp_path / "c")
    done = cli("convert", "--to", "speculators", source, "-o", "out", "--target", target, "--verifier", "some/model")
    assert done.rc == 0, done.stderr
    assert "EAGLE-3 draft for" in done.stderr
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    again = cli("convert", "--to", "speculators", "out", "-o", "again", "--target", target)
    assert again.rc == 0, again.stderr
    kept = json.loads((tmp_path / "again" / "config.json").read_text())
    assert kept == said  # the verifier's name too
    for arguments, message in (
        (("--quant", "f16"), "--to speculators writes f32"),
        (("--as-llama",), "--to speculators writes f32"),
        ((), "exists: name another directory or give --force"),
    ):
        refused = cli("convert", "--to", "speculators", source, "-o", "out", "--target", target, *arguments)
        assert (refused.rc, message in refused.stderr) == (2, True), refused.stderr
    refused = cli("convert", source, "-o", "d.gguf", "--target", target, "--verifier", "x")
    assert (refused.rc, "--verifier is for" in refused.stderr) == (2, True)
