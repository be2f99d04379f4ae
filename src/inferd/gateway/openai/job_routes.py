"""The routes of files and batches."""

from __future__ import annotations

from typing import Final

from inferd.gateway.openai import batches, files
from inferd.gateway.route import Route

_FOUND: Final = (400, 401, 403, 404, 503)
_SENT: Final = (400, 401, 403, 404, 408, 413, 415, 503)
_FILE: Final = "/v1/files/{id}"
_BATCH: Final = "/v1/batches/{id}"

JOB_ROUTES: Final = (
    Route(
        *("POST", "/v1/files", "infer", files.create, "Upload a file of requests for a batch."),
        request=files.FileForm,
        request_media="multipart/form-data",
        response=files.FileObject,
        statuses=_SENT,
    ),
    Route(
        *("GET", "/v1/files", "infer", files.list_all, "The tenant's files."),
        response=files.FileList,
        statuses=(400, 401, 403, 503),
        query=files.FilesQuery,
    ),
    Route(
        *("GET", _FILE, "infer", files.retrieve, "A file, without its content."),
        response=files.FileObject,
        statuses=_FOUND,
    ),
    Route(
        *("DELETE", _FILE, "infer", files.delete, "Delete a file."),
        response=files.DeletedFile,
        statuses=_FOUND,
    ),
    Route(
        *("GET", f"{_FILE}/content", "infer", files.content, "The content of a file."),
        media=files.JSONL_TYPE,
        statuses=_FOUND,
    ),
    Route(
        *("POST", "/v1/batches", "infer", batches.create, "Answer all requests of a file, as a batch."),
        request=batches.BatchRequest,
        response=batches.BatchObject,
        statuses=_SENT,
    ),
    Route(
        *("GET", "/v1/batches", "infer", batches.list_all, "The tenant's batches, the newest first."),
        response=batches.BatchList,
        statuses=(400, 401, 403, 503),
        query=batches.BatchesQuery,
    ),
    Route(
        *("GET", _BATCH, "infer", batches.retrieve, "A batch: its status, counts and files."),
        response=batches.BatchObject,
        statuses=_FOUND,
    ),
    Route(
        *("POST", f"{_BATCH}/cancel", "infer", batches.cancel, "Cancel a batch; what was answered stays."),
        response=batches.BatchObject,
        statuses=_FOUND,
    ),
    Route(
        *("POST", f"{_BATCH}/resume", "infer", batches.resume, "Let a cancelled or expired batch go on."),
        response=batches.BatchObject,
        statuses=(*_FOUND[:4], 429, 503),
    ),
)
