"""Conversations on disk: JSON with `system` and `messages`, the roles alternating."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation as it is stored: the system message and (user, assistant) pairs."""

    system: str | None
    exchanges: list[tuple[str, str]]


def write_transcript(path: Path, saved: Saved, model: str) -> bool:
    """Write to a temporary file beside `path`, then rename; returns whether there was a file.

    Raises UsageError where it can't be written, and for a file that is there and is no conversation.
    """
    replaced = os.path.exists(path)
    if replaced:
        try:
            read_transcript(path)
        except UsageError as error:
            raise UsageError(f"{path} exists and is no saved conversation: it is left as it is") from error
    messages = []
    for user, assistant in saved.exchanges:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    text = json.dumps({"model": model, "system": saved.system, "messages": messages}, ensure_ascii=False, indent=1)
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise UsageError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error
    return replaced


def read_transcript(path: Path) -> Saved:
    """Read a saved conversation. Raises UsageError, one line, for everything that is not one.

    A system message may also stand first among the messages, as other programs write it.
    """
    try:
        if not path.is_file():
            raise UsageError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise UsageError(f"{path} is no saved conversation: it has no list of 'messages'")
    system = data.get("system")
    messages = [_message(path, i, m) for i, m in enumerate(data["messages"])]
    if messages and messages[0][0] == "system":
        system = messages.pop(0)[1]
    if system is not None and not isinstance(system, str):
        raise UsageError(f"{path}: 'system' must be a text or null")
    for i, (role, _) in enumerate(messages):
        if role != ("user", "assistant")[i % 2]:
            raise UsageError(f"{path}: message {i + 1} is of '{role}'; 'user' and 'assistant' must take turns")
    if len(messages) % 2:
        raise UsageError(f"{path}: the last message has no answer")
    texts = [text for _, text in messages]
    return Saved(_clean(system) if system else None, list(zip(texts[::2], texts[1::2])))


def _message(path: Path, i: int, message: Any) -> tuple[str, str]:
    if isinstance(message, dict):
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return role, _clean(content)
    raise UsageError(f"{path}: message {i + 1} needs a 'role' and a 'content', both texts")


def _clean(text: str) -> str:
    """JSON can hold lone surrogates, which no tokenizer and no file takes."""
    return text.encode("utf-8", "replace").decode()
