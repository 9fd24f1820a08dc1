"""What a sweep's units come to: one cell for each side, number of texts at once and temperature. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.report import rate
from localspec.sweep import PLAIN, SERVER, Grid, Side, compared_name, unit_name

Json = dict[str, Any]


def cells(grid: Grid, units: Mapping[str, Any], sources: Sequence[str]) -> list[Json]:
    """The cells of all complete waves. `sources[i]`: where prompt i comes from.

    `tok_per_s` counts the time of decoding alone, `clock_tok_per_s` waves by the clock, prompts included: the one of which
    llama-server can be asked, too. `speedup` is over plain in the first, `over_server` and `over_server_drafting` over
    llama-server without a draft, and with one of as many tokens, in the second. `identical` is None where no rule promises
    plain's text.
    """
    found: list[Json] = []
    for n_at_once in grid.concurrency:
        for temperature in grid.temperatures:
            waves = [
                w for w in range(grid.n_waves(n_at_once, len(sources)))
                if all(compared_name(n_at_once, temperature, w, side.name) in units for side in grid.sides)
            ]  # fmt: skip
            if not waves:
                continue
            here = {}
            for side in grid.sides:
                measured = [units[unit_name(n_at_once, temperature, w, side.name)] for w in waves]
                here[side] = _cell(side, n_at_once, temperature, measured, sources)
            apart = {
                side: [d for w in waves for d in units[compared_name(n_at_once, temperature, w, side.name)]]
                for side in grid.sides
            }
            _relate(here, apart)
            found += here.values()
    _across(found, grid, units, len(sources))
    return found


def _cell(side: Side, n_at_once: int, temperature: float, waves: Sequence[Json], sources: Sequence[str]) -> Json:
    requests = [done for wave in waves for done in wave["requests"]]
    n, seconds = sum(d["n"] for d in requests), sum(d["seconds"] for d in requests)
    by_source: dict[str, list[float]] = {}
    for done in requests:
        entry = by_source.setdefault(sources[done["key"] % len(sources)], [0, 0.0])
        entry[0] += done["n"]
        entry[1] += done["seconds"]
    cell: Json = {
        "concurrency": n_at_once, "temperature": temperature, "side": side.name, "kind": side.kind, "n_max": side.n,
        "n_requests": len(requests), "n_generated": n,
        # Several requests of a server overlap: their times don't add up.
        "tok_per_s": rate(n, seconds) if side.ours or n_at_once == 1 else None,
        "clock_tok_per_s": rate(n, sum(wave["seconds"] for wave in waves)),
        "by_source": {name: {"tok_per_s": rate(int(a), b)} for name, (a, b) in by_source.items()},
    }  # fmt: skip
    if side.ours:
        drafted, accepted = _sum([d["drafted_at"] for d in requests]), _sum([d["accepted_at"] for d in requests])
        n_verify = sum(d["n_verify"] for d in requests)
        cell["acceptance_by_position"] = [a / d for a, d in zip(accepted, drafted) if d]
        cell["tokens_per_verify"] = (sum(accepted) + n_verify) / n_verify if n_verify else 0.0
        n_drafted, n_accepted = sum(drafted), sum(accepted)
    else:
        n_drafted, n_accepted = (sum(d[name] for d in requests) for name in ("n_drafted", "n_accepted"))
    cell["acceptance"] = n_accepted / n_drafted if n_drafted else None
    return cell


def _relate(here: Mapping[Side, Json], apart: Mapping[Side, list[list[Any]]]) -> None:
    """Ratios between the cells of one place, and whose texts part."""
    by_name = {side.name: cell for side, cell in here.items()}
    plain, server = by_name[PLAIN], by_name.get(SERVER)
    for side, cell in here.items():
        different = apart[side]
        if not side.ours:
            cell["n_other_text_than_ours"] = len(different) if cell["temperature"] == 0 else None
            continue
        cell["speedup"] = _ratio(cell["tok_per_s"], plain["tok_per_s"])
        for name, entry in cell["by_source"].items():
            entry["speedup"] = _ratio(entry["tok_per_s"], plain["by_source"][name]["tok_per_s"])
        drafting = by_name.get(f"{SERVER} {side.n}")
        for name, theirs in (("over_server", server), ("over_server_drafting", drafting)):
            cell[name] = _ratio(cell["clock_tok_per_s"], theirs["clock_tok_per_s"]) if theirs else None
        cell["differences"] = [{"request": k, "token": at, "margin": margin} for k, at, margin in different]


def _across(found: Sequence[Json], grid: Grid, units: Mapping[str, Any], n_prompts: int) -> None:
    """Whether each plain text is that of the same request with the fewest texts at once."""
    for temperature in grid.temperatures:
        first: dict[int, list[int]] = {}
        for n_at_once in sorted(grid.concurrency):
            n_other = 0
            for wave in range(grid.n_waves(n_at_once, n_prompts)):
                unit = units.get(unit_name(n_at_once, temperature, wave, PLAIN))
                for done in unit["requests"] if unit else ():
                    n_other += first.setdefault(done["key"], done["tokens"]) != done["tokens"]
            for cell in found:
                if (cell["kind"], cell["concurrency"], cell["temperature"]) == (PLAIN, n_at_once, temperature):
                    cell["n_other_text_than_fewer_at_once"] = n_other


def judge(found: Sequence[Json], rule: str) -> bool | None:
    """Fill in `identical` of our cells; returns whether all are, None where nothing was compared."""
    verdicts = []
    for cell in found:
        if cell["kind"] in (PLAIN, SERVER):
            continue
        promised = cell["temperature"] == 0 or rule == "match"
        cell["identical"] = not cell["differences"] if promised else None
        if promised:
            verdicts.append(cell["identical"])
    return all(verdicts) if verdicts else None


def same_text(cell: Json) -> tuple[str, bool | None]:
    """What a table says of a cell's texts, and whether that is good; None where it is neither."""
    if cell["kind"] == PLAIN:
        n = cell["n_other_text_than_fewer_at_once"]
        return (f"{n} OTHER than with fewer at once", False) if n else ("-", None)
    if cell["kind"] == SERVER:
        n = cell["n_other_text_than_ours"]
        return "-" if n is None else ("as ours" if n == 0 else f"{n} other"), None
    if cell["identical"] is None:
        return "-", None
    return ("yes", True) if cell["identical"] else (f"NO ({len(cell['differences'])})", False)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    total = [0] * max((len(row) for row in rows), default=0)
    for row in rows:
        for i, n in enumerate(row):
            total[i] += n
    return total
