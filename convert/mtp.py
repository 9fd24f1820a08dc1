"""An assistant's checkpoint (Gemma4AssistantForCausalLM: ours, or one of Google's drafters) to the GGUF file that llama.cpp
and localspec run.

What changes on the way: names. Rows of q stay as they are, because this graph turns halves of a head. The frequencies by
which full layers turn are the target's own, since its keys were turned by them. The clustered head (masked_embedding)
goes into the metadata: llama.cpp's loader takes no such tensors, and its graph multiplies with the whole head (clusters.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import clusters
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.foreign import check_kinds
from localspec.convert.methods import Reading, Text
from localspec.convert.output import Typed, dequantised
from localspec.errors import PairingError, UsageError
from localspec.gemma4 import assistant_config, head_sizes, layers_read, size_of, windowed_of
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.mtp_context import MtpContext
from localspec.speculator import SpeculatorConfig
from localspec.target import SessionSettings, TargetSession

METHOD = "mtp"
TITLE = "MTP"
MAIN_TENSOR = "blk.0.ffn_gate.weight"
#: the comparison needs states as the target gives them: its keys come from them on one side, from its cache on the other
EXACT_STATES = True

_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_CENTROIDS, _ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
_TOP = 32  # clusters looked into, where a configuration does not say (Gemma4AssistantConfig)
_INT32, _FLOAT32 = 5, 6  # GGUF's numbers of value types
_DEPTH = 4  # of a drafter whose maker does not say

#: checkpoint name -> GGUF name, without "layers.0." / "blk.0."
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
}
_OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}


def recognises(config: Mapping[str, Any], names: set[str]) -> bool:
    """By the class that its maker names, or by the two projections that only an assistant has."""
    said = config.get("architectures") or []
    return any(name in said for name in _ARCHITECTURES) or {"pre_projection.weight", "post_projection.weight"} <= names


def foreign_config(source: Checkpoint, target: GGUFFile) -> SpeculatorConfig:
    outer = source.json("config.json")
    text = outer | (outer.get("text_config") or {})
    check_kinds(source, text)

    def number(*keys: str) -> int:
        value = next((text[key] for key in keys if text.get(key) is not None), None)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise source.error(f"says no {keys[0]} in config.json that can be used ({value})")
        return value

    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise source.error("does not list its layers' kinds in config.json (layer_types)")
    windowed = [kind == "sliding_attention" for kind in kinds]
    try:
        config = assistant_config(
            target, windowed, number("hidden_size"), number("num_attention_heads"), number("intermediate_size"),
            float(text.get("rms_norm_eps") or 1e-6), _DEPTH,
        )  # fmt: skip
        read = dict(zip((True, False), layers_read(target)))
    except PairingError as error:
        raise source.error(f"can't draft for this target: {error}") from None
    width = number("backbone_hidden_size")
    if width != target.n_embd:
        raise source.error(f"was made for a hidden size of {width}, the target has {target.n_embd}")
    for kind, keys in ((True, ("num_key_value_heads",)), (False, ("num_global_key_value_heads", "num_key_value_heads"))):
        sizes = ("head_dim",) if kind else ("global_head_dim", "head_dim")
        mine, theirs = (number(*keys), number(*sizes)), (target.n_head_kv[read[kind]], head_sizes(target, kind)[0])
        if kind in windowed and mine != theirs:
            raise source.error(
                f"reads {mine[0]} heads of {mine[1]} elements in its {'windowed' if kind else 'full'} layers, the target's "
                f"layer {read[kind]} has {theirs[0]} of {theirs[1]}"
            )
    return config


def shapes_of(config: SpeculatorConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by GGUF name, rows first."""
    e, b, ff = config.n_embd, config.target.n_embd, config.n_ff
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.target.n_vocab, e),
        "output_norm.weight": (e,),
        "nextn.pre_projection.weight": (e, 2 * b),
        "nextn.post_projection.weight": (b, e),
    }
    for i, kind in enumerate(windowed_of(config)):
        size = size_of(config, kind)
        q = config.n_head * size
        own = {
            "attn_norm": (e,), "attn_q": (q, e), "attn_q_norm": (size,), "attn_output": (e, q), "post_attention_norm": (e,),
            "ffn_norm": (e,), "ffn_gate": (ff, e), "ffn_up": (ff, e), "ffn_down": (e, ff), "post_ffw_norm": (e,),
            "layer_output_scale": (1,),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def tensors_of(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, np.ndarray]:
    """The draft's tensors by their GGUF names: f32, rows first, with the target's frequencies."""
    names = {f"layers.{i}.{a}": f"blk.{i}.{b}" for i in range(config.n_layer) for a, b in _LAYER.items()} | _OUTER
    known = {*names, "lm_head.weight"}
    unknown = [name for name in sorted(source.names) if name not in known and not name.startswith("masked_embedding")]
    if unknown:
        raise source.error(f"has the tensor {unknown[0]}, which llama.cpp's assistant graph has no place for")
    shapes = shapes_of(config)
    out: dict[str, np.ndarray] = {}
    for name, new in names.items():
        if name not in source.names:
            raise source.error(f"lacks the tensor {name}")
        value = source.tensor(name)
        if name.endswith("layer_scalar"):
            value = value.reshape(-1)
        if value.shape != shapes[new]:
            raise source.error(f"has {name} of the shape {list(value.shape)}; its config asks for {list(shapes[new])}")
        out[new] = value
    if "rope_freqs.weight" not in target.tensors:
        raise target.error("has no tensor rope_freqs.weight, by which its full layers' keys are turned")
    out["rope_freqs.weight"] = dequantised(target, "rope_freqs.weight")
    return out


def kind_of(name: str, kind: str) -> str:
    """All alike."""
    return kind


def extra_keys(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, Any]:
    """The clusters of its head, where it has them."""
    if _CENTROIDS not in source.names:
        return {}
    centroids, ordering = source.tensor(_CENTROIDS), source.integers(_ORDERING)
    top = source.json("config.json").get("centroid_intermediate_top_k", _TOP)
    if centroids.ndim != 2 or centroids.shape[1] != config.n_embd or config.target.n_vocab % len(centroids):
        raise source.error(f"has {_CENTROIDS} of the shape {list(centroids.shape)}, which its vocabulary can't be cut by")
    if not np.array_equal(np.sort(ordering.reshape(-1)), np.arange(config.target.n_vocab)):
        raise source.error(f"has a {_ORDERING} that does not name each of its {config.target.n_vocab} tokens once")
    if isinstance(top, bool) or not isinstance(top, int) or not 0 < top <= len(centroids):
        raise source.error(f"says a centroid_intermediate_top_k of {top} for {len(centroids)} clusters")
    return {
        clusters.TOP: top,
        clusters.CENTROIDS: Typed(centroids.reshape(-1), _FLOAT32, True),
        clusters.ORDERING: Typed(ordering.reshape(-1), _INT32, True),
    }


def trained(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> Reading:
    """The checkpoint through the trainer's model, fp32, with keys computed from the states."""
    try:
        from localspec.convert.mtp_torch import TorchDraft
    except ImportError as error:  # pragma: no cover
        from localspec.train import INSTALL

        raise UsageError(
            f"PyTorch can't be imported ({error}), and the comparison needs it: {INSTALL}, or --no-parity"
        ) from None
    return TorchDraft(source, config, target)


def written(draft: GGUFFile, target: GGUFFile) -> Reading:
    """The file in llama.cpp's own graph, over the cache of a target that runs."""
    return _Written(draft, target)


class _Written:
    def __init__(self, draft: GGUFFile, target: GGUFFile):
        self._open = contextlib.ExitStack()
        self._n_ctx = 0
        self._target = self._open.enter_context(Model(target.path))
        self._draft = self._open.enter_context(Model(draft.path, "draft"))
        self._session: TargetSession | None = None
        self._context: MtpContext | None = None

    def _at_least(self, n_ctx: int) -> tuple[TargetSession, MtpContext]:
        if self._session is None or self._context is None or self._session.n_ctx < n_ctx:
            self._close_contexts()
            self._session = TargetSession(self._target, SessionSettings(n_ctx, n_threads=1))
            self._context = MtpContext(self._draft.handle, self._draft.n_vocab, self._session)
        return self._session, self._context

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        session, context = self._at_least(max(256, len(text.tokens)))
        tokens, states = text.tokens.tolist(), text.taps[:, -session.model.n_embd :]
        first = np.empty((len(starts), context.n_vocab), np.float32)
        kept = np.zeros(len(starts), np.int64)
        slot = np.zeros(1, np.int32)
        for row, at in enumerate(starts.tolist()):  # ascending: the cache grows to just below each
            session.prefill(0, tokens[:at])
            token, state, alive = tokens[at], states[at - 1 : at], True
            for step in range(depth):
                logits, state = context.step(slot, np.array([at], np.int32), np.array([token], np.int32), state)
                if step == 0:
                    first[row] = logits[0]
                token = int(logits[0].argmax())
                alive = alive and at + 1 + step < len(tokens) and token == tokens[at + 1 + step]
                kept[row] += alive
                if not alive:
                    break
        return first, kept

    def _close_contexts(self) -> None:
        for part in (self._context, self._session):
            if part is not None:
                part.close()

    def close(self) -> None:
        """Free everything, contexts before models."""
        self._close_contexts()
        self._open.close()
