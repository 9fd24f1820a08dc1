"""Prompts and conversations from files: JSONL in the usual shapes, and plain text.

A JSONL line may hold `turns` (what a user says, in order), `prompt`, `messages` (role and content), or ShareGPT's
`conversations` (from and value), and `source`, its group in tables. Plain text (any other ending) is cut at blank lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import UsageError

#: Larger files of prompts are mistakes, or have no end (/dev/zero).
MAX_FILE_BYTES = 2 << 30
#: ShareGPT's names of who speaks, and others that are met.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
          "model": "assistant", "bard": "assistant", "system": "system"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is system, user or assistant."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if any("\ud800" <= c <= "\udfff" for c in self.content):
            raise UsageError("half a character (a lone \\ud800 to \\udfff); write the character, or both halves")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, where they came from (`source`, a group in tables), and the place in the file for messages about it.

    `raw`: not a conversation but a text, one message that is used as it is.
    """

    messages: tuple[Message, ...]
    source: str
    where: str
    raw: bool = False

    @property
    def asked(self) -> tuple[Message, ...]:
        """Without the answers: what a target is to answer."""
        return tuple(m for m in self.messages if m.role != "assistant")

    def key(self, whole: bool = False) -> str:
        """16 hex digits of what is asked (`whole`: of all that is said): the same text has the same key in any file."""
        said = [(m.role, m.content) for m in (self.messages if whole else self.asked)]
        return hashlib.sha256(json.dumps([self.raw, said]).encode()).hexdigest()[:16]


def read_conversations(path: Path, raw: bool = False) -> list[Conversation]:
    """The conversations of a file, duplicates left out. `raw`: texts to be continued as they are, not asked.

    Raises UsageError that names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB; give smaller files of prompts")
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    found = _lines(text, path, raw) if path.suffix in (".jsonl", ".json") else _paragraphs(text, path, raw)
    return unique(found, str(path))


def unique(conversations: Iterable[Conversation], where: str, whole: bool = True) -> list[Conversation]:
    """The first of each; not `whole`: of each that asks the same. Raises UsageError where there is none."""
    kept: dict[str, Conversation] = {}
    for conversation in conversations:
        kept.setdefault(conversation.key(whole), conversation)
    if not kept:
        raise UsageError(f"{where}: no prompts in it")
    return list(kept.values())


def _lines(text: str, path: Path, raw: bool) -> Iterator[Conversation]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from None
        yield from_entry(entry, where, path.stem, raw)


def _paragraphs(text: str, path: Path, raw: bool) -> Iterator[Conversation]:
    number = 1
    for part in text.split("\n\n"):
        if part.strip():
            first = number + len(part) - len(part.lstrip("\n"))
            yield _made([Message("user", part.strip())], path.stem, f"{path} line {first}", raw)
        number += part.count("\n") + 2


def from_entry(entry: Any, where: str, source: str, raw: bool = False) -> Conversation:
    """One JSON object. Raises UsageError where it is none of the known shapes."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: an object with 'turns', 'messages', 'conversations' or 'prompt' is needed")
    try:
        messages = _messages(entry)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return _made(messages, str(entry.get("source") or source), where, raw)


def _messages(entry: dict[str, Any]) -> list[Message]:
    if isinstance(entry.get("turns"), list):
        return [Message("user", _text(turn)) for turn in entry["turns"]]
    for name, who, what in (("messages", "role", "content"), ("conversations", "from", "value")):
        if isinstance(entry.get(name), list):
            return [_message(m, who, what) for m in entry[name]]
    for name in ("prompt", "instruction", "text"):
        if name in entry:
            return [Message("user", _text(entry[name]))]
    raise UsageError("'turns', 'messages', 'conversations' or 'prompt' must hold text")


def _message(entry: Any, who: str, what: str) -> Message:
    if not isinstance(entry, dict):
        raise UsageError(f"a message must be an object with '{who}' and '{what}'")
    # Some ShareGPT files use the other names inside.
    role = entry.get(who, entry.get("role"))
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise UsageError(f"a message of '{role}'; known are {', '.join(sorted(_ROLES))}")
    return Message(_ROLES[role.lower()], _text(entry.get(what, entry.get("content"))))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError("'turns', 'messages', 'conversations' or 'prompt' must hold text")
    return value


def _made(messages: list[Message], source: str, where: str, raw: bool) -> Conversation:
    if not any(m.role == "user" for m in messages):
        raise UsageError(f"{where}: nobody asks anything in it")
    return Conversation(tuple(messages), source, where, raw)
