"""What makes llama.cpp abort the whole process instead of refusing a file, checked before it gets the file.

llama.cpp throws on most faults (a missing key, a tensor of the wrong shape) and then just fails to load; the checks
here are for the rest: its assertions over hyperparameters, vocabulary and tensor types, and divisions by zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from localspec import llama_arch
from localspec.gguf_format import TensorInfo, Value, clip

# Types that ggml has no multiplication for on the CPU: plain integers, F64, and its own for activations.
_NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
_ID_TABLE = re.compile(r"^d2t$|tid2eid|ordering")  # these hold ids, not weights
_ELEMENTWISE = re.compile(r"norm|\.bias$|ssm_[ad]$")  # ggml adds and scales by F32 only
_TENSOR_ALIGNMENT = 32  # of a buffer that llama.cpp maps

# Positions come in another way: a rope of 0 elements is right there.
_NO_ROPE = frozenset({"gpt2", "mpt", "bloom", "starcoder", "refact", "jais"}) | llama_arch.HYBRID


class _Tokenizer(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def tokens(self) -> Sequence[bytes]: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...


def first_fault(
    arch: str, metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo], tokenizer: _Tokenizer
) -> str | None:
    """The first thing that llama.cpp would abort on, as the end of a sentence about the file; None if there is none."""
    return _hyperparameters(arch, metadata) or _tokenizer(arch, metadata, tokenizer) or _tensors(tensors)


class _Bad(Exception):
    """A value that can't be right."""


def _hyperparameters(arch: str, metadata: Mapping[str, Value]) -> str | None:
    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise _Bad(f"has no {arch}.{key}, which llama.cpp needs; convert it again")
        if isinstance(value, np.ndarray):
            value = int(value.max(initial=0)) if value.dtype.kind in "iu" else -1
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise _Bad(f"is damaged: {arch}.{key} is {clip(str(value), 30)}")
        return value

    try:
        n_layer, n_embd, n_ctx = number("block_count"), number("embedding_length"), number("context_length")
        if not 1 <= n_layer <= llama_arch.MAX_LAYERS:
            raise _Bad(f"is damaged: it claims {n_layer} layers (llama.cpp takes 1 to {llama_arch.MAX_LAYERS})")
        if not n_embd or not n_ctx:
            raise _Bad(f"is damaged: it claims a hidden size of {n_embd} and a context of {n_ctx}")
        if number("nextn_predict_layers", 0) > n_layer:
            raise _Bad("is damaged: it claims more next-token layers than layers")
        _experts(arch, number)
        _attention(arch, metadata, number, n_embd)
        _state_space(arch, number, n_embd)
        _window(arch, metadata, number, n_layer)
        _norms(arch, metadata)
        scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
        if not isinstance(scaling, str) or scaling not in llama_arch.ROPE_SCALING:
            raise _Bad(f"has the rope scaling {clip(str(scaling))}, which this llama.cpp does not know")
    except _Bad as e:
        return str(e)
    return None


class _Number(Protocol):
    def __call__(self, key: str, default: int | None = None) -> int: ...


def _experts(arch: str, number: _Number) -> None:
    experts, used = number("expert_count", 0), number("expert_used_count", 0)
    groups, groups_used = number("expert_group_count", 0), number("expert_group_used_count", 0)
    if arch.startswith("hunyuan") and experts <= 1:
        return
    ok = experts <= llama_arch.MAX_EXPERTS and used <= experts
    if experts:
        ok = ok and used > 0 and groups < experts
        if groups > 1:
            ok = ok and experts % groups == 0 and 0 < groups_used < groups
    else:
        ok = ok and groups == 0
    if not ok:
        raise _Bad(f"is damaged: {experts} experts, {used} used, in {groups} groups of which {groups_used} are used")


def _attention(arch: str, metadata: Mapping[str, Value], number: _Number, n_embd: int) -> None:
    if arch in llama_arch.RECURRENT:
        return
    heads, heads_kv = number("attention.head_count", 0), metadata.get(f"{arch}.attention.head_count_kv")
    per_layer = isinstance(heads_kv, np.ndarray) or isinstance(metadata.get(f"{arch}.attention.head_count"), np.ndarray)
    if not heads:
        if arch in llama_arch.HYBRID:
            return
        raise _Bad("is damaged: it has no attention heads")
    n_kv = number("attention.head_count_kv", heads)
    if not per_layer and (not n_kv or heads % n_kv):
        raise _Bad(f"is damaged: {heads} attention heads can't share {n_kv} key/value heads")
    size = number("attention.key_length", n_embd // heads)
    rope = number("rope.dimension_count", size - size % 2)
    if not size or not number("attention.value_length", n_embd // heads):
        raise _Bad(f"is damaged: {heads} attention heads don't fit a hidden size of {n_embd}")
    if rope > size or rope % 2 or (not rope and size > 1 and arch not in _NO_ROPE):
        raise _Bad(f"is damaged: it turns {rope} of {size} elements of a head (rope.dimension_count)")
    if arch == "jamba" and heads * size != n_embd:
        raise _Bad(f"has heads of {size} elements where llama.cpp takes only {n_embd // heads} for {arch}")


def _state_space(arch: str, number: _Number, n_embd: int) -> None:
    inner = number("ssm.inner_size", 0)
    if arch in ("jamba", "granitehybrid") and inner != 2 * n_embd:
        raise _Bad(f"has a state of {inner} elements (ssm.inner_size) where llama.cpp takes only {2 * n_embd}")
    if inner and (not number("ssm.group_count", 1) or not number("ssm.time_step_rank", 1)):
        raise _Bad("is damaged: ssm.group_count or ssm.time_step_rank is 0")


def _window(arch: str, metadata: Mapping[str, Value], number: _Number, n_layer: int) -> None:
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if pattern is None or not number("attention.sliding_window", 0):
        return
    if isinstance(pattern, np.ndarray):
        any_windowed = bool(np.any(pattern[:n_layer]))
    else:
        any_windowed = isinstance(pattern, int) and pattern != 1
    if not any_windowed:
        raise _Bad("is damaged: it has a sliding window, but no layer that uses it (attention.sliding_window_pattern)")


def _norms(arch: str, metadata: Mapping[str, Value]) -> None:
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"):
        epsilon = metadata.get(f"{arch}.{key}")
        if isinstance(epsilon, float) and not (math.isfinite(epsilon) and epsilon >= 0):
            raise _Bad(f"is damaged: {arch}.{key} is {epsilon}")


def _tokenizer(arch: str, metadata: Mapping[str, Value], tokenizer: _Tokenizer) -> str | None:
    model, tokens = tokenizer.model, tokenizer.tokens
    if model not in llama_arch.TOKENIZER_MODELS:
        return f"has a tokenizer of the kind {clip(model)}, which this llama.cpp does not know"
    if not tokens:
        # A draft head may leave the tokenizer to its target; a model without one can't be given a prompt.
        return None if arch in llama_arch.DRAFT_HEADS else "has no tokenizer (tokenizer.ggml.tokens); convert it again"
    if model == "bert":  # asserts over separators that no language model has
        return "has a tokenizer of the kind bert, which is made for encoders; convert it again"
    if model in ("no_vocab", "none"):
        return "lists tokens but names no tokenizer (tokenizer.ggml.model); convert it again"
    # llama.cpp asserts that its map from text to id is as long as the list.
    texts = [t or b"[EMPTY_%d]" % i for i, t in enumerate(tokens)]
    if len(set(texts)) != len(texts):
        first: dict[bytes, int] = {}
        for i, text in enumerate(texts):
            if first.setdefault(text, i) != i:
                return f"is damaged: tokens {first[text]} and {i} have the same text {_show(text)}"
    for flag, name, special in (("add_bos_token", "bos", tokenizer.bos), ("add_eos_token", "eos", tokenizer.eos)):
        wanted = tokenizer.add_bos if name == "bos" else metadata.get(f"tokenizer.ggml.{flag}") is True
        if wanted and special is None:
            return f"adds a {name} token to every text, but names none inside its vocabulary ({name}_token_id)"
    if model == "llama":
        # A byte that no token stands for throws through llama.cpp's C interface when a text holds it.
        known = set(texts)
        missing = [b for b in range(256) if b"<0x%02X>" % b not in known and bytes([b]) not in known]
        if missing:
            return f"has a SentencePiece tokenizer without a token for byte {missing[0]} (<0x{missing[0]:02X}>)"
    if model == "rwkv" and len(_rwkv_bytes(texts)) < 256:
        # llama.cpp's search for the longest match never ends where no match is there.
        return "has an RWKV tokenizer without a token for every single byte; convert it again"
    return None


def _rwkv_bytes(texts: Sequence[bytes]) -> set[int]:
    """The bytes that have a token of their own in a vocabulary that is stored with escapes."""
    found: set[int] = set()
    for text in texts:
        if len(text) == 1:
            found.add(text[0])
        elif len(text) == 2 and text[:1] == b"\\":
            found.add({b"t": 9, b"n": 10, b"r": 13}.get(text[1:], text[1]))
        elif re.fullmatch(rb"\\x[0-9a-f]{2}", text):
            found.add(int(text[2:], 16))
    return found


def _show(text: bytes) -> str:
    return repr(clip(text.decode("utf-8", errors="backslashreplace"), 40))


def _tensors(tensors: Mapping[str, TensorInfo]) -> str | None:
    for tensor in tensors.values():
        if tensor.offset % _TENSOR_ALIGNMENT:
            return f"puts its tensors at multiples of less than {_TENSOR_ALIGNMENT} bytes; convert it again"
        if _ID_TABLE.search(tensor.name):
            continue
        added = len(tensor.shape) == 1 and _ELEMENTWISE.search(tensor.name)
        if tensor.type in _NOT_WEIGHTS or (added and tensor.type != "F32"):
            return f"holds {clip(tensor.name)} as {tensor.type}, which llama.cpp can't compute with; quantise it anew"
    return None
