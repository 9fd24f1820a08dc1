"""`localspec serve` under load, beside llama-server of the same commit: 16 clients that ask one thing after the other.

    python docs/serve_load.py --llama-server PATH --target T.gguf --prompts dev.jsonl --seconds 120 [--draft D.gguf]

Four servers are started in turn, each with and without drafting: localspec's and llama-server's. Each is asked by as many
clients as it writes texts at once, for so many seconds; the clients' prompts, lengths of answers and temperatures (0 and
0.8) are mixed, and the same for all servers. Asserted of localspec: every request is answered, each answer belongs to its
question, and every greedy answer is the one that the same prompt gets when it is computed alone. (llama-server's answers
are compared with those of its own single client and only counted.) Then one client alone, and `localspec run` with the same
prompts beside it. Prints a table and a line of JSON; exit code 1 where something was lost or mixed up, 2 where something is
missing.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from localspec import native
from localspec.errors import LocalspecError, UsageError
from localspec.prompts import BUILT_IN, read_prompts, spread
from localspec.report import rate

LENGTHS = (16, 48, 96, 160)
TEMPERATURES = (0.0, 0.8)
_START_S = 180.0
_ANSWER_S = 600.0


@dataclass(frozen=True)
class Question:
    """What a client asks; the `number` decides all of it."""

    number: int
    prompt: str
    max_tokens: int
    temperature: float

    def body(self) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.prompt}], "max_tokens": self.max_tokens, "seed": self.number,
            "temperature": self.temperature, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass
class Load:
    """What one server did. Rates count tokens that reached a client, by the clock."""

    name: str
    n_asked: int = 0
    n_answered: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    waits: list[float] = field(default_factory=list)  # until the first text, seconds
    gaps: list[float] = field(default_factory=list)  # the longest pause in each text, seconds
    greedy: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    n_other: int = 0  # greedy answers that are not those computed alone
    single: float = 0.0  # tok/s of one client
    decoded: dict[int, tuple[int, float]] = field(default_factory=dict)  # question -> tokens and seconds of decoding

    @property
    def rate(self) -> float:
        return rate(self.n_tokens, self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.name, "asked": self.n_asked, "answered": self.n_answered, "tokens": self.n_tokens,
            "seconds": self.seconds, "tok_per_s": self.rate, "single_client_tok_per_s": self.single,
            "first_text_s": _at(self.waits, 0.5), "first_text_s_95": _at(self.waits, 0.95),
            "longest_pause_s": _at(self.gaps, 0.5), "longest_pause_s_95": _at(self.gaps, 0.95),
            "acceptance": self.n_accepted / self.n_drafted if self.n_drafted else None,
            "greedy_compared": len(self.greedy), "greedy_other": self.n_other, "wrong": self.wrong[:20],
        }  # fmt: skip

    def row(self) -> str:
        return (
            f"{self.name:<22} {self.n_answered:>8} {self.n_tokens:>8} {self.rate:>8.1f} {self.single:>8.1f} "
            f"{_at(self.waits, 0.5):>8.2f} {_at(self.waits, 0.95):>8.2f} {_at(self.gaps, 0.5):>8.2f} "
            f"{_at(self.gaps, 0.95):>8.2f} {len(self.greedy):>7} {self.n_other:>6} {len(self.wrong):>6}"
        )


HEAD = (
    f"{'':<22} {'answers':>8} {'tokens':>8} {'tok/s':>8} {'alone':>8} {'first s':>8} {'95 %':>8} {'pause s':>8} {'95 %':>8} "
    f"{'greedy':>7} {'other':>6} {'wrong':>6}"
)


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="without it: localspec's servers alone")
    parser.add_argument("--target", required=True, type=Path, metavar="FILE")
    parser.add_argument("--draft", type=Path, metavar="FILE", help="without one: what `localspec serve` takes by itself")
    parser.add_argument("--spec-type", default="auto", metavar="TYPE", help="[%(default)s]")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines [six of localspec's own]")
    parser.add_argument("--limit", type=int, default=48, metavar="N", help="prompts, spread over the sources [%(default)s]")
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="of each server [%(default)s]")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="0: one per core [%(default)s]")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048, metavar="N", help="of each text [%(default)s]")
    parser.add_argument("--only", metavar="NAME,...", help="servers: localspec, localspec-draft, llama, llama-draft")
    return parser.parse_args()


# -- servers -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(command: list[str]) -> Iterator[int]:
    """The port of a server that runs until the end. Raises LocalspecError with its last line where it doesn't start."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, preexec_fn=native.unbound,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + _START_S
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = log.read().decode("utf-8", "replace").strip().split("\n")
                    raise LocalspecError(f"{command[0]} does not start: {lines[-1][-300:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> command line, without host and port."""
    ours = [sys.executable, "-m", "localspec", "serve", "-m", str(args.target), "-c", str(args.ctx_size)]
    ours += ["-np", str(args.clients), "-t", str(args.threads)]
    drafting = ["--spec-type", args.spec_type, *(["--draft", str(args.draft)] if args.draft else [])]
    found = {"localspec": [*ours, "--spec-type", "none"], "localspec-draft": [*ours, *drafting]}
    if args.llama_server:
        threads = args.threads or native.default_threads()
        theirs = [str(args.llama_server), "-m", str(args.target), "-c", str(args.ctx_size * args.clients)]
        theirs += ["-np", str(args.clients), "-t", str(threads), "--no-webui", "--fit", "off"]
        found |= {"llama": theirs, "llama-draft": [*theirs, *_llama_draft(args)]}
    wanted = args.only.split(",") if args.only else list(found)
    unknown = [name for name in wanted if name not in found]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: there are {', '.join(found)}")
    return {name: found[name] for name in wanted}


def _llama_draft(args: argparse.Namespace) -> list[str]:
    """The flags that make llama-server draft as `localspec serve` does."""
    from localspec.cli.loading import pick
    from localspec.cli.options import ModelChoice
    from localspec.peer import draft_arguments
    from localspec.target import SessionSettings

    choice = ModelChoice(str(args.target), None, SessionSettings(), 0, spec_type=args.spec_type)
    name, draft = pick(choice, args.draft, args.target)
    settings = {"draft": str(draft) if draft else None, "spec_type": name, "adapt": True, "n_max": 8, "p_min": 0.0}
    return draft_arguments(settings | {"n_gpu_layers_draft": 0})


# -- clients -----------------------------------------------------------------------------------------------------------


def ask(port: int, question: Question, load: Load, lock: threading.Lock) -> None:
    """One answer, streamed; what is wrong with it goes into `load`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    text, last, times = "", {}, [time.perf_counter()]
    ended, ids = False, set()
    wrong = ""
    try:
        body = json.dumps(question.body())
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read()[:200]!r}")
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                ended = True
                break
            chunk = json.loads(line[6:])
            ids.add(chunk.get("id"))
            last |= {name: chunk[name] for name in ("usage", "timings") if chunk.get(name)}
            for choice in chunk.get("choices", ()):
                piece = choice.get("delta", {}).get("content")
                if piece:
                    text += piece
                    times.append(time.perf_counter())
        if not ended or "usage" not in last:
            wrong = "the stream ended early"
        elif len(ids) != 1:
            wrong = f"chunks of {len(ids)} answers in one stream"
        elif not 1 <= last["usage"]["completion_tokens"] <= question.max_tokens:
            wrong = f"{last['usage']['completion_tokens']} tokens, asked for {question.max_tokens}"
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    with lock:
        load.n_asked += 1
        if wrong:
            load.wrong.append(f"question {question.number}: {wrong}")
            return
        load.n_answered += 1
        load.n_tokens += last["usage"]["completion_tokens"]
        timings = last.get("timings", {})
        load.decoded[question.number] = timings.get("predicted_n", 0), timings.get("predicted_ms", 0.0) / 1e3
        load.n_drafted += timings.get("draft_n", 0)
        load.n_accepted += timings.get("draft_n_accepted", 0)
        if len(times) > 1:
            load.waits.append(times[1] - times[0])
            load.gaps.append(max((b - a for a, b in pairwise(times[1:])), default=0.0))
        if question.temperature == 0:
            before = load.greedy.setdefault(question.number, text)
            if before != text:
                load.wrong.append(f"question {question.number}: two greedy answers differ")


def questions(prompts: list[str]) -> list[Question]:
    """Every prompt with some length and temperature, the same ones each time."""
    choose = random.Random(7)
    found = []
    for number in range(4 * len(prompts)):
        temperature = TEMPERATURES[number % 2]
        found.append(Question(number, prompts[number % len(prompts)], choose.choice(LENGTHS), temperature))
    choose.shuffle(found)
    return found


def press(port: int, load: Load, asked: list[Question], n_clients: int, seconds: float) -> None:
    """So many clients for so long. Answers under way at the end are waited for, and count with their time."""
    lock, began = threading.Lock(), time.perf_counter()
    at = iter(range(10**9))

    def client() -> None:
        while time.perf_counter() - began < seconds:
            with lock:
                number = next(at)
            ask(port, asked[number % len(asked)], load, lock)

    threads = [threading.Thread(target=client) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.seconds = time.perf_counter() - began


def alone(port: int, load: Load, asked: list[Question]) -> None:
    """Each greedy question of `load` again, with nobody else there; and the rate of a single client."""
    lock, check = threading.Lock(), Load(load.name)
    tokens, seconds = 0, 0.0
    for question in [q for q in asked if q.number in load.greedy]:
        began, before = time.perf_counter(), check.n_tokens
        ask(port, question, check, lock)
        tokens, seconds = tokens + check.n_tokens - before, seconds + time.perf_counter() - began
        load.n_other += check.greedy.get(question.number) != load.greedy[question.number]
    load.wrong += check.wrong
    load.decoded = check.decoded
    load.single = rate(tokens, seconds)


def computed_alone(args: argparse.Namespace, load: Load, asked: list[Question], most: int = 4) -> tuple[float, float]:
    """Hold some greedy answers against `localspec run`, a process for each: tok/s of decoding of serve (a single client)
    and of run, on the same questions."""
    ours, theirs = [0, 0.0], [0, 0.0]
    for question in [q for q in asked if q.number in load.decoded][:most]:
        command = [sys.executable, "-m", "localspec", "run", "-m", str(args.target), "-t", str(args.threads)]
        command += ["-c", str(args.ctx_size), "--temp", "0", "-n", str(question.max_tokens), "--json", "-p", question.prompt]
        command += ["--spec-type", args.spec_type, *(["--draft", str(args.draft)] if args.draft else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LocalspecError(f"localspec run: {done.stderr.strip()[-300:]}")
        answer = json.loads(done.stdout.strip().split("\n")[-1])
        if answer["text"] != load.greedy[question.number]:
            load.wrong.append(f"question {question.number}: not the text of `localspec run`")
        found = (ours, *load.decoded[question.number]), (theirs, answer["n_generated"], answer["ms_step"] / 1e3)
        for side, n, seconds in found:
            side[0] += n
            side[1] += seconds
    return rate(int(ours[0]), ours[1]), rate(int(theirs[0]), theirs[1])


def measure(args: argparse.Namespace) -> int:
    """The exit code."""
    for file in (args.llama_server, args.target, args.draft, args.prompts):
        if file is not None and not file.is_file():
            raise UsageError(f"{file}: no such file")
    prompts = spread(read_prompts(args.prompts) if args.prompts else list(BUILT_IN), args.limit)
    asked = questions([prompt.turns[0] for prompt in prompts])
    loads: list[Load] = []
    serve_rate = run_rate = 0.0
    print(HEAD)
    for name, command in commands(args).items():
        load = Load(name)
        with served(command) as port:
            ask(port, asked[0], Load(name), threading.Lock())  # nothing is timed cold
            press(port, load, asked, args.clients, args.seconds)
            alone(port, load, asked)
        if name == "localspec-draft":
            serve_rate, run_rate = computed_alone(args, load, asked)
        loads.append(load)
        print(load.row(), flush=True)
    for load in loads:
        for line in load.wrong[:5]:
            print(f"{load.name}: {line}")
    if run_rate:
        print(f"one client, decoding: serve {serve_rate:.1f} tok/s, run {run_rate:.1f}")
    ours = [load for load in loads if load.name.startswith("localspec")]
    fine = not any(load.wrong or load.n_other or load.n_answered != load.n_asked for load in ours)
    print(json.dumps({
        "fine": fine, "serve_tok_per_s": serve_rate or None, "run_tok_per_s": run_rate or None,
        "servers": [load.as_json() for load in loads],
        "clients": args.clients, "seconds": args.seconds, "target": str(args.target), "prompts": len(prompts),
        "draft": str(args.draft) if args.draft else None, "spec_type": args.spec_type, "threads": args.threads,
    }))  # fmt: skip
    return 0 if fine else 1


if __name__ == "__main__":
    try:
        sys.exit(measure(arguments()))
    except LocalspecError as error:
        print(f"serve_load: {error}", file=sys.stderr)
        sys.exit(2)
