"""The EAGLE-3 drafter: its network against numpy and llama.cpp, its book-keeping against drafting from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.accept import Sampling
from localspec.blocks import FixedBlock
from localspec.drafters import DrafterSettings, eagle3, load, taps
from localspec.eagle3_net import Eagle3Net
from localspec.engine import Engine, Request
from localspec.errors import LocalspecError, ModelFileError, PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.pairing import drafter_for
from localspec.target import SessionSettings, TargetSession
from tests.gguf_maker import eagle3_head, edit, requantize, tiny_llama
from tests.head_reference import HeadReference
from tests.llama_head import LlamaHead
from tests.tap_drafting import GREEDY, Asleep, Sometimes, Watched, opened, write

TAPS = (1, 2, 3)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("eagle3") / "target.gguf", n_layer=4, vocab=512)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with Model(target) as loaded:
        yield loaded


def some_pairs(n: int, n_embd: int, n_in: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[n] and taps f32[n, n_in] as wild as real ones: one dimension in ten is fifty times larger."""
    rng = np.random.default_rng(seed)
    taps = rng.standard_normal((n, n_in)).astype(np.float32)
    taps[:, ::10] *= 50
    return rng.integers(0, 512, n).astype(np.int32), taps


# -- the network --------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "window": {"window": 5},
    "whole vocabulary": {"draft_vocab": 0},
    "own width and embedding": {"n_embd": 96, "n_head": 6, "n_head_kv": 3},
    "one key head": {"n_head_kv": 1},
    "rope factors": {"rope_factors": True},
    "f16": {"ftype": "f16"},
    "q8_0": {"ftype": "q8_0"},
    "q4_0": {"ftype": "q4_0"},
    "q4_1": {"ftype": "q4_1"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_network_is_numpys(target: Path, tmp_path: Path, variant: str) -> None:
    """Prefill by `extend`, then a chain by `step`, 40 pairs and more, so that blocks of 16 keys begin and end."""
    head = eagle3_head(tmp_path / "head.gguf", target, **VARIANTS[variant])
    net = Eagle3Net(GGUFFile.open(head), GGUFFile.open(target), 1)
    reference = HeadReference(head, target)
    tokens, rows = some_pairs(40, net.n_embd, net.n_in)
    g, wanted_g = net.fuse(rows), reference.fuse(rows)
    # int8 activations: about 1 % of a row's size, as everywhere in the kernels
    loose = 0.03 if VARIANTS[variant].get("ftype", "f32")[0] == "q" else 2e-4
    assert np.linalg.norm(g - wanted_g) < loose * np.linalg.norm(wanted_g)
    for token, state in zip(tokens, g):
        logits, out = reference.feed(int(token), state.astype(np.float64))
    net.extend(0, 0, tokens[:-1], g[:-1])
    state = g[-1:]
    token = int(tokens[-1])
    for position in range(39, 39 + 20):
        if position > 39:
            logits, out = reference.feed(token, state[0].astype(np.float64))
        ours, state = net.step(i32(0), i32(position), i32(token), state)
        assert np.linalg.norm(ours[0] - logits) < 2 * loose * np.linalg.norm(logits), f"logits at {position}"
        assert np.linalg.norm(state[0] - out) < 2 * loose * np.linalg.norm(out), f"state at {position}"
        token = int(net.ids[ours[0].argmax()])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("window",)])
def test_network_is_llama_cpps(target: Path, model: Model, tmp_path: Path, variant: str) -> None:
    """llama.cpp's own graph of the same file; it has no window."""
    head = eagle3_head(tmp_path / "head.gguf", target, **VARIANTS[variant])
    net = Eagle3Net(GGUFFile.open(head), GGUFFile.open(target), 1)
    tokens, rows = some_pairs(24, net.n_embd, net.n_in)
    quantised = VARIANTS[variant].get("ftype", "f32")[0] == "q"
    with TargetSession(model, SessionSettings(n_ctx=256)) as session:
        theirs = LlamaHead(head, session)
        g = theirs.fuse(rows)
        ours = net.fuse(rows)
        loose = 0.03 if quantised else 1e-3  # llama.cpp rounds activations and tables to f16 here and there
        assert np.linalg.norm(ours - g) < loose * np.linalg.norm(g)
        wanted, states = theirs.feed(tokens.tolist(), g)
        net.extend(0, 0, tokens, g)
        logits, state = net.step(i32(0), i32(23), tokens[-1:], g[-1:])
        said = np.isfinite(wanted[-1])
        assert set(np.flatnonzero(said)) == set(net.ids.tolist())
        assert np.linalg.norm(logits[0] - wanted[-1][net.ids]) < 2 * loose * np.linalg.norm(logits)
        assert np.linalg.norm(state[0] - states[-1]) < 2 * loose * np.linalg.norm(state)
        theirs.close()


@pytest.mark.parametrize("quant", ["Q4_K_M", "Q6_K", "Q2_K", "BF16"])
def test_heads_of_other_types(target: Path, tmp_path: Path, quant: str) -> None:
    """As llama.cpp's quantiser mixes them, types that our kernels don't multiply (Q2_K, Q3_K) among them."""
    plain = eagle3_head(tmp_path / "plain.gguf", target, n_embd=256, n_head=8, n_head_kv=2, n_ff=256)
    head = requantize(plain, tmp_path / "head.gguf", quant)
    file = GGUFFile.open(head)
    assert quant[:4] in {t.type[:4] for t in file.tensors.values()}
    net, reference = Eagle3Net(file, GGUFFile.open(target), 1), HeadReference(head, target)
    tokens, rows = some_pairs(20, net.n_embd, net.n_in)
    g = net.fuse(rows)
    assert np.linalg.norm(g - reference.fuse(rows)) < 0.03 * np.linalg.norm(g)
    net.extend(0, 0, tokens, g)
    logits, _ = net.step(i32(0), i32(19), tokens[-1:], g[-1:])
    for token, state in zip(tokens, g):
        wanted, _ = reference.feed(int(token), state.astype(np.float64))
    assert np.linalg.norm(logits[0] - wanted) < 0.05 * np.linalg.norm(wanted)


def test_slots_and_threads_do_not_show(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven texts at once, more than the kernels take in a tile, by one thread and three: each drafts as it would alone."""
    head = eagle3_head(tmp_path / "head.gguf", target, ftype="q8_0")
    alone = Eagle3Net(GGUFFile.open(head), GGUFFile.open(target), 11)
    monkeypatch.setattr("localspec.draft_net._BYTES_PER_THREAD", 1)
    many = Eagle3Net(GGUFFile.open(head), GGUFFile.open(target), 11, n_threads=3)
    assert (alone.n_threads, many.n_threads) == (1, 3)
    lengths = [3 + 5 * i for i in range(11)]
    starts, states = [], []
    for slot, n in enumerate(lengths):
        tokens, rows = some_pairs(n, alone.n_embd, alone.n_in, seed=slot)
        g = alone.fuse(rows)
        assert (many.fuse(rows) == g).all()
        for net in (alone, many):
            net.extend(slot, 0, tokens, g)
        starts.append(tokens[-1])
        states.append(g[-1:])
    ks = i32(4, 0, 1, 3, 4, 4, 2, 4, 1, 0, 4)
    together = many.greedy(
        np.arange(11, dtype=np.int32), i32(*lengths) - 1, np.array(starts, np.int32), np.concatenate(states), ks, 0.0
    )
    assert together[2].tolist() == ks.tolist()
    for slot in range(11):
        if ks[slot] == 0:
            continue
        position = i32(lengths[slot] - 1)
        tokens, probs, counts = alone.greedy(i32(slot), position, i32(starts[slot]), states[slot], ks[slot : slot + 1], 0.0)
        assert tokens[0].tolist() == together[0][slot, : counts[0]].tolist()
        assert probs[0].tolist() == together[1][slot, : counts[0]].tolist()
        # and what `greedy` says is the largest of what `step` gives, with its share of the whole
        logits, _ = alone.step(i32(slot), position, i32(starts[slot]), states[slot])
        assert tokens[0, 0] == alone.ids[logits[0].argmax()]
        share = np.exp(logits[0].astype(np.float64) - logits[0].max())
        assert probs[0, 0] == pytest.approx(1 / share.sum(), rel=1e-5)


def test_an_unsure_token_ends_the_draft(target: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head.gguf", target)
    net = Eagle3Net(GGUFFile.open(head), GGUFFile.open(target), 1)
    tokens, rows = some_pairs(6, net.n_embd, net.n_in)
    g = net.fuse(rows)
    net.extend(0, 0, tokens, g)
    start = (i32(0), i32(5), tokens[-1:], g[-1:], i32(8))
    _, probs, counts = net.greedy(*start, 0.0)
    assert counts[0] == 8
    floor = float(np.sort(probs[0])[4])
    _, _, fewer = net.greedy(*start, floor)
    assert fewer[0] == np.flatnonzero(probs[0] < floor)[0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net: net.step(i32(0), i32(0), i32(512), net.zero), "outside the embedding"),
        (lambda net: net.step(i32(3), i32(0), i32(1), net.zero), "slot is out of range"),
        (lambda net: net.step(i32(0), i32(-1), i32(1), net.zero), "position is out of range"),
        (lambda net: net.step(i32(0, 0), i32(0, 0), i32(1, 1), np.tile(net.zero, (2, 1))), "named twice"),
        (lambda net: net.extend(0, 0, [1, 2], net.zero), "differ in number"),
        (lambda net: net.fuse(np.zeros((2, 5), np.float32)), "differ in rows"),
    ],
)
def test_the_extension_checks_what_it_is_given(target: Path, tmp_path: Path, call: Any, says: str) -> None:
    net: Any = Eagle3Net(GGUFFile.open(eagle3_head(tmp_path / "h.gguf", target)), GGUFFile.open(target), 1)
    net.zero = np.zeros((1, net.n_embd), np.float32)
    with pytest.raises(ValueError, match=says):
        call(net)


def test_heads_that_can_not_be_run_are_refused(target: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head.gguf", target)
    for put, says in (
        ({"eagle3.rope.scaling.type": "yarn"}, "scales its rope by yarn"),
        ({"eagle3.feed_forward_length": 64}, "can't be run: gate has"),
        ({"eagle3.norm_before_fc": True}, "no vector enc.output_norm.weight"),
    ):
        broken = edit(head, tmp_path / "broken.gguf", put=put)
        with pytest.raises(ModelFileError, match=says):
            Eagle3Net(GGUFFile.open(broken, "draft"), GGUFFile.open(target), 1)


# -- the drafter --------------------------------------------------------------------------------------------------------


def pair(model: Model, head: Path, n_sequences: int = 1, rule: str = "match") -> tuple[TargetSession, Watched]:
    session, drafter = opened("eagle3", model, head, n_sequences, rule)
    assert isinstance(drafter, eagle3.Eagle3Drafter)
    return session, Watched(drafter, lambda seq, k: k if len(seq.tokens) > 1 else None)


def drafted_from_nothing(
    model: Model, head: Path, tokens: list[int], k: int, read: tuple[int, ...] = TAPS, base: int = 0
) -> list[np.ndarray]:
    """Logits over the draft's vocabulary for k tokens after `tokens`, from states from row `base` on that a fresh session
    gives."""
    with TargetSession(model, SessionSettings(n_ctx=256, taps=read)) as session:
        rows = session.decode([(0, tokens[:-1])]).taps
        assert rows is not None
        return HeadReference(head, model.path).chain(tokens[base:], rows.reshape(len(rows), -1)[base:], k)


def check_said(
    model: Model, head: Path, watched: Watched, every: int = 1, read: tuple[int, ...] = TAPS, base: int = 0
) -> int:
    """Each draft is what the head says about its text from row `base` on, whatever was drafted, refused and rolled back."""
    ids = HeadReference(head, model.path).ids
    n_tokens = 0
    for tokens, drafted in watched.said[::every]:
        if len(tokens) == 1 or not drafted:
            continue
        for token, logits in zip(drafted, drafted_from_nothing(model, head, tokens, len(drafted), read, base)):
            best = logits.argmax()
            mine = np.flatnonzero(ids == token)[0]
            assert logits[mine] > logits[best] - 0.01  # a tie within the arithmetic may go either way
            if mine != best:
                break
            n_tokens += 1
    return n_tokens


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    return eagle3_head(target.with_name("head.gguf"), target, draft_vocab=300)


PROMPT = [10, 300, 20, 31, 44, 7, 8, 100, 101, 17]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_drafts_what_the_head_says(model: Model, head: Path, k: int) -> None:
    session, watched = pair(model, head)
    with session:
        text = write(Engine(session, watched, FixedBlock(k)), PROMPT, 40)
        plain = write(Engine(session), PROMPT, 40)
        assert text == plain
        assert check_said(model, head, watched) > 20


def test_pauses_leave_no_gap(model: Model, head: Path) -> None:
    session, watched = pair(model, head)
    with session:
        write(Engine(session, watched, Sometimes(4)), PROMPT, 60)
        assert check_said(model, head, watched) > 10


def test_a_prompt_that_came_while_nobody_drafted_is_read_when_somebody_does(model: Model, head: Path) -> None:
    """Its rows wait, those of texts before it are dropped: what is drafted later is what the head says of the whole text."""
    session, watched = pair(model, head)
    with session:
        text = write(Engine(session, watched, FixedBlock(0)), PROMPT, 70)
        known = watched.inner._slots[0]
        assert known.n_waiting > 60
        write(Engine(session, watched, FixedBlock(0)), [*text[:30], 9, 8, 7], 1)
        assert known.n_rows == len(PROMPT) - 1, "of the first prompt, which came before it was known that nobody drafts"
        assert known.n_rows + known.n_waiting == 33, "the rows of the new text and no others"
        watched.said.clear()
        write(Engine(session, watched, Sometimes(2)), [*text[:25], 5, 6], 20)
        assert check_said(model, head, watched) > 5
        assert known.n_rows > 33


def test_while_nothing_pays_for_long_nothing_is_read_and_a_draft_begins_behind_it(model: Model, head: Path) -> None:
    session, watched = pair(model, head)
    with session:
        plain = write(Engine(session), PROMPT, 60)
        assert write(Engine(session, watched, Asleep(20, 5)), PROMPT, 60) == plain
        assert check_said(model, head, watched, base=len(PROMPT) - 1 + 20) > 10
        known = watched.inner._slots[0]
        assert known.base == len(PROMPT) - 1 + 20

        # What is known of a text is kept for a next one that goes on behind it, and is of no use for one that parts before.
        watched.said.clear()
        engine = Engine(session, watched, FixedBlock(3))
        write(engine, [*plain[:50], 5, 6], 12)
        assert known.base == len(PROMPT) - 1 + 20
        assert check_said(model, head, watched, base=known.base) > 3
        watched.said.clear()
        write(engine, [*plain[:20], 5, 6], 12)
        assert known.base == 20, "as far as the target's cache reached"
        assert check_said(model, head, watched, base=20) > 3
        watched.said.clear()
        write(engine, [4, 4, 4, 4], 12)
        assert known.base == 0
        assert check_said(model, head, watched) > 3


def test_a_prompt_beside_texts_for_which_nothing_pays_is_not_read(model: Model, head: Path) -> None:
    session, watched = pair(model, head, n_sequences=2)
    with session:
        controller = Asleep(10, 2)
        engine = Engine(session, watched, controller)
        engine.start(Request(PROMPT, GREEDY, 60), 0)
        for _ in range(5):
            engine.step()
        prompt = [50 + i for i in range(30)]
        engine.start(Request(prompt, GREEDY, 60), 1)
        known = watched.inner._slots
        assert (known[1].base, known[1].n_waiting) == (29, 0)
        while controller.step < 30:
            engine.step()
        for slot, base in ((0, len(PROMPT) - 1 + 10), (1, 29 + 5)):
            mine = Watched(watched.inner, watched.length)
            mine.said = [(tokens, said) for tokens, said in watched.said if (tokens[:30] == prompt) == (slot == 1)]
            assert (known[slot].base, check_said(model, head, mine, base=base) > 10) == (base, True)


def test_a_prompt_of_one_token_and_one_longer_than_a_batch(model: Model, head: Path) -> None:
    session, watched = pair(model, head)
    with session:
        for prompt in ([9], [int(t) for t in np.random.default_rng(3).integers(0, 300, 150)]):
            watched.said.clear()
            write(Engine(session, watched, FixedBlock(3)), prompt, 20)
            assert check_said(model, head, watched) > 5


def test_texts_that_begin_like_the_last_one(model: Model, head: Path) -> None:
    """A turn added, a turn changed, the same prompt again, a shorter one: what is computed anew, and what is drafted."""
    session, watched = pair(model, head)
    with session:
        engine = Engine(session, watched, FixedBlock(3))
        text = write(engine, PROMPT, 20)
        for prompt, most in (
            ([*text, 5, 6, 7], 5),
            ([*text[:15], 9, 9], 4),
            ([*text[:15], 9, 9], 2),
            (text[:8], 2),
            ([4, 4, 4, 4], 3),
        ):
            watched.said.clear()
            for _ in engine.generate(Request(prompt, GREEDY, 12)):
                pass
            assert engine.stats(0).n_prompt_computed <= most
            engine.finish(0)
            assert check_said(model, head, watched) > 5


def test_plain_decoding_between_texts(model: Model, head: Path) -> None:
    """The session went on without the drafter: what the cache holds that the drafter has not seen is read again."""
    session, watched = pair(model, head)
    with session:
        engine = Engine(session, watched, FixedBlock(3))
        text = write(engine, PROMPT, 10)
        longer = write(Engine(session), [*text, 3], 20)
        watched.said.clear()
        write(engine, [*longer, 8], 12)
        assert check_said(model, head, watched) > 5


def test_several_sequences_draft_as_each_alone(model: Model, head: Path) -> None:
    """One's prompt is read in pieces between steps of the others; between some slots there are gaps."""
    prompts = {5: PROMPT, 0: PROMPT[:3], 3: [9], 1: [50 + i for i in range(30)]}
    session, watched = pair(model, head, n_sequences=6)
    with session:
        engine = Engine(session, watched, FixedBlock(3))
        for slot, prompt in prompts.items():
            assert engine.begin(Request(prompt, GREEDY, 25), slot) == slot
            if slot != 1:
                assert engine.read(slot) == len(prompt) - 1
        running, pieces = set(prompts), []
        while running:
            if 1 in running and not engine.is_ready(1):
                pieces.append(engine.read(1, 8))
            for step in engine.step():
                assert step.slot != 1 or sum(pieces) == 29
                if step.stop:
                    running.discard(step.slot)
                    engine.finish(step.slot)
        assert pieces == [8, 8, 8, 5]
        assert check_said(model, head, watched, every=3) > 30


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sampled_drafts(model: Model, head: Path, rule: str, penalty: float) -> None:
    """`match` writes the plain text of the seed; `reject` hands over a distribution that the drafted tokens come from."""
    sampling = Sampling(temperature=0.9, top_k=20, seed=5, repeat_penalty=penalty)
    session, watched = pair(model, head, rule=rule)
    with session:
        texts = [write(Engine(session, watched, FixedBlock(3), rule), PROMPT, 60, sampling, key) for key in range(3)]
        if rule == "match":
            assert texts == [write(Engine(session), PROMPT, 60, sampling, key) for key in range(3)]
        assert len(watched.said) > 60
    # what can't be said by the head is never drafted
    ids = set(HeadReference(head, model.path).ids.tolist())
    assert {t for _, drafted in watched.said for t in drafted} <= ids


def test_a_draft_drawn_with_the_targets_noise(model: Model, target: Path, tmp_path: Path) -> None:
    """A head that says what the target says, token for token, would be kept always: shared noise couples the two. Here the
    head is random but both are nearly flat, so the noise decides, and acceptance is far above chance."""
    flat = tiny_llama(tmp_path / "flat.gguf", n_layer=4, vocab=512, logit_std=0.05)
    head = eagle3_head(tmp_path / "head.gguf", flat, draft_vocab=0, logit_std=0.05)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    with Model(flat) as model_:
        session, watched = pair(model_, head)
        with session:
            engine = Engine(session, watched, FixedBlock(2))
            for _ in engine.generate(Request(PROMPT, sampling, 80)):
                pass
            assert (engine.stats(0).acceptance or 0) > 0.7


@pytest.mark.parametrize(("arch", "read"), [("qwen2", (1, 2, 3)), ("llama", (1, 2, 4))])
def test_states_by_the_eval_callback(tmp_path: Path, arch: str, read: tuple[int, ...]) -> None:
    """A graph that hands over no inputs of layers, and the state after the last layer: several sequences at once."""
    target = tiny_llama(tmp_path / "target.gguf", n_layer=4, vocab=512, arch=arch)
    head = eagle3_head(tmp_path / "head.gguf", target, taps=read, draft_vocab=0)
    with Model(target) as model:
        session, watched = pair(model, head, n_sequences=2)
        with session:
            engine = Engine(session, watched, FixedBlock(3))
            for prompt in (PROMPT, [int(t) for t in np.random.default_rng(4).integers(0, 300, 90)]):
                engine.start(Request(prompt, GREEDY, 15))
            while engine._running:
                for step in engine.step():
                    if step.stop:
                        engine.finish(step.slot)
            assert check_said(model, head, watched, read=read) > 20


def test_taps_in_another_order(model: Model, target: Path, tmp_path: Path) -> None:
    """A head may read them in any order; the session hands them over ascending."""
    head = eagle3_head(tmp_path / "head.gguf", target, taps=(3, 1, 2))
    session, watched = pair(model, head)
    with session:
        write(Engine(session, watched, FixedBlock(2)), PROMPT, 6)
    tokens, drafted = watched.said[0]
    with TargetSession(model, SessionSettings(n_ctx=256, taps=TAPS)) as fresh:
        rows = fresh.decode([(0, tokens[:-1])]).taps
        assert rows is not None
        reference = HeadReference(head, target)
        logits = reference.chain(tokens, rows[:, [2, 0, 1]].reshape(len(rows), -1), 2)
        wrong = reference.chain(tokens, rows.reshape(len(rows), -1), 2)
    assert drafted == [int(reference.ids[row.argmax()]) for row in logits]
    assert not np.allclose(logits[0], wrong[0])


def test_what_does_not_fit_is_refused(model: Model, head: Path, target: Path, tmp_path: Path) -> None:
    assert drafter_for(GGUFFile.open(head)) == "eagle3"
    with pytest.raises(UsageError, match="needs a draft"):
        taps("eagle3", model.gguf, DrafterSettings())
    with pytest.raises(PairingError, match="no EAGLE-3 draft"):
        taps("eagle3", model.gguf, DrafterSettings(target))
    other = tiny_llama(tmp_path / "other.gguf", n_layer=4, n_embd=128, vocab=512)
    with pytest.raises(PairingError, match="hidden size of 64"):
        taps("eagle3", GGUFFile.open(other), DrafterSettings(head))
    with TargetSession(model, SessionSettings(n_ctx=64)) as session, pytest.raises(LocalspecError, match="reads the taps"):
        load("eagle3", session, DrafterSettings(head))
    assert taps("ngram", model.gguf, DrafterSettings()) == ()
    assert replace(DrafterSettings(head), rule="reject").draft_path == head
