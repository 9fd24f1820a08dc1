"""`localspec bench`, `localspec curve`, prompt files and the peer."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.accept import Sampling
from localspec.bench import Result, run_bench
from localspec.curve import Curve, measure_curves
from localspec.engine import Engine
from localspec.errors import UsageError
from localspec.model import Model
from localspec.prompts import BUILT_IN, Prompt, read_prompts, spread
from localspec.target import SessionSettings, TargetSession


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        {"source": "a", "turns": ["one", "two"]},
        {"prompt": "three"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "four"}]},
        {"source": "b", "turns": ["one", "two"]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prompts = read_prompts(path)
    assert [p.turns for p in prompts] == [("one", "two"), ("three",), ("four",)]
    assert [p.source for p in prompts] == ["a", "prompts", "prompts"]


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": []}', '{"turns": [3]}', '{"prompt": " "}', '{"other": 1}'])
def test_bad_prompt_files_name_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(UsageError, match="line 2"):
        read_prompts(path)


def test_empty_missing_and_binary_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(UsageError, match=r"p\.jsonl"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(UsageError, match="no prompts"):
        read_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_prompts(path)


def test_a_limit_still_covers_every_source() -> None:
    prompts = [Prompt("a", (str(i),)) for i in range(5)] + [Prompt("b", ("x",)), Prompt("c", ("y",))]
    assert [p.source for p in spread(prompts, 4)] == ["a", "b", "c", "a"]
    assert spread(prompts, 0) == prompts
    assert len({p.turns for p in BUILT_IN}) == len(BUILT_IN)


def test_ceiling() -> None:
    curve = Curve((1, 2, 4), (10.0, 12.0, 30.0))
    assert curve.ratio == (1.0, 1.2, 3.0)
    assert curve.ceiling == (2 / 1.2, 2)


def last_json(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text.strip().split("\n")[-1])
    return result


def test_bench(cli: Any, smollm2: Path) -> None:
    done = cli("bench", "-m", str(smollm2), "-c", "512", "-n", "40", "--limit", "3", "--no-spec-adapt")
    assert done.rc == 0, done.stderr
    result = last_json(done.stdout)
    assert result["prompts"] == 3
    assert result["identical"] is True
    assert set(result["by_source"]) == {"code", "maths", "chat"}
    assert result["plain"]["tok_per_s"] > 0
    assert result["speedup"] == pytest.approx(result["spec"]["tok_per_s"] / result["plain"]["tok_per_s"])
    assert result["settings"]["temperature"] == 0
    assert result["settings"]["spec_type"] == "ngram,eagle3"
    assert "\x1b" not in done.stdout


def test_bench_without_a_drafter_says_so(cli: Any, smollm2: Path) -> None:
    done = cli("bench", "-m", str(smollm2), "--spec-type", "none")
    assert done.rc == 2
    assert "nothing to compare" in done.stderr


def test_curve(cli: Any, smollm2: Path) -> None:
    done = cli("curve", "-m", str(smollm2), "--rounds", "1")
    assert done.rc == 0, done.stderr
    title = r"SmolLM2-135M-Instruct\.Q4_1, \d+ threads?, 128 tokens of context"
    assert re.fullmatch(title, done.stdout.splitlines()[0]), "on one line, though the table is narrower"
    result = last_json(done.stdout)
    assert result["n"] == [*range(1, 17), 32]
    assert len(result["ms"]) == len(result["ratio"]) == 17
    assert result["ratio"][0] == 1
    assert np.isclose(result["ratio"][3], result["ms"][3] / result["ms"][0])
    assert result["kernels"]


def test_curve_of_both_kernels(cli: Any, smollm2: Path) -> None:
    done = cli("curve", "--compare", "-m", str(smollm2), "--rounds", "1", "--sizes", "2,4", "--context", "20")
    assert done.rc == 0, done.stderr
    assert done.stderr == ""
    assert "localspec/stock" in done.stdout
    result = last_json(done.stdout)
    for side in ("stock", "localspec"):
        curve = result[side]
        assert curve["n"] == [1, 2, 4]
        assert curve["ratio"] == pytest.approx([ms / curve["ms"][0] for ms in curve["ms"]])
        assert min(curve["ms"]) > 0
    assert result["stock"]["ms"] != result["localspec"]["ms"]
    assert result["settings"] == {
        "target": str(smollm2), "threads": result["settings"]["threads"], "context": 20, "rounds": 1,
        "flash_attention": "auto", "type_k": "f16", "type_v": "f16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["--compare", "--context", "5000"], "--ctx-size"),  # found by a child
        (["--compare", "--kernels", "stock"], "leave --kernels out"),
        (["--sizes", "1,many"], "--sizes"),
        (["--sizes", "0,1"], "0 tokens"),
        (["--sizes", "600"], "at most 512"),
    ],
)
def test_curves_that_cannot_be_measured(cli: Any, smollm2: Path, arguments: list[str], needle: str) -> None:
    done = cli("curve", "-m", str(smollm2), *arguments)
    assert done.rc == 2
    assert done.stdout == ""
    assert needle in done.stderr
    assert done.stderr.count("\n") == 1


def test_sides_are_measured_in_turn() -> None:
    order: list[str] = []
    times = {"a": iter([9.0, 1.0, 5.0, 2.0]), "b": iter([9.0, 4.0, 4.0, 7.0])}

    def measure(name: str) -> list[float]:
        order.append(name)
        return [next(times[name])]

    sides = {name: ((1,), lambda name=name: measure(name)) for name in times}
    curves = measure_curves(sides, rounds=3, pause=0)
    assert order == list("abbaabba")
    assert (curves["a"].ms, curves["b"].ms) == ((2.0,), (4.0,))  # medians; the first round has only warmed up


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for child processes in /proc")
def test_ctrl_c_ends_the_measuring_processes(smollm2: Path) -> None:
    command = [sys.executable, "-m", "localspec", "curve", "--compare", "-m", str(smollm2), "--rounds", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    known = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    children: list[str] = []
    while len(children) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        children = known.read_text().split()
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # of no effect where it has ended
    assert (process.returncode, errors.strip()) == (130, "localspec: interrupted")
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in children if alive(pid)]


def alive(pid: str) -> bool:
    """Whether the process runs: what has ended and waits for init to take note of it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


FAKE_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
drafting = "--spec-type" in sys.argv

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{{}}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = body["n_predict"]
        timings = {{"predicted_n": n, "predicted_ms": 10.0 * n}}
        if drafting: timings.update(draft_n=8, draft_n_accepted=6)
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({{"tokens": [1] * n, "timings": timings}}).encode())
    def log_message(self, *a): pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_bench_beside_a_peer(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    server = script(tmp_path / "llama-server", FAKE_SERVER)
    done = cli("bench", "-m", str(smollm2), "-n", "8", "--limit", "2", "--peer-llama-server", str(server))
    assert done.rc == 0, done.stderr
    peer = last_json(done.stdout)["peer"]
    assert peer["plain"]["tok_per_s"] == pytest.approx(100)
    assert peer["plain"]["acceptance"] is None
    assert peer["spec"]["acceptance"] == 0.75
    assert peer["plain"]["identical_to_ours"] is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is Linux's")
def test_a_peer_does_not_outlive_us(tmp_path: Path) -> None:
    script(tmp_path / "llama-server", FAKE_SERVER)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom localspec.peer import LlamaServer\n"
        "print(LlamaServer(Path(sys.argv[1]), [])._process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "llama-server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = process.stdout.readline().strip()
        assert alive(server)
        process.kill()
    deadline = time.monotonic() + 30
    while alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server)


def test_ctrl_c_keeps_what_was_measured(smollm2: Path) -> None:
    asked: list[int] = []

    def beside(tokens: list[int], text: list[int]) -> None:
        asked.append(len(text))
        if len(asked) == 2:
            raise KeyboardInterrupt

    result = Result()
    settings, greedy = SessionSettings(n_ctx=256), Sampling(temperature=0)
    with Model(smollm2) as model, TargetSession(model, settings) as session, pytest.raises(KeyboardInterrupt):
        run_bench(Engine(session), Engine(session), BUILT_IN, greedy, 3, beside=beside, result=result)
    assert (result.total.n, list(result.by_source)) == (1, ["code"])
    assert result.total.plain.stats.n_generated == result.total.spec.stats.n_generated == asked[0]


def test_a_peer_that_does_not_start(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "llama-server", "#!{python}\nprint('error: no such model'); raise SystemExit(3)\n")
    for path, needle in ((broken, "no such model"), (tmp_path / "missing", "missing")):
        done = cli("bench", "-m", str(smollm2), "-n", "4", "--limit", "1", "--peer-llama-server", str(path))
        assert done.rc == 2
        assert needle in done.stderr
        assert "Traceback" not in done.stderr
