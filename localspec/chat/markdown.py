"""Markdown as a chat shows it: every character that the model wrote stays visible, and finished parts are told apart."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.style import Style
from rich.syntax import Syntax
from rich.theme import Theme

#: Rich's own styles put code on a black ground, which is a blot on a light terminal.
THEME = Theme(
    {
        "markdown.code": Style(color="cyan", bold=True),
        "markdown.code_block": Style(color="cyan"),
        "markdown.h1": Style(bold=True, underline=True),
        "markdown.h2": Style(bold=True, underline=True),
        "markdown.h3": Style(bold=True),
        "markdown.h4": Style(bold=True, italic=True),
    }
)
# Without HTML: a tag is text here (a model that writes <think> or <div> means it), and Rich would drop it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_CODES = re.compile(r"\x1b\[[0-9;]*m")
_PADDING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar = {}


class _Code(CodeBlock):
    """Code in the terminal's own colours, set in by two columns: also told apart where there is no colour."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2), background_color="default")


class Answer(Markdown):
    """Rich's Markdown, with line breaks kept, tags kept as text, and addresses of links written out."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, text: str):
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup = text
        self.parsed = _PARSER.parse(text)
        _keep_breaks(self.parsed)


def _keep_breaks(tokens: Iterable[Token]) -> None:
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        if token.children:
            _keep_breaks(token.children)


def blocks(text: str) -> list[str]:
    """`text` cut into its outermost Markdown blocks. Further text can change the last one only."""
    starts = [t.map[0] for t in _PARSER.parse(text) if t.level == 0 and t.map and t.nesting >= 0]
    rows = [row + "\n" for row in text.split("\n")]
    borders = [0, *starts[1:], len(rows)]
    pieces = ["".join(rows[a:b]) for a, b in itertools.pairwise(borders)]
    pieces[-1] = pieces[-1].removesuffix("\n")
    return pieces


def lines(console: Console, text: str) -> list[str]:
    """The screen lines of `text` at the console's width, with escape codes: each block after an empty line.

    Blocks are drawn one by one, so that how they came makes no difference. There are no blanks at the ends of lines: they
    would wrap into lines of their own when the terminal is made narrower.
    """
    shown: list[str] = []
    for block in blocks(text):
        with console.capture() as captured:
            console.print(Answer(block), crop=False)
        rows = [_PADDING.sub(r"\1", line) for line in captured.get().split("\n")]
        seen = [i for i, row in enumerate(rows) if _CODES.sub("", row).strip()]
        if seen:
            shown += ["", *rows[seen[0] : seen[-1] + 1]]
    return shown
