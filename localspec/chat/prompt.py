"""The line that a person types on, with history and more than one line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle


class Prompt:
    """Reads what is typed. `history` is the file for it, None keeps it in memory."""

    def __init__(self, history: Path | None, commands: Iterable[str] = ()):
        output = create_output(stdout=sys.stdout)
        if isinstance(output, Vt100_Output):
            # Asking where the cursor is only helps menus, and terminals that don't answer cause a warning.
            output.enable_cpr = False
        colors = ColorDepth.DEPTH_1_BIT if "NO_COLOR" in os.environ else None
        names = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=_FileHistory(history) if history else InMemoryHistory(),
            key_bindings=_bindings(),
            completer=names,
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            color_depth=colors,
            output=output,
        )

    def read(self) -> str:
        """What was typed. EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C on an empty line."""
        # Bytes that are no text arrive as lone surrogates, which nothing behind this can use.
        return self._session.prompt().encode("utf-8", "replace").decode()


class _FileHistory(FileHistory):
    """A history that never stands in the way: where its file can't be read or written, it lasts for this session."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        elif buffer.text.strip():
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
