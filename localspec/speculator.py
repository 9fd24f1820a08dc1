"""What a speculator is, in one record: whom it drafts for, what it reads, its shape, and how it was made.

Stored as JSON beside a checkpoint's weights, and in a GGUF file twice: as the keys that llama.cpp reads, and as the same
JSON under ``localspec.speculator``. A reader that finds the two at odds says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from localspec.errors import ModelFileError, PairingError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import clip, describe

JSON_KEY = "localspec.speculator"
CHECKPOINT_FILE = "localspec.json"

MAX_LAYERS = 1024
MIN_EPS, MAX_EPS = 1e-20, 0.1
MAX_BASE = 1e15  # of a rope
_MOST = (1 << 31) - 1

KeyValue = int | float | bool | str | list[int]


@dataclass(frozen=True)
class TargetIdentity:
    """What a draft must find in a target to draft for it. ``n_embd`` is the width of its hidden states, ``n_vocab`` its
    number of tokens, ``tokenizer_hash`` that of ``GGUFFile.tokenizer_hash``. ``name`` is for people; it binds nothing."""

    name: str
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    tokenizer_hash: str

    @classmethod
    def of(cls, gguf: GGUFFile) -> Self:
        return cls(gguf.name, gguf.architecture, gguf.n_layer, gguf.n_embd, gguf.vocab_size, gguf.tokenizer_hash())

    def difference(self, other: TargetIdentity) -> str | None:
        """The first thing that ``other`` has differently ("has 24 layers, not 30"), None where it is the same model by
        shape and tokenizer. The architecture may differ in name: a qwen2 file rewritten as llama is the same target."""
        for name, words in (("n_layer", "layers"), ("n_embd", "hidden dimensions"), ("n_vocab", "tokens")):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"has {theirs} {words}, not {mine}"
        if self.tokenizer_hash != other.tokenizer_hash:
            return f"has another tokenizer (hash {clip(other.tokenizer_hash, 12)}, not {clip(self.tokenizer_hash, 12)})"
        return None

    def require(self, other: TargetIdentity, what: str) -> None:
        """Raise PairingError unless ``other`` is this target; ``what`` was made for this one and begins the message."""
        difference = self.difference(other)
        if difference is not None:
            names = clip(self.name, 80), clip(other.name, 80)
            made = f"{what} was made for {names[0]}, and {names[1]} {difference}"
            raise PairingError(f"{made}; give the target it was made for")


@dataclass(frozen=True)
class SpeculatorConfig:
    """A speculator's shape and origin.

    ``taps`` are counted in the target's layers already applied (0: its embeddings). ``draft_vocab`` is the size of a reduced
    vocabulary, 0 where the draft speaks all of the target's tokens. ``depth`` is the number of tokens in a row that it
    was trained to draft, ``window`` the number of positions that its attention sees (0: all). ``architecture`` is the file's
    ``general.architecture``, empty where that is the method's own name. ``extra`` holds what only one method has, by the
    key's name behind the architecture (``block_size``). ``provenance`` says how it was made: tokens, steps, optimiser,
    acceptance, version.
    """

    method: str
    target: TargetIdentity
    taps: tuple[int, ...]
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_layer: int = 1
    rms_eps: float = 1e-5
    rope_base: float = 10000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    draft_vocab: int = 0
    depth: int = 1
    window: int = 0
    n_ctx_train: int = 2048
    architecture: str = ""
    extra: Mapping[str, KeyValue] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arch(self) -> str:
        """``general.architecture`` of its file, which begins the names of its keys."""
        return self.architecture or self.method

    # -- JSON -------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """The config that ``to_json`` wrote; ``where`` names its place in messages. Raises ModelFileError for anything
        else: missing or unknown keys, values of the wrong kind."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ModelFileError(f"{where} is no valid JSON; write it again by the command that made it") from None
        data = _checked(cls, data, where)
        target = TargetIdentity(**_checked(TargetIdentity, data.pop("target"), f"{where}, target,"))
        _check_ranges(data, where)
        return cls(target=target, **data)

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        """Of a checkpoint directory. Raises ModelFileError."""
        path = checkpoint / CHECKPOINT_FILE
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or "not text"
            shown = clip(str(path), 400)
            raise ModelFileError(f"{shown} can't be read ({reason}); is this a checkpoint's directory?") from None
        return cls.from_json(text, clip(str(path), 400))

    # -- GGUF -------------------------------------------------------------------------------------------------------

    def shape_keys(self) -> dict[str, KeyValue]:
        """The keys that llama.cpp reads, without the tokenizer's."""
        keys: dict[str, KeyValue] = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head_dim,
            "vocab_size": self.target.n_vocab,
        }
        if self.taps:
            keys["target_layers"] = list(self.taps)
            keys["target_hidden_size"] = self.target.n_embd
            keys["norm_before_residual"] = self.norm_before_residual
            keys["norm_before_fc"] = self.norm_before_fc
        if self.window:
            keys["attention.sliding_window"] = self.window
        return {f"{self.arch}.{name}": value for name, value in (keys | dict(self.extra)).items()}

    def to_gguf_keys(self) -> dict[str, KeyValue]:
        """All keys of a GGUF file but the tokenizer's: int values are u32, floats f32, lists arrays of i32."""
        return {"general.architecture": self.arch, **self.shape_keys(), JSON_KEY: self.to_json()}

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> Self:
        """Of a draft's file: of our JSON where it has one, of llama.cpp's keys alone where others made it (the target's
        name and layers are then unknown: empty and 0). Raises ModelFileError where the two are at odds."""
        text = gguf.get(JSON_KEY, str)
        if text is None:
            return cls._from_keys(gguf)
        config = cls.from_json(text, f"{gguf.role} {clip(str(gguf.path), 400)}, {JSON_KEY},")
        if config.arch != gguf.architecture:
            raise gguf.error(f"contradicts itself: architecture {clip(gguf.architecture)}, {JSON_KEY} {clip(config.arch)}")
        for key, ours in config.shape_keys().items():
            theirs = gguf.metadata.get(key)
            if not _same(ours, theirs):
                shown = "nothing" if theirs is None else _show(theirs)
                raise gguf.error(f"contradicts itself: {key} is {shown}, {JSON_KEY} says {_show(ours)}; convert it again")
        return config

    @classmethod
    def _from_keys(cls, gguf: GGUFFile) -> Self:
        arch = gguf.architecture

        def get(key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
            return gguf.get(f"{arch}.{key}", kind, default)

        taps = get("target_layers", (np.ndarray, int))
        table = gguf.tensors.get("d2t")
        width = int(get("target_hidden_size", int, gguf.n_embd))
        n_vocab = gguf.vocab_size
        hashed = gguf.tokenizer_hash() if len(gguf.tokenizer) else ""
        return cls(
            method=arch,
            target=TargetIdentity("", "", 0, width, n_vocab, hashed),
            taps=() if taps is None else tuple(int(i) for i in np.atleast_1d(taps)),
            n_embd=gguf.n_embd,
            n_head=max(gguf.n_head, default=0),
            n_head_kv=max(gguf.n_head_kv, default=0),
            head_dim=gguf.key_length,
            n_ff=int(get("feed_forward_length", int, 0)),
            n_layer=gguf.n_layer,
            rms_eps=float(get("attention.layer_norm_rms_epsilon", float, 1e-5)),
            rope_base=float(get("rope.freq_base", float, 10000.0)),
            norm_before_residual=get("norm_before_residual", bool, False),
            norm_before_fc=get("norm_before_fc", bool, False),
            draft_vocab=table.n_elements if table is not None else 0,
            window=gguf.sliding_window,
            n_ctx_train=gguf.n_ctx_train,
        )


_OPTIONAL = ("architecture", "extra", "provenance")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "float": (int, float),
    "tuple[int, ...]": list,
}


def _checked(cls: type, data: Any, where: str) -> dict[str, Any]:
    """``data`` as keyword arguments of a dataclass, each of its declared kind."""
    if not isinstance(data, dict):
        raise ModelFileError(f"{where} holds {describe(data)} where an object should stand")
    declared = {f.name: f for f in fields(cls)}
    for name in data:
        if name not in declared:
            raise ModelFileError(f"{where} has the key {clip(name)}, which this version does not know")
    required = [f for f in fields(cls) if f.name not in _OPTIONAL or (f.default is MISSING and f.default_factory is MISSING)]
    for name in [f.name for f in required if f.name not in data]:
        raise ModelFileError(f"{where} lacks the key {name}")
    for name, value in data.items():
        kind = _KINDS.get(str(declared[name].type), dict)
        ok = isinstance(value, kind) and (not isinstance(value, bool) or kind is bool)
        if kind is list and ok:
            ok = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not ok:
            raise ModelFileError(f"{where} has a {name} of the wrong kind ({clip(repr(value))})")
    return {k: tuple(v) if declared[k].type == "tuple[int, ...]" else v for k, v in data.items()}


#: key -> least and most value
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("n_embd", "n_head", "n_head_kv", "head_dim", "n_ff", "n_ctx_train"), (1, _MOST)),
    "n_layer": (1, MAX_LAYERS), "draft_vocab": (0, _MOST), "window": (0, _MOST), "depth": (1, MAX_LAYERS),
    "rms_eps": (MIN_EPS, MAX_EPS), "rope_base": (1, MAX_BASE),
}  # fmt: skip


def _check_ranges(data: Mapping[str, Any], where: str) -> None:
    """Raise ModelFileError, naming it, for a value that no draft can have."""
    for name, (least, most) in _RANGES.items():
        if not least <= data.get(name, least) <= most:  # a NaN isn't, either
            raise ModelFileError(f"{where} has a {name} of {clip(repr(data[name]))}; {least:g} to {most:g} is possible")
    if not all(0 <= tap <= _MOST for tap in data["taps"]):
        raise ModelFileError(f"{where} has taps that can't be ({clip(repr(data['taps']))})")
    for key, value in data.get("extra", {}).items():
        numbers = value if isinstance(value, list) else [value]
        is_number = all(isinstance(n, int | float) and -_MOST <= n <= _MOST for n in numbers)
        if not (isinstance(value, str) or is_number):
            raise ModelFileError(f"{where} has a value for {clip(key)} in extra that can't be ({clip(repr(value))})")


def _same(ours: KeyValue, theirs: Any) -> bool:
    if isinstance(theirs, np.ndarray):
        theirs = theirs.tolist()
    if isinstance(ours, float):  # stored as f32
        number = isinstance(theirs, int | float) and not isinstance(theirs, bool)
        return number and math.isclose(ours, theirs, rel_tol=1e-6)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _show(value: Any) -> str:
    return clip(str(value.tolist() if isinstance(value, np.ndarray) else value), 80)
