"""What of a target can stand in a llama model: which of its layers, under which names, and in which order of rows."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from localspec.errors import TrainError
from localspec.train.target_weights import TargetWeights

BIAS = "attention.bias"  # in SpeculatorConfig.extra: q, k and v have one, as qwen2's
#: Without --layers: one for so many of the target's, the first ones. After 25 steps on SmolLM2 the first five of its 30 had
#: a loss of 4.99 and were right in 34 %; five spread evenly had 5.22 and 28 %.
_SHARE = 6
#: a layer's parameters by their names in the target's file; biases are there or not
TAKEN = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight",
    "o": "attn_output.weight", "ffn_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}  # fmt: skip
BIASES = {"q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias"}


class Origin(NamedTuple):
    """Where the layers come from: the target's `layers`, or, if `why_random` says something, as many random ones."""

    layers: tuple[int, ...]
    why_random: str


def origin(text: str, target: TargetWeights) -> Origin:
    """Of the layers that `--layers` text names. Raises TrainError for some that the target hasn't."""
    layers = _layers(text, target.identity.n_layer)
    return Origin(layers, next((why for i in layers if (why := _not_llama(target, i))), ""))


def _layers(text: str, n_layer: int) -> tuple[int, ...]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise TrainError(f"--layers {text}: give numbers such as 0,1,14,28,29, or how many") from None
    if not text:
        return tuple(range(max(1, round(n_layer / _SHARE))))
    if len(numbers) == 1 and "," not in text:
        n = numbers[0]
        if not 1 <= n <= n_layer:
            raise TrainError(f"--layers {text}: the target has {n_layer} layers; give a number from 1 to {n_layer}")
        return tuple(round(x) for x in np.linspace(0, n_layer - 1, n).tolist())
    wrong = [i for i in numbers if not 0 <= i < n_layer]
    if wrong or not numbers:
        raise TrainError(f"--layers {text}: the target has layers 0 to {n_layer - 1}")
    if any(a >= b for a, b in pairwise(numbers)):
        raise TrainError(f"--layers {text}: give each layer once, in the target's order")
    return tuple(numbers)


def _not_llama(target: TargetWeights, layer: int) -> str:
    """Why a layer can't stand in a llama model; nothing where it can."""
    gguf = target.gguf
    if gguf.architecture not in ("llama", "qwen2"):
        return f"a {gguf.architecture} model's layers compute something else than a llama's"
    n_head, n_kv, size, n_ff = sizes(target)
    shapes = layer_shapes(target.identity.n_embd, n_head * size, n_kv * size, n_ff)
    prefix = f"blk.{layer}."
    there = {name.removeprefix(prefix) for name in gguf.tensors if name.startswith(prefix)}
    odd = (there - {*TAKEN.values(), *BIASES.values()}) | (set(TAKEN.values()) - there)
    if odd:
        return f"its layers are no plain ones ({prefix}{min(odd)})"
    for name, stored in (TAKEN | BIASES).items():
        if stored in there and gguf.tensors[prefix + stored].shape[::-1] != shapes[name]:
            return f"its layers differ in their shapes ({prefix}{stored})"
    if int(gguf.arch("rope.dimension_count", gguf.key_length)) != gguf.key_length:
        return "its rope turns only a part of each head"
    return ""


def sizes(target: TargetWeights) -> tuple[int, int, int, int]:
    """(heads, heads of keys, their size, width of the feed-forward layer)."""
    n_head = target.layer_int("attention.head_count", 1)
    n_kv = target.layer_int("attention.head_count_kv", n_head) or n_head
    return n_head, n_kv, target.gguf.key_length, target.layer_int("feed_forward_length", 0) or 4 * target.identity.n_embd


def layer_shapes(n: int, q: int, kv: int, ff: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's parameters, by our names: `n` wide, queries `q`, keys and values `kv`, `ff` in the feed-forward layer."""
    return {
        "attn_norm": (n,), "q": (q, n), "k": (kv, n), "v": (kv, n), "o": (n, q), "ffn_norm": (n,), "gate": (ff, n),
        "up": (ff, n), "down": (n, ff), "q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,),
    }  # fmt: skip


def halves_from_pairs(weight: Tensor, n_head: int) -> Tensor:
    """Rows of q or k for rotations of halves, as Hugging Face keeps them, out of rows for rotations of neighbours, as
    llama.cpp keeps a llama's: within each head, rows 2 i and 2 i + 1 become row i of the first and of the second half."""
    return weight.view(n_head, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def layer_parameter(target: TargetWeights, layer: int, name: str) -> Tensor:
    """f32: the target's own, q and k in the order of rows for rotations of halves."""
    value = target.tensor(f"blk.{layer}.{(TAKEN | BIASES)[name]}")
    if target.gguf.architecture == "llama" and name.removesuffix("_bias") in ("q", "k"):
        n_head, n_kv, _, _ = sizes(target)
        value = halves_from_pairs(value, n_head if name[0] == "q" else n_kv)
    return value
