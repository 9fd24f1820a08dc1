"""A target in Hugging Face's layout to GGUF: the text part of a model, with its tokenizer.

What a family of models calls its tensors and settings is in `targets`; here they are read one by one, changed where the
family says so, written as they came (or as F32, F16, BF16), and quantised by llama.cpp's own quantiser where another
type is wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert.output import Streamed, check_output, partial, scratch, stream_gguf
from localspec.convert.quantize import QUANTS, quantize_file
from localspec.convert.targets import family_of
from localspec.convert.targets.config import Config, Plan, Tensor
from localspec.convert.targets.tokenizer import tokenizer_keys
from localspec.convert.weights import FLOATS, Weights
from localspec.errors import ModelFileError, UsageError
from localspec.fetch import Progress
from localspec.gguf_file import GGUFFile, require_model
from localspec.gguf_format import clip
from localspec.speculator import CHECKPOINT_FILE

#: types that are written here -> llama.cpp's number for a file of them, bytes per value
PLAIN = {"F32": (0, 4), "F16": (1, 2), "BF16": (32, 2)}
#: values that are worked on at a time
_PART = 1 << 24
#: settings of config.json that mark a draft's checkpoint, not a target
_DRAFT_MARKS = (
    "speculators_config", "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "dflash_config",
)  # fmt: skip
#: a tensor that brings the target's hidden states into a draft
_DRAFT_TENSOR = "fc.weight"


@dataclass(frozen=True)
class Converted:
    """What was written: GGUF's architecture, type, and how much."""

    architecture: str
    quant: str
    n_params: int
    size: int


def is_target(directory: Path) -> bool:
    """Whether a directory holds a language model in Hugging Face's layout, of any family, and no draft's checkpoint.

    Drafts are told by the settings or tensors of their own: some say that they are of their target's class.
    """
    try:
        values = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(values, dict) or any(mark in values for mark in _DRAFT_MARKS):
        return False
    if (directory / CHECKPOINT_FILE).is_file():
        return False
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not name.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return False
    try:
        return _DRAFT_TENSOR not in Weights.open(directory).stored
    except ModelFileError:
        return True  # a target whose weights are missing or spoilt: `convert_target` says how


def check_quant(quant: str) -> str:
    """The type as QUANTS has it. Raises UsageError for an unknown one."""
    if quant.upper() not in QUANTS:
        raise UsageError(f"--quant {quant}: unknown; one of {', '.join(QUANTS)}")
    return quant.upper()


def check_family(source: Path) -> None:
    """Raise ModelFileError unless config.json in `source` is of a family that can be converted; nothing else is read."""
    family_of(Config.read(source))


def convert_target(
    source: Path, output: Path, quant: str, overwrite: bool = False, name: str | None = None, report: Progress | None = None
) -> Converted:
    """Write the model in `source` as `quant` (a key of QUANTS) to `output`. `name` is what the file calls the model
    (default: the directory's).

    `report` is told how many bytes of how many are written, before quantisation. Raises ModelFileError for a model that
    can't be converted, UsageError for a bad type or output.
    """
    quant = check_quant(quant)
    check_output(output, overwrite, *sorted(source.glob("*.safetensors")))
    config = Config.read(source)
    family = family_of(config)
    _check_whole(source, config)
    weights = Weights.open(source)
    plan = family.plan(config, weights)
    _check_tensors(plan, weights, config)
    keys = _keys(plan, config, name or source.resolve().name or "model")
    plain = quant if quant in PLAIN else weights.main_dtype()
    keys["general.file_type"] = PLAIN[plain][0]
    tensors = _tensors(plan, weights, config, plain, report)
    with partial(output) as path:
        if quant in PLAIN:
            stream_gguf(path, plan.architecture, keys, tensors)
        else:
            with scratch(output) as whole:
                stream_gguf(whole, plan.architecture, keys, tensors)
                require_model(GGUFFile.open(whole, "result"), "model")
                quantize_file(whole, path, quant, shown=output)
        gguf = GGUFFile.open(path, "result")
        require_model(gguf, "model")
        n_params = gguf.n_params
    return Converted(plan.architecture, quant, n_params, output.stat().st_size)


def _check_whole(source: Path, config: Config) -> None:
    """Raise ModelFileError for weights that are not a model's own: adapters, and those another program has quantised."""
    if (source / "adapter_config.json").is_file():
        raise config.error("holds an adapter (LoRA): merge it into its model, and convert that")
    if config.get("quantization_config"):
        method = config.get("quantization_config")
        kind = method.get("quant_method", "?") if isinstance(method, dict) else "?"
        raise config.unsupported(f"is quantised already ({clip(str(kind))})")


def _check_tensors(plan: Plan, weights: Weights, config: Config) -> None:
    wanted = {tensor.source for tensor in plan.tensors}
    for tensor in plan.tensors:
        stored = weights.stored.get(tensor.source)
        if stored is None:
            raise config.error(f"lacks the tensor {clip(tensor.source)}")
        if stored.dtype not in FLOATS:
            raise config.unsupported(f"has {clip(tensor.source)} of the type {clip(stored.dtype)}")
        if stored.shape != tensor.shape:
            shapes = f"{list(stored.shape)}, where config.json asks for {list(tensor.shape)}"
            raise config.error(f"has {clip(tensor.source)} of the shape {shapes}")
    unknown = sorted(name for name in weights.stored if name not in wanted and not plan.ignored(name))
    if unknown:
        more = f" and {len(unknown) - 1} more tensors that are" if len(unknown) > 1 else ", which is"
        raise config.unsupported(f"has {clip(unknown[0])}{more} no part of {plan.architecture} as it is known")


def _keys(plan: Plan, config: Config, name: str) -> dict[str, Any]:
    keys: dict[str, Any] = {"general.type": "model", "general.name": name, "general.quantization_version": 2}
    keys |= {f"{plan.architecture}.{key}": value for key, value in plan.keys.items()}
    return keys | tokenizer_keys(config.path, config, plan.n_vocab, plan.tokenizer)


def _tensors(plan: Plan, weights: Weights, config: Config, plain: str, report: Progress | None) -> dict[str, Streamed]:
    done = 0
    total = sum(math.prod(t.shape) * (4 if t.is_exact else PLAIN[plain][1]) for t in plan.tensors)

    def counted(parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        nonlocal done
        for part in parts:
            yield part
            done += part.nbytes
            if report is not None:
                report(str(config.path), done, total)

    def streamed(tensor: Tensor) -> Streamed:
        kind = "F32" if tensor.is_exact else plain
        n_bytes = math.prod(tensor.shape) * PLAIN[kind][1]
        return Streamed(kind, tensor.shape, n_bytes, lambda: counted(_parts(tensor, weights, config, kind)))

    tensors = {
        name: Streamed("F32", values.shape, values.nbytes, lambda values=values: [values])
        for name, values in plan.extra.items()
    }
    return tensors | {tensor.name: streamed(tensor) for tensor in plan.tensors}


def _parts(tensor: Tensor, weights: Weights, config: Config, kind: str) -> Iterator[np.ndarray]:
    """A tensor's data of the type `kind`: as a whole where the family changes it, else in parts of _PART values."""
    stored = weights.raw(tensor.source).reshape(-1)
    dtype = weights.stored[tensor.source].dtype
    if tensor.change is not None:
        changed = tensor.change(weights.values(tensor.source))
        if changed.shape != tensor.shape:
            raise ValueError(f"{tensor.name}: {changed.shape} where {tensor.shape} was announced")
        stored, dtype = np.ascontiguousarray(changed).reshape(-1), "F32"
    for begin in range(0, stored.size, _PART):
        part = stored[begin : begin + _PART]
        values = _float(part, dtype)
        if not np.isfinite(values).all():
            raise config.error(f"has values that are not finite in {clip(tensor.source)}; take other weights")
        yield part if dtype == kind else _as(values, kind, tensor, config)


def _float(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _as(values: np.ndarray, kind: str, tensor: Tensor, config: Config) -> np.ndarray:
    """f32 values as `kind`: rounded to the nearest, of two the even one. Raises ModelFileError where F16 can't hold them."""
    if kind == "F16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise config.error(f"has values too large for F16 in {clip(tensor.source)}; give --quant BF16")
        return halves
    if kind == "BF16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values
