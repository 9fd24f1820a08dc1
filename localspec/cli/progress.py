"""A progress bar with rate and time left on a terminal; nothing where the output is piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that advances by one and shows a short note. The bar goes to standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda note: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, note="")
        yield lambda note: progress.update(task, advance=1, note=note)
