"""The result of a replay in numbers: counts, bounds, quantiles and tests over all pairs. Pure.

Fields are written as JSON under these names; a later version may add fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from inferd.compare.answers import Tolerance
from inferd.replay.difference import Difference, Flip, TensorDifference, TextDifference
from inferd.replay.replay import Outcome, Pair
from inferd.replay.statistics import mcnemar, quantile, upper_bound, wilcoxon, wilson

MAX_EXAMPLES: Final = 50
MAX_FLIPS: Final = 100
MAX_POINTS: Final = 2000
"""Of a picture; of more pairs every k-th is drawn."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a number, with Wilson's 95 % interval."""

    count: int
    number: int
    low: float
    high: float


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a list of numbers."""

    number: int
    p50: float
    p90: float
    p99: float
    most: float


class Texts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that differ."""

    number: int
    distance: Quantiles | None  # in characters; None: no text differs, or none was short enough to count
    changed_part: Quantiles | None  # the distance over the length of the longer text
    first: Quantiles | None  # the first character that differs


class Tensors(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one name that differ."""

    name: str
    number: int
    number_values: int
    number_different: int  # values
    number_beyond: int  # of these: outside of the tolerance
    max_abs: float
    max_rel: float
    ulps: Quantiles | None  # of the largest distance of each tensor, in units of the last place
    problems: dict[str, int]  # other shapes or datatypes


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Labels of both answers."""

    number: int
    flips: int
    upper: float  # the exact 95 % upper bound of the fraction of flips; less than 3 / n where there is none
    table: list[FlipCount]


class FlipCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often a label became another, how often the other way round, and McNemar's exact p value for "both ways are
    as frequent"."""

    before: str
    after: str
    count: int
    back: int
    p: float


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """A number of both answers: quantiles of each, of the paired difference, and Wilcoxon's p value for "the differences
    are symmetric about 0". None: no pair differs."""

    before: Quantiles
    after: Quantiles
    difference_p50: float
    p: float | None


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one route."""

    route: str
    equal: int
    different: int
    random: int
    failed: int


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A pair that differs or failed."""

    request_id: str
    route: str
    is_broken: bool
    error: str = ""
    was_error: str = ""
    texts: tuple[TextDifference, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    flips: tuple[Flip, ...] = ()
    finish: tuple[str, str] | None = None
    other: str = ""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay has found."""

    kind: str = "replay"
    schema: int = 1
    made_at: str
    source: str  # of the records
    against: str  # the server, and the model where one was named
    version: str  # of inferd
    stopped: str  # why not all records were asked; empty: they were
    skipped: dict[str, int]  # records that could not be asked again, by the reason
    asked: int
    fingerprints: dict[str, list[str]]  # by model: the server's, then those recorded
    same_version: int  # pairs whose fingerprints are known and equal
    random: int  # pairs drawn without a seed, which are compared by their lengths alone
    batched: int  # pairs of one version that differ, where an answer may depend on the batch
    broken: int  # pairs that should have been equal to the bit and are not
    equal: Share  # of the pairs that are not random
    within: Share | None = None  # of these: equal but for numbers within the tolerance; None: none was given
    tolerance: Tolerance | None = None
    failed: int  # requests that were answered before and failed now
    repaired: int  # the other way round
    texts: Texts
    tensors: list[Tensors]
    labels: Labels | None
    finish: dict[str, int]  # reasons for the end that changed: "stop -> length"
    latency: Paired | None
    answer_tokens: Paired | None
    tokens_before: tuple[int, int]  # of the pairs with usage on both sides: prompts and answers
    tokens_after: tuple[int, int]
    errors: dict[str, int]
    routes: list[Route]
    examples: list[Example]
    points: list[tuple[float, float]]  # seconds of the recorded and of the new answer
    distances: list[float]  # changed parts of texts, for the picture
    num_examples_left_out: int

    @property
    def different(self) -> int:
        """Compared answers that are not equal, to the bit or within the tolerance."""
        found = self.equal if self.within is None else self.within
        return found.number - found.count


def report_of(
    outcome: Outcome,
    *,
    made_at: str,
    source: str,
    against: str,
    version: str,
    skipped: Mapping[str, int],
    tolerance: Tolerance | None = None,
) -> ReplayReport:
    """The numbers of an outcome. ``tolerance``: by which the differences were found; None: exact."""
    pairs = outcome.pairs
    compared = [pair for pair in pairs if not pair.is_random and pair.difference is not None]
    differences = [pair.difference for pair in compared if pair.difference is not None]
    timed = [pair for pair in pairs if pair.after_s and not pair.error]
    counted = [
        (pair.usage_before, pair.usage_after)
        for pair in pairs
        if pair.usage_before is not None and pair.usage_after is not None
    ]
    shown = [pair for pair in pairs if _is_shown(pair)]
    shown.sort(key=lambda pair: not pair.is_broken)
    parts = [found for one in differences for found in map(_changed_part, one.texts) if found is not None]
    return ReplayReport(
        made_at=made_at,
        source=source,
        against=against,
        version=version,
        stopped=outcome.stopped,
        skipped=dict(skipped),
        asked=len(pairs),
        fingerprints=outcome.fingerprints,
        same_version=sum(pair.is_same_version for pair in pairs),
        random=sum(pair.is_random for pair in pairs),
        batched=sum(
            pair.is_same_version and pair.is_batched and not pair.is_random and not pair.is_equal for pair in pairs
        ),
        broken=sum(pair.is_broken for pair in pairs),
        equal=share(sum(one.is_equal for one in differences), len(differences)),
        within=None if tolerance is None else share(sum(one.is_within for one in differences), len(differences)),
        tolerance=tolerance,
        failed=sum(bool(pair.error) for pair in pairs),
        repaired=sum(bool(pair.was_error) for pair in pairs),
        texts=_texts(differences),
        tensors=_tensors(differences),
        labels=_labels(differences),
        finish=_counts(f"{one.finish[0] or 'none'} -> {one.finish[1] or 'none'}" for one in differences if one.finish),
        latency=_paired([(pair.before_s, pair.after_s) for pair in timed]),
        answer_tokens=_paired([(float(before[1]), float(after[1])) for before, after in counted]),
        tokens_before=_sum([before for before, _ in counted]),
        tokens_after=_sum([after for _, after in counted]),
        errors=_counts(pair.error for pair in pairs if pair.error),
        routes=_routes(pairs),
        examples=[_example(pair) for pair in shown[:MAX_EXAMPLES]],
        points=[(pair.before_s, pair.after_s) for pair in timed[:: len(timed) // MAX_POINTS + 1]],
        distances=parts[:: len(parts) // MAX_POINTS + 1],
        num_examples_left_out=max(0, len(shown) - MAX_EXAMPLES),
    )


def figures_of(report: ReplayReport) -> ReplayReport:
    """The report without examples and points, so without texts of clients."""
    return msgspec.structs.replace(report, examples=[], points=[], distances=[])


def share(count: int, number: int) -> Share:
    """A part with its interval."""
    low, high = wilson(count, number)
    return Share(count=count, number=number, low=low, high=high)


def quantiles_of(values: Sequence[float]) -> Quantiles | None:
    """None: there are no values."""
    if not values:
        return None
    p50, p90, p99 = (quantile(values, part) for part in (0.5, 0.9, 0.99))
    return Quantiles(number=len(values), p50=p50, p90=p90, p99=p99, most=max(values))


def _is_shown(pair: Pair) -> bool:
    if pair.error or pair.was_error:
        return True
    return pair.difference is not None and not pair.difference.is_equal and not pair.is_random


def _example(pair: Pair) -> Example:
    found = pair.difference or Difference(is_equal=False)
    return Example(
        request_id=pair.request_id,
        route=pair.route,
        is_broken=pair.is_broken,
        error=pair.error,
        was_error=pair.was_error,
        texts=found.texts[:4],
        tensors=found.tensors[:8],
        flips=found.flips[:8],
        finish=found.finish,
        other=found.other,
    )


def _changed_part(one: TextDifference) -> float | None:
    if one.distance is None:
        return None
    return min(1.0, one.distance / max(1, one.length, one.distance))


def _texts(differences: Iterable[Difference]) -> Texts:
    found = [text for one in differences for text in one.texts]
    return Texts(
        number=len(found),
        distance=quantiles_of([float(one.distance) for one in found if one.distance is not None]),
        changed_part=quantiles_of([part for one in found if (part := _changed_part(one)) is not None]),
        first=quantiles_of([float(one.first) for one in found]),
    )


def _tensors(differences: Iterable[Difference]) -> list[Tensors]:
    by_name: dict[str, list[TensorDifference]] = {}
    for one in differences:
        for tensor in one.tensors:
            by_name.setdefault(_without_places(tensor.name), []).append(tensor)
    return [
        Tensors(
            name=name,
            number=len(found),
            number_values=sum(one.number for one in found),
            number_different=sum(one.number_different for one in found),
            number_beyond=sum(one.number_beyond for one in found),
            max_abs=max(one.max_abs for one in found),
            max_rel=max(one.max_rel for one in found),
            ulps=quantiles_of([one.ulps[3] for one in found if one.ulps is not None]),
            problems=_counts(one.problem for one in found if one.problem),
        )
        for name, found in sorted(by_name.items())
    ]


def _without_places(name: str) -> str:
    """A tensor's name without its places in lists, so that the vectors of one answer are summed up."""
    return "".join([part.partition("]")[2] if "]" in part else part for part in name.split("[")]) or name


def _labels(differences: Sequence[Difference]) -> Labels | None:
    number = sum(one.num_labels for one in differences)
    if not number:
        return None
    flips = Counter((flip.before, flip.after) for one in differences for flip in one.flips)
    count = sum(flips.values())
    table = [
        FlipCount(
            before=before, after=after, count=one, back=flips[after, before], p=mcnemar(one, flips[after, before])
        )
        for (before, after), one in flips.most_common(MAX_FLIPS)
    ]
    return Labels(number=number, flips=count, upper=upper_bound(count, number), table=table)


def _paired(values: Sequence[tuple[float, float]]) -> Paired | None:
    before, after = quantiles_of([one for one, _ in values]), quantiles_of([other for _, other in values])
    if before is None or after is None:
        return None
    differences = [other - one for one, other in values]
    return Paired(before=before, after=after, difference_p50=quantile(differences, 0.5), p=wilcoxon(differences))


def _sum(values: Iterable[tuple[int, int]]) -> tuple[int, int]:
    asked = told = 0
    for one, other in values:
        asked, told = asked + one, told + other
    return asked, told


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(Counter(words).most_common(20))


def _routes(pairs: Iterable[Pair]) -> list[Route]:
    found: dict[str, Counter[str]] = {}
    for pair in pairs:
        found.setdefault(pair.route, Counter())[_kind(pair)] += 1
    return [
        Route(
            route=route,
            equal=counts["equal"],
            different=counts["different"],
            random=counts["random"],
            failed=counts["failed"],
        )
        for route, counts in sorted(found.items())
    ]


def _kind(pair: Pair) -> str:
    if pair.error:
        return "failed"
    if pair.is_random:
        return "random"
    return "equal" if pair.difference is not None and pair.difference.is_equal else "different"
