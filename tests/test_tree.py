"""Draft trees: their shape, and that walking one along the target's rows keeps its text, or its distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest

from localspec import accept_reference as twin
from localspec.accept import Block, Draft, Sampling, verify
from localspec.accept_tree import verify_tree
from localspec.blocks import Look, Outcome
from localspec.control import Adaptive
from localspec.control_tree import FixedTree, TreeOutcome, TreesThatPay
from localspec.drafters import Sequence
from localspec.drafters._trees import grow
from localspec.errors import LocalspecError, UsageError
from localspec.target import tree_lines
from localspec.tree import MOST_NODES, Growing, Shape, Tree

NO_HISTORY = np.zeros(0, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Table:
    """A model of `n_vocab` tokens whose logits follow from the last two tokens; as a draft it goes on in a tree."""

    def __init__(self, n_vocab: int, seed: int, like: Table | None = None, sharp: float = 1.5):
        self.logits_of = sharp * np.random.default_rng(seed).standard_normal((n_vocab, n_vocab, n_vocab)).astype(np.float32)
        if like is not None:
            self.logits_of = (self.logits_of + like.logits_of) / 2

    def rows(self, texts: Seq[list[int]]) -> np.ndarray:
        return np.stack([self.logits_of[text[-2], text[-1]] for text in texts])

    def behind(self, text: list[int]) -> Table:
        self._text = text
        self.logits = self.rows([text])
        return self

    def go_on(self, nodes: list[int], tree: Growing) -> None:
        self.logits = self.rows([self._text + said(tree, node) for node in nodes])


def said(tree: Growing | Tree, node: int) -> list[int]:
    way: list[int] = []
    while node >= 0:
        way.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return way[::-1]


# -- shape --------------------------------------------------------------------------------------------------------------


def test_the_likeliest_nodes_are_kept_in_lines() -> None:
    growing = Growing(Shape(4, 3, 2), exact=False)
    growing.add(-1, i32(7, 8), f32(0.5, 0.4))
    assert growing.next_layer(1) == [0, 1]
    growing.add(0, i32(1, 2), f32(0.3, 0.2))  # ways of .15 and .1
    growing.add(1, i32(3, 4), f32(0.9, 0.05))  # .36 and .02
    assert growing.next_layer(2) == [4]  # with 7, 8, 3 and 1 the four best so far: the last of them need not go on
    growing.add(4, i32(5), f32(0.9))
    tree = growing.finished()
    assert tree.tokens.tolist() == [7, 8, 3, 5]
    assert tree.parents.tolist() == [-1, -1, 1, 2]
    assert tree.line() == [0]
    assert tree.way(3) == [1, 2, 3]
    assert tree_lines(tree.parents) == [[0], [1, 2, 3]]


def test_under_reject_all_that_was_drawn_stays() -> None:
    growing = Growing(Shape(3, 4, 2), exact=True)
    assert growing.wanted(-1, f32(0.6, 0.3, 0.1)) == 2
    growing.add(-1, i32(7, 8), f32(0.08, 0.6), (i32(7, 8), f32(0.5, 0.5)))
    assert growing.wanted(0, f32(0.3, 0.3, 0.4)) == 0, "a way of .08 is not worth a token of .4 or less"
    assert growing.wanted(1, f32(0.6, 0.4)) == 1, "one more has room"
    assert growing.finished().tokens.tolist() == [7, 8]
    assert set(growing.finished().dists) == {-1}


def test_lines_of_a_tree() -> None:
    assert tree_lines([-1, 0, 1, 0, 3, -1]) == [[0, 1, 2], [0, 3, 4], [5]]
    with pytest.raises(LocalspecError, match="line of first children"):
        tree_lines([-1, -1, 0, 1])
    with pytest.raises(LocalspecError, match="before their children"):
        tree_lines([1, -1])


@pytest.mark.parametrize("numbers", [(0, 1, 1), (MOST_NODES + 1, 2, 2), (4, 0, 2)])
def test_shapes_that_there_are_not(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="a draft tree has"):
        Shape(*numbers)


# -- match: the text is the target's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_match_writes_what_plain_decoding_writes(temperature: float, penalty: float) -> None:
    target = Table(12, seed=1)
    draft = Table(12, seed=2, like=target)
    sampling = Sampling(temperature, top_k=8, repeat_penalty=penalty, seed=5)
    plain = [0, 1]
    for _ in range(60):
        block = Block(3, len(plain), Draft.empty(), sampling, np.array(plain, np.int32))
        plain.append(int(verify(target.rows([plain]), [block])[0].tokens[0]))
    text, sides, steps = [0, 1], 0, 0
    while len(text) < 60:
        tree = grow(draft.behind(text), Sequence(0, 3, sampling, text), Shape(8, 4, 3), "match")
        assert 0 < len(tree) <= 8
        rows = target.rows([text, *(text + said(tree, i) for i in range(len(tree)))])
        judged = verify_tree(rows, tree, 3, len(text), sampling, np.array(text, np.int32))
        assert judged.verdict.tokens.tolist()[:-1] == tree.tokens[judged.nodes].tolist()
        text = text + judged.verdict.tokens.tolist()
        sides += judged.nodes != tree.line()[: len(judged.nodes)]
        steps += 1
    assert text[:60] == plain[:60]
    assert sides > 0, "no side branch was ever kept"
    assert steps < 50


def test_an_end_of_generation_token_ends_the_walk() -> None:
    target = Table(6, seed=1)
    greedy = Sampling(temperature=0)
    tree = grow(target.behind([0, 1]), Sequence(0, 0, greedy, [0, 1]), Shape(6, 3, 2), "match")
    rows = target.rows([[0, 1], *([0, 1, *said(tree, i)] for i in range(len(tree)))])
    whole = verify_tree(rows, tree, 0, 2, greedy, NO_HISTORY).verdict
    assert whole.n_accepted == 2
    assert whole.stop is None
    eog = np.zeros(6, bool)
    eog[whole.tokens[0]] = True
    ended = verify_tree(rows, tree, 0, 2, greedy, NO_HISTORY, eog=eog)
    assert (ended.verdict.tokens.tolist(), ended.verdict.stop, ended.nodes) == (whole.tokens[:1].tolist(), "eog", [0])
    with pytest.raises(UsageError, match="rows of logits"):
        verify_tree(rows[1:], tree, 0, 2, greedy, NO_HISTORY)


# -- reject: the distribution is the target's ---------------------------------------------------------------------------


def chi_square(counts: np.ndarray, wanted: np.ndarray) -> float:
    expected = wanted * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_several_candidates_keep_the_distribution(n: int) -> None:
    """Five tokens, p and q far apart, n of them drawn without replacement; 3000 seeds. 4 degrees of freedom: 23.5 is passed
    by chance once in ten thousand times."""
    p, q = f32(0.0, 1.0, -1.0, 0.5, 2.0), np.array([0.5, 0.2, 0.2, 0.08, 0.02])
    counts, kept = np.zeros(5), 0
    for seed in range(3000):
        s = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        key = twin.Key(seed, 0, 9)
        drafted, _ = twin.draw_several(s, key, "reject", 0, np.arange(5), q, n)
        assert len(set(drafted.tolist())) == n
        which, token = twin.judge_several(p, s, key, drafted.tolist(), (np.arange(5), q), 0)
        assert which < 0 or drafted[which] == token
        counts[token] += 1
        kept += which >= 0
    assert chi_square(counts, probabilities(p)) < 23.5
    assert kept / 3000 > {1: 0.35, 2: 0.45, 3: 0.5, 5: 0.9}[n]


def test_one_candidate_is_judged_as_in_a_chain() -> None:
    rng = np.random.default_rng(3)
    for seed in range(300):
        s = Sampling(0.9, seed=seed)
        row = 2 * rng.standard_normal(30).astype(np.float32)
        q = probabilities(rng.standard_normal(30))
        key = twin.Key(seed, 2, 11)
        drafted = twin.draw_several(s, key, "reject", 0, np.arange(30), q, 1)[0].tolist()
        chain = twin.judge(row, s, key, "reject", drafted[0], (np.arange(30), q), 0)
        assert twin.judge_several(row, s, key, drafted, (np.arange(30), q), 0) == (0 if chain.accepted else -1, chain.token)


def test_the_order_of_a_draw_is_that_of_drawing_one_after_another() -> None:
    """The second of a Gumbel-top-k is distributed as q without the first."""
    q = np.array([0.6, 0.3, 0.1])
    counts = np.zeros((3, 3))
    for seed in range(4000):
        s = Sampling(1.0, seed=seed)
        first, second = twin.draw_several(s, twin.Key(seed, 0, 0), "reject", 0, np.arange(3), q, 2)[0]
        counts[first, second] += 1
    wanted = np.array([[q[i] * q[j] / (1 - q[i]) if i != j else 0 for j in range(3)] for i in range(3)])
    assert chi_square(counts[wanted > 0], wanted[wanted > 0]) < 25.7  # 5 degrees of freedom, one in ten thousand


def test_trees_under_reject_keep_the_joint_distribution() -> None:
    """The first two tokens behind a tree whose shape depends on what was drawn; 15 degrees of freedom: 44.3."""
    target = Table(4, seed=1)
    draft = Table(4, seed=9, like=target)
    counts, sides = np.zeros((4, 4)), 0
    for seed in range(2500):
        s = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        tree = grow(draft.behind([0, 1]), Sequence(0, 0, s, [0, 1]), Shape(4, 3, 2), "reject")
        rows = target.rows([[0, 1], *([0, 1, *said(tree, i)] for i in range(len(tree)))])
        judged = verify_tree(rows, tree, 0, 2, s, NO_HISTORY, "reject")
        text = judged.verdict.tokens.tolist()
        sides += bool(judged.nodes) and judged.nodes[0] != 0
        if len(text) < 2:
            block = Block(0, 3, Draft.empty(), s, NO_HISTORY)
            text += verify(target.rows([[1, text[0]]]), [block], "reject")[0].tokens.tolist()
        counts[text[0], text[1]] += 1
    first = probabilities(target.rows([[0, 1]])[0])
    wanted = np.stack([first[i] * probabilities(target.rows([[1, i]])[0]) for i in range(4)])
    assert chi_square(counts.ravel(), wanted.ravel()) < 44.3
    assert sides > 200


# -- when ---------------------------------------------------------------------------------------------------------------


def simulated(chooser: TreesThatPay, chains: Adaptive, n: int, chain: int, tree: int, row: float) -> list[bool]:
    """n steps of a machine where a row costs `row` of a plain decode, chains gain `chain` tokens and trees `tree`; which of
    them were trees."""
    were = []
    for _ in range(n):
        shape = chooser.choose(Look(0, 64), 0)
        were.append(shape is not None)
        if shape is not None:
            nodes = np.arange(shape.nodes, dtype=np.int32)
            drafted = Tree(nodes, nodes - 1, np.full(shape.nodes, 0.5, np.float32))
            chooser.record(TreeOutcome(0, drafted, shape, list(range(tree - 1)), tree, 0), 0.05, 1 + row * shape.nodes)
            continue
        k = chains.choose([Look(0, 64)])[0]
        gained = min(k + 1, chain)
        rest = 1 + row * k
        chains.record([Outcome(0, [0.6] * k, gained - 1, gained)], k or -1, 0.01 * k, rest)
    return were


def test_trees_are_drafted_where_they_pay() -> None:
    chains = Adaptive()
    were = simulated(TreesThatPay(chains, [Shape(7, 4, 3)]), chains, 400, chain=2, tree=4, row=0.02)
    assert not any(were[:8]), "before chains are known there is nothing to compare with"
    assert sum(were[200:]) > 150


def test_trees_are_not_drafted_where_they_do_not_pay() -> None:
    chains = Adaptive()
    were = simulated(TreesThatPay(chains, [Shape(7, 4, 3)]), chains, 1500, chain=2, tree=2, row=0.05)
    assert 0 < sum(were) < 40
    assert chains._ledger.rise <= 0.03 * 256


def test_a_tree_that_can_not_pay_is_not_tried() -> None:
    chains = Adaptive()
    assert not any(simulated(TreesThatPay(chains, [Shape(15, 2, 4)]), chains, 400, chain=2, tree=3, row=0.5))


def test_a_fixed_tree_is_always_drafted() -> None:
    assert FixedTree(Shape(5, 2, 2)).choose(Look(0, 9), 1) == Shape(5, 2, 2)
