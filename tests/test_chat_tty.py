"""`localspec chat` as a person sees it: behind a pseudo-terminal, on a dumb one, and with its input piped in."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli

if sys.platform == "win32":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)

import termios

from tests.terminal import Terminal

LONG = "Tell me a long story about a cat."
COLOURS = re.compile(rb"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


@contextlib.contextmanager
def chat(
    model: Path, cli_env: dict[str, str], tmp_path: Path, *args: str, columns: int = 80, rows: int = 24, **env: str
) -> Iterator[Terminal]:
    options = ("--temp", "0", "-t", "1", "--spec-type", "ngram", *args)
    terminal = Terminal(
        "chat", "--target", model, *options, env=cli_env | env, cwd=tmp_path, columns=columns, rows=rows
    )  # fmt: skip
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_session_at_80x24(smollm2: Path, cli_env: dict[str, str], tmp_path: Path) -> None:
    greeting = [{"role": "user", "content": "Greet."}, {"role": "assistant", "content": "**Hello** there, my `friend`."}]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": greeting * 3}))
    with chat(smollm2, cli_env, tmp_path) as terminal:
        terminal.until(terminal.at_prompt)
        first = terminal.rows[0]
        for part in ("SmolLM2", "draft ngram", "kernels", "context 4096", "/help"):
            assert part in first
        assert len(terminal.text.split("\n")) == 3  # one line, an empty one, the prompt

        terminal.send("/load talk.json\r")
        terminal.until("loaded 3 exchanges from talk.json")
        terminal.until(terminal.at_prompt)
        terminal.send("Greet.\r")
        terminal.until(lambda: "tok/s" in terminal.text and terminal.at_prompt())
        row = terminal.rows.index("Hello there, my friend.")
        cells = terminal.screen.buffer[row]
        assert [cells[x].bold for x in (0, 4, 6)] == [True, True, False]
        assert cells[20].fg == "cyan"  # friend
        assert terminal.rows[row - 2] == "> Greet."
        status = terminal.rows[row + 2]
        assert re.fullmatch(r"[\d.]+ tok/s · \d+% accepted · [\d.]+ per verify · context \d+/4096", status)
        assert terminal.text.count("tok/s") == 1

        terminal.send("/reset\r")
        terminal.until("4 exchanges forgotten")
        terminal.until(terminal.at_prompt)

        # Three lines in one message, and an answer that is stopped.
        terminal.send("Tell me a long story\\\rabout a \x1b\rcat.")
        terminal.until("> Tell me a long story\n  about a\n  cat.")
        terminal.send("\r")
        terminal.until("  cat.\n")
        terminal.until(lambda: len(terminal.text.split("  cat.\n")[-1]) > 150)
        assert terminal.screen.cursor.hidden
        terminal.send("\x03")
        terminal.until(lambda: "stopped · " in terminal.text and terminal.at_prompt())
        assert not terminal.screen.cursor.hidden
        assert "^C" not in terminal.text

        # Ctrl-C at the prompt clears it, and says how to leave when there is nothing to clear.
        terminal.send("never mind")
        terminal.until("> never mind")
        terminal.send("\x03")
        terminal.until(terminal.at_prompt)
        assert "never mind" not in terminal.text
        terminal.send("\x03")
        terminal.until("Ctrl-D or /quit leaves")
        terminal.until(terminal.at_prompt)

        terminal.send("/stats\r")
        terminal.until(lambda: "1 exchange;" in terminal.text and terminal.at_prompt())
        n, computed = map(int, re.findall(r"prompt: +(\d+) tokens \((\d+) computed\)", terminal.text)[-1])
        assert 0 < computed < n - 20  # the template's own beginning was in the cache
        terminal.send("/wrong\r")
        terminal.until("unknown command /wrong")
        terminal.until(terminal.at_prompt)
        terminal.send("/quit\r")
        assert terminal.wait() == 0
        assert b"Traceback" not in terminal.raw
    history = tmp_path / "home" / "state" / "localspec" / "chat_history"
    assert "+Greet.\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600

    # What was typed comes back in the next session; NO_COLOR leaves no colour; a small screen is enough.
    with chat(smollm2, cli_env, tmp_path, "-n", "40", columns=40, rows=10, NO_COLOR="1") as terminal:
        terminal.until(terminal.at_prompt)
        terminal.send("\x1b[A" * 4)
        terminal.until("  cat.")
        terminal.send("\r")
        terminal.until(lambda: "tok/s" in terminal.text and terminal.at_prompt())
        assert max(map(len, terminal.rows)) <= 40
        status = [row for row in terminal.rows if "tok/s" in row]
        assert len(status) == 1
        assert re.search(r"\d+% · [\d.]+ · \d+/4096$|tok/s · \d+/4096$", status[0])
        terminal.send("\x04")
        assert terminal.wait() == 0
        assert not COLOURS.search(terminal.raw)


def test_another_size_while_it_streams(smollm2: Path, cli_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")  # no folder can be made here: nothing is kept, and that is said
    with chat(smollm2, cli_env, tmp_path, columns=40, rows=10) as terminal:
        terminal.until(terminal.at_prompt)
        assert "not kept for next" in " ".join(terminal.all_text.split())
        terminal.send(LONG + "\r")
        terminal.until(lambda: len(terminal.text) > 300)
        assert re.match(r"[\d.]+ tok/s · ", terminal.rows[-1])
        terminal.resize(70, 30)
        terminal.until("> " + LONG)
        terminal.until(lambda: len(terminal.text) > 500)
        assert len([row for row in terminal.rows if "tok/s" in row]) == 1
        assert terminal.text.count(LONG) == 1
        terminal.send("\x03")
        terminal.until(terminal.at_prompt)
        terminal.send("/draft off")
        terminal.until("> /draft off")
        terminal.resize(40, 10)
        terminal.settle()
        assert terminal.rows[-1] == "> /draft off"
        terminal.send("\r")
        terminal.until("drafting is off")
        terminal.send("\x04")
        assert terminal.wait() == 0


def test_a_dumb_terminal(smollm2: Path, cli_env: dict[str, str], tmp_path: Path) -> None:
    endless = "Write a Python program for a library with loans."  # not over before Ctrl-C comes
    with chat(smollm2, cli_env, tmp_path, TERM="dumb") as terminal:
        terminal.until(terminal.at_prompt)
        terminal.send("Say hello.\r")
        terminal.until(lambda: "tok/s" in terminal.text and terminal.at_prompt())
        terminal.send(endless + "\r")
        terminal.until(endless)
        terminal.until(lambda: len(terminal.text.split(endless)[-1]) > 100)
        terminal.send("\x03")
        terminal.until(lambda: "stopped · " in terminal.text and terminal.at_prompt())
        terminal.send("\x03")
        terminal.until("Ctrl-D or /quit leaves")
        terminal.send("\x04")
        assert terminal.wait() == 0
        assert b"\x1b" not in terminal.raw


def test_sigterm_gives_the_terminal_back(smollm2: Path, cli_env: dict[str, str], tmp_path: Path) -> None:
    with chat(smollm2, cli_env, tmp_path) as terminal:
        before = termios.tcgetattr(terminal.process.child_fd)[3]
        assert before & termios.ECHO
        terminal.until(terminal.at_prompt)
        assert not termios.tcgetattr(terminal.process.child_fd)[3] & termios.ECHO
        terminal.process.kill(signal.SIGTERM)
        while terminal.pump():
            pass
        assert termios.tcgetattr(terminal.process.child_fd)[3] == before
        terminal.process.wait()
        assert terminal.process.exitstatus == 143
        assert "Traceback" not in terminal.text


def test_piped_input(cli: Cli, default_cache: Path) -> None:
    lines = "Say hello.\n\n/draft off\nSay\\\ngoodbye.\n/nonsense\n/stats"  # no newline at the end
    done = cli("chat", "-n", "8", "-t", "1", input=lines, env={"LOCALSPEC_CACHE": str(default_cache), "TERM": "xterm"})
    assert done.rc == 2  # for the unknown command
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.count("tok/s") == 2
    assert "using the default model" in done.stderr
    assert "drafting is off (drafter ngram,eagle3)" in done.stdout
    assert "localspec: unknown command /nonsense" in done.stderr
    assert "2 exchanges" in done.stdout
    assert "Traceback" not in done.stderr
    assert re.findall(r"seed (\d+)", done.stdout) != ["0"]

    again = cli("chat", "--temp", "0", "-s", "5", "-t", "1", "-c", "64", "--spec-type", "none",
                input=f"{LONG}\n{'word ' * 100}\nSay\nhello\n/stats\n",
                env={"LOCALSPEC_CACHE": str(default_cache)})  # fmt: skip
    assert "the context is full, so the answer ends here" in again.stderr
    assert "shorten it, or start with a larger --ctx-size" in again.stderr
    assert "the oldest 1 of 1 exchanges are no longer sent" in again.stderr
    assert "seed 5" in again.stdout
    assert again.rc == 2


def test_nothing_piped_in(cli: Cli, smollm2: Path) -> None:
    done = cli("chat", "--target", smollm2, "-t", "1")
    assert (done.rc, done.stdout) == (0, "")
    wrong = cli("chat", "--target", smollm2, "-n", "0")
    assert wrong.rc == 2
    assert "--n-predict" in wrong.stderr
