"""An EAGLE-3 checkpoint to the GGUF file that llama.cpp and localspec run.

What changes on the way: names; the rows of q and k, which Hugging Face keeps for rotations of halves (NEOX) and llama.cpp's
eagle3 graph for rotations of pairs (NORM); `d2t`, offsets in a checkpoint and absolute ids in a file; the types of the
matrices. What is added: the target's tokenizer, and metadata that ties the draft to its target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert.checkpoint import Checkpoint
from localspec.convert.output import check_output, copied_keys, dequantised, partial, write_gguf
from localspec.convert.quantize import quantize_file
from localspec.errors import ModelFileError, PairingError, UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.speculator import SpeculatorConfig, TargetIdentity

#: --quant -> (general.file_type, type of the matrices)
QUANTS = {"f32": (0, "F32"), "f16": (1, "F16"), "q8_0": (7, "Q8_0"), "q4_0": (2, "Q4_0"), "q4_1": (3, "Q4_1")}
#: mixtures that llama.cpp's quantiser makes; it falls back to a type with blocks of 32 where rows are no multiple of 256
MIXED = ("q4_k_m", "q5_k_m", "q6_k")

#: fc's type where the others have few bits. The sizes of the taps' dimensions, hundreds of times apart, are folded into its
#: columns: a block's scale follows the largest, and the others, whose inputs are large, would be lost.
FINER = {"Q4_0": "Q8_0", "Q4_1": "Q8_0"}

Tensors = dict[str, tuple[str, np.ndarray]]

#: checkpoint name -> GGUF name, without "layers.0." / "blk.0."
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_OUTER = {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
#: what a trainer keeps for itself and a draft does not need
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
#: a checkpoint's embedding is the target's when it is this close to it: rounding of bf16 and of the target's own type
_SAME_EMBEDDING = 0.02


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `size` in bytes; `n_params` without a vocabulary that is the target's."""

    path: Path
    config: SpeculatorConfig
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
) -> Converted:
    """Write the draft in `checkpoint` as a GGUF file for `target`, whose tokenizer it takes. `gate` gets the finished file
    under a temporary name; what it raises is passed on, and `output` is left as it was.

    Raises ModelFileError for a checkpoint that is incomplete, broken or of a kind that llama.cpp's graph can't run,
    PairingError where the target is not the one it was trained for, UsageError for an unknown `quant` or a file that exists.
    """
    name = quant.lower()
    if name not in (*QUANTS, *MIXED):
        raise UsageError(f"--quant {quant}: unknown for a draft; one of {', '.join((*QUANTS, *MIXED))}")
    gguf = GGUFFile.open(target, "target")
    require_model(gguf, "target")
    check_output(output, overwrite, target, *checkpoint.glob("*"))
    source = Checkpoint.open(checkpoint)
    config = source.config(gguf)
    config.target.require(TargetIdentity.of(gguf), f"the draft in {checkpoint}")
    values = tensors_of(source, config, gguf)
    file_type, kind = QUANTS.get(name, QUANTS["f32"])
    keys = metadata(config, gguf, file_type)
    with partial(output) as path:
        if name in MIXED:
            whole = path.with_name(path.name + ".f32")
            try:
                write_gguf(whole, "eagle3", keys, stored(values, kind))
                quantize_file(whole, path, name.upper())
            finally:
                whole.unlink(missing_ok=True)
        else:
            write_gguf(path, "eagle3", keys, stored(values, kind))
        require_model(GGUFFile.open(path, "result"), "draft")
        gate(path)
    n_params = sum(v.size for k, v in values.items() if k != "d2t")
    return Converted(output, config, name, output.stat().st_size, n_params, "token_embd.weight" in values)


def metadata(config: SpeculatorConfig, target: GGUFFile, file_type: int) -> dict[str, Any]:
    """All keys of the file: what llama.cpp reads, what a person reads, the target's tokenizer as it is."""
    said = config.provenance
    keys: dict[str, Any] = {
        "general.architecture": "eagle3",
        "general.type": "model",
        "general.name": f"EAGLE-3 draft for {config.target.name or target.name}",
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
    return keys | copied_keys(target, "tokenizer.")


def _description(config: SpeculatorConfig, target: GGUFFile) -> str:
    taps = ", ".join(map(str, config.taps))
    return f"Drafts for {config.target.name or target.name}, reading its layers {taps}; it can't write text by itself."


def tensors_of(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, np.ndarray]:
    """The draft's tensors by their GGUF names: f32, rows first, in llama.cpp's order of rows; `d2t` i64 absolute ids."""
    names = {f"layers.0.{a}": f"blk.0.{b}" for a, b in _LAYER.items()} | _OUTER
    if config.norm_before_fc:
        names["input_norm.weight"] = "enc.output_norm.weight"
    unknown = [n for n in source.names if n not in names and n not in ("d2t", "embed_tokens.weight") and n not in _IGNORED]
    if unknown:
        raise source.error(f"has the tensor {unknown[0]}, which llama.cpp's EAGLE-3 graph has no place for")
    shapes = shapes_of(config)
    out: dict[str, np.ndarray] = {}
    for name, new in names.items():
        if name not in source.names:
            if name == "lm_head.weight" and not config.draft_vocab:
                continue  # the target's own head serves
            raise source.error(f"lacks the tensor {name}")
        value = source.tensor(name)
        if value.shape != shapes[new]:
            raise source.error(f"has {name} of the shape {list(value.shape)}; its config asks for {list(shapes[new])}")
        out[new] = value
    for name, heads in (("blk.0.attn_q.weight", config.n_head), ("blk.0.attn_k.weight", config.n_head_kv)):
        out[name] = pairs_from_halves(out[name], heads)
    if config.draft_vocab:
        out["d2t"] = _absolute(source, config)
    embedding = _own_embedding(source, config, target)
    if embedding is not None:
        out["token_embd.weight"] = embedding
    return out


def shapes_of(config: SpeculatorConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by GGUF name, rows first."""
    e, q, kv, ff = config.n_embd, config.n_head * config.head_dim, config.n_head_kv * config.head_dim, config.n_ff
    n_taps = len(config.taps) * config.target.n_embd
    return {
        "fc.weight": (e, n_taps),
        "enc.output_norm.weight": (n_taps,),
        "blk.0.attn_norm.weight": (e,),
        "blk.0.attn_norm_2.weight": (e,),
        "blk.0.attn_q.weight": (q, 2 * e),
        "blk.0.attn_k.weight": (kv, 2 * e),
        "blk.0.attn_v.weight": (kv, 2 * e),
        "blk.0.attn_output.weight": (e, q),
        "blk.0.ffn_norm.weight": (e,),
        "blk.0.ffn_gate.weight": (ff, e),
        "blk.0.ffn_up.weight": (ff, e),
        "blk.0.ffn_down.weight": (e, ff),
        "output_norm.weight": (e,),
        "output.weight": (config.draft_vocab or config.target.n_vocab, e),
    }


def pairs_from_halves(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k for rotations of neighbours (NORM), out of rows for rotations of halves (NEOX): within each head, row i
    of the first half and row i of the second become neighbours."""
    rows = weight.shape[0]
    if rows % (2 * n_head):
        raise ModelFileError(f"{rows} rows can't be {n_head} heads of an even size")
    return np.ascontiguousarray(
        weight.reshape(n_head, 2, rows // n_head // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _absolute(source: Checkpoint, config: SpeculatorConfig) -> np.ndarray:
    offsets = source.integers("d2t")
    if offsets.shape != (config.draft_vocab,):
        raise source.error(f"has d2t of the shape {list(offsets.shape)}; its config asks for [{config.draft_vocab}]")
    ids = offsets + np.arange(len(offsets))
    if len(ids) and not (ids.min() >= 0 and ids.max() < config.target.n_vocab and (np.diff(ids) > 0).all()):
        raise source.error(
            f"has a table d2t that does not give {config.draft_vocab} rising ids below {config.target.n_vocab}: "
            "offsets are expected, target id minus draft id"
        )
    return ids


def _own_embedding(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> np.ndarray | None:
    """The checkpoint's embedding, None where the target's own serves."""
    if "embed_tokens.weight" not in source.names:
        if config.n_embd != target.n_embd:
            raise source.error(
                f"lacks embed_tokens.weight; the target's embedding is {target.n_embd} wide, the draft {config.n_embd}"
            )
        return None
    own = source.tensor("embed_tokens.weight")
    if own.shape != (config.target.n_vocab, config.n_embd):
        raise source.error(
            f"has embed_tokens.weight of the shape {list(own.shape)}, not {[config.target.n_vocab, config.n_embd]}"
        )
    if config.n_embd == target.n_embd and "token_embd.weight" in target.tensors:
        theirs = dequantised(target, "token_embd.weight")[: len(own)]
        if theirs.shape == own.shape and np.linalg.norm(own - theirs) <= _SAME_EMBEDDING * np.linalg.norm(theirs):
            return None
    return own


def stored(values: dict[str, np.ndarray], kind: str) -> Tensors:
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
            finer = FINER.get(kind, kind) if name == "fc.weight" else kind
            out[name] = (finer, _quantised(value, finer))
    return out


def _quantised(value: np.ndarray, kind: str) -> np.ndarray:
    import gguf


    quantise: Callable[..., np.ndarray] = gguf.quantize
    return quantise(np.ascontiguousarray(value, np.float32), gguf.GGMLQuantizationType[kind])


def check_same_target(config: SpeculatorConfig, target: GGUFFile) -> None:
    """Raise PairingError unless `target` is the one that the draft was trained for."""
    difference = config.target.difference(TargetIdentity.of(target))
    if difference is not None:
        raise PairingError(f"the draft was trained for {config.target.name}; {target.path} {difference}")
