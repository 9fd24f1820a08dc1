"""Training end to end on a tiny target: it learns, it resumes, it stops, it shares its work, and its drafts are what
llama.cpp would run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localspec.train  # noqa: F401 (before torch: it sets how OpenMP waits)

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install localspec[train]")

from safetensors.torch import save_file  # noqa: E402

from localspec.data.shards import Shards  # noqa: E402
from localspec.errors import DataError, PairingError, TrainError  # noqa: E402
from localspec.speculator import SpeculatorConfig  # noqa: E402
from localspec.train import batches, checkpoint, evaluate, loop, metrics, models, optim, vocab  # noqa: E402
from localspec.train.settings import TrainSettings, check, from_dict  # noqa: E402
from localspec.train.target_weights import TargetWeights  # noqa: E402
from tests import train_data  # noqa: E402
from tests.eagle3_reference import Reference, decode_again  # noqa: E402
from tests.training import go, losses, place_for  # noqa: E402

ROOT = Path(__file__).parent.parent
EAGLE3 = models.find("eagle3")
SETTINGS = TrainSettings(
    steps=16, batch_tokens=256, held_out=0.2, lr=0.004, eval_every=8, save_every=4, warmup=2, threads=1, dtype="fp32"
)
OWN = EAGLE3.Settings(ttt=3, draft_vocab=64, n_ff=48, window=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_for(tmp_path_factory, "train")


def make_run(place: Path, out: Path, own: Any = OWN, **changes: Any) -> loop.Run:
    return loop.Run("eagle3", place / "target.gguf", place / "data", out, replace(SETTINGS, **changes), own)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A run of 120 steps."""
    out = place / "trained"
    go(make_run(place, out, steps=120, eval_every=60, save_every=60, dtype="auto"))
    return out


# -- it learns ------------------------------------------------------------------------------------------------------------


def test_a_tiny_head_learns_the_rule(trained: Path) -> None:
    curve = losses(trained)
    assert len(curve) == 120
    assert np.mean(curve[-10:]) < 0.5 * np.mean(curve[:10])
    found = [line["eval"] for line in metrics.read(trained / "metrics.jsonl") if "eval" in line]
    assert [f["n_max"] for f in found] == [3, 3]
    # a draft that knew nothing would be right once in 40 tokens
    assert found[-1]["tokens_per_verify"] > 1.8
    assert set(found[-1]["by_source"]) == {"letters", "numbers"}
    assert found[-1]["by_n_max"]["1"] < found[-1]["by_n_max"]["3"] == found[-1]["tokens_per_verify"]
    assert all(s["by_n_max"]["3"] == s["tokens_per_verify"] for s in found[-1]["by_source"].values())
    best = max(f["tokens_per_verify"] for f in found)
    config = SpeculatorConfig.load(trained / "best")
    assert config.provenance["evaluation"]["tokens_per_verify"] == best
    assert (config.method, config.depth, config.draft_vocab, config.taps) == ("eagle3", 3, 64, (0, 1, 2))
    assert json.loads((trained / "run.json").read_text())["settings"]["lr"] == 0.004


# -- it is what run time does ---------------------------------------------------------------------------------------------


def taken(place: Path, out: Path, own: Any) -> tuple[Any, list[Any]]:
    """A model with the weights of a checkpoint, in fp32, and some samples."""
    target = TargetWeights(place / "target.gguf")
    shards = Shards.open(place / "data", target.identity)
    everything = list(range(len(shards)))
    counts = vocab.expected_counts(shards, batches.split(shards, SETTINGS.held_out)[0], target.identity.n_vocab)
    facts = models.DataFacts(train_data.TAPS, loop.tap_rms(shards, everything), counts)
    model = EAGLE3.new(own, target, facts, 0)
    model.take(checkpoint.load_weights(out))
    model.embedding = model.embedding.float()
    return model, [shards.sample(i) for i in everything[:6]]


@pytest.mark.parametrize("window", [0, 6])
def test_rolling_out_is_decoding_one_token_at_a_time(place: Path, trained: Path, tmp_path: Path, window: int) -> None:
    model, samples = taken(place, trained / "best", replace(OWN, window=window))
    checkpoint.save(tmp_path / "c", model, {}, None)
    reference = Reference(tmp_path / "c", model.embedding.numpy())
    batch = model.batch(samples, 2048, torch.float32)
    walks = evaluate.walks(batch, model.rollout(batch, 3), 3)
    assert sum(w.tokens for _, w in walks) / sum(w.verifies for _, w in walks) > 1.5
    for sample, (_, found) in zip(samples, walks):
        assert decode_again(reference, sample.tokens, sample.mask, sample.taps, 3) == (found.verifies, found.tokens)


@pytest.mark.parametrize("window", [0, 5])
def test_the_training_time_test_is_each_chain_on_its_own(
    place: Path, trained: Path, tmp_path: Path, window: int
) -> None:
    """The loss of all chains at all steps, against the reference's logits along the text's own tokens."""
    own = replace(OWN, window=window, chains="all", step_decay=0.5)
    model, samples = taken(place, trained / "best", own)
    checkpoint.save(tmp_path / "c", model, {}, None)
    reference = Reference(tmp_path / "c", model.embedding.numpy())
    sample = samples[1]
    parts = model.loss(model.batch(samples[1:2], 2048, torch.float32))
    draft_of = {int(t): i for i, t in enumerate(reference.ids)}
    n = len(sample.tokens)
    row_of = {int(row) + 1: i for i, row in enumerate(sample.teacher_rows)}
    wanted = np.zeros(3)
    rows = np.zeros(3, int)
    for p in range(n - 2):
        if sample.mask[p + 2]:
            depth = min(3, n - 2 - p)
            forced = sample.tokens[p + 2 :]
            _, logits = reference.draft(int(sample.tokens[p + 1]), reference.fuse(sample.taps[p]), depth, forced)
            for step in range(depth):
                log_q = logits[step] - np.log(np.exp(logits[step] - logits[step].max()).sum()) - logits[step].max()
                i = row_of[p + 2 + step]
                for token, logit in zip(sample.teacher_ids[i], sample.teacher_logits[i] - sample.teacher_lse[i]):
                    if int(token) in draft_of:
                        wanted[step] -= np.exp(logit) * log_q[draft_of[int(token)]]
                rows[step] += 1
        reference.commit(int(sample.tokens[p + 1]), reference.fuse(sample.taps[p]))
    assert parts.rows == rows.tolist()
    np.testing.assert_allclose(parts.losses, wanted, rtol=1e-3)
    assert float(parts.loss.detach()) == pytest.approx(wanted @ [1, 0.5, 0.25], rel=1e-3)


def test_kept_chains_are_those_that_are_right_so_far(place: Path, trained: Path) -> None:
    every, samples = taken(place, trained / "best", replace(OWN, chains="all"))
    kept, _ = taken(place, trained / "best", OWN)
    a, b = (m.loss(m.batch(samples, 2048, torch.float32)) for m in (every, kept))
    assert (a.rows[0], a.right[0]) == (b.rows[0], b.right[0])
    assert a.losses[0] == pytest.approx(b.losses[0], rel=1e-5)
    ends = sum(int(s.mask.sum()) > 0 for s in samples)
    assert b.right[0] - ends <= b.rows[1] <= b.right[0] < a.rows[1]
    assert b.right[1] - ends <= b.rows[2] <= b.right[1]


def test_noise_is_a_function_of_the_batch(place: Path, trained: Path) -> None:
    plain, samples = taken(place, trained / "best", OWN)
    noisy, _ = taken(place, trained / "best", replace(OWN, noise=0.5))
    batch = plain.batch(samples, 2048, torch.float32)
    before = batch.taps.clone()
    found = [m.loss(batch).losses for m in (plain, noisy, noisy)]
    assert found[1] == found[2]
    assert found[0][0] < found[1][0]
    assert torch.equal(batch.taps, before)


def test_a_walk_counts_what_an_engine_would() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1], bool)
    # from 2: two right and the target's own token; from 5: none, one token; from 6: up to the end, no room for another
    found = evaluate.walk(mask, {2: 2, 5: 0, 6: 3, 9: 0}, 3)
    assert (found.verifies, found.tokens) == (4, 6)
    assert found.tried == [4, 1, 1]
    assert found.kept == [2, 1, 0]


# -- it goes on -----------------------------------------------------------------------------------------------------------


def command(place: Path, out: Path, *more: str) -> list[str]:
    flags = ["--steps", "16", "--batch-tokens", "256", "--held-out", "0.2", "--lr", "0.004", "--eval-every", "8"]
    flags += ["--save-every", "4", "--warmup", "2", "--threads", "1", "--dtype", "fp32"]
    flags += ["--ttt", "3", "--draft-vocab", "64", "--n-ff", "48", "--window", "0"]
    where = ["-m", str(place / "target.gguf"), "--data", str(place / "data"), "-o", str(out)]
    return ["-m", "localspec", "train", "eagle3", *where, *flags, *more]


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """Sixteen steps without a break."""
    go(make_run(place, place / "whole"))
    return place / "whole"


def test_a_killed_run_goes_on_to_the_same_curve(place: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    child = subprocess.Popen([sys.executable, *command(place, out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while child.poll() is None and time.monotonic() < deadline:
        if (out / "last" / "whole").exists() and len(losses(out)) >= 6:
            break
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = len(losses(out))
    assert 6 <= done < 16
    _, said = go(make_run(place, out))
    assert any("going on after step" in line for line in said)
    assert losses(out) == losses(whole)
    a, b = (checkpoint.load_weights(o / "last") for o in (out, whole))
    assert all(torch.equal(a[n], b[n]) for n in b)


def test_a_run_cut_between_two_checkpoints_drops_what_comes_again(place: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        loop.train(make_run(place, out), lambda _: None, interrupt_at(11))
    assert len(losses(out)) == 11
    (out / "last").rename(out / "last.old")  # killed between the two renames of a checkpoint
    _, said = go(make_run(place, out))
    assert any("going on after step 8" in line for line in said)
    assert losses(out) == losses(whole)


def test_a_checkpoint_that_could_not_be_written_leaves_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensors: Any, path: Path, _metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainError, match=r"best can't be written: .*No space left"):
        go(make_run(place, tmp_path / "out", steps=1))
    assert not list((tmp_path / "out").glob("*.new"))


def test_a_run_that_another_process_writes_is_left_alone(place: Path, tmp_path: Path) -> None:
    def meanwhile(_line: dict[str, Any]) -> None:
        with pytest.raises(DataError, match="another localspec writes there"):
            go(make_run(place, tmp_path / "out"))

    loop.train(make_run(place, tmp_path / "out", steps=2), lambda _: None, meanwhile)
    assert len(losses(tmp_path / "out")) == 2


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def without(name: str) -> Any:
    def change(path: Path) -> None:
        state = torch.load(path)
        del state[name]
        torch.save(state, path)

    return change


def one_optimizer_fewer(path: Path) -> None:
    state = torch.load(path)
    torch.save(state | {"optimizers": state["optimizers"][:1]}, path)


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, cut_short, without("step"), without("model"), one_optimizer_fewer,
     lambda path: path.write_bytes(b""), lambda path: path.write_text("hello"),
     lambda path: torch.save([1], path), lambda path: path.write_bytes(b"\x80\x04cposix\nsystem\n.")],
)  # fmt: skip
def test_a_damaged_state_of_the_trainer_is_named(place: Path, whole: Path, tmp_path: Path, damage: Any) -> None:
    """Whatever is wrong with it: an error, and nothing of the run is touched."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    damage(out / "last" / "trainer.pt")
    before = (out / "metrics.jsonl").read_bytes()
    says = rf"^{out}/last/trainer\.pt is (damaged, or none that localspec wrote|missing): delete {out}/last to begin again, "
    with pytest.raises(TrainError, match=f"{says}with --init {out} to keep the best weights$"):
        go(make_run(place, out))
    assert (out / "metrics.jsonl").read_bytes() == before


def interrupt_at(step: int) -> Any:
    def show(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise KeyboardInterrupt

    return show


def test_other_settings_are_refused_by_name(place: Path, whole: Path) -> None:
    with pytest.raises(TrainError, match=r"another lr \(0\.004, now 0\.001\)"):
        go(make_run(place, whole, lr=0.001))
    with pytest.raises(TrainError, match="another n-ff"):
        go(make_run(place, whole, own=replace(OWN, n_ff=64)))


def test_data_that_has_grown_begins_a_new_epoch(tmp_path: Path) -> None:
    train_data.shards(tmp_path / "data", train_data.target(tmp_path), 30)
    go(make_run(tmp_path, tmp_path / "out", steps=0, epochs=2.0))
    first = len(losses(tmp_path / "out"))
    train_data.shards(tmp_path / "data", tmp_path / "target.gguf", 30, seed=1)
    _, said = go(make_run(tmp_path, tmp_path / "out", steps=0, epochs=3.0))
    assert any("30 samples then, 60 now" in line for line in said)
    lines = [line for line in metrics.read(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
    shards = Shards.open(tmp_path / "data")
    more = batches.plan(shards.lengths(), batches.split(shards, 0.2)[0], 256, 2048, 0, 2)
    assert [line["epoch"] for line in lines[first:]] == [2] * (len(more) - 1) + [3]
    assert len(lines) == first + len(more)


def test_a_run_starts_from_another_ones_weights(place: Path, trained: Path, tmp_path: Path) -> None:
    run = replace(make_run(place, tmp_path / "tuned", steps=1, eval_every=1), start_from=trained / "best")
    report, _ = go(run)
    assert report.score > 1.8
    with pytest.raises(TrainError, match=r"has \(48, 64\), not \(40, 64\), as layers\.0\.mlp\.gate_proj\.weight"):
        go(replace(make_run(place, tmp_path / "other", own=replace(OWN, n_ff=40)), start_from=trained / "best"))


# -- it stops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    true, calls = EAGLE3.loss, [0]

    def spoiled(self: Any, batch: Any) -> Any:
        calls[0] += 1
        parts = true(self, batch)
        if calls[0] == 7:
            if what == "loss":
                parts.loss = parts.loss * float("nan")
            else:
                parts.loss.register_hook(lambda g: g * float("inf"))
        return parts

    monkeypatch.setattr(EAGLE3, "loss", spoiled)
    with pytest.raises(TrainError, match=rf"step 7: the {what}.*the last good checkpoint stays in .*last; lower --lr"):
        go(make_run(place, tmp_path / "nan"))
    assert len(losses(tmp_path / "nan")) == 6
    kept = checkpoint.load_trainer(tmp_path / "nan" / "last", torch.device("cpu"))
    assert kept["step"] == 4
    assert all(torch.isfinite(t).all() for t in checkpoint.load_weights(tmp_path / "nan" / "last").values())


def test_a_run_without_what_it_needs_says_so(place: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training data there"):
        go(replace(make_run(place, tmp_path / "a"), data=tmp_path))
    other = train_data.gguf_maker.tiny_llama(tmp_path / "other.gguf", n_layer=3)
    with pytest.raises(PairingError, match="has 3 layers, not 2"):
        go(replace(make_run(place, tmp_path / "b"), target=other))
    with pytest.raises(TrainError, match="held out"):
        go(make_run(place, tmp_path / "c", held_out=0.0))
    with pytest.raises(TrainError, match="no sample is left"):
        go(make_run(place, tmp_path / "d", held_out=1.0))
    with pytest.raises(TrainError, match="--window 2: a chain of --ttt 3 steps would see nothing"):
        go(make_run(place, tmp_path / "w", replace(OWN, window=2)))
    with pytest.raises(TrainError, match="no speculator is called 'eagle4'"):
        go(replace(make_run(place, tmp_path / "e"), method="eagle4"))
    assert not any((tmp_path / name).exists() for name in "abcdew")


def test_samples_that_are_cut_before_anything_counts(place: Path, trained: Path, tmp_path: Path) -> None:
    """Their prompts are longer than --max-len: a batch of such is passed over, an evaluation of nothing is an error."""
    model, samples = taken(place, trained / "best", OWN)
    batch = model.batch(samples, 8, torch.float32)
    assert not batch.mask.any()
    parts = model.loss(batch)
    parts.loss.backward()
    assert (float(parts.loss.detach()), parts.n_rows) == (0.0, 0)
    assert len(model.rollout(batch, 3).accepted) == 0
    with pytest.raises(TrainError, match="or begin after --max-len 8"):
        go(make_run(place, tmp_path / "cut", max_len=8, steps=1))


@pytest.mark.parametrize(("change", "says"), [({"optimizer": "sgd"}, "muon, adamw"), ({"batch_tokens": 0}, "at least 16"),
                                              ({"lr": float("nan")}, "--lr")])  # fmt: skip
def test_settings_out_of_range_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(TrainError, match=says):
        check(replace(SETTINGS, **change))


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(TrainError, match="here: unknown setting learning_rate"):
        from_dict(TrainSettings, {"learning_rate": 1}, "here")


# -- it shares its work ---------------------------------------------------------------------------------------------------


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_processes_take_the_steps_of_one_that_accumulates(place: Path, tmp_path: Path) -> None:
    """First on two nodes that meet on this machine, then going on as two processes of one."""
    for steps in (3, 6):
        go(make_run(place, tmp_path / "one", accumulate=2, steps=steps, eval_every=3))
    out = tmp_path / "two"
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    changed = command(place, out, "--steps", "3", "--eval-every", "3")
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", meet, "--rdzv-id", "t"]
    local = ["--local-addr", "127.0.0.1"]
    both = [torchrun(*nodes, *local, *changed) for _ in range(2)]
    said = [node.communicate(timeout=300)[1] for node in both]
    assert [node.returncode for node in both] == [0, 0], "".join(said)[-3000:]
    assert len(losses(out)) == 3
    changed = command(place, out, "--steps", "6", "--eval-every", "3")
    one_node = torchrun("--nproc-per-node", "2", "--master-port", "0", "--standalone", *changed)
    text = one_node.communicate(timeout=300)[1]
    assert one_node.returncode == 0, text[-3000:]
    assert "going on after step 3" in text
    np.testing.assert_allclose(losses(out), losses(tmp_path / "one"), rtol=2e-3)
    one, two = ([li["tokens"] for li in metrics.read(o / "metrics.jsonl") if "loss" in li] for o in (tmp_path / "one", out))
    assert one == two
    a, b = (checkpoint.load_weights(o / "last") for o in (out, tmp_path / "one"))
    assert torch.allclose(a["fc.weight"], b["fc.weight"], atol=2e-3)


# -- what it writes -------------------------------------------------------------------------------------------------------


def test_tensors_have_the_names_and_shapes_of_speculators(trained: Path) -> None:
    shapes = {name: tuple(t.shape) for name, t in checkpoint.load_weights(trained / "best").items()}
    layer = "layers.0."
    assert shapes == {
        "fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (64, 64), "d2t": (64,), "t2d": (320,),
        layer + "input_layernorm.weight": (64,), layer + "hidden_norm.weight": (64,),
        layer + "post_attention_layernorm.weight": (64,), layer + "self_attn.q_proj.weight": (64, 128),
        layer + "self_attn.k_proj.weight": (32, 128), layer + "self_attn.v_proj.weight": (32, 128),
        layer + "self_attn.o_proj.weight": (64, 64), layer + "mlp.gate_proj.weight": (48, 64),
        layer + "mlp.up_proj.weight": (48, 64), layer + "mlp.down_proj.weight": (64, 48),
    }  # fmt: skip
    weights = checkpoint.load_weights(trained / "best")
    said = (weights["d2t"] + torch.arange(64)).numpy()
    assert np.array_equal(said, np.flatnonzero(weights["t2d"].numpy()))
    assert set(range(100, 140)) <= set(said.tolist())


def hugging_face_target(folder: Path, target: TargetWeights) -> Path:
    """What vLLM's speculators reads of a target: its config and three tensors."""
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": target.embedding(torch.float32), "lm_head.weight": target.head(),
               "model.norm.weight": target.output_norm()}  # fmt: skip
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_speculators_package_loads_a_checkpoint(place: Path, trained: Path, tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators", reason="vLLM's speculators is not installed: pip install speculators")
    verifier = hugging_face_target(tmp_path / "target", TargetWeights(place / "target.gguf"))
    named, samples = taken(place, trained / "best", replace(OWN, verifier=str(verifier)))
    checkpoint.save(tmp_path / "draft", named, {}, None)
    config = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path / "draft"))
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "draft"), config=config).float().eval()
    ours = checkpoint.load_weights(tmp_path / "draft")
    theirs = model.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name].to(tensor.dtype), tensor), name
    assert model.config.eagle_aux_hidden_state_layer_ids == [0, 1, 2]
    loaded = set(ours) | {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert set(theirs) <= loaded
    # and it computes what ours computes: the first drafts after each token of a text, by its own forward pass
    model.embed_tokens.weight.data.copy_(named.embedding)  # ours is rounded to bf16
    sample = samples[0]
    n = len(sample.tokens)
    with torch.no_grad():
        taps = torch.from_numpy(sample.taps.reshape(1, n, -1))[:, :-1]
        tokens = torch.from_numpy(sample.tokens[None, 1:].astype(np.int64))
        (drafted,) = model(taps, tokens, torch.zeros(1, n - 1, dtype=torch.int64), ttt_steps=1)
    reference = Reference(tmp_path / "draft", named.embedding.numpy())
    for p in range(n - 1):
        g = reference.fuse(sample.taps[p])
        _, logits = reference.draft(int(sample.tokens[p + 1]), g, 1)
        assert int(drafted[0, p]) == int(logits[0].argmax())
        reference.commit(int(sample.tokens[p + 1]), g)


def test_a_picture_is_drawn(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install matplotlib")
    metrics.plot(trained, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_damaged_lines_of_a_curve_are_left_out(tmp_path: Path) -> None:
    lines = b'{"step": 1, "loss": 2.0}\n[1]\n{"step": "x"}\n\xff\xfe\n\0\0\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    assert losses(tmp_path) == [2.0, 1.0]


def test_tensorboard_gets_the_curves(trained: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(trained / "tensorboard"))
    board.Reload()
    curve = losses(trained)
    assert [round(e.value, 4) for e in board.Scalars("train/loss")] == [pytest.approx(v, abs=1e-3) for v in curve]


# -- the parts ------------------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_stay_on_one_side(place: Path) -> None:
    shards = Shards.open(place / "data")
    training, held = batches.split(shards, 0.2)
    assert sorted(training + held) == list(range(len(shards)))
    prompts = [key.split("#")[0] for key in shards.keys()]  # noqa: SIM118 (no dict)
    assert not {prompts[i] for i in training} & {prompts[i] for i in held}
    assert 0.05 < len(held) / len(shards) < 0.4


def test_an_epoch_has_every_sample_once_and_batches_within_their_size(place: Path) -> None:
    lengths = Shards.open(place / "data").lengths()
    first, second = (batches.plan(lengths, range(len(lengths)), 200, 40, 0, epoch) for epoch in (0, 1))
    assert sorted(i for b in first for i in b) == list(range(len(lengths)))
    assert first != second
    assert first == batches.plan(lengths, range(len(lengths)), 200, 40, 0, 0)
    assert all(sum(min(int(lengths[i]), 40) for i in b) <= 200 for b in first)


def test_a_cut_sample_keeps_its_teacher_in_step(place: Path) -> None:
    sample = Shards.open(place / "data").sample(0)
    batch = batches.collate([sample, sample], 20, None, torch.float32)
    assert batch.n_tokens == 40
    said = batch.teacher_ids[:, 0].numpy()
    assert np.array_equal(said[batch.teacher_of[batch.mask]], batch.tokens.numpy()[batch.mask])
    assert (batch.teacher_of[~batch.mask] == -1).all()
    assert len(batch.teacher_ids) == 24


def test_the_vocabulary_is_what_is_said_most() -> None:
    counts = np.array([0.0, 5, 0, 2, 0, 9])
    ids = vocab.choose(counts, 4)
    assert ids.tolist() == [0, 1, 3, 5]
    assert vocab.coverage(counts, ids) == 1.0
    assert vocab.coverage(counts, vocab.choose(counts, 2)) == 14 / 16


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_weights_come_out_of_the_file_as_llama_cpp_stores_them(tmp_path: Path, kind: str) -> None:
    plain = TargetWeights(train_data.gguf_maker.tiny_llama(tmp_path / "plain.gguf")).embedding(torch.float32)
    other = TargetWeights(train_data.gguf_maker.tiny_llama(tmp_path / "q.gguf", ftype=kind.lower())).embedding(torch.float32)
    assert plain.shape == other.shape == (320, 64)
    error = float((plain - other).norm() / plain.norm())
    assert error <= {"F32": 0, "F16": 1e-3, "Q8_0": 0.01, "Q4_0": 0.15, "Q4_1": 0.12}[kind]
    assert kind == "F32" or error > 0


def test_the_learning_rate_rises_stays_and_falls() -> None:
    settings = replace(SETTINGS, warmup=3, decay=0.5, lr=1.0)
    rates = [optim.rate(i, 20, settings) for i in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:11] == [1.0] * 7
    assert rates[11:] == pytest.approx([0.9 - 0.1 * i for i in range(9)])


def test_an_error_in_the_thread_that_makes_batches_is_raised() -> None:
    def make(i: int) -> int:
        if i == 2:
            raise DataError("damaged")
        return i

    made = batches.ahead(range(5), make)
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(DataError, match="damaged"):
        next(made)
