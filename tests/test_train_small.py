"""The small model: made of its target's parts it is its target, it learns, it resumes, and it drafts as it would decode."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from localspec.convert.rope_rows import pairs_from_halves  # noqa: E402
from localspec.data.shards import Sample, Shards  # noqa: E402
from localspec.errors import TrainError  # noqa: E402
from localspec.gguf_file import GGUFFile  # noqa: E402
from localspec.speculator import SpeculatorConfig  # noqa: E402
from localspec.train import checkpoint, loop, metrics, models, vocab  # noqa: E402
from localspec.train.llama_parts import halves_from_pairs  # noqa: E402
from localspec.train.losses import head_loss  # noqa: E402
from localspec.train.settings import TrainSettings  # noqa: E402
from localspec.train.target_weights import TargetWeights  # noqa: E402
from tests import gguf_maker, train_data  # noqa: E402
from tests.test_convert_llama import logits, tiny_qwen2  # noqa: E402
from tests.test_train_cli import call  # noqa: E402
from tests.training import go, losses, place_for  # noqa: E402

SMALL = models.find("small")
SETTINGS = TrainSettings(
    steps=12, batch_tokens=256, held_out=0.2, lr=0.004, eval_every=6, save_every=4, warmup=2, threads=1, dtype="fp32"
)
OWN = SMALL.Settings(layers="1", depth=3, frequent=32, sampled=64)
TOKENS = [100, 7, 260, 33, 101, 102, 5, 99, 140, 12, 300, 8]


def tied(path: Path) -> Path:
    """A llama whose embedding is its head."""
    plain = GGUFFile.open(gguf_maker.tiny_llama(path.with_name("untied.gguf"), seed=3))
    tensors = {
        name: np.frombuffer(plain.tensor_bytes(name), np.float32).reshape(info.shape[::-1])
        for name, info in plain.tensors.items() if name != "output.weight"
    }  # fmt: skip
    tensors["token_embd.weight"] = tensors["token_embd.weight"] * np.float32(0.25)
    return gguf_maker.write(path, "llama", dict(plain.metadata), tensors)


TARGETS = {"llama": lambda p: gguf_maker.tiny_llama(p, n_layer=3), "tied": tied, "qwen2": tiny_qwen2,
           "q8_0": lambda p: gguf_maker.tiny_llama(p, ftype="q8_0"), "gemma3": gguf_maker.tiny_gemma3}  # fmt: skip


def made(target: Path, settings: Any = OWN, seed: int = 0) -> Any:
    weights = TargetWeights(target)
    counts = np.ones(weights.identity.n_vocab)
    return SMALL.new(settings, weights, models.DataFacts((), np.ones(0, np.float32), counts), seed)


def batch_of(model: Any, *texts: list[int], first: int = 2) -> Any:
    """A batch of texts that the assistant said from `first` on; the teacher is sure of each token."""
    samples = []
    for text in texts:
        tokens = np.array(text, np.int32)
        mask = (np.arange(len(text)) >= first).astype(np.uint8)
        ids = np.stack([tokens[first:], (tokens[first:] + 1) % model.shape.target.n_vocab], 1)
        given = np.log(np.tile(np.array([0.9, 0.1], np.float32), (len(ids), 1)))
        none = np.zeros((len(text), 0, model.shape.n_embd), np.float32)
        rows = np.flatnonzero(mask) - 1
        samples.append(Sample(tokens, mask, none, rows, ids, given, np.zeros(len(ids), np.float32), "text"))
    return model.batch(samples, 2048, torch.float32)


def all_logits(model: Any, tokens: list[int]) -> np.ndarray:
    batch = batch_of(model, tokens)
    with torch.no_grad():
        x, _ = model._forward(model._low(torch.float32), batch, torch.arange(len(tokens)))
        out: np.ndarray = (model._norm(x, model._last_norm(), torch.float32) @ model.head.float().t()).numpy()
    return out


# -- where it begins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "q8_0"])
def test_made_of_all_layers_it_is_its_target(tmp_path: Path, kind: str) -> None:
    """Names, rows of q and k, biases and norms are all where they belong, or the logits of llama.cpp would be others."""
    target = TARGETS[kind](tmp_path / "target.gguf")
    n_layer = GGUFFile.open(target).n_layer
    model = made(target, replace(OWN, layers=str(n_layer)))
    assert model.shape.n_layer == n_layer
    assert (model.embedding is None) == (kind == "tied")
    assert bool(model.shape.extra) == (kind == "qwen2")
    wanted = logits(target, TOKENS)
    near = 0.1 if kind == "q8_0" else 0.01  # llama.cpp quantises what it multiplies with such weights
    np.testing.assert_allclose(all_logits(model, TOKENS), wanted, atol=near * wanted.std())
    assert f"small draft of {n_layer} layers (the target's 0" in model.remarks()[0]


def test_other_targets_layers_are_not_taken(tmp_path: Path) -> None:
    model = made(TARGETS["gemma3"](tmp_path / "target.gguf"))
    assert "a gemma3 model's layers compute something else" in model.remarks()[0]
    assert (model.shape.arch, model.shape.n_layer, model.shape.head_dim) == ("llama", 1, 16)
    parts = model.loss(batch_of(model, TOKENS, TOKENS[::-1]))
    parts.loss.backward()
    assert parts.losses[0] / parts.n_rows < 2 * np.log(320)  # not far worse than knowing nothing
    assert all(float(p.grad.norm()) > 0 for n, p in model.named_parameters() if p.requires_grad)
    assert model.head.grad is None
    assert torch.equal(model.head.float(), TargetWeights(tmp_path / "target.gguf").head().half().float())
    again, other = made(tmp_path / "target.gguf"), made(tmp_path / "target.gguf", seed=1)
    assert torch.equal(model.layers[0].q, again.layers[0].q)
    assert not torch.equal(model.layers[0].q, other.layers[0].q)


def test_a_llama_with_odd_layers_begins_at_random(tmp_path: Path) -> None:
    plain = GGUFFile.open(gguf_maker.tiny_llama(tmp_path / "plain.gguf"))
    tensors = {n: np.frombuffer(plain.tensor_bytes(n), np.float32).reshape(t.shape[::-1]) for n, t in plain.tensors.items()}
    odd = gguf_maker.write(tmp_path / "odd.gguf", "llama", dict(plain.metadata),
                           tensors | {"blk.0.attn_output.bias": np.ones(64, np.float32)})  # fmt: skip
    assert "its layers are no plain ones (blk.0.attn_output.bias)" in made(odd).remarks()[0]
    turned = gguf_maker.edit(tmp_path / "plain.gguf", tmp_path / "half.gguf", {"llama.rope.dimension_count": 8})
    assert "its rope turns only a part of each head" in made(turned).remarks()[0]
    long = gguf_maker.edit(tmp_path / "plain.gguf", tmp_path / "long.gguf", {"llama.rope.scaling.type": "linear"})
    assert "stretched for long texts" in made(long).remarks()[1]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", (0, 1)), ("1", (0,)), ("2", (0, 8)), ("3", (0, 4, 8)), ("9", tuple(range(9))), ("7,", (7,)), ("0,1,8", (0, 1, 8))],
)
def test_which_layers(tmp_path: Path, text: str, wanted: tuple[int, ...]) -> None:
    target = TargetWeights(gguf_maker.tiny_llama(tmp_path / "deep.gguf", n_layer=9))
    shape = SMALL.shape_of(replace(OWN, layers=text), target, (0, 1))
    layers = tuple(shape.provenance["target_layers"])
    assert (layers, shape.n_layer, shape.taps) == (wanted, len(layers), ())


@pytest.mark.parametrize("text", ["a", "0", "10", "0,9", "-1,2", "3,3", "2,1", ",", " ", "1.5"])
def test_layers_that_are_not_there(tmp_path: Path, text: str) -> None:
    target = TargetWeights(gguf_maker.tiny_llama(tmp_path / "deep.gguf", n_layer=9))
    with pytest.raises(TrainError, match=f"--layers {text}: "):
        SMALL.shape_of(replace(OWN, layers=text), target, ())


def test_rows_go_back_to_where_they_were() -> None:
    rows = torch.randn(24, 5)
    assert torch.equal(halves_from_pairs(torch.from_numpy(pairs_from_halves(rows.numpy(), 3)), 3), rows)
    bias = torch.randn(24)
    assert torch.equal(halves_from_pairs(torch.from_numpy(pairs_from_halves(bias.numpy(), 3)), 3), bias)


# -- its loss -------------------------------------------------------------------------------------------------------------


def full_loss(model: Any, batch: Any) -> torch.Tensor:
    """The same loss by PyTorch's own functions, over all tokens."""
    told = np.flatnonzero(batch.mask)
    told = told[~np.isin(told, batch.starts)]
    x, _ = model._forward(model._low(torch.float32), batch, torch.from_numpy(told - 1))
    log_q = torch.log_softmax(model._norm(x, model._last_norm(), torch.float32) @ model.head.float().t(), -1)
    guess = torch.from_numpy(batch.teacher_of[told])
    return -(batch.teacher_p[guess] * log_q.gather(1, batch.teacher_ids[guess])).sum()


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_the_gradient_is_that_of_the_full_softmax(tmp_path: Path, kind: str, train_head: bool) -> None:
    """Where the subset is everything, by its frequent tokens or by its sample."""
    target = TARGETS[kind](tmp_path / "target.gguf")
    for frequent, sampled in ((0, 1), (16, 10_000)):
        model = made(target, replace(OWN, frequent=frequent, sampled=sampled, train_head=train_head))
        batch = batch_of(model, TOKENS, TOKENS[::-1])
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        assert ("head" in names) == train_head
        wanted = full_loss(model, batch)
        grads = torch.autograd.grad(wanted, [model.get_parameter(n) for n in names])
        parts = model.loss(batch)
        parts.loss.backward()
        assert float(parts.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
        assert parts.n_rows == 20
        for name, grad in zip(names, grads):
            assert torch.allclose(model.get_parameter(name).grad, grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max())), name


def test_what_is_sampled_stands_for_the_rest(tmp_path: Path) -> None:
    """The sum of exponentials is right on average, and what the teacher names is always inside, without a correction."""
    model = made(TARGETS["llama"](tmp_path / "target.gguf"), replace(OWN, frequent=32, sampled=40))
    logit = torch.randn(320, generator=torch.Generator().manual_seed(0)) * 2
    sums = []
    for i in range(300):
        batch = batch_of(model, [*TOKENS, 100 + i % 200, i])
        ids, wanted = batch.teacher_ids, batch.tokens[2:]
        chosen, bias, place = model._chosen(batch, ids, wanted)
        assert len(chosen) == len(set(chosen.tolist())) < 320
        assert (place[chosen] == torch.arange(len(chosen))).all()
        for sure in (ids, wanted, model.frequent):
            assert (place[sure] >= 0).all()
            assert (bias[place[sure]] == 0).all()
        sums.append(float((logit[chosen] + bias).exp().sum()))
    total = float(logit.exp().sum())
    assert np.mean(sums) == pytest.approx(total, rel=4 * np.std(sums) / total / 300**0.5)
    assert np.std(sums) / total > 0.01
    again = model._chosen(batch, ids, wanted)[0]
    assert torch.equal(again, chosen)  # a function of the batch


def test_a_bias_is_added_to_the_logits() -> None:
    random = torch.Generator().manual_seed(0)
    h, head, bias = (torch.randn(*s, generator=random) for s in ((5, 8), (11, 8), (11,)))
    h.requires_grad_()
    ids, p, wanted = torch.tensor([[1, 2]] * 5), torch.tensor([[0.7, 0.2]] * 5), torch.zeros(5, dtype=torch.int64)
    got = torch.autograd.grad(head_loss(h, head, head, ids, p, wanted, bias=bias).loss, h)[0]
    log_q = torch.log_softmax(h @ head.t() + bias, -1)
    mass = 0.9 * torch.logsumexp(h @ head.t() + bias, -1).sum() - (p * (h @ head.t() + bias).gather(1, ids)).sum()
    assert torch.allclose(got, torch.autograd.grad(mass, h)[0], atol=1e-5)
    assert log_q.shape == (5, 11)


def test_its_settings_are_options(tmp_path: Path) -> None:
    code, text = call("small", "--help")
    assert code == 0
    for f in dataclasses.fields(SMALL.Settings):
        assert f"--{f.name.replace('_', '-')}" in text
    assert "A small language model with the target's tokenizer" in " ".join(call("--help")[1].split())
    target = gguf_maker.tiny_llama(tmp_path / "target.gguf")
    train_data.shards(tmp_path / "data", target, 4)
    places = "-m", str(target), "-o", str(tmp_path / "o"), "--data", str(tmp_path / "data")
    code, text = call("small", *places, "--layers", "7")
    assert (code, text) == (2, "--layers 7: the target has 2 layers; give a number from 1 to 2")


# -- it learns ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_for(tmp_path_factory, "small")


def make_run(place: Path, out: Path, own: Any = OWN, **changes: Any) -> loop.Run:
    return loop.Run("small", place / "target.gguf", place / "data", out, replace(SETTINGS, **changes), own)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    go(make_run(place, place / "trained", steps=80, eval_every=40, save_every=40))
    return place / "trained"


def test_it_learns_the_rule(trained: Path) -> None:
    curve = losses(trained)
    assert np.mean(curve[-10:]) < 0.5 * np.mean(curve[:10])
    found = [line["eval"] for line in metrics.read(trained / "metrics.jsonl") if "eval" in line]
    assert found[-1]["n_max"] == 3
    assert found[-1]["tokens_per_verify"] > 1.8
    config = SpeculatorConfig.load(trained / "best")
    assert (config.method, config.arch, config.depth, config.taps, config.n_layer) == ("small", "llama", 3, (), 1)
    assert config.provenance["target_layers"] == [0]


def test_a_run_goes_on_to_the_same_curve(place: Path, tmp_path: Path) -> None:
    go(make_run(place, tmp_path / "whole", dtype="bf16"))

    def interrupt(line: dict[str, Any]) -> None:
        if line["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(make_run(place, tmp_path / "cut", dtype="bf16"), lambda _: None, interrupt)
    _, said = go(make_run(place, tmp_path / "cut", dtype="bf16"))
    assert any("going on after step 4" in line for line in said)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    a, b = (checkpoint.load_weights(tmp_path / o / "last") for o in ("cut", "whole"))
    assert all(torch.equal(a[n], b[n]) for n in b)


def test_it_needs_no_states(tmp_path: Path, place: Path, trained: Path) -> None:
    """Data without any, and a start from another run's weights."""
    train_data.shards(tmp_path / "data", place / "target.gguf", states="none")
    run = replace(make_run(place, tmp_path / "out", steps=1, eval_every=1), data=tmp_path / "data")
    report, said = go(replace(run, start_from=trained / "best"))
    assert report.score > 1.8
    assert "the draft can say 100.0% and 100.0% of their tokens" in said
    with pytest.raises(TrainError, match=r"lacks model\.layers\.1\.input_layernorm\.weight"):
        go(replace(make_run(place, tmp_path / "two", replace(OWN, layers="2")), start_from=trained / "best"))


def test_a_trained_head_is_kept_and_begun_from(place: Path, tmp_path: Path) -> None:
    own = replace(OWN, train_head=True)
    go(make_run(place, tmp_path / "out", own, steps=2, eval_every=2))
    weights = checkpoint.load_weights(tmp_path / "out" / "last")
    before = TargetWeights(place / "target.gguf").head()
    assert weights["lm_head.weight"].dtype == torch.float32
    assert not torch.equal(weights["lm_head.weight"], before)
    model = made(place / "target.gguf", own)
    model.take(weights)
    assert torch.equal(model.head, weights["lm_head.weight"])


# -- it drafts as it would decode -----------------------------------------------------------------------------------------


def test_rolling_out_is_decoding_one_token_at_a_time(place: Path, trained: Path) -> None:
    model = made(place / "target.gguf")
    model.take(checkpoint.load_weights(trained / "best"))
    shards = Shards.open(place / "data")
    samples = [shards.sample(i) for i in range(5)]
    batch = model.batch(samples, 2048, torch.float32)
    found = model.rollout(batch, 3)
    assert len(found.starts) == int(batch.mask.sum())
    at = 0
    seen = set()
    for sample, start in zip(samples, batch.starts.tolist()):
        tokens = sample.tokens.tolist()
        for last in (np.flatnonzero(sample.mask) - 1).tolist():
            text, kept = tokens[: last + 1], 0
            while kept < 3 and last + 1 + kept < len(tokens):
                text.append(int(all_logits(model, text)[-1].argmax()))
                if text[-1] != tokens[last + 1 + kept]:
                    break
                kept += 1
            assert (found.starts[at] - start, found.accepted[at]) == (last, kept)
            seen.add(kept)
            at += 1
    assert seen == {0, 1, 2, 3}


def test_samples_that_are_cut_before_anything_counts(place: Path) -> None:
    model = made(place / "target.gguf")
    batch = model.batch([Shards.open(place / "data").sample(0)], 8, torch.float32)
    parts = model.loss(batch)
    parts.loss.backward()
    assert (float(parts.loss.detach()), parts.n_rows) == (0.0, 0)
    assert len(model.rollout(batch, 3).accepted) == 0
    whole = batch_of(model, TOKENS, TOKENS, first=0)  # the first token of a text can't be drafted
    assert model.loss(whole).n_rows == 2 * (len(TOKENS) - 1)


def test_counts_choose_what_is_frequent(place: Path) -> None:
    target = TargetWeights(place / "target.gguf")
    shards = Shards.open(place / "data")
    counts = vocab.expected_counts(shards, range(len(shards)), 320)
    model = SMALL.new(OWN, target, models.DataFacts((), np.ones(0, np.float32), counts), 0)
    assert set(model.frequent.tolist()) <= set(range(100, 140))


# -- what it writes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2"])
def test_transformers_loads_a_checkpoint(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    model = made(TARGETS[kind](tmp_path / "target.gguf"), replace(OWN, layers="2"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    checkpoint.save(tmp_path / "c", model, {}, None)
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.tie_word_embeddings == (kind == "tied")
    with torch.no_grad():
        found = theirs.float()(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(found, all_logits(model, TOKENS), atol=2e-4)
    assert SpeculatorConfig.load(tmp_path / "c").n_layer == 2
