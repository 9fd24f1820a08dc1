"""Checkpoints of other trainers: what is written of them, against llama.cpp's own converter, and what is refused."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import native
from localspec.convert import parity
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.draft import convert
from localspec.convert.output import dequantised, write_gguf
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.pairing import check_pair
from localspec.speculator import SpeculatorConfig
from localspec.target import SessionSettings, TargetSession
from tests import fake_hub
from tests import foreign_checkpoints as foreign
from tests.conftest import Cli
from tests.fake_hub import FakeHub, Repo
from tests.gguf_maker import tiny_llama
from tests.llama_head import LlamaHead

#: the first 16 hex digits of the SHA-256 of each tensor's bytes, as llama.cpp's own converter writes these checkpoints in
#: F32. Made outside of this tree with the scripts of the pinned version (vendor/llama.cpp of llama_cpp_python 0.3.36's
#: sdist): conversion.llama.LlamaModel(FOLDER, LlamaFileType.ALL_F32, OUT, target_model_dir=T).write(), where T held a
#: config.json of 8 layers, and set_vocab was left out, since the tokenizer is no tensor.
EXPECTED = {
    "safeailab": {
        "fc.weight": "6a4946d4c8aba996", "output.weight": "9c3302ed4b9ac3f7",
        "blk.0.attn_norm_2.weight": "a685c43efe26c807", "blk.0.attn_norm.weight": "76e8b7f051324759",
        "blk.0.ffn_down.weight": "b212139550aca28a", "blk.0.ffn_gate.weight": "2149eefb0ed4150f",
        "blk.0.ffn_up.weight": "91e2636c3ce76609", "blk.0.ffn_norm.weight": "f51d1202064c4a4b",
        "blk.0.attn_k.weight": "b63e016e67575ab8", "blk.0.attn_output.weight": "ac9d4ac983665fa1",
        "blk.0.attn_q.weight": "b8bbb3c728253a66", "blk.0.attn_v.weight": "2b47cb31b24180ca",
        "output_norm.weight": "caec9f7df7af2124", "d2t": "ba02c22b05258f14",
    },
    "specforge": {
        "fc.weight": "cc8a662b11dcfc79", "output.weight": "80c37c5b6166f06a",
        "blk.0.attn_norm_2.weight": "6450ccd65970cf47", "blk.0.attn_norm.weight": "2d83585aecf0e1b3",
        "blk.0.ffn_down.weight": "45fd601b91417964", "blk.0.ffn_gate.weight": "0e03ede7b0942450",
        "blk.0.ffn_up.weight": "253607cd60aae0d5", "blk.0.ffn_norm.weight": "7b9bc20715c6bd87",
        "blk.0.attn_k.weight": "18597cf3524084c3", "blk.0.attn_output.weight": "684d6490550b024a",
        "blk.0.attn_q.weight": "4cbc08b310c80c2f", "blk.0.attn_v.weight": "b22e42af97cf32be",
        "output_norm.weight": "2c5304914206dfc9", "d2t": "ba02c22b05258f14",
    },
    "speculators": {
        "token_embd.weight": "12be64ce5bacb277", "fc.weight": "c5e69a873505164a",
        "enc.output_norm.weight": "55538d3d401fcf07", "blk.0.attn_norm_2.weight": "779376d882843f2b",
        "blk.0.attn_norm.weight": "8ae7b045007d75a5", "blk.0.ffn_down.weight": "1a3e6b24091c57bf",
        "blk.0.ffn_gate.weight": "c0d7af2f4b643b82", "blk.0.ffn_up.weight": "c67e74ac801bcc16",
        "blk.0.ffn_norm.weight": "4315e3aae359ce3b", "blk.0.attn_k.weight": "93f50a33e021fe22",
        "blk.0.attn_output.weight": "b56d8e13939013ce", "blk.0.attn_q.weight": "1729f36aa0c17178",
        "blk.0.attn_v.weight": "5353acbf8015c066", "output.weight": "be6fd507501e20a0",
        "output_norm.weight": "ce6d25f97067346c", "d2t": "ba02c22b05258f14",
    },
}  # fmt: skip
#: rope_freqs.weight of `speculators`, made in the same way
LLAMA3_FACTORS = [1.0, 2.4422595500946045, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
#: and the keys that it writes
KEYS = {
    "safeailab": ([2, 4, 5], False, False, 10000.0),
    "specforge": ([2, 4, 5], False, False, 1000000.0),
    "speculators": ([2, 3, 6], True, True, 500000.0),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("foreign") / "target.gguf", n_layer=foreign.N_LAYER, vocab=foreign.VOCAB)


def digests(file: GGUFFile) -> dict[str, str]:
    return {name: hashlib.sha256(file.tensor_bytes(name)).hexdigest()[:16] for name in file.tensors}


@pytest.mark.parametrize("name", foreign.FORMATS)
def test_tensors_and_keys_are_those_of_llama_cpps_converter(name: str, target: Path, tmp_path: Path) -> None:
    file = GGUFFile.open(convert(foreign.FORMATS[name](tmp_path / name), target, tmp_path / "d.gguf", "f32").path, "draft")
    found = digests(file)
    assert ("rope_freqs.weight" in found) == (name == "speculators")
    if found.pop("rope_freqs.weight", None):
        assert dequantised(file, "rope_freqs.weight").tolist() == pytest.approx(LLAMA3_FACTORS, rel=1e-6)
    assert found == EXPECTED[name]
    config = SpeculatorConfig.from_gguf(file)
    said = list(config.taps), config.norm_before_residual, config.norm_before_fc, config.rope_base
    assert said == KEYS[name]
    assert (config.n_head, config.n_head_kv, config.head_dim, config.n_ff, config.draft_vocab) == (4, 2, 16, 96, 96)
    assert (config.n_ctx_train, config.rms_eps) == (512, 1e-5)
    check_pair(GGUFFile.open(target), file)


@pytest.mark.parametrize("name", foreign.FORMATS)
def test_the_file_computes_what_the_checkpoint_does(
    name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's reading, llama3's rope included, against the network that drafts."""
    pytest.importorskip("torch")
    monkeypatch.setattr(parity, "PROMPTS", parity.PROMPTS[:3])
    monkeypatch.setattr(parity, "N_WRITTEN", 30)
    folder = foreign.FORMATS[name](tmp_path / name)
    found = parity.check(folder, convert(folder, target, tmp_path / "d.gguf", "f32").path, target)
    assert found.error < 1e-3
    assert found.real == found.simulated


def test_a_linear_rope(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(parity, "PROMPTS", parity.PROMPTS[:2])
    monkeypatch.setattr(parity, "N_WRITTEN", 30)
    config = foreign.SPECFORGE | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    folder = foreign.write(tmp_path / "linear", config, foreign.eagle3_tensors("midlayer."))
    file = GGUFFile.open(convert(folder, target, tmp_path / "d.gguf", "f32").path, "draft")
    assert (file.arch("rope.scaling.type", ""), file.arch("rope.scaling.factor", 0.0)) == ("linear", 4.0)
    assert parity.check(folder, file.path, target).error < 1e-3


@pytest.mark.parametrize("name", [*foreign.FORMATS, "linear"])
def test_llama_cpps_own_graph_computes_what_the_checkpoint_does(name: str, target: Path, tmp_path: Path) -> None:
    """PyTorch's reading of the checkpoint against llama.cpp, which loads the file beside the target."""
    pytest.importorskip("torch")
    from localspec.convert.eagle3_torch import TorchDraft

    if name == "linear":
        config = foreign.SPECFORGE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        folder = foreign.write(tmp_path / "c", config, foreign.eagle3_tensors("midlayer."))
    else:
        folder = foreign.FORMATS[name](tmp_path / "c")
    done = convert(folder, target, tmp_path / "d.gguf", "f32")
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, foreign.VOCAB, 40).astype(np.int32)
    taps = rng.standard_normal((40, 3 * foreign.E)).astype(np.float32)
    theirs = GGUFFile.open(target)
    reading = TorchDraft(Checkpoint.open(folder), done.config, theirs)
    starts = np.array([4, 20, 38])
    wanted, _ = reading.roll_out(parity.Text(tokens, taps, np.ones(40, bool)), starts + 1, 1)
    native.use_kernels("stock")
    with Model(target) as model, TargetSession(model, SessionSettings(64, n_threads=1)) as session:
        head = LlamaHead(done.path, session)
        logits, _ = head.feed(tokens[1:].tolist(), head.fuse(taps[:-1]))
        head.close()
    found = logits[starts][:, reading.ids.numpy()]
    assert np.allclose(found, wanted, atol=2e-3)
    if name in ("speculators", "linear"):  # a rope that got lost would show
        plain = TorchDraft(Checkpoint.open(folder), replace(done.config, provenance={}, extra={}), theirs)
        lost, _ = plain.roll_out(parity.Text(tokens, taps, np.ones(40, bool)), starts + 1, 1)
        assert np.abs(found - lost).max() > 1e-2


@pytest.mark.parametrize("prefix", ["model.midlayer.", "model.layers.0.", "layers.0."])
def test_other_prefixes_are_the_same_tensors(prefix: str, target: Path, tmp_path: Path) -> None:
    tensors = foreign.eagle3_tensors("midlayer.")
    head = "model." if prefix.startswith("model.") else ""
    renamed = {
        prefix + n.removeprefix("midlayer.") if n.startswith("midlayer.") else n if n.startswith("lm_head") else head + n: t
        for n, t in tensors.items()
    }
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE, renamed, "BF16")
    assert digests(GGUFFile.open(convert(folder, target, tmp_path / "d.gguf", "f32").path)) == EXPECTED["specforge"]


def test_layers_named_by_their_outputs(target: Path, tmp_path: Path) -> None:
    """SpecForge's own list: SGLang adds one to it."""
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE | {"eagle_config": nested}, foreign.eagle3_tensors("midlayer."))
    file = GGUFFile.open(convert(folder, target, tmp_path / "d.gguf", "f32").path)
    assert SpeculatorConfig.from_gguf(file).taps == (2, 4, 6)


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def says(**keys: Any) -> Change:
    return lambda config, _tensors: config.update(keys)


def holds(name: str, *shape: int) -> Change:
    return lambda _config, tensors: tensors.update({name: foreign.counted(name, *shape)})


def lacks(name: str) -> Change:
    return lambda _config, tensors: tensors.__delitem__(name)


def five_taps(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3, 4, 5]
    tensors.update(foreign.eagle3_tensors("midlayer.", n_taps=5))


def five_taps_unsaid(_config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    tensors.update(foreign.eagle3_tensors("midlayer.", n_taps=5))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (five_taps, "reads 5 states of the target; llama.cpp's EAGLE-3 graph reads exactly 3"),
        (five_taps_unsaid, "reads 5 states of the target"),
        (says(eagle_config={"use_aux_hidden_state": False}), "reads one state of the target"),
        (says(eagle_aux_hidden_state_layer_ids=[2, 5, 9]), r"reads the layers \[2, 5, 9\]; .* has 8"),
        (says(num_hidden_layers=2), "has 2 layers; llama.cpp's EAGLE-3 graph has one"),
        (holds("layers.1.mlp.up_proj.weight", 96, 64), "has 2 layers"),
        (holds("midlayer.self_attn.q_proj.bias", 64), r"adds a bias \(layers.0.self_attn.q_proj.bias\)"),
        (holds("midlayer.mlp.up_proj.bias", 96), "adds a bias"),
        (holds("midlayer.self_attn.q_norm.weight", 16), "normalises its queries"),
        (holds("fc_norm.0.weight", 64), "normalises each tap by itself"),
        (holds("midlayer.mlp.experts.0.up_proj.weight", 96, 64), "is a mixture of experts"),
        (holds("midlayer.surprise.weight", 4, 4), "has the tensor layers.0.surprise.weight, which"),
        (says(fc_norm=True), "normalises each tap by itself"),
        (says(norm_output=True), "feeds normalised states back"),
        (says(parallel_drafting=True), "says all its tokens at once"),
        (says(hidden_act="gelu"), "has the activation gelu; llama.cpp's EAGLE-3 graph has silu"),
        (says(rope_scaling=YARN), "scales its rope by yarn"),
        (says(rope_scaling={"type": "dynamic", "factor": 2.0}), "scales its rope by dynamic"),
        (says(partial_rotary_factor=0.5), "rotates a part of each head only"),
        (says(quantization_config={"quant_method": "gptq"}), r"is quantised \(gptq\)"),
        (holds("midlayer.mlp.up_proj.weight_scale", 96, 1), "is quantised"),
        (says(target_hidden_size=128), "reads states 128 wide; .* are 64: give the target it was trained for"),
        (says(vocab_size=512), "was trained for 512 tokens; .* has 320"),
        (lacks("d2t"), "says 96 of 320 tokens and lacks the tensor d2t"),
        (says(rope_scaling="llama3"), r"has a rope_scaling in config.json that can't be used \('llama3'\)"),
        (says(rope_scaling={"rope_type": "llama3", "factor": "8"}), "has a factor in config.json that can't be used"),
        (says(transformer_layer_config=[]), "has a transformer_layer_config in config.json that can't be used"),
        (says(eagle_config="x"), "has a eagle_config in config.json that can't be used"),
        (says(num_attention_heads=0), "has a num_attention_heads in config.json that can't be used"),
        (says(hidden_size=None), "says no hidden_size"),
        (says(head_dim=True), "has a head_dim in config.json that can't be used"),
        (says(rms_norm_eps="small"), "has a rms_norm_eps in config.json that can't be used"),
        (says(eagle_aux_hidden_state_layer_ids="2,3,4"), "layer_ids in config.json that is no list of layers"),
        (says(eagle_aux_hidden_state_layer_ids=0), "no list of layers"),
        (says(eagle_aux_hidden_state_layer_ids={}), "no list of layers"),
        (says(eagle_aux_hidden_state_layer_ids=[1, 1, 1]), "names a layer twice in its eagle_aux_hidden_state_layer_ids"),
        (says(eagle_config={"eagle_aux_hidden_state_layer_ids": [10**30, 1, 2]}), "no list of layers"),
        (says(max_position_embeddings=10**12), "has a max_position_embeddings in config.json"),
        (says(max_position_embeddings=10**30), "has a max_position_embeddings in config.json"),
        (says(use_sliding_window=True, sliding_window="x"), "has a sliding_window in config.json"),
        (says(use_sliding_window=True, sliding_window=-1), "has a sliding_window in config.json"),
        (says(use_sliding_window=True, sliding_window=10**12), "has a sliding_window in config.json"),
        (says(rms_norm_eps=1e12), "has a rms_norm_eps in config.json"),
        (says(rms_norm_eps=10**400), "has a rms_norm_eps in config.json"),
        (says(num_hidden_layers=10**9), "has a num_hidden_layers in config.json"),
        (says(rope_theta=0.5), "has a rope_theta in config.json"),
        (says(rope_scaling={"rope_type": "llama3", "low_freq_factor": 4}), "a low_freq_factor of 4 in config.json"),
        (says(architectures=5), "has a architectures in config.json"),
        (says(layer_types=5), "has a layer_types in config.json"),
        (says(num_attention_heads=3), "asks for"),
        (lacks("lm_head.weight"), "lacks the tensor lm_head.weight"),
    ],
)
def test_what_no_file_can_hold_is_named(change: Change, message: str, target: Path, tmp_path: Path) -> None:
    config, tensors = dict(foreign.SPECFORGE), foreign.eagle3_tensors("midlayer.")
    change(config, tensors)
    folder = foreign.write(tmp_path / "c", config, tensors)
    with pytest.raises(ModelFileError, match=message) as caught:
        convert(folder, target, tmp_path / "d.gguf")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_null_is_nothing_said(target: Path, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("num_hidden_layers", "rms_norm_eps", "max_position_embeddings", "eagle_config"))
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE | nothing, foreign.eagle3_tensors("midlayer."))
    config = convert(folder, target, tmp_path / "d.gguf").config
    assert (config.n_layer, config.rms_eps, config.n_ctx_train) == (1, 1e-6, 2048)


@pytest.mark.parametrize(
    ("rope", "says"),
    [({"factor": "x"}, "has a factor in localspec.json that can't be used"), (5, "has a rope_parameters in localspec.json")],
)
def test_an_own_checkpoints_rope_is_looked_at(rope: Any, says: str, target: Path, tmp_path: Path) -> None:
    folder = foreign.speculators(tmp_path / "c")
    config = Checkpoint.open(folder).config(GGUFFile.open(target, "target"))
    (folder / "localspec.json").write_text(replace(config, provenance={"rope_parameters": rope}).to_json())
    with pytest.raises(ModelFileError, match=says):
        convert(folder, target, tmp_path / "d.gguf")


def test_a_config_nested_beyond_reason(target: Path, tmp_path: Path) -> None:
    folder = foreign.specforge(tmp_path / "c")
    (folder / "config.json").write_text("[" * 20000)
    with pytest.raises(ModelFileError, match=r"no config.json that can be read \(nested too deep\)"):
        convert(folder, target, tmp_path / "d.gguf")


def test_whole_numbers_are_no_weights(target: Path, tmp_path: Path) -> None:
    tensors = {name: t.astype(np.int64) for name, t in foreign.eagle3_tensors("midlayer.").items()}
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE, tensors)
    with pytest.raises(ModelFileError, match=r"has whole numbers \(I64\) in "):
        convert(folder, target, tmp_path / "d.gguf")


def test_no_file_is_begun_with_a_number_beyond_its_type(tmp_path: Path) -> None:
    for value in (-1, 1 << 32, 1e300, [1 << 31], [{}]):
        with pytest.raises(ModelFileError, match=r"^eagle3\.odd would be .* mend the checkpoint's configuration$"):
            write_gguf(tmp_path / "x.gguf", "eagle3", {"eagle3.odd": value}, {})


def test_absolute_ids_are_not_taken_for_offsets(target: Path, tmp_path: Path) -> None:
    """Small ones give rising ids below the vocabulary all the same; t2d gives them away."""
    tensors = foreign.eagle3_tensors("midlayer.")
    ids = np.arange(foreign.DRAFT_VOCAB) + 5
    tensors |= {"d2t": ids, "t2d": np.isin(np.arange(foreign.VOCAB), ids)}
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE, tensors)
    with pytest.raises(ModelFileError, match="d2t and t2d that contradict each other"):
        convert(folder, target, tmp_path / "d.gguf")


def test_float8_is_named(target: Path, tmp_path: Path) -> None:
    folder = foreign.write(tmp_path / "c", foreign.SPECFORGE, foreign.eagle3_tensors("midlayer."), "F8_E4M3")
    with pytest.raises(ModelFileError, match="of the type F8_E4M3; save it as F32, F16 or BF16"):
        convert(folder, target, tmp_path / "d.gguf")


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (foreign.LAYER | {"architectures": ["LlamaForCausalLM"]}, foreign.eagle2_tensors(), "is an EAGLE-1 or EAGLE-2 head"),
        (foreign.LAYER, foreign.eagle2_tensors() | {"fc.bias": foreign.counted("b", 64)}, "EAGLE-1 or EAGLE-2"),
        ({"speculators_model_type": "eagle"}, {"fusion_fc.weight": foreign.counted("f", 64, 128)}, "EAGLE-1 or EAGLE-2"),
        ({"model_type": "medusa"}, {"0.0.linear.weight": foreign.counted("m", 64, 64)}, "holds Medusa heads"),
        ({"speculators_model_type": "peagle"}, foreign.eagle3_tensors("layers.0."), "P-EAGLE"),
        ({"model_type": "bert"}, {"x.weight": foreign.counted("x", 2, 2)}, "its config.json says bert"),
    ],
)
def test_other_kinds_are_named(
    config: dict[str, Any], tensors: dict[str, np.ndarray], message: str, target: Path, tmp_path: Path
) -> None:
    folder = foreign.write(tmp_path / "c", config, tensors)
    with pytest.raises(ModelFileError, match=message) as caught:
        convert(folder, target, tmp_path / "d.gguf")
    assert "\n" not in str(caught.value)


# -- pickles ---------------------------------------------------------------------------------------------------------------


def pickled(folder: Path, tensors: dict[str, np.ndarray], **also: Any) -> Path:
    torch = pytest.importorskip("torch")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(foreign.SAFEAILAB))
    weights = {n: torch.from_numpy(t.copy()) for n, t in tensors.items()}
    halves = {n: t.to(torch.bfloat16 if n == "norm.weight" else torch.float16) if t.dtype.is_floating_point else t
              for n, t in weights.items()}  # fmt: skip
    torch.save(halves | also, folder / "pytorch_model.bin")
    torch.save({"lr": 1}, folder / "optimizer.pt")
    return folder


def test_a_pickle_is_read_only_where_that_is_asked_for(cli: Cli, target: Path, tmp_path: Path) -> None:
    folder = pickled(tmp_path / "c", foreign.eagle3_tensors("midlayer."))
    command = ("convert", folder, "-o", tmp_path / "d.gguf", "--target", target, "--quant", "f32", "--no-parity")
    refused = cli(*command)
    assert (refused.rc, refused.stdout) == (2, "")
    assert "has only a pickle (pytorch_model.bin)" in refused.stderr
    assert "give --allow-pickle" in refused.stderr
    done = cli(*command, "--allow-pickle")
    assert done.rc == 0, done.stderr
    found = digests(GGUFFile.open(tmp_path / "d.gguf"))
    assert {n: h for n, h in found.items() if n != "output_norm.weight"} == {
        n: h for n, h in EXPECTED["safeailab"].items() if n != "output_norm.weight"
    }
    norm = dequantised(GGUFFile.open(tmp_path / "d.gguf"), "output_norm.weight")
    assert np.allclose(norm, foreign.counted("norm.weight", 64), rtol=2**-8)
    checked = cli("convert", folder, "-o", tmp_path / "e.gguf", "--target", target, "--allow-pickle")  # parity reads it, too
    assert checked.rc == 0, checked.stderr
    assert "parity: logits differ by" in checked.stderr


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("was-run"),))


def test_a_pickle_that_does_something_is_refused(cli: Cli, target: Path, tmp_path: Path) -> None:
    folder = pickled(tmp_path / "c", foreign.eagle3_tensors("midlayer."), surprise=Malice())
    with (folder / "pytorch_model.bin").open("rb") as file:
        assert file.read(2) == b"PK"
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(foreign.SAFEAILAB))
    (bare / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Malice()}))
    for bad in (folder, bare):
        refused = cli("convert", bad, "-o", tmp_path / "d.gguf", "--target", target, "--allow-pickle")
        assert refused.rc == 2
        assert "holds more than tensors" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "was-run").exists()
    (bare / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut off")
    refused = cli("convert", bare, "-o", tmp_path / "d.gguf", "--target", target, "--allow-pickle")
    assert refused.rc == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "d.gguf").exists()


# -- from the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub.running() as hub:
        yield hub


def test_a_checkpoint_from_the_hub(cli: Cli, hub: FakeHub, target: Path, tmp_path: Path) -> None:
    folder = foreign.specforge(tmp_path / "c")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repos["maker/draft"] = Repo(files | {"README.md": b"text", "pytorch_model.bin": b"pickle", "optimizer.pt": b"more"})
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = ("convert", "hf://maker/draft", "-o", tmp_path / "d.gguf", "--target", target, "--quant", "f32", "--no-parity")
    done = cli(*command, env=online)
    assert done.rc == 0, done.stderr
    assert digests(GGUFFile.open(tmp_path / "d.gguf")) == EXPECTED["specforge"]
    fetched = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"config.json", "model.safetensors"}
    offline = cli(*command, "--force", env={"HF_ENDPOINT": hub.url})
    assert offline.rc == 0, offline.stderr
    pinned = cli(*command[:1], f"hf://maker/draft@{fake_hub.COMMIT}", *command[2:], "--force", env=online)
    assert pinned.rc == 0, pinned.stderr
    for source, message in (
        ("hf://maker/other", "does not exist at"),
        ("hf://maker", "expected hf://USER/REPO"),
        ("hf://maker/draft@", "expected hf://USER/REPO"),
        ("hf://maker/draft@v9", "HTTP 404"),
    ):
        refused = cli(*command[:1], source, *command[2:], "--force", env=online)
        assert refused.rc == 2
        assert message in refused.stderr, refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
    hub.repos["maker/pickled"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    refused = cli("convert", "hf://maker/pickled", *command[2:], "--allow-pickle", "--force", env=online)
    assert (refused.rc, "has no weights in safetensors" in refused.stderr) == (2, True)
