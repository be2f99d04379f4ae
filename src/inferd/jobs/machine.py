"""The states of a batch. Pure: each function returns the batch after an event, and time is an argument.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │               │                │
        │               ├─▶ (time) ──────┼──────▶ expired
        │               ├─▶ (no key) ────┴──────▶ failed
        └───────────────┴─▶ cancelling ─────────▶ cancelled

    cancelled, expired ──▶ (resumed) ──▶ in_progress, or validating where the input was not read

Every request of a batch is answered exactly once: with its answer or its error, and where the batch ends early with the
error ``batch_cancelled``, ``batch_expired`` or ``batch_failed``. A file without any request fails the batch at once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.jobs.batch import WINDOW_S, Batch, Ending, Former, Place, Problem, Progress, Segment, Tokens
from inferd.jobs.survey import Survey

_AT: Final[dict[str, str]] = {ending: f"{ending}_at" for ending in ("completed", "failed", "expired", "cancelled")}


class WrongPlace(Exception):
    """The progress does not begin where the batch is: another server answered these lines."""


def surveyed(batch: Batch, survey: Survey, now: float) -> Batch:
    """The input was read once. The second and later surveys change nothing."""
    if batch.total or batch.has_ended or batch.status not in ("validating", "cancelling"):
        return batch
    found = msgspec.structs.replace(
        batch, total=survey.total, model=batch.model or survey.model, problems=survey.problems, in_progress_at=now
    )
    if survey.refusal is not None:
        found = msgspec.structs.replace(found, problems=(survey.refusal, *survey.problems), in_progress_at=None)
        return _at_end(found, "cancelled" if batch.status == "cancelling" else "failed", now)
    return found if batch.status == "cancelling" else msgspec.structs.replace(found, status="in_progress")


def cancelled(batch: Batch, now: float) -> Batch:
    """A client asks to cancel it. What has ended, or ends already, stays as it is."""
    if batch.status not in ("validating", "in_progress"):
        return batch
    return msgspec.structs.replace(batch, status="cancelling", ending="cancelled", cancelling_at=now)


def resumed(batch: Batch, now: float) -> Batch:
    """A client lets a batch go on that was cancelled or has expired. It begins anew with the answers that it had, which
    are read again from its former files of results, and asks the other lines."""
    assert batch.status in ("cancelled", "expired"), "another one is refused"
    former = Former(batch.output_file_id, batch.error_file_id)
    return msgspec.structs.replace(
        batch,
        status="in_progress" if batch.total else "validating",
        ending="",
        expires_at=now + WINDOW_S,
        in_progress_at=now if batch.total else None,
        finalizing_at=None,
        expired_at=None,
        cancelling_at=None,
        cancelled_at=None,
        num_done=0,
        num_failed=0,
        num_early=0,
        tokens=Tokens(),
        place=Place(),
        output=(),
        errors=(),
        output_file_id=None,
        error_file_id=None,
        former=former,
    )


def stopped(batch: Batch, ending: Ending, now: float, problem: Problem | None = None) -> Batch:
    """End it before all requests were asked: it expires, or fails."""
    assert ending in ("expired", "failed")
    if batch.status not in ("validating", "in_progress"):
        return batch
    problems = batch.problems if problem is None else (problem, *batch.problems)
    return msgspec.structs.replace(
        batch, status="finalizing", ending=ending, finalizing_at=now, problems=problems, note=""
    )


def is_due(batch: Batch, now: float) -> bool:
    """Whether its window has passed before all of it was asked."""
    return batch.status in ("validating", "in_progress") and now >= batch.expires_at


def advanced(batch: Batch, progress: Progress, fence: int) -> Batch:
    """More lines were answered. Repeating the same progress changes nothing. Raises WrongPlace."""
    if batch.place == progress.end and progress.begin != progress.end:
        return batch
    if batch.place != progress.begin or batch.has_ended:
        raise WrongPlace
    return msgspec.structs.replace(
        batch,
        place=progress.end,
        num_done=batch.num_done + progress.num_done,
        num_failed=batch.num_failed + progress.num_failed,
        num_early=batch.num_early + progress.num_early,
        tokens=batch.tokens + progress.tokens,
        output=_longer(batch.output, fence, progress.output_bytes),
        errors=_longer(batch.errors, fence, progress.error_bytes),
        note="",
    )


def finalized(batch: Batch, output_id: str, error_id: str, now: float) -> Batch:
    """All lines are answered: its files of results are put together under these ids. Idempotent."""
    assert batch.num_answered == batch.total, "every request is answered before the end"
    if batch.has_ended or batch.output_file_id is not None or batch.error_file_id is not None:
        return batch
    is_cancelling = batch.status == "cancelling"
    return msgspec.structs.replace(
        batch,
        status="cancelling" if is_cancelling else "finalizing",
        ending=batch.ending or "completed",
        finalizing_at=batch.finalizing_at if batch.finalizing_at is not None or is_cancelling else now,
        output_file_id=output_id if any(segment.num_bytes for segment in batch.output) else None,
        error_file_id=error_id if any(segment.num_bytes for segment in batch.errors) else None,
    )


def ended(batch: Batch, now: float) -> Batch:
    """Its files of results are there. Idempotent."""
    if batch.has_ended:
        return batch
    assert batch.ending, "it was finalized"
    return _at_end(msgspec.structs.replace(batch, former=None), batch.ending, now)


def noted(batch: Batch, note: str) -> Batch:
    return batch if batch.note == note or batch.has_ended else msgspec.structs.replace(batch, note=note)


def failed_at_once(batch: Batch, problem: Problem, now: float) -> Batch:
    """It cannot go on, and has no results: its input is gone."""
    if batch.has_ended:
        return batch
    lost = msgspec.structs.replace(batch, problems=(problem, *batch.problems), output=(), errors=(), place=Place())
    lost = msgspec.structs.replace(lost, output_file_id=None, error_file_id=None)
    return _at_end(lost, "failed", now)


def _at_end(batch: Batch, ending: Ending, now: float) -> Batch:
    return msgspec.structs.replace(batch, status=ending, ending=ending, note="", **{_AT[ending]: now})


def _longer(segments: tuple[Segment, ...], fence: int, more: int) -> tuple[Segment, ...]:
    if not more:
        return segments
    if segments and segments[-1].fence == fence:
        return (*segments[:-1], Segment(fence, segments[-1].num_bytes + more))
    return (*segments, Segment(fence, more))
