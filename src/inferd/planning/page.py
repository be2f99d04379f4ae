"""A plan as one HTML page with pictures, which loads nothing from elsewhere. Knows no plotting library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from inferd.planning.capacity import WARNING
from inferd.planning.shape import Format
from inferd.planning.sizing import NOTES, Choice, Sizing

WIDTH: Final = 860
LEFT, RIGHT, ROW = 150, 150, 26
PARTS: Final = (("weights", "#4269d0"), ("headroom", "#efb118"), ("KV cache", "#3ca951"))
_SPEED: Final = "#a463f2"

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 900px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 24px; margin-bottom: 4px; } h2 { font-size: 18px; margin-top: 32px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } td, th { padding: 4px 8px; text-align: right; }
td:first-child, th:first-child, td.left, th.left { text-align: left; } tr + tr td { border-top: 1px solid #ddd; }
th { border-bottom: 2px solid #888; } .tight { color: #b35900; font-weight: 600; } .quiet { color: #666; }
svg { max-width: 100%; height: auto; }
.take { background: #eef3ff; padding: 10px 14px; border-left: 4px solid #4269d0; }
"""


def page(found: Sizing) -> str:
    """The whole page: what to take, a picture of memory and of speed for each format, and the tables."""
    load = found.demand.load
    forms = list(dict.fromkeys(one.form for one in found.choices))
    body = [
        f"<h1>{escape(found.model)}</h1>",
        f"<p class=quiet>{found.parameters_text}, {found.kv_bytes_per_token:,} bytes of "
        f"KV cache a token. A replica serves {load.requests:,} requests of {load.tokens:,} tokens at once, "
        f"{load.answer:,} of them generated.</p>",
        _take(found),
        "<h2>Memory of a replica</h2>",
        "<p>The fullest device of the smallest layout that holds the load, as a part of its memory. The dashed line is "
        f"{100 * WARNING:.0f} %: above it a burst of requests may fail.</p>",
        *(_memory(form, [one for one in found.choices if one.form == form]) for form in forms),
        "<h2>Speed of a replica</h2>",
        "<p>Tokens per second of all requests together, an estimate by bandwidth and arithmetic.</p>",
        _speeds(found.choices),
        "<h2>Choices</h2>",
        _choices(found),
        "<h2>What if</h2>",
        _what_if(found),
        "<h2>Where the numbers are from</h2>",
        _sources(found),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(found.model)}: plan</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _take(found: Sizing) -> str:
    one = found.smallest
    if one is None or one.layout is None:
        return "<p class=take>Nothing here holds it.</p>"
    cost = "" if one.cost is None else f": {one.cost.per_hour:,.2f} {escape(found.prices.currency)} an hour"
    tight = f", which uses {100 * one.used:.0f} % of its memory" if one.is_tight else ""
    replicas = f"{one.replicas} replicas of " if one.replicas > 1 else ""
    return (
        f"<p class=take>Take {replicas}<b>{one.layout.devices} x {escape(one.device)}</b> in <b>{one.form}</b>"
        f"{tight}{cost}.</p>"
    )


def _memory(form: Format, choices: Sequence[Choice]) -> str:
    """A bar for each device: weights, headroom and cache, as parts of its memory."""
    fitting = [one for one in choices if one.need is not None]
    if not fitting:
        return ""
    inner = WIDTH - LEFT - RIGHT
    height = 40 + ROW * len(fitting) + 12
    parts = [_text(0, 16, form, size=15, weight=600)]
    x = float(LEFT)
    for name, color in PARTS:
        parts.append(f'<rect x="{x:.0f}" y="6" width="11" height="11" fill="{color}"/>')
        parts.append(_text(x + 16, 16, name, size=12))
        x += 34 + 7 * len(name)
    for index, one in enumerate(fitting):
        assert one.need is not None
        assert one.layout is not None
        y = 32 + ROW * index
        parts.append(_text(LEFT - 8, y + 14, f"{one.device} x {one.layout.devices}", anchor="end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{inner}" height="18" fill="#eee"/>')
        x = float(LEFT)
        for size, (_, color) in zip(
            (one.need.weights_bytes, one.need.headroom_bytes, one.need.kv_bytes), PARTS, strict=True
        ):
            width = inner * size / one.memory_bytes
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>')
            x += width
        told = f"{one.need.total_bytes / 1e9:,.0f} of {one.memory_bytes / 1e9:,.0f} GB"
        parts.append(_text(WIDTH - RIGHT + 8, y + 14, told, fill="#b35900" if one.is_tight else "#1c1c1c"))
    line = LEFT + inner * WARNING
    parts.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="28" y2="{height - 10}" stroke="#b35900" stroke-dasharray="4 3"/>'
    )
    return _svg(height, parts, f"Memory in {form}")


def _speeds(choices: Sequence[Choice]) -> str:
    """A bar for each choice."""
    fitting = [(one, one.speed.tokens_per_s) for one in choices if one.speed is not None]
    if not fitting:
        return ""
    most = max(rate for _, rate in fitting)
    inner = WIDTH - LEFT - RIGHT
    height = ROW * len(fitting) + 12
    parts: list[str] = []
    for index, (one, rate) in enumerate(fitting):
        assert one.layout is not None
        y = 6 + ROW * index
        width = max(1.0, inner * rate / most)
        parts.append(_text(LEFT - 8, y + 13, f"{one.device} x {one.layout.devices} {one.form}", anchor="end", size=12))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="16" fill="{_SPEED}"/>')
        parts.append(_text(LEFT + width + 6, y + 13, f"{rate:,.0f}", size=12))
    return _svg(height, parts, "Tokens per second")


def _choices(found: Sizing) -> str:
    rows = []
    for one in found.choices:
        if one.layout is None or one.speed is None:
            reason = f"<td class='left quiet' colspan=7>{escape(one.reason)}</td>"
            rows.append(f"<tr><td>{escape(one.device)}</td><td class=left>{one.form}</td>{reason}</tr>")
            continue
        cost = one.cost
        cells = (
            one.layout.text,
            f"<span class={'tight' if one.is_tight else 'quiet'}>{100 * one.used:.0f} %</span>",
            f"{one.requests_at_once:,}",
            f"{one.speed.first_token_s:.2g} s",
            f"{one.speed.tokens_per_s:,.0f}",
            "-" if cost is None else f"{cost.per_hour:,.2f}",
            "-" if cost is None else f"{cost.per_1000_tokens:.2g}",
        )
        rows.append(
            f"<tr><td>{escape(one.device)}</td><td class=left>{one.form}</td>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    currency = escape(found.prices.currency)
    heads = ("devices", "used", "at once", "first token", "tokens/s", f"{currency} an hour", f"{currency} per 1,000")
    return (
        "<table><tr><th>device</th><th class=left>format</th>"
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr>"
        + "".join(rows)
        + "</table>"
    )


def _what_if(found: Sizing) -> str:
    rows = []
    for change in found.what_if:
        one = change.choice
        told = "nothing here holds it"
        if one is not None and one.layout is not None and one.speed is not None:
            cost = "" if one.cost is None else f", {one.cost.per_month:,.0f} {found.prices.currency} a month"
            replicas = f"{one.replicas} replicas of " if one.replicas > 1 else ""
            told = (
                f"{replicas}{one.layout.devices} x {one.device} in {one.form}, {100 * one.used:.0f} % used, about "
                f"{one.speed.tokens_per_s * one.replicas:,.0f} tokens/s{cost}"
            )
        rows.append(f"<tr><td>{escape(change.change)}</td><td class=left>{escape(told)}</td></tr>")
    return "<table>" + "".join(rows) + "</table>"


def _sources(found: Sizing) -> str:
    notes = {note for one in found.choices for note in one.notes}
    measured = found.measured
    compared = (
        f"Estimates were within {measured.within} of the speed of runs on {measured.machine} ({measured.date}); no GPU "
        "was measured."
        if measured.rows
        else "No estimate was compared with a measurement."
    )
    lines = [
        *(sentence for name, sentence in NOTES.items() if name in notes),
        *found.warnings,
        compared,
        f"Prices: {found.prices.source} ({found.prices.date}); a replica works {100 * found.demand.busy:.0f} % of the "
        "time.",
        f"Sizes of the model: {found.source}.",
    ]
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _svg(height: int, parts: Iterable[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img"><title>{escape(title)}</title>\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: int = 400, fill: str = "#1c1c1c"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}">{escape(text)}</text>'
    )
