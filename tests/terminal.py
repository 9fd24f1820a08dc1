"""A terminal for tests: a command behind a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pexpect
import pyte


class Terminal:
    """Runs ``localspec ARGS...`` on a screen of `columns` by `rows`; `raw` is every byte that it wrote.

    With `python` it is ``python ARGS...``.
    """

    def __init__(
        self, *args: object, env: Mapping[str, str], cwd: Path, columns: int = 80, rows: int = 24, python: bool = False
    ):
        self.screen = pyte.HistoryScreen(columns, rows, history=2000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.process = pexpect.spawn(
            sys.executable,
            [*(() if python else ("-m", "localspec")), *map(str, args)],
            env={"TERM": "xterm-256color", **env},
            cwd=str(cwd),
            dimensions=(rows, columns),
            timeout=5,
        )

    @property
    def rows(self) -> list[str]:
        """The lines on the screen, without blanks at their ends."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The screen as one text."""
        return "\n".join(self.rows).rstrip()

    @property
    def all_text(self) -> str:
        """What has scrolled away, and the screen."""
        top = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top]
        return "\n".join([*top, *self.rows]).rstrip()

    def pump(self, seconds: float = 0.1) -> bool:
        """Take what the command has written; False when it has ended."""
        try:
            chunk = self.process.read_nonblocking(65536, seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += chunk
        self._stream.feed(chunk)
        return True

    def until(self, seen: str | Callable[[], bool], timeout: float = 60) -> str:
        """Wait until a text is on the screen (or a condition holds); returns the screen."""
        holds = seen if callable(seen) else (lambda: seen in self.text)
        end = time.monotonic() + timeout
        alive = True
        while not holds():
            if not alive or time.monotonic() > end:
                raise AssertionError(f"{'never saw' if alive else 'ended without'} {seen!r} on this screen:\n{self.text}")
            alive = self.pump()
        return self.text

    def settle(self, quiet: float = 0.3) -> str:
        """Wait until nothing has been written for a while; returns the screen."""
        while True:
            before = len(self.raw)
            if not self.pump(quiet) or len(self.raw) == before:
                return self.text

    def send(self, keys: str) -> None:
        """Press keys; Enter is ``\\r``."""
        self.process.send(keys)

    def at_prompt(self) -> bool:
        """Whether the cursor stands behind an empty prompt."""
        return self.rows[self.screen.cursor.y] == ">" and self.screen.cursor.x == 2

    def resize(self, columns: int, rows: int) -> None:
        """Another size of the window, as the person pulls at its corner."""
        screen = self.screen
        if rows < screen.lines:
            # pyte drops rows at the top whatever the cursor says; terminals drop blank ones below it first.
            at, last = screen.cursor.y, screen.lines - 1
            screen.cursor.y = last
            for _ in range(max(0, at - rows + 1)):
                screen.index()
            screen.cursor.y = min(at, rows - 1)
            for row in range(rows, screen.lines):
                screen.buffer.pop(row, None)
            screen.lines = rows
        screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    def wait(self, timeout: float = 30) -> int:
        """The exit code, once it has ended."""
        end = time.monotonic() + timeout
        while self.pump() and time.monotonic() < end:
            pass
        self.process.close()
        return self.process.exitstatus if self.process.exitstatus is not None else -(self.process.signalstatus or 0)

    def close(self) -> None:
        """End the command, whatever it does."""
        self.process.close(force=True)
