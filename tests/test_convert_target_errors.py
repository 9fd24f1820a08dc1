"""Directories and repositories that are to become GGUF: what is taken, and what is refused with one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localspec.convert.target import convert_target, is_target
from localspec.convert.targets.config import Config
from localspec.convert.targets.tokenizer import tokenizer_keys
from localspec.errors import LocalspecError, ModelFileError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.hub import snapshot
from tests import fake_hub, hf_maker
from tests.conftest import Cli
from tests.fake_hub import FakeHub, Repo


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_maker.made("llama", tmp_path_factory.mktemp("made") / "tiny")[1]


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A directory to spoil."""
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; None removes them."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def tensors_of(path: Path) -> dict[str, bytes]:
    gguf = GGUFFile.open(path)
    return {name: bytes(gguf.tensor_bytes(name)) for name in gguf.tensors}


# --- what is taken ---------------------------------------------------------------------------------------------------


def test_shards_are_read_as_one(made: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    hf_maker.llama().save_pretrained(shards, max_shard_size="150KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made / name, shards)
    assert len(list(shards.glob("*.safetensors"))) > 2
    convert_target(made, tmp_path / "one.gguf", "F16")
    convert_target(shards, tmp_path / "many.gguf", "F16")
    assert tensors_of(tmp_path / "many.gguf") == tensors_of(tmp_path / "one.gguf")
    first = sorted(shards.glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(ModelFileError, match=f"lacks {first.name} .*finish the download"):
        convert_target(shards, tmp_path / "less.gguf", "F16")
    assert not (tmp_path / "less.gguf").exists()


def test_bfloat16_stays_bit_by_bit(tmp_path: Path) -> None:
    model = hf_maker.llama().bfloat16()
    source = hf_maker.save(model, tmp_path / "hf", hf_maker.byte_level())
    convert_target(source, tmp_path / "bf16.gguf", "BF16")
    convert_target(source, tmp_path / "f32.gguf", "F32")
    stored, whole = GGUFFile.open(tmp_path / "bf16.gguf"), GGUFFile.open(tmp_path / "f32.gguf")
    assert stored.tensors["blk.0.ffn_up.weight"].type == "BF16"
    assert stored.tensors["blk.0.attn_norm.weight"].type == "F32"
    for name, info in stored.tensors.items():
        bits = np.frombuffer(stored.tensor_bytes(name), "<u2" if info.type == "BF16" else "<u4").astype(np.uint32)
        values = (bits << 16 if info.type == "BF16" else bits).view(np.float32)
        assert np.array_equal(values, np.frombuffer(whole.tensor_bytes(name), np.float32)), name
    wanted = model.model.layers[0].mlp.up_proj.weight.float().detach().numpy()
    assert np.array_equal(np.frombuffer(whole.tensor_bytes("blk.0.ffn_up.weight"), np.float32), wanted.reshape(-1))


def test_f32_is_rounded_to_the_nearest_bfloat16(made: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    convert_target(made, tmp_path / "out.gguf", "bf16")
    bits = np.frombuffer(GGUFFile.open(tmp_path / "out.gguf").tensor_bytes("output.weight"), "<u2")
    wanted = torch.from_numpy(load_file(made / "model.safetensors")["lm_head.weight"]).bfloat16().view(torch.int16)
    assert np.array_equal(bits, wanted.numpy().view(np.uint16).reshape(-1))


def test_a_model_that_sees_gives_its_text_part(tmp_path: Path) -> None:
    _, plain = hf_maker.made("gemma3", tmp_path / "plain")
    whole = Path(shutil.copytree(plain, tmp_path / "whole"))
    inner = json.loads((plain / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner, "vision_config": {"hidden_size": 3}}
    (whole / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{name}": values for name, values in tensors.items()}
    renamed["vision_tower.vision_model.post_layernorm.weight"] = np.ones(3, np.float32)
    renamed["multi_modal_projector.mm_input_projection_weight"] = np.ones((3, 3), np.float32)
    save_file(renamed, whole / "model.safetensors")
    convert_target(plain, tmp_path / "plain.gguf", "F16", name="same")
    convert_target(whole, tmp_path / "whole.gguf", "F16", name="same")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


def test_keys_and_values_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    _, source = hf_maker.made("gemma4-shared", tmp_path / "hf")
    convert_target(source, tmp_path / "without.gguf", "F16")
    unread = {"self_attn.k_proj.weight": (32, 64), "self_attn.v_proj.weight": (32, 64), "self_attn.k_norm.weight": (16,)}
    _weights(source, lambda t: t.update({f"model.layers.4.{n}": np.ones(s, np.float32) for n, s in unread.items()}))
    convert_target(source, tmp_path / "with.gguf", "F16")
    assert tensors_of(tmp_path / "with.gguf") == tensors_of(tmp_path / "without.gguf")


def test_settings_that_old_configurations_write_otherwise(source: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    edit(source / "config.json", rope_parameters=rope)
    convert_target(source, tmp_path / "new.gguf", "F16")
    edit(source / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    convert_target(source, tmp_path / "old.gguf", "F16")
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes()


def test_the_chat_template_comes_along(source: Path, tmp_path: Path) -> None:
    convert_target(source, tmp_path / "none.gguf", "F16")
    assert GGUFFile.open(tmp_path / "none.gguf").chat_template is None
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    edit(source / "tokenizer_config.json", chat_template=several)
    convert_target(source, tmp_path / "named.gguf", "F16")
    assert GGUFFile.open(tmp_path / "named.gguf").chat_template == "yes"
    (source / "chat_template.jinja").write_text("{{ messages }}")
    convert_target(source, tmp_path / "file.gguf", "F16")
    assert GGUFFile.open(tmp_path / "file.gguf").chat_template == "{{ messages }}"


def test_a_real_tokenizer_comes_out_as_it_went_into_its_gguf(smollm2: Path, tmp_path: Path) -> None:
    gguf = GGUFFile.open(smollm2)
    known = gguf.tokenizer
    tokens = [token.decode() for token in known.tokens]
    assert known.token_types is not None
    added = [i for i, kind in enumerate(known.token_types) if kind == 3]
    merges = [bytes(merge).decode() for merge in gguf.metadata["tokenizer.ggml.merges"]]  # type: ignore[union-attr]
    steps = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}]
    main = {
        "added_tokens": [{"id": i, "content": tokens[i], "special": True} for i in added],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(main))
    named = {"bos_token": tokens[1], "eos_token": {"content": tokens[2]}, "unk_token": tokens[0], "pad_token": tokens[2]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    keys = tokenizer_keys(tmp_path, Config(tmp_path, {}), len(tokens))
    assert keys["tokenizer.ggml.pre"] == known.pre
    assert keys["tokenizer.ggml.tokens"].value == tokens
    assert keys["tokenizer.ggml.merges"].value == merges
    assert keys["tokenizer.ggml.token_type"].value == list(known.token_types)
    assert keys["tokenizer.ggml.add_bos_token"] is False
    for name in ("bos", "eos", "unknown", "padding"):
        assert keys[f"tokenizer.ggml.{name}_token_id"] == gguf.metadata[f"tokenizer.ggml.{name}_token_id"]


def test_quantised_by_llama_cpp(made: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("convert", made, "-o", "out.gguf", "--quant", "q8_0")
    assert done.rc == 0, done.stderr
    assert "out.gguf: llama, Q8_0" in done.stderr
    assert "run it: localspec run --target out.gguf" in done.stderr
    gguf = GGUFFile.open(tmp_path / "out.gguf")
    assert gguf.tensors["blk.0.ffn_up.weight"].type == "Q8_0"
    assert gguf.name == "tiny"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    again = cli("convert", made, "-o", "out.gguf")
    assert again.rc == 2
    assert again.stderr.strip() == "localspec: error: out.gguf exists: name another file or give --force"
    said = cli("run", "--target", "out.gguf", "-n", "4", "-p", "the cat", "--no-chat")
    assert "Traceback" not in said.stderr


# --- what is refused -------------------------------------------------------------------------------------------------


def _weights(source: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def _tokenizer(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((source / "tokenizer.json").read_text())
    change(values)
    (source / "tokenizer.json").write_text(json.dumps(values))


def _pickle(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def _cut(source: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-100])


def _not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"][3] = np.nan


def _too_large(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"][0, 0] = 1e6


Spoil = Callable[[Path], object]
BAD: list[tuple[Spoil, str]] = [
    (_pickle, "pytorch_model.bin is a pickle, which can run code .*save the model as safetensors"),
    (_cut, "model.safetensors is cut off within"),
    (lambda s: (s / "model.safetensors").write_bytes(b"\x11" + bytes(7) + b'{"a":{"dtype":1}}'), "damaged"),
    (lambda s: (s / "model.safetensors").write_bytes(b"GGUF"), "is no safetensors file"),
    (lambda s: (s / "model.safetensors").unlink(), "has no model.safetensors"),
    (lambda s: (s / "config.json").write_text("["), "config.json can't be read"),
    (lambda s: edit(s / "config.json", architectures=["MambaForCausalLM"]), "MambaForCausalLM.*convert_hf_to_gguf.py"),
    (lambda s: edit(s / "config.json", architectures=None), "unknown.*convert_hf_to_gguf.py"),
    (lambda s: edit(s / "config.json", hidden_size="64"), "has no usable hidden_size"),
    (lambda s: edit(s / "config.json", hidden_act="relu"), "has hidden_act 'relu'.*convert_hf_to_gguf.py"),
    (lambda s: edit(s / "config.json", quantization_config={"quant_method": "gptq"}), "quantised already .gptq."),
    (lambda s: edit(s / "config.json", rope_scaling={"rope_type": "longrope"}, rope_parameters=None), "rope by 'longrope'"),
    (lambda s: edit(s / "config.json", num_hidden_layers=4), "lacks the tensor model.layers.3.self_attn.q_proj.weight"),
    (lambda s: edit(s / "config.json", num_hidden_layers=2), r"model.layers.2.* and 8 more tensors"),
    (lambda s: edit(s / "config.json", intermediate_size=100), r"of the shape \[96, 64\], where .* asks for \[100, 64\]"),
    (lambda s: (s / "adapter_config.json").write_text("{}"), "adapter"),
    (lambda s: _weights(s, lambda t: t.update(extra=np.ones(2, np.float32))), "has extra, which is no part of llama"),
    (lambda s: _weights(s, lambda t: t.update({"lm_head.weight": np.ones((512, 64), np.int8)})), "of the type I8"),
    (lambda s: _weights(s, lambda t: t.pop("lm_head.weight")), "has no lm_head.weight, and its embeddings are not tied"),
    (lambda s: _weights(s, _not_finite), "not finite in model.norm.weight"),
    (lambda s: _weights(s, _too_large), "too large for F16 in lm_head.weight; give --quant BF16"),
    (lambda s: (s / "tokenizer.json").unlink(), "lacks tokenizer.json and tokenizer.model"),
    (lambda s: _tokenizer(s, lambda t: t["model"].update(type="WordPiece")), "type 'WordPiece'.*convert_hf_to_gguf.py"),
    (
        lambda s: _tokenizer(s, lambda t: t.update(pre_tokenizer={"type": "Whitespace"})),
        "pre_tokenizer.*convert_hf",
    ),
    (lambda s: _tokenizer(s, lambda t: t.update(normalizer={"type": "Lowercase"})), "normalises text"),
    (lambda s: _tokenizer(s, lambda t: t["model"].update(merges=[["a"]])), "a merge that is no pair"),
    (lambda s: _tokenizer(s, lambda t: t["model"]["vocab"].update(toomany=600)), "the token 600 for 512 rows"),
    (lambda s: _tokenizer(s, lambda t: t["added_tokens"].append({"id": 500, "content": "the"[:1]})), "token 't' twice"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_refused_with_one_line(spoil: Spoil, message: str, source: Path, tmp_path: Path) -> None:
    spoil(source)
    with pytest.raises(LocalspecError, match=message) as caught:
        convert_target(source, tmp_path / "out.gguf", "F16")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


@pytest.mark.parametrize(("family", "setting"), [
    ("qwen2", {"use_sliding_window": True}),
    ("qwen3", {"attention_bias": True}),
    ("gemma3", {"query_pre_attn_scalar": 100}),
    ("gemma3", {"attn_logit_softcapping": 50.0}),
    ("gemma3", {"use_bidirectional_attention": True}),
    ("gemma4", {"vocab_size_per_layer_input": 100}),
    ("gemma4", {"num_kv_shared_layers": 2}),
])  # fmt: skip
def test_what_llama_cpps_graph_can_not_compute(family: str, setting: dict[str, Any], tmp_path: Path) -> None:
    _, source = hf_maker.made(family, tmp_path / "hf")
    edit(source / "config.json", **setting)
    with pytest.raises(ModelFileError, match=r"convert_hf_to_gguf.py"):
        convert_target(source, tmp_path / "out.gguf", "F16")


def test_an_unknown_type_and_an_output_that_is_read(made: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--quant Q9"):
        convert_target(made, tmp_path / "out.gguf", "Q9")
    with pytest.raises(UsageError, match="is read for this"):
        convert_target(source, source / "model.safetensors", "F16", overwrite=True)


def test_a_drafts_checkpoint_is_no_target(source: Path, tmp_path: Path) -> None:
    assert is_target(source)
    assert not is_target(tmp_path)
    for change in ({"draft_vocab_size": 32}, {"speculators_config": {}}, {"architectures": ["LlamaForCausalLMEagle3"]}):
        copy = Path(shutil.copytree(source, tmp_path / f"draft-{next(iter(change))}"))
        edit(copy / "config.json", **change)
        assert not is_target(copy), change
    named_as_its_target = Path(shutil.copytree(source, tmp_path / "named"))
    _weights(named_as_its_target, lambda tensors: tensors.update({"fc.weight": np.ones((64, 192), np.float32)}))
    assert not is_target(named_as_its_target)
    (source / "localspec.json").write_text("{}")
    assert not is_target(source)


def test_options_of_other_sources(made: Path, cli: Cli) -> None:
    done = cli("convert", made, "-o", "out.gguf", "--as-llama")
    assert done.rc == 2
    assert done.stderr.strip().endswith("is a target: --as-llama, --target and --data are for other sources")


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub.running() as server:
        yield server


def online(hub: FakeHub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}


def test_a_repository_of_the_hub(made: Path, hub: FakeHub, cli: Cli, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    beside = {"README.md": b"x", "original/model.safetensors": b"x", "consolidated.safetensors": b"x", "model.bin": b"x"}
    hub.repos["user/small"] = Repo(files | beside)
    done = cli("convert", "hf://user/small", "-o", "out.gguf", "--quant", "f16", env=online(hub))
    assert done.rc == 0, done.stderr
    convert_target(made, tmp_path / "local.gguf", "F16", name="small")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert not any(name.split("/")[-1] in request for name in beside if name != "original/model.safetensors"
                   for request in hub.requests)  # fmt: skip
    offline = cli("convert", "hf://user/small", "-o", "again.gguf", "--quant", "f16", env={"HF_ENDPOINT": hub.url})
    assert offline.rc == 0, offline.stderr


def test_a_repository_of_another_family_is_not_downloaded(made: Path, hub: FakeHub, cli: Cli) -> None:
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    files["config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    hub.repos["user/mamba"] = Repo(files)
    done = cli("convert", "hf://user/mamba", "-o", "out.gguf", env=online(hub))
    assert done.rc == 2
    assert "MambaForCausalLM" in done.stderr
    assert "convert_hf_to_gguf.py" in done.stderr
    assert not any("model.safetensors" in request for request in hub.requests)


@pytest.mark.parametrize(("files", "message"), [
    ({"a.gguf": b"x"}, "has no weights in safetensors; it holds GGUF files, which need no conversion: -hf user/x"),
    ({"model.safetensors": b"x"}, "has no config.json"),
])  # fmt: skip
def test_repositories_without_a_model(files: dict[str, bytes], message: str, hub: FakeHub, cli: Cli) -> None:
    hub.repos["user/x"] = Repo(files)
    done = cli("convert", "hf://user/x", "-o", "out.gguf", env=online(hub))
    assert done.rc == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_names_that_are_none(cli: Cli) -> None:
    with pytest.raises(LocalspecError, match="expected hf://USER/REPO"):
        snapshot("no", lambda folder: None)
    done = cli("convert", "hf://user/absent", "-o", "out.gguf")
    assert done.rc == 2
    assert "user/absent is not in the cache" in done.stderr
