"""The decode loop on SmolLM2: what is drafted, kept, cut and counted, and that the text is the target's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec.accept import Draft, Sampling
from localspec.blocks import FixedBlock
from localspec.drafters import Drafter, DrafterSettings, Sequence, load, names, taps
from localspec.drafters.ngram import NgramDrafter
from localspec.engine import Engine, Request, Stats, Step
from localspec.errors import ContextFullError, PairingError, UsageError
from localspec.model import Model
from localspec.shipped import shipped_draft
from localspec.target import Rows, SessionSettings, TargetSession
from localspec.template import ChatTemplate
from tests.gguf_maker import random_draft

PROMPTS = [
    "Count from one to twenty in words.",
    "Repeat this three times: the rain in Spain stays mainly in the plain.",
    "Write a Python function that adds two numbers, and then the same one with type hints.",
    "List the days of the week, then list them again in the same order.",
    "What is the capital of France?",
    "Name ten animals.",
    "Explain in two sentences what a compiler does.",
    "Write a haiku about the sea.",
    "Translate 'good morning' into French, Spanish and German.",
    "What is 17 times 23? Show the steps.",
    "Write a JSON object with name, age and city for three people.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Write the multiplication table of 7.",
    "Describe a cat to someone who has never seen one.",
    "Write an HTML page with a heading and a list of five fruits.",
    "Why is the sky blue?",
    "Write a short letter to a landlord about a broken heater.",
    "What comes after Monday?",
    "Sort these words: pear, apple, fig, banana.",
]
GREEDY = Sampling(temperature=0)
#: every prompt with every block size: minutes instead of seconds
FULL = os.environ.get("LOCALSPEC_FULL") == "1"


class Oracle:
    """Drafts what it is told: for each sequence the text that will follow, with some tokens wrong on purpose."""

    name = "oracle"

    def __init__(self, text: list[int], wrong: set[int] = frozenset()):  # type: ignore[assignment]
        self.text = text
        self.wrong = wrong
        self.n_committed = 0

    def begin(self, seq: Sequence) -> None:
        self.n_committed = len(seq.tokens)

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        drafts = []
        for seq, k in zip(seqs, ks):
            at = len(seq.tokens)
            tokens = [5 if i in self.wrong else t for i, t in enumerate(self.text)][at : at + k]
            drafts.append(Draft(np.array(tokens, np.int32), np.ones(len(tokens), np.float32)))
        return drafts

    def commit(self, seq: Sequence, rows: Rows) -> None:
        assert len(rows.logits) == len(seq.tokens) - self.n_committed
        self.n_committed = len(seq.tokens)

    def rewind(self, seq: Sequence, n_keep: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    loaded = Model(smollm2)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def session(model: Model) -> Iterator[TargetSession]:
    made = TargetSession(model, SessionSettings(n_ctx=512, n_sequences=3))
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    template = ChatTemplate.of(model)
    assert template is not None
    return [template.encode([{"role": "user", "content": text}]) for text in PROMPTS]


def write(
    engine: Engine, prompt: list[int], n: int, sampling: Sampling = GREEDY, **more: object
) -> tuple[list[int], str, Stats]:
    """(generated ids, stop, counts), computed from an empty cache."""
    engine.session.rollback(0, 0)
    stop = None
    for step in engine.generate(Request(prompt, sampling, n, **more)):  # type: ignore[arg-type]
        stop = step.stop
    ids = engine.tokens(0)[len(prompt) :]
    assert stop is not None
    return ids, stop, engine.finish(0)


def test_pattern_of_accepted_tokens(session: TargetSession, prompts: list[list[int]]) -> None:
    plain, _, stats = write(Engine(session), prompts[0], 12)
    assert stats.n_verify == 12
    assert stats.n_drafted == 0
    full = prompts[0] + plain
    # Right everywhere: blocks of 1 + 3, so 12 tokens in 3 verifications.
    text, stop, stats = write(Engine(session, Oracle(full), FixedBlock(3)), prompts[0], 12)
    assert (text, stop) == (plain, "length")
    assert (stats.n_verify, stats.n_drafted, stats.n_accepted) == (3, 9, 9)
    assert stats.tokens_per_verify == 4.0
    assert stats.acceptance_by_position == [1.0, 1.0, 1.0]
    # The second token is wrong: the first block keeps d0 and gains the target's own token in place of d1.
    text, _, stats = write(Engine(session, Oracle(full, {len(prompts[0]) + 1}), FixedBlock(3)), prompts[0], 6)
    assert text == plain[:6]
    assert (stats.n_verify, stats.n_drafted, stats.n_accepted) == (2, 6, 4)
    assert stats.acceptance_by_position == [1.0, 0.5, 0.5]


def test_drafts_that_are_always_wrong_change_nothing(session: TargetSession, prompts: list[list[int]]) -> None:
    plain, _, _ = write(Engine(session), prompts[1], 30)
    bad = Oracle(prompts[1] + plain, set(range(10_000)))
    text, _, stats = write(Engine(session, bad, FixedBlock(4)), prompts[1], 30)
    assert text == plain
    assert stats.n_accepted == sum(token == 5 for token in plain)


def test_greedy_ngram_text_is_the_plain_text(session: TargetSession, prompts: list[list[int]]) -> None:
    """20 prompts to position 250. Each with one block size, so that all of 1..8 occur; with LOCALSPEC_FULL=1, all."""
    for i, prompt in enumerate(prompts):
        n = 250 - len(prompt)
        plain, _, _ = write(Engine(session), prompt, n)
        for n_max in range(1, 9) if FULL else (1 + i % 8,):
            text, _, _ = write(Engine(session, NgramDrafter(), FixedBlock(n_max)), prompt, n)
            assert text == plain, f"prompt {i}, n_max {n_max}"


@pytest.fixture(scope="module")
def bad_draft(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts") / "random.gguf"
    random_draft(path, like=smollm2, n_layer=1, n_embd=64, seed=1)
    return path


def same_texts(session: TargetSession, drafter: Drafter, prompts: list[list[int]]) -> Iterator[tuple[list[int], Stats]]:
    """Write every prompt plainly and with the drafter, and hold the texts equal; yields each text with the drafter's counts.
    Eight prompts, 60 tokens, all of n_max 1..8 in turn; with LOCALSPEC_FULL=1 all prompts to position 250 with each."""
    for i, prompt in enumerate(prompts if FULL else prompts[:8]):
        n = 250 - len(prompt) if FULL else 60
        plain, _, _ = write(Engine(session), prompt, n)
        for n_max in range(1, 9) if FULL else {1 + i % 8}:
            text, _, stats = write(Engine(session, drafter, FixedBlock(n_max)), prompt, n)
            assert text == plain, f"prompt {i}, n_max {n_max}"
            yield plain, stats


def test_greedy_lm_text_is_the_plain_text(
    session: TargetSession, prompts: list[list[int]], smollm2: Path, bad_draft: Path
) -> None:
    """With a perfect draft (the target itself) and one that knows nothing."""
    for path in (smollm2, bad_draft):
        drafter = load("lm", session, DrafterSettings(path))
        try:
            for plain, stats in same_texts(session, drafter, prompts):
                if path == smollm2 and len(plain) > (100 if FULL else 20):  # what lies beyond the end is refused
                    assert stats.acceptance is not None
                    assert stats.acceptance > 0.9
        finally:
            drafter.close()


def test_greedy_eagle3_text_is_the_plain_text(model: Model, prompts: list[list[int]]) -> None:
    """With the draft that comes with localspec, which reads the target's states."""
    path = shipped_draft(model.gguf)
    assert path is not None
    settings = DrafterSettings(path)
    session = TargetSession(model, SessionSettings(n_ctx=512, taps=taps("eagle3", model.gguf, settings)))
    drafter = load("eagle3", session, settings)
    try:
        assert sum(stats.n_accepted for _, stats in same_texts(session, drafter, prompts)) > 100
    finally:
        drafter.close()
        session.close()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_match_at_a_temperature_gives_the_plain_text_of_the_seed(
    session: TargetSession, prompts: list[list[int]], smollm2: Path, bad_draft: Path, temperature: float
) -> None:
    prompt = prompts[2]
    sampling = Sampling(temperature=temperature, seed=11)
    plain, _, _ = write(Engine(session), prompt, 100, sampling)
    assert write(Engine(session), prompt, 100, dataclasses.replace(sampling, seed=12))[0] != plain
    for n_max in range(1, 9) if FULL else (2, 7):
        text, _, _ = write(Engine(session, NgramDrafter(), FixedBlock(n_max)), prompt, 100, sampling)
        assert text == plain, f"ngram, n_max {n_max}"
    for path in (smollm2, bad_draft):
        drafter = load("lm", session, DrafterSettings(path))
        try:
            for n_max in range(1, 9) if FULL else (3,):
                text, _, stats = write(Engine(session, drafter, FixedBlock(n_max)), prompt, 100, sampling)
                assert text == plain, f"{path.name}, n_max {n_max}"
                if path == smollm2:
                    assert stats.acceptance is not None
                    assert stats.acceptance > 0.9
        finally:
            drafter.close()


def test_reject_runs_and_a_perfect_draft_is_kept(session: TargetSession, prompts: list[list[int]], smollm2: Path) -> None:
    drafter = load("lm", session, DrafterSettings(smollm2, rule="reject"))
    try:
        engine = Engine(session, drafter, FixedBlock(3), rule="reject")
        _, _, stats = write(engine, prompts[2], 60, Sampling(temperature=1.0, seed=3))
        assert stats.acceptance is not None
        assert stats.acceptance > 0.9
    finally:
        drafter.close()


def test_penalties_count_drafted_tokens(session: TargetSession, prompts: list[list[int]]) -> None:
    sampling = Sampling(temperature=0, repeat_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    plain, _, _ = write(Engine(session), prompts[1], 80, sampling)
    assert plain != write(Engine(session), prompts[1], 80)[0]
    text, _, stats = write(Engine(session, Oracle(prompts[1] + plain), FixedBlock(5)), prompts[1], 80, sampling)
    assert text == plain
    assert stats.acceptance == 1.0


def test_nothing_is_kept_after_the_end(session: TargetSession, prompts: list[list[int]], model: Model) -> None:
    plain, stop, _ = write(Engine(session), prompts[7], 200)
    assert stop == "eog"
    assert model.tokenizer.eog[plain[-1]]
    drafter = Oracle([*prompts[7], *plain, 7, 8, 9, 10])
    text, stop, stats = write(Engine(session, drafter, FixedBlock(8)), prompts[7], 200)
    assert (text, stop) == (plain, "eog")
    assert stats.n_generated == len(plain)


def test_stop_strings_cut_the_text_and_what_follows(session: TargetSession, prompts: list[list[int]], model: Model) -> None:
    plain, _, _ = write(Engine(session), prompts[5], 60)
    whole = model.tokenizer.decode(plain)
    stop_at = whole[20:24]
    for drafter in (None, Oracle(prompts[5] + plain)):
        engine = Engine(session, drafter, FixedBlock(6))
        session.rollback(0, 0)
        steps = list(engine.generate(Request(prompts[5], GREEDY, 60, stop=(stop_at,))))
        engine.finish(0)
        text = "".join(piece.text for step in steps for piece in step.pieces)
        assert steps[-1].stop == "stop-string"
        assert text == whole[: whole.index(stop_at)]


def test_a_full_context_stops(model: Model) -> None:
    session = TargetSession(model, SessionSettings(n_ctx=40))
    try:
        for drafter in (None, NgramDrafter()):
            ids, stop, _ = write(Engine(session, drafter, FixedBlock(8)), [1, *range(100, 120)], None)  # type: ignore[arg-type]
            assert stop == "context"
            assert len(ids) == 40 - 21 + 1
        with pytest.raises(ContextFullError, match="41 tokens"):
            Engine(session).start(Request([1] * 41, GREEDY))
        assert write(Engine(session), [1] * 40, 5)[1] == "context"
    finally:
        session.close()


def test_zero_tokens_and_empty_prompts(session: TargetSession) -> None:
    assert write(Engine(session), [1, 2, 3], 0)[:2] == ([], "length")
    with pytest.raises(UsageError, match="empty"):
        Engine(session).start(Request([], GREEDY))


def test_interrupting_between_steps(session: TargetSession, prompts: list[list[int]]) -> None:
    engine = Engine(session)
    steps: list[Step] = []
    for step in engine.generate(Request(prompts[0], GREEDY, 50), lambda: len(steps) >= 2):
        steps.append(step)
    assert steps[-1].stop == "interrupted"
    assert engine.finish(0).n_generated == 2


def test_many_sequences_at_once(session: TargetSession, prompts: list[list[int]]) -> None:
    """Three texts in one batch, greedy: each is what it is alone (within stock kernels' near-ties: the first tokens)."""
    alone = [write(Engine(session), prompt, 24)[0] for prompt in prompts[:3]]
    for seq in range(3):
        session.rollback(seq, 0)
    engine = Engine(session, NgramDrafter(), FixedBlock(4))
    slots = [engine.start(Request(prompt, GREEDY, 24, key=i)) for i, prompt in enumerate(prompts[:3])]
    with pytest.raises(UsageError, match="busy"):
        engine.start(Request([1], GREEDY))
    running = set(slots)
    texts = {}
    while running:
        for step in engine.step():
            if step.stop:
                texts[step.slot] = engine.tokens(step.slot)[len(prompts[step.slot]) :]
                engine.finish(step.slot)
                running.discard(step.slot)
    assert [texts[slot][:16] for slot in slots] == [text[:16] for text in alone]


def test_drafters_are_found_by_name(session: TargetSession) -> None:
    assert {"lm", "ngram"} <= set(names())
    with pytest.raises(PairingError, match="medusa"):
        load("medusa", session, DrafterSettings())


def test_sliding_window_past_its_window(gemma3: Path) -> None:
    """gemma3-270m, window 512: drafted text equals plain text from beyond the window (prompt of 700 tokens)."""
    model = Model(gemma3)
    session = TargetSession(model, SessionSettings(n_ctx=1024))
    try:
        story = "Once upon a time there was a fox who lived in a forest. The fox liked to walk by the river. " * 40
        prompt = model.tokenizer.encode(story)[:700]
        plain, _, _ = write(Engine(session), prompt, 60)
        text, _, stats = write(Engine(session, NgramDrafter(), FixedBlock(6)), prompt, 60)
        assert text == plain
        assert stats.n_accepted > 0
    finally:
        session.close()
        model.close()
