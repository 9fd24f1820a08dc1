"""A small language model's checkpoint to an ordinary llama GGUF, which any program of llama.cpp takes as a draft (`-md`).

What changes on the way: names; the rows of q and k with their biases, which Hugging Face keeps for rotations of halves and
llama.cpp's llama graph for rotations of neighbours. An embedding that is the head, too, is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.convert.checkpoint import Checkpoint
from localspec.convert.methods import Reading, Text
from localspec.convert.rope_rows import pairs_from_halves
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.speculator import SpeculatorConfig
from localspec.target import SessionSettings, TargetSession

METHOD = "small"
TITLE = "Small"
MAIN_TENSOR = "blk.0.ffn_gate.weight"

#: checkpoint name -> GGUF name, without "layers.I." / "blk.I."
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_BIASES = {f"self_attn.{n}_proj.bias": f"attn_{m}.bias" for n, m in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))}
_OUTER = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def recognises(config: Mapping[str, Any], names: set[str]) -> bool:
    """Nothing: llama.cpp's own converter writes any other llama."""
    return False


def foreign_config(source: Checkpoint, target: GGUFFile) -> SpeculatorConfig:
    raise source.error("is no small model that localspec trained; llama.cpp's convert_hf_to_gguf.py writes other llamas")


def kind_of(name: str, kind: str) -> str:
    """As asked for."""
    return kind


def extra_keys(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, Any]:
    """None."""
    return {}


def tensors_of(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, np.ndarray]:
    """The model's tensors by their GGUF names: f32, rows first, in llama.cpp's order of rows."""
    names, shapes = _names(config), shapes_of(config)
    unknown = sorted(source.names - set(names))
    if unknown:
        raise source.error(f"has the tensor {unknown[0]}, which its config leaves no place for")
    out: dict[str, np.ndarray] = {}
    for name, new in names.items():
        if name not in source.names:
            if name == "lm_head.weight" or (name.endswith(".bias") and not config.extra.get("attention.bias")):
                continue
            raise source.error(f"lacks the tensor {name}")
        value = source.tensor(name)
        if value.shape != shapes[new]:
            raise source.error(f"has {name} of the shape {list(value.shape)}; its config asks for {list(shapes[new])}")
        if new.endswith("attn_output.bias") and not value.any():
            continue  # there because transformers wants four biases or none
        if ".attn_q." in new or ".attn_k." in new:
            value = pairs_from_halves(value, config.n_head if ".attn_q." in new else config.n_head_kv)
        out[new] = value
    return out


def _names(config: SpeculatorConfig) -> dict[str, str]:
    layer = _LAYER | _BIASES
    return {f"layers.{i}.{a}": f"blk.{i}.{b}" for i in range(config.n_layer) for a, b in layer.items()} | _OUTER


def shapes_of(config: SpeculatorConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by GGUF name, rows first."""
    e, q, kv, ff = config.n_embd, config.n_head * config.head_dim, config.n_head_kv * config.head_dim, config.n_ff
    table = (config.target.n_vocab, e)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": table, "output_norm.weight": (e,), "output.weight": table}
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (e,), "attn_q.weight": (q, e), "attn_k.weight": (kv, e), "attn_v.weight": (kv, e),
        "attn_output.weight": (e, q), "ffn_norm.weight": (e,), "ffn_gate.weight": (ff, e), "ffn_up.weight": (ff, e),
        "ffn_down.weight": (e, ff), "attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,),
        "attn_output.bias": (e,),
    }  # fmt: skip
    return shapes | {f"blk.{i}.{name}": shape for i in range(config.n_layer) for name, shape in layer.items()}


def trained(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> Reading:
    """PyTorch's reading of the checkpoint."""
    from localspec.convert.small_torch import TorchLlama

    return TorchLlama(source, config)


def written(draft: GGUFFile, target: GGUFFile) -> Reading:
    """The file through llama.cpp, as the drafter `lm` uses it."""
    return _Written(draft.path)


class _Written:
    def __init__(self, path: Path):
        self.model = Model(path, role="draft")
        # one thread, and full keys: what is compared here is the file
        settings = SessionSettings(min(8192, self.model.n_ctx_train or 4096), n_threads=1, type_k="f32", type_v="f32")
        try:
            self.session = TargetSession(self.model, settings)
        except BaseException:
            self.model.close()
            raise

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        session, tokens = self.session, text.tokens.tolist()
        if len(tokens) + depth > session.n_ctx:
            raise ModelFileError(f"{self.model.path}: a text of {len(tokens)} tokens is longer than its context")
        logits = np.empty((len(starts), self.model.n_vocab), np.float32)
        kept = np.zeros(len(starts), np.int64)
        for row, start in enumerate(starts.tolist()):
            session.prefill(0, tokens[:start])
            found = session.decode([(0, tokens[start : start + 1])]).logits[0]
            logits[row] = found
            for place in range(start + 1, min(start + 1 + depth, len(tokens))):
                guess = int(found.argmax())
                if guess != tokens[place]:
                    break
                kept[row] += 1
                if place < start + depth:
                    found = session.decode([(0, [guess])]).logits[0]
            session.rollback(0, start + 1)
        session.rollback(0, 0)
        return logits, kept

    def close(self) -> None:
        self.session.close()
        self.model.close()
