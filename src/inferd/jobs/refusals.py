"""The errors of files and batches."""

from __future__ import annotations

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest, Overloaded, StoredNotFound
from inferd.jobs.batch import Status


def unknown_file(name: str, param: str = "file_id") -> StoredNotFound:
    return StoredNotFound(
        f"There is no file {_shown(name)}; it was deleted or is too old.", param=param, code="file_not_found"
    )


def unknown_batch(name: str) -> StoredNotFound:
    return StoredNotFound(
        f"There is no batch {_shown(name)}; it was deleted or is too old.", param="batch_id", code="batch_not_found"
    )


def unknown_edge(name: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} is {_shown(name)}, and the list has no such entry; send the id of one that was listed.", param=param
    )


def too_many_bytes(used: int, more: int, most: int) -> InvalidRequest:
    return InvalidRequest(
        f"Your files have {bytes_text(used)}, this one has {bytes_text(more)}, and {bytes_text(most)} are allowed "
        "(jobs.max_bytes); delete files that you do not need.",
        param="file",
        code="files_quota_exceeded",
    )


def in_use(name: str, batch: str) -> InvalidRequest:
    return InvalidRequest(
        f"The file {_shown(name)} is the input of the batch {_shown(batch)}, which has not ended; cancel it first.",
        param="file_id",
        code="file_in_use",
    )


def other_folder(name: str) -> Overloaded:
    return Overloaded(
        f"The content of the file {_shown(name)} is in another server's folder; ask that server, or give all servers "
        "that share a database the same jobs.folder.",
        code="file_elsewhere",
        retry_after_s=60.0,
    )


def lost_content(name: str) -> StoredNotFound:
    return StoredNotFound(
        f"The content of the file {_shown(name)} is not in jobs.folder any more; upload it again.",
        param="file_id",
        code="file_content_lost",
    )


def wrong_purpose(name: str, purpose: str) -> InvalidRequest:
    return InvalidRequest(
        f"The file {_shown(name)} has the purpose {purpose!r}; a batch needs a file that was uploaded with the purpose "
        "'batch'.",
        param="input_file_id",
        code="invalid_purpose",
    )


def too_many_open(count: int) -> Overloaded:
    return Overloaded(
        f"{count} of your batches have not ended (jobs.max_open); wait for some, or cancel them.",
        code="too_many_batches",
        retry_after_s=60.0,
    )


def has_ended(name: str, status: Status) -> InvalidRequest:
    return InvalidRequest(
        f"The batch {_shown(name)} is {status}, so it cannot be cancelled.", param="batch_id", code="batch_has_ended"
    )


def cannot_resume(name: str, status: Status) -> InvalidRequest:
    return InvalidRequest(
        f"The batch {_shown(name)} is {status}; only one that is cancelled or expired can be resumed.",
        param="batch_id",
        code="batch_not_resumable",
    )


def messages_not_resumed(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The batch {_shown(name)} is a message batch, which cannot be resumed; make one of the requests whose results "
        "are canceled or expired.",
        param="batch_id",
        code="batch_not_resumable",
    )


def not_ended(name: str, status: Status) -> InvalidRequest:
    return InvalidRequest(
        f"The batch {_shown(name)} is {status}; it can be deleted when it has ended.",
        param="batch_id",
        code="batch_not_ended",
    )


def disk_failed(said: str, *, is_full: bool) -> Overloaded:
    reason = "is full" if is_full else f"failed ({said})"
    return Overloaded(
        f"The disk of jobs.folder {reason}, so the file was not stored; try again later.",
        code="disk_full" if is_full else "disk_failed",
        retry_after_s=30.0,
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:80] + "...")
