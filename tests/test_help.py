"""Help: every option under one heading, within 80 columns."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import click
import pytest

from localspec.cli import COMMANDS
from localspec.cli.help import HEADINGS, Command, option
from localspec.cli.options import DRAFTERS
from localspec.drafters import names


def _sections(command: click.Command) -> dict[str, str]:
    """Help's text by heading."""
    context = click.Context(command, info_name="it", terminal_width=80, max_content_width=100)
    pieces = re.split(r"^(\w+):\n", command.get_help(context), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2]))


@pytest.mark.parametrize("name", ["run", "chat", "bench", "curve", "tune"])
def test_every_option_has_a_heading(name: str) -> None:
    module, attribute, _ = COMMANDS[name]
    command = getattr(importlib.import_module(f"localspec.cli.{module}"), attribute)
    sections = _sections(command)
    assert list(sections) == [heading for heading in (*HEADINGS, "Other") if heading in sections]
    assert len(sections) > 4
    for param in command.params:
        shown = [heading for heading, text in sections.items() for flag in re.findall(r"^ +(-\S+)", text, re.MULTILINE)
                 if flag.rstrip(",") in param.opts]  # fmt: skip
        assert len(shown) == (0 if param.hidden else 1), param.name
        assert "Other" not in shown, param.name
    assert "--temp" in sections.get("Sampling", "--temp")
    assert "--draft" in sections.get("Speculation", "--draft")
    assert max(len(line) for text in sections.values() for line in text.splitlines()) <= 80


def test_an_option_without_a_heading_comes_last() -> None:
    @click.command(cls=Command)
    @click.option("--plain")
    @option("Output", "--last")
    @option("Prompt", "--first")
    def command() -> None:
        pass

    assert list(_sections(command)) == ["Prompt", "Output", "Other"]
    assert "--plain" in _sections(command)["Other"]


def test_an_unknown_heading_is_an_error() -> None:
    with pytest.raises(ValueError, match="no heading"):
        option("Nonsense", "--x")(lambda: None)


#: localspec where PyTorch is not installed
_NO_TORCH = """
import importlib.util, sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Without())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
from localspec.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train --help", "eagle3"),
        ("train eagle3 --help", "--draft-vocab"),
        ("train dspark --help", "--markov-rank"),
        ("data --help", "--answers"),
        ("convert --help", "--quant"),
    ],
)
def test_help_needs_no_torch(cli_env: dict[str, str], command: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_TORCH, *command.split()], capture_output=True, text=True, env=cli_env, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize("command", ["train --preflight", "train eagle3 --data D -o O"])
def test_what_needs_torch_says_how_to_install_it(cli_env: dict[str, str], command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_TORCH, *command.split()], capture_output=True, text=True, env=cli_env, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "training needs torch: pip install 'localspec[train]'" in line
    assert "'.[train]'" in line


def test_spec_types_are_those_of_the_drafters() -> None:
    """--spec-type's help and its errors list DRAFTERS: whoever adds a drafter is reminded of it."""
    assert set(DRAFTERS.values()) == set(names())
    assert {name for name, drafter in DRAFTERS.items() if name != drafter} == {"dspark"}
