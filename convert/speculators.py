"""A draft as a checkpoint of vLLM's `speculators` package: out of a GGUF file, or out of any checkpoint that is read here.

Values are f32, dequantised where the file is quantised; what the kinds do differently stands in their own files
(methods.py, `speculators_of`). localspec.json goes along where the target is known in full, so that the way back is exact.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert import methods
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.foreign import ROPE
from localspec.convert.output import dequantised
from localspec.errors import LocalspecError, UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.speculator import CHECKPOINT_FILE, SpeculatorConfig, TargetIdentity

#: of the package whose format this is
VERSION = "0.9.0"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. `size` of the weights in bytes."""

    path: Path
    config: SpeculatorConfig
    title: str
    size: int


def export(
    source: Path,
    output: Path,
    target: Path | None = None,
    verifier: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Exported:
    """Write the draft `source`, a GGUF file or a checkpoint's directory, as the directory `output`.

    A checkpoint needs its `target`; a GGUF file only where it uses the target's own head. `verifier` is the target's name
    on Hugging Face's hub, or its folder, for the package to load it with. Raises ModelFileError for a source that can't be
    read, PairingError for another's target, UsageError for an output that exists or a draft that the format can't hold.
    """
    _check_folder(output, overwrite, source)
    gguf = None
    if target is not None:
        gguf = GGUFFile.open(target, "target")
        require_model(gguf, "target")
    if source.is_dir():
        if gguf is None:
            raise UsageError(f"{source} is a checkpoint: give the target that it was trained for as --target FILE")
        checkpoint = Checkpoint.open(source, allow_pickle)
        config = checkpoint.config(gguf)
        config.target.require(TargetIdentity.of(gguf), f"the draft in {source}")
        method = methods.find(config.method)
        values = method.tensors_of(checkpoint, config, gguf)
        verifier = verifier or _verifier(checkpoint)
    else:
        draft = GGUFFile.open(source, "draft")
        require_model(draft, "draft")
        config = SpeculatorConfig.from_gguf(draft)
        method = methods.find(config.method)
        values = {name: _values(draft, name) for name in draft.tensors}
    if not hasattr(method, "speculators_of"):
        raise UsageError(f"{source}: vLLM's speculators has no place for a {method.TITLE} draft")
    tensors, said = method.speculators_of(config, values, gguf)
    said["speculators_config"]["verifier"]["name_or_path"] = verifier
    _write(output, tensors, said, config if config.target.n_layer else None)
    return Exported(output, config, method.TITLE, (output / WEIGHTS).stat().st_size)


def described(
    config: SpeculatorConfig, architecture: str, own: Mapping[str, Any], layer: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json: what every kind has, with what is a kind's `own` and what its `layer` has differently."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.extra.get("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": config.extra["rope.scaling.factor"]}
    rope |= config.provenance.get(ROPE, {})
    inner: dict[str, Any] = {
        "model_type": "llama", "vocab_size": config.target.n_vocab, "hidden_size": config.n_embd,
        "intermediate_size": config.n_ff, "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head_kv, "head_dim": config.head_dim, "hidden_act": "silu",
        "max_position_embeddings": config.n_ctx_train, "rms_norm_eps": config.rms_eps, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "rope_parameters": rope, "rope_theta": config.rope_base,
    }  # fmt: skip
    if config.window:
        inner |= {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.n_layer}
    return {
        "architectures": [architecture], "speculators_model_type": config.method, "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab or config.target.n_vocab, "transformer_layer_config": inner | dict(layer),
        "torch_dtype": "float32", **own,
        "speculators_config": {
            "algorithm": config.method, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.depth}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }  # fmt: skip


def vocabulary(ids: np.ndarray, n_vocab: int) -> dict[str, np.ndarray]:
    """The two tables of a reduced vocabulary out of absolute ids i64[Vd]: offsets i64[Vd] and membership bool[V]."""
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(n_vocab), ids)}


def _values(draft: GGUFFile, name: str) -> np.ndarray:
    kind = draft.tensors[name].type
    if kind in ("I64", "I32"):
        return np.frombuffer(draft.tensor_bytes(name), "<i8" if kind == "I64" else "<i4").astype(np.int64)
    return dequantised(draft, name)


def _verifier(source: Checkpoint) -> str | None:
    said = source.json("config.json") if (source.path / "config.json").is_file() else {}
    known = said.get("speculators_config")
    verifier = known.get("verifier") if isinstance(known, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def _check_folder(output: Path, overwrite: bool, source: Path) -> None:
    """Raise UsageError unless `output` may become a directory: nothing there, or a checkpoint that may be replaced."""
    if output.exists() and source.exists() and (output.samefile(source) or output.resolve() in source.resolve().parents):
        raise UsageError(f"{output} is read for this, so it can't be replaced: name another directory")
    if output.exists() and not (output.is_dir() and overwrite):
        raise UsageError(f"{output} exists: name another directory" + (" or give --force" if output.is_dir() else ""))
    if output.exists() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise UsageError(f"{output} holds something else than a checkpoint: name another directory")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output.parent}: no such directory")


def _write(
    output: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], ours: SpeculatorConfig | None
) -> None:
    """The directory under a temporary name, then in two renames where it replaces another."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    fresh, old = (output.with_name(f".{output.name}.{os.getpid()}.{what}") for what in ("part", "old"))
    try:
        fresh.mkdir()
        save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, fresh / WEIGHTS, {"format": "pt"})
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        if ours is not None:
            (fresh / CHECKPOINT_FILE).write_text(ours.to_json(), "utf-8")
        if output.exists():
            output.rename(old)
        fresh.rename(output)
    except (OSError, SafetensorError) as error:
        raise LocalspecError(f"{output}: can't be written ({getattr(error, 'strerror', None) or error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
