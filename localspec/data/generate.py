"""The target writes its own training answers, many at once, and is listened to while it does.

Continuous batching: every slot writes one answer; when it ends, the slot takes up the next prompt while the others go on.
One decode a step carries one token of every slot. From the same pass come the taps and the teacher's likeliest tokens.
What a slot's cache shares with its next prompt (the system message, the whole prompt for a second answer) stays, with its
states: our kernels give the same rows for it, whatever else is in the batch.

A prompt is computed in a decode of its own: llama.cpp cuts a batch into parts of equal length per sequence, so nothing
would be won by putting it into a step of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from localspec.accept import draw
from localspec.data.dialogue import Dialogue
from localspec.data.jobs import Job
from localspec.data.mask import Renderer
from localspec.data.shards import Sample
from localspec.errors import ContextFullError, UsageError
from localspec.target import TargetSession
from localspec.topk import top_k

_NO_HISTORY = np.zeros(0, np.int32)


@dataclass(slots=True)
class Progress:
    """What has been done since the start. `n_tokens` counts whole samples, `n_written` every token generated."""

    n_samples: int = 0
    n_tokens: int = 0
    n_written: int = 0
    n_prompt: int = 0  # prompt tokens computed
    n_skipped: int = 0  # prompts that don't fit, answers in which nothing counts
    began: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> float:
        """Tokens of the assistant's per second."""
        return self.n_written / max(1e-9, time.perf_counter() - self.began)


class Generator:
    """Writes the answers to groups of jobs. `session` must have as many sequences as answers are to be written at once.

    `max_tokens` limits one answer. `teacher_k` likeliest tokens are kept for each of the assistant's tokens.
    """

    def __init__(
        self,
        session: TargetSession,
        max_tokens: int = 512,
        teacher_k: int = 32,
        keep_thinking: bool = True,
    ):
        if max_tokens < 1:
            raise UsageError(f"--max-tokens must be at least 1, not {max_tokens}")
        if not 1 <= teacher_k <= session.model.n_vocab:
            raise UsageError(f"--teacher-k must be between 1 and {session.model.n_vocab}, not {teacher_k}")
        self.session = session
        self.max_tokens = max_tokens
        self.teacher_k = teacher_k
        self.keep_thinking = keep_thinking
        self.progress = Progress()
        self._tokenizer = session.model.tokenizer
        self._renderer = Renderer(session.model)
        n_slots, n_ctx = session.settings.n_sequences, session.n_ctx
        n_taps = len(session.settings.taps)
        # Never touched, never there: the system gives pages as rows are written.
        self._taps = np.empty((n_slots, n_ctx, n_taps, session.model.n_embd), np.float32)
        self._ids = np.empty((n_slots, n_ctx, teacher_k), np.int32)
        self._logits = np.empty((n_slots, n_ctx, teacher_k), np.float32)
        self._lse = np.empty((n_slots, n_ctx), np.float32)
        self._slots: list[Dialogue | None] = [None] * n_slots
        self._queues: list[Iterator[Job]] = [iter(()) for _ in range(n_slots)]

    def run(
        self, groups: Iterable[Iterable[Job]], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Sample, str]]:
        """(sample, key) of every conversation as it ends. `stopped` is asked before every step; what is begun is lost."""
        waiting = iter(groups)
        while True:
            for number, slot in enumerate(self._slots):
                if slot is None:
                    self._refill(number, waiting, stopped)
            if stopped() or not any(self._slots):
                return
            for number in self._step():
                yield from self._end_of_answer(number)

    # -- taking up ---------------------------------------------------------------------------------------------------------

    def _refill(self, number: int, waiting: Iterator[Iterable[Job]], stopped: Callable[[], bool]) -> None:
        while self._slots[number] is None and not stopped():
            job = next(self._queues[number], None)
            if job is not None:
                self._begin(number, Dialogue.of(job, self._renderer))
                continue
            group = next(waiting, None)
            if group is None:
                return
            self._queues[number] = iter(group)

    def _begin(self, number: int, slot: Dialogue) -> None:
        """Compute a prompt; its last token is the pending one. Too long a prompt is left out."""
        n = len(slot.tokens)
        if n < 1 or n + 1 > self.session.n_ctx:
            self.progress.n_skipped += 1
            self._slots[number] = None
            return

        def keep(start: int, rows: np.ndarray) -> None:
            self._taps[number, start : start + len(rows)] = rows

        self.progress.n_prompt += self.session.prefill(number, slot.tokens[:-1], tapped=keep)
        slot.begin()
        self._slots[number] = slot

    # -- a step ------------------------------------------------------------------------------------------------------------

    def _step(self) -> list[int]:
        """One token more for every slot. Returns the slots whose answer ended."""
        numbers = [i for i, slot in enumerate(self._slots) if slot is not None]
        slots = [slot for slot in self._slots if slot is not None]
        at = [len(slot.tokens) - 1 for slot in slots]  # of the pending token
        rows = self.session.decode([(i, slot.tokens[-1:]) for i, slot in zip(numbers, slots)])
        tops = top_k(rows.logits, self.teacher_k)
        samplings = [slot.job.sampling for slot in slots]
        tokens = tops.ids[:, 0]
        if not all(s.greedy and not s.needs_history for s in samplings):
            histories = [np.array(s.tokens, np.int32) if s.job.sampling.needs_history else _NO_HISTORY for s in slots]
            tokens = draw(rows.logits, [s.job.random_key for s in slots], [p + 1 for p in at], samplings, histories).tokens
        if rows.taps is not None:
            self._taps[numbers, at] = rows.taps
        self._ids[numbers, at], self._logits[numbers, at], self._lse[numbers, at] = tops.ids, tops.logits, tops.lse
        ends = self._tokenizer.eog[tokens].tolist()
        over = []
        for number, slot, token, end in zip(numbers, slots, tokens.tolist(), ends):
            slot.tokens.append(token)
            if end or slot.n_answered >= self.max_tokens or len(slot.tokens) >= self.session.n_ctx:
                slot.end()
                over.append(number)
        self.progress.n_written += len(slots)
        return over

    def _end_of_answer(self, number: int) -> Iterator[tuple[Sample, str]]:
        """Go on to the user's next turn, or give the sample away."""
        slot = self._slots[number]
        if slot is None:
            return
        whole, following = slot.follow(self._renderer, self.session.n_ctx)
        if whole:
            yield from self._give(number, slot)
        self._slots[number] = None
        if following is not None:
            self._begin(number, following)

    def _give(self, number: int, slot: Dialogue) -> Iterator[tuple[Sample, str]]:
        n = len(slot.tokens)
        tokens = np.array(slot.tokens, np.int32)
        mask = slot.masked.mask(self._tokenizer, self.keep_thinking)
        rows = np.flatnonzero(mask) - 1
        if not len(rows):
            self.progress.n_skipped += 1
            return
        taps = np.array(self._taps[number, :n])
        taps[n - 1] = 0.0  # of the last token nothing was computed
        sample = Sample(
            tokens, mask, taps, rows, self._ids[number, rows], self._logits[number, rows], self._lse[number, rows],
            slot.job.conversation.source,
        )  # fmt: skip
        self.progress.n_samples += 1
        self.progress.n_tokens += n
        yield sample, slot.key


def measure_rate(session: TargetSession, n_steps: int = 3) -> float:
    """Tokens per second with every slot busy, by a few steps on meaningless tokens. The caches are left empty."""
    token = max(0, session.model.tokenizer.bos)
    blocks = [(i, [token]) for i in range(session.settings.n_sequences)]
    if session.n_ctx < n_steps + 1:
        raise ContextFullError(f"a context of {session.n_ctx} tokens is too small: give a larger --ctx-size")
    session.decode(blocks)
    began = time.perf_counter()
    for _ in range(n_steps):
        session.decode(blocks)
    taken = time.perf_counter() - began
    for seq, _ in blocks:
        session.rollback(seq, 0)
    return n_steps * len(blocks) / taken
