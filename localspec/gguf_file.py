"""Reading GGUF files: metadata, tokenizers and tensors, and whether llama.cpp can be given the file at all.

Our own reader over mmap: a vocabulary of 150,000 tokens is skipped, not decoded, until somebody asks for it, and a
broken file raises ModelFileError with one line that says what is wrong, never anything else.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from localspec import llama_arch
from localspec.errors import ModelFileError
from localspec.gguf_format import FormatError, StringArray, TensorInfo, Value, clip, describe, parse
from localspec.gguf_guards import first_fault

# Metadata keys of special ids, without "tokenizer.ggml." and "_token_id". Older files say "seperator".
SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
FIM_IDS = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")

_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer as a file describes it. ``tokens`` are the stored texts as bytes (byte-level BPE keeps its alphabet:
    a space is ``Ġ``); ``ids`` holds the special ids that the file names, by short name (``bos``, ``eos``, ``eot``...);
    ``bos``/``eos``/``add_bos`` are what llama.cpp will use, its own defaults included."""

    model: str
    pre: str
    tokens: Sequence[bytes]
    token_types: np.ndarray | None  # i32[V]: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    scores: np.ndarray | None  # f32[V]
    ids: Mapping[str, int]
    bos: int | None
    eos: int | None
    add_bos: bool
    n_merges: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class GGUFFile:
    """An open GGUF file. ``tensors`` are in file order, ``metadata`` maps keys to numbers, text, numpy arrays (views
    into the file) and StringArray."""

    path: Path
    role: str
    version: int
    metadata: Mapping[str, Value]
    tensors: dict[str, TensorInfo]
    data_start: int
    size: int
    _buffer: memoryview = field(repr=False)
    #: each pair's GGUF value type (for an array: its element type, and True)
    types: Mapping[str, tuple[int, bool]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str], role: str = "model") -> GGUFFile:
        """Open ``path``; ``role`` ("target", "draft", ...) only names the file in messages. Raises ModelFileError."""
        shown = f"{role} {clip(os.fspath(path), 400)}"
        try:
            buffer = _map(path, shown)
            contents = parse(buffer)
        except FormatError as e:
            raise ModelFileError(f"{shown} {e}") from None
        return cls(
            Path(path),
            role,
            contents.version,
            contents.metadata,
            contents.tensors,
            contents.data_start,
            len(buffer),
            buffer,
            contents.types,
        )

    def error(self, text: str) -> ModelFileError:
        """A ModelFileError about this file; ``text`` goes on after the name ("has no ...")."""
        return ModelFileError(f"{self.role} {clip(str(self.path), 400)} {text}")

    # -- metadata ---------------------------------------------------------------------------------------------------

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """``metadata[key]`` if it is of the kind asked for, ``default`` if the key is missing; else ModelFileError."""
        value = self.metadata.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(f"is damaged: {clip(key)} holds {describe(value)}; fetch it again")
        return value

    def arch(self, key: str, default: Any = None) -> Any:
        """``metadata["<architecture>.<key>"]``, as it is."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _int(self, key: str, default: int = 0) -> int:
        return int(self.get(f"{self.architecture}.{key}", int, default))

    def per_layer(self, key: str, default: int = 0) -> list[int]:
        """A number that a file may give once or for each layer, as a list of ``n_layer`` numbers."""
        value = self.get(f"{self.architecture}.{key}", (int, np.ndarray), default)
        if isinstance(value, np.ndarray):
            if len(value) != self.n_layer:
                raise self.error(f"is damaged: {key} has {len(value)} entries for {self.n_layer} layers")
            return [int(v) for v in value]
        return [int(value)] * self.n_layer

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture", str, ""))

    @property
    def general_type(self) -> str:
        """``general.type``: model, adapter, mmproj, imatrix; old files don't say and are models."""
        return str(self.get("general.type", str, "model"))

    @property
    def name(self) -> str:
        return str(self.get("general.name", str, "") or self.path.stem)

    @property
    def size_label(self) -> str:
        return str(self.get("general.size_label", str, ""))

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        template: str | None = self.get("tokenizer.chat_template", str)
        return template

    @property
    def n_layer(self) -> int:
        n = self._int("block_count")
        if not 0 <= n <= llama_arch.MAX_LAYERS:
            raise self.error(f"is damaged: it claims {n} layers; fetch it again")
        return n

    @property
    def n_embd(self) -> int:
        return self._int("embedding_length")

    @property
    def n_head(self) -> list[int]:
        """Query heads of each layer."""
        return self.per_layer("attention.head_count")

    @property
    def n_head_kv(self) -> list[int]:
        """Key/value heads of each layer: fewer than ``n_head`` where queries are grouped."""
        if self.arch("attention.head_count_kv") is None:
            return self.n_head
        return self.per_layer("attention.head_count_kv")

    @property
    def key_length(self) -> int:
        return self._int("attention.key_length", self._head_size())

    @property
    def value_length(self) -> int:
        return self._int("attention.value_length", self._head_size())

    def _head_size(self) -> int:
        heads = max(self.n_head, default=0)
        return self.n_embd // heads if heads else 0

    @property
    def n_ctx_train(self) -> int:
        return self._int("context_length")

    @property
    def sliding_window(self) -> int:
        """Positions that a windowed layer sees; 0 without windows."""
        return self._int("attention.sliding_window")

    @property
    def vocab_size(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray):
            return len(tokens)
        embedding = self.tensors.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            return embedding.shape[1]
        return self._int("vocab_size")

    @property
    def file_type(self) -> int | None:
        value: int | None = self.get("general.file_type", int)
        return value

    @property
    def quant_label(self) -> str:
        """The quantisation's usual name, such as Q4_K_M; without one in the file, the type that most bytes have."""
        label = llama_arch.FILE_TYPES.get(self.file_type if self.file_type is not None else -1)
        return label or next(iter(self.type_bytes()), "none")

    def type_bytes(self) -> dict[str, int]:
        """Bytes by tensor type, most first: the quantisation mix."""
        count: Counter[str] = Counter()
        for tensor in self.tensors.values():
            count[tensor.type] += tensor.nbytes
        return dict(count.most_common())

    @cached_property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.tensors.values())

    # -- tokenizer --------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> TokenizerInfo:
        """The tokenizer; ``model`` is "none" and ``tokens`` is empty where the file has none. Raises ModelFileError."""
        prefix = "tokenizer.ggml."
        model = self.get(prefix + "model", str, "none")
        pre = self.get(prefix + "pre", str, "")
        tokens = self.get(prefix + "tokens", StringArray, [])
        merges = self.get(prefix + "merges", StringArray, [])
        ids: dict[str, int] = {}
        for short in SPECIAL_IDS + FIM_IDS:
            value = self.get(f"{prefix}{short}_token_id", int)
            if value is not None:
                ids[short] = value
        default_bos, default_eos = llama_arch.DEFAULT_BOS_EOS.get(model, (None, None))

        def effective(short: str, default: int | None) -> int | None:
            # llama.cpp ignores an id that lies outside the vocabulary, its own default included.
            for candidate in (ids.get(short), default):
                if candidate is not None and 0 <= candidate < len(tokens):
                    return candidate
            return None

        add_bos_default = model in ("llama", "bert") or pre in llama_arch.ADD_BOS_PRE or model == "gemma4"
        return TokenizerInfo(
            model=model,
            pre=pre,
            tokens=tokens,
            token_types=self.get(prefix + "token_type", np.ndarray),
            scores=self.get(prefix + "scores", np.ndarray),
            ids=ids,
            bos=effective("bos", default_bos),
            eos=effective("eos", default_eos),
            add_bos=bool(self.get(prefix + "add_bos_token", bool, add_bos_default)),
            n_merges=len(merges),
        )

    def tokenizer_hash(self) -> str:
        """SHA-256 (hex) over tokenizer model, pre-tokenizer, special ids and every token's text: two files with the
        same hash give and take the same ids. Ties a draft to the target it was made for."""
        tokenizer = self.tokenizer
        digest = hashlib.sha256()
        special = ",".join(f"{k}={v}" for k, v in sorted(tokenizer.ids.items()))
        for text in (tokenizer.model, tokenizer.pre, special):
            digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
        if isinstance(tokenizer.tokens, StringArray):
            digest.update(tokenizer.tokens.raw)  # each text stands behind its length: no two lists look the same
        return digest.hexdigest()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def tensor_bytes(self, name: str) -> memoryview:
        """The stored bytes of a tensor, a view into the file (quantised as they are). Raises ModelFileError."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.error(f"has no tensor {clip(name)}")
        return self._buffer[tensor.offset : tensor.offset + tensor.nbytes]


def require_model(gguf: GGUFFile, role: str | None = None) -> None:
    """Raise ModelFileError unless llama.cpp can run this file as a language model or as a draft head.

    Refuses what is something else (adapter, projector, importance matrix, a part of a split model, vocabulary only, an
    encoder, an unknown architecture), and what would abort the process inside llama.cpp instead of failing to load.
    ``role`` is "target", "draft" or "model"; a target must run on its own, so a draft head is refused there.
    """
    if role is not None:
        gguf.role = role
    fault = _not_a_model(gguf)
    if fault is None and gguf.architecture in llama_arch.DRAFT_HEADS and gguf.role == "target":
        fault = (
            f"is a draft head ({gguf.architecture}) that works only beside its target; give it as --draft, and the "
            "model it was made for as --target"
        )
    if fault is None:
        fault = first_fault(gguf.architecture, gguf.metadata, gguf.tensors, gguf.tokenizer)
    if fault is not None:
        raise gguf.error(fault)


def _not_a_model(gguf: GGUFFile) -> str | None:
    metadata, arch, kind = gguf.metadata, gguf.architecture, gguf.general_type
    if kind == "adapter" or "adapter.type" in metadata or arch == "controlvector":
        return "is an adapter (LoRA or control vector), not a model; merge it into its base model, or give that model"
    if kind == "mmproj" or arch == "clip" or any(k.startswith("clip.") for k in metadata):
        return "is a projector (mmproj) for images or audio, not a language model; give the model's own file"
    if kind == "imatrix" or arch == "imatrix" or any(k.startswith("imatrix.") for k in metadata):
        return "is an importance matrix for quantising, not a model; give the model's own file"
    named = _SPLIT_NAME.search(gguf.path.name)
    n_parts = gguf.get("split.count", int, int(named[2]) if named else 1)
    if n_parts > 1:
        return (
            f"is one part of a model split into {n_parts} files; merge them first: "
            "llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        )
    if not arch:
        return "names no architecture (general.architecture); it is no model that llama.cpp could run"
    shown = clip(arch)
    if arch not in llama_arch.KNOWN:
        return f"has the architecture {shown}, which {llama_arch.LLAMA_CPP} does not know"
    if arch in llama_arch.ENCODER_ONLY:
        return f"is an encoder ({shown}): it embeds text and can't write any; give a language model"
    if arch in llama_arch.ENCODER_DECODER:
        return f"is an encoder-decoder model ({shown}), which localspec can't run; give a decoder-only model"
    if arch in llama_arch.DIFFUSION:
        return f"is a diffusion model ({shown}): it does not write from left to right, so there is nothing to draft"
    if arch in llama_arch.SPEECH:
        return f"is a speech model ({shown}), not a language model"
    if not gguf.tensors:
        return "holds a vocabulary only and no weights; give the whole model"
    return None


def _map(path: str | os.PathLike[str], shown: str) -> memoryview:
    """The file's bytes. Looks before it opens: opening a pipe would wait for ever."""
    try:
        mode = os.stat(path)
        if stat.S_ISDIR(mode.st_mode):
            inside = sorted(p.name for p in Path(path).glob("*.gguf"))
            hint = f", for example {clip(inside[0])} in it" if inside else "; there is no .gguf in it"
            raise ModelFileError(f"{shown} is a directory; give the .gguf file itself{hint}")
        if not stat.S_ISREG(mode.st_mode):
            raise ModelFileError(f"{shown} is not a regular file; give a .gguf file on disk")
        if mode.st_size == 0:
            raise ModelFileError(f"{shown} is empty (0 bytes); fetch it again")
        with open(path, "rb") as f:
            return memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ModelFileError(f"{shown} does not exist; check the path") from None
    except PermissionError:
        raise ModelFileError(f"{shown} can't be read: permission denied; check its owner and mode") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ModelFileError(f"{shown} can't be read: {reason}") from None
