"""Training of DFlash and DSpark on a tiny target: passes and losses against a plain reference, what a block can't see."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from localspec.data.shards import Sample, Shards  # noqa: E402
from localspec.errors import TrainError  # noqa: E402
from localspec.speculator import SpeculatorConfig  # noqa: E402
from localspec.train import batches, block_attention, checkpoint, evaluate, kinds, loop, metrics, models, vocab  # noqa: E402
from localspec.train.models.dflash import Blocks, mask_token  # noqa: E402
from localspec.train.models.dspark import right_so_far  # noqa: E402
from localspec.train.position_weights import dpace  # noqa: E402
from localspec.train.settings import TrainSettings, check  # noqa: E402
from localspec.train.target_weights import TargetWeights  # noqa: E402
from tests import train_data  # noqa: E402
from tests.dflash_reference import Reference  # noqa: E402
from tests.test_train import hugging_face_target  # noqa: E402
from tests.training import place_for  # noqa: E402

KINDS = ("dflash", "dspark")
SETTINGS = TrainSettings(
    steps=12, batch_tokens=256, held_out=0.2, lr=0.004, eval_every=6, save_every=4, warmup=2, threads=1, dtype="fp32"
)
OWN = {"block": 4, "layers": 2, "draft_vocab": 64, "n_ff": 48, "window": 0, "anchors": 1.0}


def own(kind: str, **changes: Any) -> Any:
    more = {"markov_rank": 32} if kind == "dspark" else {}
    return models.find(kind).Settings(**{**OWN, **more, **changes})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_for(tmp_path_factory, "dflash")


def go(place: Path, out: Path, kind: str, settings: Any = None, **changes: Any) -> evaluate.Report:
    run = loop.Run(kind, place / "target.gguf", place / "data", out, replace(SETTINGS, **changes), settings or own(kind))
    return loop.train(run, lambda _: None, lambda _: None)


@pytest.fixture(scope="module")
def trained(place: Path) -> dict[str, Path]:
    """A run of 70 steps of each kind."""
    for kind in KINDS:
        go(place, place / kind, kind, steps=70, eval_every=70, save_every=70, lr=0.01)
    return {kind: place / kind / "best" for kind in KINDS}


def made(place: Path, kind: str, start: Path | None = None, **changes: Any) -> tuple[Any, list[Sample]]:
    """A model in fp32, all its parameters away from where they begin, and some samples."""
    target = TargetWeights(place / "target.gguf")
    shards = Shards.open(place / "data", target.identity)
    everything = list(range(len(shards)))
    counts = vocab.expected_counts(shards, batches.split(shards, SETTINGS.held_out)[0], target.identity.n_vocab)
    facts = models.DataFacts(train_data.TAPS, loop.tap_rms(shards, everything), counts)
    model = models.find(kind).new(own(kind, **changes), target, facts, 0)
    if start is not None:
        model.take(checkpoint.load_weights(start))
    else:
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=random) * 0.2)
    model.embedding = model.embedding.float()
    return model, [shards.sample(i) for i in everything[:5]]


def reference(model: Any, folder: Path) -> Reference:
    checkpoint.save(folder, model, {}, None)
    return Reference(folder, model.embedding.numpy())


SHAPES = [
    {"anchors": 0.4, "block": 5}, {"window": 7}, {"window": 6, "layers": 3, "full_layers": "1"},
    {"sizes": "fixed", "anchors": 0.3}, {"draft_vocab": 0, "layers": 1},
]  # fmt: skip


# -- it computes what llama.cpp's graph does ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weights", ["decay", "dpace", "even"])
def test_the_loss_is_each_block_on_its_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shape: dict[str, Any], weights: str
) -> None:
    """All blocks' losses, by depth and as they are weighed, against the reference's, one block at a time."""
    monkeypatch.setattr(block_attention, "ROWS", 11)
    monkeypatch.setattr("localspec.train.losses.CHUNK", 13)
    more = {"confidence": 0.0} if kind == "dspark" else {}
    model, samples = made(place, kind, **shape, **more, weights=weights, gamma=2.0)
    batch = model.batch(samples, 2048, torch.float32)
    parts = model.loss(batch)
    plain = reference(model, tmp_path / "c")
    draft_of = {int(t): i for i, t in enumerate(plain.ids)}
    blocks = model._drawn(batch)
    sizes = np.bincount(blocks.block)
    assert set(sizes) <= set(range(model.FIRST + 1, model.settings.block + 1))
    assert len(set(sizes)) == 1 if model.settings.sizes == "fixed" else len(set(sizes)) > 1
    losses, rows, right, total = np.zeros(model.depth), np.zeros(model.depth, int), np.zeros(model.depth, int), 0.0
    for anchor, size in zip(blocks.anchors, sizes):
        which = int(np.searchsorted(batch.starts, anchor, "right")) - 1
        sample, own_place = samples[which], int(anchor - batch.starts[which])
        rows_of = {int(row) + 1: i for i, row in enumerate(sample.teacher_rows)}
        n = min(int(size) - model.FIRST, len(sample.tokens) - own_place - 1)
        states = plain.states(sample.tokens, sample.taps.astype(np.float64), own_place, int(size))[model.FIRST :][:n]
        logits = plain.logits(states, sample.tokens[own_place : own_place + n])
        q = np.exp(logits - logits.max(1, keepdims=True))
        q /= q.sum(1, keepdims=True)
        kept, own_losses, said = 1.0, [], []
        for j in range(n):
            token, i = int(sample.tokens[own_place + 1 + j]), rows_of[own_place + 1 + j]
            p = np.exp(sample.teacher_logits[i] - sample.teacher_lse[i])
            own_losses.append(-sum(x * np.log(q[j, draft_of[int(t)]]) for t, x in zip(sample.teacher_ids[i], p)
                                   if int(t) in draft_of))  # fmt: skip
            said.append(q[j, draft_of[token]] if token in draft_of else 0.0)
            right[j] += int(plain.ids[q[j].argmax()]) == token
        products = np.cumprod([0.5 * x + 0.5 for x in said])
        for j, lost in enumerate(own_losses):
            kept = {"decay": np.exp(-j / 2.0), "even": 1.0, "dpace": products[j:].sum()}[weights]
            losses[j], rows[j], total = losses[j] + lost, rows[j] + 1, total + kept * lost
    n = len(parts.rows)
    assert (parts.rows, parts.n_rows) == (rows[:n].tolist(), len(blocks.anchors))
    assert not rows[n:].any()
    np.testing.assert_allclose(parts.losses, losses[:n], rtol=2e-4)
    assert parts.right == right[:n].tolist()
    assert float(parts.loss.detach()) == pytest.approx(total, rel=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [{}, {"window": 6, "full_layers": "0"}], ids=str)
def test_rolling_out_is_drafting_block_by_block(
    place: Path, trained: dict[str, Path], tmp_path: Path, kind: str, shape: dict[str, Any]
) -> None:
    model, samples = made(place, kind, trained[kind], **shape)
    plain = reference(model, tmp_path / "c")
    batch = model.batch(samples[:3], 2048, torch.float32)
    for n in (1, model.depth):
        found = model.rollout(batch, n)
        wanted, starts = [], []
        for which, sample in enumerate(samples[:3]):
            for anchor in range(1, len(sample.tokens) - 1):
                if not sample.mask[anchor + 1]:
                    continue
                said = plain.draft(sample.tokens, sample.taps.astype(np.float64), anchor, n)
                told = sample.tokens[anchor + 1 : anchor + 1 + n]
                same = [a == int(b) for a, b in zip(said, told)]
                starts.append(int(batch.starts[which]) + anchor)
                wanted.append(same.index(False) if False in same else len(same))
        assert found.starts.tolist() == starts
        assert found.accepted.tolist() == wanted
        assert n == 1 or len(set(wanted)) > 2
    assert model.rollout(batch, 99).accepted.tolist() == found.accepted.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_sees_nothing_of_what_it_should_find(place: Path, kind: str) -> None:
    """Other taps from the anchor on, and other tokens behind it, change nothing in its block's rows; others before do."""
    model, samples = made(place, kind)
    sample = samples[0]
    batch = model.batch([sample], 2048, torch.float32)
    low = model._low(torch.float32)
    anchors = np.array([12])
    blocks = Blocks.of(anchors, block_attention.groups(anchors, batch.starts, [4], np.random.default_rng(0)))
    found = []
    for change in (None, "taps", "tokens", "before"):
        changed = replace(batch, tokens=batch.tokens.clone(), taps=batch.taps.clone())
        if change == "taps":
            changed.taps[12:] += 1.0
        if change == "tokens":
            changed.tokens[13:] = 105
        if change == "before":
            changed.taps[11] += 1.0
        known = model._known(low, changed)
        found.append(model._states(low, changed, known, blocks, np.arange(4)).detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.isclose(found[0], found[3]).any(1).all()


# -- it learns, and goes on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_the_rule(place: Path, trained: dict[str, Path], kind: str) -> None:
    lines = metrics.read(place / kind / "metrics.jsonl")
    curve = [line["loss"] for line in lines if "loss" in line]
    assert np.mean(curve[-10:]) < 0.6 * np.mean(curve[:10])
    found = [line["eval"] for line in lines if "eval" in line][-1]
    depth = 3 if kind == "dflash" else 4
    assert found["n_max"] == depth
    assert found["tokens_per_verify"] > 1.6
    config = SpeculatorConfig.load(trained[kind])
    assert (config.method, config.arch, config.depth, config.n_layer) == (kind, "dflash", depth, 2)
    assert config.extra["block_size"] == 4
    assert config.extra["mask_token_id"] == mask_token(TargetWeights(place / "target.gguf"))
    assert SpeculatorConfig.from_json(config.to_json(), "x") == config


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_goes_on_to_the_same_curve(place: Path, tmp_path: Path, kind: str) -> None:
    changes = {"anchors": 0.5, "weights": "dpace", "noise": 0.1}

    def curve(out: Path) -> list[float]:
        return [line["loss"] for line in metrics.read(out / "metrics.jsonl") if "loss" in line]

    class Cut(Exception):
        pass

    def cut(line: dict[str, Any]) -> None:
        if line["step"] == 7:
            raise Cut

    for out, show in ((tmp_path / "whole", lambda _: None), (tmp_path / "cut", cut)):
        run = loop.Run(kind, place / "target.gguf", place / "data", out, SETTINGS, own(kind, **changes))
        try:
            loop.train(run, lambda _: None, show)
        except Cut:
            loop.train(run, lambda _: None, lambda _: None)
    assert len(curve(tmp_path / "cut")) == 12
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_an_answer_costs_nothing(place: Path, kind: str) -> None:
    model, samples = made(place, kind)
    batch = model.batch(samples[:2], 8, torch.float32)  # the prompts alone
    parts = model.loss(batch)
    parts.loss.backward()
    assert (float(parts.loss.detach()), parts.n_rows, parts.rows) == (0.0, 0, [])
    assert len(model.rollout(batch, 3).starts) == 0


# -- DSpark's heads ----------------------------------------------------------------------------------------------------


def test_the_confidence_learns_whether_a_draft_is_kept(
    place: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    """Its loss against the reference's confidences, over the rows whose block is right so far."""
    model, samples = made(place, "dspark", trained["dspark"])
    without, _ = made(place, "dspark", confidence=0.0)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("sure")})
    batch = model.batch(samples, 2048, torch.float32)
    found = model.loss(batch).loss - without.loss(batch).loss
    plain = reference(model, tmp_path / "c")
    blocks, wanted = model._drawn(batch), 0.0
    for anchor, size in zip(blocks.anchors, np.bincount(blocks.block)):
        which = int(np.searchsorted(batch.starts, anchor, "right")) - 1
        sample, at = samples[which], int(anchor - batch.starts[which])
        n = min(int(size), len(sample.tokens) - at - 1)
        before, told = sample.tokens[at : at + n], sample.tokens[at + 1 : at + 1 + n]
        states = plain.states(sample.tokens, sample.taps.astype(np.float64), at, int(size))[:n]
        sure, said = plain.confidence(states, before), plain.ids[plain.logits(states, before).argmax(1)]
        for j in range(n):
            wanted -= np.log(sure[j] if said[j] == told[j] else 1 - sure[j])
            if said[j] != told[j]:
                break
    assert float(found.detach()) == pytest.approx(wanted, rel=1e-3)


def test_nothing_but_the_confidence_head_learns_from_confidence(place: Path) -> None:
    model, _ = made(place, "dspark")
    states = torch.randn(6, 64, requires_grad=True)
    lost = model.also(states, torch.arange(6), torch.tensor([1, 1, 0, 1, 0, 1]).bool(), np.array([0, 1, 2, 0, 1, 2]),
                      np.array([0, 0, 0, 1, 1, 1]))  # fmt: skip
    lost.backward()
    assert states.grad is None
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"sure", "sure_bias"}


def test_rows_count_as_long_as_their_block_is_right() -> None:
    right = np.array([1, 0, 1, 1, 1, 1, 0, 1, 1, 1], bool)
    depth = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
    assert right_so_far(right, depth, np.array([0] * 4 + [1] * 4 + [2] * 2)).tolist() == [0, 1, 4, 5, 6, 8, 9]


def test_dpace_weighs_by_what_may_be_kept() -> None:
    """Worked by hand: smoothed confidences .75, .6 in the first block, 1 in the second."""
    found = dpace(torch.tensor([0.5, 0.2, 1.0]), torch.tensor([0, 1, 0]), torch.tensor([3, 3, 5]), 0.5)
    torch.testing.assert_close(found, torch.tensor([0.75 + 0.45, 0.45, 1.0]))


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_speculators_package_loads_a_checkpoint(
    place: Path, trained: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    speculators = pytest.importorskip("speculators", reason="vLLM's speculators is not installed: pip install speculators")
    verifier = hugging_face_target(tmp_path / "target", TargetWeights(place / "target.gguf"))
    model, samples = made(place, kind, trained[kind], window=16, full_layers="1", verifier=str(verifier))
    plain = reference(model, tmp_path / "draft")
    config = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path / "draft"))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "draft"), config=config).float().eval()
    ours = checkpoint.load_weights(tmp_path / "draft")
    state = theirs.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(state[name].to(tensor.dtype), tensor), name
    assert set(state) <= set(ours) | {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    read = theirs.config
    assert (read.block_size, read.mask_token_id, read.aux_hidden_state_layer_ids) == (4, model.mask_token, [0, 1, 2])
    assert (theirs.sliding_window, theirs.sliding_window_indices) == (16, [0])
    # and it computes what ours does, by its own forward pass
    theirs.embed_tokens.weight.data.copy_(model.embedding)  # ours is rounded to bf16
    sample = samples[1]
    n = len(sample.tokens)
    taps, mask = torch.from_numpy(sample.taps.reshape(1, n, -1)), torch.from_numpy(sample.mask[None].astype(np.int64))
    with torch.no_grad():
        torch.manual_seed(0)
        hidden, logits, _, _, places = theirs._backbone_forward(
            taps, torch.from_numpy(sample.tokens[None].astype(np.int64)), mask,
            torch.zeros(1, n, 64), torch.zeros(1, n, dtype=torch.int64), max_anchors=6,
        )  # fmt: skip
    anchors = places.view(6, 4)[:, 0].tolist()
    assert len(set(anchors)) == 6
    for i, anchor in enumerate(anchors):
        if anchor <= 16:  # that package's window reaches back from the anchor, llama.cpp's and ours from each row
            wanted = plain.states(sample.tokens, sample.taps.astype(np.float64), anchor, 4)
            wanted = wanted[: 1 if anchor > 12 else 4]
            rows = slice(4 * i, 4 * i + len(wanted))
            np.testing.assert_allclose(hidden[0, rows].numpy(), wanted, atol=2e-4)
            np.testing.assert_allclose(logits[0, rows].numpy(), wanted @ plain.w["lm_head.weight"].T, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_started_from(place: Path, trained: dict[str, Path], kind: str) -> None:
    model, _ = made(place, kind, trained[kind])
    again = checkpoint.load_weights(trained[kind])
    for name, tensor in model.tensors().items():
        torch.testing.assert_close(tensor, again[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(TrainError, match=r"lacks layers\.2\.input_layernorm\.weight"):
        made(place, kind, trained[kind], layers=3)


# -- its settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block": 1}, "--block 1: .* at least 2"),
        ({"window": 4}, "--window 4: more than a block's 4 rows"),
        ({"full_layers": "0,2"}, "--full-layers 0,2: the layers are 0 to 1"),
        ({"full_layers": "all"}, "--full-layers all: numbers of layers"),
        ({"mask_token": 320}, "--mask-token 320: the target has 320 tokens"),
    ],
)  # fmt: skip
def test_settings_that_can_t_be(place: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainError, match=said):
        models.find("dflash").shape_of(own("dflash", **changes), TargetWeights(place / "target.gguf"), (0, 1))


def test_ranges_and_names() -> None:
    with pytest.raises(TrainError, match="--weights dspace: give one of decay, dpace, even"):
        check(own("dflash", weights="dspace"))
    with pytest.raises(TrainError, match=r"--anchors 1\.5: at most 1"):
        check(own("dspark", anchors=1.5))
    assert {"dflash", "dspark", "eagle3"} <= set(models.names())
    assert kinds.title("dflash").startswith("DFlash (Chen, Liang and Liu, arXiv 2602.06036)")


def test_taps_may_be_any_number(place: Path) -> None:
    target = TargetWeights(place / "target.gguf")
    kind = models.find("dflash")
    assert kind.shape_of(own("dflash"), target, (2,)).taps == (2,)
    with pytest.raises(TrainError, match="reads the target's taps, the data has none"):
        kind.shape_of(own("dflash"), target, ())
    shape = kind.shape_of(own("dflash", window=64, full_layers="0"), target, (0, 1))
    assert (shape.window, shape.extra["attention.sliding_window_pattern"]) == (64, [0, 1])
    assert kind.shape_of(own("dflash", window=64, full_layers="0,1"), target, (0, 1)).window == 0
    assert json.loads(shape.to_json())["extra"]["block_size"] == 4
