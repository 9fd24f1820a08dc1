"""A draft's checkpoint to the GGUF file that llama.cpp and localspec run: what is the same for every kind of speculator.

What the kinds do differently stands in their own files (methods.py). What is added here: the target's tokenizer, and
metadata that ties the draft to its target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert import methods
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.output import check_output, copied_keys, partial, write_gguf
from localspec.convert.quantize import quantize_file
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.speculator import SpeculatorConfig, TargetIdentity

#: --quant -> (general.file_type, type of the matrices)
QUANTS = {"f32": (0, "F32"), "f16": (1, "F16"), "q8_0": (7, "Q8_0"), "q4_0": (2, "Q4_0"), "q4_1": (3, "Q4_1")}
#: mixtures that llama.cpp's quantiser makes; it falls back to a type with blocks of 32 where rows are no multiple of 256
MIXED = ("q4_k_m", "q5_k_m", "q6_k")
#: all that --quant may be of a checkpoint
DRAFT_QUANTS = (*QUANTS, *MIXED)

Tensors = dict[str, tuple[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `size` in bytes; `n_params` without a vocabulary that is the target's."""

    path: Path
    config: SpeculatorConfig
    title: str
    quant: str
    size: int
    n_params: int
    own_embedding: bool


def convert(
    checkpoint: Path,
    target: Path,
    output: Path,
    quant: str = "q8_0",
    overwrite: bool = False,
    gate: Callable[[Path], None] = lambda written: None,
    allow_pickle: bool = False,
) -> Converted:
    """Write the draft in `checkpoint` as a GGUF file for `target`, whose tokenizer it takes. `gate` gets the finished file
    under a temporary name; what it raises is passed on, and `output` is left as it was. `allow_pickle`: see Checkpoint.open.

    Raises ModelFileError for a checkpoint that is incomplete, broken or of a kind that llama.cpp's graph can't run,
    PairingError where the target is not the one it was trained for, UsageError for an unknown `quant` or a file that exists.
    """
    name = quant.lower()
    if name not in DRAFT_QUANTS:
        raise UsageError(f"--quant {quant}: unknown for a draft; one of {', '.join(DRAFT_QUANTS)}")
    gguf = GGUFFile.open(target, "target")
    require_model(gguf, "target")
    check_output(output, overwrite, target, *checkpoint.glob("*"))
    source = Checkpoint.open(checkpoint, allow_pickle)
    config = source.config(gguf)
    method = methods.find(config.method)
    config.target.require(TargetIdentity.of(gguf), f"the draft in {checkpoint}")
    values = method.tensors_of(source, config, gguf)
    file_type, kind = QUANTS.get(name, QUANTS["f32"])
    keys = metadata(method, source, config, gguf, file_type)
    with partial(output) as path:
        if name in MIXED:
            whole = path.with_name(path.name + ".f32")
            try:
                write_gguf(whole, config.arch, keys, stored(method, values, kind))
                quantize_file(whole, path, name.upper())
            finally:
                whole.unlink(missing_ok=True)
        else:
            write_gguf(path, config.arch, keys, stored(method, values, kind))
        require_model(GGUFFile.open(path, "result"), "draft")
        gate(path)
    n_params = sum(v.size for v in values.values() if v.dtype.kind == "f")
    own = "token_embd.weight" in values
    return Converted(output, config, method.TITLE, name, output.stat().st_size, n_params, own)


def metadata(
    method: Any, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile, file_type: int
) -> dict[str, Any]:
    """All keys of the file: what llama.cpp reads, what a person reads, the target's tokenizer as it is."""
    said = config.provenance
    keys: dict[str, Any] = {
        "general.architecture": config.arch,
        "general.type": "model",
        "general.name": f"{method.TITLE} draft for {config.target.name or target.name}",
        "general.description": _description(config, target),
        "general.file_type": file_type,
        "general.quantization_version": 2,
    }
    keys |= config.to_gguf_keys()
    keys["localspec.target.name"] = config.target.name or target.name
    keys["localspec.target.tokenizer_hash"] = target.tokenizer_hash()
    if said.get("localspec"):
        keys["localspec.trainer"] = f"localspec {said['localspec']}"
    for key in ("data_tokens", "tokens_seen", "steps"):
        if isinstance(said.get(key), int) and 0 <= said[key] < 1 << 32:
            keys[f"localspec.{key}"] = said[key]
    return keys | copied_keys(target, "tokenizer.") | method.extra_keys(source, config, target)


def _description(config: SpeculatorConfig, target: GGUFFile) -> str:
    drafts = f"Drafts for {config.target.name or target.name}"
    if not config.taps:
        return f"{drafts}."
    return f"{drafts}, reading its layers {', '.join(map(str, config.taps))}; it can't write text by itself."


def stored(method: Any, values: dict[str, np.ndarray], kind: str) -> Tensors:
    """Tensors as a file stores them: matrices as `kind`, F16 where rows can't be cut into its blocks; the rest as is."""
    out: Tensors = {}
    for name, value in values.items():
        if value.dtype == np.int64:
            out[name] = ("I64", value)
        elif value.ndim < 2 or kind == "F32":
            out[name] = ("F32", np.ascontiguousarray(value, np.float32))
        elif kind == "F16" or value.shape[-1] % 32:
            out[name] = ("F16", value.astype(np.float16))
        else:
            own = method.kind_of(name, kind)
            out[name] = (own, _quantised(value, own))
    return out


def _quantised(value: np.ndarray, kind: str) -> np.ndarray:
    import gguf

    quantise: Callable[..., np.ndarray] = gguf.quantize
    return quantise(np.ascontiguousarray(value, np.float32), gguf.GGMLQuantizationType[kind])
