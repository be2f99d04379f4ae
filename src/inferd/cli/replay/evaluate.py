"""``inferd evaluate``: golden sets and perplexity at a running server."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from inferd import __version__, clock
from inferd.cli.ranges import FloatRange
from inferd.cli.replay.asking import (
    asked_server,
    asking_options,
    attach_report,
    check_attachable,
    check_writable,
    write_report,
)
from inferd.cli.terminal import console, loading
from inferd.errors import Unavailable
from inferd.worker.log_lines import neutral

if TYPE_CHECKING:
    from inferd.replay.evaluate import EvaluationReport, PerplexityScore, Results

_MAX_PRINTED = 20


@click.command("evaluate")
@click.argument("golden", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--against",
    required=True,
    metavar="URL|MODEL[@VERSION]",
    help="A server, or a model of the server on this machine.",
)
@click.option("--model", metavar="MODEL[@VERSION]", help="Ask this model.  [default: the one that a case names]")
@click.option(
    "--min-pass",
    type=FloatRange(0, 1),
    default=1.0,
    show_default=True,
    metavar="PART",
    help="The part of the cases that must pass.",
)
@click.option(
    "--not-worse-than", "other", metavar="MODEL[@VERSION]", help="Ask this model too; exit code 1 if it is better."
)
@click.option(
    "--perplexity", "text", type=click.Path(path_type=Path, dir_okay=False), help="A text to measure perplexity on."
)
@click.option(
    "--max-perplexity",
    type=FloatRange(min=1),
    default=None,
    metavar="NUMBER",
    help="Exit code 1 where it is larger.",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of a window for perplexity; never more than the model takes.",
)
@asking_options
def command(
    golden: Path,
    against: str,
    model: str | None,
    min_pass: float,
    other: str | None,
    text: Path | None,
    max_perplexity: float | None,
    context: int,
    port: int | None,
    api_key: str | None,
    concurrency: int,
    rate: float | None,
    timeout: float,
    patience: float,
    attach: str | None,
    file: Path | None,
    as_json: Path | None,
    as_html: Path | None,
) -> int:
    """Ask a model what the golden set GOLDEN has, and count the answers that are as expected.

    GOLDEN is a file of JSON lines with a request and what its answer must be (docs/replay.md).

    \b
    Examples:
      inferd evaluate golden.jsonl --against digits@2 --min-pass 0.98
      inferd evaluate golden.jsonl --against digits@2 --not-worse-than digits@1
      inferd evaluate golden.jsonl --against chat --port 9000 --html report.html

    Exit code 1: fewer cases pass than --min-pass, the model is worse than the other one at 5 % (McNemar's exact test),
    perplexity is larger than --max-perplexity, or the evaluation did not finish.
    """
    from inferd.replay.evaluate import EvaluationReport, compare, evaluate, figures_of, score_of
    from inferd.replay.evaluation_page import evaluation_page, sentence
    from inferd.replay.golden import read_golden
    from inferd.replay.perplexity import perplexity
    from inferd.replay.server import ServerGone

    if max_perplexity is not None and text is None:
        raise click.UsageError("--max-perplexity needs a text; give it with --perplexity FILE.")
    check_writable(as_json, as_html)
    check_attachable(file, attach)
    cases = read_golden(golden)
    server, named = asked_server(against, port, api_key, timeout, patience)
    asked = model or named or None
    names = [asked] if other is None else [asked, other]
    measured: list[PerplexityScore] = []

    with loading("Evaluating", counts=True) as show:
        done = itertools.count(1)

        def on_result() -> None:
            show("cases", next(done), len(cases) * len(names))

        async def run() -> list[Results]:
            try:
                found = []
                for name in names:
                    found.append(
                        await evaluate(server, cases, name, concurrency=concurrency, rate=rate, on_result=on_result)
                    )
                    if text is not None and not found[-1].stopped:
                        try:
                            measured.append(await perplexity(server, name, text, context))
                        except ServerGone as gone:
                            raise Unavailable(str(gone)) from None
                return found
            finally:
                server.close()

        results = asyncio.run(run())
    comparison = None if other is None else compare(results[0], results[1])
    score = score_of(results[0], asked)
    stopped = next((one.stopped for one in results if one.stopped), "")
    passes = (
        not stopped
        and score.passed.count >= min_pass * score.passed.number
        and (comparison is None or not comparison.is_worse)
        and (max_perplexity is None or measured[0].value <= max_perplexity)
    )
    report = EvaluationReport(
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(clock.wall())),
        golden=str(golden),
        against=server.name if asked is None else f"{asked} of {server.name}",
        version=__version__,
        min_pass=min_pass,
        stopped=stopped,
        score=score,
        other=None if other is None else score_of(results[1], other),
        comparison=comparison,
        perplexity=measured[0] if measured else None,
        other_perplexity=measured[1] if len(measured) > 1 else None,
        passes=passes,
    )
    _print(report)
    write_report(report, evaluation_page(report), as_json, as_html)
    if attach is not None:
        attach_report(file, attach, "golden", figures_of(report), passed=passes, summary=sentence(report))
    return 0 if passes else 1


def _print(report: EvaluationReport) -> None:
    from inferd.replay.evaluation_page import sentence

    out = console()
    for one in report.score.failed[:_MAX_PRINTED]:
        out.print(neutral(f"{one.name} (line {one.line}): {'; '.join(one.reasons)}"), markup=False)
    more = len(report.score.failed) - _MAX_PRINTED
    if more > 0:
        out.print(f"and {more:,} more cases failed")
    for name, found in (
        (report.score.model, report.perplexity),
        ("" if report.other is None else report.other.model, report.other_perplexity),
    ):
        if found is not None:
            out.print(
                neutral(
                    f"perplexity {found.value:.5g} of {name or 'the model'}: {found.num_scored:,} tokens in "
                    f"{found.num_windows:,} windows of {found.context}"
                ),
                markup=False,
            )
    out.print(neutral(sentence(report)), markup=False)
