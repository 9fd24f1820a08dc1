"""An EAGLE-3 checkpoint to the GGUF file that llama.cpp and localspec run.

What changes on the way: names; the rows of q and k, which Hugging Face keeps for rotations of halves (NEOX) and llama.cpp's
eagle3 graph for rotations of pairs (NORM); `d2t`, offsets in a checkpoint and absolute ids in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localspec.convert.checkpoint import Checkpoint, head_name, layer_config, own_matrix, target_ids
from localspec.convert.foreign import ROPE, rope_factors, rope_settings, whole_numbers
from localspec.convert.methods import Reading, Text, n_kept
from localspec.convert.output import dequantised
from localspec.convert.rope_rows import halves_from_pairs, pairs_from_halves
from localspec.convert.speculators import described, vocabulary
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig, TargetIdentity

if TYPE_CHECKING:
    from localspec.eagle3_net import Eagle3Net

METHOD = "eagle3"
TITLE = "EAGLE-3"
MAIN_TENSOR = "blk.0.ffn_gate.weight"

#: fc's type where the others have few bits. The sizes of the taps' dimensions, hundreds of times apart, are folded into its
#: columns: a block's scale follows the largest, and the others, whose inputs are large, would be lost.
FINER = {"Q4_0": "Q8_0", "Q4_1": "Q8_0"}
#: settings that change the graph to one that llama.cpp does not have
_UNSUPPORTED = {
    "norm_output": "feeds normalised states back",
    "fc_norm": "normalises each tap by itself",
    "parallel_drafting": "says all its tokens at once",
}
#: the same, found by parts of tensors' names
_NO_PLACE = {
    ".bias": "adds a bias", "q_norm.": "normalises its queries", "k_norm.": "normalises its keys",
    "fc_norm.": "normalises each tap by itself", ".experts.": "is a mixture of experts", "sinks": "has attention sinks",
}  # fmt: skip
_CANT = "which llama.cpp's EAGLE-3 graph can't do"
N_TAPS = 3

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


def recognises(config: Mapping[str, Any], names: set[str]) -> bool:
    """fc next to one decoder layer, under any of the names that trainers give it."""
    return config.get("speculators_model_type", METHOD) == METHOD and {"fc.weight", "layers.0.hidden_norm.weight"} <= names


def foreign_config(source: Checkpoint, target: GGUFFile) -> SpeculatorConfig:
    layer = layer_config(source, ("default", "linear", "llama3"))
    _check_graph(source, layer)
    width = int(layer.get("target_hidden_size") or target.n_embd)
    if width != target.n_embd:
        raise source.error(
            f"reads states {width} wide; {target.name}'s are {target.n_embd}: give the target it was trained for"
        )
    n_vocab = layer.get("vocab_size")
    if isinstance(n_vocab, int) and n_vocab != target.vocab_size:
        raise source.error(
            f"was trained for {n_vocab} tokens; {target.name} has {target.vocab_size}: give the target it was trained for"
        )
    n_head = layer["num_attention_heads"]
    windowed = "sliding_attention" in (layer.get("layer_types") or []) or bool(layer.get("use_sliding_window"))
    rope = rope_settings(layer)
    scaled: dict[str, float | str] = {}
    if rope["rope_type"] == "linear":
        scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.get("factor", 1.0))}
    return SpeculatorConfig(
        method=METHOD,
        target=TargetIdentity.of(target),
        taps=_taps(source, layer, target),
        n_embd=layer["hidden_size"],
        n_head=n_head,
        n_head_kv=layer.get("num_key_value_heads") or n_head,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // n_head,
        n_ff=layer["intermediate_size"],
        rms_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_base=float(rope.get("rope_theta") or 10000.0),
        norm_before_residual=bool(layer.get("norm_before_residual", False)),
        norm_before_fc=bool(layer.get("norm_before_fc", False)),
        draft_vocab=_draft_vocab(source, layer),
        window=int(layer.get("sliding_window") or 0) if windowed else 0,
        n_ctx_train=int(layer.get("max_position_embeddings", 2048)),
        extra=scaled,
        provenance={ROPE: rope} if rope["rope_type"] == "llama3" else {},
    )


def _check_graph(source: Checkpoint, layer: Mapping[str, Any]) -> None:
    """Raise ModelFileError, naming it, for what would have to be left out."""
    for name, what in _UNSUPPORTED.items():
        if layer.get(name):
            raise source.error(f"{what} ({name}), {_CANT}")
    deeper = {n.split(".")[1] for n in source.names if n.startswith("layers.")}
    n_layer = max(int(layer.get("num_hidden_layers", 1)), len(deeper))
    if n_layer != 1:
        raise source.error(f"has {n_layer} layers; llama.cpp's EAGLE-3 graph has one")
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        raise source.error(f"has the activation {layer['hidden_act']}; llama.cpp's EAGLE-3 graph has silu")
    for name in sorted(source.names):
        for part, what in _NO_PLACE.items():
            if part in name:
                raise source.error(f"{what} ({name}), {_CANT}")
    if (layer.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise source.error(f"reads one state of the target (use_aux_hidden_state false); llama.cpp's EAGLE-3 reads {N_TAPS}")


def _taps(source: Checkpoint, layer: Mapping[str, Any], target: GGUFFile) -> tuple[int, ...]:
    """Layers already applied, as GGUF counts them. speculators and vLLM count so too (eagle_aux_hidden_state_layer_ids);
    where SpecForge, SGLang and ModelOpt nest the list in eagle_config it names layers by their output, one less. Without a
    list all of them, and llama.cpp's converter, take the same three."""
    key, n = "eagle_aux_hidden_state_layer_ids", target.n_layer
    flat, nested = layer.get(key), (layer.get("eagle_config") or {}).get(key)
    if flat not in (None, []):
        taps = whole_numbers(source, key, flat)
    elif nested not in (None, []):
        taps = [tap + 1 for tap in whole_numbers(source, key, nested)]
    else:
        taps = [2, n // 2, n - 3]
    if not all(0 <= tap <= n for tap in taps):
        raise source.error(f"reads the layers {taps}; {target.name} has {n}: give the target it was trained for")
    n_read = (source.shape("fc.weight") or [0])[-1] // target.n_embd
    if len(taps) != N_TAPS or n_read > N_TAPS:
        raise source.error(
            f"reads {n_read if len(taps) == N_TAPS else len(taps)} states of the target; llama.cpp's EAGLE-3 graph reads "
            f"exactly {N_TAPS}"
        )
    return tuple(taps)


def _draft_vocab(source: Checkpoint, layer: Mapping[str, Any]) -> int:
    if "d2t" in source.names:
        return int(source.integers("d2t").size)
    own, all_of_them = layer.get("draft_vocab_size"), layer.get("vocab_size")
    if own and all_of_them and own != all_of_them:
        raise source.error(f"says {own} of {all_of_them} tokens and lacks the tensor d2t, which says which")
    return 0


def kind_of(name: str, kind: str) -> str:
    """fc stays finer than the rest."""
    return FINER.get(kind, kind) if name == "fc.weight" else kind


def extra_keys(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> dict[str, Any]:
    """None."""
    return {}


def trained(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> Reading:
    """PyTorch's reading of the checkpoint."""
    from localspec.convert.eagle3_torch import TorchDraft

    return TorchDraft(source, config, target)


def written(draft: GGUFFile, target: GGUFFile) -> Reading:
    """The file through the network that drafts at run time."""
    from localspec.eagle3_net import Eagle3Net

    return _Written(Eagle3Net(draft, target, 1, n_threads=1))


class _Written:
    def __init__(self, net: Eagle3Net):
        self.net = net

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        net = self.net
        g = net.fuse(text.taps)
        slot = np.zeros(1, np.int32)
        logits = np.empty((len(starts), len(net.ids)), np.float32)
        kept = np.zeros(len(starts), np.int64)
        placed = 0
        for row, pair in enumerate((starts - 1).tolist()):  # the pair at P stands for the last token known, P + 1
            net.extend(0, placed, text.tokens[placed + 1 : pair + 1], g[placed:pair])
            position, token = np.array([pair], np.int32), text.tokens[pair + 1 : pair + 2]
            logits[row] = net.step(slot, position, token, g[pair : pair + 1])[0][0]
            drafted, _, _ = net.greedy(slot, position, token, g[pair : pair + 1], np.array([depth], np.int32), 0.0)
            kept[row] = n_kept(drafted[0].tolist(), text.tokens[pair + 2 :])
            placed = pair  # drafting has overwritten what follows
        return logits, kept

    def close(self) -> None:
        self.net.close()


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
        out["d2t"] = target_ids(source, config)
    factors = rope_factors(config)
    if factors is not None:
        out["rope_freqs.weight"] = factors
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


def speculators_of(
    config: SpeculatorConfig, values: dict[str, np.ndarray], target: GGUFFile | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if config.n_embd != config.target.n_embd:
        raise UsageError(
            f"this draft is {config.n_embd} wide and reads states {config.target.n_embd} wide: EAGLE-3 in speculators has "
            "one width for both"
        )
    values = dict(values)
    factors, known = values.pop("rope_freqs.weight", None), rope_factors(config)
    if factors is not None and (known is None or not np.allclose(known, factors, rtol=1e-5)):
        raise UsageError("this draft's rope is a table of factors (rope_freqs) that nothing names: speculators has no place")
    if "output.weight" not in values:
        if target is None:
            raise UsageError("this draft has no head of its own: give its target as --target FILE, whose head it uses")
        values["output.weight"] = dequantised(target, head_name(target))
    for name, heads in (("blk.0.attn_q.weight", config.n_head), ("blk.0.attn_k.weight", config.n_head_kv)):
        values[name] = halves_from_pairs(values[name], heads)
    names = {f"blk.0.{b}": f"layers.0.{a}" for a, b in _LAYER.items()} | {b: a for a, b in _OUTER.items()}
    names |= {"enc.output_norm.weight": "input_norm.weight", "token_embd.weight": "embed_tokens.weight"}
    tensors = vocabulary(values.pop("d2t"), config.target.n_vocab) if "d2t" in values else {}
    unknown = sorted(values.keys() - names.keys())
    if unknown:
        raise UsageError(f"this draft has the tensor {unknown[0]}, for which EAGLE-3 in speculators has no place")
    tensors |= {names[name]: value for name, value in values.items()}
    own = {
        "target_hidden_size": config.target.n_embd, "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc, "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }  # fmt: skip
    return tensors, described(config, "Eagle3Speculator", own, {})


def _own_embedding(source: Checkpoint, config: SpeculatorConfig, target: GGUFFile) -> np.ndarray | None:
    """The checkpoint's embedding, None where the target's own serves."""
    if "embed_tokens.weight" not in source.names and config.n_embd != target.n_embd:
        raise source.error(
            f"lacks embed_tokens.weight; the target's embedding is {target.n_embd} wide, the draft {config.n_embd}"
        )
    shape = (config.target.n_vocab, config.n_embd)
    return own_matrix(source, "embed_tokens.weight", target, shape, "token_embd.weight")
