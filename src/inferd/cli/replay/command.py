"""``inferd replay``: asks a server what another version of a model was asked, and compares the answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
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
from inferd.errors import InvalidRequest
from inferd.worker.log_lines import neutral

if TYPE_CHECKING:
    from inferd.lifecycle.registry import Attachable
    from inferd.replay.records import Recorded
    from inferd.replay.report import ReplayReport


@click.command("replay")
@click.option(
    "--from",
    "records",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Records, from 'inferd payloads export'; -: stdin.",
)
@click.option(
    "--against",
    required=True,
    metavar="URL|MODEL[@VERSION]",
    help="A server, or a model of the server on this machine.",
)
@click.option("--model", metavar="MODEL[@VERSION]", help="Ask this model.  [default: the one that was asked]")
@click.option("--only", metavar="MODEL", help="Only records of this model, by its name in the configuration.")
@click.option("--limit", type=click.IntRange(min=1), default=None, help="Ask so many records.  [default: all]")
@click.option(
    "--max-different",
    type=FloatRange(0, 1),
    default=None,
    metavar="PART",
    help="Exit code 1 where a larger part of the answers differs.  [default: any part may]",
)
@click.option(
    "--relative",
    type=FloatRange(0, 1),
    default=None,
    metavar="PART",
    help="Numbers within this part of the recorded ones are equal.  [default: equal to the bit]",
)
@click.option(
    "--absolute",
    type=FloatRange(min=0),
    default=None,
    metavar="NUMBER",
    help="Numbers may differ by so much in addition.  [default: 0]",
)
@click.option(
    "--equivalence",
    is_flag=True,
    help="Exit code 1 unless all answers are equal within the tolerance; --attach adds evidence of this kind.",
)
@asking_options
def command(
    records: Path,
    against: str,
    model: str | None,
    only: str | None,
    limit: int | None,
    max_different: float | None,
    relative: float | None,
    absolute: float | None,
    equivalence: bool,
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
    """Ask a server what was recorded, and compare its answers with the recorded ones.

    Records have whole bodies where payloads.keep in the config file has 'replay' (docs/replay.md). Where the model's
    fingerprint is the recorded one, every answer that is not drawn at random must be equal to the bit.

    \b
    Examples:
      inferd payloads export --tenant team-a > asked.jsonl
      inferd replay --from asked.jsonl --against chat@2 --html report.html
      inferd replay --from asked.jsonl --against https://staging:8000 --rate 5
      inferd replay --from asked.jsonl --against chat@2 --attach chat@2
      inferd replay --from asked.jsonl --against chat@2 --port 9000
      inferd replay --from asked.jsonl --against churn@2 --equivalence

    Exit code 1: an answer that should be equal is not, a request failed that was answered before, the replay did not
    finish, or more answers differ than --max-different, which is 0 with --equivalence.
    """
    from inferd.compare.answers import EXACT, Tolerance
    from inferd.replay.page import page
    from inferd.replay.records import read
    from inferd.replay.replay import Outcome, Pair, Target, replay
    from inferd.replay.report import figures_of, report_of
    from inferd.replay.verdict import verdict_of

    check_writable(as_json, as_html)
    check_attachable(file, attach)
    source = None if str(records) == "-" else records
    skipped: dict[str, int] = {}
    server, named = asked_server(against, port, api_key, timeout, patience)
    tolerance = None
    if relative is not None or absolute is not None:
        tolerance = Tolerance(relative=relative or 0.0, absolute=absolute or 0.0)
    target = Target(model=model or named or None, concurrency=concurrency, rate=rate, tolerance=tolerance or EXACT)

    def chosen() -> Iterator[Recorded]:
        for record in read(source, skipped):
            if only is not None and record.model != only:
                skipped["other_model"] = skipped.get("other_model", 0) + 1
            else:
                yield record

    total = _total(source, limit)
    with loading("Asking again", counts=True) as show:
        done = itertools.count(1)

        def on_pair(pair: Pair) -> None:
            show("requests", next(done), total)

        async def run() -> Outcome:
            try:
                return await replay(server, itertools.islice(chosen(), limit), target, on_pair)
            finally:
                server.close()

        outcome = asyncio.run(run())
    report = report_of(
        outcome,
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(clock.wall())),
        source="stdin" if source is None else str(source),
        against=server.name if target.model is None else f"{target.model} of {server.name}",
        version=__version__,
        skipped=skipped,
        tolerance=tolerance,
    )
    _print(report)
    write_report(report, page(report), as_json, as_html)
    if max_different is None and equivalence:
        max_different = 0.0
    too_many = max_different is not None and report.different > max_different * max(1, report.equal.number)
    if too_many:
        click.echo(f"More than {max_different:.2%} of the answers differ.", err=True)
    sentence, mood = verdict_of(report)
    passed = not too_many and mood != "bad"
    if equivalence and not report.equal.number:
        click.echo("No answer could be compared, so nothing says that they are equivalent.", err=True)
        passed = False
    if attach is not None:
        kind: Attachable = "equivalence" if equivalence else "replay"
        attach_report(file, attach, kind, figures_of(report), passed=passed, summary=sentence)
    return 0 if passed else 1


def _total(file: Path | None, limit: int | None) -> int:
    """The number of lines of a file; 0: unknown."""
    if file is None:
        return limit or 0
    try:
        with file.open("rb") as lines:
            number = sum(1 for line in lines if line.strip())
    except OSError as error:
        raise InvalidRequest(f"The records {file} cannot be read ({error.strerror}).", param="from") from None
    return number if limit is None else min(number, limit)


def _print(report: ReplayReport) -> None:
    from rich.table import Table

    from inferd.replay.page import number
    from inferd.replay.records import REASONS
    from inferd.replay.verdict import verdict_of

    out = console()
    if report.routes:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ("route", "equal", "different", "random", "failed"):
            table.add_column(head, justify="left" if head == "route" else "right")
        for one in report.routes:
            counts = (one.equal, one.different, one.random, one.failed)
            table.add_row(neutral(one.route), *[f"{count:,}" for count in counts])
        out.print(table)
    lines = []
    if report.texts.number and report.texts.distance is not None:
        found = report.texts.distance
        lines.append(
            f"texts: {report.texts.number:,} differ, by {number(found.p50)} characters in the middle, "
            f"{number(found.most)} at most"
        )
    for tensor in report.tensors:
        ulps = "" if tensor.ulps is None else f", {number(tensor.ulps.most)} ULP"
        sizes = f", at most {number(tensor.max_abs)} absolute, {number(tensor.max_rel)} relative{ulps}"
        problems = "; ".join(tensor.problems)
        lines.append(
            f"{tensor.name}: {tensor.number_different:,} of {tensor.number_values:,} values differ"
            f"{f', {tensor.number_beyond:,} beyond the tolerance' if report.tolerance else ''}"
            f"{sizes if tensor.max_abs else ''}{problems and '; '}{problems}"
        )
    if report.labels is not None:
        lines.append(
            f"labels: {report.labels.flips:,} of {report.labels.number:,} changed, at most "
            f"{100 * report.labels.upper:.2f} % of all (95 %)"
        )
        lines += [f"  {one.before} became {one.after}: {one.count:,}" for one in report.labels.table[:8]]
    if report.latency is not None:
        before, after = report.latency.before, report.latency.after
        lines.append(
            f"duration: {number(before.p50 * 1000)} ms recorded, {number(after.p50 * 1000)} ms now in the middle; "
            f"{number(before.p99 * 1000)} and {number(after.p99 * 1000)} ms at 99 %"
        )
    if sum(report.tokens_before):
        lines.append(
            f"tokens of answers: {report.tokens_before[1]:,} recorded, {report.tokens_after[1]:,} now"
            + (f" (p {report.answer_tokens.p:.2g})" if report.answer_tokens and report.answer_tokens.p else "")
        )
    lines += [f"ended otherwise: {words}, {count} times" for words, count in report.finish.items()]
    lines += [f"failed {count} times: {sentence}" for sentence, count in report.errors.items()]
    lines += [f"not asked, {REASONS.get(reason, reason)}: {count:,}" for reason, count in report.skipped.items()]
    lines.append(verdict_of(report)[0])
    for line in lines:
        out.print(neutral(line), markup=False)
