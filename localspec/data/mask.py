"""Conversations as tokens, and which of them the assistant said: the chat template rendered with and without each answer.

    without the answer   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    with it              <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
    what is new                                                               Hello!<|im_end|>\\n
    mask                 0 ...                                                1 1   1          0

Prompt and answer are made tokens of separately, as they are at run time. The mask ends with the first token that ends a
generation. Where a template shows an earlier answer otherwise than when it was given (thinking left out), what follows
becomes a sample of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localspec.data.conversations import Conversation, Message
from localspec.errors import UsageError
from localspec.model import Model
from localspec.template import ChatTemplate
from localspec.tokenizer import Tokenizer

_OPEN, _CLOSE = rb"<(?:think|thinking|seed:think)>", rb"</(?:think|thinking|seed:think)>"
_THINKING = re.compile(_OPEN + rb".*?(?:" + _CLOSE + rb"|$)", re.DOTALL)


@dataclass(slots=True)
class Masked:
    """Tokens with the spans [start, end) that the assistant said."""

    tokens: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)

    def mask(self, tokenizer: Tokenizer, keep_thinking: bool) -> npt.NDArray[np.uint8]:
        """u8[n]: 1 where the assistant said the token."""
        mask = np.zeros(len(self.tokens), np.uint8)
        for start, end in self.spans:
            mask[start:end] = 1
        if not keep_thinking:
            mask &= _outside_thinking(self.tokens, self.spans, tokenizer)
        return mask


class Renderer:
    """Messages to text and tokens, by a model's chat template; where it has none, its texts are continued as they are."""

    def __init__(self, model: Model):
        self.tokenizer = model.tokenizer
        self._template = ChatTemplate.of(model)

    def text(self, said: Sequence[Message], conversation: Conversation, open_answer: bool) -> str:
        """The conversation so far; `open_answer`: up to where the assistant is to speak."""
        if conversation.raw or self._template is None:
            return "\n\n".join(m.content for m in said)
        try:
            return self._template.render([{"role": m.role, "content": m.content} for m in said], open_answer)
        except UsageError as error:
            raise UsageError(f"{conversation.where}: {error}") from None

    def tokens(self, text: str, conversation: Conversation, first: bool = True) -> list[int]:
        """Tokens of a text, or (not `first`) of its continuation."""
        special = not (conversation.raw or self._template is None)
        tokens = self.tokenizer.encode(text, add_special=first, parse_special=special)
        if first and self.tokenizer.add_bos and tokens[:2] == [self.tokenizer.bos] * 2:
            del tokens[0]
        return tokens


def render(conversation: Conversation, renderer: Renderer, most: int) -> list[Masked]:
    """An existing conversation or text as samples of at most `most` tokens.

    A raw text counts from its second token on, cut into pieces. Of a conversation that is too long the end is left out.
    Raises UsageError that names the sample where the assistant says nothing, or the template does not show it.
    """
    if conversation.raw:
        tokens = renderer.tokens(renderer.text(conversation.messages, conversation, False), conversation)
        return [
            Masked(tokens[at : at + most], [(1, len(tokens[at : at + most]))])
            for at in range(0, len(tokens), most)
            if len(tokens[at : at + most]) > 1
        ]
    samples: list[Masked] = []
    current, shown = Masked([]), ""
    said: list[Message] = []
    for message in conversation.messages:
        if message.role == "assistant":
            before = renderer.text(said, conversation, True)
            after = renderer.text([*said, message], conversation, False)
            before = _common(before, after)  # some templates open an answer with more than they keep of it
            answer = after[len(before) :]
            if message.content.strip()[-20:] not in answer:
                raise UsageError(f"{conversation.where}: the chat template does not show what the assistant says")
            if not current.tokens or not before.startswith(shown):
                samples.append(current)
                current, shown = Masked([]), ""
            current.tokens += renderer.tokens(before[len(shown) :], conversation, first=not current.tokens)
            start = len(current.tokens)
            current.tokens += renderer.tokens(answer, conversation, first=False)
            current.spans.append((start, _end(current.tokens, start, renderer.tokenizer)))
            shown = after
        said.append(message)
    samples = [_cut(sample, most) for sample in [*samples, current]]
    samples = [sample for sample in samples if sample.spans]
    if not samples:
        raise UsageError(f"{conversation.where}: the assistant says nothing in it (an empty mask): leave it out, or let the "
                         "target answer it with localspec data")  # fmt: skip
    return samples


def _common(a: str, b: str) -> str:
    """Their longest common beginning."""
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:n]


def _end(tokens: Sequence[int], start: int, tokenizer: Tokenizer) -> int:
    """Behind the first token from `start` on that ends a generation."""
    ends = np.flatnonzero(tokenizer.eog[np.asarray(tokens[start:], np.int64)])
    return start + int(ends[0]) + 1 if len(ends) else len(tokens)


def _cut(sample: Masked, most: int) -> Masked:
    """Its beginning, of whole and half answers up to `most` tokens; what follows the last answer is of no use."""
    spans = [(start, min(end, most)) for start, end in sample.spans if 0 < start < most]
    return Masked(sample.tokens[: spans[-1][1]] if spans else [], spans)


def _outside_thinking(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> npt.NDArray[np.uint8]:
    """u8[n]: 0 for tokens inside a thinking block of one of the `spans`, 1 elsewhere. A block that never ends goes on to
    the end of its span."""
    keep = np.ones(len(tokens), np.uint8)
    for start, end in spans:
        pieces = [tokenizer.piece(int(t), special=True) for t in tokens[start:end]]
        ends = np.cumsum([len(p) for p in pieces])
        starts = ends - [len(p) for p in pieces]
        for found in _THINKING.finditer(b"".join(pieces)):
            inside = (starts < found.end()) & (ends > found.start())
            keep[start:end][inside] = 0
    return keep
