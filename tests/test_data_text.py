"""Prompts from files, conversations as tokens with the loss mask, prompts of the model's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from localspec.data import conversations, hf, selfmade
from localspec.data.conversations import Conversation, Message, read_conversations
from localspec.data.mask import Renderer, render
from localspec.data.selfmade import Known, invent, opening, self_made
from localspec.errors import DataError, FetchError, UsageError
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests import fake_hub, gguf_maker
from tests.conftest import Cli
from tests.fake_hub import Repo

# Shows what was thought only in the newest answer, as Qwen3's template does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or '</think>' not in m.content else m.content.split('</think>')[1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("m") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path) as loaded:
        yield loaded


def variant(folder: Path, template: str | None) -> Model:
    keys = gguf_maker.tokenizer_keys(chat_template=template)
    return Model(gguf_maker.tiny_llama(folder / "variant.gguf", tokenizer=keys))


def talk(*said: str, raw: bool = False) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], text) for i, text in enumerate(said)), "chat", "here line 1", raw)


def counted(model: Model, conversation: Conversation, keep_thinking: bool = True, most: int = 400) -> list[list[str]]:
    """For each sample the texts that count."""
    found = []
    for masked in render(conversation, Renderer(model), most):
        mask = masked.mask(model.tokenizer, keep_thinking)
        texts, last = [], 0
        for i, token in enumerate(masked.tokens):
            if mask[i]:
                piece = model.tokenizer.decode([token], special=True)
                texts = [*texts[:-1], texts[-1] + piece] if texts and last == i - 1 else [*texts, piece]
                last = i
        found.append(texts)
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def test_every_known_shape(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    entries = [
        {"source": "a", "turns": ["one", "two"]},
        {"prompt": "three"},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "four"},
                      {"role": "assistant", "content": "yes"}]},
        {"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "six"}]},
        {"prompt": "three"},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    found = read_conversations(path)
    assert [[(m.role, m.content) for m in c.messages] for c in found] == [
        [("user", "one"), ("user", "two")],
        [("user", "three")],
        [("system", "be kind"), ("user", "four"), ("assistant", "yes")],
        [("user", "five"), ("assistant", "six")],
    ]
    assert [c.source for c in found] == ["a", "mixed", "mixed", "mixed"]
    assert [m.content for m in found[3].asked] == ["five"]
    assert found[1].where == f"{path} line 2"


def test_plain_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("first\nstill first\n\n\n\nsecond\n")
    assert [c.messages[0].content for c in read_conversations(path)] == ["first\nstill first", "second"]
    assert [c.where for c in read_conversations(path)] == [f"{path} line 1", f"{path} line 6"]


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "line 2: not JSON"), ("[]", "line 2: an object"), ('{"turns": [1]}', "line 2: .*must hold text"),
     ('{"messages": [{"role": "tool", "content": "x"}]}', "a message of 'tool'"),
     ('{"messages": ["x"]}', "'role' and 'content'"),
     ('{"prompt": "\\ud800"}', "half a character"), ('{"answer": "x"}', "must hold text"),
     ('{"messages": [{"role": "assistant", "content": "x"}]}', "nobody asks"), ("[" * 100000, "not JSON")],
)  # fmt: skip
def test_what_is_no_prompt_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=words):
        read_conversations(path)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no prompts in it"):
        read_conversations(tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match="No such file"):
        read_conversations(tmp_path / "none.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 3\)"):
        read_conversations(tmp_path / "latin.txt")


def test_files_without_an_end_and_of_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(UsageError, match="/dev/zero: more than 1 MiB"):
        read_conversations(Path("/dev/zero"))
    (tmp_path / "dos.txt").write_bytes(b"the cat\r\n\r\nthe mat\r\n")
    assert [c.messages[0].content for c in read_conversations(tmp_path / "dos.txt")] == ["the cat", "the mat"]


def test_the_file_of_a_dataset_is_chosen() -> None:
    names = ["README.md", "data/train.jsonl", "data/test.jsonl", "config.json"]
    assert hf._choose(names, "hf://a/b") == "data/train.jsonl"
    with pytest.raises(FetchError, match=r"it has x\.csv"):
        hf._choose(["x.csv"], "hf://a/b")
    with pytest.raises(FetchError, match=r"hf://a/b/FILE: a\.jsonl, b\.jsonl"):
        hf._choose(["b.jsonl", "a.jsonl"], "hf://a/b")
    for address in ("hf://me", "hf://", "hf://a b/c"):
        with pytest.raises(FetchError, match="expected hf://USER/NAME"):
            hf.read_dataset(address)


def test_datasets_of_the_hub(path: Path, cli: Cli) -> None:
    with fake_hub.running() as hub:
        hub.repos["me/mine"] = Repo({"README.md": b"", "train.jsonl": b'{"prompt": "the cat"}\n{"prompt": "the rain"}\n'})
        hub.repos["me/table"] = Repo({"data/train.parquet": b"PAR1"})
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "5"}
        common = ("data", "-m", path, "-o", "d", "--max-tokens", "2", "--states", "none")
        for address, words in (
            ("hf://me/mine", "2 samples"),
            ("hf://me/mine/train.jsonl", "2 samples"),
            ("hf://me/mine/test.jsonl", "has no such file"),
            ("hf://me/none", "does not exist, or is private"),
            ("hf://me/table", "Parquet file"),  # damaged; or pyarrow is missing
        ):
            done = cli(*common, "-f", address, env=env)
            assert words in done.stderr, (address, done.stderr)
            assert done.rc == (0 if words == "2 samples" else 2)
        hub.broken = 503
        assert "HTTP 503" in cli(*common, "-f", "hf://me/other", env=env).stderr
    done = cli(*common, "-f", "hf://me/mine/train.jsonl")  # offline, from the cache
    assert done.rc == 0, done.stderr
    assert "HF_HUB_OFFLINE is set" in cli(*common, "-f", "hf://me/mine").stderr


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(to_pylist=lambda: [{"prompt": "the cat"}, {"prompt": "the rain"}])
    module = SimpleNamespace(read_table=lambda path: table)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=module))
    found = hf._read_parquet(tmp_path / "train.parquet", False)
    assert [c.where for c in found] == ["train.parquet row 0", "train.parquet row 1"]


# -- the mask ----------------------------------------------------------------------------------------------------------


def test_what_the_assistant_says_counts_with_its_end(model: Model) -> None:
    assert counted(model, talk("hi", "the cat")) == [["the cat<|im_end|>"]]
    assert counted(model, talk("hi", "the cat", "and", "the rain")) == [["the cat<|im_end|>", "the rain<|im_end|>"]]
    masked = render(talk("hi", "the cat"), Renderer(model), 400)[0]
    whole = model.tokenizer.decode(masked.tokens, special=True)
    assert whole == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>"


def test_thinking_is_kept_or_dropped(model: Model) -> None:
    thoughtful = talk("hi", "<think>so</think>the cat", "and", "<think>never ends")
    assert counted(model, thoughtful)[0][0] == "<think>so</think>the cat<|im_end|>"
    assert counted(model, thoughtful, keep_thinking=False) == [["the cat<|im_end|>"]]


def test_a_template_that_forgets_thinking_gives_a_sample_for_each_answer(tmp_path: Path) -> None:
    with variant(tmp_path, FORGETFUL) as model:
        samples = counted(model, talk("hi", "<think>so</think>the cat", "and", "the rain"))
        assert samples == [["<think>so</think>the cat<|im_end|>"], ["the rain<|im_end|>"]]


def test_an_empty_mask_is_an_error_that_names_the_sample(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="here line 1: the assistant says nothing"):
        render(talk("hi"), Renderer(model), 400)
    with pytest.raises(UsageError, match="here line 1: the assistant says nothing"):
        render(talk("the cat " * 100, "x"), Renderer(model), 50)
    mute = variant(tmp_path, "{% for m in messages %}{{ m.role }}{% endfor %}")
    with mute, pytest.raises(UsageError, match="line 1: the chat template does not show"):
        render(talk("hi", "the cat"), Renderer(mute), 400)


def test_raw_texts_count_from_the_second_token(model: Model) -> None:
    text = "the cat sat on the mat " * 6
    tokens = model.tokenizer.encode(text, parse_special=False)
    samples = render(talk(text, raw=True), Renderer(model), 20)
    assert [t for s in samples for t in s.tokens] == tokens[: len([t for s in samples for t in s.tokens])]
    assert all(s.spans == [(1, len(s.tokens))] for s in samples)
    assert len(samples[0].tokens) == 20


def test_long_conversations_lose_their_end(model: Model) -> None:
    conversation = talk("hi", "the cat", "and", "the rain " * 50)
    (masked,) = render(conversation, Renderer(model), 60)
    assert len(masked.tokens) == 60
    assert len(masked.spans) == 2
    assert masked.spans[-1][1] == 60


# -- prompts of the model's own ----------------------------------------------------------------------------------------


def test_prompts_that_say_the_same_count_once() -> None:
    known = Known(["What is a cat?"])
    assert not known.add("what is  a CAT")
    assert known.add("What is a dog?")
    long = "please write a long story about a cat that lives on the moon"
    assert known.add(long)
    assert not known.add(long + " and eats cheese")
    assert not known.add("Hm.")


def test_what_is_invented_depends_on_seed_and_number_alone(model: Model) -> None:
    tokenizer = model.tokenizer
    before = tokenizer.eog.copy()
    tokenizer.eog[::5] = 1  # so that random texts end
    try:
        found = []
        for parallel, first in ((1, 0), (4, 0), (2, 3)):
            with TargetSession(model, SessionSettings(n_ctx=256, n_sequences=parallel)) as session:
                assert tokenizer.decode(opening(session), special=True) == "<|im_start|>user\n"
                found.append(dict(islice(invent(session, 7, first, lambda: False), 12)))
    finally:
        tokenizer.eog[:] = before
    for other in found[1:]:
        both = found[0].keys() & other.keys()
        assert len(both) > 4
        assert {n: found[0][n] for n in both} == {n: other[n] for n in both}
    assert min(found[2]) == 3


def test_invented_prompts_are_kept_and_gone_on_with(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def scripted(session: TargetSession, seed: int, first: int, stopped: object) -> Iterator[tuple[int, str]]:
        for number in count(first):
            asked.append(number)
            yield number, "<|im_start|> odd" if number % 5 == 0 else f"What is number {number // 2}?"

    monkeypatch.setattr(selfmade, "invent", scripted)
    with TargetSession(model, SessionSettings(n_ctx=64)) as session:
        first = self_made(session, tmp_path, 4, 0, lambda: False)
        assert [c.messages[0].content for c in first] == [f"What is number {i}?" for i in (0, 1, 2, 3)]
        assert {c.source for c in first} == {"self"}
        n = len(asked)
        assert self_made(session, tmp_path, 4, 0, lambda: False) == first
        assert len(asked) == n
        assert self_made(session, tmp_path, 6, 0, lambda: False)[:4] == first
        assert asked[n] == asked[n - 1] + 1
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "prompts-self.jsonl").write_text("half a li")
        with pytest.raises(DataError, match=r"prompts-self\.jsonl can't be read"):
            self_made(session, tmp_path / "other", 6, 0, lambda: False)
        monkeypatch.setattr(selfmade, "invent", lambda *_: ((n, "What is it?") for n in count(100)))
        with pytest.raises(UsageError, match="after 7 prompts it repeats itself"):
            self_made(session, tmp_path, 20, 0, lambda: False)


def test_a_model_that_never_ends_invents_nothing(model: Model) -> None:
    """Its attempts are given, empty, so that the caller can give up."""
    before = model.tokenizer.eog.copy()
    model.tokenizer.eog[:] = 0
    try:
        with TargetSession(model, SessionSettings(n_ctx=64, n_sequences=4)) as session:
            assert list(islice(invent(session, 0, 0, lambda: False), 8)) == [(number, "") for number in range(8)]
    finally:
        model.tokenizer.eog[:] = before


def test_invented_prompts_may_hold_any_character(model: Model, tmp_path: Path) -> None:
    """U+2028 and others end a line for Python, not for JSON Lines."""
    text = "What is a line\u2028or\x85a\x0bpage?"
    (tmp_path / "prompts-self.jsonl").write_text(
        json.dumps({"source": "self", "prompt": text, "number": 0}, ensure_ascii=False) + "\n"
    )
    with TargetSession(model, SessionSettings(n_ctx=64)) as session:
        (found,) = self_made(session, tmp_path, 1, 0, lambda: False)
    assert found.messages[0].content == text


def test_a_base_model_cannot_invent_prompts(tmp_path: Path) -> None:
    base = variant(tmp_path, None)
    session = TargetSession(base, SessionSettings(n_ctx=64))
    with base, session, pytest.raises(UsageError, match="a base model has no chat template"):
        self_made(session, tmp_path, 2, 0, lambda: False)
