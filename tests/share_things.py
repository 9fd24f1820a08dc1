"""Things to share, for tests of push and pull: a tiny target, drafts for it, a checkpoint, shards, and what makes
huggingface-hub talk with the fake hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec.gguf_file import GGUFFile
from localspec.speculator import CHECKPOINT_FILE, SpeculatorConfig, TargetIdentity
from tests import gguf_maker, train_data
from tests.fake_hub import FakeHub

EVALUATION = {
    "n_max": 3,
    "tokens_per_verify": 2.25,
    "acceptance": [0.6, 0.55, 0.5],
    "by_source": {
        "gsm8k": {"tokens_per_verify": 2.5, "acceptance": [0.7, 0.6, 0.5]},
        "chat|<b>": {"tokens_per_verify": 1.5},
    },
}


def target(folder: Path, name: str = "target.gguf", **shape: Any) -> Path:
    """A tiny llama."""
    return gguf_maker.tiny_llama(folder / name, **shape)


def config_for(path: Path, like: Path, per_verify: float = 2.25) -> SpeculatorConfig:
    """What localspec would say of the head at `path`, trained for `like`."""
    provenance = {
        "localspec": "0.1.0", "data_tokens": 123456, "steps": 20, "optimizer": "muon",
        "evaluation": EVALUATION | {"tokens_per_verify": per_verify},
    }  # fmt: skip
    shape = SpeculatorConfig.from_gguf(GGUFFile.open(path, "draft"))
    return replace(shape, target=TargetIdentity.of(GGUFFile.open(like)), provenance=provenance)


def draft(path: Path, like: Path, seed: int = 0, per_verify: float = 2.25) -> Path:
    """A random EAGLE-3 head for `like` that says whom it is for and how good it is."""
    bare = gguf_maker.eagle3_stub(path.with_suffix(".bare"), like, seed=seed)
    made = gguf_maker.edit(bare, path, put=config_for(bare, like, per_verify).to_gguf_keys())
    bare.unlink()
    return made


def checkpoint(folder: Path, like: Path) -> Path:
    """A directory with a checkpoint's files, for `like`; the weights are nonsense."""
    folder.mkdir(parents=True)
    stub = gguf_maker.eagle3_stub(folder / "stub.gguf", like)
    (folder / CHECKPOINT_FILE).write_text(config_for(stub, like).to_json())
    stub.unlink()
    (folder / "config.json").write_text("{}\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "trainer.pt").write_bytes(b"not for others")
    return folder


def shards(folder: Path, like: Path, n_samples: int = 60) -> Path:
    """Shards of training data for `like`."""
    return train_data.shards(folder, like, n_samples)


def hub_env(hub: FakeHub, **more: str) -> dict[str, str]:
    """The settings with which huggingface-hub talks to the fake one. Without hf-xet: version 1.33 gives every upload to that
    extension where it is installed, asks nobody first, and the fake has no store for it."""
    return {
        "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": hub.token, **more,
    }  # fmt: skip
