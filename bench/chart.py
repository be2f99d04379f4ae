"""Pictures as SVG, made of text: lines over an axis, and groups of bars. Knows nothing of what they show.

A report must look the same wherever it is made, so there is no plotting library to have or not to have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 60, 52
COLORS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#9c6b4e", "#97bbf5")


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve; points only where it is not joined, no points where it is dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    joined: bool = True
    dashed: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, about ``count`` steps apart."""
    span = max(high - low, 1e-12)
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the bounds."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high] or [low]


def number(value: float) -> str:
    if value and abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"


def lines(
    curves: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Curves over a common axis; the vertical one begins at 0 unless it is logarithmic."""
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for y in curve.y]
    if not xs:
        raise ValueError(f"The picture {title!r} has no points.")
    x_ticks = log_ticks(min(xs), max(xs)) if log_x else ticks(min(xs), max(xs))
    low_x, high_x = (min(xs), max(xs)) if log_x else (x_ticks[0], x_ticks[-1])
    y_ticks = log_ticks(min(ys), max(ys) * 1.2) if log_y else ticks(0.0, max(*ys, 1e-9))
    low_y, high_y = (min(ys), max(ys) * 1.2) if log_y else (y_ticks[0], y_ticks[-1])

    def at_x(x: float) -> float:
        return LEFT + _share(x, low_x, high_x, log_x) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - _share(y, low_y, high_y, log_y) * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, x_label, y_label)
    for tick in x_ticks:
        parts.append(_text(at_x(tick), HEIGHT - BOTTOM + 18, number(tick), "middle"))
    parts += _grid([(at_y(tick), number(tick)) for tick in y_ticks])
    for i, curve in enumerate(curves):
        color = COLORS[i % len(COLORS)]
        points = [(at_x(x), at_y(y)) for x, y in zip(curve.x, curve.y, strict=True)]
        if curve.joined and len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        if not curve.dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
    parts += _legend([curve.name for curve in curves])
    return _whole(parts)


def bars(
    groups: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]], *, title: str, y_label: str
) -> str:
    """A group of bars for each name, one for each series; None leaves a gap."""
    values = [value for _, column in series for value in column if value is not None]
    if not values:
        raise ValueError(f"The picture {title!r} has no bars.")
    y_ticks = ticks(0.0, max(*values, 1e-9))
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    each = wide * 0.8 / len(series)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, "", y_label) + _grid([(at_y(tick), number(tick)) for tick in y_ticks])
    for g, group in enumerate(groups):
        parts.append(_text(LEFT + (g + 0.5) * wide, HEIGHT - BOTTOM + 18, group, "middle"))
        for s, (_, column) in enumerate(series):
            value = column[g]
            if value is None:
                continue
            x, y = LEFT + g * wide + wide * 0.1 + s * each, at_y(value)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{each * 0.92:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
                f'fill="{COLORS[s % len(COLORS)]}"/>'
            )
            parts.append(_text(x + each * 0.46, y - 3, f"{value:.3g}", "middle", size=9))
    parts += _legend([name for name, _ in series])
    return _whole(parts)


def _share(value: float, low: float, high: float, is_log: bool) -> float:
    if is_log:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return (value - low) / (high - low) if high > low else 0.5


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    turned = f' transform="rotate(-90 14 {middle:.0f})"'
    return [
        _text(WIDTH / 2, 18, title, "middle", 14),
        _text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 14, x_label, "middle"),
        _text(14, middle, y_label, "middle", extra=turned),
    ]


def _grid(levels: Sequence[tuple[float, str]]) -> list[str]:
    found = []
    for y, label in levels:
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        found.append(_text(LEFT - 6, y + 4, label, "end"))
    return found


def _legend(names: Sequence[str]) -> list[str]:
    """In as many rows as it needs; there is room for two."""
    found, x, y = [], float(LEFT), 26
    for i, name in enumerate(names):
        wide = 26 + 6.5 * len(name)
        if x + wide > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 15
        found.append(f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{COLORS[i % len(COLORS)]}"/>')
        found.append(_text(x + 14, y + 9, name))
        x += wide
    return found


def _whole(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
