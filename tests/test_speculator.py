"""SpeculatorConfig: the same record from JSON and from GGUF, and one clear line where they are at odds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localspec.errors import ModelFileError, PairingError
from localspec.gguf_file import GGUFFile
from localspec.speculator import JSON_KEY, SpeculatorConfig, TargetIdentity
from tests import gguf_maker

TARGET = TargetIdentity("a target", "llama", 30, 64, 320, "ab" * 32)
CONFIG = SpeculatorConfig(
    method="eagle3", target=TARGET, taps=(2, 15, 27), n_embd=64, n_head=4, n_head_kv=2, head_dim=16, n_ff=96, rms_eps=1e-5,
    rope_base=100000.0, draft_vocab=100, depth=4, window=512, n_ctx_train=8192, extra={"block_size": 4},
    provenance={"data_tokens": 12345, "acceptance": {"gsm8k": 2.3}},
)  # fmt: skip


def write(path: Path, keys: dict[str, Any]) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "eagle3")
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("d2t", np.arange(100, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(path, "draft")


def test_json_gives_back_what_was_written(tmp_path: Path) -> None:
    assert SpeculatorConfig.from_json(CONFIG.to_json(), "x") == CONFIG
    (tmp_path / "localspec.json").write_text(CONFIG.to_json())
    assert SpeculatorConfig.load(tmp_path) == CONFIG


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"depths": 3}, "depths"), ({"n_embd": "64"}, "n_embd"), ({"taps": [1, "2"]}, "taps"), ({"window": True}, "window"),
        ({"n_layer": -1}, "n_layer of -1; 1 to 1024"), ({"n_layer": 10**30}, "n_layer"), ({"rms_eps": -1}, "rms_eps"),
        ({"rms_eps": 10**400}, "rms_eps"), ({"rope_base": 0}, "rope_base"), ({"rope_base": float("nan")}, "rope_base"),
        ({"window": -1}, "window"), ({"window": 10**30}, "window"), ({"n_ctx_train": 10**30}, "n_ctx_train"),
        ({"depth": 0}, "depth"), ({"depth": -1}, "depth"), ({"depth": 10**30}, "depth"), ({"taps": [-1]}, "taps"),
        ({"extra": {"block_size": 10**30}}, "block_size"), ({"extra": {"x": {}}}, "extra"),
        ({"method": None}, "method"), ({"norm_before_fc": 1}, "norm_before_fc"), ({"target": {"name": "x"}}, "architecture"),
        ({"provenance": []}, "provenance"),
    ],
)  # fmt: skip
def test_json_that_is_wrong_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFileError, match=says):
        SpeculatorConfig.from_json(json.dumps(json.loads(CONFIG.to_json()) | change), "here")


def test_json_that_is_none_or_lacks_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="JSON"):
        SpeculatorConfig.from_json("{", "here")
    data = json.loads(CONFIG.to_json())
    del data["n_ff"]
    with pytest.raises(ModelFileError, match=r"here lacks the key n_ff"):
        SpeculatorConfig.from_json(json.dumps(data), "here")
    with pytest.raises(ModelFileError, match="checkpoint"):
        SpeculatorConfig.load(tmp_path)


def test_gguf_gives_back_what_was_written(tmp_path: Path) -> None:
    file = write(tmp_path / "d.gguf", CONFIG.to_gguf_keys())
    assert SpeculatorConfig.from_gguf(file) == CONFIG
    assert file.architecture == "eagle3"
    assert file.arch("target_layers").tolist() == [2, 15, 27]
    assert file.arch("block_size") == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("eagle3.target_layers", [2, 15, 26]), ("eagle3.rope.freq_base", 10000.0), ("eagle3.embedding_length", 128),
     ("eagle3.norm_before_residual", True), ("eagle3.block_size", None)],
)  # fmt: skip
def test_gguf_keys_at_odds_with_the_json_are_told(tmp_path: Path, key: str, value: Any) -> None:
    keys: dict[str, Any] = CONFIG.to_gguf_keys() | {key: value}
    file = write(tmp_path / "d.gguf", {k: v for k, v in keys.items() if v is not None})
    with pytest.raises(ModelFileError, match=f"contradicts itself: {key}"):
        SpeculatorConfig.from_gguf(file)


def test_a_file_of_others_is_read_by_its_keys(tmp_path: Path) -> None:
    keys = {k: v for k, v in CONFIG.to_gguf_keys().items() if k != JSON_KEY}
    read = SpeculatorConfig.from_gguf(write(tmp_path / "d.gguf", keys))
    assert read.target == TargetIdentity("", "", 0, 64, 320, "")
    assert read.rms_eps == pytest.approx(1e-5)
    same = {"target": TARGET, "rms_eps": CONFIG.rms_eps, "depth": 4, "extra": CONFIG.extra, "provenance": CONFIG.provenance}
    assert dataclasses.replace(read, **same) == CONFIG  # type: ignore[arg-type]


def test_identity_names_the_first_difference(tmp_path: Path) -> None:
    one = TargetIdentity.of(GGUFFile.open(gguf_maker.tiny_llama(tmp_path / "t.gguf")))
    assert (one.architecture, one.n_layer, one.n_embd, one.n_vocab, len(one.tokenizer_hash)) == ("llama", 2, 64, 320, 64)
    one.require(dataclasses.replace(one, name="renamed", architecture="qwen2"), "the draft")
    changes = ({"n_layer": 3}, "has 3 layers, not 2"), ({"n_vocab": 321}, "tokens"), ({"tokenizer_hash": "00"}, "tokenizer")
    for change, says in changes:
        with pytest.raises(PairingError, match=says):
            one.require(dataclasses.replace(one, **change), "the draft")  # type: ignore[arg-type]
