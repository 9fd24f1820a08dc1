"""A conversation with a model, without a terminal: what was said, the token ids behind it, and what still fits.

Every turn renders the whole conversation through the model's chat template; the engine keeps the part that its cache
holds already. What the model itself wrote is fed back as the ids it wrote, because the same text may be cut into other
tokens when it is encoded anew, and then nothing behind the first difference could be reused:

    rendered now    <user>Hi<end><bot>Hello there<end><user>And you?<end><bot>
    known text      <user>Hi<end><bot>Hello there          ids: prompt of that turn + ids generated
    encoded anew                                 <end><user>And you?<end><bot>

Where the template changes what was said (thinking stripped, blanks trimmed), the text is encoded as a whole.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from localspec.accept import Sampling
from localspec.chat.transcript import Saved, read_transcript, write_transcript
from localspec.drafters import Sequence as DraftSequence
from localspec.engine import Engine, Request, Stats, Step
from localspec.errors import ContextFullError, LocalspecError, UsageError
from localspec.template import ChatTemplate, Message
from localspec.tokenizer import Tokenizer


class Template(Protocol):
    """Turns messages into the text and the ids that a model reads."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str: ...

    def encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]: ...


class PlainTranscript:
    """For models without a chat template: "User:" and "Assistant:" lines. An answer ends where the next user begins."""

    STOPS = ("\nUser:",)

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
        lines = [names[m["role"]] + m["content"].strip() + ("\n" if m["role"] == "system" else "") for m in messages]
        # No blank at the end: most vocabularies hold it at the front of the next word.
        return "\n".join([*lines, *(["Assistant:"] if add_generation_prompt else [])])

    def encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        return self._tokenizer.encode(self.render(messages, add_generation_prompt), parse_special=False)


@dataclass(frozen=True, slots=True)
class Known:
    """A beginning of the rendered conversation whose ids are known because the model wrote or read them."""

    text: str
    tokens: list[int]


@dataclass(slots=True)
class Exchange:
    """What the user said and what was answered. `known` reaches to the end of the answer."""

    user: str
    assistant: str
    known: Known | None = None


@dataclass(slots=True)
class Turn:
    """One question on its way. `stream` fills in the answer; `stop` is the engine's reason, or ``error``."""

    user: str
    rendered: str
    tokens: list[int]
    first: int  # oldest exchange that is still sent
    n_dropped: int  # exchanges that this turn was the first to leave out
    answer: str = ""
    ids: list[int] = field(default_factory=list)  # generated, without the end-of-generation token
    stop: str = ""
    stats: Stats = field(default_factory=Stats)  # up to date after each step
    n_read: int = 0  # tokens of the prompt that are in the cache
    kept: bool = False  # whether it became part of the conversation

    @property
    def n_used(self) -> int:
        """Tokens of context that question and answer take up by now."""
        return len(self.tokens) + len(self.ids)


class Chat:
    """One conversation over slot 0 of an engine. Nothing in here prints; errors leave the conversation as it was.

    `max_tokens` bounds each answer (None: until the model ends). The random numbers of each question have a key of their
    own, so that a question asked again after `undo` can be answered in another way, and a session with the same seed and
    the same input repeats itself.
    """

    #: Room for an answer that makes old exchanges go, at most; small contexts give an eighth.
    MAX_ROOM = 256

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        template: Template | None = None,
    ):
        model = engine.session.model
        self.engine = engine
        self.sampling = sampling or Sampling()
        self.max_tokens = max_tokens
        self.template: Template = template or ChatTemplate.of(model) or PlainTranscript(model.tokenizer)
        self.system: str | None = None
        self.exchanges: list[Exchange] = []
        self.first = 0
        self.last: Turn | None = None
        self.total = Stats()
        self.n_answers = 0
        self.file: Path | None = None
        self._drafter = engine.drafter
        self._n_asked = 0
        if system:
            self.set_system(system)

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> Turn:
        """Make a question ready: render the conversation with it and leave out the oldest exchanges if they don't fit.

        Raises UsageError (the template refuses, the text is no text) or ContextFullError (the question alone is too
        long); the conversation then stays as it was.
        """
        if not text.strip():
            raise UsageError("there is nothing to send")
        n_ctx = self.engine.session.n_ctx
        self.engine.session.model.tokenizer.check_length(text.strip(), n_ctx)
        first = self.first
        rendered, tokens = self._encode(first, text)
        room = min(self.MAX_ROOM, n_ctx // 8)
        if len(tokens) + room > n_ctx:
            # Each time that the beginning changes, everything is computed anew: so make a quarter free at once, not a line.
            goal = n_ctx - max(room, n_ctx // 4)
            while first < len(self.exchanges) and len(tokens) > goal:
                first += 1
                rendered, tokens = self._encode(first, text)
        if len(tokens) >= n_ctx:
            raise ContextFullError(
                f"this message makes {len(tokens)} tokens{' with the system message' if self.system else ''}, the context "
                f"holds {n_ctx}: shorten it, or start with a larger --ctx-size"
            )
        return Turn(text, rendered, tokens, first, first - self.first)

    def stream(self, turn: Turn, stopped: Callable[[], bool] = lambda: False) -> Generator[Step, None, None]:
        """Write the answer to `turn`, step by step. However it ends, what was said is kept and the engine is free again."""
        request = Request(turn.tokens, self.sampling, self.max_tokens, self._stops, key=self._n_asked)
        self._n_asked += 1
        turn.stop = "error"
        try:
            yield from self._read(turn, stopped)
            n_read, t_read = turn.stats.n_prompt_computed, turn.stats.t_prompt
            for step in self.engine.generate(request, stopped) if turn.stop != "interrupted" else ():
                if turn.stats is not (stats := self.engine.stats(0)):
                    stats.n_prompt_computed += n_read
                    stats.t_prompt += t_read
                    turn.stats = stats
                turn.answer += "".join(piece.text for piece in step.pieces)
                turn.ids.extend(piece.token for piece in step.pieces if piece.token >= 0)
                if step.stop == "eog":
                    turn.ids.pop()
                turn.stop = step.stop or "interrupted"  # the latter where the caller goes away
                yield step
        except KeyboardInterrupt:
            turn.stop = "interrupted"
            self._settle()
        except LocalspecError:
            turn.stop = "error"
            self._settle()
            raise
        finally:
            self._keep(turn)

    def _read(self, turn: Turn, stopped: Callable[[], bool]) -> Generator[Step, None, None]:
        """All of the prompt but its last piece: a long one takes its time, and Ctrl-C must get through between pieces."""
        session = self.engine.session
        held, wanted = session.tokens[0], turn.tokens[:-1]
        turn.n_read = next((i for i, (a, b) in enumerate(zip(held, wanted)) if a != b), min(len(held), len(wanted)))
        for end in range(turn.n_read + session.n_batch, len(wanted), session.n_batch):
            if stopped():
                turn.stop = "interrupted"
                return
            began = time.perf_counter()
            turn.stats.n_prompt_computed += session.prefill(0, wanted[:end])
            turn.stats.t_prompt += time.perf_counter() - began
            turn.n_read = end
            yield Step(0, [])

    def _keep(self, turn: Turn) -> None:
        with contextlib.suppress(KeyError):  # it may never have started
            self.engine.finish(0)
        if turn.answer or turn.stop not in ("interrupted", "error"):
            self.first = turn.first
            self.exchanges.append(Exchange(turn.user, turn.answer, self._known(turn)))
            turn.kept = True
        self.last = turn
        self.total.add(turn.stats)
        self.n_answers += turn.kept

    def _known(self, turn: Turn) -> Known:
        """Text and ids up to the end of the answer, less what a stop string or half a character took away."""
        tokenizer = self.engine.session.model.tokenizer
        ids = list(turn.ids)
        raw = b"".join(tokenizer.piece(i) for i in ids)
        while ids:
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = None
            if text is not None and turn.answer.startswith(text):
                return Known(turn.rendered + text, turn.tokens + ids)
            raw = raw[: len(raw) - len(tokenizer.piece(ids.pop()))]
        return Known(turn.rendered, turn.tokens)

    def _settle(self) -> None:
        """After a decode that was cut short: what it may have left in the caches, beyond what they know of, is dropped."""
        session = self.engine.session
        session.rollback(0, max(0, len(session.tokens[0]) - 1))
        if self.engine.drafter is not None:
            self.engine.drafter.rewind(DraftSequence(0, 0, self.sampling), 0)

    @property
    def _stops(self) -> tuple[str, ...]:
        return PlainTranscript.STOPS if isinstance(self.template, PlainTranscript) else ()

    # -- what the model reads ------------------------------------------------------------------------------------------

    def messages(self, first: int = 0) -> list[dict[str, str]]:
        """System message and exchanges from `first` on."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges[first:]:
            messages.append({"role": "user", "content": exchange.user})
            messages.append({"role": "assistant", "content": exchange.assistant})
        return messages

    def _encode(self, first: int, text: str) -> tuple[str, list[int]]:
        """(rendered text, ids) of the conversation from exchange `first` on, with `text` as the next question."""
        messages = [*self.messages(first), {"role": "user", "content": text}]
        rendered = self.template.render(messages)
        tokenizer = self.engine.session.model.tokenizer
        for exchange in reversed(self.exchanges[first:]):
            known = exchange.known
            if known is None or not rendered.startswith(known.text):
                continue
            rest = rendered[len(known.text) :]
            special = not isinstance(self.template, PlainTranscript)
            tokens = tokenizer.encode(rest, add_special=False, parse_special=special)
            # Some vocabularies put a blank before whatever they encode: then the whole must be encoded at once.
            if tokenizer.decode(tokens, special=True) == rest:
                return rendered, known.tokens + tokens
        return rendered, self.template.encode(messages)

    @property
    def n_used(self) -> int:
        """Tokens of context that the conversation takes up."""
        if not self.exchanges:
            return 0
        known = self.exchanges[-1].known
        if known is not None:
            return len(known.tokens)
        return len(self.template.encode(self.messages(self.first), add_generation_prompt=False))

    # -- changing the conversation -------------------------------------------------------------------------------------

    def set_system(self, text: str | None) -> None:
        """Another system message, for the conversation as it stands. Raises UsageError where the template knows none."""
        if text:
            self.template.render([{"role": "system", "content": text}, {"role": "user", "content": "?"}])
        self.system = text or None
        self.first = 0  # what was left out may fit now

    def reset(self) -> int:
        """Forget all exchanges; returns how many there were. The system message stays."""
        n = len(self.exchanges)
        self.exchanges.clear()
        self.first = 0
        return n

    def undo(self) -> Exchange:
        """Take the last exchange back and return it."""
        if not self.exchanges:
            raise UsageError("there is nothing to undo")
        self.first = 0
        return self.exchanges.pop()

    def save(self, path: Path) -> bool:
        """Write the whole conversation, exchanges that no longer fit included; returns whether it replaced a file."""
        pairs = [(e.user, e.assistant) for e in self.exchanges]
        replaced = write_transcript(path, Saved(self.system, pairs), self.engine.session.model.path.name)
        self.file = path
        return replaced

    def load(self, path: Path) -> None:
        """Replace the conversation by a saved one. Raises UsageError, with the conversation kept, where it can't be used."""
        saved = read_transcript(path)
        before = self.system, self.exchanges
        self.system, self.exchanges = saved.system, [Exchange(u, a) for u, a in saved.exchanges]
        try:
            self.template.render([*self.messages(), {"role": "user", "content": "?"}])
        except LocalspecError:
            self.system, self.exchanges = before
            raise
        self.first = 0
        self.file = path

    # -- settings ------------------------------------------------------------------------------------------------------

    def set_temperature(self, value: str) -> None:
        """Take a temperature as typed. Raises UsageError."""
        try:
            temperature = float(value)
        except ValueError:
            temperature = math.nan
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UsageError(f"a temperature is a number from 0 (greedy) up, such as 0.8, not '{value}'")
        self.sampling = replace(self.sampling, temperature=temperature)

    @property
    def drafting(self) -> bool:
        """Whether answers are drafted for at the moment."""
        return self.engine.drafter is not None

    @property
    def drafter_name(self) -> str | None:
        """The drafter of this session, in use or not."""
        return self._drafter.name if self._drafter is not None else None

    def set_drafting(self, on: bool) -> None:
        """Draft, or decode plainly, from the next answer on. Raises UsageError where there is no drafter."""
        if on and self._drafter is None:
            raise UsageError("there is no drafter in this session: start without --spec-type none")
        self.engine.drafter = self._drafter if on else None
