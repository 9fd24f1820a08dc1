"""How byte-level BPE cuts text into words before it merges, and llama.cpp's name for each way (``tokenizer.ggml.pre``).

tokenizer.json spells the cutting out; llama.cpp knows a closed list of them by name. Compared is what is written there,
step by step, together with whether whole words skip the merges (``ignore_merges``), which the names imply too.
"""

from __future__ import annotations

from typing import Any

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"

_BYTES = ("ByteLevel", False)  # to bytes, without words of its own
_GPT2_WORDS = ("ByteLevel", True)
_DIGITS = ("Digits", True)

#: (steps, ignore_merges) -> the name
_NAMES: dict[tuple[tuple[Any, ...], bool], str] = {
    ((("Split", _LLAMA3), _BYTES), True): "llama-bpe",
    ((("Split", _LLAMA3), _BYTES), False): "smaug-bpe",
    ((("Split", _QWEN2), _BYTES), False): "qwen2",
    ((_DIGITS, _GPT2_WORDS), False): "smollm",
    ((_GPT2_WORDS,), False): "gpt-2",
}


def pre_tokenizer_name(pre_tokenizer: Any, ignore_merges: bool) -> str | None:
    """llama.cpp's name for the ``pre_tokenizer`` of a tokenizer.json; None for one that it does not have by that look."""
    steps = pre_tokenizer.get("pretokenizers") if _kind(pre_tokenizer) == "Sequence" else [pre_tokenizer]
    if not isinstance(steps, list):
        return None
    return _NAMES.get((tuple(_step(step) for step in steps), ignore_merges))


def _kind(step: Any) -> str:
    return str(step.get("type")) if isinstance(step, dict) else ""


def _step(step: Any) -> Any:
    """What of a step decides where text is cut; a step that is none of the known ones equals nothing in the table."""
    kind = _kind(step)
    # patterns that match any text leave nothing between the matches: to remove that is to isolate them
    if kind == "Split" and (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True)):
        pattern = step.get("pattern")
        return kind, pattern.get("Regex") if isinstance(pattern, dict) else None
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return kind, bool(step.get("use_regex", True))
    if kind == "Digits":
        return kind, bool(step.get("individual_digits"))
    return kind, "unknown"
