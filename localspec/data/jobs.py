"""What is to be answered, by whom it is not said: prompts times answers, counted but never listed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from localspec.accept import Sampling
from localspec.data.conversations import Conversation


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation to be answered once. `key` is unique; it also keys the random numbers, so that an answer does not
    depend on what else is being written."""

    conversation: Conversation
    sampling: Sampling
    key: str
    random_key: int = field(init=False)  # 64 bits of the key; asked for at every token

    def __post_init__(self) -> None:
        bits = int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "little")
        object.__setattr__(self, "random_key", bits)


class Jobs:
    """Groups of jobs for one slot each, in random but fixed order: first one answer to every prompt, then the others, all
    those to a prompt one after another. Made while they are gone through; a group may be empty.

    `done`: keys that are there already.
    """

    def __init__(
        self, conversations: Iterable[Conversation], n_answers: int, sampling: Sampling, greedy_first: bool, done: set[str]
    ):
        keyed = [(c.key(), c) for c in conversations]
        self._order = sorted(keyed, key=lambda pair: hashlib.sha256(pair[0].encode() + b"order").digest())
        self._n_answers = n_answers
        self._warm = sampling
        self._first = Sampling(temperature=0.0, seed=sampling.seed) if greedy_first else sampling
        self._finished = {key.partition(".")[0] for key in done}
        numbers = ((key, number) for key, _, number in (name.partition("#") for name in self._finished))
        self._n_finished = Counter(key for key, number in numbers if number.isdecimal() and int(number) < n_answers)

    @property
    def n_left(self) -> int:
        """Answers that are not there yet."""
        return sum(self._n_answers - self._n_finished[key] for key, _ in self._order)

    def open(self) -> list[Conversation]:
        """The conversations that want an answer still."""
        return [c for key, c in self._order if self._n_finished[key] < self._n_answers]

    def __iter__(self) -> Iterator[Iterator[Job]]:
        for key, conversation in self._order:
            yield self._group(key, conversation, range(1))
        for key, conversation in self._order:
            yield self._group(key, conversation, range(1, self._n_answers))

    def _group(self, key: str, conversation: Conversation, numbers: range) -> Iterator[Job]:
        for number in numbers:
            name = f"{key}#{number}"
            if name not in self._finished:
                yield Job(conversation, self._warm if number else self._first, name)
