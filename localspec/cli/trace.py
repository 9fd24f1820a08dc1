"""``--trace FILE``: one line of JSON for each step, with what the controller decided and what came of it. A text does not
end because its trace can't be written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from localspec.blocks import Outcome
from localspec.cli.loading import say
from localspec.engine import Engine
from localspec.errors import UsageError


@contextlib.contextmanager
def traced(engine: Engine, path: str | None) -> Iterator[None]:
    """Write every step of `engine` to `path` while the block runs; nothing where that is None. Raises UsageError."""
    if path is None:
        yield
        return
    try:
        file = open(path, "wb", buffering=0)  # noqa: SIM115 (the `with` below closes it)
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror or error}") from error
    n = 0

    def write(outcomes: list[Outcome], decision: dict[str, Any]) -> None:
        nonlocal n
        n += 1
        blocks = [
            {
                "slot": o.key, "confidence": [round(c, 4) for c in o.confidence], "accepted": o.n_accepted,
                "gained": o.gained,
            }
            for o in outcomes
        ]  # fmt: skip
        try:
            file.write(json.dumps({"step": n, **decision, "blocks": blocks}).encode() + b"\n")
        except OSError as error:
            engine.on_step = None
            say(f"warning: --trace {path} ends here: {error.strerror or error}")

    with file:
        engine.on_step = write
        try:
            yield
        finally:
            engine.on_step = None
