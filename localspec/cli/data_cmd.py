"""`localspec data` and `localspec extract`: training data from the target itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from localspec.cli.interrupt import Interrupt
from localspec.cli.loading import open_target, say, target_path
from localspec.cli.options import model_options, sampling_options, take_models, take_sampling
from localspec.data.conversations import read_conversations, unique
from localspec.data.generate import Generator, make_jobs
from localspec.data.selfmade import self_made
from localspec.data.shards import Manifest, ShardWriter
from localspec.data.states import PRECISIONS
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.speculator import TargetIdentity
from localspec.taps import default_taps


def _taps(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(sorted(int(part) for part in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers such as 2,15,27") from None


@click.command("data")
@model_options
@click.option("-o", "--output", required=True, metavar="DIR", help="Where the shards go; begun work is gone on with.")
@click.option("-f", "--prompts", multiple=True, metavar="FILE", help="Prompts: JSONL or plain text.")
@click.option("--self", "n_self", type=click.IntRange(0), default=0, metavar="N",
              help="Prompts that the target invents itself.")
@click.option("--answers", "n_answers", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Answers to every prompt.")
@click.option("--greedy-first/--no-greedy-first", default=True, show_default=True,
              help="Give the first answer to every prompt at temperature 0.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, metavar="N",
              help="Tokens of one answer at most.")
@click.option("--tokens", "n_tokens", type=click.IntRange(0), default=0, metavar="N",
              help="Stop at so many tokens; 0: at the end.")
@click.option("-np", "--parallel", type=click.IntRange(1), default=32, show_default=True, metavar="N",
              help="Answers written at once.")
@click.option("--taps", callback=_taps, metavar="I,J,K",
              help="Layers already applied where states are read; default: three.")
@click.option("--states", type=click.Choice(PRECISIONS), default="q4", show_default=True, help="How states are stored.")
@click.option("--teacher-k", type=click.IntRange(1), default=32, show_default=True, metavar="K",
              help="Likeliest tokens kept for each token.")
@click.option("--thinking", type=click.Choice(["keep", "drop"]), default="keep", show_default=True,
              help="Whether what is thought before an answer counts.")
@click.option("--raw", is_flag=True, help="Prompts are texts to be continued, without the chat template.")
@sampling_options(temperature=0.7)
def data_cmd(
    output: str, prompts: tuple[str, ...], n_self: int, n_answers: int, greedy_first: bool, max_tokens: int, n_tokens: int,
    parallel: int, taps: tuple[int, ...] | None, states: str, teacher_k: int, thinking: str, raw: bool, **options: Any,
) -> None:  # fmt: skip
    """Let the target answer prompts, and keep what it thought.

    Writes shards of tokens, hidden states and likeliest tokens, which localspec train reads. Interrupted at any moment, the
    same command goes on.
    """
    choice, sampling = take_models(options), take_sampling(options)
    folder = Path(output)
    if not prompts and not n_self:
        raise UsageError("nothing to answer: give --prompts FILE, or --self N for prompts that the target invents")
    given = [c for name in prompts for c in read_conversations(Path(name), raw)]
    path = target_path(choice)
    gguf = GGUFFile.open(path, "target")
    wanted = () if states == "none" else taps if taps is not None else default_taps(gguf.n_layer)
    settings = replace(choice.session, n_ctx=choice.session.n_ctx or 1024, taps=wanted)
    manifest = Manifest(
        {**asdict(TargetIdentity.of(gguf)), "file_hash": _file_hash(path)}, list(wanted), states, teacher_k,
        {"max_tokens": max_tokens, "thinking": thinking, **asdict(sampling)},
    )  # fmt: skip
    writer = ShardWriter(folder, manifest)
    with Interrupt() as stopped:
        model, session = open_target(replace(choice, session=settings), path, parallel)
        try:
            if n_self:
                given += self_made(session, folder, n_self, sampling.seed, stopped, _counter(n_self))
            groups = make_jobs(unique(given, "the prompts"), n_answers, sampling, greedy_first, writer.done)
            generator = Generator(session, max_tokens, teacher_k, thinking == "keep")
            _generate(generator, writer, groups, n_tokens, stopped)
        finally:
            session.close()
            model.close()
        stopped.check()


def _counter(n_self: int) -> Callable[[int], None]:
    def made(n: int) -> None:
        if n % 50 == 0:
            say(f"{n}/{n_self} prompts invented")

    return made


def _generate(
    generator: Generator, writer: ShardWriter, groups: list[list[Any]], n_tokens: int, stopped: Interrupt
) -> None:
    n_jobs = sum(map(len, groups))
    progress = generator.progress
    said = flushed = time.monotonic()
    for sample, key in generator.run(groups, stopped):
        writer.add(sample, key)
        now = time.monotonic()
        if now - flushed > 600:
            writer.flush()
        if not writer.n_pending:
            flushed = now
        if now - said > 20:
            said = now
            total = writer.manifest.n_tokens + writer.n_pending
            say(f"{progress.n_samples}/{n_jobs} answers, {total} tokens in all, {progress.rate:.0f} tok/s written, "
                f"{progress.n_prompt} prompt tokens computed")  # fmt: skip
        if n_tokens and writer.manifest.n_tokens + writer.n_pending >= n_tokens:
            break
    writer.flush()
    m = writer.manifest
    say(f"{writer.folder}: {m.n_samples} samples, {m.n_tokens} tokens, {m.n_masked} of them the assistant's")


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
