"""The tokenizer of a model in Hugging Face's layout, as keys of GGUF.

llama.cpp has three kinds that matter here: ``gpt2`` (byte-level BPE, merges by rank, out of tokenizer.json), ``llama``
(SentencePiece BPE, merges by the score of the result, out of tokenizer.model or tokenizer.json), and ``gemma4`` (merges
by rank over plain text with ▁ for spaces).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.convert.output import Typed
from localspec.convert.targets import sentencepiece
from localspec.convert.targets.config import OTHER_CONVERTER, Config
from localspec.convert.targets.pretokenizers import pre_tokenizer_name
from localspec.convert.targets.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from localspec.convert.weights import read_object
from localspec.errors import ModelFileError
from localspec.gguf_format import clip

_U32, _I32, _F32, _STRING = 4, 5, 6, 8  # GGUF's value types
_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
#: the score of tokens that nothing is merged into
_UNSCORED = -1000.0
#: special tokens, as tokenizer_config.json and config.json call them -> the key of GGUF
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
#: marks of Gemma 4 that delimit thoughts and calls of tools: control tokens, which have to show in the text all the same
_GEMMA4_SHOWN = {
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
}  # fmt: skip


@dataclass(frozen=True)
class Added:
    """A token beside the model's own: matched in the text before anything else."""

    id: int
    text: str
    is_special: bool


class TokenizerFiles:
    """tokenizer.json, tokenizer_config.json and what else says how a model cuts text. Missing files are empty."""

    def __init__(self, path: Path):
        self.path = path
        self.main = _optional(path / "tokenizer.json")
        self.config = _optional(path / "tokenizer_config.json")
        model = self.main.get("model")
        self.model: dict[str, Any] = model if isinstance(model, dict) else {}

    def error(self, text: str) -> ModelFileError:
        """A ModelFileError about the tokenizer."""
        return ModelFileError(f"the tokenizer in {clip(str(self.path), 400)} {clip(text, 300)}")

    def unsupported(self, text: str) -> ModelFileError:
        """A ModelFileError about a tokenizer that can't be converted here."""
        return self.error(f"{text}, which can't be converted here; use {OTHER_CONVERTER} and give the GGUF")

    def added(self) -> list[Added]:
        """The added tokens, by id."""
        entries: Iterable[Any] = self.main.get("added_tokens") or []
        if not entries:
            decoder = self.config.get("added_tokens_decoder")
            entries = [{"id": int(i), **entry} for i, entry in decoder.items()] if isinstance(decoder, dict) else []
        if not entries:
            plain = _optional(self.path / "added_tokens.json")
            entries = [{"id": i, "content": text} for text, i in plain.items()]
        try:
            found = [Added(int(e["id"]), str(e["content"]), bool(e.get("special", False))) for e in entries]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self.error("has no usable added_tokens") from None
        return sorted(found, key=lambda token: token.id)

    def vocabulary(self) -> dict[str, int]:
        """The model's own tokens."""
        vocab = self.model.get("vocab")
        if not isinstance(vocab, dict) or not vocab or not all(isinstance(i, int) and i >= 0 for i in vocab.values()):
            raise self.error("has no usable vocabulary in tokenizer.json")
        return vocab

    def merges(self) -> list[tuple[str, str]]:
        """The pairs that are merged, by rank. A pair with a space in it is left out: no text has one when it is merged."""
        merges = self.model.get("merges")
        pairs: list[tuple[str, str]] = []
        for merge in merges if isinstance(merges, list) else []:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
                raise self.error(f"has a merge that is no pair: {merge!r}")
            if " " not in pair[0] + pair[1]:
                pairs.append((pair[0], pair[1]))
        if not pairs:
            raise self.error("has no merges in tokenizer.json")
        return pairs


def tokenizer_keys(path: Path, config: Config, n_vocab: int, spaced: str = "llama") -> dict[str, Any]:
    """The keys ``tokenizer.*`` for a model of `n_vocab` rows of embeddings. `spaced` is the kind for a BPE over ▁.

    Raises ModelFileError for files missing or damaged, and for tokenizers that llama.cpp has no kind for.
    """
    files = TokenizerFiles(path)
    is_bpe = files.model.get("type", "BPE" if "merges" in files.model else None) == "BPE"
    if files.main and not is_bpe:
        raise files.unsupported(f"is of the type {files.model.get('type')!r}")
    if files.main and not files.model.get("byte_fallback", False):
        keys = _byte_level(files, n_vocab)
    elif spaced == "gemma4":
        keys = _gemma4(files, n_vocab)
    else:
        keys = _sentencepiece(files, n_vocab)
    tokens: list[str] = keys["tokenizer.ggml.tokens"].value
    _check_unique(files, tokens)
    keys |= _special_keys(files, config, tokens)
    if keys["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.bos_token_id" in keys:
        keys["tokenizer.ggml.add_bos_token"] = True  # llama.cpp does it anyhow, and complains where a file says otherwise
    return keys | _template_key(files)


def _byte_level(files: TokenizerFiles, n_vocab: int) -> dict[str, Any]:
    model = files.model
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(setting):
            raise files.unsupported(f"has {setting} {model[setting]!r}")
    if _steps(files.main.get("normalizer")) not in ([], [("NFC",)]):  # llama.cpp has no NFC; text mostly is NFC
        raise files.unsupported("normalises text before it cuts it")
    name = pre_tokenizer_name(files.main.get("pre_tokenizer"), bool(model.get("ignore_merges", False)))
    if name is None:
        raise files.unsupported("cuts text into words in a way that isn't known here (pre_tokenizer)")
    merges = files.merges()
    tokens, types = _table(files, files.vocabulary(), n_vocab)
    for token in files.added():
        if token.id < n_vocab:
            tokens[token.id] = token.text
            types[token.id] = CONTROL if token.is_special or _looks_special(token.text) else USER_DEFINED
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": Typed(tokens, _STRING, True),
        "tokenizer.ggml.token_type": Typed(types, _I32, True),
        "tokenizer.ggml.merges": Typed([f"{left} {right}" for left, right in merges], _STRING, True),
    }


def _sentencepiece(files: TokenizerFiles, n_vocab: int) -> dict[str, Any]:
    if (files.path / "tokenizer.model").is_file():
        pieces = sentencepiece.read(files.path / "tokenizer.model")
        tokens, types = _table(files, {}, n_vocab)
        scores = [-10000.0] * n_vocab
        if len(pieces.texts) > n_vocab:
            raise files.error(f"has {len(pieces.texts)} pieces for {n_vocab} rows of embeddings")
        for index, (text, kind) in enumerate(zip(pieces.texts, pieces.types)):
            tokens[index] = text.replace(_SPACE, " ") if kind == USER_DEFINED else text  # found in the text as it comes
            types[index], scores[index] = kind, pieces.scores[index]
        prefix = pieces.space_prefix
    elif files.main:
        tokens, types, scores = _scored(files, n_vocab)
        prefix = _puts_space(files)
    else:
        raise files.error("lacks tokenizer.json and tokenizer.model; fetch them too")
    if files.main:
        prefix = _puts_space(files)
    for token in files.added():
        if token.id >= n_vocab or types[token.id] == BYTE:
            continue
        is_control = token.is_special or _looks_special(token.text)
        tokens[token.id] = token.text if is_control else token.text.replace(_SPACE, " ")
        types[token.id] = CONTROL if is_control else USER_DEFINED
        scores[token.id] = _UNSCORED
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": Typed(tokens, _STRING, True),
        "tokenizer.ggml.scores": Typed(scores, _F32, True),
        "tokenizer.ggml.token_type": Typed(types, _I32, True),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _gemma4(files: TokenizerFiles, n_vocab: int) -> dict[str, Any]:
    if not files.main:
        raise files.error("lacks tokenizer.json; fetch it too")
    merges = files.merges()
    tokens, types = _table(files, files.vocabulary(), n_vocab)
    types = [BYTE if _BYTE_TOKEN.fullmatch(token) else kind for token, kind in zip(tokens, types)]
    for token in files.added():
        if token.id >= n_vocab:
            continue
        tokens[token.id] = token.text
        if token.text in _GEMMA4_SHOWN:
            types[token.id] = USER_DEFINED
        elif token.is_special:
            types[token.id] = CONTROL
        elif _SPACE not in token.text:  # with ▁ it is never found in a text as it comes, only merged
            types[token.id] = USER_DEFINED
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": Typed(tokens, _STRING, True),
        "tokenizer.ggml.scores": Typed([_UNSCORED] * n_vocab, _F32, True),
        "tokenizer.ggml.token_type": Typed(types, _I32, True),
        "tokenizer.ggml.merges": Typed([f"{left} {right}" for left, right in merges], _STRING, True),
        "tokenizer.ggml.add_space_prefix": False,
    }


def _scored(files: TokenizerFiles, n_vocab: int) -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a SentencePiece BPE as tokenizer.json tells it: a score is the rank of the first merge
    that gives the token, negated, which is what SentencePiece itself writes up to a constant."""
    vocab = files.vocabulary()
    tokens, types = _table(files, vocab, n_vocab)
    scores = [_UNSCORED if kind == NORMAL else -10000.0 for kind in types]
    for rank in range(len(merges := files.merges()) - 1, -1, -1):
        index = vocab.get(merges[rank][0] + merges[rank][1])
        if index is None or index >= n_vocab:
            raise files.error(f"has a merge to {merges[rank][0] + merges[rank][1]!r}, which is no token")
        scores[index] = float(-rank)
    unknown = files.model.get("unk_token")
    for index, token in enumerate(tokens):
        if _BYTE_TOKEN.fullmatch(token):
            types[index] = BYTE
        elif token == unknown:
            types[index] = UNKNOWN
    return tokens, types, scores


def _table(files: TokenizerFiles, vocab: dict[str, int], n_vocab: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; ids that nothing has are unused."""
    tokens = [f"[PAD{i}]" for i in range(n_vocab)]
    types = [UNUSED] * n_vocab
    for text, index in vocab.items():
        if index >= n_vocab:
            raise files.error(f"has the token {index} for {n_vocab} rows of embeddings")
        tokens[index], types[index] = text, NORMAL
    return tokens, types


def _looks_special(text: str) -> bool:
    """Whether an added token is one of control, though the file doesn't say so."""
    return (
        text in ("<pad>", "<mask>")
        or (text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>")))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _steps(step: Any) -> list[tuple[str, ...]]:
    """The steps of a normaliser, each as its type and its settings; of a Sequence all."""
    if not isinstance(step, dict):
        return []
    if step.get("type") == "Sequence":
        return [inner for one in step.get("normalizers") or [] for inner in _steps(one)]
    return [(str(step.get("type")), *(str(value) for key, value in sorted(step.items()) if key != "type"))]


def _puts_space(files: TokenizerFiles) -> bool:
    """Whether a space goes before a text, by tokenizer.json. Raises ModelFileError where more is done to the text."""
    prefix = False
    for step in _steps(files.main.get("normalizer")):
        if step == ("Prepend", _SPACE):
            prefix = True
        elif step != ("Replace", _SPACE, str({"String": " "})):
            raise files.unsupported(f"normalises text ({step[0]})")
    before = files.main.get("pre_tokenizer")
    if isinstance(before, dict):
        if before.get("type") == "Metaspace" and before.get("replacement") == _SPACE:
            prefix = before.get("prepend_scheme", "always") != "never"
        elif before.get("type") != "Split" or before.get("pattern") != {"String": " "}:
            raise files.unsupported("cuts text into words in a way that isn't known here (pre_tokenizer)")
    return prefix


def _ends(files: TokenizerFiles) -> tuple[str | None, str | None]:
    """The special tokens that the post-processor puts before and behind a text."""
    first = last = None
    outer = files.main.get("post_processor")
    inner = outer.get("processors", [outer]) if isinstance(outer, dict) else []
    for processor in inner if isinstance(inner, list) else []:
        single = processor.get("single") if isinstance(processor, dict) else None
        if isinstance(single, list) and len(single) > 1 and processor.get("type") == "TemplateProcessing":
            first, last = (end.get("SpecialToken", {}).get("id") for end in (single[0], single[-1]))
    return first, last


def _check_unique(files: TokenizerFiles, tokens: list[str]) -> None:
    """Raise ModelFileError for two tokens of one text: llama.cpp aborts on them."""
    if len(set(tokens)) < len(tokens):
        double = next(text for text, count in Counter(tokens).items() if count > 1)
        raise files.error(f"has the token {double!r} twice")


def _special_keys(files: TokenizerFiles, config: Config, tokens: list[str]) -> dict[str, Any]:
    ids = {text: index for index, text in enumerate(tokens)}
    named = _optional(files.path / "special_tokens_map.json")
    first, last = _ends(files)
    keys: dict[str, Any] = {}
    for short, key in _SPECIAL.items():
        entry = files.config.get(f"{short}_token") or named.get(f"{short}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        if short in ("bos", "eos"):
            text = {"bos": first, "eos": last}[short] or text
        index = ids.get(text) if isinstance(text, str) else None
        if index is None:
            index = config.get(f"{short}_token_id")
            index = index[0] if isinstance(index, list) and index else index
        if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(tokens):
            keys[f"tokenizer.ggml.{key}_token_id"] = index
    for short, found in (("bos", first), ("eos", last)):
        wanted = found is not None
        if files.main.get("post_processor") is None and isinstance(files.config.get(f"add_{short}_token"), bool):
            wanted = files.config[f"add_{short}_token"]
        elif not files.main:
            wanted = short == "bos"
        if wanted and f"tokenizer.ggml.{short}_token_id" not in keys:
            raise files.error(f"adds a token {short} that it doesn't have")
        keys[f"tokenizer.ggml.add_{short}_token"] = wanted
    return keys


def _template_key(files: TokenizerFiles) -> dict[str, Any]:
    """The chat template: a file of its own, or in tokenizer_config.json, where there may be several with names."""
    try:
        found: Any = (files.path / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        found = files.config.get("chat_template") or _optional(files.path / "chat_template.json").get("chat_template")
    except (OSError, ValueError) as error:
        raise files.error(f"has a chat_template.jinja that can't be read: {error}") from None
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return {"tokenizer.chat_template": found} if isinstance(found, str) and found else {}


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
