"""MTP: a Gemma 4 assistant over its target's cache, from data to drafting, and a head in the target's own file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec import clusters, gemma4
from localspec.accept import Sampling
from localspec.blocks import FixedBlock
from localspec.clusters import ClusteredHead
from localspec.convert import mtp as export
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.draft import convert
from localspec.convert.parity import measure
from localspec.drafters import DrafterSettings, Sequence, load, taps
from localspec.engine import Engine, Request, Stats
from localspec.errors import ModelFileError, PairingError, TrainError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.mtp_context import MtpContext
from localspec.pairing import check_pair, own_heads
from localspec.target import SessionSettings, TargetSession
from localspec.train import checkpoint, loop
from localspec.train.gemma4_keys import KINDS, TargetKeys
from localspec.train.live import LiveSettings
from localspec.train.models import DataFacts
from localspec.train.models.mtp import Model as Assistant
from localspec.train.models.mtp import Settings
from localspec.train.settings import TrainSettings
from localspec.train.target_weights import TargetWeights
from tests import gguf_maker, mtp_maker, tiny_gemma4
from tests.tap_drafting import Asleep

TAPS = (2, 3, 7)
SAMPLED = Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=3)
GREEDY = Sampling(temperature=0)


@dataclass
class Target:
    """A pretrained tiny Gemma 4: its file, itself in PyTorch, and some of its texts."""

    path: Path
    torch: tiny_gemma4.TinyGemma4
    texts: list[list[int]]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("gemma4") / "target.gguf"
    model, _ = tiny_gemma4.make(path)
    with Model(path) as written:
        said = [written.tokenizer.encode(tiny_gemma4.as_text(*pair)) for pair in tiny_gemma4.documentation(2000)]
    return Target(path, model, said)


@pytest.fixture(scope="session")
def random_draft(target: Target) -> Path:
    return mtp_maker.random_assistant(target.path.parent / "random.gguf", target.path)


@pytest.fixture(scope="session")
def untrained(target: Target) -> Path:
    """A checkpoint with fresh weights, as the trainer writes it."""
    folder = target.path.parent / "untrained"
    facts = DataFacts(TAPS, np.ones(0, np.float32), np.ones(0))
    model = Assistant.new(Settings(), TargetWeights(target.path), facts, 0)
    with torch.no_grad():  # so that no tensor could be mistaken for another, or left out unseen
        for p in model.parameters():
            if p.ndim == 1:
                p.mul_(1 + 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    checkpoint.save(folder, model, {}, None)
    return folder


def write(
    model: Model, draft: Path | None, k: int, prompts: list[list[int]], sampling: Sampling = GREEDY, n: int = 50
) -> tuple[list[list[int]], Stats]:
    """All texts, each in a slot of its own; k 0: without a draft."""
    settings = DrafterSettings(draft)
    shape = SessionSettings(256, len(prompts), n_threads=1, taps=taps("mtp", model.gguf, settings))
    total, done = Stats(), {}
    with TargetSession(model, shape) as session:
        drafter = load("mtp", session, settings) if k else None
        engine = Engine(session, drafter, FixedBlock(k))
        for i, prompt in enumerate(prompts):
            engine.start(Request(prompt, sampling, n, key=i))
        while len(done) < len(prompts):
            for step in engine.step():
                if step.stop is not None:
                    done[step.slot] = engine.tokens(step.slot)
                    total.add(engine.finish(step.slot))
        if drafter is not None:
            drafter.close()
    return [done[i] for i in range(len(prompts))], total


# -- the target -----------------------------------------------------------------------------------------------------------


def test_the_tiny_target_is_what_llama_cpp_computes_taps_included(target: Target) -> None:
    text = target.texts[0][:120]
    with Model(target.path) as model, TargetSession(model, SessionSettings(256, 1, n_threads=1, taps=TAPS)) as session:
        rows = session.decode([(0, text)])
        assert rows.taps is not None
        decoded, tapped = rows.logits.copy(), rows.taps.copy()  # views, valid until the next call
        read = [np.empty((0, 3, 64), np.float32)]
        session.rollback(0, 0)
        session.prefill(0, text, tapped=lambda _first, piece: read.append(piece.copy()))
        with torch.no_grad():
            logits, states, inputs = target.torch(torch.tensor([text]))
        for got, want in ((decoded, logits), (tapped[:, 0], inputs[2]), (tapped[:, 2], states)):
            np.testing.assert_allclose(got, want[0].numpy(), rtol=0, atol=0.02 * float(want.abs().max()))
        # a prompt's rows have no logits, but all states
        np.testing.assert_allclose(np.concatenate(read), tapped, rtol=0, atol=0.01 * float(np.abs(tapped).max()))


def test_the_state_of_heads_is_read_in_the_order_of_the_batch(target: Target) -> None:
    a, b, c = (text[: 5 + 3 * i] for i, text in enumerate(target.texts[:3]))
    with Model(target.path) as model, TargetSession(model, SessionSettings(256, 3, n_threads=1, taps=(7,))) as session:
        together = session.decode([(0, a), (1, b), (2, c)]).taps
        assert together is not None
        at = 0
        for text in (a, b, c):
            with torch.no_grad():
                want = target.torch(torch.tensor([text]))[1][0].numpy()
            np.testing.assert_allclose(together[at : at + len(text), 0], want, rtol=0, atol=0.02 * np.abs(want).max())
            at += len(text)


def test_a_tap_of_heads_is_refused_where_the_graph_has_none(tmp_path: Path) -> None:
    path = gguf_maker.tiny_llama(tmp_path / "llama.gguf")
    with Model(path) as model, pytest.raises(UsageError, match="has taps 0"):
        TargetSession(model, SessionSettings(64, taps=(3,)))


def test_keys_and_values_come_out_of_taps_as_the_target_computes_them(target: Target) -> None:
    text = torch.tensor([target.texts[1][:80]])
    keys, at = TargetKeys(TargetWeights(target.path)), torch.arange(text.shape[1])
    with torch.no_grad():
        inputs = target.torch(text)[2]
        for kind, layer in zip(KINDS, (2, 3)):
            normed = tiny_gemma4.norm(inputs[layer], target.torch.w(f"blk.{layer}.attn_norm"))
            want = target.torch._keys(layer, normed)
            for got, theirs in zip(keys(kind, inputs[layer][0], at), want):
                torch.testing.assert_close(got, theirs[0], rtol=1e-4, atol=1e-4)


# -- drafting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_and_without(target: Target, random_draft: Path, sampling: Sampling) -> None:
    prompts = [text[: 4 + 20 * i] for i, text in enumerate(target.texts[:3])]
    prompts.append(target.texts[0][:1])  # no row to begin from
    with Model(target.path) as model:
        plain, _ = write(model, random_draft, 0, prompts, sampling, 80)
        drafted, stats = write(model, random_draft, 3, prompts, sampling, 80)
    assert drafted == plain
    assert stats.n_drafted > 100


def test_what_is_drafted_is_what_the_checkpoint_drafts(target: Target, untrained: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    convert(untrained, target.path, draft, "f32")
    found = measure(untrained, draft, target.path)
    assert found.n_chains > 300
    assert found.error < 0.005
    assert found.same > 0.99
    assert found.real == pytest.approx(found.simulated, abs=0.005)


@pytest.mark.parametrize("sleeps", [False, True], ids=["always read", "asleep for a while"])
@pytest.mark.parametrize("own_file", [False, True], ids=["assistant", "head in the target"])
def test_a_drafter_that_followed_a_text_drafts_like_one_that_just_read_it(
    target: Target, random_draft: Path, own_file: bool, sleeps: bool, tmp_path: Path
) -> None:
    path = mtp_maker.tiny_glm4moe(tmp_path / "glm.gguf") if own_file else target.path
    settings = DrafterSettings(None if own_file else random_draft)
    with Model(path, with_heads=own_file) as model:
        shape = SessionSettings(128, 1, n_threads=1, taps=taps("mtp", model.gguf, settings))
        said = []
        prompt = list(range(10, 30))
        for fresh in (False, True):
            with TargetSession(model, shape) as session:
                drafter = load("mtp", session, settings)
                engine = Engine(session, drafter, Asleep(10, 1) if sleeps else FixedBlock(3))
                slot = engine.start(Request(list(prompt), GREEDY, None if fresh else 25))
                while not fresh and engine.step()[0].stop is None:
                    pass
                seq = Sequence(slot, 0, GREEDY, engine.tokens(slot))
                said.append(drafter.propose([seq], [5])[0].tokens.tolist())
                drafter.rewind(seq, 10)
                assert not len(drafter.propose([seq], [5])[0].tokens)  # its state is gone
                prompt = list(seq.tokens)
                drafter.close()
    assert said[0] == said[1]
    assert len(said[0]) == 5


def test_a_draft_stops_where_it_is_not_sure(target: Target, random_draft: Path) -> None:
    with Model(target.path) as model:
        settings = DrafterSettings(random_draft, p_min=1.0)
        shape = SessionSettings(128, 1, n_threads=1, taps=taps("mtp", model.gguf, settings))
        with TargetSession(model, shape) as session:
            drafter = load("mtp", session, settings)
            engine = Engine(session, drafter, FixedBlock(3))
            engine.start(Request(target.texts[0][:20], GREEDY, 20))
            assert not len(drafter.propose([Sequence(0, 0, GREEDY, engine.tokens(0))], [5])[0].tokens)
            drafter.close()


# -- the whole path -------------------------------------------------------------------------------------------------------


def test_from_data_to_drafting(cli: Callable[..., Any], target: Target, tmp_path: Path) -> None:
    asked = [pair[0] for pair in tiny_gemma4.documentation(2000)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": before + a}) + "\n" for a in asked for before in ("", "Say more. ")))
    files = ["-m", target.path, "-t", 1]
    made = cli("data", *files, "-o", "data", "-f", prompts, "--taps", "2,3,7", "--states", "q8", "--answers", 6,
               "--temp", 0.5, "--max-tokens", 80, "-np", 8, "-c", 256, "--teacher-k", 16)  # fmt: skip
    assert made.rc == 0, made.stderr
    run = cli("train", "mtp", "-m", target.path, "--data", "data", "-o", "run", "--steps", 80, "--batch-tokens", 512,
              "--threads", 1, "--held-out", 0.2, "--dtype", "fp32", "--lr", 0.02)  # fmt: skip
    assert run.rc == 0, run.stderr
    assert "does not exist" not in run.stderr
    done = cli("convert", "run/best", "-m", target.path, "-o", "draft.gguf", "--quant", "f16", "--data", "data")
    assert done.rc == 0, done.stderr
    assert "parity" in done.stderr + done.stdout
    seen = cli("inspect", target.path, "draft.gguf")
    assert seen.rc == 0, seen.stderr
    assert re.search(r"drafter\s+ngram,mtp,", seen.stdout)
    assert "draft-mtp" in seen.stdout
    draft = tmp_path / "draft.gguf"
    with Model(target.path) as model:
        prompts_now = [text[:15] for text in target.texts[:4]]
        plain, _ = write(model, draft, 0, prompts_now)
        drafted, stats = write(model, draft, 3, prompts_now)
    assert drafted == plain
    assert stats.acceptance is not None
    assert stats.acceptance_by_position[0] > 0.3  # chance: less than 0.03, which is how often its favourite token comes
    assert stats.tokens_per_verify > 1.25


def test_an_assistant_trains_beside_its_target(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    asked = [pair[0] for pair in tiny_gemma4.documentation(2000)]
    prompts.write_text("".join(json.dumps({"prompt": before + a}) + "\n" for a in asked for before in ("", "Say more. ")))
    beside = LiveSettings((prompts,), max_tokens=32, parallel=4, n_threads=1, kernels="stock", n_ctx=256, first=400)
    how = TrainSettings(steps=3, batch_tokens=256, held_out=0.3, eval_every=3, save_every=3, threads=1, dtype="fp32")
    run = loop.Run("mtp", target.path, None, tmp_path / "out", how, Settings(ttt=2), live=beside)
    loop.train(run, lambda _: None, lambda _: None)
    saved = Checkpoint.open(tmp_path / "out" / "last").config(GGUFFile.open(target.path))
    assert saved.taps == TAPS


# -- files of others ------------------------------------------------------------------------------------------------------


def google(untrained: Path, folder: Path, change: dict[str, Any] | None = None, drop: str = "") -> Path:
    """The checkpoint as Google lays its own out: no localspec.json, a scalar, a clustered head beside."""
    tensors = load_file(untrained / "model.safetensors")
    for name in [name for name in tensors if name.endswith("layer_scalar")]:
        tensors[name] = tensors[name].reshape(())
    tensors["masked_embedding.centroids.weight"] = torch.randn(8, 32)
    tensors["masked_embedding.token_ordering"] = torch.randperm(384, generator=torch.Generator().manual_seed(2))
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items() if name != drop}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((untrained / "config.json").read_text())
    config["centroid_intermediate_top_k"] = 2
    config["text_config"] |= change or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_googles_layout_is_read(target: Target, untrained: Path, tmp_path: Path) -> None:
    folder, draft = google(untrained, tmp_path / "google"), tmp_path / "draft.gguf"
    made = convert(folder, target.path, draft, "f32")
    assert made.config.method == "mtp"
    assert made.config.taps == TAPS
    file = GGUFFile.open(draft)
    assert file.architecture == "gemma4-assistant"
    assert file.tensors["nextn.pre_projection.weight"].shape == (128, 32)
    check_pair(GGUFFile.open(target.path), file)
    assert measure(folder, draft, target.path).error < 0.005


@pytest.mark.parametrize(
    ("change", "drop", "told"),
    [
        ({"backbone_hidden_size": 96}, "", "was made for a hidden size of 96, the target has 64"),
        ({"num_key_value_heads": 4}, "", "reads 4 heads of 16 elements in its windowed layers"),
        ({"global_head_dim": 64}, "", "reads 1 heads of 64 elements in its full layers"),
        ({"layer_types": ["linear"]}, "", "does not list its layers' kinds"),
        ({"intermediate_size": None}, "", "says no intermediate_size"),
        ({"intermediate_size": 512}, "", "has layers.0.mlp.gate_proj.weight of the shape"),
        ({}, "post_projection.weight", "lacks the tensor post_projection.weight"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(
    target: Target, untrained: Path, tmp_path: Path, change: dict[str, Any], drop: str, told: str
) -> None:
    folder = google(untrained, tmp_path / "google", change, drop)
    with pytest.raises(ModelFileError, match=re.escape(told)):
        convert(folder, target.path, tmp_path / "draft.gguf", "f32")
    assert not (tmp_path / "draft.gguf").exists()


def test_a_checkpoint_for_another_architecture_is_refused(untrained: Path, tmp_path: Path) -> None:
    other = gguf_maker.tiny_gemma3(tmp_path / "gemma3.gguf")
    folder = google(untrained, tmp_path / "google")
    with pytest.raises(ModelFileError, match="is a gemma3 model"):
        export.foreign_config(Checkpoint.open(folder), GGUFFile.open(other))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"embedding_length_out": 96}, "it was made for a hidden size of 96, the target has 64"),
        ({"attention.head_count_kv": [2, 2, 4, 1]}, "its windowed layer 2 reads 4 heads of 16/16 elements"),
        ({"attention.key_length": 16, "rope.dimension_count": 16}, "its full layer 3 reads 1 heads of 16/32 elements"),
        ({"nextn_predict_layers": 2}, "does not count its 4 layers as next-token layers"),
        ({"attention.sliding_window_pattern": [False] * 4, "attention.sliding_window": 0}, "it has no windowed layer"),
    ],
)
def test_an_assistant_that_would_read_past_the_cache_is_refused(
    target: Target, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    draft = mtp_maker.random_assistant(tmp_path / "draft.gguf", target.path, change=change)
    with pytest.raises(PairingError, match=re.escape(told)):
        taps("mtp", GGUFFile.open(target.path), DrafterSettings(draft))


def test_a_target_whose_last_layers_are_of_other_kinds_is_refused(tmp_path: Path, random_draft: Path) -> None:
    shape = tiny_gemma4.Shape(windowed=(True, True, True, False, True, True), n_shared=0)
    keys = gguf_maker.copied_tokenizer(random_draft)
    path = tiny_gemma4.TinyGemma4(shape, len(keys["tokenizer.ggml.tokens"])).write(tmp_path / "odd.gguf", keys)
    with pytest.raises(PairingError, match="has a windowed and a windowed layer where an MTP assistant expects"):
        gemma4.layers_read(GGUFFile.open(path))
    with pytest.raises(PairingError, match="the target has a windowed and a windowed layer"):
        taps("mtp", GGUFFile.open(path), DrafterSettings(random_draft))


def test_data_with_other_taps_says_which_are_wanted(target: Target) -> None:
    weights = TargetWeights(target.path)
    with pytest.raises(TrainError, match="make it with --taps 2,3,7"):
        Assistant.shape_of(Settings(), weights, (1, 2, 3))
    with pytest.raises(TrainError, match="must be narrower than its target"):
        Assistant.shape_of(Settings(width=64), weights, TAPS)
    with pytest.raises(TrainError, match="--heads 3: they share 2 heads of keys"):
        Assistant.shape_of(Settings(heads=3), weights, TAPS)


# -- the clustered head --------------------------------------------------------------------------------------------------


def test_a_clustered_head_gives_the_whole_heads_logits_of_its_best_clusters(
    target: Target, untrained: Path, tmp_path: Path
) -> None:
    folder, path = google(untrained, tmp_path / "google"), tmp_path / "draft.gguf"
    convert(folder, target.path, path, "q8_0")
    file, source = GGUFFile.open(path, "draft"), load_file(folder / "model.safetensors")
    assert ClusteredHead.of(file) is None  # so small a vocabulary is read as quickly
    head = ClusteredHead.of(file, worth=0)
    assert head is not None
    slots, at, token = (np.array([i], np.int32) for i in (0, 20, target.texts[0][20]))
    with (
        Model(target.path) as model,
        Model(path, "draft") as draft,
        TargetSession(model, SessionSettings(64, n_threads=1, taps=(7,))) as session,
    ):
        read = session.decode([(0, target.texts[0][:20])]).taps
        assert read is not None
        state, found = read[-1:, 0].copy(), []
        for use in (None, head):
            context = MtpContext(draft.handle, draft.n_vocab, session, n_threads=1, head=use)
            logits, following = context.step(slots, at, token, state)
            found.append((logits.copy(), following))
            normed = context._pieces
            context.close()
    (whole, its_state), (some, my_state) = found
    np.testing.assert_allclose(my_state, its_state, atol=1e-2 * np.abs(its_state).max())
    scores = source["masked_embedding.centroids.weight"].float().numpy() @ normed[0][0]
    best = np.argsort(scores)[-2:]
    ids = source["masked_embedding.token_ordering"].numpy().reshape(8, 48)[best].reshape(-1)
    assert set(np.flatnonzero(np.isfinite(some[0])).tolist()) == set(ids.tolist())
    np.testing.assert_allclose(some[0, ids], whole[0, ids], atol=1e-2 * np.abs(whole).max())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_a_clustered_head(
    target: Target, untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    path = tmp_path / "draft.gguf"
    convert(google(untrained, tmp_path / "google"), target.path, path, "f16")
    monkeypatch.setattr(clusters, "WORTH", 0)
    asked: list[int] = []
    give = ClusteredHead.logits
    monkeypatch.setattr(ClusteredHead, "logits", lambda self, states: (asked.append(len(states)), give(self, states))[1])
    prompts = [text[: 4 + 20 * i] for i, text in enumerate(target.texts[:3])]
    with Model(target.path) as model:
        plain, _ = write(model, path, 0, prompts, sampling, 40)
        drafted, stats = write(model, path, 3, prompts, sampling, 40)
    assert drafted == plain
    assert sum(asked) >= stats.n_drafted > 50


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"centroid_intermediate_top_k": 9}, "says a centroid_intermediate_top_k of 9 for 8 clusters"),
        ({"masked_embedding.centroids.weight": torch.zeros(7, 32)}, "which its vocabulary can't be cut by"),
        ({"masked_embedding.token_ordering": torch.zeros(384, dtype=torch.int64)}, "does not name each of its 384 tokens"),
    ],
)
def test_clusters_that_cannot_be_are_refused(
    target: Target, untrained: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    folder = google(untrained, tmp_path / "google")
    for name, value in change.items():
        if isinstance(value, torch.Tensor):
            save_file(load_file(folder / "model.safetensors") | {name: value}, folder / "model.safetensors")
        else:
            config = json.loads((folder / "config.json").read_text()) | {name: value}
            (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=re.escape(told)):
        convert(folder, target.path, tmp_path / "draft.gguf", "f32")


def test_damaged_clusters_are_refused(target: Target, tmp_path: Path) -> None:
    change = {"top": 2, "centroids": np.zeros(5 * 32, np.float32), "ordering": np.arange(384, dtype=np.int32)}
    draft = mtp_maker.random_assistant(tmp_path / "odd.gguf", target.path, clusters=change)
    with pytest.raises(ModelFileError, match="has clusters that don't fit its vocabulary"):
        ClusteredHead.of(GGUFFile.open(draft), worth=0)


# -- a head in the target's own file --------------------------------------------------------------------------------------


def test_a_head_in_the_targets_own_file_drafts(tmp_path: Path) -> None:
    path = mtp_maker.tiny_glm4moe(tmp_path / "glm.gguf")
    prompts = [list(range(10 + i, 30 + 3 * i)) for i in range(3)] + [[40]]
    with Model(path, with_heads=True) as model:
        assert taps("mtp", model.gguf, DrafterSettings()) == (3,)
        plain, _ = write(model, None, 0, prompts)
        drafted, stats = write(model, None, 3, prompts)
    assert drafted == plain
    assert stats.n_drafted > 100


def test_run_and_inspect_find_the_head_in_the_file(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = mtp_maker.tiny_glm4moe(tmp_path / "glm.gguf")
    seen = cli("inspect", path)
    assert seen.rc == 0, seen.stderr
    assert "by the next-token head in its own file" in seen.stdout
    done = [cli("run", "-m", path, "-p", "the cat", "-n", 20, "--temp", 0, "-t", 1, "--spec-type", kind, "--no-spec-adapt")
            for kind in ("auto", "none")]  # fmt: skip
    assert all(one.rc == 0 for one in done), done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert "mtp" in done[0].stderr


@pytest.mark.parametrize(
    ("arch", "n_heads", "told"),
    [
        ("qwen35", 2, "has 2 next-token heads, one for each drafted token"),
        ("glm4moe", 2, "has 2 next-token heads, one for each drafted token"),
        ("llama", 1, "which this llama.cpp has no graph for"),
    ],
)
def test_a_head_that_cannot_draft_is_named(tmp_path: Path, arch: str, n_heads: int, told: str) -> None:
    gguf = GGUFFile.open(mtp_maker.tiny_glm4moe(tmp_path / "heads.gguf", arch, n_heads))
    assert own_heads(gguf)[0] == 0
    with pytest.raises(PairingError, match=re.escape(told)):
        taps("mtp", gguf, DrafterSettings())


def test_mtp_without_a_head_is_refused(cli: Callable[..., Any], target: Target) -> None:
    done = cli("run", "-m", target.path, "-p", "x", "--spec-type", "mtp")
    assert done.rc == 2
    assert done.stderr.strip().splitlines()[-1].endswith("has no next-token head of its own")
