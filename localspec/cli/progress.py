"""A progress bar with rate and time left on a terminal; nothing, or one line, where the output is piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from localspec import fetch

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that advances by one and shows a short note. The bar goes to standard error."""
    if not sys.stderr.isatty():  # Console.is_terminal believes FORCE_COLOR, too
        yield lambda note: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with _progress(*columns) as progress:
        task = progress.add_task(what, total=total, note="")
        yield lambda note: progress.update(task, advance=1, note=note)


@contextmanager
def download(say: Callable[[str], None], verb: str = "fetching") -> Iterator[fetch.Progress]:
    """Yields what a fetch, or other work on bytes, reports to.

    When it begins `say` gets a line; on a terminal a bar follows it while it runs.
    """
    with ExitStack() as stack:
        advance: Callable[[int], None] | None = None

        def report(title: str, n_bytes: int, total: int) -> None:
            nonlocal advance
            if advance is None:
                say(f"{verb} {title}" + (f" ({total / 1e6:.{0 if total > 1e7 else 1}f} MB)" if total else ""))
                advance = _bytes_bar(stack, total) if sys.stderr.isatty() else lambda n: None
            advance(n_bytes)

        yield report


@contextmanager
def transfer(say: Callable[[str], None], verb: str) -> Iterator[fetch.Progress]:
    """Yields what several files in a row are reported to, which their titles tell apart: for each a line through `say`
    ("`verb` TITLE (12 MB)"), and on a terminal a bar."""
    with ExitStack() as stack:
        shown = ""
        advance: Callable[[int], None] = lambda n: None  # noqa: E731

        def report(title: str, n_bytes: int, total: int) -> None:
            nonlocal advance, shown
            if title != shown:
                stack.close()
                shown = title
                size = f"{total / 1e6:.{0 if total > 1e7 else 1}f} MB" if total > 1e5 else f"{total / 1e3:.1f} kB"
                say(f"{verb} {title}" + (f" ({size})" if total else ""))
                if sys.stderr.isatty():
                    advance = _bytes_bar(stack, total)
            advance(n_bytes)

        yield report


def _bytes_bar(stack: ExitStack, total: int) -> Callable[[int], None]:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    progress = stack.enter_context(_progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()))
    task = progress.add_task("", total=total or None)
    return lambda n_bytes: progress.update(task, completed=n_bytes)


def _progress(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)
