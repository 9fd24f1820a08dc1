"""Tiny GGUF files for tests: models that llama.cpp really loads and decodes, drafts that are bad on purpose, and files
that are broken in one way each. Everything is a function of its arguments: the same call writes the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES, StringArray
from localspec.llama_arch import FILE_TYPES

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL, CONTROL, UNUSED = 1, 3, 5
_TEXT = (
    "the cat sat on the mat and then the other cat came in and sat there too while the rain fell on the tin roof and "
    "they listened to it together until the sun was out again over the hill and the river that ran to the sea"
)
_QTYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
_FILE_TYPE = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2, "q4_1": 3}


# -- tokenizers -------------------------------------------------------------------------------------------------------


@cache
def bpe(n_merges: int = 48) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A byte-level BPE trained on a fixed sentence: (token texts, merges)."""
    keep = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    letters = {b: chr(b) for b in keep}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    tokens = [letters[b] for b in range(256)]
    words = [[letters[b] for b in w] for w in _TEXT.replace(" ", "\n ").encode().split(b"\n")]
    merges = []
    for _ in range(n_merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (a, b), _n = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        merges.append(f"{a} {b}")
        tokens.append(a + b)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (a, b):
                    word[i : i + 2] = [a + b]
                i += 1
    return tuple(tokens), tuple(merges)


def tokenizer_keys(vocab: int = 320, chat_template: str | None = CHATML) -> dict[str, Any]:
    """``tokenizer.*`` of a small gpt2-style vocabulary: 256 bytes, merges, three special tokens, then padding."""
    n_merges = min(48, vocab - 256 - len(SPECIAL))
    if n_merges < 1:
        raise ValueError(f"a byte-level vocabulary needs at least {257 + len(SPECIAL)} tokens")
    tokens, merges = bpe(n_merges)
    base = len(tokens)
    texts = [*tokens, *SPECIAL]
    types = [NORMAL] * base + [CONTROL] * len(SPECIAL)
    while len(texts) < vocab:
        texts.append(f"[PAD{len(texts)}]")
        types.append(UNUSED)
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": base,
        "tokenizer.ggml.eos_token_id": base + 2,
        "tokenizer.ggml.padding_token_id": base,
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template:
        keys["tokenizer.chat_template"] = chat_template
    return keys


def copied_tokenizer(like: Path | str) -> dict[str, Any]:
    """All ``tokenizer.*`` keys of an existing file."""
    return {k: v for k, v in GGUFFile.open(like).metadata.items() if k.startswith("tokenizer.")}


# -- writing ----------------------------------------------------------------------------------------------------------


def write(
    path: Path | str,
    arch: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """Write a GGUF. ``keys`` are full names; ints become u32, floats f32. A tensor given with a type is raw bytes."""
    path = Path(path)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool | np.bool_):
            writer.add_bool(key, bool(value))
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, StringArray):
            writer.add_array(key, value.items())
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Weights:
    """Random weights by name, from one seed. Shapes are numpy's: rows first (GGUF stores them reversed)."""

    def __init__(self, seed: int, ftype: str) -> None:
        self.rng, self.ftype, self.out = np.random.default_rng(seed), ftype, {}

    def matrix(self, name: str, rows: int, cols: int, std: float | None = None) -> None:
        w = self.rng.standard_normal((rows, cols), np.float32) * np.float32(std if std else cols**-0.5)
        kind = _QTYPES[self.ftype]
        self.out[name] = w if self.ftype == "f32" else (gguf.quantize(w, kind), kind)

    def ones(self, name: str, n: int) -> None:
        self.out[name] = np.ones(n, np.float32)

    def exact(self, name: str, value: np.ndarray) -> None:
        self.out[name] = np.ascontiguousarray(value, np.float32)


def _general(name: str, ftype: str) -> dict[str, Any]:
    return {"general.type": "model", "general.name": name, "general.file_type": _FILE_TYPE[ftype]}


def _vocab(keys: Mapping[str, Any]) -> int:
    return len(keys["tokenizer.ggml.tokens"])


# -- models -----------------------------------------------------------------------------------------------------------


def tiny_llama(
    path: Path | str,
    vocab: int = 320,
    n_layer: int = 2,
    n_embd: int = 64,
    seed: int = 0,
    ftype: str = "f32",
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ctx: int = 512,
    logit_std: float = 2.0,
    tokenizer: Mapping[str, Any] | None = None,
    arch: str = "llama",
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A random llama. ``logit_std`` is about the standard deviation of its logits: higher is surer of itself.
    ``tokenizer`` (keys ``tokenizer.*``) takes the place of the small one; ``extra`` adds or replaces keys."""
    keys = dict(tokenizer) if tokenizer is not None else tokenizer_keys(vocab)
    size, n_ff = n_embd // n_head, 2 * n_embd
    w = _Weights(seed, ftype)
    w.matrix("token_embd.weight", _vocab(keys), n_embd, 1.0)
    w.ones("output_norm.weight", n_embd)
    w.matrix("output.weight", _vocab(keys), n_embd, logit_std * n_embd**-0.5)
    for i in range(n_layer):
        b = f"blk.{i}."
        w.ones(b + "attn_norm.weight", n_embd)
        w.matrix(b + "attn_q.weight", n_embd, n_embd)
        w.matrix(b + "attn_k.weight", n_head_kv * size, n_embd)
        w.matrix(b + "attn_v.weight", n_head_kv * size, n_embd)
        w.matrix(b + "attn_output.weight", n_embd, n_embd)
        w.ones(b + "ffn_norm.weight", n_embd)
        w.matrix(b + "ffn_gate.weight", n_ff, n_embd)
        w.matrix(b + "ffn_up.weight", n_ff, n_embd)
        w.matrix(b + "ffn_down.weight", n_embd, n_ff)
    config = {
        "block_count": n_layer,
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": size,
        "rope.freq_base": 10000.0,
        "vocab_size": _vocab(keys),
    }
    named = {f"{arch}.{k}": v for k, v in config.items()}
    return write(path, arch, _general(f"tiny {arch}", ftype) | named | keys | dict(extra or {}), w.out)


def random_draft(
    path: Path | str, like: Path | str, n_layer: int = 1, n_embd: int = 64, seed: int = 0, ftype: str = "f16"
) -> Path:
    """A random llama with exactly the tokenizer of ``like``: a draft that fits and is bad on purpose."""
    keys = copied_tokenizer(like)
    return tiny_llama(path, n_layer=n_layer, n_embd=n_embd, seed=seed, ftype=ftype, tokenizer=keys, n_ctx=32768)


def tiny_gemma3(
    path: Path | str, vocab: int = 320, n_layer: int = 7, window: int = 32, seed: int = 0, n_ctx: int = 512
) -> Path:
    """A random gemma3: five windowed layers, then a full one, as in the real ones. A tiny sliding-window model."""
    keys, n_embd, n_head, n_head_kv, size, n_ff = tokenizer_keys(vocab), 64, 4, 1, 16, 128
    w = _Weights(seed, "f32")
    w.matrix("token_embd.weight", vocab, n_embd, 0.25)
    w.matrix("output.weight", vocab, n_embd, 2.0 * n_embd**-0.5)
    w.ones("output_norm.weight", n_embd)
    for i in range(n_layer):
        b = f"blk.{i}."
        for name, n in (
            ("attn_norm", n_embd),
            ("attn_q_norm", size),
            ("attn_k_norm", size),
            ("post_attention_norm", n_embd),
            ("ffn_norm", n_embd),
            ("post_ffw_norm", n_embd),
        ):
            w.ones(f"{b}{name}.weight", n)
        w.matrix(b + "attn_q.weight", n_head * size, n_embd)
        w.matrix(b + "attn_k.weight", n_head_kv * size, n_embd)
        w.matrix(b + "attn_v.weight", n_head_kv * size, n_embd)
        w.matrix(b + "attn_output.weight", n_embd, n_head * size)
        w.matrix(b + "ffn_gate.weight", n_ff, n_embd)
        w.matrix(b + "ffn_up.weight", n_ff, n_embd)
        w.matrix(b + "ffn_down.weight", n_embd, n_ff)
    config = {
        "gemma3.block_count": n_layer,
        "gemma3.context_length": n_ctx,
        "gemma3.embedding_length": n_embd,
        "gemma3.feed_forward_length": n_ff,
        "gemma3.attention.head_count": n_head,
        "gemma3.attention.head_count_kv": n_head_kv,
        "gemma3.attention.key_length": size,
        "gemma3.attention.value_length": size,
        "gemma3.attention.sliding_window": window,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1000000.0,
    }
    return write(path, "gemma3", _general("tiny gemma3", "f32") | config | keys, w.out)


def _mamba_layer(w: _Weights, b: str, n_embd: int, n_state: int, n_conv: int, rank: int, norms: bool) -> None:
    inner = 2 * n_embd
    w.matrix(b + "ssm_in.weight", 2 * inner, n_embd)
    w.exact(b + "ssm_conv1d.weight", w.rng.standard_normal((inner, n_conv)) * 0.5)
    w.exact(b + "ssm_conv1d.bias", np.zeros(inner))
    w.matrix(b + "ssm_x.weight", rank + 2 * n_state, inner)
    w.exact(b + "ssm_dt.weight", w.rng.standard_normal((inner, rank)) * 0.3)
    w.exact(b + "ssm_dt.bias", np.full(inner, -2.0))
    w.exact(b + "ssm_a", -np.tile(np.arange(1, n_state + 1), (inner, 1)))
    w.exact(b + "ssm_d", np.ones(inner))
    w.matrix(b + "ssm_out.weight", n_embd, inner)
    if norms:
        for name, n in (("dt", rank), ("b", n_state), ("c", n_state)):
            w.ones(f"{b}ssm_{name}_norm.weight", n)


def _ssm_config(arch: str, n_embd: int, n_state: int, n_conv: int, rank: int, n_ctx: int) -> dict[str, Any]:
    return {
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.ssm.conv_kernel": n_conv,
        f"{arch}.ssm.inner_size": 2 * n_embd,
        f"{arch}.ssm.state_size": n_state,
        f"{arch}.ssm.time_step_rank": rank,
    }


def tiny_mamba(path: Path | str, vocab: int = 320, n_layer: int = 2, seed: int = 0, n_ctx: int = 512) -> Path:
    """A random mamba: a recurrent model, whose state can't be cut back."""
    keys, n_embd, n_state, n_conv, rank = tokenizer_keys(vocab), 64, 16, 4, 4
    w = _Weights(seed, "f32")
    w.matrix("token_embd.weight", vocab, n_embd, 1.0)
    w.ones("output_norm.weight", n_embd)
    w.matrix("output.weight", vocab, n_embd, 2.0 * n_embd**-0.5)
    for i in range(n_layer):
        w.ones(f"blk.{i}.attn_norm.weight", n_embd)
        _mamba_layer(w, f"blk.{i}.", n_embd, n_state, n_conv, rank, norms=False)
    config = _ssm_config("mamba", n_embd, n_state, n_conv, rank, n_ctx) | {
        "mamba.block_count": n_layer,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
    }
    return write(path, "mamba", _general("tiny mamba", "f32") | config | keys, w.out)


def tiny_jamba(path: Path | str, vocab: int = 320, seed: int = 0, n_ctx: int = 512) -> Path:
    """A random jamba of two layers, one recurrent and one with attention: a hybrid model."""
    keys, n_embd, n_state, n_conv, rank, n_head, n_ff = tokenizer_keys(vocab), 64, 16, 4, 4, 4, 128
    w = _Weights(seed, "f32")
    w.matrix("token_embd.weight", vocab, n_embd, 1.0)
    w.ones("output_norm.weight", n_embd)
    w.matrix("output.weight", vocab, n_embd, 2.0 * n_embd**-0.5)
    for i, n_head_kv in enumerate((0, 2)):
        b = f"blk.{i}."
        w.ones(b + "attn_norm.weight", n_embd)
        if n_head_kv:
            w.matrix(b + "attn_q.weight", n_embd, n_embd)
            w.matrix(b + "attn_k.weight", n_head_kv * n_embd // n_head, n_embd)
            w.matrix(b + "attn_v.weight", n_head_kv * n_embd // n_head, n_embd)
            w.matrix(b + "attn_output.weight", n_embd, n_embd)
        else:
            _mamba_layer(w, b, n_embd, n_state, n_conv, rank, norms=True)
        w.ones(b + "ffn_norm.weight", n_embd)
        w.matrix(b + "ffn_gate.weight", n_ff, n_embd)
        w.matrix(b + "ffn_up.weight", n_ff, n_embd)
        w.matrix(b + "ffn_down.weight", n_embd, n_ff)
    config = _ssm_config("jamba", n_embd, n_state, n_conv, rank, n_ctx) | {
        "jamba.block_count": 2,
        "jamba.feed_forward_length": n_ff,
        "jamba.attention.head_count": n_head,
        "jamba.attention.head_count_kv": [0, 2],
        "jamba.vocab_size": vocab,
    }
    return write(path, "jamba", _general("tiny jamba", "f32") | config | keys, w.out)


def eagle3_stub(
    path: Path | str,
    like: Path | str,
    draft_vocab: int = 128,
    seed: int = 0,
    target_hidden_size: int | None = None,
    arch: str = "eagle3",
) -> Path:
    """An EAGLE-3 head for ``like`` with random weights. Another ``arch`` gives the same file under that name: enough
    for checks of metadata, not for running."""
    target = GGUFFile.open(like)
    hidden = target_hidden_size or target.n_embd
    n_embd, n_head, n_head_kv, n_ff = 64, 4, 2, 128
    size, w = n_embd // n_head, _Weights(seed, "f32")
    w.matrix("fc.weight", n_embd, 3 * hidden)
    b = "blk.0."
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        w.ones(f"{b}{name}.weight", n_embd)
    w.matrix(b + "attn_q.weight", n_embd, 2 * n_embd)
    w.matrix(b + "attn_k.weight", n_head_kv * size, 2 * n_embd)
    w.matrix(b + "attn_v.weight", n_head_kv * size, 2 * n_embd)
    w.matrix(b + "attn_output.weight", n_embd, n_embd)
    w.matrix(b + "ffn_gate.weight", n_ff, n_embd)
    w.matrix(b + "ffn_up.weight", n_ff, n_embd)
    w.matrix(b + "ffn_down.weight", n_embd, n_ff)
    w.ones("output_norm.weight", n_embd)
    w.matrix("output.weight", draft_vocab, n_embd)
    w.matrix("token_embd.weight", target.vocab_size, n_embd, 1.0)
    w.out["d2t"] = np.arange(draft_vocab, dtype=np.int64)
    middle = target.n_layer // 2
    config = {
        "block_count": 1,
        "context_length": target.n_ctx_train,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": size,
        "vocab_size": target.vocab_size,
        "target_layers": [min(1, middle), middle, max(target.n_layer - 1, 0)],
        "target_hidden_size": hidden,
        "norm_before_residual": False,
    }
    named = {f"{arch}.{k}": v for k, v in config.items()}
    return write(path, arch, _general(f"tiny {arch}", "f32") | named | copied_tokenizer(like), w.out)


def eagle3_head(
    path: Path | str,
    like: Path | str,
    draft_vocab: int = 128,
    seed: int = 0,
    ftype: str = "f32",
    taps: Sequence[int] = (1, 2, 3),
    n_embd: int = 0,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 128,
    window: int = 0,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    rope_factors: bool = False,
    logit_std: float = 3.0,
) -> Path:
    """A random EAGLE-3 head for ``like`` that exercises everything: no norm is 1, the vocabulary is a random choice, the
    embedding is the target's unless ``n_embd`` is another width (then it has its own), 0: the target's."""
    target = GGUFFile.open(like)
    e, hidden = n_embd or target.n_embd, target.n_embd
    size, w, b = e // n_head, _Weights(seed, ftype), "blk.0."
    w.matrix("fc.weight", e, 3 * hidden)
    norms = {f"{b}attn_norm": e, f"{b}attn_norm_2": e, f"{b}ffn_norm": e, "output_norm": e}
    norms |= {"enc.output_norm": 3 * hidden} if norm_before_fc else {}
    for name, n in norms.items():
        w.exact(f"{name}.weight", w.rng.uniform(0.5, 1.5, n))
    w.matrix(b + "attn_q.weight", e, 2 * e, 2.0 * (2 * e) ** -0.5)
    w.matrix(b + "attn_k.weight", n_head_kv * size, 2 * e, 2.0 * (2 * e) ** -0.5)
    w.matrix(b + "attn_v.weight", n_head_kv * size, 2 * e)
    w.matrix(b + "attn_output.weight", e, e)
    w.matrix(b + "ffn_gate.weight", n_ff, e)
    w.matrix(b + "ffn_up.weight", n_ff, e)
    w.matrix(b + "ffn_down.weight", e, n_ff)
    w.matrix("output.weight", draft_vocab or target.vocab_size, e, logit_std * e**-0.5)
    if e != hidden:
        w.matrix("token_embd.weight", target.vocab_size, e, 1.0)
    if draft_vocab:
        w.out["d2t"] = np.sort(w.rng.choice(target.vocab_size, draft_vocab, replace=False)).astype(np.int64)
    if rope_factors:
        w.exact("rope_freqs.weight", w.rng.uniform(1.0, 4.0, size // 2))
    config = {
        "block_count": 1,
        "context_length": target.n_ctx_train,
        "embedding_length": e,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": size,
        "vocab_size": target.vocab_size,
        "target_layers": list(taps),
        "target_hidden_size": hidden,
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
    }
    if window:
        config["attention.sliding_window"] = window
    named = {f"eagle3.{k}": v for k, v in config.items()}
    return write(path, "eagle3", _general("random eagle3", ftype) | named | copied_tokenizer(like), w.out)


def requantize(src: Path | str, dst: Path | str, ftype: str = "Q2_K") -> Path:
    """``src`` quantised once more by llama.cpp, e.g. to "Q2_K": a draft that is close to its target, and cheaper."""
    import ctypes

    import llama_cpp

    numbers = {name: number for number, name in FILE_TYPES.items()}
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = numbers[ftype], True, 2
    code = llama_cpp.llama_model_quantize(str(src).encode(), str(dst).encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama.cpp could not quantise {src} to {ftype}")
    return Path(dst)


# -- files with something wrong ---------------------------------------------------------------------------------------


def edit(
    src: Path | str,
    dst: Path | str,
    put: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    arch: str | None = None,
    tensors: bool = True,
) -> Path:
    """``src`` written again with other metadata. ``arch`` renames the architecture and its keys."""
    file = GGUFFile.open(src)
    keys = {k: v for k, v in file.metadata.items() if k not in drop}
    if arch is not None:
        old = file.architecture + "."
        keys = {(f"{arch}.{k[len(old) :]}" if k.startswith(old) else k): v for k, v in keys.items()}
    data: dict[str, Any] = {}
    for name, t in file.tensors.items() if tensors else ():
        kind = next(number for number, (label, _, _) in TENSOR_TYPES.items() if label == t.type)
        raw = np.frombuffer(file.tensor_bytes(name), np.uint8).reshape(*reversed(t.shape[1:]), -1)
        data[name] = (raw, gguf.GGMLQuantizationType(kind))
    return write(dst, arch or file.architecture, keys | dict(put or {}), data)


def truncated(src: Path | str, dst: Path | str, keep: int | float) -> Path:
    """The first ``keep`` bytes of ``src`` (below 1: that share of it; below 0: all but so many)."""
    raw = Path(src).read_bytes()
    n = int(len(raw) * keep) if 0 < keep < 1 else int(keep)
    Path(dst).write_bytes(raw[:n])
    return Path(dst)


def patched(src: Path | str, dst: Path | str, at: int, new: bytes) -> Path:
    """``src`` with the bytes at ``at`` replaced."""
    raw = bytearray(Path(src).read_bytes())
    raw[at : at + len(new)] = new
    Path(dst).write_bytes(raw)
    return Path(dst)


def broken_files(folder: Path) -> dict[str, Path]:
    """One file for each way of not being a model, by name. None of them may reach llama.cpp."""
    good = tiny_llama(folder / "good.gguf")
    raw = good.read_bytes()

    def file(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    def changed(name: str, **kwargs: Any) -> Path:
        return edit(good, folder / f"{name}.gguf", **kwargs)

    tokens = GGUFFile.open(good).tokenizer.tokens
    twins = [t.decode() for t in tokens]
    twins[300] = twins[10]
    (folder / "directory.gguf").mkdir()
    make: dict[str, Callable[[], Path]] = {
        "missing": lambda: folder / "no-such-file.gguf",
        "directory": lambda: folder / "directory.gguf",
        "empty": lambda: file("empty.gguf", b""),
        "text": lambda: file("text.gguf", b"just some words, and not a model at all\n"),
        "html": lambda: file("html.gguf", b"<!DOCTYPE html><html><body>404</body></html>"),
        "lfs": lambda: file("lfs.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        "safetensors": lambda: file("st.gguf", (96).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}'.ljust(96)),
        "torch zip": lambda: file("zip.gguf", b"PK\x03\x04" + bytes(60)),
        "pickle": lambda: file("pickle.gguf", b"\x80\x02}q\x00" + bytes(60)),
        "legacy ggml": lambda: file("ggml.gguf", b"tjgg" + bytes(60)),
        "zeros": lambda: file("zeros.gguf", bytes(4096)),
        "big-endian": lambda: file("big.gguf", b"GGUF" + (3).to_bytes(4, "big") + raw[8:]),
        "version 1": lambda: patched(good, folder / "v1.gguf", 4, (1).to_bytes(4, "little")),
        "version 9": lambda: patched(good, folder / "v9.gguf", 4, (9).to_bytes(4, "little")),
        "cut in the magic": lambda: truncated(good, folder / "cut3.gguf", 3),
        "cut in the header": lambda: truncated(good, folder / "cut20.gguf", 20),
        "cut in the metadata": lambda: truncated(good, folder / "cut2000.gguf", 2000),
        "cut in the tensors": lambda: truncated(good, folder / "cut-half.gguf", 0.5),
        "cut at the last byte": lambda: truncated(good, folder / "cut-last.gguf", -1),
        "absurd tensor count": lambda: patched(good, folder / "nt.gguf", 8, b"\xff" * 8),
        "absurd key count": lambda: patched(good, folder / "nk.gguf", 16, b"\xff" * 8),
        "absurd key length": lambda: patched(good, folder / "kl.gguf", 24, b"\xff" * 8),
        "adapter": lambda: changed("adapter", put={"general.type": "adapter", "adapter.type": "lora"}),
        "projector": lambda: changed("mmproj", put={"general.type": "mmproj"}, arch="clip"),
        "imatrix": lambda: changed("imatrix", put={"general.type": "imatrix"}),
        "split": lambda: changed("part-00001-of-00003", put={"split.count": 3, "split.no": 0}),
        "split by name": lambda: file("named-00002-of-00003.gguf", raw),
        "unknown architecture": lambda: changed("unknown", arch="hal9000"),
        "encoder": lambda: changed("bert", arch="bert"),
        "encoder-decoder": lambda: changed("t5", arch="t5"),
        "diffusion": lambda: changed("dream", arch="dream"),
        "vocabulary only": lambda: changed("vocab", tensors=False),
        "no tokenizer": lambda: changed("notok", drop=["tokenizer.ggml.tokens"]),
        "unknown tokenizer": lambda: changed("tok", put={"tokenizer.ggml.model": "abacus"}),
        "encoder's tokenizer": lambda: changed("wpm", put={"tokenizer.ggml.model": "bert"}),
        "tokenizer with missing bytes": lambda: changed("rwkv", put={"tokenizer.ggml.model": "rwkv"}),
        "sentencepiece with missing bytes": lambda: changed("spm", put={"tokenizer.ggml.model": "llama"}),
        "twin tokens": lambda: changed("twins", put={"tokenizer.ggml.tokens": twins}),
        "no layers": lambda: changed("l0", put={"llama.block_count": 0}),
        "too many layers": lambda: changed("l9999", put={"llama.block_count": 9999}),
        "layers as text": lambda: changed("ltext", put={"llama.block_count": "two"}),
        "no heads": lambda: changed("h0", put={"llama.attention.head_count": 0}),
        "odd heads": lambda: changed("h3", put={"llama.attention.head_count_kv": 3}),
        "no hidden size": lambda: changed("e0", put={"llama.embedding_length": 0}),
        "no context": lambda: changed("c", drop=["llama.context_length"]),
        "experts": lambda: changed("exp", put={"llama.expert_count": 2, "llama.expert_used_count": 4}),
        "rope scaling": lambda: changed("rope", put={"llama.rope.scaling.type": "sideways"}),
        "bos outside": lambda: changed(
            "bos",
            put={"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.bos_token_id": 99999},
            drop=["tokenizer.ggml.add_bos_token"],
        ),
    }
    return {name: build() for name, build in make.items()}
