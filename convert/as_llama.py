"""A qwen2 file rewritten as a llama file: the same model under a name that stock llama.cpp can tap.

The two differ in how they rotate positions: qwen2 turns the halves of a head against each other (NEOX), llama turns
neighbours (NORM). Reordering the rows of q and k, and their biases, within each head turns one into the other; the scores
q.k are sums of the same products. Rows of a quantised tensor can be moved without touching their blocks, so every value
stays what it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert.output import check_output, copied_keys, partial, stored_rows, write_gguf
from localspec.convert.rope_rows import pairs_from_halves
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile, require_model

#: what can be rewritten: the same graph but for the rotation
ARCHITECTURES = ("qwen2",)


def as_llama(source: Path, output: Path, overwrite: bool = False) -> int:
    """Write `source` as a llama file to `output`; returns its size in bytes.

    Raises ModelFileError for an architecture that is not qwen2, or whose heads can't be split in halves.
    """
    gguf = GGUFFile.open(source, "model")
    require_model(gguf, "model")
    if gguf.architecture not in ARCHITECTURES:
        raise gguf.error(f"has the architecture {gguf.architecture}; --as-llama rewrites {', '.join(ARCHITECTURES)} only")
    check_output(output, overwrite, source)
    keys: dict[str, Any] = {}
    for key, value in copied_keys(gguf).items():
        keys["llama" + key.removeprefix("qwen2") if key.startswith("qwen2.") else key] = value
    keys.setdefault("llama.rope.dimension_count", gguf.key_length)
    tensors = {name: (info.type, _moved(gguf, name, stored_rows(gguf, name))) for name, info in gguf.tensors.items()}
    with partial(output) as path:
        write_gguf(path, "llama", keys, tensors)
        require_model(GGUFFile.open(path, "result"), "model")
    return output.stat().st_size


def _moved(gguf: GGUFFile, name: str, rows: np.ndarray) -> np.ndarray:
    """The rows of a tensor, u8[n, bytes], in llama's order. A bias is one row of values: those are what moves."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk.") or rest.partition(".")[0] not in ("attn_q", "attn_k"):
        return rows
    heads = (gguf.n_head if rest.startswith("attn_q") else gguf.n_head_kv)[int(block)]
    info = gguf.tensors[name]
    values = rows.reshape(info.shape[-1], -1)
    if info.shape[-1] != heads * gguf.key_length or gguf.key_length % 2:
        raise ModelFileError(f"{gguf.path}: {name} is not {heads} heads of {gguf.key_length} values")
    return pairs_from_halves(values, heads).reshape(rows.shape)
