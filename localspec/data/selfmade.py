"""Prompts that an instruct model invents itself: its own chat template, cut where a user would begin to speak, continued.

The Magpie method (Xu et al., 2024, "Magpie: Alignment data synthesis from scratch by prompting aligned LLMs with nothing",
section 2): what comes out is what the model was trained to be asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from localspec.accept import Sampling, draw
from localspec.data.conversations import Conversation, read_conversations
from localspec.data.shards import write_whole
from localspec.errors import DataError, UsageError
from localspec.target import TargetSession
from localspec.template import ChatTemplate

SOURCE = "self"
FILE = "prompts-self.jsonl"
#: Warm enough for variety, without the tail in which small models lose the thread.
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=0.95, min_p=0.05)
_MOST_TOKENS = 192
_MARK = "WHAT-A-USER-SAYS"
_WORD = re.compile(r"\w+")
_SAME_BEGINNING = 8  # prompts that share so many first words count as one


class Known:
    """Prompts seen so far, by what matters of them: letter case, spaces and punctuation don't."""

    def __init__(self, texts: Iterable[str] = ()):
        self._seen: set[tuple[str, ...]] = set()
        for text in texts:
            self.add(text)

    def add(self, text: str) -> bool:
        """Whether it is a new one."""
        words = tuple(_WORD.findall(text.casefold()))
        if len(words) < 2:
            return False
        keys = {words, words[:_SAME_BEGINNING]} if len(words) >= _SAME_BEGINNING else {words}
        if keys & self._seen:
            return False
        self._seen |= keys
        return True


def opening(session: TargetSession) -> list[int]:
    """The chat template's tokens up to where a user's words would stand. Raises UsageError for a base model."""
    template = ChatTemplate.of(session.model)
    if template is None:
        raise UsageError(f"{session.model.path}: a base model has no chat template to invent prompts from: give --prompts "
                         "with texts that it can continue")  # fmt: skip
    text = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    if _MARK not in text:
        raise UsageError(f"{session.model.path}: its chat template does not show what a user says: give --prompts")
    tokenizer = session.model.tokenizer
    tokens = tokenizer.encode(text[: text.index(_MARK)], add_special=True, parse_special=True)
    if tokenizer.add_bos and tokens[:2] == [tokenizer.bos, tokenizer.bos]:
        del tokens[0]
    if not tokens:
        raise UsageError(f"{session.model.path}: its chat template begins with the user's words: give --prompts")
    return tokens


def invent(session: TargetSession, seed: int, first: int, stopped: Callable[[], bool]) -> Iterator[tuple[int, str]]:
    """(number, text) of what the model has a user say, endlessly, every sequence of the session writing. Attempts are
    numbered from `first`; each depends on seed and number alone. Of one that doesn't end in good time the text is empty."""
    tokenizer, start = session.model.tokenizer, opening(session)
    n_slots = session.settings.n_sequences
    most = min(_MOST_TOKENS, session.n_ctx - len(start))
    if most < 2:
        raise UsageError("the context is too small to invent prompts in: give a larger --ctx-size")
    sampling = replace(SAMPLING, seed=seed)
    numbers = list(range(first, first + n_slots))
    texts = [list(start) for _ in range(n_slots)]
    none = [np.zeros(0, np.int32)] * n_slots
    for seq in range(n_slots):
        session.prefill(seq, start[:-1])
    following = first + n_slots
    while not stopped():
        rows = session.decode([(seq, text[-1:]) for seq, text in enumerate(texts)])
        drawn = draw(rows.logits, numbers, [len(text) for text in texts], [sampling] * n_slots, none)
        for seq, token in enumerate(drawn.tokens.tolist()):
            text = texts[seq]
            text.append(token)
            ended = bool(tokenizer.eog[token])
            if not ended and len(text) - len(start) < most:
                continue
            yield numbers[seq], tokenizer.decode(text[len(start) : -1], special=True).strip() if ended else ""
            numbers[seq], texts[seq] = following, list(start)
            following += 1
            session.rollback(seq, len(start) - 1)
            session.prefill(seq, start[:-1])


def self_made(
    session: TargetSession,
    folder: Path,
    n: int,
    seed: int,
    stopped: Callable[[], bool],
    made: Callable[[int], None] = lambda n: None,
) -> list[Conversation]:
    """`n` prompts of the model's own. They are kept in `folder`, and begun work is gone on with. `made` gets their number
    as it grows. Raises UsageError for a base model, and where the model only repeats itself."""
    path = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    entries = _load(path)
    known = Known(entry["prompt"] for entry in entries)
    if len(entries) < n:
        specials = re.compile("<\\|[a-z_]+\\|>|\ufffd")
        first = max((entry["number"] for entry in entries), default=-1) + 1
        last_new = first
        for number, text in invent(session, seed, first, stopped):
            if not specials.search(text) and known.add(text):
                entries.append({"source": SOURCE, "prompt": text, "number": number})
                last_new = number
                made(len(entries))
                if len(entries) % 50 == 0 or len(entries) == n:
                    _save(path, entries)
            if len(entries) >= n:
                break
            if number - last_new > 2000:
                raise UsageError(
                    f"{session.model.path}: after {len(entries)} prompts it repeats itself, or comes to no end: ask for "
                    "fewer with --self, or give --prompts"
                )
        _save(path, entries)
        for seq in range(session.settings.n_sequences):
            session.rollback(seq, 0)
    return read_conversations(path)[:n] if entries else []


def _load(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
        return [{"source": SOURCE, "prompt": str(e["prompt"]), "number": int(e["number"])} for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} can't be read ({error}): delete it, and the prompts are invented again") from None


def _save(path: Path, entries: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode())
