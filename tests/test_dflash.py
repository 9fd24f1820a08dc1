"""DFlash and DSpark drafting: the network against numpy and llama.cpp, the book-keeping against drafting from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.accept import Sampling
from localspec.blocks import FixedBlock
from localspec.dflash_net import DFlashNet
from localspec.drafters import DrafterSettings, dflash, load, taps
from localspec.engine import Engine, Request
from localspec.errors import LocalspecError, ModelFileError, PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.pairing import drafter_for, llama_spec_type
from localspec.target import SessionSettings, TargetSession
from tests.block_reference import BlockReference
from tests.conftest import Cli
from tests.dflash_maker import dflash_draft
from tests.gguf_maker import edit, requantize, tiny_llama
from tests.llama_head import LlamaBlocks
from tests.tap_drafting import GREEDY, Asleep, Sometimes, Watched, opened, write

MASK = 5


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("dflash") / "target.gguf", n_layer=4, vocab=512)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with Model(target) as loaded:
        yield loaded


def some_taps(n: int, n_in: int, seed: int = 1) -> np.ndarray:
    """Taps f32[n, n_in] as wild as real ones: one dimension in ten is fifty times larger."""
    rows = np.random.default_rng(seed).standard_normal((n, n_in)).astype(np.float32)
    rows[:, ::10] *= 50
    return rows


def net_of(draft: Path, target: Path, n_slots: int = 1, **settings: Any) -> DFlashNet:
    return DFlashNet(GGUFFile.open(draft, "draft"), GGUFFile.open(target), n_slots, **settings)


# -- the network --------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, one key head": {"n_layer": 1, "n_head_kv": 1},
    "three layers, three taps in another order": {"n_layer": 3, "taps": (3, 1, 2)},
    "window in one layer": {"window": 6, "windowed": (1, 0)},
    "window in all": {"window": 9},
    "causal": {"causal": True},
    "whole vocabulary": {"draft_vocab": 0},
    "own embedding and head": {"own_embedding": True, "draft_vocab": 0},
    "own embedding": {"own_embedding": True},
    "rope factors": {"rope_factors": True},
    "dspark": {"rank": 16},
    "dspark, whole vocabulary": {"rank": 16, "draft_vocab": 0},
    "dspark, anchor first": {"rank": 16, "from_anchor": False},
    "dspark without confidence": {"rank": 24, "confidence": False},
    "f16": {"ftype": "f16", "rank": 32},
    "q8_0": {"ftype": "q8_0", "rank": 32, "head_dim": 32},
    "q4_0": {"ftype": "q4_0", "rank": 32, "head_dim": 32},
}


def looseness(variant: str) -> float:
    # int8 activations: about 1 % of a row's size, as everywhere in the kernels
    return 0.03 if VARIANTS[variant].get("ftype", "f32")[0] == "q" else 2e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_network_is_numpys(target: Path, tmp_path: Path, variant: str) -> None:
    """Texts of no rows and of so many that blocks of 16 keys begin and end; drafts of 1 and of more."""
    draft = dflash_draft(tmp_path / "draft.gguf", target, **VARIANTS[variant])
    net, reference = net_of(draft, target), BlockReference(draft, target)
    loose = looseness(variant)
    for n, k in ((0, 3), (1, 1), (30, 5), (45, 7)):
        rows = some_taps(n, net.n_in, seed=n)
        net.inject(0, 0, rows[: n // 2])
        net.inject(0, n // 2, rows[n // 2 :])
        logits, hidden = net.block(i32(0), i32(n), i32(77), i32(k))
        tokens, sure, counts = net.greedy(i32(0), i32(n), i32(77), i32(k), 0.0)
        assert counts.tolist() == [k]
        wanted, _, likely = reference.draft(rows, 77, k, tokens[0].tolist())
        previous = 77
        for i in range(k):
            confidence = net.lean(i32(previous), hidden[i : i + 1], logits[i : i + 1])
            assert np.linalg.norm(logits[i] - wanted[i]) < 2 * loose * np.linalg.norm(wanted[i]), f"{n} rows, place {i}"
            previous = int(tokens[0, i])
            assert previous == net.ids[logits[i].argmax()]
            assert sure[0, i] == pytest.approx(likely[i], abs=2 * loose if loose < 0.01 else 0.1)
            assert np.isnan(confidence[0]) != net.has_confidence
            if net.has_confidence:
                assert confidence[0] == sure[0, i]


@pytest.mark.parametrize("variant", VARIANTS)
def test_network_is_llama_cpps(target: Path, model: Model, tmp_path: Path, variant: str) -> None:
    """llama.cpp's own graph of the same file, fed as its drafting feeds it."""
    draft = dflash_draft(tmp_path / "draft.gguf", target, **VARIANTS[variant])
    net = net_of(draft, target)
    loose = 0.03 if looseness(variant) > 0.01 else 1e-3  # llama.cpp rounds activations and tables to f16 here and there
    lead, k = 0 if net.from_anchor else 1, 5
    with TargetSession(model, SessionSettings(n_ctx=256)) as session:
        theirs = LlamaBlocks(draft, session, causal=VARIANTS[variant].get("causal", False))
        for n in (1, 40):
            rows = some_taps(n, net.n_in, seed=n)
            theirs.inject(0, rows)
            net.inject(0, 0, rows)
            wanted, likely = theirs.block(n, [77] + [MASK] * (k + lead - 1))
            logits, hidden = net.block(i32(0), i32(n), i32(77), i32(k))
            previous = 77
            for i in range(k):
                confidence = net.lean(i32(previous), hidden[i : i + 1], logits[i : i + 1])
                said = np.isfinite(wanted[lead + i])
                assert set(np.flatnonzero(said)) == set(net.ids.tolist())
                row = wanted[lead + i][net.ids]
                assert np.linalg.norm(logits[i] - row) < 2 * loose * np.linalg.norm(row), f"{n} rows, place {i}"
                if net.has_confidence:
                    assert confidence[0] == pytest.approx(likely[lead + i, 0], abs=0.1 if loose > 0.01 else 1e-3)
                previous = int(net.ids[row.argmax()])  # the chain there goes on with its own choice
        theirs.close()


@pytest.mark.parametrize("quant", ["Q4_K_M", "Q6_K", "Q2_K", "BF16"])
def test_drafts_of_other_types(tmp_path: Path, quant: str) -> None:
    """As llama.cpp's quantiser mixes them, types that our kernels don't multiply among them."""
    target = tiny_llama(tmp_path / "target.gguf", n_layer=4, vocab=512, n_embd=256)
    plain = dflash_draft(tmp_path / "plain.gguf", target, head_dim=64, n_ff=256, rank=256)
    draft = requantize(plain, tmp_path / "draft.gguf", quant)
    assert quant[:4] in {t.type[:4] for t in GGUFFile.open(draft).tensors.values()}
    net, reference = net_of(draft, target), BlockReference(draft, target)
    rows = some_taps(20, net.n_in)
    net.inject(0, 0, rows)
    logits, hidden = net.block(i32(0), i32(20), i32(9), i32(3))
    net.lean(i32(9), hidden[:1], logits[:1])
    wanted, _, _ = reference.draft(rows, 9, 3)
    assert np.linalg.norm(logits[0] - wanted[0]) < 0.05 * np.linalg.norm(wanted[0])


@pytest.mark.parametrize("rank", [0, 32])
def test_slots_and_threads_do_not_show(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Eleven texts at once, more than the kernels take in a tile, by one thread and three: each drafts as it would alone."""
    draft = dflash_draft(tmp_path / "draft.gguf", target, ftype="q8_0", head_dim=32, rank=rank, window=10, windowed=(0, 1))
    alone = net_of(draft, target, 11)
    monkeypatch.setattr("localspec.draft_net._BYTES_PER_THREAD", 1)
    many = net_of(draft, target, 11, n_threads=3)
    assert (alone.n_threads, many.n_threads) == (1, 3)
    lengths = [3 + 5 * i for i in range(11)]
    for slot, n in enumerate(lengths):
        for net in (alone, many):
            net.inject(slot, 0, some_taps(n, alone.n_in, seed=slot))
    ks, anchors = i32(4, 1, 2, 3, 4, 7, 2, 4, 1, 5, 4), np.arange(40, 51, dtype=np.int32)
    tokens, sure, counts = many.greedy(np.arange(11, dtype=np.int32), i32(*lengths), anchors, ks, 0.0)
    assert counts.tolist() == ks.tolist()
    for slot, k in enumerate(ks.tolist()):
        one = i32(slot), i32(lengths[slot]), anchors[slot : slot + 1], ks[slot : slot + 1]
        mine, likely, _ = alone.greedy(*one, 0.0)
        assert mine[0].tolist() == tokens[slot, :k].tolist()
        assert likely[0].tolist() == sure[slot, :k].tolist()


@pytest.mark.parametrize("rank", [0, 16])
def test_an_unsure_token_ends_the_draft(target: Path, tmp_path: Path, rank: int) -> None:
    net = net_of(dflash_draft(tmp_path / "draft.gguf", target, rank=rank), target)
    net.inject(0, 0, some_taps(6, net.n_in))
    start = (i32(0), i32(6), i32(9), i32(7))
    tokens, sure, counts = net.greedy(*start, 0.0)
    assert counts[0] == 7
    floor = float(np.sort(sure[0])[3])
    fewer, _, n = net.greedy(*start, floor)
    assert n[0] == np.flatnonzero(sure[0] < floor)[0]
    assert fewer[0, : n[0]].tolist() == tokens[0, : n[0]].tolist()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net: net.block(i32(0), i32(0), i32(512), i32(1)), "outside the embedding"),
        (lambda net: net.block(i32(3), i32(0), i32(1), i32(1)), "slot is out of range"),
        (lambda net: net.block(i32(0), i32(-1), i32(1), i32(1)), "position is out of range"),
        (lambda net: net.block(i32(0, 0), i32(0, 0), i32(1, 1), i32(1, 1)), "named twice"),
        (lambda net: net.greedy(i32(0), i32(0), i32(1), i32(2000), 0.0), "1 to 1024 tokens"),
        (lambda net: net.inject(0, 0, np.zeros((2, 5), np.float32)), "not whole rows"),
        (lambda net: net.inject(0, -1, np.zeros((1, net.n_in), np.float32)), "out of range"),
        (lambda net: net.lean(i32(1), np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)), "differ in number"),
    ],
)
def test_the_extension_checks_what_it_is_given(target: Path, tmp_path: Path, call: Any, says: str) -> None:
    net = net_of(dflash_draft(tmp_path / "d.gguf", target), target)
    with pytest.raises(ValueError, match=says):
        call(net)


def test_drafts_that_can_not_be_run_are_refused(target: Path, tmp_path: Path) -> None:
    draft = dflash_draft(tmp_path / "draft.gguf", target, rank=16, window=9)
    for change, says in (
        ({"put": {"dflash.rope.scaling.type": "yarn"}}, "scales its rope by yarn"),
        ({"put": {"dflash.feed_forward_length": 64}}, r"can't be run: 0\.gate has"),
        ({"put": {"dflash.embedding_scale": 2.0}}, r"can't run \(dflash\.embedding_scale 2\.0\)"),
        ({"put": {"dflash.block_size": 0}}, "blocks of 0"),
        ({"put": {"tokenizer.ggml.mask_token_id": 512}}, "says mask token 512"),
        ({"put": {"dflash.sample_from_anchor": 3}}, "is damaged: dflash.sample_from_anchor holds"),
        ({"drop": ["tokenizer.ggml.mask_token_id"]}, "says mask token None"),
        ({"drop": ["dflash.attention.sliding_window_pattern"]}, "which of its layers have its window"),
    ):
        broken = edit(draft, tmp_path / "broken.gguf", **change)  # type: ignore[arg-type]
        with pytest.raises(ModelFileError, match=says):
            net_of(broken, target)


# -- the drafter --------------------------------------------------------------------------------------------------------


def pair(
    model: Model, draft: Path, n_sequences: int = 1, rule: str = "match", n_ctx: int = 200
) -> tuple[TargetSession, Watched]:
    session, drafter = opened("dflash", model, draft, n_sequences, rule, n_ctx)
    assert isinstance(drafter, dflash.DFlashDrafter)
    return session, Watched(drafter, lambda seq, k: min(k, drafter.net.n_most))


def check_said(model: Model, draft: Path, watched: Watched, every: int = 1, base: int = 0) -> int:
    """Each draft is what the network says about its text from row `base` on, whatever was drafted, refused and rolled
    back before."""
    reference = BlockReference(draft, model.path)
    wanted = [int(i) for i in np.atleast_1d(reference.file.arch("target_layers"))]
    ascending = tuple(sorted(wanted))
    order = [ascending.index(tap) for tap in wanted]
    n_tokens = 0
    for tokens, drafted in watched.said[::every]:
        if not drafted:
            continue
        rows = np.zeros((0, len(wanted), model.n_embd), np.float32)
        if len(tokens) > 1:
            with TargetSession(model, SessionSettings(n_ctx=256, taps=ascending)) as session:
                given = session.decode([(0, tokens[:-1])]).taps
                assert given is not None
                rows = given[base:, order]
        logits, _, _ = reference.draft(rows.reshape(len(tokens) - 1 - base, -1), tokens[-1], len(drafted), drafted)
        for token, row in zip(drafted, logits):
            mine = np.flatnonzero(reference.ids == token)[0]
            assert row[mine] > row.max() - 0.01  # a tie within the arithmetic may go either way
            n_tokens += 1
    return n_tokens


DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {"taps": (3, 1)},
    "windowed": {"window": 12, "windowed": (1, 0), "draft_vocab": 0},
    "dspark": {"rank": 16, "taps": (1, 2, 3)},
    "dspark, anchor first": {"rank": 16, "from_anchor": False},
}


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request: pytest.FixtureRequest, target: Path) -> Path:
    path = target.with_name(f"draft-{list(DRAFTS).index(request.param)}.gguf")
    return path if path.exists() else dflash_draft(path, target, **{"draft_vocab": 300} | DRAFTS[request.param])


PROMPT = [10, 300, 20, 31, 44, 7, 8, 100, 101, 17]


@pytest.mark.parametrize("k", [1, 4, 20])
def test_drafts_what_the_network_says(model: Model, draft: Path, k: int) -> None:
    """20 is more than a block holds."""
    session, watched = pair(model, draft)
    with session:
        text = write(Engine(session, watched, FixedBlock(k)), PROMPT, 30)
        assert text == write(Engine(session), PROMPT, 30)
        assert check_said(model, draft, watched, every=3) > 8


def test_while_nothing_pays_for_long_nothing_is_read_and_a_draft_begins_behind_it(model: Model, draft: Path) -> None:
    session, watched = pair(model, draft)
    with session:
        base = len(PROMPT) - 1 + 12
        plain = write(Engine(session), PROMPT, 40)
        assert write(Engine(session, watched, Asleep(12, 5)), PROMPT, 40) == plain
        assert (watched.inner._slots[0].base, check_said(model, draft, watched, every=2, base=base) > 5) == (base, True)
        watched.said.clear()
        write(Engine(session, watched, FixedBlock(3)), [*plain[:30], 5, 6], 12)
        assert check_said(model, draft, watched, every=2, base=base) > 5


def test_pauses_a_prompt_of_one_token_and_a_long_one(model: Model, draft: Path) -> None:
    session, watched = pair(model, draft)
    with session:
        for prompt in ([9], [int(t) for t in np.random.default_rng(3).integers(0, 300, 150)]):
            watched.said.clear()
            write(Engine(session, watched, Sometimes(3)), prompt, 30)
            assert check_said(model, draft, watched, every=2) > 5


def test_texts_that_begin_like_the_last_one(model: Model, draft: Path) -> None:
    """A turn added, a turn changed, the same prompt again, a shorter one: what is computed anew, and what is drafted."""
    session, watched = pair(model, draft)
    with session:
        engine = Engine(session, watched, FixedBlock(3))
        text = write(engine, PROMPT, 20)
        for prompt, most in (
            ([*text, 5, 6, 7], 5),
            ([*text[:15], 9, 9], 3),
            ([*text[:15], 9, 9], 1),
            ([*text[:15], 9, 8], 1),
            (text[:8], 1),
            ([4, 4, 4, 4], 3),
        ):
            watched.said.clear()
            for _ in engine.generate(Request(prompt, GREEDY, 10)):
                pass
            assert engine.stats(0).n_prompt_computed <= most
            engine.finish(0)
            assert check_said(model, draft, watched, every=2) > 5


def test_plain_decoding_between_texts(model: Model, draft: Path) -> None:
    """The session went on without the drafter: what the cache holds that the drafter has not seen is read again."""
    session, watched = pair(model, draft)
    with session:
        engine = Engine(session, watched, FixedBlock(3))
        text = write(engine, PROMPT, 10)
        longer = write(Engine(session), [*text, 3], 20)
        watched.said.clear()
        write(engine, [*longer, 8], 12)
        assert check_said(model, draft, watched, every=2) > 5


def test_several_sequences_draft_as_each_alone(model: Model, draft: Path) -> None:
    prompts = [PROMPT, PROMPT[:3], [9], [50 + i for i in range(30)]]
    session, watched = pair(model, draft, n_sequences=4)
    with session:
        engine = Engine(session, watched, FixedBlock(3))
        for prompt in prompts:
            engine.start(Request(prompt, GREEDY, 25))
        running = set(range(4))
        while running:
            for step in engine.step():
                if step.stop:
                    running.discard(step.slot)
                    engine.finish(step.slot)
        assert check_said(model, draft, watched, every=5) > 30


def test_a_text_far_longer_than_the_window(model: Model, target: Path, tmp_path: Path) -> None:
    draft = dflash_draft(tmp_path / "draft.gguf", target, window=16, draft_vocab=300)
    session, watched = pair(model, draft, n_ctx=256)
    with session:
        prompt = [int(t) for t in np.random.default_rng(5).integers(0, 300, 180)]
        assert write(Engine(session, watched, FixedBlock(5)), prompt, 50) == write(Engine(session), prompt, 50)
        assert check_said(model, draft, watched, every=6) > 20


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sampled_drafts(model: Model, draft: Path, rule: str, penalty: float) -> None:
    """`match` writes the plain text of the seed; `reject` hands over a distribution that the drafted tokens come from."""
    sampling = Sampling(temperature=0.8, top_k=20, seed=5, repeat_penalty=penalty)
    session, watched = pair(model, draft, rule=rule)
    with session:
        texts = [write(Engine(session, watched, FixedBlock(4), rule), PROMPT, 50, sampling, key) for key in range(2)]
        if rule == "match":
            assert texts == [write(Engine(session), PROMPT, 50, sampling, key) for key in range(2)]
        assert len(watched.said) > 30
    # what can't be said by the draft is never drafted
    ids = set(BlockReference(draft, model.path).ids.tolist())
    assert {t for _, drafted in watched.said for t in drafted} <= ids


@pytest.mark.parametrize("rank", [0, 16])
def test_a_draft_drawn_with_the_targets_noise(tmp_path: Path, rank: int) -> None:
    """Target and draft are nearly flat, so that the noise decides, and it is the same for both: acceptance is far above
    chance at every place of a block."""
    flat = tiny_llama(tmp_path / "flat.gguf", n_layer=4, vocab=512, logit_std=0.05)
    draft = dflash_draft(tmp_path / "draft.gguf", flat, draft_vocab=0, own_embedding=True, logit_std=0.05, rank=rank)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    with Model(flat) as model_:
        session, watched = pair(model_, draft)
        with session:
            engine = Engine(session, watched, FixedBlock(3))
            for _ in engine.generate(Request(PROMPT, sampling, 80)):
                pass
            assert (engine.stats(0).acceptance or 0) > 0.7


def test_p_min_keeps_what_the_confidence_head_allows(model: Model, target: Path, tmp_path: Path) -> None:
    draft = dflash_draft(tmp_path / "draft.gguf", target, rank=16, draft_vocab=300)
    for sampling in (GREEDY, Sampling(temperature=0.8, seed=2)):
        lengths = []
        for p_min in (0.0, 0.55):
            settings = DrafterSettings(draft, p_min=p_min)
            read = taps("dflash", model.gguf, settings)
            with TargetSession(model, SessionSettings(n_ctx=200, taps=read)) as session:
                drafter = load("dflash", session, settings)
                engine = Engine(session, drafter, FixedBlock(5))
                for _ in engine.generate(Request(PROMPT, sampling, 30)):
                    pass
                lengths.append(engine.stats(0).n_drafted / engine.stats(0).n_verify)
        assert lengths[0] > 4
        assert 0.2 < lengths[1] < lengths[0] - 1


def test_what_does_not_fit_is_refused(model: Model, target: Path, tmp_path: Path) -> None:
    draft = dflash_draft(tmp_path / "draft.gguf", target)
    assert drafter_for(GGUFFile.open(draft)) == "dflash"
    assert llama_spec_type("dflash", GGUFFile.open(draft)) == "draft-dflash"
    spark = dflash_draft(tmp_path / "spark.gguf", target, rank=8)
    assert llama_spec_type("dflash", GGUFFile.open(spark)) == "draft-dspark"
    with pytest.raises(UsageError, match="needs a draft"):
        taps("dflash", model.gguf, DrafterSettings())
    with pytest.raises(PairingError, match="no DFlash draft"):
        taps("dflash", model.gguf, DrafterSettings(target))
    other = tiny_llama(tmp_path / "other.gguf", n_layer=4, n_embd=128, vocab=512)
    with pytest.raises(PairingError, match="hidden size of 64"):
        taps("dflash", GGUFFile.open(other), DrafterSettings(draft))
    with TargetSession(model, SessionSettings(n_ctx=64)) as session, pytest.raises(LocalspecError, match="reads the taps"):
        load("dflash", session, DrafterSettings(draft))


def test_the_command(cli: Cli, target: Path, tmp_path: Path) -> None:
    """Runs with its file alone, under llama.cpp's names for it too; the text is the plain one."""
    for kind, rank, name in (("dflash", 0, "draft-dflash"), ("dspark", 16, "draft-dspark")):
        draft = dflash_draft(tmp_path / f"{kind}.gguf", target, rank=rank, window=32, windowed=(1, 0))
        common = ("run", "--target", target, "--temp", "0", "-n", "12", "--raw", "-p", "the cat sat", "--no-spec-adapt")
        plain = cli(*common, "--spec-type", "none")
        for chosen in ((), ("--spec-type", name)):
            drafted = cli(*common, "--draft", draft, *chosen)
            assert drafted.rc == plain.rc == 0, drafted.stderr
            assert drafted.stdout == plain.stdout
            assert "tokens per verify" in drafted.stderr
        shown = cli("inspect", target, draft).stdout
        assert f"--spec-type {name}" in shown
        assert "sees           the last 32 positions in 1 of 2 layers" in shown
        assert ("Markov head and confidence head" in shown) == (rank > 0)
