"""`localspec bench`, `localspec curve`, prompt files and the peer."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.curve import Curve
from localspec.errors import UsageError
from localspec.prompts import BUILT_IN, Prompt, read_prompts, spread


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
    assert result["settings"]["spec_type"] == "ngram"
    assert "\x1b" not in done.stdout


def test_bench_without_a_drafter_says_so(cli: Any, smollm2: Path) -> None:
    done = cli("bench", "-m", str(smollm2), "--spec-type", "none")
    assert done.rc == 2
    assert "nothing to compare" in done.stderr


def test_curve(cli: Any, smollm2: Path) -> None:
    done = cli("curve", "-m", str(smollm2), "--rounds", "1")
    assert done.rc == 0, done.stderr
    result = last_json(done.stdout)
    assert result["n"] == [*range(1, 17), 32]
    assert len(result["ms"]) == len(result["ratio"]) == 17
    assert result["ratio"][0] == 1
    assert np.isclose(result["ratio"][3], result["ms"][3] / result["ms"][0])
    assert result["kernels"]


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


def test_a_peer_that_does_not_start(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "llama-server", "#!{python}\nprint('error: no such model'); raise SystemExit(3)\n")
    for path, needle in ((broken, "no such model"), (tmp_path / "missing", "missing")):
        done = cli("bench", "-m", str(smollm2), "-n", "4", "--limit", "1", "--peer-llama-server", str(path))
        assert done.rc == 2
        assert needle in done.stderr
        assert "Traceback" not in done.stderr
