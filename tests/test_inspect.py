"""`localspec inspect` as a person and as a program sees it."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localspec.cli.inspect_cmd import inspect_files
from localspec.gguf_file import GGUFFile
from tests import gguf_maker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("a folder's") / "target.gguf")


@pytest.fixture(scope="module")
def draft(tiny: Path) -> Path:
    return gguf_maker.random_draft(tiny.parent / "draft.gguf", like=tiny)


def test_a_pair_that_fits(cli: Any, tiny: Path, draft: Path) -> None:
    done = cli("inspect", tiny, draft, "-c", 256, "--kernels", "stock")
    assert (done.rc, done.stderr) == (0, "")
    for text in (
        "llama, 2 layers, hidden size 64, 4 heads (2 key/value)",
        "320 tokens, tokenizer gpt2, pre-tokenizer gpt-2",
        "yes: the same 320 tokens",
        "ngram,lm, accept rule match",
        "at a context of 256 tokens",
        "stock",
    ):
        assert text in done.stdout
    assert "\x1b" not in done.stdout


def test_commands_can_be_pasted(cli: Any, tiny: Path, draft: Path) -> None:
    lines = cli("inspect", tiny, draft).stdout.split("commands\n")[1].splitlines()
    ours, server, serve = (shlex.split(line) for line in lines)
    assert ours[:6] == ["localspec", "run", "--target", str(tiny), "--draft", str(draft)]
    assert server[:5] == ["llama-server", "-m", str(tiny), "-md", str(draft)]
    assert serve[:2] == ["llama", "serve"]
    assert serve[2:] == server[1:]
    assert server[server.index("--spec-type") + 1] == "draft-simple"
    from localspec.cli.run_cmd import run_cmd

    context = run_cmd.make_context("run", ours[2:])
    assert (context.params["target"], context.params["draft"]) == (str(tiny), str(draft))


def test_our_command_runs(cli: Any, tiny: Path, draft: Path) -> None:
    report = json.loads(cli("inspect", tiny, draft, "--json").stdout)
    command = shlex.split(report["commands"]["localspec run"])
    done = cli(*command[1:], "-n", 8, "--json")
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout)["n_generated"] <= 8
    assert json.loads(done.stdout)["drafter"] == report["pair"]["drafter"]
    assert "--spec-draft-n-max" not in command  # as many as pay, which would be capped


def test_json(cli: Any, tiny: Path, draft: Path) -> None:
    done = cli("inspect", tiny, draft, "--json")
    report = json.loads(done.stdout)
    assert (report["target"]["n_layer"], report["draft"]["n_layer"]) == (2, 1)
    assert report["pair"] == {"fits": True, "drafter": "ngram,lm", "accept": "match", "remarks": [], "error": None}
    assert report["n_ctx"] == 512
    assert report["memory"] == sum(report[f]["memory"]["total"] for f in ("target", "draft"))
    assert report["target"]["tokenizer"]["hash"] == report["draft"]["tokenizer"]["hash"]


def test_tokens_are_the_same_where_something_else_of_the_tokenizer_differs(cli: Any, tiny: Path, tmp_path: Path) -> None:
    mask = gguf_maker.edit(tiny, tmp_path / "mask.gguf", put={"tokenizer.ggml.mask_token_id": 3})
    shown = cli("inspect", tiny, mask).stdout
    assert GGUFFile.open(tiny).tokenizer_hash() != GGUFFile.open(mask).tokenizer_hash()
    assert "yes: the same 320 tokens" in shown


def test_a_pair_that_does_not_fit(cli: Any, tiny: Path, tmp_path: Path) -> None:
    other = gguf_maker.edit(tiny, tmp_path / "other.gguf", put={"tokenizer.ggml.pre": "qwen2"})
    done = cli("inspect", tiny, other)
    assert done.rc == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("localspec: error: other.gguf can't draft for target.gguf: the pre-tokenizers differ")
    assert "pre-tokenizer qwen2" in done.stdout
    assert "--draft" not in done.stdout
    assert "-md" not in done.stdout
    # What is said is about the target alone, and of one mind: the drafter, the memory, the commands.
    _, pair = done.stdout.split("pair\n")
    assert "ngram, accept rule match" in pair
    assert "none" not in pair
    assert "for the target alone at a context of 512" in pair
    report = json.loads(cli("inspect", tiny, other, "--json").stdout)
    assert report["pair"]["fits"] is False
    assert "pre-tokenizers differ" in report["pair"]["error"]
    assert report["pair"]["drafter"] == "ngram"
    assert report["memory"] == report["target"]["memory"]["total"]
    run = shlex.split(report["commands"]["localspec run"])
    assert json.loads(cli(*run[1:], "-n", 2, "--json").stdout)["drafter"] == "ngram"
    assert shlex.split(report["commands"]["llama-server"])[3:5] == ["--spec-type", "ngram-simple"]


def test_one_file_alone(cli: Any, tiny: Path, tmp_path: Path) -> None:
    done = cli("inspect", tiny)
    assert done.rc == 0
    assert "ngram, accept rule match" in done.stdout
    head = cli("inspect", gguf_maker.eagle3_stub(tmp_path / "head.gguf", like=tiny))
    assert head.rc == 0
    assert "runs only beside the model" in head.stdout
    assert "plain decoding" not in head.stdout
    assert "commands" not in head.stdout


def test_recurrent_models(cli: Any, tiny: Path, tmp_path: Path) -> None:
    mamba = gguf_maker.tiny_mamba(tmp_path / "mamba.gguf")
    done = cli("inspect", mamba, tiny)
    assert done.rc == 0
    assert "its recurrent state is copied before a block" in done.stdout
    assert "drafter        ngram,lm" in done.stdout
    as_draft = cli("inspect", tiny, mamba)
    assert as_draft.rc == 2
    assert "mamba.gguf can't draft: mamba is recurrent" in as_draft.stderr


def test_head_without_a_drafter_still_gets_llama_servers_command(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localspec import pairing

    monkeypatch.setattr(pairing, "__file__", str(tmp_path / "pairing.py"))
    head = gguf_maker.eagle3_stub(tmp_path / "head.gguf", like=tiny)
    report = inspect_files(tiny, head, 0, "f16", "f16", kernels="other kernels")
    assert "eagle3, which is not supported in this version" in (report.pair.error or "")
    commands = report.commands()
    assert "--spec-type draft-eagle3" in commands["llama-server"]
    assert str(head) not in commands["localspec run"]
    assert report.as_json()["kernels"] == "other kernels"


def test_broken_files_get_one_line_and_no_abort(tmp_path: Path, tiny: Path, cli_env: dict[str, str]) -> None:
    """Each as target and as draft, through the real command line, in one process per role to keep it quick."""
    broken = gguf_maker.broken_files(tmp_path)
    code = (
        "import sys\nfrom localspec.cli import main\n"
        "for path in sys.argv[2:]:\n"
        "    sys.argv[1:] = ['inspect', path] if ROLE == 'target' else ['inspect', GOOD, path]\n"
        "    try: main()\n"
        "    except SystemExit as e: print(f'rc {e.code}', file=sys.stderr, flush=True)\n"
    )
    for role in ("target", "draft"):
        head = f"ROLE, GOOD = {role!r}, {str(tiny)!r}\n"
        done = subprocess.run(
            [sys.executable, "-c", head + code, "_", *map(str, broken.values())],
            capture_output=True, text=True, env=cli_env, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        lines = done.stderr.splitlines()
        assert len(lines) == 2 * len(broken)
        for name, error, rc in zip(broken, lines[::2], lines[1::2]):
            assert rc == "rc 2", name
            assert error.startswith("localspec: error: "), name
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["cut in the metadata", "twin tokens", "too many layers", "directory"])
def test_broken_file_in_a_process_of_its_own(cli: Any, tmp_path: Path, name: str) -> None:
    path = gguf_maker.broken_files(tmp_path)[name]
    for args in (("inspect", path), ("run", "--target", path, "-p", "x", "-n", 1)):
        done = cli(*args)
        assert (done.rc, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("localspec: error: ")


def test_wrong_context_size(cli: Any, tiny: Path) -> None:
    assert cli("inspect", tiny, "-c", -5).rc == 2
    longer = cli("inspect", tiny, "-c", 4096)
    assert longer.rc == 0
    assert "was trained on 512 tokens" in longer.stdout


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_on_a_terminal_of_80_columns(tiny: Path, draft: Path, cli_env: dict[str, str], env: dict[str, str]) -> None:
    shown = _on_terminal(["inspect", str(tiny), str(draft)], {**cli_env, "TERM": "xterm-256color", **env})
    body, commands = shown.split("commands")
    import re

    plain = re.sub(r"\x1b\[[0-9;]*m", "", body)
    assert ("\x1b[36m" in body) == (not env)
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "yes: the same 320 tokens" in plain
    assert any(line.strip().startswith("llama-server -m ") for line in commands.splitlines())


def test_on_a_terminal_of_20_columns(tiny: Path, cli_env: dict[str, str]) -> None:
    shown = _on_terminal(["inspect", str(tiny)], {**cli_env, "TERM": "xterm-256color"}, columns=20)
    assert "  vocabulary     320 tokens, tokenizer gpt2, pre-tokenizer gpt-2\n" in shown


def _on_terminal(args: list[str], env: dict[str, str], columns: int = 80) -> str:
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen([sys.executable, "-m", "localspec", *args], stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        out = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # Linux: the other end has gone
                break
            if not piece:
                break
            out += piece
        assert process.wait(timeout=60) == 0
    os.close(master)
    return out.decode().replace("\r\n", "\n")


def test_smollm2(cli: Any, smollm2: Path) -> None:
    done = cli("inspect", smollm2)
    assert done.rc == 0
    assert "llama, 30 layers, hidden size 576, 9 heads (3 key/value)" in done.stdout
    assert "92 MiB weights, 90 MiB cache" in done.stdout
    assert "chat template  yes" in done.stdout
