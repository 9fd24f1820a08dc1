"""Help with the options under headings: some commands have more of them than one list can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

#: In the order in which they are shown; what has none of these comes last.
HEADINGS = ("Prompt", "Measuring", "Server", "Model", "Context", "Speculation", "Sampling", "Output", "Machine")

F = TypeVar("F", bound=Callable[..., Any])


class _Option(click.Option):
    def __init__(self, *args: Any, heading: str, **settings: Any):
        if heading not in HEADINGS:
            raise ValueError(f"no heading is called {heading}")
        super().__init__(*args, **settings)
        self.heading = heading


def option(heading: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """click.option, shown by a Command under one of HEADINGS."""
    return click.option(*names, cls=_Option, heading=heading, **settings)


class Command(click.Command):
    """A command whose help groups its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*HEADINGS, "Other")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                rows[param.heading if isinstance(param, _Option) else "Other"].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
