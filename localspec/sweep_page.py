"""A sweep's results as one page of HTML that needs nothing else: no script, no file, no network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from localspec.charts import STYLE, Series, bars, legend, lines
from localspec.sweep import ADAPTIVE, PLAIN, SERVER
from localspec.sweep_result import same_text

Json = dict[str, Any]

_STYLE = (
    ":root{color-scheme:light dark;--back:#fff;--text:#1b2430;--soft:#f1f5f9;--line:#d5dce6;--good:#166534;--bad:#b91c1c}"
    "@media(prefers-color-scheme:dark){:root{--back:#131a24;--text:#e3e9f2;--soft:#1d2735;--line:#36445a;--good:#4ade80;"
    "--bad:#ff8080}}"
    "body{margin:0 auto;max-width:1320px;padding:1.2rem;background:var(--back);color:var(--text);"
    "font:15px/1.45 system-ui,sans-serif}h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2rem 0 .6rem}"
    "p.verdict{border-left:5px solid var(--good);background:var(--soft);padding:.6rem .9rem;margin:1rem 0}"
    "p.verdict.bad{border-color:var(--bad);color:var(--bad);font-weight:600}.good{color:var(--good)}"
    ".bad{color:var(--bad);font-weight:600}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:1rem}"
    "figure{margin:0;padding:.7rem;border:1px solid var(--line);border-radius:8px}figcaption{font-weight:600;"
    "margin-bottom:.4rem}.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.3rem 0 0;padding:0;"
    "font-size:13px}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .55rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th{background:var(--soft);white-space:normal;vertical-align:bottom}"
    "th:first-child,td:first-child,.facts td,.facts th{text-align:left}"
    ".facts td{white-space:normal;overflow-wrap:anywhere}tr.first td{border-top:2px solid var(--axis)}"
)


def page(result: Json) -> str:
    """The page for what `bench --sweep` writes as JSON."""
    title = f"{result['settings']['target'].replace(chr(92), '/').rpartition('/')[2]}: drafting swept"
    body = [f"<h1>{escape(title)}</h1>", _intro(result), _verdict(result)]
    body += ['<div class="charts">', *_charts(result), "</div>"]
    body += ["<h2>All cells</h2>", _table(result), _differences(result)]
    body += ["<h2>Speed-up by source</h2>", _sources(result), "<h2>Cost curve</h2>", _curve_table(result)]
    body += ["<h2>How this was measured</h2>", _facts(result)]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}{STYLE}</style></head>\n'
        f"<body>{chr(10).join(part for part in body if part)}</body></html>\n"
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _intro(result: Json) -> str:
    s = result["settings"]
    drafted = [c for c in result["cells"] if c.get("speedup") and c["kind"] != PLAIN]
    best = max(drafted, key=lambda c: c["speedup"], default=None)
    threads = "1 thread" if s["threads"] == 1 else f"{s['threads']} threads"
    text = f"Drafter {escape(s['spec_type'])}, {escape(s['kernels'])} kernels, {threads}, {escape(result['when'])}."
    if best is not None:
        where = f"{best['concurrency']} at once, temperature {best['temperature']:g}"
        text += f" Best: {best['speedup']:.2f} times plain decoding, {escape(best['side'])}, {where}."
    return f"<p>{text}</p>"


def _verdict(result: Json) -> str:
    parts = []
    if not result["complete"]:
        parts.append('<p class="verdict bad">Not complete: the sweep was ended before all of the grid was measured.</p>')
    other = [c for c in result["cells"] if c.get("identical") is False]
    if other:
        n = sum(len(c["differences"]) for c in other)
        parts.append(
            f'<p class="verdict bad">TEXTS DIFFER: {n} of the drafted texts, in {len(other)} of the cells below, are not '
            "the plain ones. Where they part is listed below the table.</p>"
        )
    elif result["identical"]:
        parts.append(
            '<p class="verdict"><b class="good">Identical text.</b> Every drafted text was compared with the plain one of '
            "the same request, token by token: all are equal.</p>"
        )
    batch = sum(c.get("n_other_text_than_fewer_at_once", 0) for c in result["cells"])
    if batch:
        parts.append(f'<p class="verdict bad">{batch} plain texts are other ones with more texts at once.</p>')
    return "".join(parts)


# -- charts ------------------------------------------------------------------------------------------------------------


def _charts(result: Json) -> list[str]:
    found = []
    for temperature in _distinct(result, "temperature"):
        found.append(_by_source(result, temperature))
    found.append(_by_position(result))
    found.append(_cost(result))
    for temperature in _distinct(result, "temperature"):
        found.append(_by_concurrency(result, temperature))
    return found


def _figure(title: str, chart: str, series: Sequence[Series]) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}{legend(series)}</figure>"


def _colour(result: Json, side: str) -> int:
    """Of a side, the same in all charts: plain and llama-server are grey and dashed or not."""
    ours = [name for name in _sides(result) if not name.startswith(SERVER)]
    return ours.index(side) if side in ours else 0


def _by_source(result: Json, temperature: float) -> str:
    fewest = min(_distinct(result, "concurrency"), default=1)
    cells = [c for c in _cells_at(result, temperature, fewest) if c["kind"] not in (PLAIN, SERVER)]
    sources = list(dict.fromkeys(name for c in cells for name in c["by_source"]))
    series = [
        Series(c["side"], [c["by_source"].get(s, {}).get("speedup") for s in sources], _colour(result, c["side"]))
        for c in cells
    ]
    chart = bars(sources, series, "times plain", [(1.0, "plain")])
    return _figure(f"Speed-up by source, temperature {temperature:g}, {fewest} at once", chart, series)


def _by_position(result: Json) -> str:
    fewest = min(_distinct(result, "concurrency"), default=1)
    series = []
    for i, temperature in enumerate(_distinct(result, "temperature")):
        cells = _cells_at(result, temperature, fewest)
        fixed = max((c for c in cells if c["kind"] == "fixed"), key=lambda c: c["n_max"], default=None)
        for c in [fixed, *(c for c in cells if c["kind"] == ADAPTIVE)]:
            if c is not None and c["acceptance_by_position"]:
                name = f"{c['side']}, temperature {temperature:g}"
                series.append(Series(name, c["acceptance_by_position"], _colour(result, c["side"]), i > 0))
    longest = max((len(one.values) for one in series), default=1)
    chart = lines([str(i + 1) for i in range(longest)], series, "place in the block", "share kept, where drafted")
    return _figure(f"Acceptance by position, {fewest} at once (dashed: the higher temperatures)", chart, series)


def _cost(result: Json) -> str:
    curve = result["curve"]
    gain = [n / ratio for n, ratio in zip(curve["n"], curve["ratio"])]
    series = [Series("cost t(n) / t(1)", curve["ratio"], 2), Series("most gain, n / cost", gain, 3)]
    mark = (curve["ceiling"], f"ceiling {curve['ceiling']:.2f}x, blocks of {curve['ceiling_n']}")
    places = [str(n) for n in curve["n"]]
    chart = lines(places, series, "tokens in one decode", "times one token's decode", [mark], curve["n"])
    return _figure("Cost curve, and the ceiling of a free, perfect draft", chart, series)


def _by_concurrency(result: Json, temperature: float) -> str:
    counts = _distinct(result, "concurrency")
    series = []
    for side in _sides(result):
        found = {n: [c for c in _cells_at(result, temperature, n) if c["side"] == side] for n in counts}
        values = [found[n][0]["clock_tok_per_s"] if found[n] else None for n in counts]
        colour = _colour(result, side.replace(SERVER, "fixed"))
        series.append(Series(side, values, colour, side.startswith(SERVER)))
    dashed = " (dashed: llama-server)" if any(one.dashed for one in series) else ""
    title = f"Tokens per second of all texts, temperature {temperature:g}{dashed}"
    return _figure(title, lines([f"{n:g}" for n in counts], series, "texts at once", "tok/s by the clock"), series)


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(result: Json) -> str:
    peer = any(c["kind"] == SERVER for c in result["cells"])
    head = ["side", "at once", "temp.", "same text", "requests", "tokens"]
    head += ["tok/s", "tok/s, clock", "speed-up", "kept", "per verify"]
    head += ["over server", "over it drafting"] if peer else []
    rows, before = [], None
    for c in result["cells"]:
        place = (c["concurrency"], c["temperature"])
        row = [
            escape(c["side"]), str(c["concurrency"]), f"{c['temperature']:g}", _same(c), str(c["n_requests"]),
            str(c["n_generated"]), _number(c["tok_per_s"], 1), _number(c["clock_tok_per_s"], 1), _times(c.get("speedup")),
            _number(c["acceptance"], 2), _number(c.get("tokens_per_verify"), 2),
        ]  # fmt: skip
        row += [_times(c.get("over_server")), _times(c.get("over_server_drafting"))] if peer else []
        rows.append((row, place != before))
        before = place
    note = "<p>tok/s: time of decoding alone. By the clock: whole waves of requests, their prompts included."
    if peer:
        note += " Over server: by the clock, against llama-server without a draft, and with as many drafted tokens."
    note += "</p>"
    return _rows(head, rows) + note


def _same(cell: Json) -> str:
    text, good = same_text(cell)
    return escape(text) if good is None else f'<span class="{"good" if good else "bad"}">{escape(text)}</span>'


def _differences(result: Json) -> str:
    items = [
        f"<li>{escape(c['side'])}, {c['concurrency']} at once, temperature {c['temperature']:g}: request {d['request']} "
        f"parts at token {d['token']}; the target's logits of the two differ by {d['margin']:.4f}</li>"
        for c in result["cells"] for d in c.get("differences", ())
    ]  # fmt: skip
    return f'<ul class="bad">{"".join(items)}</ul>' if items else ""


def _sources(result: Json) -> str:
    names = list(dict.fromkeys(name for c in result["cells"] for name in c["by_source"]))
    rows = []
    for c in result["cells"]:
        if c["kind"] in (PLAIN, SERVER):
            continue
        values = [_times(c["by_source"].get(name, {}).get("speedup")) for name in names]
        rows.append(([escape(c["side"]), str(c["concurrency"]), f"{c['temperature']:g}", *values], False))
    return _rows(["side", "at once", "temp.", *map(escape, names)], rows)


def _curve_table(result: Json) -> str:
    curve = result["curve"]
    rows = [([str(n), f"{ms:.2f}", f"{ratio:.2f}", _times(n / ratio)], False)
            for n, ms, ratio in zip(curve["n"], curve["ms"], curve["ratio"])]  # fmt: skip
    return _rows(["tokens", "ms", "t(n)/t(1)", "most gain"], rows)


def _rows(head: Sequence[str], rows: Sequence[tuple[Sequence[str], bool]]) -> str:
    """Cells are HTML already; a row marked True gets a line above it."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        f"<tr{' class=first' if first else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row, first in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(result: Json) -> str:
    facts = {"command": shlex.join(result["command"])}
    for part in ("machine", "versions", "settings"):
        facts |= {name.replace("_", " "): value for name, value in result[part].items()}
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f'<div class="wide"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _distinct(result: Json, name: str) -> list[Any]:
    return sorted({c[name] for c in result["cells"]})


def _cells_at(result: Json, temperature: float, n_at_once: int) -> list[Json]:
    return [c for c in result["cells"] if (c["temperature"], c["concurrency"]) == (temperature, n_at_once)]


def _sides(result: Json) -> list[str]:
    return list(dict.fromkeys(c["side"] for c in result["cells"]))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
