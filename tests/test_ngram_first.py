"""Two drafters in one: looking back first, another elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.accept import Draft, Sampling
from localspec.blocks import FixedBlock
from localspec.control import Adaptive
from localspec.drafters import DrafterSettings, Sequence, Stoppable, TapReader, load, split, taps
from localspec.drafters._ngram_first import NgramFirst, ngram_first
from localspec.drafters.ngram import NgramDrafter
from localspec.engine import Engine, Request
from localspec.errors import PairingError
from localspec.model import Model
from localspec.pairing import llama_spec_type
from localspec.shipped import FOLDER
from localspec.target import Rows, SessionSettings, TargetSession
from tests.gguf_maker import eagle3_head, tiny_llama
from tests.tap_drafting import write
from tests.test_eagle3 import PROMPT, check_said, pair

GREEDY = Sampling(temperature=0)
NO_ROWS = Rows(np.zeros((0, 1), np.float32), None)


class Oracle:
    """Knows how the text goes on and says it with a chance of p, otherwise something that never comes (-1)."""

    name = "oracle"

    def __init__(self, text: list[int], p: float):
        self.text, self.p, self.p_min, self.calls = text, p, 0.0, 0
        self.random = random.Random(1)
        self.heard: list[str] = []

    def begin(self, seq: Sequence) -> None:
        self.heard.append("begin")

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        self.calls += 1
        drafts = []
        for seq, k in zip(seqs, ks):
            assert k > 0
            right = self.text[len(seq.tokens) : len(seq.tokens) + k]
            said = [token if self.random.random() < self.p else -1 for token in right]
            drafts.append(Draft(np.array(said, np.int32), np.full(len(said), 0.5, np.float32)))
        return drafts

    def commit(self, seq: Sequence, rows: Rows) -> None:
        self.heard.append("commit")

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        self.heard.append("rewind")

    def close(self) -> None:
        self.heard.append("close")


def follow(drafter: NgramFirst, text: list[int], begin: int, k: int = 3) -> dict[str, int]:
    """The text, step by step, as an engine would take it; returns whose drafts were handed on."""
    seq = Sequence(0, 0, GREEDY, text[:begin], begin)
    before = dict(drafter.n_drafts)
    drafter.begin(seq)
    while len(seq.tokens) < len(text):
        (draft,) = drafter.propose([seq], [k])
        n = 0
        rest = text[len(seq.tokens) :]
        while n < min(len(draft.tokens), len(rest) - 1) and draft.tokens[n] == rest[n]:
            n += 1
        seq.tokens.extend(rest[: n + 1])
        drafter.commit(seq, NO_ROWS)
    return {name: n - before[name] for name, n in drafter.n_drafts.items()}


def loop(n: int) -> list[int]:
    return [10 + i % 12 for i in range(n)]


def treacherous(n: int, seed: int = 0) -> list[int]:
    """Pairs come again and again, and what follows them is always something else."""
    rng = random.Random(seed)
    text = []
    while len(text) < n:
        text += [1, 2, rng.randrange(100, 10**6)]
    return text[:n]


def test_looking_back_serves_what_repeats_and_the_other_the_rest() -> None:
    new = list(range(1000, 1200))
    drafter = ngram_first(Oracle(new, 0.7))
    used = follow(drafter, new, 10)
    assert used["ngram"] == 0
    assert used["oracle"] > 20
    text = loop(200)
    drafter = ngram_first(Oracle(text, 0.7))
    used = follow(drafter, text, 30)
    assert used["oracle"] == 0
    assert used["ngram"] > 20


def test_matches_that_mislead_are_left_to_the_other_which_is_found_out_in_one_text() -> None:
    text = treacherous(900)
    oracle = Oracle(text, 0.8)
    drafter = ngram_first(oracle)
    follow(drafter, text[:300], 30)
    used = follow(drafter, text, 300)
    assert used["oracle"] > 5 * max(1, used["ngram"])
    # And back again: what was found is held against the text though it is not used.
    again = loop(600)
    oracle.text = again
    follow(drafter, again[:300], 30)
    used = follow(drafter, again, 300)
    assert used["ngram"] > 5 * max(1, used["oracle"])


def test_a_poor_other_does_not_displace_a_fair_match() -> None:
    text = treacherous(600)
    for i in range(2, 600, 3):
        text[i] = 7 if i // 3 % 4 else text[i]  # most of the matches are right now
    drafter = ngram_first(Oracle(text, 0.1))
    follow(drafter, text[:300], 30)
    used = follow(drafter, text, 300)
    assert used["ngram"] > used["oracle"]


def test_the_confidence_of_a_match_is_its_chance() -> None:
    text = loop(300)
    drafter = ngram_first(Oracle(text, 0.5))
    follow(drafter, text[:200], 30)
    (draft,) = drafter.propose([Sequence(0, 0, GREEDY, text[:200], 30)], [3])
    assert draft.tokens.tolist() == text[200:203]
    assert draft.confidence.tolist() == pytest.approx([0.99] * 3, abs=0.02)


def test_both_are_told_everything_and_share_a_floor() -> None:
    oracle = Oracle(loop(50), 1.0)
    drafter = ngram_first(oracle, 0.25)
    assert isinstance(drafter, Stoppable)
    assert not isinstance(drafter, TapReader)
    assert drafter.p_min == 0.25
    drafter.p_min = 0.9999
    assert oracle.p_min == 0.9999
    seq = Sequence(0, 0, GREEDY, loop(40), 40)
    drafter.begin(seq)
    (draft,) = drafter.propose([seq], [2])
    assert draft.confidence.tolist() == [0.5, 0.5], "no match is as sure as that: the other one's"
    drafter.propose([seq], [0])
    assert oracle.calls == 1
    seq.tokens += loop(50)[40:42]
    drafter.commit(seq, NO_ROWS)
    drafter.rewind(seq, 10)
    drafter.close()
    assert oracle.heard == ["begin", "commit", "rewind", "close"]


def test_names() -> None:
    assert split("lm") == ("lm",)
    assert split("ngram,eagle3") == split("eagle3,ngram") == ("ngram", "eagle3")
    for name, says in (
        ("lm,eagle3", "combined"), ("ngram,ngram", "combined"), ("ngram,lm,mtp", "combined"), ("ngram,x", "'x'"),
        ("ngram,", "''"),
    ):  # fmt: skip
        with pytest.raises(PairingError, match=says):
            split(name)
    assert llama_spec_type("ngram,eagle3", None) == "ngram-simple,draft-eagle3"
    assert llama_spec_type("ngram", None) == "ngram-simple"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("first") / "target.gguf", n_layer=4, vocab=512)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with Model(target) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    return eagle3_head(target.with_name("head.gguf"), target, draft_vocab=300)


@pytest.mark.parametrize("controller", [lambda: FixedBlock(3), lambda: Adaptive(4)])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=5)])
@pytest.mark.parametrize("rule", ["match", "reject"])
def test_the_text_is_the_targets(model: Model, head: Path, controller: Any, sampling: Sampling, rule: str) -> None:
    if rule == "reject" and not sampling.greedy:
        pytest.skip("another text of the same distribution: held by the accept rule's own tests")
    settings = DrafterSettings(head, rule)
    assert taps("ngram,eagle3", model.gguf, settings) == taps("eagle3,ngram", model.gguf, settings) != ()
    assert taps("ngram", model.gguf, settings) == ()
    session, watched = pair(model, head, rule=rule)
    with session:
        drafter = load("ngram,eagle3", session, settings)
        assert isinstance(drafter, NgramFirst)
        assert isinstance(drafter, TapReader)
        assert drafter.name == "ngram,eagle3"
        engine = Engine(session, drafter, controller(), rule)
        for prompt in (PROMPT, PROMPT[:5] * 6, [9], [*PROMPT, 3, 4]):
            assert write(engine, prompt, 50, sampling) == write(Engine(session, rule=rule), prompt, 50, sampling)
            session.rollback(0, 0)
        drafter.close()
        watched.close()


def test_the_head_says_the_same_whatever_was_drafted_beside_it(model: Model, head: Path) -> None:
    session, watched = pair(model, head)
    with session:
        drafter = ngram_first(watched)
        write(Engine(session, drafter, FixedBlock(3)), PROMPT[:6] * 3, 60)
        write(Engine(session, drafter, FixedBlock(3)), PROMPT[:6] * 3 + [30, 31], 60)
        assert drafter.n_drafts["ngram"] > 3
        assert drafter.n_drafts["eagle3"] > 3
        assert check_said(model, head, watched) > 10


def test_several_texts_at_once(model: Model, head: Path) -> None:
    session, watched = pair(model, head, n_sequences=2)
    prompts = [PROMPT, PROMPT[:4] * 6]
    with session:
        engine = Engine(session, ngram_first(watched), FixedBlock(3))
        for prompt in prompts:
            engine.start(Request(prompt, GREEDY, 30))
        while any(step.stop is None for step in engine.step()):
            pass
        texts = [engine.tokens(slot) for slot in (0, 1)]
        for slot in (0, 1):
            engine.finish(slot)
            session.rollback(slot, 0)
        assert texts == [write(Engine(session), prompt, 30) for prompt in prompts]


def test_on_the_command_line(cli: Any, smollm2: Path) -> None:
    (draft,) = FOLDER.glob("smollm2*.gguf")
    ask = ("run", "-m", smollm2, "-t", 1, "--temp", 0, "-n", 60, "--json", "-p", "Say 'one two three four five' six times.")
    plain = cli(*ask, "--spec-type", "none")
    assert plain.rc == 0, plain.stderr
    for name in ("ngram,eagle3", "draft-eagle3,ngram-simple"):
        done = cli(*ask, "-md", draft, "--spec-type", name)
        assert done.rc == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["drafter"] == "ngram,eagle3"
        assert result["ids"] == json.loads(plain.stdout)["ids"]
        assert result["n_accepted"] > 0
    for name, says in (("ngram,lm", "--draft FILE"), ("ngram,none", "no such drafter"), ("lm,eagle3", "combined")):
        done = cli(*ask, "--spec-type", name)
        assert (done.rc, len(done.stderr.splitlines())) == (2, 1)
        assert says in done.stderr


def test_alone_it_is_the_plain_one(model: Model) -> None:
    with TargetSession(model) as session:
        assert isinstance(load("ngram", session, DrafterSettings()), NgramDrafter)


class _Strict(FixedBlock):
    """Wants sure tokens only."""

    def floor(self) -> float:
        return 0.7


def test_an_engines_floor_stays_its_own(model: Model) -> None:
    """The controller's floor holds while it is asked for; another engine of the same drafter begins with the person's."""
    seen = []

    class Watched(Oracle):
        def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
            seen.append(self.p_min)
            return [Draft.empty() for _ in seqs]

    drafter = Watched([], 1.0)
    drafter.p_min = 0.2
    with TargetSession(model, SessionSettings(n_ctx=128, n_threads=1)) as session:
        for controller in (_Strict(3), FixedBlock(3)):
            write(Engine(session, drafter, controller), PROMPT[:6], 4)
            session.rollback(0, 0)
    assert set(seen[:2]) == {0.7}
    assert seen[-1] == 0.2
    assert drafter.p_min == 0.2
