"""A golden set is asked of a model, and of a second one that it must not be worse than.

Start with ``evaluate``. The fraction that passes has Wilson's interval. "Not worse" is McNemar's exact one-sided test of
the cases that one version passes and the other does not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from inferd import clock
from inferd.compare.golden import question
from inferd.replay.checks import failures
from inferd.replay.golden import Case
from inferd.replay.report import Quantiles, Share, quantiles_of, share
from inferd.replay.server import AskedServer, ServerGone
from inferd.replay.statistics import worse

ALPHA: Final = 0.05
MAX_NAMES: Final = 200
_HEADERS: Final = {
    "content-type": "application/json",
    "X-Inferd-Priority": "batch",
    "Cache-Control": "no-cache, no-store",
}


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A case that did not pass."""

    name: str
    line: int
    reasons: list[str]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a model has reached."""

    model: str  # empty: the one that each case names
    fingerprint: str
    passed: Share
    seconds: Quantiles | None
    failed: list[Failed]
    by_check: dict[str, int]  # failures by the check


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two models with one golden set."""

    only_new: int  # cases that only the model passes
    only_other: int  # that only the other one passes
    both: int
    neither: int
    p: float  # of as many more losses than gains, if both were equally good
    is_worse: bool  # p is less than 5 %
    lost: list[str]  # names of cases that only the other one passes


class PerplexityScore(msgspec.Struct, frozen=True, kw_only=True):
    """The perplexity of a text."""

    file: str
    value: float
    standard_error: float  # of the mean loss, in nats
    num_scored: int
    num_windows: int
    context: int


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation. Fields are written as JSON under these names; a later version may add fields."""

    kind: str = "evaluation"
    schema: int = 1
    made_at: str
    golden: str
    against: str
    version: str  # of inferd
    min_pass: float
    stopped: str  # why not all cases were asked; empty: they were
    score: Score
    other: Score | None = None  # the model that it must not be worse than
    comparison: Comparison | None = None
    perplexity: PerplexityScore | None = None
    other_perplexity: PerplexityScore | None = None
    passes: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One case at one model."""

    case: Case
    reasons: list[str]
    seconds: float


class Results(msgspec.Struct, kw_only=True):
    """The cases that were asked of one model, and the server's fingerprint of it."""

    found: list[Result] = []
    stopped: str = ""
    fingerprint: str = ""


async def evaluate(
    server: AskedServer,
    cases: Sequence[Case],
    model: str | None,
    *,
    concurrency: int,
    rate: float | None,
    on_result: Callable[[], None],
) -> Results:
    """Ask every case of a model. Partial where the server is gone for good.

    Raises Unavailable before the first case where the server or the model is not there.
    """
    results = Results(found=[])
    if model is not None:
        results.fingerprint = (await server.model(model)).fingerprint
    source = iter(enumerate(cases))
    began = clock.now()

    async def client() -> None:
        for index, case in source:
            if rate is not None and (wait_s := began + index / rate - clock.now()) > 0:
                await asyncio.sleep(wait_s)
            if results.stopped:
                return
            try:
                results.found.append(await _ask(server, case, model))
            except ServerGone as gone:
                results.stopped = str(gone)
                return
            on_result()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    except* asyncio.CancelledError:
        results.stopped = results.stopped or "It was interrupted."
    results.found.sort(key=lambda one: one.case.line)
    return results


async def _ask(server: AskedServer, case: Case, model: str | None) -> Result:
    path, body = question(case.item, model)
    try:
        reply = await server.ask("POST", quote(path, safe="/@"), msgspec.json.encode(body), _HEADERS)
    except TimeoutError:
        return Result(case=case, reasons=["no complete answer within --timeout"], seconds=0.0)
    return Result(case=case, reasons=failures(case, reply.status, reply.body), seconds=reply.total_s)


def score_of(results: Results, model: str | None) -> Score:
    """The score of one model."""
    failed = [one for one in results.found if one.reasons]
    checks = Counter(reason.partition(":")[0] for one in failed for reason in one.reasons)
    return Score(
        model=model or "",
        fingerprint=results.fingerprint,
        passed=share(len(results.found) - len(failed), len(results.found)),
        seconds=quantiles_of([one.seconds for one in results.found if one.seconds]),
        failed=[Failed(name=one.case.item.name, line=one.case.line, reasons=one.reasons) for one in failed],
        by_check=dict(checks.most_common()),
    )


def figures_of(report: EvaluationReport) -> EvaluationReport:
    """The report with the names of at most ``MAX_NAMES`` cases that failed, and without answers."""

    def short(score: Score) -> Score:
        failed = [msgspec.structs.replace(one, reasons=[]) for one in score.failed[:MAX_NAMES]]
        return msgspec.structs.replace(score, failed=failed)

    found = report.comparison
    return msgspec.structs.replace(
        report,
        score=short(report.score),
        other=None if report.other is None else short(report.other),
        comparison=None if found is None else msgspec.structs.replace(found, lost=found.lost[:MAX_NAMES]),
    )


def compare(new: Results, other: Results) -> Comparison:
    """The cases that both models were asked, paired."""
    passed = {one.case.item.name: not one.reasons for one in other.found}
    counts: Counter[tuple[bool, bool]] = Counter()
    lost = []
    for one in new.found:
        if one.case.item.name in passed:
            pair = (not one.reasons, passed[one.case.item.name])
            counts[pair] += 1
            if pair == (False, True):
                lost.append(one.case.item.name)
    p = worse(counts[False, True], counts[True, False])
    return Comparison(
        only_new=counts[True, False],
        only_other=counts[False, True],
        both=counts[True, True],
        neither=counts[False, False],
        p=p,
        is_worse=p < ALPHA,
        lost=lost,
    )
