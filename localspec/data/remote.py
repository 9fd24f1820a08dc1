"""Answers written by other machines that serve the same target, read here: `localspec data --endpoint`.

Writing costs a decode for every token, reading one for a whole batch of them. So servers write, as many as there are, and
the local target computes states and likeliest tokens in a prefill over what they wrote.

The tokens must be those that the servers wrote, not those that their text would give. Those who give ids are taken by their
word; of those who give text and a count, only answers are kept whose text gives as many tokens again.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from localspec.data.dialogue import Dialogue
from localspec.data.endpoints import Answer, Ask, BusyError, Endpoint, RefusedError
from localspec.data.extract import read_states
from localspec.data.fleet import Fleet, Lost, Patience, Refused
from localspec.data.generate import Progress
from localspec.data.jobs import Job
from localspec.data.mask import Renderer
from localspec.data.shards import Sample
from localspec.errors import DataError, UsageError
from localspec.model import Model
from localspec.target import TargetSession

#: Letters, digits, indentation, scripts and signs that tokenizers cut differently.
_PROBE = "def f(x):\n\treturn x**2  # 12345 Größe, 世界, don't 🙂\n\n"
_LOOKS = 3  # tries before an endpoint counts as absent
_CHECKED_TOKENS = 256
#: The least share of tokens that the local target finds likely, too: of greedy answers the very likeliest (numerics and ties
#: cost about one in a hundred, another quantisation a few), of others those among the teacher's.
_LEAST_GREEDY, _LEAST_DRAWN = 0.85, 0.5
_LEAST_K = 8  # of teacher's tokens, for the latter


def connect(
    endpoints: Sequence[Endpoint], model: Model, n_ctx: int, say: Callable[[str], None], patience: Patience | None = None
) -> list[Endpoint]:
    """Those of `endpoints` that answer. Raises UsageError where one serves another tokenizer or too small a context, where
    one refuses us, and where none answers."""
    patience = patience or Patience(n_tries=_LOOKS)
    found, absent = [], []
    for endpoint in endpoints:
        for attempt in range(patience.n_tries):
            try:
                _check(endpoint, model, n_ctx)
                found.append(endpoint)
                break
            except RefusedError as error:
                raise UsageError(f"--endpoint {endpoint.url}: {error}") from None
            except BusyError as error:
                if attempt + 1 < patience.n_tries:
                    time.sleep(max(error.wait, patience.first_wait * 2.0**attempt))
                else:
                    absent.append(f"{endpoint.url}: {error}")
    if absent and not found:
        raise UsageError(f"no endpoint answers ({'; '.join(absent)}): start one with localspec serve or llama-server")
    for line in absent:
        say(f"{line}: left out")
    return found


def _check(endpoint: Endpoint, model: Model, n_ctx: int) -> None:
    facts = endpoint.look()
    where = f"--endpoint {endpoint.url}"
    other = f"{where} serves {facts.name[:80]}, which is another model than {model.path.name}"
    if facts.n_vocab is not None and facts.n_vocab != model.n_vocab:
        raise UsageError(f"{other}: it has {facts.n_vocab} tokens, not {model.n_vocab}")
    if facts.tokenizer_hash is not None and facts.tokenizer_hash != model.gguf.tokenizer_hash():
        raise UsageError(f"{other}: its tokenizer differs")
    if facts.n_ctx is not None and facts.n_ctx < n_ctx:
        raise UsageError(f"{where} has a context of {facts.n_ctx} tokens, and {n_ctx} are wanted: start it with more, or "
                         f"give --ctx-size {facts.n_ctx}")  # fmt: skip
    mine = model.tokenizer.encode(_PROBE, add_special=False)
    theirs = endpoint.tokens_of(_PROBE)
    if theirs is not None and theirs != mine:
        raise UsageError(f"{other}: its tokenizer differs")
    if facts.tokenizer_hash is None and theirs is None:
        n = endpoint.n_tokens_of(_PROBE)
        if n is not None and n not in (len(mine), len(mine) + 1):
            raise UsageError(f"{other}: it makes {n} tokens of a text that has {len(mine)} here")


class RemoteGenerator:
    """Has `endpoints` write the answers to groups of jobs, `n_each` at once each; reads them in sequence 0 of `session`.

    `max_tokens` limits one answer. `teacher_k` likeliest tokens are kept for each of the assistant's tokens. `say` gets a
    line when an endpoint is left out.
    """

    def __init__(
        self, session: TargetSession, endpoints: Sequence[Endpoint], n_each: int, max_tokens: int = 512, teacher_k: int = 32,
        keep_thinking: bool = True, say: Callable[[str], None] = lambda text: None, patience: Patience | None = None,
    ):  # fmt: skip
        if not 1 <= teacher_k <= session.model.n_vocab:
            raise UsageError(f"--teacher-k must be between 1 and {session.model.n_vocab}, not {teacher_k}")
        self.progress = Progress()
        self.n_differ = 0  # answers whose tokens can't be told from their text
        self.n_refused = 0
        self.first_refusal = ""
        self._session = session
        self._endpoints = endpoints
        self._n_each = n_each
        self._max_tokens = max_tokens
        self._teacher_k = teacher_k
        self._keep_thinking = keep_thinking
        self._say = say
        self._patience = patience
        self._tokenizer = session.model.tokenizer
        self._renderer = Renderer(session.model)
        self._number = 0
        self._seen = {id(endpoint): _Likeness() for endpoint in endpoints}

    def run(
        self, groups: Iterable[Iterable[Job]], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Sample, str]]:
        """(sample, key) of every conversation as it ends. `stopped` is asked before every one; what is begun is lost.

        Raises UsageError where an endpoint turns out to serve another model, DataError when none is left.
        """
        waiting = (job for group in groups for job in group)
        asked: dict[int, Dialogue] = {}
        held: dict[int, list[tuple[Sample, str]]] = defaultdict(list)  # until the endpoint is known to be like the target
        lost: list[str] = []
        fleet = Fleet(self._endpoints, self._n_each, self._patience)
        try:
            while not stopped():
                # As many again as are in flight: nobody waits while we read.
                while len(asked) < 2 * self._n_each * len(self._endpoints) and (job := next(waiting, None)) is not None:
                    self._ask(fleet, asked, Dialogue.of(job, self._renderer))
                if not asked:
                    break
                event = fleet.get(0.2)
                if event is None:
                    if not fleet.n_alive:
                        raise DataError(f"no endpoint is left ({'; '.join(lost)}): what was written is kept; run it again "
                                        "when one answers")  # fmt: skip
                elif isinstance(event, Lost):
                    lost.append(f"{event.endpoint.url}: {event.reason}")
                    n_left = len(self._endpoints) - len(lost)  # as far as was told: another one may just be ending
                    if n_left:
                        self._say(f"{lost[-1]}: left out, {n_left} of {len(self._endpoints)} endpoints go on")
                elif isinstance(event, Refused):
                    del asked[event.number]
                    self.n_refused += 1
                    self.first_refusal = self.first_refusal or f"{event.endpoint.url}: {event.reason}"
                else:
                    ready = held[id(event.endpoint)]
                    ready += self._read(fleet, asked, asked.pop(event.number), event.answer, event.endpoint)
                    if self._seen[id(event.endpoint)].known:
                        yield from ready
                        ready.clear()
            for endpoint in self._endpoints:
                self._require_likeness(endpoint)
                yield from held[id(endpoint)]
        finally:
            fleet.close()

    def _ask(self, fleet: Fleet, asked: dict[int, Dialogue], dialogue: Dialogue) -> None:
        room = self._session.n_ctx - len(dialogue.tokens)
        if room < 1 or not dialogue.tokens:
            self.progress.n_skipped += 1
            return
        dialogue.begin()
        self._number += 1
        asked[self._number] = dialogue
        sampling = dialogue.job.sampling
        turn = f"{sampling.seed}/{dialogue.key}/{len(dialogue.spans)}"
        seed = int.from_bytes(hashlib.sha256(turn.encode()).digest()[:4], "little") >> 1  # -1 would be a random one
        fleet.ask(self._number, Ask(list(dialogue.tokens), min(self._max_tokens, room), sampling, seed))

    def _read(
        self, fleet: Fleet, asked: dict[int, Dialogue], dialogue: Dialogue, answer: Answer, endpoint: Endpoint
    ) -> Iterator[tuple[Sample, str]]:
        tokens = self._tokens(answer, endpoint)
        if tokens is None:
            self.n_differ += 1
            return
        room = self._session.n_ctx - len(dialogue.tokens)
        dialogue.tokens += tokens[: min(self._max_tokens, room)]
        dialogue.end()
        self.progress.n_written += dialogue.n_answered
        if not dialogue.n_answered:
            self.progress.n_skipped += 1
            return
        whole, following = dialogue.follow(self._renderer, self._session.n_ctx)
        if whole:
            mask = dialogue.masked.mask(self._tokenizer, self._keep_thinking)
            if mask.any():
                source = dialogue.job.conversation.source
                sample = read_states(self._session, dialogue.masked, mask, self._teacher_k, source)
                self._seen[id(endpoint)].add(sample, dialogue.job)
                if self._seen[id(endpoint)].known:
                    self._require_likeness(endpoint)
                self.progress.n_samples += 1
                self.progress.n_tokens += len(sample.tokens)
                self.progress.n_prompt += len(sample.tokens)
                yield sample, dialogue.key
            else:
                self.progress.n_skipped += 1
        if following is not None:
            self._ask(fleet, asked, following)

    def _tokens(self, answer: Answer, endpoint: Endpoint) -> list[int] | None:
        """The answer's ids, up to the first that ends a generation; None where they can't be told."""
        tokens = answer.tokens
        if tokens is None:
            tokens = self._tokenizer.encode(answer.text, add_special=False, parse_special=False)
            n = answer.n_tokens
            same = n == len(tokens) or (answer.ended and n == len(tokens) + 1)
            if not same or self._tokenizer.decode(tokens) != answer.text:
                return None
            if answer.ended and 0 <= self._tokenizer.eos < self._tokenizer.n_vocab:
                tokens = [*tokens, self._tokenizer.eos]
        if any(not 0 <= token < self._tokenizer.n_vocab for token in tokens):
            raise UsageError(f"--endpoint {endpoint.url} wrote a token outside the vocabulary: it serves another model")
        ends = np.flatnonzero(self._tokenizer.eog[np.array(tokens, np.int64)])
        return tokens[: int(ends[0]) + 1] if len(ends) else tokens

    def _require_likeness(self, endpoint: Endpoint) -> None:
        misfit = self._seen[id(endpoint)].misfit
        if misfit:
            name = self._session.model.path.name
            raise UsageError(f"--endpoint {endpoint.url} serves another model than {name}: {misfit}; leave it out, or serve "
                             "the same file there")  # fmt: skip


class _Likeness:
    """Whether what one endpoint writes is what the local target would have written."""

    def __init__(self) -> None:
        self._n_seen = 0
        self._n = [0, 0]  # tokens that tell: of answers drawn, greedy
        self._likely = [0, 0]

    def add(self, sample: Sample, job: Job) -> None:
        """Count the tokens of a sample."""
        greedy = job.sampling.greedy and not job.sampling.needs_history
        rows = np.flatnonzero(sample.mask)
        ids = sample.teacher_ids[:, : 1 if greedy else None]
        self._n_seen += len(rows)
        if not greedy and ids.shape[1] < _LEAST_K:
            return
        self._n[greedy] += len(rows)
        self._likely[greedy] += int((ids == sample.tokens[rows, None]).any(axis=1).sum())

    @property
    def known(self) -> bool:
        """Whether enough has been seen."""
        return self._n_seen >= _CHECKED_TOKENS

    @property
    def misfit(self) -> str:
        """What does not fit; empty where all does, or too little was seen."""
        for n, likely, least, words in (
            (self._n[1], self._likely[1], _LEAST_GREEDY, "greedy tokens {} are the likeliest here"),
            (self._n[0], self._likely[0], _LEAST_DRAWN, "tokens {} are among the likely ones here"),
        ):
            if n >= _CHECKED_TOKENS // 8 and likely < least * n:
                return f"of its {n} {words.format(likely)}"
        return ""
