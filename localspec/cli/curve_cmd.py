"""`localspec curve`: what verification costs here."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from localspec import native, profile
from localspec.cli.console import OutputConsole, counted
from localspec.cli.help import Command, option
from localspec.cli.interrupt import Interrupt
from localspec.cli.loading import open_target, profile_key, say, target_path
from localspec.cli.options import ModelChoice, model_options, take_models
from localspec.cli.progress import bar
from localspec.curve import DEFAULT_SIZES, Child, Curve, Probe, measure_curves
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile

#: What --compare sets beside each other.
SIDES = ("stock", "localspec")


def _sizes(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        return DEFAULT_SIZES
    try:
        sizes = tuple(sorted({1, *(int(part) for part in value.split(","))}))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers such as 1,2,4,8") from None
    if sizes[0] < 1:
        raise click.BadParameter(f"{sizes[0]} tokens can't be decoded")
    return sizes


@click.command("curve", cls=Command)
@model_options
@option("Measuring", "--sizes", callback=_sizes, metavar="N,N,...",
        help="Block sizes; 1 is always measured. [default: 1 to 16 and 32]")
@option("Measuring", "--context", "n_context", type=click.IntRange(1), default=128, show_default=True, metavar="N",
        help="Tokens already in the cache.")
@option("Measuring", "--rounds", type=click.IntRange(1), default=7, show_default=True, metavar="N",
        help="Decodes of each size.")
@option("Measuring", "--compare", is_flag=True, help="Measure llama.cpp's own kernels and ours, in turn.")
@click.option("--serve", is_flag=True, hidden=True, help="Measure one round for each line of standard input.")
def curve_cmd(
    sizes: tuple[int, ...], n_context: int, rounds: int, compare: bool, serve: bool, **options: Any
) -> None:  # fmt: skip
    """Measure the cost curve t(n): the time of one decode of n tokens.

    The ceiling is what a free, perfect draft would give. A table, then one line of JSON. Later runs that draft begin with
    what was measured.
    """
    choice = take_models(options)
    if compare and choice.kernels != "auto":
        raise UsageError("--compare measures both kinds of kernels: leave --kernels out")
    if compare and choice.rpc:
        raise UsageError("--compare measures the kernels of this machine: leave --rpc out")
    target = target_path(choice)
    # Raised inside of a fork or of llama.cpp's log, a KeyboardInterrupt would be lost: it waits for the next round.
    with Interrupt() as interrupt:
        if compare:
            _compare(choice, target, sizes, n_context, rounds, interrupt)
        else:
            _measure(choice, target, sizes, n_context, rounds, serve, interrupt)


def _measure(
    choice: ModelChoice, target: Path, sizes: tuple[int, ...], n_context: int, rounds: int, serve: bool,
    interrupt: Interrupt,
) -> None:  # fmt: skip
    with Interrupt(leave=True) as loading:
        model, session = open_target(choice, target)
    try:
        loading.check()
        if serve:
            _serve(Probe(session, sizes, n_context), model.description, session.n_threads)
            return
        probe = Probe(session, sizes, n_context)
        with bar("rounds", rounds + 1) as advance:

            def progress(done: int, of: int) -> None:
                interrupt.check()
                advance("")

            curve = measure_curves({"": (sizes, probe.round)}, rounds, progress=progress)[""]
        best, at = curve.ceiling
        table = _headed_table(model.description, session.n_threads, n_context, ("n", "ms", "t(n)/t(1)", "most gain"))
        for n, ms, ratio in zip(curve.n, curve.ms, curve.ratio):
            table.add_row(str(n), f"{ms:.2f}", f"{ratio:.2f}", f"{n / ratio:.2f}x")
        console = OutputConsole()
        console.print(table)
        console.print(f"ceiling {best:.2f}x with blocks of {at}; kernels: {native.kernels_in_use()}")
        settings = {"target": str(model.path), "threads": session.n_threads, "context": n_context, "rounds": rounds}
        line = {**curve.as_json(), "prefill_ms": probe.prefill_ms, "kernels": native.kernels_in_use()}
        click.echo(json.dumps({**line, "settings": settings}))
        _keep(choice, model.gguf, session.n_threads, native.kernels_in_use(), curve)
    finally:
        session.close()
        model.close()


def _headed_table(description: str, n_threads: int, n_context: int, headings: Sequence[str]) -> Table:
    # A line above instead of a title: a title is wrapped to the width of its table.
    title = f"{description}, {counted(n_threads, 'thread')}, {n_context} tokens of context"
    OutputConsole().print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _serve(probe: Probe, description: str, n_threads: int) -> None:
    """The child's side of `localspec.curve.Child`."""
    ready = {"prefill_ms": probe.prefill_ms, "kernels": native.kernels_in_use()}
    click.echo(json.dumps({**ready, "description": description, "threads": n_threads}))
    for _ in sys.stdin:
        click.echo(json.dumps(probe.round()))


def _compare(
    choice: ModelChoice, target: Path, sizes: tuple[int, ...], n_context: int, rounds: int, interrupt: Interrupt
) -> None:
    s = choice.session
    arguments = [
        "curve", "--serve", "-m", str(target), "-c", str(s.n_ctx), "-t", str(s.n_threads), "-ngl", str(choice.n_gpu_layers),
        "-fa", s.flash_attention, "-ctk", s.type_k, "-ctv", s.type_v, "--context", str(n_context),
        "--sizes", ",".join(map(str, sizes)), "--mmap" if choice.use_mmap else "--no-mmap",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        # One after the other: while one loads and reads its context, the other is not there yet or waits.
        children = {}
        for name in SIDES:
            children[name] = stack.enter_context(Child([*arguments, "--kernels", name]))
            interrupt.check()
        advance = stack.enter_context(bar("rounds", rounds + 1))

        def progress(done: int, of: int) -> None:
            interrupt.check()
            advance("")

        curves = measure_curves({name: (sizes, child.round) for name, child in children.items()}, rounds, progress)
        ready = {name: child.ready for name, child in children.items()}
    stock, ours = (curves[name] for name in SIDES)
    headings = ("n", "stock ms", "t(n)/t(1)", "localspec ms", "t(n)/t(1)", "localspec/stock")
    table = _headed_table(ready["stock"]["description"], ready["stock"]["threads"], n_context, headings)
    for n, ms, ratio, our_ms, our_ratio in zip(stock.n, stock.ms, stock.ratio, ours.ms, ours.ratio):
        table.add_row(str(n), f"{ms:.2f}", f"{ratio:.2f}", f"{our_ms:.2f}", f"{our_ratio:.2f}", f"{our_ms / ms:.2f}")
    console = OutputConsole()
    console.print(table)
    console.print(
        f"{n_context} tokens of context read in {ready['stock']['prefill_ms']:.0f} ms and "
        f"{ready['localspec']['prefill_ms']:.0f} ms"
    )
    line = {name: {**_side(curves[name]), "prefill_ms": ready[name]["prefill_ms"]} for name in SIDES}
    settings = {"target": str(target), "threads": ready["stock"]["threads"], "context": n_context, "rounds": rounds}
    settings |= {"flash_attention": s.flash_attention, "type_k": s.type_k, "type_v": s.type_v}
    click.echo(json.dumps({**line, "settings": settings}))
    gguf = GGUFFile.open(target, "target")
    for name in SIDES:
        _keep(choice, gguf, ready[name]["threads"], ready[name]["kernels"], curves[name])


def _keep(choice: ModelChoice, target: GGUFFile, n_threads: int, kernels: str, curve: Curve) -> None:
    """For later runs that draft; what can't be kept is no fault of the measurement."""
    if len(curve.n) < 2:
        return
    key = profile_key(choice, target, n_threads, kernels)
    if key is None or profile.store(key, dict(zip(curve.n, curve.ratio))) is None:
        say("the curve is not kept for later runs: the cache can't be written to (LOCALSPEC_CACHE)")


def _side(curve: Curve) -> dict[str, Any]:
    return {"n": list(curve.n), "ms": list(curve.ms), "ratio": list(curve.ratio)}
