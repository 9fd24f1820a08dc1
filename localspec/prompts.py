"""Prompt files, and a small set of prompts of our own for measuring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import UsageError

#: Larger files of prompts are mistakes, or have no end (/dev/zero).
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to answer: the user's turns, and where it comes from (its group in tables)."""

    source: str
    turns: tuple[str, ...]


#: Written for this project: what people ask of a local model, in three groups.
BUILT_IN = (
    Prompt("code", ("Write a Python function that merges two sorted lists into one sorted list. Explain each step.",)),
    Prompt("code", ("Rewrite this function with type hints and a docstring:\n```python\ndef area(w, h, unit='m'):\n"
                    "    if w < 0 or h < 0:\n        raise ValueError('negative')\n    return f'{w * h} {unit}2'\n```",)),
    Prompt("maths", ("A train leaves at 9:40 and arrives at 13:05. It stops twice for 10 minutes. How long does it move? "
                     "Reason step by step.",)),
    Prompt("maths", ("A shop sells pens at 3 for $2 and notebooks at $1.50 each. What do 12 pens and 4 notebooks cost? "
                     "Reason step by step.",)),
    Prompt("chat", ("Give me five ideas for a quiet birthday evening at home, each with one sentence.",)),
    Prompt("chat", ("Explain to a child why the sky is blue and why sunsets are red.",)),
)  # fmt: skip


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, duplicates left out.

    A line is an object with `turns` (a list of strings), `prompt`, or `messages` (of which the user's are taken), and
    optionally `source`. Raises UsageError that names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB; give a smaller file of prompts")
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    prompts: dict[tuple[str, ...], Prompt] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompt = _parse(line, f"{path} line {number}")
            prompts.setdefault(prompt.turns, prompt)
    if not prompts:
        raise UsageError(f"{path}: no prompts in it")
    return list(prompts.values())


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in thousands of brackets
        raise UsageError(f"{where}: JSON that can't be read ({error})") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: an object with 'turns', 'messages' or 'prompt' is needed")
    turns = _turns(entry)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UsageError(f"{where}: 'turns', 'messages' or 'prompt' must hold text")
    if any("\ud800" <= c <= "\udfff" for turn in turns for c in turn):
        raise UsageError(f"{where}: half a character (a lone \\ud800 to \\udfff); write the character, or both halves")
    return Prompt(str(entry.get("source", "prompts")), tuple(turns))


def _turns(entry: dict[str, Any]) -> list[Any]:
    if isinstance(entry.get("turns"), list):
        return entry["turns"]
    if isinstance(entry.get("messages"), list):
        return [m.get("content") for m in entry["messages"] if isinstance(m, dict) and m.get("role") == "user"]
    return [entry["prompt"]] if "prompt" in entry else []


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, taken from the sources in turn, so that a small number still covers them all."""
    if limit <= 0 or limit >= len(prompts):
        return prompts
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    queues = [list(group) for group in by_source.values()]
    chosen: list[Prompt] = []
    while len(chosen) < limit:
        for queue in queues:
            if queue and len(chosen) < limit:
                chosen.append(queue.pop(0))
    return chosen
