"""`localspec run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import Any, BinaryIO

import click

from localspec.chat.screen import printable
from localspec.cli import in_utf8
from localspec.cli.console import colours_wanted, counted
from localspec.cli.help import Command, option
from localspec.cli.interrupt import Interrupt
from localspec.cli.loading import Loaded, open_engine, say
from localspec.cli.options import (
    draft_options,
    grammar_options,
    model_options,
    sampling_options,
    take_grammar,
    take_models,
    take_sampling,
)  # fmt: skip
from localspec.cli.trace import traced
from localspec.engine import Piece, Request, Stats
from localspec.errors import UsageError
from localspec.grammar import Grammar
from localspec.report import stats_json, stats_lines
from localspec.template import ChatTemplate

MAX_PROMPT_BYTES = 64 << 20


@click.command("run", cls=Command)
@model_options
@draft_options
@sampling_options()
@option("Prompt", "-p", "--prompt", help="The prompt. Without -p and -f it is read from standard input.")
@option("Prompt", "-f", "--file", "prompt_file", metavar="FILE", help="Read the prompt from a file.")
@option("Prompt", "-sys", "--system-prompt", "system", metavar="TEXT", help="The system message.")
@option("Prompt", "--raw", is_flag=True, help="Take the prompt as it is: no chat template.")
@option("Output", "-n", "--n-predict", "n_predict", type=int, default=-1, show_default=True, metavar="N",
        help="Tokens to write at most; -1: until the model ends.")
@option("Output", "--stop", "stops", multiple=True, metavar="TEXT", help="End before this text. May be given several times.")
@grammar_options
@option("Output", "--show-draft", is_flag=True, help="Tint accepted draft tokens on a terminal.")
@option("Output", "--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@option("Output", "--trace", metavar="FILE", help="Write a line of JSON for each step: what was drafted, and why.")
def run_cmd(
    prompt: str | None, prompt_file: str | None, system: str | None, raw: bool, n_predict: int, stops: tuple[str, ...],
    show_draft: bool, as_json: bool, trace: str | None, **options: Any,
) -> None:  # fmt: skip
    """Write an answer to one prompt, drafting where that is faster.

    The prompt goes through the model's own chat template. Without --target the project's default model is used.
    """
    if n_predict < -1:
        raise UsageError(f"--n-predict must be -1 (until the model ends) or more, not {n_predict}")
    for flag, given in (("-p", prompt), ("-sys", system), *(("--stop", stop) for stop in stops)):
        if given and any("\ud800" <= c <= "\udfff" for c in given):  # how Python passes on bytes that are not UTF-8
            raise UsageError(f"{flag}: not UTF-8 text")
    if "" in stops:
        raise UsageError("--stop '': nothing to stop before (an unset variable?); give a text, or leave --stop out")
    sampling = take_sampling(options)
    gbnf = take_grammar(options)
    choice = take_models(options)
    text = _prompt(prompt, prompt_file)
    loaded = open_engine(choice)
    try:
        tokens = _encode(loaded, text, system, raw)
        grammar = None if gbnf is None else Grammar(loaded.model, gbnf)
        request = Request(tokens, sampling, None if n_predict == -1 else n_predict, stops, grammar=grammar)
        with traced(loaded.engine, trace):
            stop = _generate(loaded, request, sys.stdout.isatty() and show_draft, as_json)
    finally:
        loaded.close()
    if stop == "grammar":
        raise UsageError(
            "the grammar came to a place where it allows no token of this model, or where the text can be read in too many "
            "ways: look at what it needs next"
        )
    if stop == "interrupted":
        raise click.exceptions.Exit(130)


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("give the prompt once: -p or -f")
    if prompt is not None:
        text, source = prompt, "-p"
    elif prompt_file is not None and prompt_file != "-":
        if not prompt_file:
            raise UsageError("-f '': no name given (an unset variable?); name a file")
        source = prompt_file
        try:
            with open(prompt_file, "rb") as file:
                text = _read(file, source)
        except OSError as error:
            raise UsageError(f"{prompt_file}: {error.strerror or error}") from error
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt: give -p TEXT, -f FILE or pipe it into standard input")
        source = "standard input"
        text = _read(sys.stdin.buffer, source)
    if not text.strip():
        raise UsageError(f"the prompt is empty ({source})")
    return text


def _read(file: BinaryIO, source: str) -> str:
    """All of a prompt; a stream that never ends (/dev/zero, `yes |`) is given up before it fills the memory."""
    data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{source}: more than {MAX_PROMPT_BYTES >> 20} MiB, which no context holds; give a shorter prompt")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 text (byte {error.start})") from error


def _encode(loaded: Loaded, text: str, system: str | None, raw: bool) -> list[int]:
    loaded.model.tokenizer.check_length(text.strip(), loaded.session.n_ctx)  # a template may strip it
    if raw:
        if system:
            raise UsageError("--raw takes the prompt as it is: leave -sys out")
        return loaded.model.tokenizer.encode(text)
    template = ChatTemplate.of(loaded.model)
    if template is None:
        say(f"{loaded.model.path.name} has no chat template: the prompt is taken as it is")
        return loaded.model.tokenizer.encode(f"{system}\n\n{text}" if system else text)
    messages = [{"role": "system", "content": system}] if system else []
    return template.encode([*messages, {"role": "user", "content": text}])


def _generate(loaded: Loaded, request: Request, tint: bool, as_json: bool) -> str:
    """Write the text as it comes, then the statistics; returns why it stopped."""
    tint = tint and colours_wanted()
    texts: list[str] = []
    ids: list[int] = []
    stop = "interrupted"
    with Interrupt() as interrupted:
        for step in loaded.engine.generate(request, interrupted):
            for piece in step.pieces:
                texts.append(piece.text)
                if piece.token >= 0:
                    ids.append(piece.token)
            if not as_json:
                _write(step.pieces, tint)
            stop = step.stop or stop
    stats = loaded.engine.finish(0)
    if as_json:
        result = _result(loaded, stats, "".join(texts), ids, stop)
        click.echo(json.dumps(result, ensure_ascii=not in_utf8(sys.stdout)))
        return stop
    click.echo()
    drafter = loaded.drafter.name if loaded.drafter else "none"
    if loaded.draft_path is not None:
        drafter += f" ({loaded.draft_path.stem})"
    threads = counted(loaded.session.n_threads, "thread")
    say(f"{loaded.model.description}, drafter {drafter}, kernels {loaded.kernels}, {threads}")
    for line in stats_lines(stats, stop, loaded.drafter is not None):
        click.echo(line, err=True)
    return stop


def _write(pieces: list[Piece], tint: bool) -> None:
    on_terminal = sys.stdout.isatty()
    for piece in pieces:
        text = printable(piece.text) if on_terminal else piece.text
        if text:
            # color=True: click must not take out of a file what looks like colours; the text is the target's.
            click.echo(click.style(text, fg="green") if tint and piece.from_draft else text, nl=False, color=True)
    sys.stdout.flush()


def _result(loaded: Loaded, stats: Stats, text: str, ids: list[int], stop: str) -> dict[str, Any]:
    return {
        "text": text,
        "ids": ids,
        **stats_json(stats),
        "stop": stop,
        "target": str(loaded.model.path),
        "draft": str(loaded.draft_path) if loaded.draft_path else None,
        "drafter": loaded.drafter.name if loaded.drafter else "none",
        "kernels": loaded.kernels,
    }
