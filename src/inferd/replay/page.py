"""Reports as one HTML file: tables, and pictures as inline SVG. Nothing is fetched, and no script runs."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

from inferd.replay.records import REASONS
from inferd.replay.report import Example, Labels, Paired, Quantiles, ReplayReport
from inferd.replay.verdict import verdict_of

STYLE: Final = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6779;--line:#e3e7ee;--page:#f7f8fb;--card:#fff;--good:#15803d;
--bad:#be123c;--mid:#b45309;--a:#2563eb}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#a3adbd;--line:#2b3342;--page:#12161f;--card:#1a202c;
--good:#4ade80;--bad:#fb7185;--mid:#f5b04c;--a:#7aa2ff}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;padding:32px;max-width:1080px}
h1{font-size:24px;margin:0}h2{font-size:15px;margin:0 0 8px}p{color:var(--soft);margin:4px 0 8px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:0 0 16px;overflow-x:auto}
.card.verdict{font-size:17px;border-left:6px solid var(--mid);color:var(--ink);font-weight:400}
.card.verdict.good{border-left-color:var(--good)}.card.verdict.bad{border-left-color:var(--bad)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px;margin:0 0 16px}
.grid .card{margin:0}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:6px 8px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child,.words td:last-child,.words th:last-child{text-align:left;overflow-wrap:anywhere}
tr:last-child td,tbody tr:last-child th{border:0}.bad{color:var(--bad);font-weight:600}.good{color:var(--good)}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}
code,pre{font:13px/1.45 ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap;margin:0}
mark{background:color-mix(in srgb,var(--mid) 30%,transparent);color:inherit;border-radius:2px}
"""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 260, 56, 16, 12, 40


def page(report: ReplayReport) -> str:
    """The HTML document of a replay."""
    verdict, mood = verdict_of(report)
    cards = [
        f'<div class="card verdict {mood}" role="status">{_e(verdict)}</div>',
        _card("Answers by route", _routes(report)),
        '<div class="grid">',
        _card("Seconds of each answer: recorded and new", _scatter(report.points)) if report.points else "",
        _card("Changed part of the texts that differ", _histogram(report.distances)) if report.distances else "",
        _card("Labels", _labels(report.labels)) if report.labels is not None else "",
        _card("Duration and size of answers", _pairs(report)) if report.latency is not None else "",
        "</div>",
        _card("Numbers that differ", _tensors(report)) if report.tensors else "",
        _card("Texts that differ", _texts(report)) if report.texts.number else "",
        _card("Errors", _counted(report.errors)) if report.errors else "",
        _card("Records that were not asked again", _skipped(report.skipped)) if report.skipped else "",
        _examples(report.examples, report.num_examples_left_out),
        _card("Versions", _versions(report)),
    ]
    facts = f"{report.asked:,} requests of {report.source} · asked {report.against} · {report.made_at}"
    return document("Replay", facts, "".join(cards))


def document(title: str, facts: str, cards: str) -> str:
    """A whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f"<h1>{_e(title)}</h1><p>{_e(facts)}</p>{cards}</main></body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{_e(title)}</h2>{content}</section>'


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, ends_in_words: bool = False) -> str:
    """A table whose first column is words, and the others numbers; ``ends_in_words``: but for the last."""
    head = "".join(f'<th scope="col">{_e(one)}</th>' for one in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in row)}</tr>" for row in rows)
    words = ' class="words"' if ends_in_words else ""
    return f"<table{words}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: float) -> str:
    """A number in at most four digits."""
    if math.isinf(value):
        return "infinite"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# -- tables ---------------------------------------------------------------------------------------


def _routes(report: ReplayReport) -> str:
    """A bar of the four kinds for each route, and its numbers."""
    colours = ("var(--good)", "var(--mid)", "var(--soft)", "var(--bad)")
    bars = []
    for index, one in enumerate(report.routes):
        counts = (one.equal, one.different, one.random, one.failed)
        total, x = sum(counts), 0.0
        for count, colour in zip(counts, colours, strict=True):
            width = 1000 * count / total
            bars.append(f'<rect x="{x:.1f}" y="{index * 16}" width="{width:.1f}" height="12" fill="{colour}"/>')
            x += width
    picture = (
        f'<svg viewBox="0 0 1000 {16 * len(report.routes)}" role="img" aria-label="Equal, different, random and failed '
        f'answers of each route, as parts of a bar" preserveAspectRatio="none" '
        f'style="height:{16 * len(report.routes)}px">{"".join(bars)}</svg>'
    )
    legend = " ".join(
        f'<span style="color:{colour}">■</span> {word} &nbsp;'
        for word, colour in zip(("equal", "different", "drawn at random", "failed"), colours, strict=True)
    )
    rows = [(one.route, one.equal, one.different, one.random, one.failed) for one in report.routes]
    return f"{picture}<p>{legend}</p>{table(('route', 'equal', 'different', 'random', 'failed'), rows)}"


def _labels(labels: Labels) -> str:
    said = (
        f"<p>{labels.flips:,} of {labels.number:,} labels changed "
        f"(at most {100 * labels.upper:.2f} % of all, at 95 %).</p>"
    )
    if not labels.table:
        return said
    names = sorted({one.before for one in labels.table} | {one.after for one in labels.table})
    if len(names) > 24:
        rows = [(one.before, one.after, one.count, one.back, f"{one.p:.2g}") for one in labels.table[:20]]
        return said + table(("before", "after", "changes", "changes back", "p"), rows)
    counts = {(one.before, one.after): one.count for one in labels.table}
    most = max(counts.values())
    cells = []
    for before in names:
        row = [f'<th scope="row">{_e(before)}</th>']
        for after in names:
            count = counts.get((before, after), 0)
            part = round(70 * count / most)
            shade = f' style="background:color-mix(in srgb,var(--bad) {part}%,transparent)"' if count else ""
            row.append(f"<td{shade}>{count or ''}</td>")
        cells.append(f"<tr>{''.join(row)}</tr>")
    head = "".join(f'<th scope="col">{_e(name)}</th>' for name in names)
    head = f'<thead><tr><th scope="col">before \\ after</th>{head}</tr></thead>'
    return f"{said}<table>{head}<tbody>{''.join(cells)}</tbody></table>"


def _pairs(report: ReplayReport) -> str:
    rows = []
    found: tuple[tuple[str, Paired | None, float], ...] = (
        ("duration, ms", report.latency, 1000),
        ("tokens of an answer", report.answer_tokens, 1),
    )
    for name, paired, scale in found:
        if paired is not None:
            for word, one in (("recorded", paired.before), ("new", paired.after)):
                rows.append((f"{name}, {word}", *_quantiles(one, scale)))
            p = "-" if paired.p is None else f"{paired.p:.2g}"
            rows.append(("paired difference, and Wilcoxon's p", number(paired.difference_p50 * scale), f"p {p}", ""))
    tokens = ""
    if sum(report.tokens_before):
        tokens = (
            f"<p>Tokens of prompts and answers: {report.tokens_before[0]:,} + {report.tokens_before[1]:,} recorded, "
            f"{report.tokens_after[0]:,} + {report.tokens_after[1]:,} new.</p>"
        )
    note = "<p>Recorded durations are of that moment's load, in the priority class that the client had.</p>"
    return table(("", "p50", "p90", "p99"), rows) + tokens + note


def _quantiles(one: Quantiles | None, scale: float = 1.0) -> tuple[str, str, str]:
    if one is None:
        return "-", "-", "-"
    return number(one.p50 * scale), number(one.p90 * scale), number(one.p99 * scale)


def _tensors(report: ReplayReport) -> str:
    rows = [
        (
            one.name,
            f"{one.number_different:,} of {one.number_values:,}",
            *(("-", "-") if one.ulps is None and not one.max_abs else (number(one.max_abs), number(one.max_rel))),
            *_quantiles(one.ulps),
            "; ".join(f"{problem} ({count})" for problem, count in one.problems.items()),
        )
        for one in report.tensors
    ]
    heads = ("tensor", "values", "max abs", "max rel", "ULP p50", "p90", "p99", "")
    return table(heads, rows) + "<p>ULP: the largest distance of a tensor, in units of the last place.</p>"


def _texts(report: ReplayReport) -> str:
    rows = [
        ("characters to change", *_quantiles(report.texts.distance)),
        ("part of the text", *_quantiles(report.texts.changed_part)),
        ("first character that differs", *_quantiles(report.texts.first)),
    ]
    return table((f"{report.texts.number:,} texts", "p50", "p90", "p99"), rows)


def _counted(counts: dict[str, int]) -> str:
    return table(("", "number"), counts.items())


def _skipped(counts: dict[str, int]) -> str:
    return table(("why", "number"), [(REASONS.get(reason, reason), count) for reason, count in counts.items()])


def _versions(report: ReplayReport) -> str:
    rows = []
    for model, known in report.fingerprints.items():
        recorded = ", ".join(one or "unknown" for one in known[1:])
        rows.append((model, known[0] or "unknown", recorded))
    same = f"<p>{report.same_version:,} of {report.asked:,} pairs have one known fingerprint.</p>"
    return table(("asked as", "fingerprint of the server", "recorded fingerprints"), rows) + same


def _examples(examples: Sequence[Example], left_out: int) -> str:
    if not examples:
        return ""
    parts = []
    for one in examples:
        lines = []
        for text in one.texts:
            far = "" if text.distance is None else f", {text.distance:,} characters to change"
            lines.append(
                f"<p>{_e(text.place)}: differs from character {text.first:,} on{far}</p>"
                f"<pre>{_marked(text.before, text.after)}</pre><pre>{_marked(text.after, text.before)}</pre>"
            )
        for tensor in one.tensors:
            said = tensor.problem or (
                f"{tensor.number_different:,} of {tensor.number:,} values, at most {number(tensor.max_abs)} apart"
            )
            lines.append(f"<p>{_e(tensor.name)}: {_e(said)}</p>")
        lines += [f"<p>label {_e(flip.before)} became {_e(flip.after)}</p>" for flip in one.flips]
        if one.finish is not None:
            lines.append(f"<p>ended with {_e(one.finish[1])}, before with {_e(one.finish[0])}</p>")
        lines += [f'<p class="bad">{_e(said)}</p>' for said in (one.error, one.other) if said]
        if one.was_error:
            lines.append(f"<p>it failed before: {_e(one.was_error)}</p>")
        broken = ' <span class="bad">should be equal</span>' if one.is_broken else ""
        parts.append(f"<h2><code>{_e(one.request_id)}</code> {_e(one.route)}{broken}</h2>{''.join(lines)}")
    more = f"<p>{left_out:,} more are not shown.</p>" if left_out else ""
    return f'<section class="card"><h2>Examples</h2>{"".join(parts)}{more}</section>'


def _marked(text: str, other: str) -> str:
    """A text with the part marked that begins where it differs from the other."""
    first = next(
        (index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]),
        min(len(text), len(other)),
    )
    return f"{_e(text[:first])}<mark>{_e(text[first:]) or '(the end)'}</mark>"


# -- pictures -------------------------------------------------------------------------------------


def _scatter(points: Sequence[tuple[float, float]]) -> str:
    """Both durations on logarithmic axes; a point on the diagonal took as long as before."""
    values = [max(1e-5, value) for point in points for value in point]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(max(1e-5, value)) - low) / (high - low)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (math.log10(max(1e-5, value)) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at = 10.0**power
        parts.append(_line(_LEFT, y(at), _WIDTH - _RIGHT, y(at)))
        parts.append(f'<text x="{_LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g} s</text>')
        parts.append(f'<text x="{x(at):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{at:g} s</text>')
    parts.append(
        f'<line x1="{x(10.0**low):.1f}" y1="{y(10.0**low):.1f}" x2="{x(10.0**high):.1f}" y2="{y(10.0**high):.1f}" '
        'stroke="var(--soft)" stroke-dasharray="4 4"/>'
    )
    parts += [
        f'<circle cx="{x(before):.1f}" cy="{y(after):.1f}" r="3" fill="var(--a)" fill-opacity=".5"/>'
        for before, after in points
    ]
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">recorded</text>')
    return _picture("Duration of each answer, recorded and new, on logarithmic axes", parts)


def _histogram(values: Sequence[float]) -> str:
    """The changed parts of texts in ten equal classes from 0 to 1."""
    counts = [0] * 10
    for value in values:
        counts[min(9, int(value * 10))] += 1
    most = max(1, *counts)
    width = (_WIDTH - _LEFT - _RIGHT) / 10
    scale = (_HEIGHT - _TOP - _BOTTOM) / most
    parts = [_line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)]
    for index, count in enumerate(counts):
        x, height = _LEFT + index * width, count * scale
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{_HEIGHT - _BOTTOM - height:.1f}" width="{width - 4:.1f}" '
            f'height="{height:.1f}" fill="var(--mid)"/>'
        )
        if count:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{_HEIGHT - _BOTTOM - height - 4:.1f}" '
                f'text-anchor="middle">{count}</text>'
            )
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{index * 10} %</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">of the longer text</text>')
    return _picture("How much of each text changed", parts)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="var(--line)"/>'


def _picture(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_e(label)}">{"".join(parts)}</svg>'
