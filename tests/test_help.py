"""Help: every option under one heading, within 80 columns."""

from __future__ import annotations

import importlib
import re

import click
import pytest

from localspec.cli import COMMANDS
from localspec.cli.help import HEADINGS, Command, option


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
