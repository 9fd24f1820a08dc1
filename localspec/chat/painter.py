"""Draws a growing answer: finished blocks are printed for good, the last block and a status line are redrawn in place.

What is on the screen while the answer grows, and what happens with it:

    > question                    printed before, by the prompt
    finished Markdown blocks      written once; they scroll away like any output
    --------------------------    from here on redrawn, never more rows than the screen has
    the last, unfinished block    its tail, where it is longer than the screen; whole at the end
    status line
"""

from __future__ import annotations

import time

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from localspec.chat.markdown import blocks, lines

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_CLEAR, _END_OF_LINE, _BELOW = "\x1b[2J\x1b[H", "\x1b[K", "\x1b[J"


class AnswerPainter:
    """One answer on a terminal. `update` may be called as often as one likes; `finish` must be called once.

    Each frame is one write that overwrites what stood there before and erases only what is left over, so nothing
    flickers. When the terminal has another size than at the last frame, how it has wrapped the old rows can't be known
    (terminals differ): the screen is then cleared and the end of this turn drawn anew.
    """

    #: The share of time that drawing may take from decoding, and the shortest time between two frames in seconds.
    SHARE, PAUSE = 0.1, 0.05

    def __init__(self, console: Console, question: str = ""):
        self._console = console
        self._question = question
        self._blocks: list[str] = []  # finished Markdown, in order
        self._n_done = 0  # characters of the answer in them
        self._n_rows = 0  # rows of the redrawn part, the cursor is at the end of the last
        self._size: tuple[int, int] | None = None
        self._next = 0.0

    def update(self, answer: str, status: str, now: bool = False) -> None:
        """Show the answer as far as it is known; often nothing is drawn, unless `now`."""
        began = time.perf_counter()
        if not now and began < self._next:
            return
        self._paint(answer, status, last=False)
        ended = time.perf_counter()
        self._next = ended + max(self.PAUSE, (ended - began) / self.SHARE)

    def finish(self, answer: str, status: str) -> None:
        """Show the whole answer and leave the cursor below it."""
        self._paint(answer, status, last=True)

    def _paint(self, answer: str, status: str, last: bool) -> None:
        width, height = self._console.size
        resized = self._size not in (None, (width, height))
        self._size = (width, height)
        rest = answer[self._n_done :]
        n_settled = len(rest) if last else len(rest) - len(blocks(rest)[-1])
        new = lines(self._console, rest[:n_settled])
        if new:
            self._blocks.append(rest[:n_settled])
        self._n_done += n_settled
        live = [*lines(self._console, rest[n_settled:]), "", self._styled(status, width)][-height:]
        if resized:
            top = _CLEAR
            new = self._turn()[-max(1, height - len(live)) :] if height > len(live) else []
        else:
            top = f"\r\x1b[{self._n_rows - 1}A" if self._n_rows > 1 else "\r"
        rows = new + live
        body = "\n".join(row + (_END_OF_LINE if cell_len(_plain(row)) < width else "") for row in rows)
        end = f"\n{_SHOW}" if last else ""
        # Rows never wrap by themselves: where terminal and tables disagree on a character's width, the count of rows
        # would be wrong from then on.
        self._console.file.write(f"{_HIDE}{_NO_WRAP}{top}{body}{_BELOW}{_WRAP}{end}")
        self._console.file.flush()
        self._n_rows = len(live)

    def _turn(self) -> list[str]:
        """Question and finished blocks at the present width."""
        rows = [f"> {line}" if i == 0 else f"  {line}" for i, line in enumerate(self._question.split("\n"))]
        wrapped = [part for row in rows for part in _wrap(row, self._console.width)]
        for block in self._blocks:
            wrapped += lines(self._console, block)
        return wrapped

    def _styled(self, status: str, width: int) -> str:
        if cell_len(status) > width:
            status = set_cell_size(status, width - 1) + "…"
        with self._console.capture() as captured:
            self._console.print(Text(status, "dim"), end="", crop=False, no_wrap=True)
        return captured.get()


def _plain(row: str) -> str:
    return Text.from_ansi(row).plain if "\x1b" in row else row


def _wrap(row: str, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    return [line.plain for line in Text(row).wrap(console, width)] or [""]
