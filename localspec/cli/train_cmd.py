"""`localspec train KIND`: the options are made from the settings' own dataclasses, so each default stands in one place."""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.loading import default_target, say
from localspec.errors import UsageError
from localspec.train import kinds, need_torch
from localspec.train.live import LiveSettings
from localspec.train.settings import TrainSettings, check, from_dict

if TYPE_CHECKING:
    from localspec.train.target_weights import TargetWeights

DEFAULT_KIND = "eagle3"
STATES = ("offline", "online", "hybrid")
_LIVE = {f.name: f.default for f in dataclasses.fields(LiveSettings)}

_LINE_EVERY = 10  # steps between lines where output is not a terminal
_SHORT = {"threads": "-t"}  # as other commands have it


def _options(cls: Any) -> list[click.Option]:
    made = []
    for f in dataclasses.fields(cls):
        flag, limits = f.name.replace("_", "-"), f.metadata
        kind: Any = typing.get_type_hints(cls)[f.name]
        shown = [*([_SHORT[f.name]] if f.name in _SHORT else []), f"--{flag}"]
        if kind is bool:
            shown, kind = [f"--{flag}/--no-{flag}"], None
        elif limits["choices"]:
            kind = click.Choice(limits["choices"])
        made.append(click.Option(shown, type=kind, default=f.default, show_default=True, help=limits["help"]))
    return made


class _Kinds(click.Group):
    """One command for each file in localspec/train/models."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return kinds.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in kinds.names() else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds"):
            formatter.write_dl([(name, kinds.title(name)) for name in kinds.names()])


def _command(name: str) -> click.Command:
    files: list[click.Parameter] = [
        click.Option(["-m", "--target"], metavar="FILE", help="The target (GGUF) that made the data. [the default model]"),
        click.Option(["--data"], metavar="DIR", help="Shards of localspec data."),
        click.Option(["-o", "--output"], metavar="DIR", help="Where the run goes, or goes on; needed but for --preflight."),
        click.Option(["--eval-data"], metavar="DIR", help="Evaluate on these shards, not on prompts held out."),
        click.Option(["--states"], type=click.Choice(STATES), default="offline", show_default=True,
                     help="offline: all from --data. online: the target writes beside the trainer, nothing goes to disk. "
                          "hybrid: it writes into --data, where later epochs read."),
        click.Option(["-f", "--prompts"], multiple=True, metavar="FILE", help="What the target answers, online and hybrid."),
        click.Option(["--answers"], type=click.IntRange(1), default=_LIVE["answers"], show_default=True,
                     help="Answers to each of these prompts."),
        click.Option(["--temp"], type=float, default=_LIVE["temperature"], show_default=True,
                     help="Temperature of all answers but the first."),
        click.Option(["--max-tokens"], type=click.IntRange(1), default=_LIVE["max_tokens"], show_default=True,
                     help="Tokens of such an answer at most."),
        click.Option(["--init"], metavar="DIR", help="Start from a checkpoint's weights."),
        click.Option(["--preflight"], is_flag=True, help="Only say what must be reached to pay; said at the start, too."),
        click.Option(["--plot"], metavar="PNG", help="Draw the loss and the tokens per verify; needs matplotlib."),
    ]

    def call(**values: Any) -> None:
        _train(name, values)

    params = [*files, *_options(kinds.settings_of(name)), *_options(TrainSettings)]
    return click.Command(name, callback=call, params=params, help=f"Train {kinds.title(name)}.")


@click.group("train", cls=_Kinds, invoke_without_command=True, no_args_is_help=True)
@click.option("--preflight", "look", is_flag=True, help="Say what a draft must reach here to pay.")
@click.option("-m", "--target", metavar="FILE", help="The target (GGUF) to look at. [the default model]")
@click.option("-t", "--threads", type=click.IntRange(0, 512), metavar="N",
              help="CPU threads that decode in the look; 0: one per core.")
@click.pass_context
def train_cmd(ctx: click.Context, look: bool, target: str | None, threads: int | None) -> None:
    """Train a speculator on what its target wrote.

    A run that was ended, in whatever way, goes on with the same command.
    """
    if ctx.invoked_subcommand is not None:
        if look or target is not None or threads is not None:
            raise UsageError(f"options stand behind the kind: localspec train {ctx.invoked_subcommand} ...")
        return
    if not look:
        raise UsageError("give a kind to train, such as eagle3, or --preflight")
    need_torch()
    from localspec.train import models
    from localspec.train.target_weights import TargetWeights

    opened = TargetWeights(Path(target) if target is not None else default_target())
    kind = models.find(DEFAULT_KIND)
    _preflight(kind, kind.Settings(), opened, models.taps_of(kind, opened.gguf), None, threads or 0)


def _preflight(
    kind: Any, settings: Any, target: TargetWeights, taps: tuple[int, ...], out: Path | None, n_threads: int
) -> None:
    from localspec.train import models, preflight

    shape = kind.shape_of(settings, target, taps)
    size = models.n_parameters(kind, settings, target, taps)
    read = taps if kind.NEEDS_TAPS else None
    found = preflight.preflight(target.gguf, read, shape.depth, size, out, n_threads=n_threads)
    for line in found.lines:
        say(line)
    for line in found.warnings:
        say(f"warning: {line}")


def _train(name: str, values: dict[str, Any]) -> None:
    need_torch()  # one line in place of an import's traceback
    from localspec.data.shards import Manifest
    from localspec.picture import need_picture
    from localspec.train import checkpoint, loop, metrics, models
    from localspec.train.distributed import World
    from localspec.train.target_weights import TargetWeights

    picture, only_look = values.pop("plot"), values.pop("preflight")
    how = {n: values.pop(n) for n in ("states", "prompts", "answers", "temp", "max_tokens")}
    nothing_yet = only_look and values["data"] is None and how["states"] == "offline"
    live = None if nothing_yet else _live(how, values["data"])
    if picture is not None:
        need_picture(Path(picture))
    paths = {n: values.pop(n) for n in ("target", "data", "output", "eval_data", "init")}
    cls = kinds.settings_of(name)
    own = {f.name for f in dataclasses.fields(cls)}
    if nothing_yet:
        opened = TargetWeights(Path(paths["target"]) if paths["target"] is not None else default_target())
        settings = from_dict(cls, {k: v for k, v in values.items() if k in own}, name)
        out = Path(paths["output"]) if paths["output"] else None
        kind, n_threads = models.find(name), values["threads"]
        _preflight(kind, settings, opened, models.taps_of(kind, opened.gguf), out, n_threads)
        return
    if paths["output"] is None:
        raise UsageError("give -o DIR, where the run goes")
    run = loop.Run(
        method=name,
        target=Path(paths["target"]) if paths["target"] is not None else default_target(),
        data=Path(paths["data"]) if paths["data"] else None,
        out=Path(paths["output"]),
        settings=from_dict(TrainSettings, {k: v for k, v in values.items() if k not in own}, "train"),
        model_settings=from_dict(cls, {k: v for k, v in values.items() if k in own}, name),
        start_from=_checkpoint(paths["init"]),
        eval_data=Path(paths["eval_data"]) if paths["eval_data"] else None,
        live=live,
    )
    check(run.settings)
    check(run.model_settings)
    if run.out.exists() and not run.out.is_dir():
        raise UsageError(f"{run.out} is not a directory: give another -o")
    if World.is_first() and (only_look or checkpoint.settled(run.out / "last") is None):
        opened = TargetWeights(run.target)
        ready = run.data is not None and live is None
        taps = tuple(Manifest.load(run.data).taps) if ready and run.data else models.taps_of(models.find(name), opened.gguf)
        _preflight(models.find(name), run.model_settings, opened, taps, run.out, run.settings.threads)
    if only_look:
        return
    report = loop.train(run, say, _Display())
    if not World.is_first():
        return
    say(f"{run.out / 'best'}: {report.score:.3f} tokens per verify at {report.n_max} drafted, at the end")
    if picture is not None:
        metrics.plot(run.out, Path(picture))
        say(f"{picture} drawn")


def _live(values: dict[str, Any], data: str | None) -> LiveSettings | None:
    """How the target writes meanwhile; None where all data is there."""
    states, prompts = values["states"], values["prompts"]
    if states == "offline":
        if prompts:
            raise UsageError("--prompts is for --states online and hybrid; localspec data makes shards of them beforehand")
        if data is None:
            raise UsageError("give --data, or --states online with --prompts")
        return None
    if not prompts:
        raise UsageError(f"--states {states}: give the --prompts that the target shall answer")
    if (data is None) != (states == "online"):
        raise UsageError("--states online writes nothing: leave --data out" if data else "--states hybrid needs --data")
    return LiveSettings(
        tuple(map(Path, prompts)), answers=values["answers"], temperature=values["temp"], max_tokens=values["max_tokens"]
    )


def _checkpoint(folder: str | None) -> Path | None:
    """A checkpoint's directory, or a run's best one."""
    if folder is None:
        return None
    path = Path(folder)
    return path / "best" if (path / "best").is_dir() else path


class _Display:
    """One line that changes on a terminal; now and then a line elsewhere."""

    def __init__(self) -> None:
        self.moving = sys.stderr.isatty()
        self.open = False
        self.seconds: float | None = None  # of a step, smoothed

    def __call__(self, line: dict[str, Any]) -> None:
        if "eval" in line:
            self._end()
            say(_evaluation(line["step"], line["eval"]))
            return
        self.seconds = line["seconds"] if self.seconds is None else 0.9 * self.seconds + 0.1 * line["seconds"]
        right = " ".join("-" if r is None else f"{r:.2f}" for r in line["right_by_depth"])
        left = self.seconds * (line["total"] - line["step"])
        text = (f"step {line['step']}/{line['total']}  loss {line['loss']:.3f}  right {right}  "
                f"{line['tokens'] / self.seconds:,.0f} tok/s  {left / 60:.0f} min left")  # fmt: skip
        if self.moving:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)
            self.open = True
            if line["step"] == line["total"]:
                self._end()
        elif line["step"] % _LINE_EVERY == 0 or line["step"] == line["total"]:
            say(text)

    def _end(self) -> None:
        if self.open:
            click.echo(err=True)
            self.open = False


def _evaluation(step: int, found: dict[str, Any]) -> str:
    by_n = "  ".join(f"{n}: {value:.2f}" for n, value in found["by_n_max"].items())
    by_source = "  ".join(f"{source} {walk['tokens_per_verify']:.2f}" for source, walk in found["by_source"].items())
    position = " ".join("-" if a is None else f"{a:.2f}" for a in found["acceptance"])
    reached = f"step {step}: tokens per verify by drafted  {by_n};  at {found['n_max']}  {by_source}"
    return f"{reached};  each kept, given the one before, {position}"
