"""A conversation while it is being answered: its tokens so far, and how it goes on when an answer has ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from localspec.data.conversations import Message
from localspec.data.jobs import Job
from localspec.data.mask import Masked, Renderer


@dataclass(slots=True)
class Dialogue:
    """A job in work. Whoever writes appends to `tokens`; what it appends since `begin` is the open answer."""

    job: Job
    said: list[Message]
    asked: deque[Message]  # what the user will say next
    text: str  # what the tokens say, up to the open answer
    tokens: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the assistant's tokens, the last one open
    number: int = 0  # of the sample, where a conversation gives several

    @classmethod
    def of(cls, job: Job, renderer: Renderer) -> Dialogue:
        """Up to where the assistant is to speak first."""
        asked = deque(job.conversation.asked)
        said = _to_the_next_answer(asked)
        text = renderer.text(said, job.conversation, True)
        return cls(job, said, asked, text, renderer.tokens(text, job.conversation))

    @property
    def key(self) -> str:
        """The sample's: the job's, with a number from the second sample on."""
        return self.job.key + (f".{self.number}" if self.number else "")

    @property
    def n_answered(self) -> int:
        """Tokens of the open answer."""
        return len(self.tokens) - self.spans[-1][0]

    @property
    def masked(self) -> Masked:
        """What is there, with all its answers."""
        return Masked(self.tokens, self.spans)

    def begin(self) -> None:
        """Open an answer."""
        self.spans.append((len(self.tokens), len(self.tokens)))

    def end(self) -> None:
        """Close it."""
        self.spans[-1] = (self.spans[-1][0], len(self.tokens))

    def follow(self, renderer: Renderer, most: int) -> tuple[bool, Dialogue | None]:
        """After a closed answer: (whether what is here is a whole sample now, the dialogue that goes on). It goes on where
        the user has more to say, the answer came to its end, and `most` tokens leave room for another one."""
        tokenizer = renderer.tokenizer
        start, n = self.spans[-1]
        if not self.asked or not n or not tokenizer.eog[self.tokens[-1]]:
            return True, None
        answer = self.tokens[start:n]
        said = [*self.said, Message("assistant", tokenizer.decode(answer[:-1])), *_to_the_next_answer(self.asked)]
        conversation = self.job.conversation
        shown = self.text + tokenizer.decode(answer, special=True)
        text = renderer.text(said, conversation, True)
        if text.startswith(shown):
            following = renderer.tokens(text[len(shown) :], conversation, first=False)
            if n + len(following) + 1 > most:
                return True, None
            return False, replace(self, said=said, text=text, tokens=self.tokens + following)
        # The template shows its past otherwise (thinking left out, spaces trimmed): a sample of its own.
        tokens = renderer.tokens(text, conversation)
        return True, Dialogue(self.job, said, self.asked, text, tokens, number=self.number + 1)


def _to_the_next_answer(asked: deque[Message]) -> list[Message]:
    """What is said before the assistant speaks again, taken off `asked`."""
    said: list[Message] = []
    while asked:
        said.append(asked.popleft())
        if said[-1].role == "user":
            break
    return said
