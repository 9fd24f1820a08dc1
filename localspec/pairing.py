"""Whether two models can work together, how, and whether a model can go back: from their files alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

from localspec import gemma4, llama_arch
from localspec.errors import PairingError
from localspec.gguf_file import GGUFFile, TokenizerInfo
from localspec.gguf_format import clip
from localspec.memory import MemoryNeed, memory_needed
from localspec.speculator import JSON_KEY, SpeculatorConfig

__all__ = ["MemoryNeed", "can_draft", "check_pair", "drafter_for", "is_dspark", "llama_spec_type",
           "memory_needed", "own_heads", "rollback_of"]  # fmt: skip

# Names that converters give to ids without a meaning, there to round a vocabulary up.
_PADDING = re.compile(
    rb"\[PAD\d*\]|<\|?(?:pad|unused|reserved|dummy|extra|placeholder)[a-z_]*[-_ ]?\d+(?:_id)?\|?>|\[unused\d+\]", re.I
)
_NORMAL, _BYTE, _UNUSED = 1, 6, 5

# Only byte-level BPE has a pre-tokenizer; llama.cpp takes these names for one and the same.
_BPE = ("gpt2", "gemma4", "hybriddna", "whitespace")
_PRE_ALIASES = {"": "default", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}

_HEAD_EXTRACTS = {"eagle3": 3}


def check_pair(target: GGUFFile, draft: GGUFFile) -> None:
    """Raise PairingError, naming the first difference, unless ``draft`` can propose tokens for ``target``.

    Compares pre-tokenizer, special ids, whether a bos token is added, and the text of every token; vocabularies may
    differ only in unused padding ids at their end. A draft head must also fit the target's hidden size and layers.
    """
    fault = _tokenizer_difference(target.tokenizer, draft.tokenizer, draft.architecture in llama_arch.DRAFT_HEADS)
    if fault is None and draft.architecture in llama_arch.DRAFT_HEADS:
        fault = _head_misfit(target, draft)
    if fault is not None:
        raise PairingError(
            f"{clip(draft.path.name, 120)} can't draft for {clip(target.path.name, 120)}: {fault}; "
            "take a draft made for this target"
        )


def drafter_for(draft: GGUFFile) -> str:
    """The drafter that runs this draft, by its ``general.architecture``: "lm" for an ordinary language model, the name of
    a head's own drafter otherwise. Raises PairingError for a head that this version has no drafter for."""
    name = llama_arch.DRAFT_HEADS.get(draft.architecture, "lm")
    # By file, without importing: the drafters' package stands above this module and loads llama.cpp.
    if PathFinder.find_spec(name, [str(Path(__file__).parent / "drafters")]) is None:
        raise PairingError(
            f"{clip(draft.path.name, 120)} is a draft of the architecture {draft.architecture}, which is not supported "
            "in this version; take a small language model as draft, or --spec-type ngram"
        )
    return name


def is_dspark(draft: GGUFFile) -> bool:
    """Whether a draft of the architecture dflash has a Markov head."""
    return draft.architecture == "dflash" and "markov_w1.weight" in draft.tensors


def llama_spec_type(drafter: str, draft: GGUFFile | None) -> str:
    """What llama-server calls this drafter with this draft; of two drafters ("ngram,lm"), each."""
    first, _, last = drafter.rpartition(",")
    name = llama_arch.SPEC_TYPES["dspark" if draft is not None and is_dspark(draft) else last]
    return f"{llama_arch.SPEC_TYPES[first]},{name}" if first else name


def rollback_of(gguf: GGUFFile) -> tuple[str, str]:
    """How refused tokens are taken out of this model's memory again: ("trim", "states" or "snapshot", the same in words).
    Whether it works is tried out by the session (target.py)."""
    arch = gguf.architecture
    if arch in llama_arch.BOUNDED_ROLLBACK:
        return "states", "its recurrent state is kept as it was after each token of a block"
    if arch in llama_arch.RECURRENT | llama_arch.HYBRID:
        return "snapshot", "its recurrent state is copied before a block; after a refusal what was kept is decoded again"
    return "trim", "its cache can be cut back"


def can_draft(gguf: GGUFFile) -> tuple[bool, str]:
    """Whether this language model can draft, and why not: it must go back over tokens that it read one by one."""
    arch = gguf.architecture
    if arch in llama_arch.RECURRENT:
        return False, f"{arch} is recurrent: its state can't be cut back to where a draft began"
    if arch in llama_arch.HYBRID:
        return False, f"{arch} is a hybrid with recurrent layers: their state can't be cut back to where a draft began"
    return True, ""


def own_heads(gguf: GGUFFile) -> tuple[int, str]:
    """(next-token heads in this file that can draft for it: 1, or 0; why not, as the end of a sentence about the file)."""
    arch = gguf.architecture
    n = gguf.get(f"{arch}.nextn_predict_layers", int, 0)
    there = n > 0 and any(f"blk.{gguf.n_layer - n}.nextn.eh_proj." in name for name in gguf.tensors)
    if arch in llama_arch.DRAFT_HEADS or not there:
        return 0, "has no next-token head of its own"
    if arch not in llama_arch.NEXTN_HEADS:
        return 0, f"has a next-token head, which this llama.cpp has no graph for ({arch})"
    if n > 1:
        return 0, f"has {n} next-token heads, one for each drafted token; one that is used again and again is supported"
    return 1, ""


def _tokenizer_difference(target: TokenizerInfo, draft: TokenizerInfo, is_head: bool) -> str | None:
    if is_head and not draft.tokens:
        return None  # the head speaks in the target's ids
    if target.model != draft.model:
        return f"the tokenizers are of different kinds (target {clip(target.model)}, draft {clip(draft.model)})"
    if target.model in _BPE:
        pre_t, pre_d = (_PRE_ALIASES.get(t.pre, t.pre) for t in (target, draft))
        if pre_t != pre_d:
            return f"the pre-tokenizers differ (target {clip(pre_t)}, draft {clip(pre_d)})"
    if target.add_bos != draft.add_bos:
        which = "target" if target.add_bos else "draft"
        return f"only the {which} puts a bos token before every text"
    if target.add_bos and target.bos != draft.bos:
        return _id_difference("bos", target, draft, target.bos, draft.bos)
    # Only the ids that begin or end a text; which id pads a batch, say, changes nothing here.
    for name in ("bos", "eos", "eot", "eom"):
        ids = target.ids.get(name), draft.ids.get(name)
        if None not in ids and ids[0] != ids[1]:
            return _id_difference(name, target, draft, *ids)
    return _token_difference(target, draft)


def _id_difference(name: str, target: TokenizerInfo, draft: TokenizerInfo, id_t: int | None, id_d: int | None) -> str:
    return f"the {name} token differs (target {_token(target, id_t)}, draft {_token(draft, id_d)})"


def _token(tokenizer: TokenizerInfo, i: int | None) -> str:
    if i is None:
        return "none"
    return f"{i} {_quote(tokenizer.tokens[i])}" if 0 <= i < len(tokenizer) else str(i)


def _quote(text: bytes) -> str:
    return repr(clip(text.decode("utf-8", errors="backslashreplace"), 40))


def _token_difference(target: TokenizerInfo, draft: TokenizerInfo) -> str | None:
    a, b = target.tokens, draft.tokens
    same = min(len(a), len(b))
    first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), same)
    if first == len(a) == len(b):
        return None
    if first >= _used(target) and first >= _used(draft):
        return None
    if first < same:
        return f"token {first} is {_quote(a[first])} in the target and {_quote(b[first])} in the draft"
    longer, which = (target, "target") if len(a) > len(b) else (draft, "draft")
    first = next(i for i in range(first, len(longer)) if not _is_padding(longer, i))
    return (
        f"the vocabularies have {len(a)} (target) and {len(b)} (draft) tokens, and token {first}, "
        f"{_quote(longer.tokens[first])}, is only in the {which}"
    )


def _used(tokenizer: TokenizerInfo) -> int:
    """The number of tokens up to the last one that isn't padding."""
    n = len(tokenizer)
    while n and _is_padding(tokenizer, n - 1):
        n -= 1
    return n


def _is_padding(tokenizer: TokenizerInfo, i: int) -> bool:
    types = tokenizer.token_types
    kind = int(types[i]) if types is not None and i < len(types) else None
    if kind in (_NORMAL, _BYTE) or i in tokenizer.ids.values():
        return False
    return kind == _UNUSED or _PADDING.fullmatch(tokenizer.tokens[i]) is not None


def _head_misfit(target: GGUFFile, draft: GGUFFile) -> str | None:
    arch = draft.architecture
    if arch == gemma4.ARCHITECTURE:
        fault = gemma4.misfit(target, draft)
        if fault is not None:
            return fault
    hidden = draft.get(f"{arch}.target_hidden_size", int)
    if hidden is None and arch == "dflash":
        hidden = draft.n_embd  # DFlash works in the target's own width
    if hidden is not None and hidden != target.n_embd:
        return f"it was made for a hidden size of {hidden}, the target has {target.n_embd}"
    if JSON_KEY in draft.metadata:
        made_for = SpeculatorConfig.from_gguf(draft).target
        if made_for.n_layer != target.n_layer:
            return f"it was made for {clip(made_for.name)} of {made_for.n_layer} layers, the target has {target.n_layer}"
    layers = draft.get(f"{arch}.target_layers", (np.ndarray, int))
    taps: Sequence[int] = [] if layers is None else [int(i) for i in np.atleast_1d(layers)]
    if arch in ("eagle3", "dflash") and not taps:
        return f"it does not say which of the target's layers it reads ({arch}.target_layers)"
    if arch in _HEAD_EXTRACTS and len(taps) != _HEAD_EXTRACTS[arch]:
        return f"it reads {len(taps)} of the target's layers where {arch} reads {_HEAD_EXTRACTS[arch]}"
    last = target.n_layer + (arch == gemma4.ARCHITECTURE)  # it reads the state after the last norm, too
    beyond = [i for i in taps if not 0 <= i <= last]
    if beyond:
        return f"it reads layer {beyond[0]}, the target has {target.n_layer}"
    table = draft.tensors.get("d2t")
    if table is not None:
        if table.type not in ("I64", "I32"):
            return f"its table of token ids (d2t) is of the type {table.type}"
        ids = np.frombuffer(draft.tensor_bytes("d2t"), "<i8" if table.type == "I64" else "<i4")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < target.vocab_size):
            wrong = next(int(i) for i in ids if not 0 <= i < target.vocab_size)
            return f"its table of token ids (d2t) names id {wrong}, the target has {target.vocab_size} tokens"
    return None
