"""DFlash and DSpark checkpoints to GGUF: what is written, against llama.cpp's own converter; what is refused; the gate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localspec.convert import dflash as converter
from localspec.convert import parity
from localspec.convert.draft import convert
from localspec.convert.output import dequantised
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.pairing import check_pair, drafter_for, llama_spec_type
from localspec.speculator import SpeculatorConfig, TargetIdentity
from localspec.target import SessionSettings, TargetSession
from tests import foreign_dflash as foreign
from tests.block_reference import BlockReference
from tests.conftest import Cli
from tests.gguf_maker import tiny_llama
from tests.llama_head import LlamaBlocks

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PROMPTS", parity.PROMPTS[:3])
    monkeypatch.setattr(parity, "N_WRITTEN", 30)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("convert") / "target.gguf", n_layer=4, vocab=512, n_embd=64)


EXTRA = {"block_size": 8, "mask_token_id": 5}


def config_for(
    target: Path, method: str = "dflash", extra: dict[str, Any] | None = None, **changes: Any
) -> SpeculatorConfig:
    own = {"sample_from_anchor": True, "has_confidence_head": True} if method == "dspark" else {}
    config = SpeculatorConfig(
        method=method, target=TargetIdentity.of(GGUFFile.open(target)), taps=(1, 2, 3), n_embd=64, n_head=4, n_head_kv=2,
        head_dim=32, n_ff=96, n_layer=2, rope_base=10000.0, draft_vocab=128, depth=7, n_ctx_train=512, architecture="dflash",
        extra=EXTRA | own | (extra or {}), provenance={"data_tokens": 1234, "steps": 7, "localspec": "0.0"},
    )  # fmt: skip
    return replace(config, **changes)


def weights_for(config: SpeculatorConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under the names of `speculators`."""
    rng = np.random.default_rng(seed)
    out = foreign.backbone(rng, len(config.taps))
    if config.method == "dspark":
        out |= foreign.heads(rng, config.draft_vocab or config.target.n_vocab)
    return out | (foreign.reduced(rng) if config.draft_vocab else {})


def checkpoint(folder: Path, config: SpeculatorConfig, weights: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights if weights is not None else weights_for(config), folder / "model.safetensors")
    (folder / "localspec.json").write_text(config.to_json())
    return folder


# -- checkpoints of others, against what llama.cpp's converter (conversion/qwen.py, f32) made of the same ones --------------

THEIRS = json.loads((Path(__file__).parent / "dflash_converted.json").read_text())


@pytest.mark.parametrize("name", THEIRS)
def test_llama_cpps_converter_writes_the_same(target: Path, tmp_path: Path, name: str) -> None:
    """Every tensor by its bytes, every key by its value; no tensor more, and of keys only ours."""
    source = getattr(foreign, name)(tmp_path / "theirs")
    file = GGUFFile.open(convert(source, target, tmp_path / "d.gguf", "f32").path, "draft")
    hashes = {n: hashlib.sha256(file.tensor_bytes(n)).hexdigest()[:12] for n in file.tensors}
    assert hashes == THEIRS[name]["tensors"]
    for key, value in THEIRS[name]["keys"].items():
        assert np.asarray(file.metadata[key], float).tolist() == pytest.approx(np.asarray(value, float).tolist()), key
    assert llama_spec_type("dflash", file) == ("draft-dspark" if "dspark" in name or name == "deepspec" else "draft-dflash")
    assert parity.check(source, file.path, target).error < 1e-3


def test_deepspec_with_the_targets_matrices(target: Path, tmp_path: Path) -> None:
    """It stores the target's embedding and head in bf16: they are the target's all the same, and left out."""
    file = GGUFFile.open(target)
    embedding = dequantised(file, "token_embd.weight")
    head = dequantised(file, "output.weight" if "output.weight" in file.tensors else "token_embd.weight")
    source = foreign.deepspec(tmp_path / "theirs", {"embed_tokens.weight": embedding, "lm_head.weight": head})
    done = convert(source, target, tmp_path / "d.gguf", "f32")
    assert set(GGUFFile.open(done.path).tensors) == set(THEIRS["deepspec"]["tensors"])


def test_speculators_dflash(target: Path, tmp_path: Path) -> None:
    source = foreign.speculators_dflash(tmp_path / "theirs")
    done = convert(source, target, tmp_path / "d.gguf", "q8_0")
    assert (done.config.taps, done.config.window, done.config.depth) == ((1, 2, 3), 24, 7)
    assert done.config.extra["attention.sliding_window_pattern"] == [1, 0]
    assert parity.check(source, done.path, target).error < 0.04


def with_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def set_(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for part in path[:-1]:
            config = config[part]
        if to is None:
            del config[path[-1]]
        else:
            config[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("z_lab", set_("dflash_config", "conv_kernel_size", to=3), "is a DFlash 2 draft"),
        ("z_lab", set_("dflash_config", "mask_token_id", to=None), "says no mask_token_id in config.json"),
        ("z_lab", set_("dflash_config", "target_layer_ids", to=None), "which of the target's layers it reads"),
        ("z_lab", set_("dflash_config", "target_layer_ids", to=[0, 4]), "reads the target after layer 5; .* has 4"),
        ("z_lab", set_("dflash_config", "target_layer_ids", to=-1), "target_layer_ids in config.json that is no list"),
        ("z_lab", set_("dflash_config", "target_layer_ids", to=[1, 1]), "names a layer twice in its target_layer_ids"),
        ("z_lab", set_("dflash_config", "num_hidden_layers", to=10**9), "has a num_hidden_layers in config.json"),
        ("z_lab", set_("sliding_window", to=10**30), "has a sliding_window in config.json"),
        ("speculators_dflash", set_("aux_hidden_state_layer_ids", to=-1), "aux_hidden_state_layer_ids in config.json that"),
        ("z_lab", set_("block_size", to=1), "says no block_size"),
        ("z_lab", set_("hidden_size", to=96), "is 96 wide; .* the target's own width, 64"),
        ("z_lab", set_("attention_bias", to=True), "adds biases in its attention"),
        ("z_lab", set_("rope_scaling", to={"rope_type": "yarn"}), "scales its rope"),
        ("z_lab", set_("layer_types", to=["sliding_attention"]), "not 2 layer_types"),
        ("z_lab", set_("hidden_act", to="gelu"), "another activation than silu"),
        ("deepspec", set_("markov_head_type", to="gated"), "a Markov head of the type gated"),
        ("deepspec", set_("final_logit_softcapping", to=30.0), "caps its logits"),
        ("speculators_dflash", set_("sliding_window_non_causal", to=False), "can't mix the two"),
        ("speculators_dflash", set_("sample_from_anchor", to=True), "without a Markov head"),
        ("z_lab", set_("architectures", to=["Qwen3DSparkModel"]), "without a Markov head"),
        ("speculators_dflash", set_("transformer_layer_config", "intermediate_size", to=100), "its config asks for"),
    ],
)
def test_what_can_not_be_represented_is_named(
    target: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    source = with_config(getattr(foreign, name)(tmp_path / "theirs"), change)
    with pytest.raises(ModelFileError, match=says):
        convert(source, target, tmp_path / "d.gguf", "f32")
    assert not (tmp_path / "d.gguf").exists()


def test_tensors_that_can_not_be_represented_are_named(target: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, says in (
        ("layers.0.self_attn.sinks", "has the tensor layers.0.self_attn.sinks"),
        ("layers.0.self_attn.q_proj.bias", "has the tensor layers.0.self_attn.q_proj.bias"),
        ("candidate_selector.predecessor_codebook", "is a DFlash 2 draft"),
    ):
        source = foreign.z_lab(tmp_path / "theirs")
        config = json.loads((source / "config.json").read_text())
        foreign.save(source, config, foreign.backbone(rng, 2) | {name: np.ones(4, np.float32)})
        with pytest.raises(ModelFileError, match=says):
            convert(source, target, tmp_path / "d.gguf")
    foreign.z_lab(source)
    (source / "mask_embedding.pt").touch()
    with pytest.raises(ModelFileError, match="a mask embedding of its own"):
        convert(source, target, tmp_path / "d.gguf")


def test_a_block_that_looks_back_only_is_causal(target: Path, tmp_path: Path) -> None:
    """All layers with a window and not non-causal: what llama.cpp can do is look back in all of them."""
    source = with_config(
        foreign.speculators_dflash(tmp_path / "theirs"),
        lambda c: c.update(sliding_window_non_causal=False) or c["transformer_layer_config"].update(  # type: ignore[func-returns-value]
            layer_types=["sliding_attention"] * 2
        ),
    )
    done = convert(source, target, tmp_path / "d.gguf", "f32")
    assert GGUFFile.open(done.path).arch("attention.causal") is True
    assert parity.check(source, done.path, target).error < 1e-3


def test_a_confidence_head_without_the_markov_state(target: Path, tmp_path: Path) -> None:
    """Its weights for the state are written as zeros; a bias that is not there is none."""
    config = config_for(target, "dspark")
    weights = weights_for(config)
    own = weights["confidence_head.proj.weight"][:, :64].copy()
    weights["confidence_head.proj.weight"] = own
    del weights["confidence_head.proj.bias"]
    file = GGUFFile.open(convert(checkpoint(tmp_path / "c", config, weights), target, tmp_path / "d.gguf", "f32").path)
    # kept as F16 in every type of file
    assert np.allclose(dequantised(file, "conf_proj.weight"), np.concatenate([own, np.zeros((1, 32))], 1), atol=1e-3)
    assert "conf_proj.bias" not in file.tensors


# -- ours -------------------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "whole vocabulary": {"draft_vocab": 0},
    "window": {"window": 6},
    "window in one layer": {"window": 6, "extra": {"attention.sliding_window_pattern": [0, 1]}},
    "causal": {"extra": {"attention.causal": True}},
    "dspark": {"method": "dspark"},
    "dspark, whole vocabulary": {"method": "dspark", "draft_vocab": 0},
    "dspark, anchor first": {"method": "dspark", "extra": {"sample_from_anchor": False}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_the_draft(target: Path, tmp_path: Path, kind: str) -> None:
    """Torch's reading of the checkpoint, ours of the file, and llama.cpp's of the file."""
    config = config_for(target, **KINDS[kind])
    source = checkpoint(tmp_path / "ckpt", config)
    done = convert(source, target, tmp_path / "d.gguf", "f32")
    file, theirs = GGUFFile.open(done.path, "draft"), GGUFFile.open(target)
    check_pair(theirs, file)
    assert drafter_for(file) == "dflash"
    assert SpeculatorConfig.from_gguf(file) == config  # JSON and keys agree, or this raises
    assert file.get("tokenizer.ggml.mask_token_id", int) == 5
    assert file.get("localspec.data_tokens", int) == 1234
    found = parity.check(source, done.path, target)
    assert found.error < 1e-3
    assert found.simulated == found.real
    rows = np.random.default_rng(1).standard_normal((20, 3 * 64)).astype(np.float32)
    reference = BlockReference(done.path, target)
    wanted, tokens, _ = reference.draft(rows, 77, 4)
    with Model(target) as model, TargetSession(model, SessionSettings(n_ctx=256)) as session:
        graph = LlamaBlocks(done.path, session, causal=bool(config.extra.get("attention.causal")))
        graph.inject(0, rows)
        logits, _ = graph.block(20, [77] + [5] * (3 + reference.lead))
        for i, row in enumerate(wanted):
            assert np.linalg.norm(logits[reference.lead + i][reference.ids] - row) < 2e-3 * np.linalg.norm(row)
        assert tokens == [int(logits[reference.lead + i].argmax()) for i in range(4)]
        graph.close()


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0", "q4_k_m"])
def test_types(target: Path, tmp_path: Path, method: str, quant: str) -> None:
    source = checkpoint(tmp_path / "ckpt", config_for(target, method))
    file = GGUFFile.open(convert(source, target, tmp_path / "d.gguf", quant).path)
    kinds = {n: t.type for n, t in file.tensors.items()}
    assert kinds["d2t"] == "I64"
    assert {kinds[n] for n in kinds if n.endswith("norm.weight")} == {"F32"}
    if quant != "q4_k_m":
        assert kinds["fc.weight"] == (quant if quant != "q4_0" else "q8_0").upper()
        assert kinds["blk.1.ffn_down.weight"] == quant.upper()
        if method == "dspark":
            assert (kinds["conf_proj.weight"], kinds["markov_w1.weight"]) == ("F16", quant.upper())
    assert parity.check(source, file.path, target).n_chains > 60


def test_the_targets_matrices_are_left_out_others_kept(target: Path, tmp_path: Path) -> None:
    config = config_for(target, draft_vocab=0)
    file = GGUFFile.open(target)
    embedding = dequantised(file, "token_embd.weight")
    head = dequantised(file, "output.weight" if "output.weight" in file.tensors else "token_embd.weight")
    weights = weights_for(config)
    same = checkpoint(tmp_path / "same", config, weights | {"embed_tokens.weight": embedding, "lm_head.weight": head})
    kept = GGUFFile.open(convert(same, target, tmp_path / "same.gguf", "f32").path)
    assert not {"token_embd.weight", "output.weight"} & set(kept.tensors)
    other = checkpoint(tmp_path / "other", config, weights | {"embed_tokens.weight": embedding[::-1].copy()})
    kept = GGUFFile.open(convert(other, target, tmp_path / "other.gguf", "f32").path)
    # llama.cpp would take the draft's embedding for its head: the target's head must stand there
    assert (dequantised(kept, "output.weight") == head).all()
    assert parity.check(other, kept.path, target).error < 1e-3


# -- the gate -------------------------------------------------------------------------------------------------------------


def norms_exchanged(patch: pytest.MonkeyPatch) -> None:
    layer = dict(converter._LAYER)
    q, k = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
    layer[q], layer[k] = layer[k], layer[q]
    patch.setattr(converter, "_LAYER", layer)


def window_lost(patch: pytest.MonkeyPatch) -> None:
    keys = SpeculatorConfig.to_gguf_keys
    patch.setattr(SpeculatorConfig, "to_gguf_keys", lambda self: keys(replace(self, window=0)))


def windows_in_other_layers(patch: pytest.MonkeyPatch) -> None:
    keys = SpeculatorConfig.to_gguf_keys
    extra = {"attention.sliding_window_pattern": [0, 1]}
    patch.setattr(SpeculatorConfig, "to_gguf_keys", lambda self: keys(replace(self, extra=dict(self.extra) | extra)))


def taps_in_another_order(patch: pytest.MonkeyPatch) -> None:
    keys = SpeculatorConfig.to_gguf_keys
    patch.setattr(SpeculatorConfig, "to_gguf_keys", lambda self: keys(replace(self, taps=self.taps[::-1])))


def layers_exchanged(patch: pytest.MonkeyPatch) -> None:
    shapes = converter.backbone_shapes
    swap = {"blk.0": "blk.1", "blk.1": "blk.0"}
    patch.setattr(converter, "backbone_shapes", lambda config: {
        old: (swap.get(new[:5], new[:5]) + new[5:], shape) for old, (new, shape) in shapes(config).items()
    })  # fmt: skip


def rows_permuted(patch: pytest.MonkeyPatch) -> None:
    tensors = converter.backbone_tensors

    def mixed(source: Any, config: SpeculatorConfig, *rest: Any) -> dict[str, np.ndarray]:
        from localspec.convert.rope_rows import pairs_from_halves

        out = tensors(source, config, *rest)
        return out | {n: pairs_from_halves(out[n], config.n_head) for n in out if n.endswith("attn_q.weight")}

    patch.setattr(converter, "backbone_tensors", mixed)


@pytest.mark.parametrize(
    "mistake",
    [norms_exchanged, window_lost, windows_in_other_layers, taps_in_another_order, layers_exchanged, rows_permuted],
)
def test_the_gate_finds_mistakes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    config = config_for(target, window=8, extra={"attention.sliding_window_pattern": [1, 0]})
    source = checkpoint(tmp_path / "ckpt", config)
    parity.check(source, convert(source, target, tmp_path / "right.gguf", "q8_0").path, target)
    with monkeypatch.context() as patch:
        mistake(patch)
        wrong = convert(source, target, tmp_path / "wrong.gguf", "q8_0")
    with pytest.raises(ModelFileError, match=r"would not be the draft in .*its logits differ by"):
        parity.check(source, wrong.path, target)


# -- what is refused ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def without(name: str) -> Change:
    return lambda weights: {k: v for k, v in weights.items() if k != name}


def with_(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda weights: weights | {name: value(weights.get(name, np.zeros(3, np.float32)))}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("layers.1.self_attn.q_norm.weight"), "lacks the tensor layers.1.self_attn.q_norm.weight"),
        (without("hidden_norm.weight"), "lacks the tensor hidden_norm.weight"),
        (without("lm_head.weight"), "lacks the tensor lm_head.weight"),
        (without("d2t"), "lacks the tensor d2t"),
        (without("confidence_head.proj.weight"), "lacks the tensor confidence_head.proj.weight"),
        (without("markov_head.markov_w2.weight"), "lacks the tensor markov_head.markov_w2.weight"),
        (with_("markov_head.markov_w1.weight", lambda w: w[:, :16].copy()), r"markov_w1.weight of the shape \[512, 16\]"),
        (with_("fc.weight", lambda w: w * np.float32(np.nan)), "not finite in fc.weight"),
        (with_("fc.weight", lambda w: w[:, 1:].copy()), r"fc.weight of the shape \[64, 191\]; its config asks for"),
        (with_("d2t", lambda d: d + 400), "does not give 128 rising ids below 512"),
        (with_("layers.2.mlp.up_proj.weight", lambda w: w), "has the tensor layers.2.mlp.up_proj.weight, which"),
        (with_("embed_tokens.weight", lambda w: w), "embed_tokens.weight of the shape"),
    ],
)
def test_broken_checkpoints(target: Path, tmp_path: Path, change: Change, says: str) -> None:
    config = config_for(target, "dspark")
    source = checkpoint(tmp_path / "ckpt", config, change(weights_for(config)))
    with pytest.raises(ModelFileError, match=says):
        convert(source, target, tmp_path / "d.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"mask_token_id": 512}, "a mask_token_id of 512"),
        ({"mask_token_id": "5"}, "a mask_token_id of '5'"),
        ({"block_size": 0}, "a block_size of 0"),
        ({"attention.sliding_window_pattern": [1]}, "one number for each of 2 layers"),
    ],
)
def test_broken_configs(target: Path, tmp_path: Path, extra: dict[str, Any], says: str) -> None:
    source = checkpoint(tmp_path / "ckpt", config_for(target, extra=extra, window=8))
    with pytest.raises(ModelFileError, match=says):
        convert(source, target, tmp_path / "d.gguf")


def test_the_command(cli: Cli, target: Path, tmp_path: Path) -> None:
    """Converted, held against PyTorch, and run: the same text as without."""
    source = checkpoint(tmp_path / "ckpt", config_for(target, "dspark"))
    draft = tmp_path / "d.gguf"
    done = cli("convert", source, "-o", draft, "--quant", "q8_0", "--target", target)
    assert done.rc == 0, done.stderr
    assert "DSpark draft for" in done.stderr
    assert "parity: logits differ by" in done.stderr
    common = ("run", "--target", target, "--temp", "0", "-n", "12", "--raw", "-p", "the cat sat", "--no-spec-adapt")
    plain = cli(*common, "--spec-type", "none")
    drafted = cli(*common, "--draft", draft)
    assert drafted.rc == plain.rc == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    broken = checkpoint(tmp_path / "broken", config_for(target, "dspark", draft_vocab=0))
    refused = cli("convert", broken, "-o", tmp_path / "e.gguf", "--target", tmp_path / "nowhere.gguf")
    assert (refused.rc, len(refused.stderr.strip().splitlines())) == (2, 1)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_there_and_back_through_speculators(target: Path, tmp_path: Path, method: str) -> None:
    from localspec.convert.speculators import export

    source = checkpoint(tmp_path / "c", config_for(target, method))
    file = convert(source, target, tmp_path / "d.gguf", "f32").path
    for given, name in ((file, "from_file"), (source, "from_checkpoint")):
        done = export(given, tmp_path / name, target)
        before, after = load_file(source / "model.safetensors"), load_file(done.path / "model.safetensors")
        assert before.keys() - {"t2d"} == after.keys() - {"t2d"}
        assert all(np.array_equal(before[n], after[n]) for n in before.keys() & after.keys())
        said = json.loads((done.path / "config.json").read_text())
        assert (said["block_size"], said["sample_from_anchor"]) == (8, method == "dspark")
        assert said["transformer_layer_config"]["model_type"] == "qwen3"
    back = convert(tmp_path / "from_file", target, tmp_path / "again.gguf", "f32").path
    assert back.read_bytes() == file.read_bytes()
