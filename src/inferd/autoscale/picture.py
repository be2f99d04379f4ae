"""A simulation as a picture: arrivals, replicas and waits over time, as SVG. It needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from inferd.autoscale.simulate import Outcome, quantile

WIDTH: Final = 720
PANEL: Final = 130
LEFT, RIGHT, TOP, GAP = 64, 16, 44, 34
COLORS: Final = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#efb118")
COLUMNS: Final = 240
"""Points of a curve: the width of the picture shows no more."""

Curve = tuple[str, Sequence[tuple[float, float]]]


def picture(title: str, outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """Three panels over one axis of time: requests per second, replicas that are ready, and the p95 of responses, with
    a curve for each named outcome. All outcomes are of the same arrivals."""
    end = max(outcome.ticks[-1].at for _, outcome in outcomes) or 1.0
    arrivals = outcomes[0][1].arrivals
    panels: list[tuple[str, list[Curve]]] = [
        ("requests/s", [("arrivals", _rates(arrivals, end))]),
        ("replicas", [(name, [(tick.at, float(tick.ready)) for tick in one.ticks]) for name, one in outcomes]),
        ("p95 response, s", [(name, _p95(one, end)) for name, one in outcomes]),
    ]
    height = TOP + len(panels) * (PANEL + GAP) + 16
    parts = [_text(WIDTH / 2, 18, title, "middle", 14)]
    x = float(LEFT)
    for index, (name, _) in enumerate(outcomes):
        color = COLORS[index % len(COLORS)]
        parts.append(f'<rect x="{x:.0f}" y="26" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 14, 35, name))
        x += 26 + 6.5 * len(name)
    for index, (label, curves) in enumerate(panels):
        parts += _panel(TOP + index * (PANEL + GAP), label, curves, end, is_step=index == 1)
    parts.append(_text(WIDTH / 2, height - 6, "seconds", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(top: float, label: str, curves: Sequence[Curve], end: float, *, is_step: bool) -> list[str]:
    highest = max((y for _, points in curves for _, y in points), default=0.0)
    step = _round_step(max(highest, 1e-9) / 3)
    most = step * max(1, math.ceil(highest / step - 1e-9))

    def at_x(seconds: float) -> float:
        return LEFT + seconds / end * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return top + PANEL - value / most * PANEL

    parts = [_text(14, top + PANEL / 2, label, "middle", extra=f' transform="rotate(-90 14 {top + PANEL / 2:.0f})"')]
    for index in range(round(most / step) + 1):
        y = at_y(step * index)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{step * index:g}", "end"))
    each = _round_step(end / 6)
    for index in range(math.floor(end / each) + 1):
        parts.append(_text(at_x(each * index), top + PANEL + 16, f"{each * index:g}", "middle"))
    for index, (_, points) in enumerate(curves):
        color = COLORS[index % len(COLORS)] if len(curves) > 1 or is_step else "#555"
        thinned = _thinned(points) if not is_step else _steps(points)
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in thinned)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return parts


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a curve that changes at once."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        if not found or found[-1][1] != y:
            if found:
                found.append((x, found[-1][1]))
            found.append((x, y))
    return [*found, (points[-1][0], points[-1][1])] if points else []


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, len(points) // COLUMNS)]


def _rates(arrivals: Sequence[float], end: float) -> list[tuple[float, float]]:
    """Arrivals per second, in columns of equal width."""
    width = max(end / COLUMNS, 1.0)
    counts = [0] * (int(end / width) + 1)
    for at in arrivals:
        counts[min(len(counts) - 1, int(at / width))] += 1
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]


def _p95(outcome: Outcome, end: float) -> list[tuple[float, float]]:
    """The p95 of the responses to the arrivals of each column; a column without any is left out."""
    width = max(end / 80, 1.0)
    columns: dict[int, list[float]] = {}
    for at, response in zip(outcome.arrivals, outcome.responses, strict=True):
        columns.setdefault(int(at / width), []).append(response)
    return [((index + 0.5) * width, quantile(values, 0.95)) for index, values in sorted(columns.items())]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
