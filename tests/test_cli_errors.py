"""What a clumsy or hostile call gets from any command: one clear line and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localspec.accept import Sampling
from localspec.cli import main
from localspec.convert.draft import DRAFT_QUANTS
from localspec.convert.quantize import QUANTS, quantize, size_remark
from localspec.engine import Engine, Request
from localspec.errors import LocalspecError, UsageError
from localspec.model import Model
from localspec.shipped import FOLDER
from localspec.target import SessionSettings, TargetSession
from tests.conftest import Cli, CliResult

SHORT = ("run", "-n", "3", "--raw", "-p", "One two")


def shell(env: dict[str, str], command: str) -> CliResult:
    """A command line with redirections; ``localspec`` in it is ours."""
    script = f'set -o pipefail; localspec() {{ "{sys.executable}" -m localspec "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=env, timeout=120, check=False)
    return CliResult(done.returncode, done.stdout.decode(), done.stderr.decode())


def one_line(result: CliResult, *parts: str) -> None:
    """Exit code 2 and a single line that holds `parts`."""
    assert result.rc == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


# -- output that can't be written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run -n 3 -p hi -m M", "run -n 3 -p hi --json -m M", "inspect M", "--help"])
def test_closed_output(cli_env: dict[str, str], smollm2: Path, command: str) -> None:
    """What Python calls None must not become the number of the model's file."""
    command = command.replace("M", f'"{smollm2}"')
    result = shell(cli_env, f"localspec {command} <&- >&-")
    assert result.rc == 0
    assert "Traceback" not in result.stderr
    assert shell(cli_env, f"localspec {command} <&- >&- 2>&-").rc == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["inspect M", "--help", "run --json -n 3 -p hi -m M", "run -n 3 -p hi -m M"])
def test_full_disk(cli_env: dict[str, str], smollm2: Path, command: str) -> None:
    command = command.replace("M", f'"{smollm2}"')
    result = shell(cli_env, f"localspec {command} > /dev/full")
    assert result.rc == 2
    assert result.stderr == "localspec: error: the output can't be used: No space left on device\n"
    assert shell(cli_env, f"localspec {command} > /dev/full 2>&1").rc == 2


def test_the_reader_goes(cli_env: dict[str, str], smollm2: Path) -> None:
    result = shell(cli_env, f'localspec run -n 200 --temp 0 -p "Count to 100." -m "{smollm2}" | head -c 1')
    assert result.rc == 141
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["curve --sizes 2 --rounds 1", "bench --limit 1 -n 4"])
def test_the_reader_of_a_table_goes(cli_env: dict[str, str], smollm2: Path, command: str) -> None:
    """Rich would end with code 1."""
    result = shell(cli_env, f'localspec {command} -m "{smollm2}" > >(exec true)')
    assert (result.rc, result.stderr) == (141, "")


def test_not_enough_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def prompt(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("localspec.cli.run_cmd._prompt", prompt)
    monkeypatch.setattr(sys, "argv", ["localspec", "run"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("localspec: error: there is not enough memory")


def test_an_encoding_without_the_characters(cli: Cli, smollm2: Path) -> None:
    """Nothing is lost: escapes in text, and JSON that stays JSON."""
    env = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    ask = ("run", "-m", smollm2, "--raw", "--temp", "0", "-n", "12", "-p", "Repeat: é日本語😀 é日本語😀 é日本語😀 é")
    plain, told = cli(*ask, env=env), cli(*ask)
    assert plain.rc == told.rc == 0, plain.stderr
    assert any(ord(c) > 255 for c in told.stdout)
    assert plain.stdout == told.stdout.encode("latin-1", "backslashreplace").decode()
    assert cli(*ask, "--json", env=env).stdout.isascii()


def test_no_command_gives_the_help(cli: Cli) -> None:
    result = cli()
    assert result.rc == 2
    assert result.stderr.count("\n") > 5
    assert "Usage: localspec" in result.stderr


# -- names and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--target", "--draft", "-hf", "-hfd", "-f"])
def test_empty_names(cli: Cli, flag: str) -> None:
    """An unset variable must not silently mean the default."""
    one_line(cli("run", flag, "", *([] if flag == "-f" else ["-p", "hi"])), flag, "no name given")


@pytest.mark.parametrize("flag", ["--prompts", "--peer-llama-server"])
def test_empty_names_to_bench(cli: Cli, flag: str) -> None:
    one_line(cli("bench", flag, ""), flag, "no name given")


def test_an_empty_stop_string(cli: Cli) -> None:
    one_line(cli("run", "-p", "hi", "--stop", "END", "--stop", ""), "--stop ''")


def test_empty_names_to_inspect(cli: Cli, smollm2: Path) -> None:
    one_line(cli("inspect", ""), "TARGET '': no name given")
    one_line(cli("inspect", smollm2, ""), "DRAFT '': no name given")


@pytest.mark.parametrize("flag", ["-p", "-sys", "--stop"])
def test_bytes_that_are_no_text(cli: Cli, flag: str) -> None:
    one_line(cli("run", "-p", "hi", flag, os.fsdecode(b"a\xff")), f"{flag}: not UTF-8")


def test_nan(cli: Cli) -> None:
    one_line(cli(*SHORT, "--spec-draft-p-min", "nan"), "--spec-draft-p-min", "between 0 and 1")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_prompt_without_end(cli: Cli) -> None:
    one_line(cli("run", "-f", "/dev/zero"), "/dev/zero", "MiB")


def test_a_prompt_that_no_context_holds(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    """Told at once: encoding it would take minutes."""
    (tmp_path / "p.txt").write_text("word " * 10_000_000)
    one_line(cli("run", "-m", smollm2, "-f", "p.txt", "-n", "1", timeout=60), "49,999,999 bytes", "--ctx-size")
    told = cli("chat", "-m", smollm2, input="word " * 10_000_000, timeout=60)
    assert told.rc == 2
    assert "49,999,999 bytes" in told.stderr


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_lines_without_end(cli_env: dict[str, str], smollm2: Path) -> None:
    limited = f'ulimit -v 4000000; localspec COMMAND -m "{smollm2}"'
    chat = shell(cli_env, limited.replace("COMMAND", "chat") + " < /dev/zero")
    assert chat.rc == 2
    assert chat.stderr.splitlines()[1:] == ["localspec: more than 64 MiB in one line: that is no message"]
    one_line(shell(cli_env, limited.replace("COMMAND", "bench") + " --prompts /dev/zero"), "/dev/zero: more than 256 MiB")


def test_line_ends_are_the_prompts_own(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"a\r\nb\r\n")
    ask = ("run", "-m", smollm2, "--raw", "-n", "0", "--json")
    counts = [
        json.loads(result.stdout)["n_prompt"]
        for result in (cli(*ask, "-f", "p.txt"), cli(*ask, input=b"a\r\nb\r\n"), cli(*ask, input=b"a\nb\n"))
    ]
    assert counts[0] == counts[1] > counts[2]


@pytest.mark.parametrize("name", ["foo", "", "lm.x", "ngram,lm", "../lm"])
def test_spec_types_that_are_none(cli: Cli, smollm2: Path, name: str) -> None:
    one_line(cli(*SHORT, "-m", smollm2, "--spec-type", name), f"--spec-type {name}".rstrip(), "ngram")


def test_llama_cpp_spec_types(cli: Cli, smollm2: Path) -> None:
    assert '"drafter": "ngram"' in cli(*SHORT, "-m", smollm2, "--json", "--spec-type", "ngram-simple").stdout
    done = cli(*SHORT, "-m", smollm2, "-md", smollm2, "--json", "--spec-type", "draft-simple")
    assert '"drafter": "lm"' in done.stdout
    one_line(cli(*SHORT, "-m", smollm2, "--spec-type", "draft-simple"), "--draft FILE")


def test_a_context_of_one_token(cli: Cli, smollm2: Path) -> None:
    result = cli(*SHORT, "-m", smollm2, "-c", "1", "-p", "One")
    assert result.rc == 0
    assert "recurrent" not in result.stderr
    assert "stop: context" in result.stderr


def test_a_cache_that_cannot_fit(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would grant it, and kill a process when it is filled."""
    monkeypatch.setattr("localspec.target.available_memory", lambda: 150_000_000)
    with Model(smollm2) as model:
        TargetSession(model, SessionSettings(n_ctx=256)).close()
        with pytest.raises(UsageError, match=r"context of 4096 tokens needs 0\.2 GB"):
            TargetSession(model, SessionSettings(n_ctx=4096))


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_interrupted_while_the_prompt_is_read(smollm2: Path) -> None:
    with Model(smollm2) as model, TargetSession(model, SessionSettings(n_ctx=512, n_batch=32)) as session:
        engine = Engine(session)
        asked: list[bool] = []

        def stopped() -> bool:
            asked.append(len(asked) >= 2)
            return asked[-1]

        steps = list(engine.generate(Request([1] * 400, Sampling(temperature=0)), stopped))
        assert [step.stop for step in steps] == ["interrupted"]
        assert engine.finish(0).n_prompt_computed == 64


def test_interrupted_at_any_moment(cli_env: dict[str, str], smollm2: Path) -> None:
    """While llama.cpp loads, too: never lost, never a traceback."""
    command = [sys.executable, "-m", "localspec", "run", "-m", str(smollm2), "--raw", "-p", "a", "-n", "400", "--temp", "9"]
    for delay in (0.3, 0.4, 0.5, 0.6):
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cli_env, text=True)
        time.sleep(delay)
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
        if "import" in errors or (started.returncode == -signal.SIGINT and not errors):
            continue  # Python itself was still starting
        assert "Traceback" not in errors
        assert started.returncode == 130, errors


@pytest.mark.parametrize("command", ["run --raw -p a", "curve"])
def test_interrupted_twice_while_loading(cli_env: dict[str, str], smollm2: Path, command: str) -> None:
    """Ends at once, not when a load is done that may take minutes."""
    code = (
        "import os, signal, sys, time\n"
        "from localspec.cli import loading, main\n"
        "def load(*args, **kwargs):\n"
        "    for _ in range(2): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)\n"
        "    print('went on', file=sys.stderr); time.sleep(60)\n"
        "loading.Model = load\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "-m", str(smollm2)],
        capture_output=True, env=cli_env, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "localspec: interrupted\n")


# -- convert -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["", ".", "pipe"])
def test_convert_replaces_only_files(cli: Cli, smollm2: Path, tmp_path: Path, output: str) -> None:
    """With enough rights it would put a file in the place of a device."""
    os.mkfifo(tmp_path / "pipe")
    one_line(cli("convert", smollm2, "-o", output, "--force"), "not a regular file")
    assert (tmp_path / "pipe").is_fifo()


def test_convert_removes_what_a_killed_run_left(smollm2: Path, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".a.gguf.{dead.pid}.part", f".a.gguf.{os.getppid()}.part", f".b.gguf.{dead.pid}.part", ".a.gguf.x.part"):
        (tmp_path / name).touch()
    quantize(smollm2, tmp_path / "a.gguf", "Q4_0")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.gguf", f".a.gguf.{os.getppid()}.part", f".b.gguf.{dead.pid}.part", ".a.gguf.x.part"}


def test_convert_where_nothing_can_be_written(smollm2: Path, tmp_path: Path) -> None:
    name = "x" * 250 + ".gguf"
    with pytest.raises(LocalspecError, match="File name too long"):
        quantize(smollm2, tmp_path / name, "Q4_0")
    assert list(tmp_path.iterdir()) == []


def test_convert_on_a_full_disk(cli_env: dict[str, str], smollm2: Path, tmp_path: Path) -> None:
    result = shell(cli_env, f'ulimit -f 4000; localspec convert "{smollm2}" -o "{tmp_path}/a.gguf"')
    one_line(result, f"{tmp_path}/a.gguf: writing failed")
    assert list(tmp_path.iterdir()) == []


def test_convert_says_when_the_copy_is_hardly_smaller(cli: Cli, smollm2: Path) -> None:
    larger = cli("convert", smollm2, "-o", "a.gguf", "--quant", "Q8_0")
    assert larger.rc == 0
    assert "warning: the Q8_0 copy is larger than its source" in larger.stderr
    assert "warning" not in cli("convert", "a.gguf", "-o", "b.gguf", "--quant", "Q4_0").stderr
    assert size_remark(100, 69, "Q4_0") is None
    assert "is 70 % of its source" in (size_remark(100, 70, "Q4_0") or "")


def test_convert_makes_nothing_larger_unasked(cli: Cli, tmp_path: Path) -> None:
    (draft,) = FOLDER.glob("smollm2*.gguf")  # in Q4_0, the default, of which llama.cpp makes a larger file
    one_line(cli("convert", draft, "-o", "a.gguf"), "is in Q4_0", "say which --quant")
    assert not (tmp_path / "a.gguf").exists()
    assert cli("convert", draft, "-o", "a.gguf", "--quant", "q8_0").rc == 0
    assert cli("convert", "a.gguf", "-o", "b.gguf").rc == 0
    assert (tmp_path / "b.gguf").stat().st_size < (tmp_path / "a.gguf").stat().st_size
    assert cli("convert", "b.gguf", "-o", "c.gguf", "--quant", "Q4_0").rc == 0


def test_convert_lists_the_types_that_it_takes(cli: Cli, tmp_path: Path) -> None:
    shown = " ".join(cli("convert", "--help").stdout.split())
    for names in (QUANTS, DRAFT_QUANTS):
        assert f"one of {', '.join(names)} [default" in shown


@pytest.mark.parametrize("more", [(), ("--to", "speculators"), ("--allow-pickle",)])
def test_convert_of_a_directory_without_a_checkpoint(cli: Cli, tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    one_line(cli("convert", "empty", "-o", "x.gguf", *more), "empty holds no checkpoint", "*.safetensors, *.bin")


def test_convert_interrupted(cli_env: dict[str, str], smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localspec", "convert", str(smollm2), "-o", str(tmp_path / "a.gguf"), "--quant", "Q2_K"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, env=cli_env, text=True)
    while not list(tmp_path.glob(".a.gguf.*.part")) and started.poll() is None:
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert errors.strip() == "localspec: interrupted"
    assert list(tmp_path.iterdir()) == []


# -- bench -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "can't be read"),
        ('{"prompt": ' + "1" * 5000 + "}", "can't be read"),
        ('{"prompt": "\\ud800"}', "half a character"),
    ],
)
def test_prompt_files_that_json_chokes_on(cli: Cli, smollm2: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    one_line(cli("bench", "-m", smollm2, "--prompts", "p.jsonl"), "p.jsonl line 1", message)


def test_a_source_that_looks_like_markup(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "hi", "source": "[red]x[/no]"}', encoding="utf-8")
    result = cli("bench", "-m", smollm2, "--prompts", "p.jsonl", "-n", "4")
    assert result.rc == 0, result.stderr
    assert "[red]x[/no]" in result.stdout.split("{")[0]


def test_a_peer_in_this_folder(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    """`./llama-server` is a file here, not a name to look up in PATH."""
    (tmp_path / "server").write_text("#!/bin/sh\necho I am broken >&2\nexit 3\n")
    (tmp_path / "server").chmod(0o755)
    result = cli("bench", "-m", smollm2, "--limit", "1", "-n", "4", "--peer-llama-server", "./server")
    assert result.rc == 2
    assert "No such file" not in result.stderr
    assert "I am broken" in result.stderr


_DYING_SERVER = """#!{python}
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        {post}
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("post", "message"),
    [
        ("sys.stderr.write('fatal error\\n'); sys.stderr.flush(); os._exit(7)", "ended with code 7"),
        ("self.send_response(200); self.end_headers(); self.wfile.write(b'{}')", "is it a llama-server?"),
    ],
)
def test_a_peer_that_fails_midway(cli: Cli, smollm2: Path, tmp_path: Path, post: str, message: str) -> None:
    (tmp_path / "server").write_text(_DYING_SERVER.format(python=sys.executable, post=post))
    (tmp_path / "server").chmod(0o755)
    one_line(cli("bench", "-m", smollm2, "--limit", "1", "-n", "4", "--peer-llama-server", "./server"), message)


def test_what_was_measured_before_a_failure_is_kept(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    """Each of the two servers warms up, answers one prompt, and dies at the second."""
    post = (
        "Handler.n = getattr(Handler, 'n', 0) + 1\n"
        "        if Handler.n > 2: os._exit(7)\n"
        "        self.rfile.read(int(self.headers['Content-Length']))\n"
        "        self.send_response(200); self.end_headers()\n"
        "        self.wfile.write(b'{\"tokens\": [], \"timings\": {\"predicted_n\": 4, \"predicted_ms\": 8}}')"
    )
    (tmp_path / "server").write_text(_DYING_SERVER.format(python=sys.executable, post=post))
    (tmp_path / "server").chmod(0o755)
    result = cli("bench", "-m", smollm2, "--limit", "3", "-n", "4", "--peer-llama-server", "./server")
    one_line(result, "ended with code 7")
    assert "eagle3, 1 of 3 prompts" in result.stdout
    measured = json.loads(result.stdout.splitlines()[-1])
    assert (measured["prompts"], measured["complete"]) == (1, False)
    assert measured["plain"]["n_generated"] == measured["spec"]["n_generated"] == 4
    assert measured["peer"]["plain"]["n_generated"] == 4


def test_a_prompt_that_is_too_long_is_told_before_anything_is_measured(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "fine"}, {"prompt": "word " * 600, "source": "long ones"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = cli("bench", "-m", smollm2, "-c", "256", "--prompts", "p.jsonl", "-n", "4")
    one_line(result, "'word word", "(long ones)", "tokens, the context holds 256")
    assert result.stdout == ""
