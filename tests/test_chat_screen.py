"""How an answer is drawn, on a terminal emulator without a process: every frame, every size, nothing twice."""

from __future__ import annotations

import io
import random

import pyte
import pytest
from rich.console import Console

from localspec.chat.markdown import THEME, blocks
from localspec.chat.painter import AnswerPainter
from localspec.chat.prompt import _FileHistory

TEXT = """# A title

Some **bold** text with `code`, *emphasis* and a [link](http://example.org/x), <think>tags</think> too.
Second line 日本語の文章がここにあります kept, and ~~gone~~.

1. first
2. second with a rather long line that must be wrapped around at eighty columns because it is long
   - nested
3. third

> a quote
> goes on

```python
def f(x):

    return x + 1  # comment
```

| a | b |
|---|---|
| 1 | 2 |

""" + "\n".join(f"- item {i}" for i in range(40)) + "\n\nThe *end*."


class Emulator:
    """A screen of `columns` by `rows` and a Rich console that writes on it."""

    def __init__(self, columns: int, rows: int, **options: object):
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self.stream = pyte.Stream(self.screen)
        self.written: list[str] = []
        emulator = self

        class File(io.StringIO):
            encoding = "utf-8"

            def write(self, text: str) -> int:
                if text:  # Rich writes nothing at times
                    emulator.written.append(text)
                emulator.stream.feed(text.replace("\n", "\r\n"))
                return len(text)

        self.console = Console(
            file=File(), force_terminal=True, width=columns, height=rows, theme=THEME, color_system="256", _environ={},
            **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.console.size = (columns, rows)  # type: ignore[assignment]

    @property
    def rows(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def all_text(self) -> str:
        top = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top]
        return "\n".join([*top, *self.rows]).rstrip()


def draw(columns: int, rows: int, seed: int) -> str:
    """TEXT in pieces of random length; returns all that can be read in the end."""
    pieces = random.Random(seed)
    emulator = Emulator(columns, rows)
    emulator.stream.feed("> question\r\n")
    painter = AnswerPainter(emulator.console, "question")
    end = 0
    while end < len(TEXT):
        end += pieces.randint(1, 40)
        painter.update(TEXT[:end], "STATUS", now=True)
        assert emulator.rows[emulator.screen.cursor.y] == "STATUS"
    painter.finish(TEXT, "FINAL")
    return emulator.all_text


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (20, 5), (80, 2)])
def test_an_answer_stands_there_once_however_it_came(columns: int, rows: int) -> None:
    shown = draw(columns, rows, 0)
    for seed in range(1, 4):
        assert draw(columns, rows, seed) == shown
    assert "STATUS" not in shown
    assert shown.count("FINAL") == 1
    numbers = [line.split()[-1] for line in shown.split("\n") if line.startswith(" • item")]
    assert numbers == [str(i) for i in range(40)]
    if columns == 80:
        for part in ("A title", "Some bold text with code, emphasis", "(http://example.org/x)", "<think>tags</think> too.\n",
                     "Second line 日本語の", "  def f(x):\n\n      return x + 1  # comment", "a quote"):  # fmt: skip
            assert shown.count(part) == 1, part


def test_the_tail_is_seen_while_it_grows() -> None:
    emulator = Emulator(40, 10)
    painter = AnswerPainter(emulator.console)
    text = "\n".join(f"- item {i}" for i in range(30))
    painter.update(text, "STATUS", now=True)
    assert emulator.rows == [f" • item {i}" for i in range(22, 30)] + ["", "STATUS"]
    painter.update(text + "\n- item 30", "STATUS", now=True)
    assert emulator.rows == [f" • item {i}" for i in range(23, 31)] + ["", "STATUS"]
    assert len(emulator.screen.history.top) == 0


def test_markdown_is_styled() -> None:
    emulator = Emulator(80, 24)
    AnswerPainter(emulator.console).update("a **bold** word", "STATUS", now=True)
    row = emulator.screen.buffer[1]
    assert "".join(row[x].data for x in range(11)) == "a bold word"
    assert [row[x].bold for x in (0, 2, 5, 7)] == [False, True, True, False]


def test_no_colours_where_none_are_wanted() -> None:
    emulator = Emulator(80, 24, no_color=True)
    AnswerPainter(emulator.console).finish(TEXT, "STATUS")
    colours = {(c.fg, c.bg) for line in emulator.screen.buffer.values() for c in line.values()}
    assert colours == {("default", "default")}


@pytest.mark.parametrize("size", [(30, 24), (120, 24), (80, 8), (30, 8), (80, 40)])
def test_another_size_redraws_what_belongs_on_the_screen(size: tuple[int, int]) -> None:
    emulator = Emulator(80, 24)
    emulator.stream.feed("earlier\r\n" * 5 + "> question\r\n")
    painter = AnswerPainter(emulator.console, "question")
    for end in range(0, 700, 7):
        painter.update(TEXT[:end], "STATUS", now=True)
    emulator.resize(*size)
    painter.update(TEXT[:700], "STATUS", now=True)

    fresh = Emulator(*size)
    fresh.stream.feed("> question\r\n")
    AnswerPainter(fresh.console).update(TEXT[:700], "STATUS", now=True)
    assert emulator.rows == fresh.rows
    painter.finish(TEXT, "FINAL")
    assert emulator.rows[-2:] == ["FINAL", ""]
    assert emulator.rows.count("FINAL") == 1
    assert "STATUS" not in emulator.rows


def test_a_frame_is_one_write_and_the_cursor_comes_back() -> None:
    emulator = Emulator(80, 24)
    painter = AnswerPainter(emulator.console)
    painter.update("Hello", "STATUS", now=True)
    assert len(emulator.written) == 1
    assert emulator.screen.cursor.hidden
    painter.finish("Hello", "STATUS")
    assert len(emulator.written) == 2
    assert not emulator.screen.cursor.hidden
    assert pyte.modes.DECAWM in emulator.screen.mode


def test_frames_are_rare_enough() -> None:
    emulator = Emulator(80, 24)
    painter = AnswerPainter(emulator.console)
    painter.PAUSE = 3600
    for end in range(100):
        painter.update(TEXT[:end], "STATUS")
    assert len(emulator.written) == 1


def test_nothing_to_say() -> None:
    emulator = Emulator(80, 24)
    AnswerPainter(emulator.console).finish("\n \n", "STATUS")
    assert emulator.all_text == "\nSTATUS"


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("", ""),
        ("one", ""),
        ("one\ntwo", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n- a\n- b", "one\n\n"),
        ("one\n- a\n\n- b\n\ntwo", "one\n- a\n\n- b\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n```\nb", "```\na\n```\n"),
        ("# h\ntext", "# h\n"),
        ("a | b\n--|--\n1 | 2\n\nc", "a | b\n--|--\n1 | 2\n\n"),
    ],
)
def test_what_is_settled(text: str, done: str) -> None:
    assert "".join(blocks(text)) == text
    assert "".join(blocks(text)[:-1]) == done


def test_settled_blocks_stay_as_they_are() -> None:
    """No further text moves a border that was found before."""
    borders = {0}
    for end in range(len(TEXT)):
        border = end - len(blocks(TEXT[:end])[-1])
        assert border >= max(borders)
        borders.add(border)
    assert len(borders) == 8


def test_a_history_that_can_not_be_kept(tmp_path: object) -> None:
    history = _FileHistory(f"{tmp_path}/none/history")
    history.store_string("hello")
    assert list(history.load_history_strings()) == []
    kept = _FileHistory(f"{tmp_path}/history")
    kept.store_string("one\ntwo")
    kept.store_string("three \udc80")
    assert list(kept.load_history_strings())[1] == "one\ntwo"
