"""Tiny models in Hugging Face's layout: transformers' own classes, numbers that depend on the names alone, and tokenizers
made by hand, so that nothing here changes with a library's version."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# Words, parts of words, and things that reach over the end of a word: whoever cuts text wrongly will use those.
WORDS = (
    "the cat",
    " the",
    " cat",
    "ing",
    " sing",
    "ll",
    "'ll",
    "I'll",
    "'S",
    "HE'S",
    " quick",
    " brown",
    "over",
    " over the",
    "1234",
    "12",
    "3 4",
    " 123",
    "\n\n",
    "\n\n\n",
    "  ",
    "   ",
    "    ",
    " \n",
    "\r\n",
    "\t\t",
    "---",
    "==",
    "();",
    ".\n",
    "!!",
    "été",
    " naïve",
    "日本",
    "日本語",
    "Привет",
    " мир",
    "🙂🙂",
    "a.b",
    "x_y",
    "fun(",
    " return",
    "if (",
    "e\u0301",
)

TEXTS = (
    "",
    " ",
    "the cat sat over the 1234 cats.",
    "I'll sing, HE'S singing; we'Ll see.",
    "  the   cat    \n\n\n the\r\n\r\ncat \n x",
    "12 123 1234 12345 3 4 ½ ²³ ٣٤",
    "été naïve 日本語日本 Привет мир 🙂🙂🙂🙃 e\u0301 \u0301",
    "if (x_y) return a.b();\n\n\tfun(1);--- ==!!",
    "\t\t\ttabs",
    "trailing   ",
    "   leading",
    "\n",
    " \n \n",
    "a\u00a0b\u2003c",
    "x<s>y</s> <tool> <extra>z",
    "<|mark|>the cat<|mark|>",
    "don't DON'T 'tis ''s's",
    "ﬁ Ａ１２ ﷺ",
    "a▁b ▁▁ c",
)


def fill(model: Any, around: float = 1.0) -> Any:
    """Gives each parameter numbers that its name decides: multiples of 1/1024; of norms `around` plus a little."""
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name or "softcap" in name:
                continue
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            values = rng.standard_normal(tuple(parameter.shape)) * 0.2
            if "norm" in name or "layer_scalar" in name:
                values += around if "norm" in name else 1.0
            parameter.copy_(torch.from_numpy(np.round(values * 1024) / 1024))
    return model.eval()


def save(model: Any, path: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Writes weights, configuration and tokenizer; `config` goes into tokenizer_config.json."""
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def byte_level(kind: str = "llama-bpe", bos: bool = True) -> Tokenizer:
    """A byte-level BPE whose words are cut as llama.cpp's `kind` does it; <s>, </s>, <tool> and <extra> are added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {char: index + 2 for index, char in enumerate(alphabet)}
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = _merges(vocab, [to_bytes.pre_tokenize_str(word)[0][0] for word in WORDS])
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama-bpe"))
    bytes_only = to_bytes
    if kind in ("llama-bpe", "smaug-bpe", "qwen2"):
        words = pre_tokenizers.Split(Regex(QWEN2 if kind == "qwen2" else LLAMA3), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    elif kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|mark|>"])
    tokenizer.add_tokens(["<tool>", "<extra>"])
    trim = processors.ByteLevel(trim_offsets=False)
    start = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
    tokenizer.post_processor = processors.Sequence([trim, start]) if bos else trim
    return tokenizer


def spaced(prefix: bool = False, bos: str = "<s>", unknown: str = "<unk>") -> Tokenizer:
    """A BPE over ▁ with bytes for what it doesn't know, as SentencePiece's models become in tokenizer.json."""
    vocab = {bos: 0, "</s>": 1, unknown: 2, "<pad>": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    # in such vocabularies a newline is a token of its own, or together with others of its kind
    words = [word.replace(" ", "▁") for word in WORDS if "\n" not in word or not word.strip("\n")]
    for char in sorted({char for word in words for char in word} | set("abcdefghijklmnopqrstuvwxyzHS.,;'<>")):
        vocab.setdefault(char, len(vocab))
    # SentencePiece joins any two pieces that give a third one, the better ones first: all such pairs are merges
    pieces = dict.fromkeys(left + right for left, right in _merges(vocab, words))
    splits = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    merges = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([bos, "</s>", unknown, "<pad>", "<|mark|>"])
    tokenizer.add_tokens(["<tool>", "<extra>"])
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, 0)])
    return tokenizer


def sentencepiece(tokenizer: Tokenizer) -> bytes:
    """The tokenizer.model (a protobuf) of which `spaced(prefix=True)` could have been made."""
    data = json.loads(tokenizer.to_str())
    added = {entry["id"]: 3 if entry["special"] else 4 for entry in data["added_tokens"]}
    scores = {left + right: -float(rank) for rank, (left, right) in reversed([*enumerate(data["model"]["merges"])])}
    pieces = []
    for text, index in sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        kind = 2 if text == "<unk>" else added.get(index, 6 if text.startswith("<0x") else 1)
        raw = text.encode()
        piece = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", scores.get(text, 0.0)) + bytes([0x18, kind])
        pieces.append(b"\x0a" + bytes([len(piece)]) + piece)
    trainer = bytes([0x18, 2])  # BPE
    normalizer = b"\x0a\x08identity" + bytes([0x18, 1, 0x20, 0])  # a space before the text; others are left alone
    return b"".join([*pieces, b"\x12", bytes([len(trainer)]), trainer, b"\x1a", bytes([len(normalizer)]), normalizer])


def _merges(vocab: dict[str, int], words: list[str]) -> list[tuple[str, str]]:
    """The merges that build each word from its left end; the tokens that they give are added to `vocab`."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            vocab.setdefault(word[: end + 1], len(vocab))
    return list(merges)


def llama(**settings: Any) -> Any:
    return fill(LlamaForCausalLM(LlamaConfig(**SIZES | settings)))


def qwen2(**settings: Any) -> Any:
    return fill(Qwen2ForCausalLM(Qwen2Config(**SIZES | settings)))


def qwen3(**settings: Any) -> Any:
    return fill(Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 32} | settings)))


def gemma3(**settings: Any) -> Any:
    sizes = SIZES | {"vocab_size": N_SPACED, "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 24}
    return fill(Gemma3ForCausalLM(Gemma3TextConfig(**sizes | {"query_pre_attn_scalar": 32} | settings)), around=0.0)


def gemma4(**settings: Any) -> Any:
    sizes = SIZES | {"vocab_size": N_SPACED, "vocab_size_per_layer_input": N_SPACED, "num_hidden_layers": 6, "head_dim": 16}
    sizes |= {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "sliding_window": 24, "layer_types": WINDOWED * 2}
    return fill(Gemma4ForCausalLM(Gemma4TextConfig(**sizes | {"final_logit_softcapping": 30.0} | settings)))


WINDOWED = ["sliding_attention", "sliding_attention", "full_attention"]
N_SPACED = spaced().get_vocab_size()
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE["original_max_position_embeddings"] = 64
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 32}
_K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}

#: what is converted, by name; those that begin with gemma go with `spaced`, the others with `byte_level`
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-3.1": lambda: llama(rope_parameters=_LLAMA3_ROPE),
    "llama-linear": lambda: llama(rope_parameters=_LINEAR),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=24),
    "qwen2": qwen2,
    "qwen2-yarn": lambda: qwen2(rope_parameters=_YARN),
    "qwen3": lambda: qwen3(tie_word_embeddings=True),
    "gemma3": gemma3,
    "gemma3-linear": lambda: gemma3(
        rope_parameters={"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        final_logit_softcapping=5.0,
    ),
    "gemma3-pattern": lambda: gemma3(layer_types=["full_attention", *WINDOWED * 2]),
    "gemma4": gemma4,
    "gemma4-shared": lambda: gemma4(
        num_kv_shared_layers=2, use_double_wide_mlp=True, layer_types=["sliding_attention", "full_attention"] * 3
    ),
    "gemma4-k-is-v": lambda: gemma4(**_K_IS_V),
    "gemma4-experts": lambda: gemma4(**_K_IS_V | _EXPERTS),
}


def made(name: str, path: Path) -> tuple[Any, Path]:
    """A model of MODELS, and the directory in which it is saved with a tokenizer that fits."""
    model = MODELS[name]()
    if name.startswith("gemma"):
        return model, save(model, path, spaced(bos="<bos>"), bos_token="<bos>", unk_token="<unk>", pad_token="<pad>")
    return model, save(model, path, byte_level("qwen2" if name.startswith("qwen") else "llama-bpe"))
