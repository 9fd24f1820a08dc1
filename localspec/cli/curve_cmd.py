"""`localspec curve`: what verification costs here."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from localspec import native
from localspec.cli.loading import open_target
from localspec.cli.options import model_options, take_models
from localspec.cli.progress import bar
from localspec.curve import measure_curve


@click.command("curve")
@model_options
@click.option("--context", "n_context", type=click.IntRange(1), default=128, show_default=True, metavar="N",
              help="Tokens already in the cache.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, metavar="N", help="Decodes of each size.")
def curve_cmd(n_context: int, rounds: int, **options: Any) -> None:  # fmt: skip
    """Measure the cost curve t(n): the time of one decode of n tokens, n = 1..16 and 32.

    The ceiling is what a free, perfect draft would give. A table, then one line of JSON.
    """
    choice = take_models(options)
    model, session = open_target(choice)
    try:
        with bar("rounds", rounds + 1) as advance:
            curve = measure_curve(session, n_context=n_context, rounds=rounds, progress=lambda done, of: advance(""))
        best, at = curve.ceiling
        table = Table(title=f"{model.description}, {session.n_threads} threads, {n_context} tokens of context")
        for heading in ("n", "ms", "t(n)/t(1)", "most gain"):
            table.add_column(heading, justify="right")
        for n, ms, ratio in zip(curve.n, curve.ms, curve.ratio):
            table.add_row(str(n), f"{ms:.2f}", f"{ratio:.2f}", f"{n / ratio:.2f}x")
        console = Console()
        console.print(table)
        console.print(f"ceiling {best:.2f}x with blocks of {at}; kernels: {native.kernels_in_use()}")
        settings = {"target": str(model.path), "threads": session.n_threads, "context": n_context, "rounds": rounds}
        click.echo(json.dumps({**curve.as_json(), "kernels": native.kernels_in_use(), "settings": settings}))
    finally:
        session.close()
        model.close()
