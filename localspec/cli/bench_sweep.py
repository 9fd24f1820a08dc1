"""`localspec bench --sweep`: the grid, its table, JSON and page."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from localspec import __version__, native
from localspec.accept import Sampling
from localspec.cli.bench_cmd import settings_in_effect
from localspec.cli.console import OutputConsole
from localspec.cli.loading import Loaded, open_engine, say
from localspec.cli.options import ModelChoice
from localspec.cli.progress import bar
from localspec.errors import LocalspecError, UsageError
from localspec.prompts import Prompt
from localspec.sweep import SERVER, Grid, Sweep
from localspec.sweep_page import page
from localspec.sweep_result import cells, judge, same_text
from localspec.sweep_state import State

_MOST_CONTEXT = 4096
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of a sweep, as given."""

    n_max: str
    concurrency: str
    temps: str
    json_file: str | None
    html_file: str | None
    peer: str | None
    force: bool = False


def sweep(
    choice: ModelChoice, sampling: Sampling, prompts: list[Prompt], prompts_file: str | None, n_predict: int, wish: Wish
) -> None:
    """Measure and report. Raises UsageError before any model is loaded where the options can't be followed."""
    if choice.n_max == 0:
        raise UsageError("--spec-draft-n-max 0: a sweep needs something to draft")
    peer = Path(wish.peer).absolute() if wish.peer else None
    grid = Grid(
        _numbers("--n-max-list", wish.n_max, 64), _numbers("--concurrency", wish.concurrency, _MOST_AT_ONCE),
        _temperatures(wish.temps), choice.n_max if choice.adapt else 0, peer,
    )  # fmt: skip
    files = {flag: _writable(flag, name) for flag, name in (("--json", wish.json_file), ("--html", wish.html_file)) if name}
    if len({path.resolve() for path in files.values()}) < len(files):
        raise UsageError("--json and --html name the same file: give two")
    first = next(iter(files.values()), None)
    beside = first.with_name(first.name + ".state") if first else None
    if not wish.force:
        _keep_results(files, beside)
    loaded = open_engine(replace(choice, session=_session(choice, prompts, n_predict)), max(grid.concurrency))
    try:
        if loaded.drafter is None:
            raise UsageError("nothing to sweep: there is no drafter (--spec-type none, or a model that can't roll back)")
        fields = asdict(sampling)
        del fields["temperature"]
        settings = settings_in_effect(loaded, choice, fields, prompts, prompts_file, n_predict)
        state = State(beside, _belongs_to(settings, prompts, grid))
        if state.n_found:
            say(f"going on with {state.n_found} parts that were measured before ({beside})")
        run = Sweep(loaded.session, loaded.drafter, choice.rule, grid, prompts, sampling, n_predict, state, settings)

        def report(complete: bool) -> None:
            result = _result(loaded, choice, grid, prompts, state, settings, complete)
            _report(result, files)

        try:
            with bar("sweep", grid.n_units(len(prompts))) as advance:
                run.run(advance)
        except (KeyboardInterrupt, LocalspecError):
            if cells(grid, state.units, [prompt.source for prompt in prompts]):
                report(False)
            raise
        report(True)
        state.remove()
    finally:
        loaded.close()


# -- options -----------------------------------------------------------------------------------------------------------


def _numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{flag} '{text}': no list of numbers such as 1,2,4") from None
    if found[0] < 1 or found[-1] > most:
        raise UsageError(f"{flag} '{text}': numbers from 1 to {most}")
    return tuple(found)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--temps '{text}': no list of temperatures such as 0,0.8") from None
    if not all(math.isfinite(t) and t >= 0 for t in found):
        raise UsageError(f"--temps '{text}': temperatures are 0 or more")
    return tuple(found)


def _writable(flag: str, name: str) -> Path:
    """Hours later is too late to find out. What is no result of ours is not replaced."""
    path = Path(name)
    if not path.name or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{flag} {name}: name a file in a directory that can be written to")
    try:
        first = path.open("rb").read(1) if path.exists() else b""
    except OSError as error:
        raise UsageError(f"{flag} {name}: {error.strerror or error}") from None
    if first not in (b"", b"{" if flag == "--json" else b"<"):
        raise UsageError(f"{flag} {name}: that file is no {flag[2:].upper()} and would be lost: name another")
    return path


def _keep_results(files: dict[str, Path], state: Path | None) -> None:
    """Raise UsageError where a file holds results of a sweep that has come to its end. One that was ended before left its
    state beside the results, and goes on."""
    if state is not None and state.exists():
        return
    for flag, path in files.items():
        if path.exists() and path.stat().st_size:
            raise UsageError(f"{flag} {path} exists: name another file or give --force")


def _session(choice: ModelChoice, prompts: Sequence[Prompt], n_predict: int) -> Any:
    """A context for the longest prompt and its answer, where none is asked for: there are many of them at once. A token has
    a byte at least; what the chat template adds is guessed."""
    if choice.session.n_ctx:
        return choice.session
    longest = max(len(prompt.turns[0].encode()) for prompt in prompts)
    return replace(choice.session, n_ctx=min(_MOST_CONTEXT, -(-(longest + 256 + n_predict) // 256) * 256))


def _belongs_to(settings: dict[str, Any], prompts: Sequence[Prompt], grid: Grid) -> dict[str, Any]:
    """What must be the same for measured units to be of use. More of the grid may be asked for."""
    left_out = ("n_prompts", "prompts")
    belongs = {name: value for name, value in settings.items() if name not in left_out}
    files = {"target": settings["target"], "draft": settings["draft"], "peer": grid.peer}
    for name, path in files.items():
        stat = Path(path).stat() if path else None
        belongs[f"{name} file"] = [str(path), stat.st_size, stat.st_mtime_ns] if stat else None
    digest = hashlib.sha256(json.dumps([[p.source, p.turns[0]] for p in prompts]).encode())
    return belongs | {"prompts": digest.hexdigest(), "localspec": __version__}


# -- results -----------------------------------------------------------------------------------------------------------


def _result(
    loaded: Loaded, choice: ModelChoice, grid: Grid, prompts: Sequence[Prompt], state: State, settings: dict[str, Any],
    complete: bool,
) -> dict[str, Any]:  # fmt: skip
    found = cells(grid, state.units, [prompt.source for prompt in prompts])
    identical = judge(found, choice.rule)
    grids = {"n_max_list": list(grid.n_max), "concurrency": list(grid.concurrency), "temperatures": list(grid.temperatures)}
    return {
        "kind": "localspec-sweep", "version": 1, "complete": complete, "identical": identical,
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "command": ["localspec", *sys.argv[1:]],
        "machine": _machine(), "versions": _versions(), "settings": settings | grids,
        "curve": state.units["curve"], "cells": found,
    }  # fmt: skip


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    memory = None
    with contextlib.suppress(OSError, StopIteration, ValueError):
        names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        cpu = next(names).partition(":")[2].strip()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    load = None
    with contextlib.suppress(OSError, AttributeError):
        load = round(os.getloadavg()[0], 2)
    return {
        "cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory / 1e9, 1) if memory else None, "system": system,
        "load_at_the_end": load,
    }  # fmt: skip


def _versions() -> dict[str, str]:
    return {
        "localspec": __version__, "llama-cpp-python": version("llama-cpp-python"), "llama.cpp commit": native.LLAMA_COMMIT,
        "python": platform.python_version(),
    }  # fmt: skip


def _report(result: dict[str, Any], files: dict[str, Path]) -> None:
    """The table; then the files that were asked for, and JSON on standard output where none was asked for."""
    _table(result)
    made: dict[str, Callable[[], str]] = {
        "--json": lambda: json.dumps(result, indent=1) + "\n",
        "--html": lambda: page(result),
    }
    for flag, path in files.items():
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(made[flag](), encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror or error}") from None
    if "--json" not in files:
        click.echo(json.dumps(result))


def _table(result: dict[str, Any]) -> None:
    console = OutputConsole()
    if not result["complete"]:
        console.print("not complete: the sweep was ended before all of the grid was measured")
    headings = ["tok/s", "by clock", "speed-up", "kept", "per verify"]
    headings += ["over server", "drafting"] if any(c["kind"] == SERVER for c in result["cells"]) else []
    for place in dict.fromkeys((c["concurrency"], c["temperature"]) for c in result["cells"]):
        table = Table(title=f"{place[0]} at once, temperature {place[1]:g}")
        table.add_column("", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right")
        table.add_column("same text")
        for c in result["cells"]:
            if (c["concurrency"], c["temperature"]) == place:
                row = [
                    _number(c["tok_per_s"], 1), _number(c["clock_tok_per_s"], 1), _number(c.get("speedup"), 2, "x"),
                    _number(c["acceptance"], 2), _number(c.get("tokens_per_verify"), 2),
                    _number(c.get("over_server"), 2, "x"), _number(c.get("over_server_drafting"), 2, "x"),
                ]  # fmt: skip
                table.add_row(c["side"], *row[: len(headings)], same_text(c)[0])
        console.print(table)
    curve = result["curve"]
    console.print(f"ceiling {curve['ceiling']:.2f}x with blocks of {curve['ceiling_n']}", highlight=False)
    for c in result["cells"]:
        for d in c.get("differences", ()):
            console.print(
                f"DIFFERENT TEXT: {c['side']}, {c['concurrency']} at once, temperature {c['temperature']:g}, request "
                f"{d['request']} parts from plain at token {d['token']}; the target's logits of the two differ by "
                f"{d['margin']:.4f}",
                soft_wrap=True,
            )


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"
