"""The target writes its own training data: samples, resuming, refusals, and the commands as a person starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec import native
from localspec.accept import Sampling
from localspec.data import generate as generate_module
from localspec.data import plan
from localspec.data.conversations import Conversation, Message
from localspec.data.generate import Generator
from localspec.data.jobs import Jobs
from localspec.data.shards import Manifest, Sample, Shards
from localspec.errors import UsageError
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests import gguf_maker
from tests.conftest import Cli

PROMPTS = ["the cat", "the rain fell", "and then", "on the tin roof they sat", "the river", "over the hill"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("m") / "tiny.gguf", n_layer=4)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path) as loaded:
        yield loaded


def asked(*texts: str, source: str = "test") -> Conversation:
    return Conversation(tuple(Message("user", text) for text in texts), source, "here")


def written(
    model: Model, conversations: list[Conversation], parallel: int = 4, n_answers: int = 1, n_ctx: int = 256,
    greedy: bool = True, **settings: object,
) -> dict[str, Sample]:
    with TargetSession(model, SessionSettings(n_ctx=n_ctx, n_sequences=parallel, n_batch=64, taps=(1, 2, 3))) as session:
        generator = Generator(session, **{"max_tokens": 12, "teacher_k": 5, **settings})  # type: ignore[arg-type]
        groups = Jobs(conversations, n_answers, Sampling(temperature=0.7, seed=3), greedy, set())
        return {key: sample for sample, key in generator.run(groups)}


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """Every answer ends when its position is a multiple of 9."""
    real = generate_module.draw

    def draw(logits: np.ndarray, sequences: list[int], positions: list[int], *rest: object) -> object:
        drawn = real(logits, sequences, positions, *rest)  # type: ignore[arg-type]
        drawn.tokens[np.array(positions) % 9 == 0] = model.tokenizer.eos
        return drawn

    monkeypatch.setattr(generate_module, "draw", draw)


def test_samples_are_what_the_target_says_and_thinks(model: Model) -> None:
    conversations = [asked(text) for text in PROMPTS]
    samples = written(model, conversations)
    assert len(samples) == 6
    with TargetSession(model, SessionSettings(n_ctx=256, taps=(1, 2, 3))) as session:
        for conversation in conversations:
            sample = samples[conversation.key() + "#0"]
            text = model.tokenizer.decode(sample.tokens, special=True)
            start = f"<|im_start|>user\n{conversation.messages[0].content}<|im_end|>\n<|im_start|>assistant\n"
            assert text.startswith(start)
            n = len(sample.tokens)
            assert sample.mask.tolist() == [0] * (n - 12) + [1] * 12
            session.rollback(0, 0)
            rows = session.decode([(0, sample.tokens)])
            np.testing.assert_allclose(sample.taps[:-1], rows.taps[:-1], rtol=1e-2, atol=2e-2)
            assert not sample.taps[-1].any()
            wanted = rows.logits[sample.teacher_rows]
            assert (sample.teacher_rows == np.flatnonzero(sample.mask) - 1).all()
            np.testing.assert_array_equal(sample.teacher_ids[:, 0], sample.tokens[sample.teacher_rows + 1])  # greedy
            np.testing.assert_allclose(sample.teacher_logits, -np.sort(-wanted, axis=1)[:, :5], rtol=1e-2, atol=2e-2)
            np.testing.assert_allclose(sample.teacher_lse, np.log(np.exp(wanted).sum(axis=1)), atol=1e-3)


def test_an_answer_does_not_depend_on_the_others(model: Model) -> None:
    conversations = [asked(text) for text in PROMPTS]
    together = written(model, conversations, parallel=5, n_answers=3)
    alone = written(model, conversations, parallel=1, n_answers=3)
    assert together.keys() == alone.keys()
    assert len(together) == 18
    for key, sample in together.items():
        np.testing.assert_array_equal(sample.tokens, alone[key].tokens)
        np.testing.assert_allclose(sample.taps, alone[key].taps, rtol=1e-2, atol=2e-2)
    hot = [tuple(together[conversations[0].key() + f"#{i}"].tokens.tolist()) for i in range(3)]
    assert len(set(hot)) == 3


@pytest.mark.usefixtures("ends")
def test_a_conversation_goes_on_after_an_answer(model: Model) -> None:
    conversation = asked("the cat", "and then", "the river")
    (sample,) = written(model, [conversation], greedy=False).values()
    changes = np.flatnonzero(np.diff(sample.mask))
    assert len(changes) == 5  # three answers, the last one at the end
    assert sample.mask[-1] == 1
    for end in changes[1::2]:
        assert sample.tokens[end] == model.tokenizer.eos
    text = model.tokenizer.decode(sample.tokens, special=True)
    assert "<|im_end|>\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n" in text
    with TargetSession(model, SessionSettings(n_ctx=256, taps=(1, 2, 3))) as session:
        rows = session.decode([(0, sample.tokens)])
        np.testing.assert_allclose(sample.taps[:-1], rows.taps[:-1], rtol=1e-2, atol=2e-2)


@pytest.mark.usefixtures("ends")
def test_a_conversation_that_outgrows_the_context_keeps_its_beginning(model: Model) -> None:
    samples = written(model, [asked("the cat", "the rain fell " * 30, "the river")], n_ctx=80, greedy=False)
    (sample,) = samples.values()
    assert len(np.flatnonzero(np.diff(sample.mask))) == 1
    assert written(model, [asked("the rain fell " * 60)], n_ctx=80) == {}


@pytest.mark.usefixtures("ends")
def test_thinking_can_be_left_out_of_what_counts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = type(model.tokenizer).piece
    conversations = [asked(text) for text in PROMPTS[:3]]
    before = written(model, conversations, greedy=False)
    said = next(s for s in before.values() if s.mask.sum() > 3)
    odd = int(said.tokens[np.flatnonzero(said.mask)[1]])
    fake = {odd: b"<think>", model.tokenizer.eos: b"</think>"}
    monkeypatch.setattr(
        type(model.tokenizer), "piece", lambda self, t, special=False: fake.get(t) or piece(self, t, special)
    )
    after = written(model, conversations, greedy=False, keep_thinking=False)
    key = next(k for k, s in before.items() if s is said)
    assert after[key].mask.sum() == 1
    assert len(after[key].teacher_ids) == 1


def test_settings_out_of_range(model: Model) -> None:
    for settings, words in (({"max_tokens": 0}, "--max-tokens"), ({"teacher_k": 321}, "--teacher-k")):
        with pytest.raises(UsageError, match=words):
            written(model, [asked("the cat")], **settings)


# -- plans -------------------------------------------------------------------------------------------------------------


def manifest(states: str = "q4") -> Manifest:
    target = {"name": "t", "architecture": "llama", "n_layer": 30, "n_embd": 576, "n_vocab": 49152, "tokenizer_hash": "",
              "file_hash": ""}  # fmt: skip
    return Manifest(target, [2, 15, 27], states, 32)


def test_a_full_disk_is_seen_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10**9))
    plan.check_disk(tmp_path / "not" / "there" / "yet", 10**8)
    with pytest.raises(UsageError, match=r"about 2000 MB would be written and 732 MB can be: 1268 MB are missing"):
        plan.check_disk(tmp_path, 2 * 10**9)


@pytest.mark.parametrize(
    ("states", "least", "most"), [("q4", 1000, 1110), ("q8", 1900, 2100), ("f16", 3590, 3610), ("none", 130, 150)]
)
def test_bytes_expected(states: str, least: int, most: int) -> None:
    assert least < plan.bytes_of(manifest(states), 1, 1) < most


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("p") / "prompts.jsonl"
    lines: list[dict[str, object]] = [
        {"source": f"s{i % 2}", "prompt": f"the cat sat {'on the mat ' * (i % 7)}{i}"} for i in range(60)
    ]
    said = {"from": "human", "value": "the cat sat 0"}, {"from": "gpt", "value": "yes"}
    lines.append({"conversations": said})  # asked before, answered otherwise
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def command(path: Path, prompts: Path, out: Path) -> list[str]:
    return ["data", "-m", str(path), "-f", str(prompts), "-o", str(out), "--max-tokens", "20", "--answers", "3", "-np", "6",
            "--taps", "1,2,3", "--shard-tokens", "700", "-t", "1"]  # fmt: skip


def content(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    shards = Shards.open(folder)
    shards.verify()
    keys = shards.keys()
    assert len(keys) == len(set(keys))
    samples = [shards.sample(i) for i in range(len(shards))]
    return {key: (s.tokens.tobytes(), s.mask.tobytes()) for key, s in zip(keys, samples)}


def test_killed_at_any_moment_it_goes_on(
    path: Path, prompt_file: Path, cli: Cli, cli_env: dict[str, str], tmp_path: Path
) -> None:
    done = cli(*command(path, prompt_file, tmp_path / "whole"))
    assert done.rc == 0, done.stderr
    assert "180 answers to come: about" in done.stderr
    assert "\x1b" not in done.stderr
    whole = content(tmp_path / "whole")
    assert len(whole) == 180
    cut = tmp_path / "cut"
    kills = 0
    for wanted in (1, 4, 7):
        process = subprocess.Popen([sys.executable, "-m", "localspec", *command(path, prompt_file, cut)], env=cli_env,
                                   stderr=subprocess.DEVNULL, preexec_fn=native.unbound)  # fmt: skip
        end = time.monotonic() + 60
        while process.poll() is None and len(list(cut.glob("shard-*.safetensors"))) < wanted and time.monotonic() < end:
            time.sleep(0.005)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 2
    assert len(content(cut)) < 180
    done = cli(*command(path, prompt_file, cut))
    assert done.rc == 0, done.stderr
    assert content(cut) == whole
    again = cli(*command(path, prompt_file, cut))
    assert again.rc == 0
    assert "to come" not in again.stderr
    assert not list(cut.glob("*.part"))


def test_ctrl_c_keeps_what_is_done(path: Path, prompt_file: Path, cli_env: dict[str, str], tmp_path: Path) -> None:
    args = [*command(path, prompt_file, tmp_path / "d"), "--shard-tokens", "100000", "--answers", "200"]  # seconds of work
    process = subprocess.Popen([sys.executable, "-m", "localspec", *args], env=cli_env, stderr=subprocess.PIPE, text=True,
                               preexec_fn=native.unbound)  # fmt: skip
    assert process.stderr is not None
    while "to come" not in process.stderr.readline():
        pass
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130
    assert "interrupted" in rest
    assert len(content(tmp_path / "d")) > 0


def test_stats_and_extract(path: Path, prompt_file: Path, cli: Cli, tmp_path: Path) -> None:
    texts = tmp_path / "talks.jsonl"
    said = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
    texts.write_text(json.dumps({"source": "old", "messages": said}) + "\n")
    out = tmp_path / "d"
    done = cli("extract", "-m", path, "-f", texts, "-o", out, "--taps", "1,2,3")
    assert done.rc == 0, done.stderr
    again = cli("extract", "-m", path, "-f", texts, "-o", out, "--taps", "1,2,3")
    assert "1 samples" in again.stderr
    done = cli("data", "-o", out, "--stats")
    assert done.rc == 0, done.stderr
    assert "taps 1, 2, 3 as q4" in done.stdout
    assert "  old: 1 samples, " in done.stdout
    assert "[sat on the mat<|im_end|>]" in done.stdout
    assert "\x1b" not in done.stdout
    with Model(path) as model, TargetSession(model, SessionSettings(n_ctx=64, taps=(1, 2, 3))) as session:
        sample = Shards.open(out).sample(0)
        rows = session.decode([(0, sample.tokens)])
        scale = np.sqrt(np.square(rows.taps).mean(axis=(0, 2), keepdims=True))
        assert np.sqrt(np.square((sample.taps - rows.taps) / scale).mean()) < 0.15
        lse = np.log(np.exp(rows.logits[sample.teacher_rows]).sum(axis=1))
        np.testing.assert_allclose(sample.teacher_lse, lse, atol=1e-3)
    shard = out / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 255
    shard.write_bytes(data)
    assert "checksum" in cli("data", "-o", out, "--stats").stderr


def test_errors_are_one_line(path: Path, prompt_file: Path, cli: Cli, tmp_path: Path) -> None:
    other = gguf_maker.tiny_llama(tmp_path / "other.gguf", n_layer=4, seed=1)
    base = gguf_maker.tiny_llama(
        tmp_path / "base.gguf", n_layer=3, tokenizer=gguf_maker.tokenizer_keys(chat_template=None)
    )
    out = tmp_path / "d"
    assert cli("data", "-m", path, "-f", prompt_file, "-o", out, "--taps", "1,2,3", "--max-tokens", "2").rc == 0
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": "the cat"}\n')
    blocked = tmp_path / "file"
    blocked.write_text("")
    for args, words in (
        (["data", "-m", path, "-o", out], "nothing to answer"),
        (["data", "-m", path, "-o", out, "-f", tmp_path / "none"], "No such file"),
        (["data", "-m", other, "-o", out, "-f", prompt_file], "holds data of another target"),
        (["data", "-m", path, "-o", out, "-f", prompt_file, "--taps", "0,1,2"], "--taps 1,2,3, not 0,1,2"),
        (["data", "-m", path, "-o", tmp_path / "e", "-f", prompt_file, "--taps", "1,2,9"], "taps 0 (embeddings) to 4"),
        (["data", "-m", path, "-o", tmp_path / "e", "-f", prompt_file, "--taps", "x"], "not a list of numbers"),
        (["data", "-m", path, "-o", blocked, "-f", prompt_file], "can't be written to"),
        (["data", "-m", base, "-o", tmp_path / "f", "--self", "3"], "has no chat template"),
        (["data", "-o", tmp_path / "nowhere", "--stats"], "no training data there"),
        (["extract", "-m", path, "-o", tmp_path / "g", "-f", empty], f"{empty} line 1: the assistant says nothing"),
        (["extract", "-m", path, "-o", tmp_path / "g"], "nothing to read"),
        (["data", "-m", path, "-o", tmp_path / "h", "-f", "hf://a/b/c.jsonl"], "not in the cache"),
    ):
        done = cli(*args)
        assert done.rc == 2, args
        assert words in done.stderr, (args, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr


def test_a_base_model_continues_raw_text(cli: Cli, prompt_file: Path, tmp_path: Path) -> None:
    base = gguf_maker.tiny_llama(tmp_path / "base.gguf", tokenizer=gguf_maker.tokenizer_keys(chat_template=None), n_layer=3)
    (tmp_path / "text.txt").write_text("the cat sat\n\nthe rain fell on the roof\n")
    done = cli("data", "-m", base, "-f", "text.txt", "-o", "d", "--max-tokens", "5", "--states", "none")
    assert done.rc == 0, done.stderr
    shards = Shards.open(tmp_path / "d")
    with Model(base) as model:
        texts = sorted(model.tokenizer.decode(t[m == 0]) for t, m in map(shards.tokens, range(2)))
    assert texts == ["the cat sat", "the rain fell on the roof"]
    assert shards.sample(0).taps.shape[1:] == (0, 64)


def test_a_stop_at_so_many_tokens(cli: Cli, path: Path, prompt_file: Path, tmp_path: Path) -> None:
    done = cli(*command(path, prompt_file, tmp_path / "d"), "--tokens", "800")
    assert done.rc == 0, done.stderr
    assert 800 <= Shards.open(tmp_path / "d").manifest.n_tokens < 1000


# -- a real model ------------------------------------------------------------------------------------------------------

STORY = """The printing press changed how knowledge spread through Europe. Before it, books were copied by hand, which
took months and cost as much as a house. In 1450 a goldsmith from Mainz put movable metal letters, oil ink and a wine press
together; within fifty years there were more than a thousand printing shops, and twenty million books.
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError('negative')
    return width * height
"""


def test_real_states_are_small_and_close(smollm2: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    for states in ("q4", "f16"):
        done = cli("extract", "-m", smollm2, "-f", "story.txt", "--raw", "-o", states, "--states", states, timeout=120)
        assert done.rc == 0, done.stderr
    small, exact = Shards.open(tmp_path / "q4"), Shards.open(tmp_path / "f16")
    n = exact.manifest.n_tokens
    plain = 2 * 3 * 576 * n  # the states alone, in fp16
    header = 1500  # of the file: names, sources; a whole shard has them once
    assert os.path.getsize(tmp_path / "q4" / "shard-00000.safetensors") - header - 3 * 576 * 4 < 0.32 * plain
    one, other = small.sample(0), exact.sample(0)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.taps[0], other.taps[0], rtol=1e-3, atol=1e-2)  # far beyond all others, kept whole
    assert np.abs(other.taps[0]).max() > 20 * np.abs(other.taps[10:]).max(axis=(1, 2)).mean()
    rms = np.sqrt(np.square(other.taps[1:-1]).mean(axis=0))
    error = (one.taps - other.taps)[1:-1] / rms
    assert np.sqrt(np.square(error).mean()) < 0.11
    norms = np.linalg.norm((one.taps - other.taps)[1:-1], axis=(1, 2)) / np.linalg.norm(other.taps[1:-1], axis=(1, 2))
    assert np.median(norms) < 0.1
