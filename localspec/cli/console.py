"""What standard output may be sent: Rich's console with our answer to a reader that has gone, and whether colours are
wanted."""

from __future__ import annotations

import os

from rich.console import Console


class OutputConsole(Console):
    """Standard output. Where `| head` has had enough, the exception goes on to main(), which ends as any command does:
    Rich itself would leave with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def colours_wanted() -> bool:
    """Whether a terminal may be sent colours; what is no terminal gets none anyway."""
    return "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def counted(n: int, noun: str) -> str:
    """"1 thread", "2 threads"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
