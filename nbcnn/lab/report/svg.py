"""This module draws charts as inline SVG, 400 units wide, without scripts, fonts or colours of their own (the page's style gives them)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nbcnn.lab.report.page import CHARTS, PALETTE, escape

WIDTH, LEFT, RIGHT, TOP = 400, 58, 10, 12
COLOURS = 5


@dataclass(frozen=True)
class Series:
    """Points joined by a line (`dots`: marked as well), in colour 1 … 5."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    dash: bool = False
    dots: bool = True


@dataclass(frozen=True)
class Dot:
    """One point of a scatter, with the text that pointing at it shows. Hollow ones are drawn first."""

    x: float
    y: float
    colour: int
    title: str
    hollow: bool = False


def scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    """A function from low … high to start … end."""
    if log:
        low, high = math.log10(low), math.log10(high)
    span = (high - low) or 1.0
    return lambda value: start + ((math.log10(value) if log else value) - low) / span * (end - start)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 × powers of ten within low … high; only the powers where they are three or more; round values where there is not even a pair."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**p for p in range(first, last + 1) if low <= 10.0**p <= high]
    if len(powers) >= 3:
        return powers
    found = [m * 10.0**p for p in range(first, last + 1) for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return found if len(found) > 1 else linear_ticks(low, high, 3) or [low, high]


def linear_ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Round values within low … high, at most `most`."""
    span = (high - low) or 1.0
    raw = span / most
    step = next(m * 10.0 ** math.floor(math.log10(raw)) for m in (1, 2, 5, 10) if m * 10.0 ** math.floor(math.log10(raw)) >= raw * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    return [step * at for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick's text: 0.002, 5, 20,000, 5e-07."""
    if value and (abs(value) < 1e-4 or abs(value) >= 1e5):
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.6g}"


def short(value: float) -> str:
    """A value in three digits, in full where it has more: 0.112, 24.6, 1,600."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def standalone(chart: str) -> str:
    """A chart of this module as a file of its own, for pages that show it as an image: with its style, light and dark, and a background."""
    size = re.match(r'<svg viewBox="0 0 (\S+) (\S+)"', chart)
    assert size, chart[:80]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * float(size[1]):g}" height="{2 * float(size[2]):g}" '
    style = f'<style>{PALETTE}{CHARTS}</style><rect width="100%" height="100%" style="fill: var(--paper)"/>'
    opened, _, rest = chart.removeprefix("<svg ").partition(">")
    return f"{head}{opened}>{style}{rest}\n"


def _text(x: float, y: float, text: str, anchor: str = "start", muted: bool = False) -> str:
    colour = ' class="muted"' if muted else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{colour}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _margin(labels: Sequence[str]) -> float:
    """Room for labels beside bars."""
    return max(40.0, 12 + 6.3 * max(map(len, labels)))


def _legend(entries: Sequence[tuple[str, int, bool]], y: float) -> tuple[list[str], float]:
    """Entries (label, colour, dashed) in rows from `y` down; and where they end."""
    parts, x = [], float(LEFT)
    for label, colour, dash in entries:
        width = 26 + 6.1 * len(label)
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 16
        style = f"line s{colour}{' dash' if dash else ''}"
        parts += [f'<line class="{style}" x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 16:.1f}" y2="{y - 4:.1f}"/>', _text(x + 20, y, label)]
        x += width + 6
    return parts, y


def _axes(
    x: Callable[[float], float], y: Callable[[float], float], xticks: Sequence[float], yticks: Sequence[float], bottom: float, names: tuple[str, str]
) -> list[str]:
    parts = [_rule(x(tick), TOP, x(tick), bottom) for tick in xticks] + [_rule(LEFT, y(tick), WIDTH - RIGHT, y(tick)) for tick in yticks]
    parts += [_text(x(tick), bottom + 14, number(tick), "middle", muted=True) for tick in xticks]
    parts += [_text(LEFT - 5, y(tick) + 4, number(tick), "end", muted=True) for tick in yticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 30, names[0], "middle"))
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="11" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 11 {middle:.1f})">{escape(names[1])}</text>')
    return parts


def lines(series: Sequence[Series], x_name: str, y_name: str, whole: bool = False) -> str:
    """Lines over a linear x and a logarithmic y (all y above 0). `whole`: x counts something."""
    every = [point for each in series for point in each.points]
    xs, ys = [p[0] for p in every], [p[1] for p in every]
    bottom = 210.0
    low, high = min(ys) / 1.1, max(ys) * 1.1
    x, y = scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, False), scale(low, high, bottom, TOP, True)
    parts = _axes(x, y, linear_ticks(min(xs), max(xs), whole=whole), log_ticks(low, high), bottom, (x_name, y_name))
    for each in series:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in each.points)
        parts.append(f'<polyline class="line s{each.colour}{" dash" if each.dash else ""}" points="{path}"/>')
        if each.dots and len(each.points) <= 40:
            parts += [f'<circle class="s{each.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5"/>' for a, b in each.points]
    legend, end = _legend([(each.label, each.colour, each.dash) for each in series], bottom + 50)
    return _svg(end + 8, f"{y_name} over {x_name}", [*parts, *legend])


def bars(rows: Sequence[tuple[str, float, str]], x_name: str, log: bool = True, second: Collection[str] = ()) -> str:
    """Horizontal bars: (label, value, text at its end), on a logarithmic axis unless told otherwise; labels in `second` take the second colour."""
    room, left = _margin([note for _, _, note in rows]), _margin([label for label, _, _ in rows])
    low, high = (min(v for _, v, _ in rows) / 2 if log else 0.0), max(v for _, v, _ in rows)
    x = scale(low, high, left, WIDTH - room, log)
    parts = []
    for at, (label, value, note) in enumerate(rows):
        top = TOP + at * 24
        colour = 2 if label in second else 1
        parts.append(f'<rect class="s{colour}" x="{left:g}" y="{top}" width="{max(1.0, x(value) - left):.1f}" height="16"/>')
        parts += [_text(left - 6, top + 12, label, "end"), _text(x(value) + 6, top + 12, note)]
    bottom = TOP + 24 * len(rows)
    parts.append(_text(left, bottom + 12, x_name + (", logarithmic" if log else ""), muted=True))
    return _svg(bottom + 20, x_name, parts)


def matrix(counts: Sequence[Sequence[int]], names: Sequence[str], title: str) -> str:
    """A confusion matrix, rows true and columns predicted classes: a count in each cell, on a ground as strong as its share of the row."""
    left = _margin(names)
    size = (WIDTH - left - RIGHT) / len(names)
    parts = []
    for row, name in enumerate(names):
        y = TOP + 16 + row * size
        parts.append(_text(left - 6, y + size / 2 + 4, name, "end"))
        parts.append(_text(left + (row + 0.5) * size, TOP + 8, name[:4], "middle", muted=True))
        total = sum(counts[row]) or 1
        for column, count in enumerate(counts[row]):
            x = left + column * size
            ground = f'<rect class="s{1 if row == column else 2}" x="{x:.1f}" y="{y:.1f}" width="{size - 1:.1f}" height="{size - 1:.1f}"'
            parts.append(f'{ground} opacity="{0.9 * count / total:.3f}"><title>{escape(f"{name} as {names[column]}: {count}")}</title></rect>')
            parts.append(_text(x + size / 2, y + size / 2 + 4, str(count), "middle"))
    bottom = TOP + 16 + len(names) * size
    return _svg(bottom + 20, title, [*parts, _text(left, bottom + 14, title, muted=True)])


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]], x_name: str) -> str:
    """Horizontal bars to 100 %: (label, parts as (name, value), text at the end); equal names have one colour."""
    room, left = _margin([note for _, _, note in rows]), _margin([label for label, _, _ in rows])
    names = list(dict.fromkeys(name for _, parts, _ in rows for name, _ in parts))
    colour = {name: at % COLOURS + 1 for at, name in enumerate(names)}
    drawn = []
    for at, (label, parts, note) in enumerate(rows):
        top, total, x = TOP + at * 24, sum(max(0.0, v) for _, v in parts) or 1.0, left
        for name, value in parts:
            width = max(0.0, value) / total * (WIDTH - room - left)
            title = f"{label} {name}: {max(0.0, value) / total:.0%}"
            drawn.append(f'<rect class="s{colour[name]}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="16"><title>{escape(title)}</title></rect>')
            x += width
        drawn += [_text(left - 6, top + 12, label, "end"), _text(WIDTH - room + 6, top + 12, note)]
    bottom = TOP + 24 * len(rows)
    legend, end = _legend([(name, colour[name], False) for name in names], bottom + 30)
    return _svg(end + 8, x_name, [*drawn, _text(left, bottom + 12, x_name, muted=True), *legend])


def scatter(dots: Sequence[Dot], roofs: Sequence[Series], x_name: str, y_name: str) -> str:
    """Points under lines, both axes logarithmic: a roofline."""
    xs = [dot.x for dot in dots] + [p[0] for roof in roofs for p in roof.points]
    ys = [dot.y for dot in dots] + [p[1] for roof in roofs for p in roof.points]
    bottom = 240.0
    wide, tall = (min(xs) / 1.2, max(xs) * 1.2), (min(ys) / 1.5, max(ys) * 1.5)
    x, y = scale(*wide, LEFT, WIDTH - RIGHT, True), scale(*tall, bottom, TOP, True)
    parts = _axes(x, y, log_ticks(*wide), log_ticks(*tall), bottom, (x_name, y_name))
    for roof in roofs:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof.points)
        parts.append(f'<polyline class="line s{roof.colour}{" dash" if roof.dash else ""}" points="{path}"/>')
    for dot in sorted(dots, key=lambda dot: not dot.hollow):
        style = f"s{dot.colour}{' hollow' if dot.hollow else ''}"
        parts.append(f'<circle class="{style}" cx="{x(dot.x):.1f}" cy="{y(dot.y):.1f}" r="3.5"><title>{escape(dot.title)}</title></circle>')
    legend, end = _legend([(roof.label, roof.colour, roof.dash) for roof in roofs], bottom + 50)
    return _svg(end + 8, f"{y_name} over {x_name}", [*parts, *legend])
