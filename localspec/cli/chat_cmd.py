"""`localspec chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from localspec.chat.commands import COMMAND_NAMES, run_command
from localspec.chat.conversation import Chat, PlainTranscript
from localspec.chat.screen import ENDS, Screen, open_screen
from localspec.cli.help import Command, option
from localspec.cli.interrupt import Interrupt
from localspec.cli.loading import Loaded, open_engine, say
from localspec.cli.options import draft_options, model_options, sampling_options, take_models, take_sampling
from localspec.errors import LocalspecError, UsageError


@click.command("chat", cls=Command)
@model_options
@draft_options
@sampling_options(seed=-1)
@option("Output", "-n", "--n-predict", "n_predict", type=int, default=-1, show_default=True, metavar="N",
        help="Tokens per answer at most; -1: until the model ends.")
@option("Prompt", "-sys", "--system-prompt", "system", metavar="TEXT", help="The system message.")
@option("Output", "--plain", is_flag=True, help="Plain text and lines: no Markdown, no editing, no colours.")
def chat_cmd(n_predict: int, system: str | None, plain: bool, **options: Any) -> None:  # fmt: skip
    """Talk with a model, drafting where that is faster.

    Markdown is rendered while it comes; /help lists the commands. Without --target the project's default model is used,
    without -s each session has a random seed. Lines piped into standard input are answered one by one.
    """
    if n_predict < -1 or n_predict == 0:
        raise UsageError(f"--n-predict must be -1 (until the model ends) or at least 1, not {n_predict}")
    sampling = take_sampling(options)
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding gets question marks, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    loaded = open_engine(take_models(options))
    try:
        chat = Chat(loaded.engine, sampling, system, None if n_predict == -1 else n_predict)
        screen = open_screen(_history_file, COMMAND_NAMES, plain)
        signal.signal(signal.SIGTERM, _leave)  # through the screen, which gives the terminal back as it was
        _begin(loaded, chat, screen)
        failed = _talk(chat, screen)
    finally:
        loaded.close()
    if failed and not sys.stdin.isatty():
        raise click.exceptions.Exit(2)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _begin(loaded: Loaded, chat: Chat, screen: Screen) -> None:
    name = loaded.model.path.name.removesuffix(".gguf")
    rest = f" · draft {chat.drafter_name or 'none'} · kernels {loaded.kernels} · context {loaded.session.n_ctx} · /help"
    screen.begin(name, rest)
    if isinstance(chat.template, PlainTranscript):
        screen.fail(f"{loaded.model.path.name} has no chat template: it gets a plain User:/Assistant: transcript")


def _talk(chat: Chat, screen: Screen) -> bool:
    """Take what is typed until the end; returns whether anything failed."""
    failed = False
    while True:
        try:
            line = screen.read()
            if line is None:
                return failed
            if not line.strip():
                continue
            if line.startswith("/"):
                reply = run_command(chat, line)
                if reply.leave:
                    return failed
                screen.say(reply.text)
            else:
                _answer(chat, screen, line)
        except LocalspecError as error:
            failed = True
            screen.fail(str(error))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            screen.fail("Ctrl-D or /quit leaves")


def _answer(chat: Chat, screen: Screen, line: str) -> None:
    turn = chat.ask(line)
    if turn.n_dropped:
        screen.fail(
            f"the context is full: the oldest {turn.n_dropped} of {len(chat.exchanges)} exchanges are no longer sent"
        )
    # The first Ctrl-C ends the answer between two steps; a second one, at once, wherever the program may be.
    with contextlib.suppress(KeyboardInterrupt), Interrupt() as interrupted:
        screen.show(chat, turn, chat.stream(turn, interrupted))
    if turn.stop in ENDS:
        screen.fail(ENDS[turn.stop])
    if not turn.kept:
        screen.fail("stopped before the answer began: the question is taken back")
    if turn.stop in ("interrupted", "") and not sys.stdin.isatty():
        raise KeyboardInterrupt


def _history_file() -> Path | None:
    """Where typed lines are kept, or None (said once) where nothing can be written."""
    from platformdirs import user_state_path

    try:
        folder = user_state_path("localspec", appauthor=False)
    except RuntimeError:
        folder = Path("~")
    if not folder.is_absolute():  # older platformdirs return "~/..." where newer ones raise
        say("what you type is not kept for next time: this user has no home folder")
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "chat_history"
        # What one asks a model is nobody else's business.
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as error:
        say(f"what you type is not kept for next time: {folder}: {error.strerror or error}")
        return None
    return file
