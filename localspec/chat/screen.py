"""What a person sees and types: on a terminal with prompt_toolkit and Rich, elsewhere as plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from localspec.chat.conversation import Chat, Turn
from localspec.engine import Step
from localspec.errors import UsageError
from localspec.report import rate

# C0 but tab and newline, DEL and C1: a model's output must not be able to drive the terminal.
_CONTROLS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if c not in (0x09, 0x0A)}


def printable(text: str) -> str:
    """`text` without characters that would move the cursor or change the terminal."""
    return text.translate(_CONTROLS)


Steps = Generator[Step, None, None]


#: A line longer than this is no message: /dev/zero, or a file given by mistake.
MAX_LINE_BYTES = 64 << 20


class Screen(Protocol):
    """Where a chat takes place."""

    def begin(self, name: str, rest: str) -> None:
        """The first line: the model's name, which may be shortened, and what goes with it."""

    def read(self) -> str | None:
        """The next thing typed, None at the end. KeyboardInterrupt where Ctrl-C asks for nothing."""

    def show(self, chat: Chat, turn: Turn, steps: Steps) -> None:
        """Show an answer while it is written, then its counts."""

    def say(self, text: str) -> None:
        """What a command answers, or a remark."""

    def fail(self, text: str) -> None:
        """One line about what went wrong."""


ENDS = {
    "context": "the context is full, so the answer ends here; the next message leaves the oldest exchanges out",
}


def status_line(chat: Chat, turn: Turn, width: int) -> str:
    """Speed, acceptance, tokens per verify and context used, as much as fits into `width` columns."""
    stats = turn.stats
    if not stats.n_generated and not turn.kept:
        return f"reading {len(turn.tokens)} tokens{f' ({turn.n_read} done)' if turn.n_read else ''}"
    speed = f"{rate(stats.n_generated, stats.t_generate):.1f} tok/s"
    context = f"{chat.n_used if turn.kept else turn.n_used}/{chat.engine.session.n_ctx}"
    ended = {"interrupted": "stopped", "length": "cut by -n"}.get(turn.stop)
    stopped = [ended] if ended and turn.kept else []
    if stats.n_drafted:
        share, gain = f"{100 * (stats.acceptance or 0):.0f}%", f"{stats.tokens_per_verify:.2f}"
        long, short = [f"{share} accepted", f"{gain} per verify"], [share, gain]
    else:
        note = "nothing drafted" if chat.drafting else "drafting off"
        long, short = [note], []
    forms = ([*stopped, speed, *long, f"context {context}"], [*stopped, speed, *short, context], [speed, *short, context])
    for parts in (*forms, [speed, context]):
        line = " · ".join(parts)
        if len(line) <= width:
            return line
    return speed


class PlainScreen:
    """Lines in, text out, no escape codes: for pipes, files and dumb terminals.

    Answers and what commands say go to standard output, everything else to standard error.
    """

    def __init__(self, stdin: Any = None, stdout: IO[str] | None = None, stderr: IO[str] | None = None):
        self._in = stdin or sys.stdin
        self._out = stdout or sys.stdout
        self._err = stderr or sys.stderr
        self._typed = self._in.isatty()
        self._shown = self._out.isatty()
        self._ended = False

    def begin(self, name: str, rest: str) -> None:
        self.fail(name + rest)

    def read(self) -> str | None:
        lines: list[str] = []
        while True:
            if self._typed:
                self._err.write("  " if lines else "> ")
                self._err.flush()
            raw = b"" if self._ended else self._in.buffer.readline(MAX_LINE_BYTES)
            if len(raw) == MAX_LINE_BYTES:
                self._ended = True
                raise UsageError(f"more than {MAX_LINE_BYTES >> 20} MiB in one line: that is no message")
            if not raw:
                if self._typed:
                    self._err.write("\n")
                return "\n".join(lines) if lines else None
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def show(self, chat: Chat, turn: Turn, steps: Steps) -> None:
        with contextlib.closing(steps):
            for step in steps:
                self._out.write(self._safe("".join(piece.text for piece in step.pieces)))
                self._out.flush()
        self._out.write("\n\n")
        self._out.flush()
        self.fail(status_line(chat, turn, 200))

    def say(self, text: str) -> None:
        self._out.write(self._safe(text) + "\n")
        self._out.flush()

    def fail(self, text: str) -> None:
        self._err.write(f"localspec: {printable(text)}\n")
        self._err.flush()

    def _safe(self, text: str) -> str:
        return printable(text) if self._shown else text


class TerminalScreen:
    """A terminal: an editable prompt with history, answers as Markdown while they come."""

    def __init__(self, history: Path | None, commands: Iterable[str]):
        from rich.console import Console

        from localspec.chat.markdown import THEME
        from localspec.chat.prompt import Prompt

        self._console = Console(highlight=False, emoji=False, theme=THEME)
        self._prompt = Prompt(history, commands)

    def begin(self, name: str, rest: str) -> None:
        room = self._console.width - len(rest)
        self.say((name if len(name) <= room or room < 12 else name[: room - 1] + "…") + rest)

    def read(self) -> str | None:
        try:
            return self._prompt.read()
        except EOFError:
            return None

    def show(self, chat: Chat, turn: Turn, steps: Steps) -> None:
        from localspec.chat.painter import AnswerPainter

        painter = AnswerPainter(self._console, printable(turn.user))
        answer = ""
        with quiet_keys(), contextlib.closing(steps):
            try:
                painter.update("", self._status(chat, turn), now=True)
                for step in steps:
                    answer += "".join(printable(piece.text) for piece in step.pieces)
                    painter.update(answer, self._status(chat, turn))
            finally:
                painter.finish(answer, self._status(chat, turn))
        self._console.print()

    def _status(self, chat: Chat, turn: Turn) -> str:
        return status_line(chat, turn, self._console.width)

    def say(self, text: str) -> None:
        self._console.print(printable(text), markup=False)
        self._console.print()

    def fail(self, text: str) -> None:
        self._console.print(printable(text), style="yellow", markup=False)
        self._console.print()


@contextlib.contextmanager
def quiet_keys() -> Iterator[None]:
    """While an answer is drawn, keys that are typed ahead don't show up in it; they wait for the next prompt."""
    try:
        import termios
    except ImportError:  # Windows does not echo what nobody reads
        yield
        return
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):
        yield
        return
    quiet = list(before)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def open_screen(history: Callable[[], Path | None], commands: Iterable[str], plain: bool = False) -> Screen:
    """The terminal where standard input and output are one that can be drawn on, plain lines otherwise."""
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "") and sys.platform != "win32"
    if plain or dumb or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PlainScreen()
    return TerminalScreen(history(), commands)
