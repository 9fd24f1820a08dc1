"""Checkpoints to GGUF: what is written, what is refused, and that the parity gate finds what can go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from localspec import eagle3_net
from localspec.convert import eagle3 as converter
from localspec.convert import parity
from localspec.convert.draft import convert
from localspec.convert.output import dequantised, partial
from localspec.draft_net import target_ids
from localspec.errors import LocalspecError, ModelFileError, PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.llama_arch import FILE_TYPES
from localspec.pairing import check_pair, drafter_for
from localspec.speculator import SpeculatorConfig, TargetIdentity
from tests.conftest import Cli
from tests.gguf_maker import tiny_llama
from tests.head_reference import HeadReference

pytest.importorskip("torch")
P = "layers.0."


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PROMPTS", parity.PROMPTS[:3])
    monkeypatch.setattr(parity, "N_WRITTEN", 30)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("convert") / "target.gguf", n_layer=4, vocab=512, n_embd=128)


def config_for(target: Path, **changes: Any) -> SpeculatorConfig:
    config = SpeculatorConfig(
        method="eagle3", target=TargetIdentity.of(GGUFFile.open(target)), taps=(1, 2, 3), n_embd=128, n_head=4, n_head_kv=2,
        head_dim=32, n_ff=256, rope_base=10000.0, draft_vocab=200, depth=3, n_ctx_train=512,
        provenance={"data_tokens": 1234, "steps": 7, "localspec": "0.0"},
    )  # fmt: skip
    return replace(config, **changes)


def weights_for(config: SpeculatorConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under the names of `speculators`."""
    rng, out = np.random.default_rng(seed), {}
    back = {v: k for k, v in converter._LAYER.items()}
    for name, shape in converter.shapes_of(config).items():
        if name.startswith("blk.0."):
            new = P + back[name.removeprefix("blk.0.")]
        else:
            new = {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight",
                   "enc.output_norm.weight": "input_norm.weight"}[name]  # fmt: skip
        if new == "input_norm.weight" and not config.norm_before_fc:
            continue
        if len(shape) == 1:
            out[new] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            out[new] = (rng.standard_normal(shape) * (1.5 if "_proj" in new else 1) * shape[1] ** -0.5).astype(np.float32)
    if config.draft_vocab:
        ids = np.sort(rng.choice(config.target.n_vocab, config.draft_vocab, replace=False))
        out["d2t"] = ids - np.arange(len(ids))
        out["t2d"] = np.isin(np.arange(config.target.n_vocab), ids)
    return out


def checkpoint(folder: Path, config: SpeculatorConfig, weights: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights if weights is not None else weights_for(config), folder / "model.safetensors")
    (folder / "localspec.json").write_text(config.to_json())
    return folder


@pytest.fixture
def trained(target: Path, tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "ckpt", config_for(target))


# -- what is written -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0", "q4_0", "q4_k_m"])
def test_the_file_is_the_draft(trained: Path, target: Path, tmp_path: Path, quant: str) -> None:
    done = convert(trained, target, tmp_path / "d.gguf", quant)
    file, theirs = GGUFFile.open(done.path, "draft"), GGUFFile.open(target)
    check_pair(theirs, file)
    assert drafter_for(file) == "eagle3"
    assert SpeculatorConfig.from_gguf(file) == config_for(target)  # JSON and keys agree, or this raises
    assert file.get("localspec.target.tokenizer_hash", str) == theirs.tokenizer_hash() == file.tokenizer_hash()
    assert file.get("localspec.data_tokens", int) == 1234
    assert file.get("localspec.trainer", str) == "localspec 0.0"
    assert FILE_TYPES[file.file_type or 0].lower() == quant
    kinds = {n: t.type for n, t in file.tensors.items()}
    assert kinds["d2t"] == "I64"
    assert {kinds[n] for n in kinds if n.endswith("norm.weight") or "attn_norm" in n} == {"F32"}
    if quant != "q4_k_m":
        assert kinds.pop("fc.weight") == (quant if quant != "q4_0" else "q8_0").upper()
        assert {t for n, t in kinds.items() if len(file.tensors[n].shape) == 2} == {quant.upper()}
    else:  # rows of 128 can't be cut into blocks of 256: llama.cpp falls back
        assert kinds["blk.0.ffn_down.weight"] in ("Q4_K", "Q6_K")
        assert kinds["blk.0.ffn_gate.weight"] in ("Q5_0", "Q5_1")
    assert done.size == done.path.stat().st_size
    assert parity.check(trained, done.path, target).n_chains > 60


def test_values_ids_and_rows(trained: Path, target: Path, tmp_path: Path) -> None:
    weights = weights_for(config_for(target))
    file = GGUFFile.open(convert(trained, target, tmp_path / "d.gguf", "f32").path)
    assert (dequantised(file, "blk.0.ffn_down.weight") == weights[P + "mlp.down_proj.weight"]).all()
    ids = np.frombuffer(file.tensor_bytes("d2t"), "<i8")
    assert ids.tolist() == np.flatnonzero(weights["t2d"]).tolist()
    # head 1, rows i and 16 + i of the checkpoint become neighbours
    q, theirs = dequantised(file, "blk.0.attn_q.weight"), weights[P + "self_attn.q_proj.weight"]
    for i in range(16):
        assert (q[32 + 2 * i] == theirs[32 + i]).all()
        assert (q[32 + 2 * i + 1] == theirs[32 + 16 + i]).all()


@pytest.mark.parametrize(
    "changes", [{"draft_vocab": 0}, {"window": 6}, {"norm_before_residual": True}, {"norm_before_fc": True}], ids=str
)
def test_kinds_of_drafts(target: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = config_for(target, **changes)
    source = checkpoint(tmp_path / "ckpt", config)
    found = parity.check(source, convert(source, target, tmp_path / "d.gguf", "f32").path, target)
    assert found.error < 1e-3
    assert found.simulated == found.real


def test_the_targets_embedding_is_left_out_anothers_kept(target: Path, tmp_path: Path) -> None:
    config = config_for(target)
    embedding = dequantised(GGUFFile.open(target), "token_embd.weight")
    weights = weights_for(config)
    same = checkpoint(tmp_path / "same", config, weights | {"embed_tokens.weight": embedding})
    assert "token_embd.weight" not in GGUFFile.open(convert(same, target, tmp_path / "same.gguf", "q8_0").path).tensors
    other = checkpoint(tmp_path / "other", config, weights | {"embed_tokens.weight": embedding[::-1].copy()})
    done = convert(other, target, tmp_path / "other.gguf", "q8_0")
    assert done.own_embedding
    assert "token_embd.weight" in GGUFFile.open(done.path).tensors
    assert parity.check(other, done.path, target).error < 0.05


def to_bf16(value: np.ndarray) -> np.ndarray:
    return (value.view(np.uint32) >> 16).astype(np.uint16)


def save_bf16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """safetensors by hand: numpy has no bf16."""
    header, data = {}, b""
    for name, value in tensors.items():
        kind = {"f": "BF16", "i": "I64"}[value.dtype.kind]
        raw = to_bf16(value).tobytes() if kind == "BF16" else value.tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_of_another_trainer(target: Path, tmp_path: Path, nested: bool) -> None:
    """EAGLE's own names and a flat config.json, or speculators' nested one; bf16; norm_before_residual must not get lost."""
    config = config_for(target, norm_before_residual=True)
    weights = {k: v for k, v in weights_for(config).items() if k != "t2d"}
    if not nested:
        weights = {k.replace("layers.0.", "midlayer."): v for k, v in weights.items()}
    folder = tmp_path / "foreign"
    folder.mkdir()
    save_bf16(folder / "model.safetensors", weights)
    layer = {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    }  # fmt: skip
    outer = {"draft_vocab_size": 200, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    whole = outer | ({"transformer_layer_config": layer} if nested else layer)
    (folder / "config.json").write_text(json.dumps(whole))
    file = GGUFFile.open(convert(folder, target, tmp_path / "d.gguf", "f16").path)
    found = SpeculatorConfig.from_gguf(file)
    assert (found.norm_before_residual, found.taps, found.draft_vocab) == (True, (1, 2, 3), 200)
    assert parity.check(folder, file.path, target).error < 0.01
    for key, says in (("norm_output", "feeds normalised states back"), ("fc_norm", "normalises each tap by itself")):
        (folder / "config.json").write_text(json.dumps(whole | {key: True}))
        with pytest.raises(ModelFileError, match=says):
            convert(folder, target, tmp_path / "refused.gguf", "f16")


# -- the gate -------------------------------------------------------------------------------------------------------------


def unpermuted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(converter, "pairs_from_halves", lambda weight, _heads: weight)


def swapped(patch: pytest.MonkeyPatch) -> None:
    layer = dict(converter._LAYER)
    layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"] = layer["mlp.up_proj.weight"], layer["mlp.gate_proj.weight"]
    patch.setattr(converter, "_LAYER", layer)


def lost_flag(patch: pytest.MonkeyPatch) -> None:
    keys = SpeculatorConfig.to_gguf_keys
    patch.setattr(SpeculatorConfig, "to_gguf_keys", lambda self: keys(replace(self, norm_before_residual=False)))


def offsets_as_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(converter, "_absolute", lambda source, _config: source.integers("d2t"))


@pytest.mark.parametrize("mistake", [unpermuted, swapped, lost_flag])
def test_the_gate_finds_mistakes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    source = checkpoint(tmp_path / "ckpt", config_for(target, norm_before_residual=True))
    right = convert(source, target, tmp_path / "right.gguf", "q8_0")
    parity.check(source, right.path, target)
    with monkeypatch.context() as patch:
        mistake(patch)
        wrong = convert(source, target, tmp_path / "wrong.gguf", "q8_0")
    with pytest.raises(ModelFileError, match=r"would not be the draft in .*its logits differ by"):
        parity.check(source, wrong.path, target)


def test_a_gate_that_fails_leaves_the_old_file(target: Path, tmp_path: Path) -> None:
    def gate(written: Path) -> None:
        assert GGUFFile.open(written, "draft").architecture == "eagle3"
        raise ModelFileError("no good")

    old = tmp_path / "d.gguf"
    old.write_bytes(b"what was there")
    source = checkpoint(tmp_path / "ckpt", config_for(target))
    with pytest.raises(ModelFileError, match="no good"):
        convert(source, target, old, "q8_0", overwrite=True, gate=gate)
    assert old.read_bytes() == b"what was there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", old.name]


def agreeing(target: Path, tmp_path: Path) -> Path:
    """A draft that is right now and then: its tensors say nothing but the embedding of the last token, and its head is one
    that turns it into the target's likeliest next token, where the target's text repeats itself."""
    config = config_for(target, draft_vocab=0)
    texts = parity.written_here(target, config.taps)
    embedding = dequantised(GGUFFile.open(target), "token_embd.weight")
    weights = weights_for(config)
    head = np.zeros_like(weights["lm_head.weight"])
    for text in texts:
        for a, b in zip(text.tokens[:-1].tolist(), text.tokens[1:].tolist()):
            head[b] += embedding[a] / np.linalg.norm(embedding[a])
    weights["lm_head.weight"] = head
    # v and o hand the embedding through, for attention to the pair itself only (window 1)
    e = config.n_embd
    grouped = np.zeros((64, 2 * e), np.float32)
    grouped[:, :64] = np.eye(64)
    weights[P + "self_attn.v_proj.weight"] = grouped
    o = np.zeros((e, 128), np.float32)
    o[:32, :32], o[32:64, 64:96] = np.eye(32), np.eye(32)
    weights[P + "self_attn.o_proj.weight"] = 100 * o
    weights["fc.weight"] *= 1e-3
    for name in ("mlp.down_proj.weight",):
        weights[P + name] *= 0
    for name in (P + "input_layernorm.weight", "norm.weight"):
        weights[name] = np.ones(e, np.float32)
    head[:, 64:] = 0
    return checkpoint(tmp_path / "agreeing", replace(config, window=1, depth=1), weights)


def test_the_gate_finds_a_lost_vocabulary(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits over the draft's vocabulary are the same then; acceptance is not."""
    source = agreeing(target, tmp_path)
    right = convert(source, target, tmp_path / "right.gguf", "f16")
    found = parity.check(source, right.path, target)
    assert found.real > 0.2
    monkeypatch.setattr(eagle3_net, "target_ids", lambda draft, n_tokens: np.roll(target_ids(draft, n_tokens), 1))
    with pytest.raises(ModelFileError, match="would draft otherwise than"):
        parity.check(source, right.path, target)


# -- what is refused -------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda weights: {k: v for k, v in weights.items() if k != name}


def with_(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda weights: weights | {name: value(weights.get(name, np.zeros(3, np.float32)))}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("fc.weight"), "lacks the tensor fc.weight"),
        (without("lm_head.weight"), "lacks the tensor lm_head.weight"),
        (without("d2t"), "lacks the tensor d2t"),
        (with_("fc.weight", lambda w: w * np.float32(np.nan)), "not finite in fc.weight"),
        (with_("fc.weight", lambda w: w[:, 1:].copy()), r"fc.weight of the shape \[128, 383\]; its config asks for"),
        (with_("d2t", lambda d: d + 400), "does not give 200 rising ids below 512"),
        (with_("d2t", lambda d: d[:50].copy()), r"d2t of the shape \[50\]"),
        (with_("d2t", lambda d: d.astype(np.float32)), "whole numbers are expected"),
        (with_("layers.1.mlp.up_proj.weight", lambda w: w), "has the tensor layers.1.mlp.up_proj.weight, which"),
        (with_("embed_tokens.weight", lambda w: w), "embed_tokens.weight of the shape"),
    ],
)
def test_broken_checkpoints(
    target: Path, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], says: str
) -> None:
    config = config_for(target)
    source = checkpoint(tmp_path / "ckpt", config, change(weights_for(config)))
    with pytest.raises(ModelFileError, match=says):
        convert(source, target, tmp_path / "d.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


def test_other_refusals(trained: Path, target: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other.gguf", n_layer=4, vocab=400, n_embd=128)
    with pytest.raises(PairingError, match="400 tokens, not 512"):
        convert(trained, other, tmp_path / "d.gguf")
    with pytest.raises(UsageError, match="--quant q3: unknown for a draft"):
        convert(trained, target, tmp_path / "d.gguf", "q3")
    (tmp_path / "there.gguf").touch()
    kept = {path: path.read_bytes() for path in (target, trained / "model.safetensors")}
    for path in kept:
        with pytest.raises(UsageError, match="is read for this"):
            convert(trained, target, path, overwrite=True)
    assert kept == {path: path.read_bytes() for path in kept}
    with pytest.raises(UsageError, match="exists"):
        convert(trained, target, tmp_path / "there.gguf")
    with pytest.raises(ModelFileError, match="there is one in"):
        convert(trained.parent, target, tmp_path / "d.gguf")
    with pytest.raises(LocalspecError, match="no such directory"):
        convert(trained, target, tmp_path / "no" / "d.gguf")
    (trained / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelFileError, match="can't be read"):
        convert(trained, target, tmp_path / "d.gguf")


def test_a_target_with_other_layers_is_refused_by_the_pair(trained: Path, target: Path, tmp_path: Path) -> None:
    """Its vocabulary, hidden size and taps would do, but it is another model."""
    draft = GGUFFile.open(convert(trained, target, tmp_path / "d.gguf").path, "draft")
    check_pair(GGUFFile.open(target), draft)
    mine = GGUFFile.open(target)
    other = tiny_llama(tmp_path / "deep.gguf", n_layer=mine.n_layer + 1, vocab=mine.vocab_size, n_embd=mine.n_embd)
    with pytest.raises(PairingError, match=f"of {mine.n_layer} layers, the target has {mine.n_layer + 1}"):
        check_pair(GGUFFile.open(other), draft)


def test_a_write_that_fails_without_a_reason_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LocalspecError, match=r"d\.gguf: writing failed: is the disk full"), partial(tmp_path / "d.gguf"):
        raise OSError("8704 requested and 0 written")


def test_the_command(cli: Cli, trained: Path, target: Path, tmp_path: Path) -> None:
    """Converted, held against PyTorch, and run: the same text as without."""
    draft = tmp_path / "d.gguf"
    done = cli("convert", trained, "-o", draft, "--quant", "q4_0", "--target", target)
    assert done.rc == 0, done.stderr
    assert "EAGLE-3 draft for" in done.stderr
    assert "parity: logits differ by" in done.stderr
    common = ("run", "--target", target, "--temp", "0", "-n", "20", "--raw", "-p", "the cat sat", "--no-spec-adapt")
    plain = cli(*common, "--spec-type", "none")
    drafted = cli(*common, "--draft", draft)
    assert drafted.rc == plain.rc == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    assert "tokens per verify" in drafted.stderr
    shown = cli("inspect", target, draft)
    assert "reads          its states after 1, 2, 3 layers" in shown.stdout
    assert "can say        200 of 512 tokens" in shown.stdout
    assert "--spec-type draft-eagle3" in shown.stdout
    refused = cli("convert", trained, "-o", tmp_path / "e.gguf")
    assert refused.rc == 2
    assert "give that model as --target" in refused.stderr
    before = draft.read_bytes()
    refused = cli("convert", trained, "-o", draft, "--target", target, "--data", tmp_path / "nowhere", "--force")
    assert (refused.rc, "no training data there" in refused.stderr) == (2, True)
    assert draft.read_bytes() == before  # what it compares on is looked at first
    # a run knows its target, and its best checkpoint
    run = tmp_path / "run"
    run.mkdir()
    trained.rename(run / "best")
    (run / "run.json").write_text(json.dumps({"target_file": str(target), "data": str(tmp_path / "gone")}))
    done = cli("convert", run, "-o", tmp_path / "e.gguf", "--no-parity")
    assert done.rc == 0, done.stderr
    assert (tmp_path / "e.gguf").is_file()


def test_numpys_reading_of_the_file_is_torchs_of_the_checkpoint(trained: Path, target: Path, tmp_path: Path) -> None:
    """A third reading, that of tests/head_reference.py: the two references meet."""
    from localspec.convert.checkpoint import Checkpoint
    from localspec.convert.eagle3_torch import TorchDraft

    done = convert(trained, target, tmp_path / "d.gguf", "f32")
    rng = np.random.default_rng(0)
    tokens, taps = rng.integers(0, 512, 30).astype(np.int32), rng.standard_normal((30, 3 * 128)).astype(np.float32)
    starts = np.array([5, 20, 28])
    text = parity.Text(tokens, taps, np.ones(30, bool))
    theirs, _ = TorchDraft(Checkpoint.open(trained), done.config, GGUFFile.open(target)).roll_out(text, starts + 1, 1)
    reference = HeadReference(done.path, target)
    for row, start in zip(theirs, starts.tolist()):
        logits = reference.chain(tokens[: start + 2].tolist(), taps[: start + 1], 1)[0]
        assert np.allclose(row, logits, atol=2e-4)
