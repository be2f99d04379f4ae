"""A load test's results as one HTML file: a table, and curves drawn as inline SVG. Nothing is fetched."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

import msgspec

from inferd.benchmark.stats import Spread, Summary
from inferd.benchmark.step_profile import StepProfile


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole load test: what was measured, with what, and the figures. Written as JSON and HTML."""

    url: str
    model: str
    dataset: str
    started_at: str
    runs: list[Summary]
    command: str = ""
    profiles: list[StepProfile] = []  # of each run, where asked for


_STYLE = """
:root{--ink:#1c2330;--soft:#667085;--line:#e3e7ee;--page:#f7f8fb;--card:#fff;--a:#2563eb;--b:#d97706;--c:#be185d}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#98a2b3;--line:#2b3342;--page:#12161f;--card:#1a202c;
--a:#7aa2ff;--b:#f5b04c;--c:#f472b6}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;padding:32px;max-width:1080px}
h1{font-size:24px;margin:0}h2{font-size:15px;margin:0 0 8px}p{color:var(--soft);margin:4px 0 24px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:0 0 16px;overflow-x:auto}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:16px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
table{font-size:14px}th{vertical-align:bottom}th,td{text-align:right;padding:6px 8px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left}tr:last-child td{border:0}
.bad{color:var(--c);font-weight:600}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}
code{font-size:13px;overflow-wrap:anywhere}
"""
_COLOURS = ("var(--a)", "var(--b)", "var(--c)")


def load_label(run: Summary) -> str:
    return f"{run.load:g} client{'' if run.load == 1 else 's'}" if run.kind == "closed" else f"{run.load:g} req/s"


def milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def render(report: Report) -> str:
    """The HTML document."""
    runs = report.runs
    sections = [f'<div class="card">{_table(runs)}</div>']
    if report.profiles:
        sections.append(f'<div class="card"><h2>Where a step spends its time</h2>{_profile_table(report)}</div>')
    sections.append('<div class="grid">')
    for kind, axis in (("closed", "clients at a time"), ("open", "requests per second offered")):
        of_kind = sorted((run for run in runs if run.kind == kind), key=lambda run: run.load)
        if not of_kind:
            continue
        sections.append(
            _chart("Output tokens per second", axis, of_kind, [("output tok/s", lambda r: r.output_tokens_per_s)])
        )
        measures: tuple[tuple[str, Callable[[Summary], Spread]], ...] = (
            ("Time to first token (ms)", lambda r: r.ttft),
            ("Time per output token (ms)", lambda r: r.tpot),
            ("Whole answer (ms)", lambda r: r.e2e),
        )
        for title, measure in measures:
            curves = [_curve(measure, name) for name in ("p50", "p95", "p99")]
            sections.append(_chart(title, axis, of_kind, curves))
    sections.append("</div>")
    errors = [(load_label(run), sentence, count) for run in runs for sentence, count in run.errors.items()]
    if errors:
        rows = "".join(
            f"<tr><td>{_e(load)}</td><td>{_e(said)}</td><td>{count}</td></tr>" for load, said, count in errors
        )
        sections.append(f'<div class="card"><h2 class="bad">Errors</h2><table>{rows}</table></div>')
    if report.command:
        sections.append(f'<div class="card"><h2>Made by</h2><code>{_e(report.command)}</code></div>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test of {_e(report.model)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>Load test of {_e(report.model)}</h1><p>{_e(report.url)} · {_e(report.dataset)} · "
        f"{_e(report.started_at)}</p>"
        f"{''.join(sections)}</body></html>\n"
    )


def _curve(measure: Callable[[Summary], Spread], name: str) -> tuple[str, Callable[[Summary], float]]:
    def value(run: Summary) -> float:
        found = measure(run)
        return {"p50": found.p50, "p95": found.p95, "p99": found.p99}[name] * 1000

    return name, value


def _e(text: str) -> str:
    return html.escape(text)


def _table(runs: Sequence[Summary]) -> str:
    spreads = ("TTFT", "TPOT", "ITL", "E2E")
    head = "".join(f"<th>{name}, ms<br>p50 / p95 / p99</th>" for name in spreads)
    rows = []
    for run in runs:
        cells = "".join(
            f"<td>{milliseconds(s.p50)} / {milliseconds(s.p95)} / {milliseconds(s.p99)}</td>"
            for s in (run.ttft, run.tpot, run.itl, run.e2e)
        )
        bad = ' class="bad"' if run.num_errors else ""
        rows.append(
            f"<tr><td>{_e(load_label(run))}</td><td>{run.num_requests}</td><td{bad}>{run.num_errors}</td>"
            f"<td>{run.requests_per_s:.2f}</td><td>{run.output_tokens_per_s:,.1f}</td>{cells}</tr>"
        )
    return (
        "<table><tr><th>load</th><th>requests</th><th>errors</th><th>req/s</th><th>output tok/s</th>"
        f"{head}</tr>{''.join(rows)}</table>"
    )


def profile_rows(profiles: Sequence[StepProfile]) -> list[list[str]]:
    """A row for each part of a step: its name, then for each run milliseconds and share of step and sending."""
    rows = [["steps", *(f"{p.steps:,}" for p in profiles)]]
    for name in profiles[0].parts_s if profiles else ():
        cells = []
        for profile in profiles:
            seconds = profile.parts_s.get(name, 0.0)
            whole = profile.step_s + profile.parts_s.get("send", 0.0)
            cells.append(f"{seconds * 1000:.3f} ms {100 * seconds / whole if whole else 0.0:5.1f} %")
        rows.append([name, *cells])
    rows.append(["together", *(f"{(p.step_s + p.parts_s.get('send', 0.0)) * 1000:.3f} ms" for p in profiles)])
    return rows


def _profile_table(report: Report) -> str:
    head = "".join(f"<th>{_e(load_label(run))}</th>" for run in report.runs)
    body = "".join(
        f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in row)}</tr>" for row in profile_rows(report.profiles)
    )
    return f"<table><tr><th>part of a step</th>{head}</tr>{body}</table>"


def _chart(
    title: str, axis: str, runs: Sequence[Summary], curves: Sequence[tuple[str, Callable[[Summary], float]]]
) -> str:
    width, height, left, right, top, bottom = 480, 260, 56, 16, 12, 40
    highest = _round_up(max((value(run) for run in runs for _, value in curves), default=0.0))
    # Loads are evenly spaced: usual ones are 1, 8, 32.
    step = (width - left - right) / max(len(runs) - 1, 1)
    xs = [left + i * step if len(runs) > 1 else (left + width - right) / 2 for i in range(len(runs))]

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - value / highest)

    parts = []
    for i in range(5):
        value = highest * i / 4
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="var(--line)"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.4g}</text>')
    for x, run in zip(xs, runs, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle">{run.load:g}</text>')
    parts.append(f'<text x="{(left + width - right) / 2:.1f}" y="{height - 6}" text-anchor="middle">{_e(axis)}</text>')
    legend = []
    for (name, value_of), colour in zip(curves, _COLOURS, strict=False):
        points = [(x, y(value_of(run)), value_of(run)) for x, run in zip(xs, runs, strict=True)]
        line = " ".join(f"{x:.1f},{at:.1f}" for x, at, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3.5" fill="{colour}"><title>{_e(name)}: {v:,.2f}</title></circle>'
            for x, at, v in points
        ]
        legend.append(f'<span style="color:{colour}">● {_e(name)}</span>')
    shown = "&nbsp; ".join(legend) if len(curves) > 1 else ""
    return (
        f'<div class="card"><h2>{_e(title)} &nbsp;{shown}</h2>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_e(title)}">{"".join(parts)}</svg></div>'
    )


def _round_up(value: float) -> float:
    """The next 1, 2, 2.5, 4, 5 or 8 times a power of ten, so that quarters read well."""
    power = 1.0
    if value <= 0:
        return 1.0
    while value / power >= 10:
        power *= 10
    while value / power < 1:
        power /= 10
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if value <= step * power)
