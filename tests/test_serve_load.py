"""docs/serve_load.py: what it takes for wrong. How fast serve is, is a run of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "docs" / "serve_load.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("serve_load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


class Server(ThreadingHTTPServer):
    """Answers with the events that `say` gives for a request's body."""

    say: Any = None
    status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.status)
        self.end_headers()
        for event in self.server.say(body):
            self.wfile.write(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def answer(body: dict[str, Any], text: str = "", ids: tuple[str, ...] = ("a", "a"), n: int = 2) -> list[Any]:
    words = text or body["messages"][0]["content"]
    chunks = [{"id": i, "choices": [{"delta": {"content": part}}]} for i, part in zip(ids, (words[:2], words[2:]))]
    timings = {"predicted_n": n, "predicted_ms": 500.0, "draft_n": 3, "draft_n_accepted": 1}
    return [*chunks, {"id": ids[0], "choices": [], "usage": {"completion_tokens": n}, "timings": timings}, b"[DONE]"]


def test_answers_are_counted_and_compared_with_those_alone(script: Any, server: Server) -> None:
    server.say = answer
    asked = script.questions(["one", "two", "three"])
    assert asked == script.questions(["one", "two", "three"])
    assert {q.temperature for q in asked} == set(script.TEMPERATURES)
    load = script.Load("x")
    script.press(server.server_port, load, asked, 3, 0.1)
    assert load.n_asked == load.n_answered >= 3
    assert (load.wrong, load.n_tokens) == ([], 2 * load.n_answered)
    greedy = {q.number for q in asked if q.temperature == 0}
    assert set(load.greedy) <= greedy
    script.alone(server.server_port, load, asked)
    assert (load.n_other, load.wrong) == (0, [])
    assert set(load.decoded.values()) <= {(2, 0.5)}
    server.say = lambda body: answer(body, "another text")
    script.alone(server.server_port, load, asked)
    assert load.n_other == len(load.greedy) > 0


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"ids": ("a", "b")}, "2 answers in one stream"),
        ({"n": 99}, "99 tokens, asked for 4"),
        ({"cut": 1}, "ended early"),
        ({"status": 500}, "status 500"),
    ],
)
def test_what_is_wrong_with_an_answer(script: Any, server: Server, change: dict[str, Any], needle: str) -> None:
    cut = change.pop("cut", None)
    server.status = change.pop("status", 200)
    server.say = lambda body: answer(body, **change)[:cut]
    load = script.Load("x")
    script.ask(server.server_port, script.Question(3, "hello", 4, 0.0), load, threading.Lock())
    assert (load.n_asked, load.n_answered, len(load.wrong)) == (1, 0, 1)
    assert load.wrong[0].startswith("question 3: ")
    assert needle in load.wrong[0]


def test_two_greedy_answers_that_differ(script: Any, server: Server) -> None:
    load = script.Load("x")
    for text in ("some text", "other text"):
        server.say = lambda body, text=text: answer(body, text)
        script.ask(server.server_port, script.Question(3, "hello", 4, 0.0), load, threading.Lock())
    assert load.wrong == ["question 3: two greedy answers differ"]


def test_what_is_missing_is_said_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--target", str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"serve_load: {tmp_path / 'none'}: no such file\n"
