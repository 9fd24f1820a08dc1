"""Draft trees in the decode loop: text and cache are those of plain decoding, whichever branch is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.accept import Draft, Sampling
from localspec.blocks import FixedBlock
from localspec.control_tree import FixedTree
from localspec.drafters import DrafterSettings, Sequence, load, taps
from localspec.eagle3_net import Eagle3Net
from localspec.engine import Engine, Request, Stats
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.target import Rows, SessionSettings, TargetSession
from localspec.tree import Shape, Tree
from tests.conftest import Cli
from tests.gguf_maker import eagle3_head, random_draft, tiny_llama

GREEDY = Sampling(temperature=0)
PROMPT = [5, 9, 200, 31, 77, 12]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("trees") / "target.gguf", n_layer=4, vocab=512)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with Model(target) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def session(model: Model) -> Iterator[TargetSession]:
    with TargetSession(model, SessionSettings(n_ctx=256, n_batch=64, n_branches=16)) as made:
        yield made


def write(engine: Engine, n: int, sampling: Sampling = GREEDY) -> tuple[list[int], Stats]:
    engine.session.rollback(0, 0)
    for _ in engine.generate(Request(PROMPT, sampling, n)):
        pass
    return engine.tokens(0)[len(PROMPT) :], engine.finish(0)


class Sides:
    """Drafts trees that hold the text which will follow on their first, second or third branch, by turns."""

    name = "sides"

    def __init__(self, text: list[int]):
        self.text, self.turn = text, 0

    def begin(self, seq: Sequence) -> None: ...

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        return [Draft.empty() for _ in seqs]

    def propose_tree(self, seq: Sequence, shape: Shape) -> Tree:
        at = len(seq.tokens)
        right = self.text[at : at + shape.depth]
        if not right:
            return Tree(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
        self.turn += 1
        lines = [[3, 4, 3], [6, 7]]
        lines.insert(self.turn % 3, right)
        tokens: list[int] = []
        parents: list[int] = []
        for line in lines:
            parents += [-1, *range(len(tokens), len(tokens) + len(line) - 1)]
            tokens += line
        return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.full(len(tokens), 0.5, np.float32))

    def commit(self, seq: Sequence, rows: Rows) -> None: ...

    def rewind(self, seq: Sequence, n_keep: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_any_branch_may_be_kept(session: TargetSession, temperature: float) -> None:
    sampling = Sampling(temperature, seed=4)
    plain, _ = write(Engine(session), 40, sampling)
    held = list(session.tokens[0])
    drafter = Sides(PROMPT + plain)
    text, stats = write(Engine(session, drafter, trees=FixedTree(Shape(12, 3, 3))), 40, sampling)
    assert text == plain
    assert stats.n_verify <= 11  # four tokens each
    # The cache holds a beginning of the text, and what is missing of it is less than a block.
    assert session.tokens[0] == held[: len(session.tokens[0])]
    assert len(held) - len(session.tokens[0]) <= 3
    assert not any(session.tokens[1:])


def test_a_trees_rows_are_those_of_chains(session: TargetSession) -> None:
    """Behind the same prompt: each node's logits, and the cache afterwards, as if its line had been decoded alone."""
    tokens, parents = [7, 1, 2, 3, 4, 5], [-1, 0, 1, 0, 3, 0]
    session.prefill(0, PROMPT)
    rows = session.decode_tree(0, tokens, parents).logits.copy()
    assert session.tokens[0] == [*PROMPT, 7, 1, 2]
    after = session.decode([(0, [9])]).logits.copy()
    for line in ([0, 1, 2], [0, 3, 4], [0, 5]):
        session.rollback(0, len(PROMPT))
        alone = session.decode([(0, [tokens[i] for i in line])]).logits
        assert np.abs(alone - rows[line]).max() < 2e-4
        assert (alone.argmax(1) == rows[line].argmax(1)).all()
        if line == [0, 1, 2]:
            assert np.abs(session.decode([(0, [9])]).logits - after).max() < 2e-4


def test_what_a_session_refuses(model: Model, session: TargetSession) -> None:
    with pytest.raises(UsageError, match="one text at a time"):
        SessionSettings(n_sequences=2, n_branches=4)
    session.rollback(0, 0)
    with pytest.raises(UsageError, match="18 branches; this session has room for 17"):
        session.decode_tree(0, list(range(10, 28)), [-1] * 18)


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["eagle3", "lm", "lm, itself"])
def test_drafters_of_trees(
    target: Path, model: Model, tmp_path: Path, kind: str, temperature: float, rule: str
) -> None:
    if kind == "eagle3":
        draft = eagle3_head(tmp_path / "head.gguf", target)
    else:
        draft = target if kind != "lm" else random_draft(tmp_path / "draft.gguf", target, n_layer=1)
    name = kind.split(",")[0]
    settings = DrafterSettings(draft, rule, n_branches=16)
    made = SessionSettings(n_ctx=256, n_batch=64, n_branches=16, taps=taps(name, model.gguf, settings))
    sampling = Sampling(temperature, top_k=20, seed=4)
    with TargetSession(model, made) as session:
        drafter = load(name, session, settings)
        plain, _ = write(Engine(session), 30, sampling)
        text, stats = write(Engine(session, drafter, FixedBlock(2), rule, FixedTree(Shape(7, 3, 3))), 30, sampling)
        if rule == "match" or temperature == 0:
            assert text == plain
        assert len(text) == 30
        assert stats.n_drafted > stats.n_verify
        if kind == "lm, itself":
            assert stats.tokens_per_verify > (2.5 if rule == "match" or temperature == 0 else 1.8)
        inner: Any = getattr(drafter, "session", None)
        assert inner is None or not any(inner.tokens[1:]), "branches are left in the draft's cache"
        drafter.close()


@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"n_head_kv": 1, "ftype": "q8_0"}])
def test_places_of_a_tree_are_steps_of_a_chain(target: Path, tmp_path: Path, variant: dict[str, Any]) -> None:
    """Every way through a tree of EAGLE-3 pairs gives the bits that the same pairs give one after another."""
    net = Eagle3Net(GGUFFile.open(eagle3_head(tmp_path / "h.gguf", target, **variant)), GGUFFile.open(target), 2)
    rng = np.random.default_rng(1)
    n = 19
    tokens = rng.integers(0, 512, n).astype(np.int32)
    g = net.fuse(rng.standard_normal((n, net.n_in)).astype(np.float32))
    one = np.array([1], np.int32)

    def root() -> np.ndarray:
        net.extend(1, 0, tokens, g)
        return net.step(one, one * (n - 1), tokens[-1:], g[-1:])[1]

    parents = [-1, -1, -1, 0, 0, 1, 3, 4, 5, 5]
    words = rng.integers(0, 512, len(parents)).astype(np.int32)
    states: dict[int, np.ndarray] = {-1: root()[0]}
    logits: dict[int, np.ndarray] = {}
    for layer in ([0, 1, 2], [3, 4, 5], [6, 7, 8, 9]):
        above = [parents[node] for node in layer]
        state = np.stack([states[node] for node in above])
        said, out = net.branch(1, n - 1, np.array(layer, np.int32), np.array(above, np.int32), words[layer], state)
        states |= dict(zip(layer, out))
        logits |= dict(zip(layer, said))
    for leaf in (2, 6, 7, 8, 9):
        way = [leaf]
        while parents[way[-1]] >= 0:
            way.append(parents[way[-1]])
        state = root()
        for depth, node in enumerate(reversed(way)):
            said, state = net.step(one, one * (n + depth), words[node : node + 1], state)
            assert (said[0] == logits[node]).all(), f"node {node}"
            assert (state[0] == states[node]).all()
    with pytest.raises(ValueError, match="parent was not given"):
        net.branch(1, 3, one, one, one, states[-1][None])


def test_the_command_line(cli: Cli, target: Path, tmp_path: Path) -> None:
    draft = random_draft(tmp_path / "draft.gguf", target, n_layer=1)
    common = ("--target", target, "-p", "hello there", "--raw", "-n", 12, "--temp", 0, "-t", 1)
    plain = cli("run", *common, "--spec-type", "none")
    on = cli("run", *common, "--draft", draft, "--spec-tree", "on")
    assert on.rc == 0, on.stderr
    assert on.stdout == plain.stdout
    ngram = cli("run", *common, "--spec-type", "ngram", "--spec-tree", "auto")
    assert (ngram.rc, ngram.stdout) == (0, plain.stdout)
    assert "--spec-tree auto: the drafter ngram has none; drafting chains" in ngram.stderr
