"""The result of a replay in one sentence."""

from __future__ import annotations

from typing import Literal

from inferd.replay.report import ReplayReport

Mood = Literal["good", "mixed", "bad"]


def verdict_of(report: ReplayReport) -> tuple[str, Mood]:
    """The sentence, and whether it is good news."""
    if report.stopped:
        return f"Not finished: {report.stopped} {report.asked:,} requests were asked.", "bad"
    if not report.asked:
        return "Nothing was asked: no record can be asked again.", "bad"
    compared = report.equal
    parts = []
    if report.broken:
        parts.append(
            f"{report.broken:,} of {report.same_version:,} answers differ although the fingerprints are equal. "
            "Something outside of the fingerprint changes answers."
        )
    elif report.batched:
        parts.append(
            f"The version is the same. {report.batched:,} answers differ, which may depend on the batch in which they were "
            "computed; 'batching: {mode: off}' makes them equal to the bit."
        )
    elif report.same_version:
        some = "" if report.same_version == report.asked else f" of {report.same_version:,} pairs"
        parts.append(f"The fingerprints{some} are equal, and so is every such answer that is not drawn at random.")
    if compared.number:
        parts.append(
            f"{compared.count:,} of {compared.number:,} answers are equal to the bit "
            f"({100 * compared.low:.1f} to {100 * compared.high:.1f} % of all such requests, at 95 %)."
        )
    if report.within is not None and report.tolerance is not None:
        one = report.tolerance
        parts.append(
            f"{report.within.count:,} are equal within the tolerance (relative {one.relative:g}, absolute "
            f"{one.absolute:g})."
        )
    if report.labels is not None:
        parts.append(f"{report.labels.flips:,} of {report.labels.number:,} labels changed.")
    if report.random:
        parts.append(f"{report.random:,} are drawn at random and are compared by their lengths alone.")
    if report.failed:
        parts.append(f"{report.failed:,} requests that were answered before failed.")
    is_bad = bool(report.broken or report.failed)
    is_good = not is_bad and not report.different
    return " ".join(parts), "bad" if is_bad else "good" if is_good else "mixed"
