"""Charts as SVG text, for pages that must not need anything but themselves. Colours are classes: the page's style gives them
(`STYLE`), for light and dark screens alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: series that have a colour of their own; further ones begin anew
N_COLOURS = 8
_LIGHT = ("#5f6b7a", "#2563b0", "#c2570c", "#15803d", "#7c3aed", "#be185d", "#0e7490", "#854d0e")
_DARK = ("#a3adba", "#74a9f2", "#f59e52", "#5cc985", "#b79bfb", "#f27bb0", "#4fc3d9", "#d6a94a")
_WIDTH, _HEIGHT = 620, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 12, 46
_LEAST_GAP = 0.04  # between labels below, of the width


def _palette(colours: Sequence[str]) -> str:
    return "".join(f"--s{i}:{colour};" for i, colour in enumerate(colours))


STYLE = (
    f":root{{{_palette(_LIGHT)}--axis:#64748b;--grid:#e2e8f0}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_palette(_DARK)}--axis:#94a3b8;--grid:#2b3648}}}}"
    "svg{width:100%;height:auto;display:block;font:12px system-ui,sans-serif}"
    "svg text{fill:var(--axis)}svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--axis)}"
    ".dash{mask:repeating-linear-gradient(90deg,#000 0 4px,transparent 4px 6px)}"
    "svg .mark{stroke:var(--axis);stroke-dasharray:5 4}svg .said{paint-order:stroke;stroke:var(--back);stroke-width:4px}"
    "svg polyline{fill:none;stroke-width:2}"
    + "".join(
        f"svg .l{i}{{stroke:var(--s{i})}}svg .f{i}{{fill:var(--s{i})}}.k{i}{{background:var(--s{i})}}"
        for i in range(N_COLOURS)
    )
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the bars of one colour. None: no value there."""

    name: str
    values: Sequence[float | None]
    colour: int = 0
    dashed: bool = False


def lines(
    places: Sequence[str], series: Sequence[Series], x: str, y: str, marks: Sequence[tuple[float, str]] = (),
    at: Sequence[float] | None = None,
) -> str:  # fmt: skip
    """A line for each series over `places`, which stand at equal distances or `at` these numbers. `marks`: (value, text)
    of lines across."""
    numbers = list(at) if at is not None else [float(i) for i in range(len(places))]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    margin = 0.0 if at is not None else 0.35
    frame = _Frame(series, marks, low - margin, high + margin)
    parts = [frame.axes(x, y), *(frame.place(numbers[i], places[i]) for i in _with_room(numbers))]
    parts += [frame.mark(value, text) for value, text in marks]
    for one in series:
        points = [(n, v) for n, v in zip(numbers, one.values) if v is not None]
        path = " ".join(f"{frame.x(n):.1f},{frame.y(v):.1f}" for n, v in points)
        dash = ' stroke-dasharray="6 4"' if one.dashed else ""
        if len(points) > 1:
            parts.append(f'<polyline class="l{one.colour % N_COLOURS}" points="{path}"{dash}/>')
        for n, v in points:
            tip = escape(f"{one.name}, {places[numbers.index(n)]}: {_short(v)}")
            shape = f'cx="{frame.x(n):.1f}" cy="{frame.y(v):.1f}" r="3"'
            parts.append(f'<circle class="f{one.colour % N_COLOURS}" {shape}><title>{tip}</title></circle>')
    return frame.svg(parts, y)


def bars(
    groups: Sequence[str], series: Sequence[Series], y: str, marks: Sequence[tuple[float, str]] = ()
) -> str:  # fmt: skip
    """Groups of bars, one of each series."""
    frame = _Frame(series, marks, -0.5, max(1, len(groups)) - 0.5 + (0.1 * len(groups) if marks else 0.0))
    parts = [frame.axes("", y), *(frame.place(i, name) for i, name in enumerate(groups))]
    width = 0.8 / max(1, len(series))
    for row, one in enumerate(series):
        for i, value in enumerate(one.values):
            if value is None:
                continue
            left, right = frame.x(i - 0.4 + row * width), frame.x(i - 0.4 + (row + 1) * width)
            top = frame.y(value)
            shape = f'x="{left + 0.5:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" height="{frame.y(0) - top:.1f}"'
            tip = escape(f"{one.name}, {groups[i]}: {_short(value)}")
            parts.append(f'<rect class="f{one.colour % N_COLOURS}" {shape}><title>{tip}</title></rect>')
    parts += [frame.mark(value, text) for value, text in marks]
    return frame.svg(parts, y)


def legend(series: Sequence[Series]) -> str:
    """HTML that names the colours."""
    items = (
        f'<li><i class="k{one.colour % N_COLOURS}{" dash" if one.dashed else ""}"></i>{escape(one.name)}</li>'
        for one in series
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


class _Frame:
    """Where numbers stand: from x `low` to `high`, from 0 to above the largest value."""

    def __init__(self, series: Sequence[Series], marks: Sequence[tuple[float, str]], low: float, high: float):
        values = [v for one in series for v in one.values if v is not None] + [value for value, _ in marks]
        self._step = _nice_step(max([0.0, *values]) or 1.0)
        self._top = self._step * math.ceil(max([self._step, *values]) * 1.001 / self._step)
        self._low, self._span = low, (high - low) or 1.0

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - self._low) / self._span

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self._top

    def axes(self, x: str, y: str) -> str:
        parts = []
        for i in range(round(self._top / self._step) + 1):
            value = i * self._step
            at = f"{self.y(value):.1f}"
            kind = "grid" if i else "axis"
            parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text x="{_LEFT - 7}" y="{at}" dy="4" text-anchor="end">{_short(value)}</text>')
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
        if x:
            across = (_LEFT + _WIDTH - _RIGHT) / 2
            parts.append(f'<text x="{across}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
        return "".join(parts)

    def place(self, value: float, name: str) -> str:
        name = name if len(name) <= 22 else name[:21] + "…"
        return f'<text x="{self.x(value):.1f}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{escape(name)}</text>'

    def mark(self, value: float, text: str) -> str:
        at = self.y(value)
        line = f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        return f'{line}<text class="said" x="{_WIDTH - _RIGHT - 4}" y="{at - 5:.1f}" text-anchor="end">{escape(text)}</text>'

    def svg(self, parts: Sequence[str], what: str) -> str:
        head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(what)}">'
        return head + "".join(parts) + "</svg>"


def _nice_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, for about five steps."""
    raw = largest / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next((m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999), 10 * power)


def _with_room(numbers: Sequence[float]) -> list[int]:
    """Which of these ascending places have a label: none that is too near to the last one that has."""
    span = (numbers[-1] - numbers[0] if numbers else 0.0) or 1.0
    shown: list[int] = []
    for i, number in enumerate(numbers):
        if not shown or (number - numbers[shown[-1]]) / span > _LEAST_GAP:
            shown.append(i)
    return shown


def _short(value: float) -> str:
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")
    return text or "0"
