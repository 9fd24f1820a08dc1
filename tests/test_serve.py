"""The server as its clients see it: a process of its own, OpenAI's client, and sockets where that client is too polite."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from localspec import native
from localspec.model import Model
from tests.conftest import Cli
from tests.gguf_maker import tiny_llama

PROMPTS = [
    "List the days of the week.",
    "What is the capital of France?",
    "Repeat after me: the rain in Spain stays mainly in the plain.",
    "Write a haiku about the sea.",
    "Name five animals.",
    "Write a Python function that adds two numbers.",
]
N = 24
KEY = "a-key"


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Poll; fails where it never comes true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


@dataclass
class Server:
    """A running `localspec serve`."""

    process: subprocess.Popen[str]
    url: str
    model: str
    key: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key or "none", max_retries=0, timeout=120)

    def chat(self, prompt: str, **settings: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": N} | settings
        messages = [{"role": "user", "content": prompt}]
        return self.client().chat.completions.create(model=self.model, messages=messages, **settings)

    def complete(self, prompt: Any = "Once upon a time", **settings: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": N} | settings
        return self.client().completions.create(model=self.model, prompt=prompt, **settings)

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.url}{path}", content=content, headers=headers, timeout=60)

    def metrics(self) -> dict[str, float]:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        answer = httpx.get(f"{self.url}/metrics", headers=headers)
        assert answer.status_code == 200
        rows = [line.split() for line in answer.text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("localspec_"): float(value) for name, value in rows}

    def stream(self, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
        """Send a streaming completion over a bare socket."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(60)
        sock.connect(self.address)
        data = json.dumps({"model": self.model, "stream": True, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


Serve = Callable[..., Server]


@contextlib.contextmanager
def serving(env: dict[str, str], model: Path, *args: object, key: str | None = None) -> Iterator[Server]:
    command = [sys.executable, "-m", "localspec", "serve", "-m", str(model), "--port", "0", "-t", "1", *map(str, args)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env, preexec_fn=native.unbound
    )
    try:
        said = ""
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            found = re.search(r"listening on (http://\S+)", line)
            if found:
                break
        else:
            pytest.fail(f"the server did not start: {said}")
        yield Server(process, found[1], model.stem, key)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture
def serve(cli_env: dict[str, str]) -> Iterator[Serve]:
    """Starts servers of a test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda model, *args, **kw: stack.enter_context(serving(cli_env, model, *args, **kw))


def test_a_trace_tells_every_step(serve: Serve, smollm2: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    server = serve(smollm2, "-np", 2, "-c", 512, "--trace", trace)
    answer = server.client().completions.create(model=server.model, prompt="One, two,", max_tokens=12, temperature=0)
    assert answer.usage is not None
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(block["gained"] for step in steps for block in step["blocks"]) == answer.usage.completion_tokens
    assert all(step["why"] for step in steps)


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with its draft, six texts at once, behind a key."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LOCALSPEC_")}
    env |= {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("home")), "LOCALSPEC_API_KEY": KEY}
    # --no-spec-adapt: whether anything is drafted must not depend on how busy the machine is
    with serving(env, smollm2, "-np", 6, "-c", 512, "--max-tokens", 64, "--no-spec-adapt", key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that never ends a text: what it is asked for lasts as long as its context."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=1 << 16)


ENDLESS = {"prompt": "abc", "max_tokens": 30000, "temperature": 0, "stop": ["\0never"]}


# -- the text ---------------------------------------------------------------------------------------------------------------


# A process of its own, because kernels once registered stay: plain decoding, one text after another.
ALONE = """
import json, sys
from localspec.accept import Sampling
from localspec.cli.loading import open_engine
from localspec.cli.options import ModelChoice
from localspec.engine import Request
from localspec.target import SessionSettings
from localspec.template import ChatTemplate
path, n, *prompts = sys.argv[1:]
loaded = open_engine(ModelChoice(path, None, SessionSettings(n_ctx=512, n_threads=1), 0, spec_type="none"))
texts = []
for prompt in prompts:
    request = Request(ChatTemplate.of(loaded.model).encode([{"role": "user", "content": prompt}]), Sampling(temperature=0), int(n))
    texts.append("".join(piece.text for step in loaded.engine.generate(request) for piece in step.pieces))
    loaded.engine.finish(0)
print(json.dumps([texts, loaded.kernels]))
"""  # noqa: E501


def test_six_at_once_get_what_the_engine_writes_alone(server: Server, smollm2: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(smollm2), str(N), *PROMPTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=native.unbound)
    wanted, kernels = json.loads(done.stdout)
    if kernels != "localspec":
        pytest.skip("stock kernels: a row depends on what else is in the batch")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(server.chat, PROMPTS))
    assert [answer.choices[0].message.content for answer in answers] == wanted
    assert len(set(wanted)) == len(wanted)
    after = server.metrics()
    assert after["drafted_tokens_total"] >= after["accepted_tokens_total"] > 0


def test_usage_and_timings_count_what_was_done(server: Server) -> None:
    answer = server.chat(PROMPTS[0], max_tokens=64)
    usage, timings = answer.usage, answer.timings
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert timings["predicted_n"] == usage.completion_tokens
    assert timings["prompt_n"] + timings["cache_n"] == usage.prompt_tokens - 1
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    again = server.chat(PROMPTS[0], max_tokens=64)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens // 2


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_stream_is_the_same_text_in_pieces(server: Server, temperature: float) -> None:
    whole = server.chat(PROMPTS[2], temperature=temperature, seed=5)
    options = {"include_usage": True}
    chunks = list(server.chat(PROMPTS[2], temperature=temperature, seed=5, stream=True, stream_options=options))
    *pieces, last, counts = chunks
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert len(pieces) > 3
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert counts.choices == []
    assert counts.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_completions_take_text_and_tokens(server: Server, smollm2: Path) -> None:
    with Model(smollm2) as model:
        ids = model.tokenizer.encode("The capital of France")
    by_text = server.complete("The capital of France").choices[0].text
    assert by_text == server.complete(ids).choices[0].text
    assert by_text == "".join(c.choices[0].text for c in server.complete(ids, stream=True))
    assert "Paris" in by_text


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    text = server.complete("The days are Monday, Tuesday,").choices[0].text
    stop = text[10:14]
    cut = server.complete("The days are Monday, Tuesday,", stop=[stop, "\0"]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    parts = server.complete("The days are Monday, Tuesday,", stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in parts) == cut.text


def test_a_seed_repeats_the_text_and_no_seed_does_not(server: Server) -> None:
    hot = {"temperature": 1.5, "top_p": 1}
    assert server.complete(seed=3, **hot).choices[0].text == server.complete(seed=3, **hot).choices[0].text
    assert len({server.complete(**hot).choices[0].text for _ in range(3)}) > 1


def test_max_tokens_and_the_servers_own_limit(server: Server) -> None:
    assert server.complete(max_tokens=3).usage.completion_tokens == 3
    answer = server.complete(max_tokens=400)
    assert answer.usage.completion_tokens <= 64
    assert server.complete(max_tokens=0).choices[0].text == ""
    chat = server.chat(PROMPTS[0], max_tokens=openai.omit, max_completion_tokens=2)
    assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (2, "length")


PROBABILITIES = """
import json, sys
from localspec.cli.loading import open_target
from localspec.cli.options import ModelChoice
from localspec.target import SessionSettings
from pathlib import Path
import numpy as np
path, ids, n = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model, session = open_target(ModelChoice(path, None, SessionSettings(n_ctx=512, n_threads=1), 0), Path(path))
rows = session.decode([(0, ids)]).logits.astype(np.float64)
rows -= rows.max(axis=1, keepdims=True)
rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
at = range(n - 1, len(ids) - 1)
print(json.dumps([[float(rows[i, ids[i + 1]]) for i in at], [int(rows[i].argmax()) for i in at]]))
"""


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_logprobs_are_the_targets_own(server: Server, smollm2: Path, temperature: float) -> None:
    prompt = "The capital of France"
    asked = {"temperature": temperature, "seed": 7, "max_tokens": 20}
    whole = server.complete(prompt, logprobs=3, **asked).choices[0]
    assert whole.text == server.complete(prompt, **asked).choices[0].text
    got = whole.logprobs
    assert "".join(got.tokens) == whole.text
    assert [whole.text[i:].startswith(token) for i, token in zip(got.text_offset, got.tokens)] == [True] * len(got.tokens)
    with Model(smollm2) as model:
        encode = model.tokenizer.encode
        start, pieces = encode(prompt), [model.tokenizer.piece(i).decode("utf-8", "replace") for i in range(model.n_vocab)]
        ids = start + [pieces.index(token) for token in got.tokens]
    command = [sys.executable, "-c", PROBABILITIES, str(smollm2), json.dumps(ids), str(len(start))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=native.unbound)
    wanted, best = json.loads(done.stdout)
    assert got.token_logprobs == pytest.approx(wanted, abs=0.02)
    for top, first, token, value in zip(got.top_logprobs, best, got.tokens, got.token_logprobs):
        assert len(top) == 3
        assert max(top, key=top.get) == pieces[first]
        assert top.get(token, value) == value
    if temperature == 0:
        assert got.tokens == [pieces[i] for i in best]


def test_logprobs_of_a_stream_and_of_a_stopped_text(server: Server) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = server.chat(PROMPTS[0], **asked).choices[0]
    content = whole.logprobs.content
    assert "".join(entry.token for entry in content) == whole.message.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
    assert bytes(content[3].bytes).decode() == content[3].token
    streamed = [c.choices[0].logprobs for c in server.chat(PROMPTS[0], stream=True, **asked)]
    tokens = [entry.token for part in streamed if part for entry in part.content]
    assert tokens == [entry.token for entry in content]
    stop = whole.message.content[20:24]
    cut = server.chat(PROMPTS[0], stop=stop, **asked).choices[0]
    assert cut.message.content.startswith("".join(entry.token for entry in cut.logprobs.content))
    assert len(cut.logprobs.content) < len(content)
    bare = server.chat(PROMPTS[0], logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * len(content)


# -- texts held to a form ---------------------------------------------------------------------------------------------------


ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "diet": {"enum": ["plants", "meat", "both"]},
    },
    "required": ["name", "legs", "diet"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.2, "seed": 4, "top_p": 1}])
def test_a_json_schema_holds_the_answer(server: Server, settings: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": ANIMAL}}
    prompt = "Describe a spider as JSON with name, legs and diet."
    whole = server.chat(prompt, response_format=form, max_tokens=60, **settings)
    animal = json.loads(whole.choices[0].message.content)
    assert list(animal) == ["name", "legs", "diet"]
    assert animal["diet"] in ("plants", "meat", "both")
    assert 0 <= animal["legs"] <= 8
    assert whole.choices[0].finish_reason == "stop"
    if not settings:
        return
    parts = server.chat(prompt, extra_body={"json_schema": ANIMAL}, max_tokens=60, stream=True, **settings)
    assert "".join(c.choices[0].delta.content or "" for c in parts) == whole.choices[0].message.content


def test_any_json_object(server: Server) -> None:
    form = {"response_format": {"type": "json_object"}}
    assert server.complete("One key: ", extra_body=form, max_tokens=4).choices[0].text.startswith("{")


def test_sixteen_grammars_at_once_do_not_mix(server: Server) -> None:
    def ask(i: int) -> tuple[str, str]:
        grammar = None if i % 4 == 3 else f'root ::= "{i}" [a-{"abcdefgh"[i % 8]} ]{{8}} "!"'
        settings = {"temperature": i % 2, "seed": i, "max_tokens": 16, "extra_body": {"grammar": grammar}}
        return server.complete(PROMPTS[i % 6], **settings).choices[0].text, grammar or ""

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    for i, (text, grammar) in enumerate(answers):
        if grammar:
            assert re.fullmatch(rf"{i}[a-{'abcdefgh'[i % 8]} ]{{8}}!", text), (i, text)
    assert answers[1] == ask(1)  # alone, too


# -- what is refused --------------------------------------------------------------------------------------------------------


def test_without_the_key_there_is_only_health(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    for path in ("/v1/models", "/metrics"):
        assert httpx.get(server.url + path).status_code == 401
    answer = httpx.post(server.url + "/v1/completions", content=b"no json")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert [m.id for m in server.client().models.list()] == [server.model]
    assert server.client().models.retrieve(server.model).id == server.model


def test_another_model_is_not_here(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="SmolLM2") as error:
        server.client().completions.create(model="gpt-none", prompt="x")
    assert error.value.code == "model_not_found"
    assert server.post({}, "/v1/embeddings").status_code == 404
    assert httpx.get(server.url + "/v1/completions").status_code in (401, 405)


USER = [{"role": "user", "content": "Hi"}]
BAD = [
    ([], "JSON object"),
    ({}, "messages"),
    ({"messages": []}, "at least one"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ({"messages": USER, "temperatur": 1}, "unknown field 'temperatur'"),
    ({"messages": USER, "temperature": "hot"}, "temperature must be a number"),
    ({"messages": USER, "temperature": True}, "temperature must be a number"),
    ({"messages": USER, "temperature": float("nan")}, "temperature must be between"),
    ({"messages": USER, "top_p": 1.5}, "top_p must be between"),
    ({"messages": USER, "top_k": 1.5}, "top_k must be a whole number"),
    ({"messages": USER, "seed": -2}, "seed must be between"),
    ({"messages": USER, "seed": 1 << 64}, "seed must be between"),
    ({"messages": USER, "max_tokens": -1}, "max_tokens must be between"),
    ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 1}, "not both"),
    ({"messages": USER, "stop": ["x"] * 17}, "too many"),
    ({"messages": USER, "stop": [""]}, "1 to"),
    ({"messages": USER, "stop": 3}, "stop must be"),
    ({"messages": USER, "stream": 1}, "stream must be true or false"),
    ({"messages": USER, "stream_options": {"include_usage": True}}, "stream=true"),
    ({"messages": USER, "n": 2}, "does not support n=2"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "does not support tools"),
    ({"messages": USER, "logprobs": 1}, "logprobs must be true or false"),
    ({"messages": USER, "top_logprobs": 3}, "needs logprobs=true"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs must be between"),
    ({"messages": USER, "logit_bias": {"1": 5}}, "does not support logit_bias"),
    ({"messages": USER, "response_format": {"type": "json_schema", "json_schema": {}}}, "json_schema"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "tokens"),
    ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "too much"),
    ({"messages": USER, "response_format": "json"}, "type text, json_object or json_schema"),
    ({"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "'not'"),
    ({"messages": USER, "response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "not both"),
    ({"messages": USER, "json_schema": []}, "json_schema must be a JSON schema"),
    ({"messages": USER, "json_schema": {"type": "string", "maxLength": 9999}}, "no repetition"),
    ({"messages": USER, "grammar": 5}, "grammar must be a string"),
    ({"messages": USER, "grammar": "root ::= nothing"}, "'nothing', which is not defined"),
    ({"messages": USER, "grammar": 'root ::= root "a"'}, "can begin with itself"),
    ({"messages": USER, "grammar": "root ::= " + "(" * 9999}, "nested"),
    ({"messages": USER, "grammar": 'root ::= "a" [z-a]'}, "allows no token"),
    (b"{", "not valid JSON"),
    (b"[" * 200_000, "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_told_what_is_wrong(server: Server, body: Any, message: str) -> None:
    answer = server.post(body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ([], "text or a list"), ([-1], "no token"), ([10**9], "no token"), (["a", "b"], "one by one"),
     ([1.5], "text or a list"), (None, "text or a list")],
)  # fmt: skip
def test_a_bad_prompt(server: Server, prompt: Any, message: str) -> None:
    answer = server.post({"prompt": prompt}, "/v1/completions")
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_nulls_and_harmless_fields_are_no_requests(server: Server) -> None:
    harmless = {"n": 1, "tools": None, "logprobs": False, "user": "me", "response_format": {"type": "text"}, "stop": None}
    parts = [{"type": "text", "text": "Hi"}]
    body = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], "max_tokens": 2}
    assert server.post(body | harmless).status_code == 200


def test_a_body_may_not_be_endless(server: Server) -> None:
    answer = server.post(b" " * (9 << 20))
    assert answer.status_code == 413
    assert "bytes" in answer.json()["error"]["message"]


def test_only_its_own_names_are_answered_and_no_origin_unless_asked(serve: Serve, slow_model: Path) -> None:
    page = "http://localhost:3000"
    open_to = serve(slow_model, "-c", 256, "--allowed-host", "My-PC.local", "--cors-origin", page)
    for host, status in (
        ("localhost", 200), ("LOCALHOST:99", 200), ("127.0.0.1:8080", 200), ("[::1]:1", 200), ("my-pc.local:80", 200),
        ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example:8080", 403), ("[::2]", 403),
        ("", 403),
    ):  # fmt: skip
        answer = httpx.get(f"{open_to.url}/v1/models", headers={"host": host})
        assert answer.status_code == status, host
        assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"
    for origin, allowed in ((page, page), ("http://evil.example", None)):
        headers = {"origin": origin}
        assert httpx.get(f"{open_to.url}/v1/models", headers=headers).headers.get("access-control-allow-origin") == allowed
        asks = headers | {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-y"}
        answer = httpx.options(f"{open_to.url}/v1/chat/completions", headers=asks)
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert (answer.status_code == 200) == (allowed is not None)


def test_without_an_origin_allowed_no_page_reads_anything(server: Server) -> None:
    answer = httpx.get(f"{server.url}/health", headers={"origin": "http://localhost:3000"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.get(f"{server.url}/health", headers={"host": "evil.example"}).status_code == 403


# -- many, slow and vanished clients ----------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_a_vanished_client_makes_room(serve: Serve, slow_model: Path) -> None:
    server = serve(slow_model, "-np", 1, "--queue", 1, "-c", 32768, "--spec-type", "none")
    first = server.stream(ENDLESS)
    assert b"200 OK" in first.recv(100)
    wait_until(lambda: server.metrics()["requests_running"] == 1)
    second = server.stream(ENDLESS)
    wait_until(lambda: server.metrics()["requests_waiting"] == 1)
    with pytest.raises(openai.RateLimitError, match="try again") as error:
        server.complete()
    assert error.value.response.headers["retry-after"] == "1"
    assert server.metrics()["requests_refused_total"] == 1
    first.close()
    wait_until(lambda: server.metrics()["requests_waiting"] == 0)
    assert server.metrics()["requests_running"] == 1
    second.close()
    wait_until(lambda: server.metrics()["requests_running"] == 0)
    assert server.metrics()["requests_cancelled_total"] == 2
    assert server.complete(max_tokens=2).usage.completion_tokens == 2


def test_connections_without_a_request_shut_nobody_out(serve: Serve, slow_model: Path) -> None:
    server = serve(slow_model, "-np", 1, "--queue", 1, "-c", 1024, "--spec-type", "none")
    with contextlib.ExitStack() as idle:
        for _ in range(150):
            idle.enter_context(socket.create_connection(server.address)).sendall(b"POST /v1/chat")
        assert server.complete(max_tokens=2).usage.completion_tokens == 2
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_who_goes_while_waiting_for_a_whole_answer_is_noticed_too(serve: Serve, slow_model: Path) -> None:
    server = serve(slow_model, "-np", 1, "-c", 32768)
    gone = server.stream({**ENDLESS, "stream": False})
    wait_until(lambda: server.metrics()["requests_running"] == 1)
    gone.close()
    wait_until(lambda: server.metrics()["requests_running"] == 0)
    assert server.metrics()["requests_cancelled_total"] == 1


def test_a_client_that_reads_nothing_holds_up_nobody(serve: Serve, slow_model: Path) -> None:
    server = serve(slow_model, "-np", 2, "-c", 32768, "--spec-type", "none")
    stuck = server.stream(ENDLESS, receive_bytes=2048)
    wait_until(lambda: server.metrics()["requests_running"] == 1)
    for _ in range(3):
        assert server.complete(max_tokens=8).usage.completion_tokens == 8
    stuck.close()


# -- starting and ending ----------------------------------------------------------------------------------------------------


def test_sigterm_lets_a_stream_end(serve: Serve, smollm2: Path) -> None:
    server = serve(smollm2, "-np", 1, "--grace", 60)
    whole = server.complete(max_tokens=60).choices[0].text
    stream = server.complete(max_tokens=60, stream=True)
    text = next(iter(stream)).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    reason = None
    for chunk in stream:
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    assert (text, reason) == (whole, "length")
    assert server.process.wait(60) == 0


def test_sigterm_ends_what_does_not_end_in_time(serve: Serve, slow_model: Path) -> None:
    server = serve(slow_model, "-np", 1, "-c", 32768, "--grace", 0.2, "--spec-type", "none")
    stream = server.stream(ENDLESS)
    assert b"200 OK" in stream.recv(100)
    waiting = server.stream(ENDLESS)
    wait_until(lambda: server.metrics()["requests_waiting"] == 1)
    server.process.send_signal(signal.SIGTERM)
    for sock in (stream, waiting):
        rest = b"".join(iter(lambda s=sock: s.recv(1 << 16), b""))  # type: ignore[misc]
        assert b"shutting down" in rest
        assert b"[DONE]" not in rest
    assert server.process.wait(60) == 0


def test_two_interrupts_end_at_once(serve: Serve, slow_model: Path) -> None:
    server = serve(slow_model, "-np", 1, "-c", 32768, "--grace", 600, "--spec-type", "none")
    stream = server.stream(ENDLESS)
    assert b"200 OK" in stream.recv(100)
    wait_until(lambda: server.metrics()["requests_running"] == 1)  # what waits would end with the first one
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert server.process.poll() is None
    assert server.stop(signal.SIGINT) == 130


def test_an_idle_server_ends_with_code_0(serve: Serve, slow_model: Path) -> None:
    assert serve(slow_model, "-c", 256).stop(signal.SIGINT) == 0


def test_a_port_in_use_is_one_line(cli: Cli, slow_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        result = cli("serve", "-m", slow_model, "--port", taken.getsockname()[1])
    assert result.rc == 2
    assert result.stderr.count("\n") == 1
    assert "--port" in result.stderr


def test_options_that_make_no_sense(cli: Cli, slow_model: Path) -> None:
    for args, message in (
        (["--host", "no.such.host.invalid"], "--host"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "with blank"], "--api-key"),
        (["--alias", " "], "--alias"),
        (["--allowed-host", "http://x"], "--allowed-host"),
        (["--cors-origin", "http://x/path"], "--cors-origin"),
        (["-np", 0], "-np"),
        (["-m", "/no/such.gguf"], "no/such"),
    ):
        result = cli("serve", *([] if "-m" in args else ["-m", slow_model]), "--port", 0, *args)
        assert (result.rc, result.stderr.count("\n")) == (2, 1), result.stderr
        assert message in result.stderr


def test_missing_libraries_are_named_with_what_to_do(cli: Cli, tmp_path: Path, slow_model: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'uvicorn' else find(name, package)\n"
    )
    result = cli("serve", "-m", slow_model, env={"PYTHONPATH": str(tmp_path / "hide")})
    assert result.rc == 2
    assert result.stderr == "localspec: error: serve needs uvicorn: pip install uvicorn\n"
