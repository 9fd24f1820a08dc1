"""`localspec data` and `localspec extract`: training data from the target itself."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from localspec import __version__
from localspec.cli.console import counted
from localspec.cli.interrupt import Interrupt
from localspec.cli.loading import open_target, say, target_path
from localspec.cli.options import ModelChoice, model_options, sampling_options, take_models, take_sampling
from localspec.cli.progress import bar
from localspec.data import hf, library, plan
from localspec.data.conversations import Conversation, read_conversations, unique
from localspec.data.endpoints import Endpoint
from localspec.data.extract import extract
from localspec.data.generate import Generator, measure_rate
from localspec.data.jobs import Jobs
from localspec.data.mask import Renderer
from localspec.data.remote import RemoteGenerator, connect
from localspec.data.selfmade import self_made
from localspec.data.shards import Manifest, Sample
from localspec.data.states import PRECISIONS
from localspec.data.writer import SHARD_TOKENS, ShardWriter
from localspec.errors import DataError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.speculator import TargetIdentity
from localspec.taps import default_taps
from localspec.target import SessionSettings

_SAID_EVERY = 20.0  # seconds between lines where the output is no terminal
_FLUSHED_EVERY = 600.0  # seconds after which a shard is written though it is not full
_DEFAULT_CONTEXT = 1024


def _taps(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(sorted(int(part) for part in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers such as 2,15,27") from None


def _shard_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed((
        click.option("-o", "--output", required=True, metavar="DIR",
                     help="Where the shards are; begun work is gone on with."),
        click.option("-f", "--prompts", multiple=True, metavar="FILE|hf://USER/NAME",
                     help="JSONL (turns, messages, conversations, prompt) or plain text; python: for the standard library's "
                          "code and documentation. May be given several times."),
        click.option("--raw", is_flag=True, help="Texts that are used as they are, without the chat template."),
        click.option("--taps", callback=_taps, metavar="I,J,K",
                     help="Layers already applied where states are read; default: an early, a middle and a late one."),
        click.option("--states", type=click.Choice(PRECISIONS), default="q4", show_default=True,
                     help="How states are stored; none: not at all."),
        click.option("--teacher-k", type=click.IntRange(1), default=32, show_default=True, metavar="K",
                     help="Likeliest tokens kept for each token."),
        click.option("--shard-tokens", type=click.IntRange(1), default=SHARD_TOKENS, show_default=True, metavar="N",
                     help="Tokens that are written at once; a kill loses fewer."),
        click.option("--thinking", type=click.Choice(["keep", "drop"]), default="keep", show_default=True,
                     help="Whether what is thought before an answer counts."),
    )):  # fmt: skip
        function = option(function)
    return function


@click.command("data")
@model_options
@_shard_options
@click.option("--self", "n_self", type=click.IntRange(0), default=0, metavar="N",
              help="Prompts that an instruct model invents itself, from its own chat template.")
@click.option("--answers", "n_answers", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Answers to every prompt.")
@click.option("--greedy-first/--no-greedy-first", default=True, show_default=True,
              help="Give the first answer to every prompt at temperature 0.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, metavar="N",
              help="Tokens of one answer at most.")
@click.option("--tokens", "n_tokens", type=click.IntRange(0), default=0, metavar="N",
              help="Stop at so many tokens in all; 0: when every prompt is answered.")
@click.option("-np", "--parallel", type=click.IntRange(1), default=32, show_default=True, metavar="N",
              help="Answers written at once.")
@click.option("--endpoint", "endpoints", multiple=True, metavar="URL",
              help="Let this server (localspec serve, llama-server) write the answers; the states are still read here. May "
                   "be given several times; --parallel is then the number of requests to each.")
@click.option("--endpoint-key", metavar="KEY", help="Its API key.  [default: $LOCALSPEC_ENDPOINT_KEY, else none]")
@click.option("--endpoint-timeout", type=click.FloatRange(1, 86400), default=600.0, show_default=True, metavar="S",
              help="Seconds in which an answer must have come.")
@click.option("--stats", is_flag=True, help="Only say what is there, and show a sample with its mask in colour.")
@sampling_options(temperature=0.7)
def data_cmd(
    output: str, prompts: tuple[str, ...], raw: bool, taps: tuple[int, ...] | None, states: str, teacher_k: int,
    shard_tokens: int, thinking: str, n_self: int, n_answers: int, greedy_first: bool, max_tokens: int, n_tokens: int,
    parallel: int, endpoints: tuple[str, ...], endpoint_key: str | None, endpoint_timeout: float, stats: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Let the target answer prompts, and keep what it thought.

    Writes shards of tokens, hidden states and likeliest tokens, which localspec train reads. Stopped or killed at any
    moment, the same command goes on where it was. With --endpoint other machines write, and this one only reads.
    """
    choice, sampling = take_models(options), take_sampling(options)
    folder = Path(output)
    if stats:
        from localspec.cli.data_stats import show_stats

        show_stats(folder, Path(choice.target) if choice.target else None)
        return
    if not prompts and not n_self:
        raise UsageError("nothing to answer: give --prompts FILE, or --self N for prompts that the target invents")
    named = _endpoints(endpoints, endpoint_key, endpoint_timeout)
    given = _read(prompts, raw)
    path = target_path(choice)
    settings = {"max_tokens": max_tokens, "thinking": thinking, **asdict(sampling)}
    writer, session_settings = _writer(folder, path, choice, taps, states, teacher_k, shard_tokens, settings)
    with Interrupt() as stopped:
        # Whoever lets others write reads one answer after another.
        n_sequences = 1 if named and not n_self else parallel
        model, session = open_target(replace(choice, session=session_settings), path, n_sequences)
        try:
            servers = connect(named, model, session.n_ctx, say)
            if n_self:
                with bar("prompts", n_self) as advance:
                    given += self_made(session, folder, n_self, sampling.seed, stopped, lambda n: advance(""))
                stopped.check()
            jobs = Jobs(unique(given, "the prompts", whole=False), n_answers, sampling, greedy_first, writer.done)
            generator: Generator | RemoteGenerator
            if servers:
                generator = RemoteGenerator(session, servers, parallel, max_tokens, teacher_k, thinking == "keep", say)
            else:
                generator = Generator(session, max_tokens, teacher_k, thinking == "keep")
            expected = plan.plan(jobs, Renderer(model), writer.manifest, max_tokens, n_tokens)
            plan.check_disk(folder, expected.n_bytes)
            if expected.n_tokens:
                if servers:
                    _say_remote_plan(expected, len(servers), parallel)
                else:
                    _say_plan(expected, measure_rate(session), parallel)
                samples = _limited(generator.run(jobs, stopped), writer, n_tokens)
                progress = generator.progress
                _keep(samples, writer, expected, lambda n: progress.n_written / expected.n_answered,
                      lambda: f"{progress.rate:.0f} tok/s")  # fmt: skip
            _say_left_out(generator)
        finally:
            session.close()
            model.close()
            writer.close()
        _say_all(writer)
        stopped.check()


@click.command("extract")
@model_options
@_shard_options
def extract_cmd(
    output: str, prompts: tuple[str, ...], raw: bool, taps: tuple[int, ...] | None, states: str, teacher_k: int,
    shard_tokens: int, thinking: str, **options: Any,
) -> None:  # fmt: skip
    """Read what the target thinks of texts that exist already.

    Writes the same shards as localspec data. Of a conversation what the assistant says counts, of a raw text everything.
    A draft learns most from what its target writes itself: prefer localspec data where you can.
    """
    choice = take_models(options)
    if not prompts:
        raise UsageError("nothing to read: give --prompts FILE")
    given = unique(_read(prompts, raw), "the texts")
    path = target_path(choice)
    writer, session_settings = _writer(
        Path(output), path, choice, taps, states, teacher_k, shard_tokens, {"thinking": thinking}
    )
    left = [c for c in given if c.key(whole=True) + "#text" not in writer.done]
    with Interrupt() as stopped:
        model, session = open_target(replace(choice, session=session_settings), path)
        try:
            done = set(writer.done)
            n_tokens = sum(len(m.content) for c in left for m in c.messages) // 4
            expected = plan.Plan(len(left), n_tokens, n_tokens, round(plan.bytes_of(writer.manifest, n_tokens, n_tokens)))
            plan.check_disk(writer.folder, expected.n_bytes)
            samples = extract(session, left, done, teacher_k, thinking == "keep", stopped)
            _keep(samples, writer, expected, lambda n: n / len(left), lambda: "read")
        finally:
            session.close()
            model.close()
            writer.close()
        _say_all(writer)
        stopped.check()


def _read(prompts: Iterable[str], raw: bool) -> list[Conversation]:
    found: list[Conversation] = []
    for name in prompts:
        if name == library.NAME:
            found += library.conversations()
        else:
            found += hf.read_dataset(name, raw) if name.startswith(hf.PREFIX) else read_conversations(Path(name), raw)
    return found


def _writer(
    folder: Path, path: Path, choice: ModelChoice, taps: tuple[int, ...] | None, states: str, teacher_k: int,
    shard_tokens: int, settings: dict[str, Any],
) -> tuple[ShardWriter, SessionSettings]:  # fmt: skip
    """The writer, and the session's settings with the taps."""
    gguf = GGUFFile.open(path, "target")
    wanted = () if states == "none" else taps if taps is not None else default_taps(gguf.n_layer)
    manifest = Manifest(
        {**asdict(TargetIdentity.of(gguf)), "file_hash": _file_hash(path)}, list(wanted), states, teacher_k,
        {"localspec": __version__, "target_file": str(path.resolve()), **settings},
    )  # fmt: skip
    try:
        writer = ShardWriter(folder, manifest, shard_tokens)
    except OSError as error:
        raise DataError(f"{folder} can't be written to: {error.strerror or error}") from None
    n_ctx = choice.session.n_ctx or min(_DEFAULT_CONTEXT, gguf.n_ctx_train or _DEFAULT_CONTEXT)
    return writer, replace(choice.session, n_ctx=n_ctx, taps=wanted)


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def _say_plan(expected: plan.Plan, rate: float, parallel: int) -> None:
    # A prompt token costs about half of a written one.
    seconds = (expected.n_answered + 0.5 * (expected.n_tokens - expected.n_answered)) / rate
    say(f"{expected.n_answers} answers to come: about {expected.n_tokens:,} tokens, {expected.n_bytes / 1e6:.0f} MB and "
        f"{_duration(seconds)} ({parallel} at once: {rate:.0f} tok/s)")  # fmt: skip


def _say_remote_plan(expected: plan.Plan, n_servers: int, parallel: int) -> None:
    say(f"{expected.n_answers} answers to come: about {expected.n_tokens:,} tokens, {expected.n_bytes / 1e6:.0f} MB, "
        f"written by {counted(n_servers, 'endpoint')}, {parallel} at once each")  # fmt: skip


def _say_left_out(generator: Generator | RemoteGenerator) -> None:
    n = generator.progress.n_skipped
    if n:
        say(f"{n} prompts left out: too long for the context, or nothing in the answer counts")
    if isinstance(generator, RemoteGenerator):
        if generator.n_differ:
            say(f"{generator.n_differ} answers left out: their text gives other tokens than the endpoint counted")
        if generator.n_refused:
            say(f"{generator.n_refused} prompts left out: the endpoints refused them ({generator.first_refusal})")


def _endpoints(urls: Sequence[str], key: str | None, timeout: float) -> list[Endpoint]:
    """What is named, each once. Raises UsageError for what is no URL or no key."""
    if key is not None and not urls:
        raise UsageError("--endpoint-key is for --endpoint URL")
    if key is not None and not key.strip():
        raise UsageError("--endpoint-key '': no key given (an unset variable?); give a key, or leave --endpoint-key out")
    key = (key or os.environ.get("LOCALSPEC_ENDPOINT_KEY", "")).strip() or None
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise UsageError("--endpoint-key: a key has visible ASCII characters only")
    return [Endpoint(url, key, timeout) for url in dict.fromkeys(url.rstrip("/") for url in urls)]


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"


def _limited(samples: Iterable[tuple[Sample, str]], writer: ShardWriter, n_tokens: int) -> Iterable[tuple[Sample, str]]:
    """Samples until there are `n_tokens` tokens in all; 0: all samples."""
    for sample, key in samples:
        yield sample, key
        if n_tokens and writer.manifest.n_tokens + writer.n_pending >= n_tokens:
            return


def _keep(
    samples: Iterable[tuple[Sample, str]], writer: ShardWriter, expected: plan.Plan, share: Callable[[int], float],
    note: Callable[[], str],
) -> None:  # fmt: skip
    """Write the samples as they come, saying how far it is: `share` of all that is expected, after n samples."""
    began = said = flushed = time.monotonic()
    n_shards = len(writer.manifest.shards)
    with bar("answers", expected.n_answers) as advance:
        for n, (sample, key) in enumerate(samples, 1):
            writer.add(sample, key)
            advance(note())
            now = time.monotonic()
            if now - flushed > _FLUSHED_EVERY:
                writer.flush()
            if len(writer.manifest.shards) > n_shards:
                n_shards, flushed = len(writer.manifest.shards), now
                _check_room(writer)
            if now - said > _SAID_EVERY and not sys.stderr.isatty():
                said = now
                left = (now - began) * max(0.0, 1 / share(n) - 1)
                say(f"{n}/{expected.n_answers} answers, {writer.manifest.n_tokens + writer.n_pending:,} tokens in all, "
                    f"{note()}, about {_duration(left)} left")  # fmt: skip
    writer.flush()


def _check_room(writer: ShardWriter) -> None:
    """Stop while the next shard can still be written whole."""
    size = max(int(shard["n_bytes"]) for shard in writer.manifest.shards)
    free = shutil.disk_usage(writer.folder).free
    if free < 2 * size:
        raise DataError(f"{writer.folder}: the disk is nearly full ({free / 1e6:.0f} MB left): make room and run it again; "
                        f"{writer.manifest.n_samples} samples are safe")  # fmt: skip


def _say_all(writer: ShardWriter) -> None:
    m = writer.manifest
    size = sum(int(shard["n_bytes"]) for shard in m.shards)
    say(f"{writer.folder}: {m.n_samples:,} samples, {m.n_tokens:,} tokens, {m.n_masked:,} of them the assistant's, "
        f"{size / 1e6:.0f} MB")  # fmt: skip
