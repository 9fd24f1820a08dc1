"""The command line. Commands are imported when they are called, so that `--help` and `--version` answer at once.

This package alone turns exceptions into messages: one line on standard error, exit code 2, no traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from typing import TextIO

import click

from localspec import __version__
from localspec.errors import LocalspecError

#: command -> (module below localspec.cli, name of the click command in it, help line)
COMMANDS = {
    "run": ("run_cmd", "run_cmd", "Write an answer to one prompt."),
    "chat": ("chat_cmd", "chat_cmd", "Talk with a model in the terminal."),
    "serve": ("serve_cmd", "serve_cmd", "Answer OpenAI's API over HTTP, many requests at once."),
    "bench": ("bench_cmd", "bench_cmd", "Measure plain against speculative decoding on the same prompts."),
    "curve": ("curve_cmd", "curve_cmd", "Measure what a decode of n tokens costs on this machine."),
    "tune": ("tune_cmd", "tune_cmd", "Say how many tokens would be drafted on this machine, and why."),
    "inspect": ("inspect_cmd", "inspect_cmd", "Say what GGUF files are and whether they can pair."),
    "backend-path": ("backend_cmd", "backend_cmd", "Print where our ggml plug-in lies, for other llama.cpp programs."),
    "data": ("data_cmd", "data_cmd", "Let the target write training data, its hidden states with it."),
    "train": ("train_cmd", "train_cmd", "Train a speculator on what its target wrote."),
    "extract": ("data_cmd", "extract_cmd", "Read the target's states for texts that exist already."),
    "convert": ("convert_cmd", "convert_cmd", "Export to GGUF: a trained draft, or a model in another quantisation."),
    "quantize": ("convert_cmd", "quantize_cmd", "Write a GGUF in another quantisation."),
    "push": ("push_cmd", "push_cmd", "Send a draft or training data to the Hugging Face Hub, with a card."),
    "pull": ("pull_cmd", "pull_cmd", "Fetch a draft or training data from the Hub, or find a draft for a target."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"localspec.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="localspec")
def cli() -> None:
    """Speculative decoding for GGUF models on your own machine: the target's text, sooner."""


def main() -> None:
    """Run the command line and exit: 0 done, 2 something the user can mend, 130 interrupted."""
    _mend_streams()
    if "_LOCALSPEC_COMPLETE" in os.environ:
        cli.main(prog_name="localspec")  # click's shell completion, which ends the process
    try:
        # Not cli.main(): it answers a reader that has gone by leaving with code 1, in silence.
        with cli.make_context("localspec", sys.argv[1:]) as context:
            cli.invoke(context)
        sys.stdout.flush()
        code = 0
    except click.exceptions.Exit as done:
        code = _flushed(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _tell(error.format_message())
        code = 2
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "localspec"
        _tell(f"{where}: error: {_one_line(error.format_message())}")
        code = 2
    except LocalspecError as error:
        _tell(f"localspec: error: {_one_line(str(error))}")
        code = 2
    except (KeyboardInterrupt, click.Abort, EOFError):
        _tell("localspec: interrupted")
        code = 130
    except MemoryError:
        _tell("localspec: error: there is not enough memory; use a smaller model, --ctx-size or file")
        code = 2
    except OSError as error:
        code = _failed_output(error)
    sys.exit(code)


def _mend_streams() -> None:
    """Give what was closed before us (`>&-`) to the null device, and write what an encoding lacks as escapes.

    Python has None in place of a closed stream, and the next file opened, a model perhaps, would get its number: what
    llama.cpp prints would go into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (it stays open)
    if isinstance(sys.stdout, io.TextIOWrapper) and not in_utf8(sys.stdout):
        sys.stdout.reconfigure(errors="backslashreplace")


def in_utf8(stream: TextIO) -> bool:
    """Whether any text can be written to `stream` as it is."""
    return stream.encoding.lower().replace("_", "-") in ("utf-8", "utf8")


def _flushed(code: int) -> int:
    """`code`, or that of a failed output: an exit of click's own (--help) has not been written out yet."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _failed_output(error)
    return code


def _failed_output(error: OSError) -> int:
    """Say that output could not be written; returns the exit code. What handles files names them itself."""
    # Python would try, and complain, once more while it flushes at exit.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if isinstance(error, BrokenPipeError):  # the reader has gone (`| head`): no reason to speak
        os.dup2(null, 2)
        return 141
    _tell(f"localspec: error: {error.filename or 'the output'} can't be used: {error.strerror or error}")
    return 2


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(text, err=True)
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody can be told; the exit code still tells


def _one_line(text: str) -> str:
    return " ".join(text.split())
