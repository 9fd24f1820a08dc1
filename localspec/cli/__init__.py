"""The command line. Commands are imported when they are called, so that `--help` and `--version` answer at once.

This package alone turns exceptions into messages: one line on standard error, exit code 2, no traceback.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from localspec import __version__
from localspec.errors import LocalspecError

#: command -> (module below localspec.cli, name of the click command in it, help line)
COMMANDS = {
    "run": ("run_cmd", "run_cmd", "Write an answer to one prompt."),
    "chat": ("chat_cmd", "chat_cmd", "Talk with a model in the terminal."),
    "bench": ("bench_cmd", "bench_cmd", "Measure plain against speculative decoding on the same prompts."),
    "curve": ("curve_cmd", "curve_cmd", "Measure what a decode of n tokens costs on this machine."),
    "inspect": ("inspect_cmd", "inspect_cmd", "Say what GGUF files are and whether they can pair."),
    "backend-path": ("backend_cmd", "backend_cmd", "Print where our ggml plug-in lies, for other llama.cpp programs."),
    "convert": ("convert_cmd", "convert_cmd", "Export to quantised GGUF."),
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
    try:
        # Without standalone mode click returns the code of an Exit instead of raising it; commands themselves return None.
        code = cli.main(prog_name="localspec", standalone_mode=False) or 0
        sys.stdout.flush()
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "localspec"
        click.echo(f"{where}: error: {_one_line(error.format_message())}", err=True)
        code = 2
    except LocalspecError as error:
        click.echo(f"localspec: error: {_one_line(str(error))}", err=True)
        code = 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("localspec: interrupted", err=True)
        code = 130
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    sys.exit(code)


def _one_line(text: str) -> str:
    return " ".join(text.split())
