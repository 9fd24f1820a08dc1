"""`localspec bench`: plain against speculative, honestly."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table
from rich.text import Text

from localspec.bench import Group, Result, run_bench
from localspec.cli.console import OutputConsole
from localspec.cli.help import Command, option
from localspec.cli.loading import Loaded, open_engine
from localspec.cli.options import (
    ModelChoice,
    draft_options,
    model_options,
    sampling_options,
    take_models,
    take_sampling,
)
from localspec.cli.progress import bar
from localspec.engine import Engine
from localspec.errors import LocalspecError, UsageError
from localspec.peer import Peers
from localspec.prompts import BUILT_IN, Prompt, read_prompts, spread


@click.command("bench", cls=Command)
@model_options
@draft_options
@sampling_options(temperature=0.0)
@option("Measuring", "--prompts", "prompts_file", metavar="FILE",
        help='Prompts, a line each: {"prompt": "..."} or {"turns": ["..."], "source": "..."}. [six of our own]')
@option("Measuring", "--limit", type=click.IntRange(0), default=0, metavar="N", help="At most N prompts; 0: all.")
@option("Measuring", "-n", "--n-predict", "n_predict", type=click.IntRange(1), default=128, show_default=True, metavar="N",
        help="Tokens per prompt.")
@option("Measuring", "--peer-llama-server", "peer", metavar="PATH",
        help="Start this llama-server with the same files and flags and measure it beside ours.")
@option("Measuring", "--sweep", "sweeping", is_flag=True,
        help="Measure a grid: tokens drafted x texts at once x temperature. A sweep with --json or --html that was killed "
             "goes on where it stopped.")
@option("Measuring", "--n-max-list", "n_max_list", metavar="N,N,...",
        help="--sweep: tokens drafted each time.  [default: 1,2,3,5,8]")
@option("Measuring", "--concurrency", metavar="N,N,...", help="--sweep: texts written at once.  [default: 1,4,16]")
@option("Measuring", "--temps", metavar="T,T,...", help="--sweep: temperatures.  [default: 0,0.8]")
@option("Output", "--json", "json_file", metavar="FILE", help="--sweep: write the JSON there, not to standard output.")
@option("Output", "--html", "html_file", metavar="FILE", help="--sweep: write a page with plots and tables there.")
@option("Output", "--force", is_flag=True, help="--sweep: replace results that are there.")
@click.pass_context
def bench_cmd(
    context: click.Context, prompts_file: str | None, limit: int, n_predict: int, peer: str | None, sweeping: bool,
    n_max_list: str | None, concurrency: str | None, temps: str | None, json_file: str | None, html_file: str | None,
    force: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure plain against speculative decoding on the same prompts.

    Greedy unless --temp is given. A table by source, then one line of JSON.
    """
    of_sweep = {"--json": json_file, "--html": html_file}
    for flag, name in (("--prompts", prompts_file), ("--peer-llama-server", peer), *of_sweep.items()):
        if name == "":
            raise UsageError(f"{flag} '': no name given (an unset variable?); name a file, or leave {flag} out")
    of_sweep |= {"--n-max-list": n_max_list, "--concurrency": concurrency, "--temps": temps}
    of_sweep["--force"] = "" if force else None
    unused = [flag for flag, value in of_sweep.items() if value is not None]
    if unused and not sweeping:
        raise UsageError(f"{unused[0]} is for a sweep: add --sweep, or leave {unused[0]} out")
    if sweeping and context.get_parameter_source("temperature") is not ParameterSource.DEFAULT:
        raise UsageError("--sweep takes its temperatures from --temps: leave --temp out")
    sampling = take_sampling(options)
    choice = take_models(options)
    prompts = spread(read_prompts(Path(prompts_file)) if prompts_file else list(BUILT_IN), limit)
    if peer and not Path(peer).is_file():
        raise UsageError(f"--peer-llama-server {peer}: no such file")
    if sweeping:
        from localspec.cli.bench_sweep import Wish, sweep

        wish = Wish(
            "1,2,3,5,8" if n_max_list is None else n_max_list, "1,4,16" if concurrency is None else concurrency,
            "0,0.8" if temps is None else temps, json_file, html_file, peer, force,
        )  # fmt: skip
        sweep(choice, sampling, prompts, prompts_file, n_predict, wish)
        return
    loaded = open_engine(choice)
    try:
        if loaded.drafter is None:
            raise UsageError("nothing to compare: there is no drafter (--spec-type none, or a model that can't roll back)")
        plain = Engine(loaded.session, rule=choice.rule)
        settings = settings_in_effect(loaded, choice, asdict(sampling), prompts, prompts_file, n_predict)
        result, peers = Result(), None
        try:
            with contextlib.ExitStack() as stack:
                peers = stack.enter_context(Peers(Path(peer).absolute(), settings, sampling)) if peer else None
                advance = stack.enter_context(bar("prompts", len(prompts)))
                run_bench(
                    plain,
                    loaded.engine,
                    prompts,
                    sampling,
                    n_predict,
                    progress=lambda r: advance(f"{r.total.speedup:.2f}x"),
                    beside=peers.measure if peers else lambda tokens, text: None,
                    result=result,
                )
        except (KeyboardInterrupt, LocalspecError):
            if result.total.n:  # hours, perhaps
                _report(result, loaded.drafter.name, peers, settings)
            raise
        _report(result, loaded.drafter.name, peers, settings)
    finally:
        loaded.close()


def _report(result: Result, drafter: str, peers: Peers | None, settings: dict[str, Any]) -> None:
    """The table, then the line of JSON."""
    n_done, n_all = result.total.n, settings["n_prompts"]
    _table(result, drafter if n_done == n_all else f"{drafter}, {n_done} of {n_all} prompts", peers)
    line = {**result.as_json(), "complete": n_done == n_all, "kernels": settings["kernels"], "settings": settings}
    if peers is not None:
        line["peer"] = peers.as_json()
    click.echo(json.dumps(line))


def settings_in_effect(
    loaded: Loaded, choice: ModelChoice, sampling: dict[str, Any], prompts: list[Prompt], file: str | None, n_predict: int
) -> dict[str, Any]:
    """Every setting in effect, defaults resolved."""
    return {
        "target": str(loaded.model.path),
        "draft": str(loaded.draft_path) if loaded.draft_path else None,
        "spec_type": loaded.drafter.name if loaded.drafter else "none",
        "n_max": choice.n_max,
        "p_min": choice.p_min,
        "adapt": choice.adapt,
        "trees": choice.trees,
        "accept": choice.rule,
        "n_predict": n_predict,
        "n_ctx": loaded.session.n_ctx,
        "n_batch": loaded.session.n_batch,
        "threads": loaded.session.n_threads,
        "n_gpu_layers": choice.n_gpu_layers,
        "n_gpu_layers_draft": choice.n_gpu_layers_draft,
        "flash_attention": choice.session.flash_attention,
        "type_k": choice.session.type_k,
        "type_v": choice.session.type_v,
        "kernels": loaded.kernels,
        "prompts": file or "built-in",
        "n_prompts": len(prompts),
        **sampling,
    }


def _table(result: Result, drafter: str, peers: Peers | None) -> None:
    table = Table(title=f"plain against {drafter}")
    table.add_column("source", no_wrap=True)
    for heading in ("n", "plain tok/s", "spec tok/s", "speed-up", "kept", "per verify"):
        table.add_column(heading, justify="right")
    table.add_column("same text")
    for name, group in result.by_source.items():
        _row(table, name, group)
    table.add_section()
    _row(table, "all", result.total)
    console = OutputConsole()
    console.print(table)
    for d in result.total.differences:
        console.print(
            f"prompt {d.prompt}: texts part at token {d.token}; the target's logits of the two differ by {d.margin:.4f}"
        )
    if peers is not None:
        theirs = peers.as_json()
        console.print(
            f"llama-server beside it: plain {theirs['plain']['tok_per_s']:.1f} tok/s, "
            f"drafting {theirs['spec']['tok_per_s']:.1f} tok/s"
        )


def _row(table: Table, name: str, group: Group) -> None:
    stats = group.spec.stats
    accepted = "-" if stats.acceptance is None else f"{stats.acceptance:.2f}"
    n_different = len(group.differences)
    table.add_row(
        Text(name),  # from a file: its brackets are no markup
        str(group.n),
        f"{group.plain.tok_per_s():.1f}",
        f"{group.spec.tok_per_s():.1f}",
        f"{group.speedup:.2f}x",
        accepted,
        f"{stats.tokens_per_verify:.2f}",
        "yes" if n_different == 0 else f"no ({n_different})",
    )
