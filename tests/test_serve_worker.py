"""The worker without HTTP, on a tiny model; and the way of its events to a reader that may be slow."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from localspec.accept import Sampling
from localspec.drafters import DrafterSettings, load
from localspec.engine import Engine, Request, Stats, Step
from localspec.errors import NativeError
from localspec.model import Model
from localspec.serve.answers import Answer
from localspec.serve.app import _Stream
from localspec.serve.outbox import Outbox
from localspec.serve.worker import (
    PROMPT_TOKENS,
    ClosingError,
    Done,
    Event,
    Failed,
    Job,
    QueueFullError,
    Text,
    Worker,
    choose_slot,
)
from localspec.target import SessionSettings, TargetSession
from tests.gguf_maker import tiny_llama
from tests.test_serve import wait_until

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=1 << 14)) as loaded:
        yield loaded


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    with TargetSession(model, SessionSettings(n_ctx=8192, n_sequences=2, n_threads=1)) as session:
        drafter = load("ngram", session, DrafterSettings())
        yield Engine(session, drafter)
        drafter.close()


class Client:
    """A job and the events it got."""

    def __init__(self, prompt: list[int], max_tokens: int = 8):
        self.events: queue.Queue[Event] = queue.Queue()
        self.job = Job(Request(prompt, GREEDY, max_tokens), self.events.put)

    def rest(self) -> tuple[str, Done | Failed]:
        text = ""
        while isinstance(event := self.events.get(timeout=60), Text):
            text += event.text
        return text, event


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    workers = []

    def start(engine: Engine, n_queue: int = 8) -> Worker:
        worker = Worker(engine, n_queue)
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()
        assert worker.join(60)


def alone(model: Model, prompt: list[int], max_tokens: int) -> str:
    with TargetSession(model, SessionSettings(n_ctx=8192, n_threads=1)) as session:
        steps = Engine(session).generate(Request(prompt, GREEDY, max_tokens))
        return "".join(piece.text for step in steps for piece in step.pieces)


def test_jobs_share_the_slots_and_all_end(engine: Engine, started: Callable[..., Worker]) -> None:
    worker = started(engine)
    clients = [Client([i + 5, 9, 12], 4 + i) for i in range(6)]
    for client in clients:
        worker.submit(client.job)
    for i, client in enumerate(clients):
        _, end = client.rest()
        assert isinstance(end, Done)
        assert end.stats.n_generated <= 4 + i
    assert worker.counts() == (0, 0)
    assert worker.totals().n_done == 6


def test_a_cancelled_job_leaves_its_cache_to_the_next(model: Model, engine: Engine, started: Callable[..., Worker]) -> None:
    worker = started(engine)
    prompt = [(7 * i) % 200 + 5 for i in range(900)]
    first = Client(prompt, 7000)
    worker.submit(first.job)
    assert isinstance(first.events.get(timeout=60), Text)
    worker.cancel(first.job)
    wait_until(lambda: worker.counts() == (0, 0))
    second = Client(prompt, 12)
    worker.submit(second.job)
    text, end = second.rest()
    assert isinstance(end, Done)
    assert end.stats.n_prompt_computed == 0
    assert text == alone(model, prompt, 12)
    assert worker.totals().n_cancelled == 1


def test_a_long_prompt_does_not_hold_up_the_others(
    model: Model, engine: Engine, started: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[int] = []  # tokens of prompts; 0: a step
    read, step = engine.read, engine.step

    def reading(slot: int, *rest: Any) -> int:
        log.append(read(slot, *rest))
        return log[-1]

    def stepping() -> list[Step]:
        log.append(0)
        return step()

    monkeypatch.setattr(engine, "read", reading)
    monkeypatch.setattr(engine, "step", stepping)
    worker = started(engine)
    first = Client([5, 6, 7], 7000)
    worker.submit(first.job)
    assert isinstance(first.events.get(timeout=60), Text)
    prompt = [(7 * i) % 200 + 5 for i in range(900)]
    second = Client(prompt, 12)
    worker.submit(second.job)
    text, end = second.rest()
    worker.cancel(first.job)
    assert isinstance(end, Done)
    assert end.stats.n_prompt_computed == 899
    assert text == alone(model, prompt, 12)
    long = [n for n in log if n > 2]
    assert sum(long) == 899
    assert max(long) == PROMPT_TOKENS
    for before, after in pairwise(log):
        assert before == 0 or after == 0, "a step between two pieces"


def test_a_job_cancelled_while_its_prompt_is_read(model: Model, engine: Engine, started: Callable[..., Worker]) -> None:
    worker = started(engine)
    first, prompt = Client([5], 8000), [(7 * i) % 200 + 5 for i in range(6000)]
    worker.submit(first.job)
    assert isinstance(first.events.get(timeout=60), Text)
    second = Client(prompt, 4)
    worker.submit(second.job)
    wait_until(lambda: any(len(tokens) > 3 and tokens[:3] == prompt[:3] for tokens in engine.session.tokens))
    worker.cancel(second.job)
    wait_until(lambda: worker.counts() == (1, 0))
    third = Client(prompt[:400], 6)
    worker.submit(third.job)
    assert third.rest()[0] == alone(model, prompt[:400], 6)
    assert second.events.empty()
    worker.cancel(first.job)


def test_the_queue_is_bounded_and_a_cancelled_job_leaves_it_at_once(engine: Engine, started: Callable[..., Worker]) -> None:
    worker = started(engine, 1)
    running = [Client([5 + i], 8000) for i in range(2)]
    waiting, late = Client([7]), Client([8], 4)
    for client in (*running, waiting):
        worker.submit(client.job)
    with pytest.raises(QueueFullError):
        worker.submit(late.job)
    worker.cancel(waiting.job)
    worker.submit(late.job)
    for client in running:
        worker.cancel(client.job)
    assert isinstance(late.rest()[1], Done)
    assert waiting.events.empty()


def test_a_request_that_cannot_be_done_ends_alone(engine: Engine, started: Callable[..., Worker]) -> None:
    worker = started(engine)
    good, wrong = Client([5, 6], 200), Client([5, 10**6], 4)
    worker.submit(good.job)
    worker.submit(wrong.job)
    _, end = wrong.rest()
    assert isinstance(end, Failed)
    assert end.kind == "request"
    assert isinstance(good.rest()[1], Done)
    assert worker.totals().n_failed == 1


def test_after_a_failed_step_the_next_request_is_answered(
    model: Model, engine: Engine, started: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failures = engine.step, [NativeError("no room"), ZeroDivisionError()]

    def failing() -> list[Step]:
        if failures:
            raise failures.pop(0)
        return step()

    monkeypatch.setattr(engine, "step", failing)
    worker = started(engine)
    for kind, message in (("request", "no room"), ("internal", "internal error")):
        client = Client([5, 6, 7])
        worker.submit(client.job)
        assert client.rest()[1] == Failed(kind, message)
    client = Client([5, 6, 7])
    worker.submit(client.job)
    assert client.rest()[0] == alone(model, [5, 6, 7], 8)


def test_closing_finishes_or_cancels(engine: Engine) -> None:
    worker = Worker(engine)
    worker.start()
    clients = [Client([5], 300), Client([6], 300), Client([7], 4)]
    for client in clients:
        worker.submit(client.job)
    wait_until(lambda: worker.counts()[0] == 2)
    worker.close(60)
    with pytest.raises(ClosingError):
        worker.submit(Client([5]).job)
    ends = [client.rest()[1] for client in clients]
    assert [type(end) for end in ends] == [Done, Done, Failed]
    assert worker.join(60)
    assert not worker.alive


def test_closing_without_grace_ends_what_runs(engine: Engine) -> None:
    worker = Worker(engine)
    worker.start()
    client = Client([5], 8000)
    worker.submit(client.job)
    assert isinstance(client.events.get(timeout=60), Text)
    worker.close(0)
    assert client.rest()[1] == Failed("closing", "the server is shutting down")
    assert worker.join(60)


@pytest.mark.parametrize(
    ("held", "prompt", "slot"),
    [
        ([[], []], [1, 2, 3], 4),  # all empty: the one longest unused
        ([[1, 9], [1, 2, 3, 4]], [1, 2, 3, 4, 5], 2),  # the conversation goes on
        ([[7, 8], []], [1, 2], 2),  # nothing is thrown away while a slot is empty
        ([[1, *range(50, 90)], [1, *range(10, 50)]], [1, *range(100, 140)], 4),  # only the first token is shared
        ([[5, 6], [1, 2, 3, 9, 9, 9, 9, 9, 9]], [1, 2, 3, 4], 2),  # most of the prompt is there
    ],
)
def test_a_slot_is_chosen_by_what_it_holds(held: list[list[int]], prompt: list[int], slot: int) -> None:
    assert choose_slot([4, 2], held, prompt) == slot


# -- readers that are slow ------------------------------------------------------------------------------------------------


class _Cancels:
    def __init__(self) -> None:
        self.cancelled: list[Any] = []

    def cancel(self, job: Any) -> None:
        self.cancelled.append(job)


async def _stream(events: list[Event], limit: int | None, stalled_s: float) -> tuple[list[dict[str, Any]], int]:
    """Let a reader that takes the head and then nothing more get `events`; returns what was sent, and the cancels."""
    outbox, cancels, sent = Outbox(limit), _Cancels(), []
    stream = _Stream(cancels, object(), outbox, Answer("m", False), False, stalled_s)  # type: ignore[arg-type]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    for event in events:
        outbox.deliver(event)
    await asyncio.wait_for(stream({}, receive, send), 30)  # type: ignore[arg-type]
    return sent, len(cancels.cancelled)


def test_a_reader_too_far_behind_is_dropped() -> None:
    sent, cancels = asyncio.run(_stream([Text("x" * 10)] * 5, 30, 1000))
    assert cancels == 1
    assert not any(message.get("more_body") is False for message in sent)


def test_a_reader_that_stalls_is_dropped_though_all_is_written() -> None:
    sent, cancels = asyncio.run(_stream([Text("x"), Done("eog", Stats())], None, 0.05))
    assert cancels == 1
    assert not any(message.get("more_body") is False for message in sent)


def test_a_reader_that_keeps_up_may_read_any_amount() -> None:
    async def read() -> int:
        outbox, n = Outbox(30), 0
        for _ in range(10):
            outbox.deliver(Text("x" * 20))
            n += len((await outbox.get()).text)  # type: ignore[union-attr]
        assert not outbox.broken.is_set()
        return n

    assert asyncio.run(read()) == 200
