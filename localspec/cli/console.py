"""Rich's console for standard output, with our answer to a reader that has gone."""

from __future__ import annotations

from rich.console import Console


class OutputConsole(Console):
    """Standard output. Where `| head` has had enough, the exception goes on to main(), which ends as any command does:
    Rich itself would leave with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
