"""Ctrl-C: the first one asks for an end between two steps, the second one ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


class Interrupt:
    """While entered, SIGINT sets a flag; calling the object tells whether it is set. A second SIGINT is raised.

    With `leave` a second one ends the process on the spot, for times in which an exception could get lost (in a callback
    from C) and nothing is left half done: while models are loaded.
    """

    def __init__(self, leave: bool = False) -> None:
        self._leave = leave
        self._set = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self._set

    def check(self) -> None:
        """Raise what was held back: for places where nothing can be lost."""
        if self._set:
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._set and self._leave:
            os.write(2, b"localspec: interrupted\n")
            os._exit(130)
        if self._set:
            raise KeyboardInterrupt
        self._set = True

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)
