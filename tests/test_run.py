"""`localspec run` as a person starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest

from localspec.cli.run_cmd import _write
from localspec.engine import Piece
from tests.gguf_maker import tiny_mamba

RUN = ("run", "--temp", "0", "-c", "512")


@pytest.fixture
def run_json(cli: Any, smollm2: Path) -> Any:
    def run(*arguments: str) -> dict[str, Any]:
        done = cli(*RUN, "-m", str(smollm2), "--json", *arguments)
        assert done.rc == 0, done.stderr
        assert done.stdout.count("\n") == 1
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def test_json(run_json: Any, smollm2: Path) -> None:
    result = run_json("-p", "Say hello.", "-n", "20", "--spec-type", "ngram")
    assert set(result) >= {
        "text", "ids", "n_prompt", "n_generated", "tok_per_s", "prompt_tok_per_s", "n_verify", "n_drafted", "n_accepted",
        "tokens_per_verify", "acceptance_by_position", "ms_draft", "ms_verify", "ms_accept", "stop", "target", "draft",
        "kernels",
    }  # fmt: skip
    assert len(result["ids"]) == result["n_generated"] <= 20
    assert result["text"].strip()
    assert result["target"] == str(smollm2)
    assert result["draft"] is None
    assert result["tok_per_s"] > 0


def test_every_drafter_gives_the_plain_text(run_json: Any, smollm2: Path) -> None:
    prompt = "List the days of the week twice."
    plain = run_json("-p", prompt, "-n", "60", "--spec-type", "none")
    assert plain["n_drafted"] == 0
    for more in (["--spec-type", "ngram"], ["--draft", str(smollm2)], ["-md", str(smollm2), "--accept", "reject"]):
        drafted = run_json("-p", prompt, "-n", "60", "--no-spec-adapt", *more)
        assert drafted["ids"] == plain["ids"]
        assert drafted["n_drafted"] > 0
    assert drafted["draft"] == str(smollm2)
    assert drafted["tokens_per_verify"] > 3


@pytest.mark.parametrize("kernels", ["stock", "localspec"])
def test_without_mmap_the_text_is_the_same(run_json: Any, smollm2: Path, kernels: str) -> None:
    given = ("-p", "List the days of the week.", "-n", "20", "--draft", str(smollm2), "--kernels", kernels)
    mapped, read = run_json(*given), run_json(*given, "--no-mmap")
    assert read["ids"] == mapped["ids"]
    assert read["n_drafted"] > 0


def test_text_and_statistics(cli: Any, smollm2: Path) -> None:
    done = cli(*RUN, "-m", str(smollm2), "-p", "Count to five.", "-n", "30")
    assert done.rc == 0
    assert done.stdout.strip()
    assert re.search(r"draft acceptance = \d\.\d+ \( *\d+ accepted / *\d+ generated\)", done.stderr)
    assert "tokens per verify" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_prompt_from_a_file_and_from_standard_input(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Say hello.")
    base = (*RUN, "-m", str(smollm2), "-n", "8")
    by_flag = cli(*base, "-p", "Say hello.").stdout
    assert cli(*base, "-f", str(tmp_path / "prompt.txt")).stdout == by_flag
    assert cli(*base, input="Say hello.").stdout == by_flag


def test_raw_takes_the_prompt_as_it_is(run_json: Any) -> None:
    assert run_json("--raw", "-p", "Hello", "-n", "1")["n_prompt"] == 1
    assert run_json("-p", "Hello", "-n", "1")["n_prompt"] > 10
    assert run_json("-sys", "Talk like a pirate.", "-p", "Hello", "-n", "1")["n_prompt"] > 10


def test_stop_string_and_length_and_context(run_json: Any) -> None:
    whole = run_json("-p", "Count from one to ten in words.", "-n", "40")["text"]
    word = whole.split()[4]
    cut = run_json("-p", "Count from one to ten in words.", "-n", "40", "--stop", word)
    assert cut["stop"] == "stop-string"
    assert cut["text"] == whole[: whole.index(word)]
    assert run_json("-p", "Count to a thousand.", "-n", "5")["stop"] == "length"
    full = run_json("--raw", "-p", "Once upon a time, in a small village", "-c", "30")
    assert full["stop"] == "context"
    assert full["n_prompt"] + full["n_generated"] == 31  # the last token needs no place in the cache


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["--draft", "8", "-p", "x"], "--spec-draft-n-max 8"),
        (["-p", "x", "-f", "y"], "-p or -f"),
        (["-f", "does-not-exist.txt"], "does-not-exist.txt"),
        (["-p", "   "], "empty"),
        (["-p", "x", "-n", "-5"], "--n-predict"),
        (["-p", "x", "--temp", "nan"], "temp"),
        (["-p", "x", "--top-p", "1.5"], "top-p"),
        (["-p", "x", "--spec-type", "medusa"], "medusa"),
        (["-p", "x", "--spec-type", "lm"], "--draft"),
        (["-p", "x", "--raw", "-sys", "y"], "--raw"),
        (["-p", "x", "-c", "-1"], "--ctx-size"),
        (["-p", "x " * 3000], "context"),
        (["-p", "x", "-ctk", "q9"], "q9"),
        (["-p", "x", "--accept", "maybe"], "maybe"),
        (["-p", "x", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_a_person_did_wrong_gets_one_line(cli: Any, smollm2: Path, arguments: list[str], needle: str) -> None:
    done = cli(*RUN, "-m", str(smollm2), *arguments)
    assert done.rc == 2
    assert done.stdout == ""
    last = done.stderr.strip().split("\n")
    assert len(last) == 1, done.stderr
    assert "error" in last[0]
    assert needle in last[0]


def test_a_model_with_a_recurrent_state_says_the_same_with_drafts(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "mamba.gguf"
    tiny_mamba(path)
    said = []
    common = ["run", "-m", str(path), "--raw", "-p", "ababababab", "-n", "9", "--no-spec-adapt", "--json"]
    for kind in ("none", "ngram"):
        done = cli(*common, "--spec-type", kind)
        assert done.rc == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert said[0]["ids"] == said[1]["ids"]
    assert [s["drafter"] for s in said] == ["none", "ngram"]


def test_ctrl_c_ends_with_statistics_and_130(smollm2: Path) -> None:
    command = [sys.executable, "-m", "localspec", *RUN, "-c", "2048", "-m", str(smollm2), "-p", "Count to a million."]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)  # the text has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stop: interrupted" in errors
    assert "Traceback" not in errors


def test_a_reader_that_goes_away(smollm2: Path) -> None:
    command = [sys.executable, "-m", "localspec", *RUN, "-m", str(smollm2), "-p", "Count to one hundred.", "-n", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(60)


@pytest.mark.parametrize(("environment", "tinted"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_accepted_tokens_are_tinted_on_a_terminal(smollm2: Path, environment: dict[str, str], tinted: bool) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    arguments = ["-m", "localspec", *RUN, "-m", str(smollm2), "-md", str(smollm2), "-n", "16", "--show-draft"]
    child = pexpect.spawn(
        sys.executable,
        [*arguments, "--no-spec-adapt", "-p", "Hi"],
        env={**environ, "TERM": "xterm", **environment},
        timeout=60,
    )
    child.expect(pexpect.EOF)
    assert (b"\x1b[32m" in child.before) == tinted
    child.close()


@pytest.mark.parametrize(("on_terminal", "shown"), [(False, "\x1b[31mred\x1b[0m\r\n\x07"), (True, "[31mred[0m\n")])
def test_what_a_model_writes_is_kept_but_drives_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_terminal: bool, shown: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    _write([Piece(1, "\x1b[31mred", False), Piece(2, "\x1b[0m\r\n\x07", False)], tint=False)
    assert capsys.readouterr().out == shown


def test_help_is_quick_and_lists_every_command(cli: Any) -> None:
    began = time.perf_counter()
    done = cli("--help")
    assert done.rc == 0
    assert all(name in done.stdout for name in ("run", "chat", "bench", "curve", "inspect", "convert"))
    assert time.perf_counter() - began < 20  # not a timing: a hang
    assert cli("--version").stdout.startswith("localspec")
    assert cli("nonsense").rc == 2


def test_a_trace_tells_every_step(cli: Any, smollm2: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = cli("run", "-m", smollm2, "-p", "Count to forty.", "-n", "40", "--temp", "0", "--json", "--trace", trace)
    assert done.rc == 0, done.stderr
    said = json.loads(done.stdout)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, said["n_verify"] + 1))
    assert sum(b["gained"] for line in lines for b in line["blocks"]) == said["n_generated"]
    assert sum(b["accepted"] for line in lines for b in line["blocks"]) == said["n_accepted"]
    assert all(line["why"] for line in lines)
    refused = cli("run", "-m", smollm2, "-p", "x", "--trace", tmp_path / "no" / "where")
    assert (refused.rc, "--trace" in refused.stderr) == (2, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_trace_that_can_not_be_written_does_not_end_the_text(cli: Any, smollm2: Path) -> None:
    done = cli("run", "-m", smollm2, "-p", "Count to forty.", "-n", "20", "--temp", "0", "--json", "--trace", "/dev/full")
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout)["n_generated"] == 20
    assert done.stderr.count("--trace /dev/full ends here") == 1
