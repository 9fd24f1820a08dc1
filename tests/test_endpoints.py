"""Answers written by servers: real ones on this machine, and one that fails in every way that servers do."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.accept import Sampling
from localspec.data.conversations import Conversation, Message
from localspec.data.endpoints import Ask, BusyError, Endpoint, RefusedError
from localspec.data.fleet import Answered, Event, Fleet, Lost, Patience, Refused
from localspec.data.generate import Generator
from localspec.data.jobs import Jobs
from localspec.data.remote import RemoteGenerator, connect
from localspec.data.shards import Sample, Shards
from localspec.errors import DataError, LocalspecError, UsageError
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests import gguf_maker
from tests.conftest import Cli
from tests.test_serve import serving

QUICK = Patience(n_tries=3, first_wait=0.01, full_s=0.3)
KEY = "a-secret-key"
ASK = Ask([1, 2, 3], 8, Sampling(temperature=0.0), 7)
Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


@dataclass
class Fake:
    """A server whose replies are those of `reply(path, body)`; what was asked is kept."""

    url: str
    reply: Callable[[str, dict[str, Any]], Reply]
    asked: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)

    def endpoint(self, kind: str = "localspec", **settings: Any) -> Endpoint:
        endpoint = Endpoint(self.url, **settings)
        endpoint.kind, endpoint.model = kind, "m"
        return endpoint


def completion(tokens: list[int] | None, text: str = "x", n: int | None = None, finish: str = "stop") -> Reply:
    choice = {"text": text, "finish_reason": finish} | ({} if tokens is None else {"tokens": tokens})
    return 200, {"choices": [choice], "usage": {"completion_tokens": len(tokens or []) if n is None else n}}


@pytest.fixture
def fake() -> Iterator[Callable[[Callable[[str, dict[str, Any]], Reply]], Fake]]:
    servers: list[ThreadingHTTPServer] = []

    def start(reply: Callable[[str, dict[str, Any]], Reply]) -> Fake:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                made.asked.append((self.path, body, self.headers.get("authorization")))
                status, content, *more = made.reply(self.path, body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # it did not wait so long
                    self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        made = Fake(f"http://127.0.0.1:{server.server_port}", reply)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return made

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def events(endpoints: list[Endpoint], n: int, n_each: int = 2, patience: Patience = QUICK) -> list[Event]:
    """What becomes of n asks."""
    fleet = Fleet(endpoints, n_each, patience)
    for number in range(n):
        fleet.ask(number, ASK)
    found: list[Event] = []
    while sum(not isinstance(event, Lost) for event in found) < n and (fleet.n_alive or len(found) < len(endpoints)):
        event = fleet.get(5)
        assert event is not None
        found.append(event)
    fleet.close()
    return found


# -- one endpoint -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", "http://a:99999999", "http://x/?y=1", ""])
def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(UsageError, match="--endpoint"):
        Endpoint(url)


def test_no_password_is_shown() -> None:
    for url in (f"http://me:{KEY}@host", f"http://me:{KEY}@host:x"):
        with pytest.raises(UsageError) as error:
            Endpoint(url)
        assert KEY not in str(error.value)
    assert KEY not in repr(Endpoint("http://host", KEY))


def test_llama_server_is_asked_in_its_own_words(fake: Any) -> None:
    server = fake(lambda path, body: (200, {"tokens": [5, 6, 2], "content": "ab", "stop_type": "eos"}))
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repeat_penalty=1.5, penalty_last_n=9)
    answer = server.endpoint("llama-server", key=KEY).answer(Ask([1, 2], 4, sampling, 11))
    assert (answer.tokens, answer.ended) == ([5, 6, 2], True)
    path, body, key = server.asked[0]
    assert (path, key) == ("/completion", f"Bearer {KEY}")
    wanted = {"prompt": [1, 2], "n_predict": 4, "seed": 11, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1,
              "repeat_penalty": 1.5, "repeat_last_n": 9, "return_tokens": True}  # fmt: skip
    assert {name: body[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        ((500, {"error": {"message": "out of\nmemory"}}), BusyError, "500: out of memory"),
        ((200, b"<html>"), BusyError, "no JSON object"),
        ((200, {"choices": []}), BusyError, "no text"),
        ((429, {}), BusyError, "429"),
        ((401, {}), RefusedError, "refuses this key.*LOCALSPEC_ENDPOINT_KEY"),
        ((404, {}), RefusedError, "/v1/completions: 404"),
        ((302, b"", {"location": "http://elsewhere"}), RefusedError, "302"),
        ((400, {"error": {"message": "too long"}}), RefusedError, "400: too long"),
        ((200, {"choices": [{"text": "x"}]}), RefusedError, "newer localspec serve"),
    ],
)
def test_every_failure_is_named(fake: Any, reply: Reply, kind: type[LocalspecError], says: str) -> None:
    server = fake(lambda path, body: reply)
    with pytest.raises(kind, match=says) as error:
        server.endpoint(key=KEY).answer(ASK)
    assert KEY not in str(error.value)


def test_silence_and_absence_are_failures_that_may_pass(fake: Any) -> None:
    server = fake(lambda path, body: time.sleep(2) or completion([1]))
    with pytest.raises(BusyError, match=r"no answer within 0\.1 s"):
        server.endpoint(timeout=0.1).answer(ASK)
    with pytest.raises(BusyError, match="refused"):
        Endpoint("http://127.0.0.1:9").answer(ASK)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Y: "])
def test_an_answer_that_drips_is_late(head: bytes) -> None:
    """Each byte is there in time, the whole of it is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(head)
                for _ in range(300):
                    connection.sendall(b"x")
                    time.sleep(0.05)

        server = threading.Thread(target=drip)
        server.start()
        with pytest.raises(BusyError, match=r"no answer within 0\.5 s"):
            Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5).answer(ASK)
        server.join(10)
        assert not server.is_alive()


# -- many -------------------------------------------------------------------------------------------------------------------


def test_what_fails_is_tried_again(fake: Any) -> None:
    replies = iter([(500, {}), (503, {}, {"retry-after": "0"}), completion([4])])
    server = fake(lambda path, body: next(replies))
    (event,) = events([server.endpoint()], 1, 1)
    assert isinstance(event, Answered)
    assert event.answer.tokens == [4]
    assert len(server.asked) == 3


def test_a_full_server_is_waited_for_longer_than_a_broken_one(fake: Any) -> None:
    n = 0

    def reply(path: str, body: dict[str, Any]) -> Reply:
        nonlocal n
        n += 1
        return completion([4]) if n > QUICK.n_tries + 1 else (429, {})

    assert isinstance(events([fake(reply).endpoint()], 1, 1)[0], Answered)
    lost = events([fake(lambda path, body: (429, {})).endpoint()], 1, 1)
    assert [type(event) for event in lost] == [Lost]


def test_the_work_of_one_that_dies_goes_to_the_others(fake: Any) -> None:
    good = fake(lambda path, body: completion([4]))
    dying_answers = iter(range(3))
    dying = fake(lambda path, body: completion([5]) if next(dying_answers, None) is not None else (500, {}))
    found = events([good.endpoint(), dying.endpoint()], 40)
    answered = [event for event in found if isinstance(event, Answered)]
    assert sorted(event.number for event in answered) == list(range(40))
    assert sum(event.answer.tokens == [5] for event in answered) <= 3


def test_all_lost_says_so_once_each(fake: Any) -> None:
    broken = [fake(lambda path, body: (500, {})).endpoint() for _ in range(2)]
    found = events(broken, 5, 3)
    assert [type(event) for event in found] == [Lost, Lost]
    assert "500 (3 tries)" in found[0].reason  # type: ignore[union-attr]


def test_one_request_that_is_refused_ends_only_itself(fake: Any) -> None:
    counter = iter(range(10**6))
    server = fake(lambda path, body: (400, {"error": "no"}) if next(counter) % 3 == 0 else completion([4]))
    found = events([server.endpoint()], 9, 1)
    assert [type(event) for event in found].count(Refused) == 3
    assert [type(event) for event in found].count(Answered) == 6
    always = events([fake(lambda path, body: (400, {})).endpoint()], 9, 1)
    assert [type(event) for event in always] == [Refused] * (QUICK.n_refused - 1) + [Lost]


# -- with a target ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("m") / "tiny.gguf", n_layer=4)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path) as loaded:
        yield loaded


def asked(*texts: str) -> Conversation:
    return Conversation(tuple(Message("user", text) for text in texts), "test", "here")


TALKS = [asked("the cat"), asked("the rain fell", "and then?"), asked("on the tin roof"), asked("the river " * 200)]


@pytest.fixture
def session(model: Model) -> Iterator[TargetSession]:
    with TargetSession(model, SessionSettings(n_ctx=256, n_sequences=1, n_batch=64, taps=(1, 2, 3))) as opened:
        yield opened


def jobs() -> Jobs:
    return Jobs(TALKS, 1, Sampling(temperature=0.0, seed=3), True, set())


def test_samples_are_those_that_the_target_writes_itself(model: Model, session: TargetSession, fake: Any) -> None:
    """A server that gives the target's own tokens: with and without ids the samples are those of Generator."""
    local = {key: sample for sample, key in Generator(session, 12, 5).run(jobs())}
    eog = model.tokenizer.eog

    def write(prompt: list[int], n: int) -> list[int]:
        session_ids = next(s.tokens.tolist() for s in local.values() if s.tokens[: len(prompt)].tolist() == prompt)
        answer = session_ids[len(prompt) : len(prompt) + n]
        return answer[: next((i + 1 for i, t in enumerate(answer) if eog[t]), len(answer))]

    def reply(path: str, body: dict[str, Any]) -> Reply:
        tokens = write(body["prompt"], body["max_tokens"])
        return completion(tokens, finish="stop" if eog[tokens[-1]] else "length")

    remote = RemoteGenerator(session, [fake(reply).endpoint()], 2, 12, 5, patience=QUICK)
    found = {key: sample for sample, key in remote.run(jobs())}
    assert found.keys() == local.keys()
    assert remote.progress.n_skipped == 1  # the long one
    for key, sample in local.items():
        same(found[key], sample)


def same(a: Sample, b: Sample) -> None:
    assert (a.tokens.tolist(), a.mask.tolist(), a.source) == (b.tokens.tolist(), b.mask.tolist(), b.source)
    # Of the last token nothing counts. llama.cpp's own kernels round otherwise in a prefill.
    np.testing.assert_allclose(a.taps[:-1], b.taps[:-1], rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(a.teacher_logits, b.teacher_logits, rtol=5e-3, atol=5e-3)


def test_of_text_without_ids_only_what_is_certain_is_kept(model: Model, session: TargetSession, fake: Any) -> None:
    text = " the cat sat on the mat"
    ids = model.tokenizer.encode(text, add_special=False)

    def reply(path: str, body: dict[str, Any]) -> Reply:
        return completion(None, text, len(ids) + 1 + len(server.asked) % 2)

    server = fake(reply)
    remote = RemoteGenerator(session, [server.endpoint("openai")], 1, 60, 5)
    eight = Jobs([asked("the cat")], 8, Sampling(temperature=0.7), False, set())
    found = [sample for sample, _ in remote.run(eight)]
    assert (len(found), remote.n_differ) == (4, 4)
    for sample in found:
        assert sample.tokens[-len(ids) - 1 :].tolist() == [*ids, model.tokenizer.eos]


def test_another_model_is_found_out_by_what_it_writes(session: TargetSession, fake: Any) -> None:
    server = fake(lambda path, body: completion([7] * 60, finish="length"))
    remote = RemoteGenerator(session, [server.endpoint()], 2, 60, 5)
    kept = []
    with pytest.raises(UsageError, match=r"serves another model than tiny\.gguf: of its \d+ greedy tokens \d+ are"):
        kept += list(remote.run(jobs()))
    assert not kept
    outside = fake(lambda path, body: completion([10**6]))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        list(RemoteGenerator(session, [outside.endpoint()], 2, 60, 5).run(jobs()))


def test_without_endpoints_left_it_ends(session: TargetSession, fake: Any) -> None:
    said: list[str] = []
    broken = [fake(lambda path, body: (500, {})).endpoint() for _ in range(2)]
    remote = RemoteGenerator(session, broken, 1, 60, 5, say=said.append, patience=QUICK)
    with pytest.raises(DataError, match=r"no endpoint is left .*500.*run it again"):
        list(remote.run(jobs()))
    assert len(said) == 1
    assert "1 of 2 endpoints go on" in said[0]


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"n_vocab": 5}, "it has 5 tokens, not 320"),
        ({"n_vocab": 320, "tokenizer_hash": "00"}, "its tokenizer differs"),
        ({"n_ctx": 100}, r"a context of 100 tokens, and 256 are wanted: .*--ctx-size 100"),
        ({"owned_by": "llamacpp"}, "its tokenizer differs"),
        ({"owned_by": "else"}, "it makes 3 tokens of a text that has"),
    ],
)
def test_a_misfit_is_named_before_anything_is_written(model: Model, fake: Any, meta: dict[str, Any], says: str) -> None:
    meta = dict(meta)
    owner = meta.pop("owned_by", "localspec")

    def reply(path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/models":
            return 200, {"data": [{"id": "other", "owned_by": owner, "meta": meta}]}
        return 200, {"tokens": [1, 2], "choices": [{"text": "x"}], "usage": {"prompt_tokens": 3}}

    with pytest.raises(UsageError, match=says):
        connect([Endpoint(fake(reply).url)], model, 256, print, QUICK)


def test_absent_endpoints_are_left_out_or_all_that_there_are(model: Model, fake: Any) -> None:
    facts = {"tokenizer_hash": model.gguf.tokenizer_hash(), "n_vocab": model.n_vocab, "n_ctx": 256}
    server = fake(lambda path, body: (200, {"data": [{"id": "m", "owned_by": "localspec", "meta": facts}]}))
    said: list[str] = []
    absent, there = Endpoint("http://127.0.0.1:9"), Endpoint(f"{server.url}/v1")
    assert connect([absent, there], model, 256, said.append, QUICK) == [there]
    assert "http://127.0.0.1:9: Connection refused: left out" in said[0]
    with pytest.raises(UsageError, match="no endpoint answers"):
        connect([absent], model, 256, said.append, QUICK)
    locked = fake(lambda path, body: (401, {}))
    with pytest.raises(UsageError, match="refuses to work without a key"):
        connect([Endpoint(locked.url)], model, 256, said.append, QUICK)


# -- the command ------------------------------------------------------------------------------------------------------------


def test_two_servers_write_and_one_dies(path: Path, cli: Cli, cli_env: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the cat sat {i}"}) + "\n" for i in range(12)))
    out = tmp_path / "d"
    options = ["-m", path, "-f", prompts, "-o", out, "--max-tokens", "12", "-np", "3", "--taps", "1,2,3", "-t", "1", "-c",
               "128", "--endpoint-key", KEY]  # fmt: skip
    served = "-c", "128", "-np", "2", "--kernels", "stock", "--api-key", KEY
    with serving(cli_env, path, *served, key=KEY) as one, serving(cli_env, path, *served, key=KEY) as two:
        both = "--endpoint", one.url, "--endpoint", two.url
        done = cli("data", *options, *both)
        assert done.rc == 0, done.stderr
        assert "written by 2 endpoints, 3 at once each" in done.stderr
        assert len(Shards.open(out)) == 12
        assert min(server.metrics()["generated_tokens_total"] for server in (one, two)) > 0
        two.stop()
        done = cli("data", *options, *both, "--answers", "3", "--temp", "0.9")
        assert done.rc == 0, done.stderr
        assert f"{two.url}: Connection refused: left out" in done.stderr
        assert "24 answers to come" in done.stderr
        refused = cli("data", *options[:-1], "wrong-key", *both[:2])
        assert (refused.rc, "it refuses this key (401)" in refused.stderr) == (2, True)
        assert "wrong-key" not in refused.stderr + done.stderr
    shards = Shards.open(out)
    shards.verify()
    keys = shards.keys()
    assert len(keys) == len(set(keys)) == 36
    # What was written greedily over there is what the target writes here.
    own = cli("data", *options[:-2], "-o", tmp_path / "own", "--kernels", "stock")
    assert own.rc == 0, own.stderr
    mine = Shards.open(tmp_path / "own")
    here = {key: mine.sample(i).tokens.tolist() for i, key in enumerate(mine.keys())}
    there = {key: shards.sample(i).tokens.tolist() for i, key in enumerate(keys)}
    assert {key: there[key] for key in here} == here


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--endpoint", "localhost:1"], "give a URL such as"),
        (["--endpoint-key", "k"], "--endpoint-key is for --endpoint"),
        (["--endpoint", "http://127.0.0.1:9", "--endpoint-key", " "], "no key given"),
    ],
)
def test_wrong_options_are_said_in_one_line(cli: Cli, path: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    done = cli("data", "-m", path, "-f", "x.jsonl", "-o", tmp_path / "d", *arguments)
    assert (done.rc, says in done.stderr, done.stderr.count("\n")) == (2, True, 1)
    assert not (tmp_path / "d").exists()
