"""The result of an evaluation as one HTML file. Nothing is fetched, and no script runs."""

from __future__ import annotations

import html

from inferd.replay.evaluate import EvaluationReport, Score
from inferd.replay.page import document, number, table

_MAX_FAILED = 200


def evaluation_page(report: EvaluationReport) -> str:
    """The HTML document."""
    mood = "good" if report.passes else "bad"
    cards = [f'<div class="card verdict {mood}" role="status">{_e(sentence(report))}</div>', _card("", _bars(report))]
    if report.comparison is not None:
        found = report.comparison
        rows = [("only this model", found.only_new), ("only the other", found.only_other), ("both", found.both)]
        said = f"<p>McNemar's exact one-sided p value: {found.p:.3g}.</p>"
        cards.append(_card("Cases that pass", table(("", "cases"), [*rows, ("neither", found.neither)]) + said))
    scores = [one for one in (report.perplexity, report.other_perplexity) if one is not None]
    if scores:
        names = (report.score.model or "this model", report.other.model if report.other is not None else "")
        shown = [
            (name, f"{one.value:.5g}", f"{one.standard_error:.3f}", f"{one.num_scored:,}")
            for name, one in zip(names, scores, strict=False)
        ]
        cards.append(_card("Perplexity", table(("model", "perplexity", "error of the mean, nats", "tokens"), shown)))
    if report.score.failed:
        failed = [(one.name, one.line, "; ".join(one.reasons)) for one in report.score.failed[:_MAX_FAILED]]
        more = len(report.score.failed) - len(failed)
        rest = f"<p>{more:,} more are not shown.</p>" if more else ""
        cards.append(_card("Cases that failed", table(("name", "line", "why"), failed, ends_in_words=True) + rest))
    return document("Evaluation", f"{report.golden} · asked {report.against} · {report.made_at}", "".join(cards))


def sentence(report: EvaluationReport) -> str:
    """The result in one sentence."""
    passed = report.score.passed
    if report.stopped:
        return f"Not finished: {report.stopped} {passed.number:,} cases were asked."
    share = passed.count / max(1, passed.number)
    word = "at least" if share >= report.min_pass else "less than"
    said = (
        f"{passed.count:,} of {passed.number:,} cases pass ({100 * share:.1f} %, 95 % interval {100 * passed.low:.1f} "
        f"to {100 * passed.high:.1f} %), {word} the {100 * report.min_pass:g} % that are asked for."
    )
    found = report.comparison
    if found is not None and report.other is not None:
        verdict = "worse than" if found.is_worse else "not shown to be worse than"
        said += (
            f" It is {verdict} {report.other.model}: {found.only_other:,} cases are lost and {found.only_new:,} gained "
            f"(p {found.p:.2g})."
        )
    return said


def _bars(report: EvaluationReport) -> str:
    """A bar with its interval for each model, and the bound as a line."""
    scores = [one for one in (report.score, report.other) if one is not None]
    height = 44 * len(scores) + 20
    bound = 200 + 700 * report.min_pass
    parts = [
        f'<line x1="{bound:.1f}" x2="{bound:.1f}" y1="0" y2="{height - 20}" stroke="var(--bad)" stroke-dasharray="4 4"/>',
        f'<text x="{bound:.1f}" y="{height - 4}" text-anchor="middle">{100 * report.min_pass:g} %</text>',
    ]
    for index, one in enumerate(scores):
        parts.append(_bar(one, 44 * index + 8))
    return (
        f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="The part of the cases that pass, with its 95 % '
        f'interval, and the bound">{"".join(parts)}</svg>'
    )


def _bar(score: Score, y: int) -> str:
    passed = score.passed
    part = passed.count / max(1, passed.number)
    low, high = 200 + 700 * passed.low, 200 + 700 * passed.high
    middle = y + 12
    return (
        f'<text x="190" y="{middle + 4}" text-anchor="end">{_e(score.model[-28:] or "each its own")}</text>'
        f'<rect x="200" y="{y}" width="{700 * part:.1f}" height="24" fill="var(--good)" fill-opacity=".6"/>'
        f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {y + 6}V{y + 18}M{high:.1f} {y + 6}V{y + 18}" '
        'stroke="var(--ink)" stroke-width="1.5"/>'
        f'<text x="910" y="{middle + 4}">{number(100 * part)} %</text>'
    )


def _card(title: str, content: str) -> str:
    head = f"<h2>{_e(title)}</h2>" if title else ""
    return f'<section class="card">{head}{content}</section>'


def _e(text: object) -> str:
    return html.escape(str(text))
