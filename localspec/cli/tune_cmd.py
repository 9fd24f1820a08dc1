"""`localspec tune`: how many tokens would be drafted here, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from localspec import profile
from localspec.accept import Sampling
from localspec.advice import Advice, advise
from localspec.bench import encode_prompts
from localspec.cli.console import OutputConsole, counted
from localspec.cli.help import Command, option
from localspec.cli.interrupt import Interrupt
from localspec.cli.loading import Loaded, open_engine
from localspec.cli.options import draft_options, model_options, sampling_options, take_models, take_sampling
from localspec.cli.progress import bar
from localspec.control import Adaptive
from localspec.curve import Curve, Probe, measure_curves
from localspec.engine import Engine, Request, Stats
from localspec.errors import UsageError
from localspec.picture import need_picture, save
from localspec.prompts import BUILT_IN, spread

_ROUNDS = 3  # of the curve: where the text will go it is measured again
_CONTEXT = 128
_MOST_ROWS = 17


@click.command("tune", cls=Command)
@model_options
@draft_options
@sampling_options()
@option("Measuring", "--tokens", "n_tokens", type=click.IntRange(1), default=400, show_default=True, metavar="N",
        help="Tokens written to learn from, of six prompts of our own.")
@option("Output", "--plot", "picture", metavar="PNG", help="Draw it, too; needs matplotlib.")
def tune_cmd(n_tokens: int, picture: str | None, **options: Any) -> None:  # fmt: skip
    """Say how many tokens would be drafted on this machine, and why.

    Measures decodes of a few sizes, writes some text, and prints what was learnt of costs and drafts. Tables, then one line
    of JSON. Other commands choose by themselves: there is nothing to copy.
    """
    if picture is not None:
        need_picture(Path(picture))
    sampling = take_sampling(options)
    choice = take_models(options)
    if not choice.adapt:
        raise UsageError("tune shows how many tokens are chosen: leave --no-spec-adapt out")
    loaded = open_engine(choice)
    try:
        if loaded.drafter is None:
            raise UsageError("nothing to tune: there is no drafter (--spec-type none, or a model that can't roll back)")
        with Interrupt() as interrupt:
            curve = _curve(loaded, choice.n_max, interrupt)
            if loaded.profile_key is not None:
                profile.store(loaded.profile_key, dict(zip(curve.n, curve.ratio)))
            controller = Adaptive(choice.n_max, dict(zip(curve.n, curve.ratio)))
            loaded.engine = Engine(loaded.session, loaded.drafter, controller, choice.rule)
            stats = _write(loaded, sampling, n_tokens, interrupt)
        advice = advise(controller)
        if advice is None:
            raise UsageError(f"--tokens {n_tokens}: nothing was decoded, so nothing is known; give more")
        if picture is not None:
            _draw(advice, loaded, Path(picture))
        _report(advice, loaded, stats)
        settings = {
            "target": str(loaded.model.path), "draft": str(loaded.draft_path) if loaded.draft_path else None,
            "spec_type": loaded.drafter.name, "n_max": choice.n_max, "accept": choice.rule, "kernels": loaded.kernels,
            "threads": loaded.session.n_threads, "tokens": stats.n_generated, "temperature": sampling.temperature,
        }  # fmt: skip
        click.echo(json.dumps({**advice.as_json(), "measured_tok_s": round(_rate(stats), 2), "settings": settings}))
    finally:
        loaded.close()


def _curve(loaded: Loaded, n_max: int, interrupt: Interrupt) -> Curve:
    """t(n) of the blocks that may come; each is seen in this session, which is left empty."""
    session = loaded.session
    sizes = sorted({*range(1, min(n_max + 1, _MOST_ROWS) + 1), n_max + 1})
    probe = Probe(session, sizes, max(1, min(_CONTEXT, session.n_ctx - sizes[-1])))
    with bar("costs", _ROUNDS + 1) as advance:

        def progress(done: int, of: int) -> None:
            interrupt.check()
            advance("")

        curve = measure_curves({"": (probe.sizes, probe.round)}, _ROUNDS, progress)[""]
    session.rollback(0, 0)
    return curve


def _write(loaded: Loaded, sampling: Sampling, n_tokens: int, interrupt: Interrupt) -> Stats:
    """At most so many tokens, of each prompt about as many."""
    prompts = spread(list(BUILT_IN), len(BUILT_IN))
    each = max(32, -(-n_tokens // len(prompts)))
    total = Stats()
    with bar("prompts", len(prompts)) as advance:
        for number, tokens in enumerate(encode_prompts(loaded.model, loaded.session.n_ctx, prompts)):
            left = n_tokens - total.n_generated
            if left <= 0:
                break
            for _ in loaded.engine.generate(Request(tokens, sampling, min(each, left), key=number), interrupt):
                pass
            total.add(loaded.engine.finish(0))
            interrupt.check()
            advance("")
    return total


def _rate(stats: Stats) -> float:
    return stats.n_generated / stats.t_step if stats.t_step else 0.0


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], bold: Callable[[int], bool]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for i, row in enumerate(rows):
        table.add_row(*row, style="bold" if bold(i) else None)
    return table


def _report(advice: Advice, loaded: Loaded, stats: Stats) -> None:
    console = OutputConsole()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    drafter = loaded.drafter.name if loaded.drafter else "none"
    threads = counted(loaded.session.n_threads, "thread")
    say(f"{loaded.model.description}, drafter {drafter}, kernels {loaded.kernels}, {threads}")
    costs = [
        (str(c.n), f"{c.ms:.2f}", f"{c.ratio:.2f}", f"{c.ceiling:.2f}x", str(c.seen) if c.seen else "-")
        for c in advice.costs
    ]
    console.print(_table("costs of a decode", ("n", "ms", "t(n)/t(1)", "most gain", "seen"), costs, lambda i: False))
    kept = [
        (str(j + 1), f"{chance:.2f}", f"{alive:.2f}")
        for j, (chance, alive) in enumerate(zip(advice.chances, advice.survival))
    ]
    if stats.n_drafted:
        console.print(_table("drafted tokens", ("place", "kept if reached", "kept"), kept, lambda i: False))
        sure = [(f"{c:.2f}", f"{share:.2f}", str(n)) for c, share, n in advice.calibration]
        console.print(_table("what its confidence is worth", ("confidence", "kept", "tokens"), sure, lambda i: False))
    else:
        say("nothing was drafted: what follows is a guess before any draft")
    choices = [
        (str(c.k), f"{c.tokens:.2f}", f"{c.draft_ms:.2f}", f"{c.ms:.2f}", f"{c.tok_s:.1f}", f"{c.speedup:.2f}x")
        for c in advice.choices
    ]
    headings = ("drafted", "tokens a step", "drafting ms", "ms in all", "tok/s", "speed-up")
    console.print(_table("what is expected of k drafted tokens", headings, choices, lambda i: i == advice.k))
    top = advice.ceiling
    say(f"ceiling: {top.ceiling:.2f}x, of a free, perfect draft in blocks of {top.n}")
    if len(advice.choices) > 1 and advice.choices[-1].draft_ms:
        last = advice.choices[-1]
        say(f"drafting costs {last.draft_ms / last.k:.3f} ms a token in drafts of {last.k}")
    say(f"measured: {stats.n_generated} tokens at {_rate(stats):.1f} tok/s, trials and plain steps among them; "
        f"plain is {advice.choices[0].tok_s:.1f}")  # fmt: skip
    say(f"would draft {advice.k or 'nothing'}: {advice.reason}")
    say(f"expected speed-up against plain: {advice.speedup:.2f}x")


def _draw(advice: Advice, loaded: Loaded, picture: Path) -> None:
    """Costs, survival, and what comes of both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    n = [c.n for c in advice.costs]
    left.plot(n, [c.ratio for c in advice.costs], "o-", markersize=4)
    left.set(xlabel="tokens in a decode", ylabel="t(n) / t(1)", title=f"costs, kernels {loaded.kernels}", ylim=(0, None))
    places = range(1, len(advice.survival) + 1)
    middle.plot(places, advice.survival, "o-", markersize=4, label="kept")
    middle.plot(places, advice.chances, ".--", linewidth=1, label="kept if reached")
    middle.set(xlabel="place in the draft", ylabel="share", title="drafted tokens", ylim=(0, 1.05))
    middle.legend(fontsize="small")
    k = [c.k for c in advice.choices]
    right.plot(k, [c.speedup for c in advice.choices], "o-", markersize=4)
    right.plot([advice.k], [advice.speedup], "ko", markersize=9, fillstyle="none")
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(xlabel="tokens drafted", ylabel="speed-up against plain", title=f"would draft {advice.k or 'nothing'}")
    save(figure, picture)
