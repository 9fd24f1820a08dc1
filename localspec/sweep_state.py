"""What a sweep has measured so far, in a file beside its results: a line of JSON for each unit, written when it is done.

The first line says what the units belong to. A sweep of another target, draft or prompts does not go on with them; one over
more of the grid does. A line that was cut off when the process was killed is measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from localspec.errors import UsageError

VERSION = 1


class State:
    """`units`: name -> what was measured. `path` None: nothing is kept beyond the process."""

    def __init__(self, path: Path | None, belongs_to: dict[str, Any]):
        """Raises UsageError where the file is another sweep's, or can't be read or written."""
        self.units: dict[str, Any] = {}
        self._path = path
        if path is None:
            return
        head = {"localspec_sweep": VERSION, "belongs_to": json.loads(json.dumps(belongs_to))}
        try:
            with path.open("a+b") as file:
                file.seek(0)
                lines = file.read().split(b"\n")
                whole = b"\n".join(lines[:-1]) + b"\n" if len(lines) > 1 else b""
                if whole:
                    self._take(lines[:-1], head, path)
                file.truncate(len(whole))  # what follows the last line break was cut off
                if not whole:
                    file.write(json.dumps(head).encode() + b"\n")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from error

    @property
    def n_found(self) -> int:
        """Units so far."""
        return len(self.units)

    def _take(self, lines: list[bytes], head: dict[str, Any], path: Path) -> None:
        try:
            found, *entries = [json.loads(line) for line in lines]
            if not isinstance(found, dict) or "localspec_sweep" not in found:
                raise ValueError
            units = {str(entry["unit"]): entry["measured"] for entry in entries}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UsageError(f"{path}: no state of a sweep; move it away, or give another --json or --html") from None
        if found != head:
            before, now = found.get("belongs_to", {}), head["belongs_to"]
            names = ", ".join(name for name in now if before.get(name) != now[name]) or "version"
            raise UsageError(
                f"{path}: a sweep was begun there with another setting ({names}); remove it to begin anew, or give another "
                "--json or --html"
            )
        self.units = units

    def add(self, name: str, measured: Any) -> None:
        """Keep a unit. Raises UsageError where it can't be written."""
        measured = json.loads(json.dumps(measured))  # as it is after a restart
        if self._path is not None:
            try:
                with self._path.open("ab") as file:
                    file.write(json.dumps({"unit": name, "measured": measured}, separators=(",", ":")).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise UsageError(f"{self._path}: {error.strerror or error}") from error
        self.units[name] = measured

    def remove(self) -> None:
        """The results are written: nothing to go on with."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
