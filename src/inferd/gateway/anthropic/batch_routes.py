"""The routes of the Message Batches API."""

from __future__ import annotations

from typing import Final

from inferd.gateway.anthropic import batch_wire as wire
from inferd.gateway.anthropic import batches
from inferd.gateway.anthropic.errors import ANTHROPIC_ERRORS
from inferd.gateway.route import Route

_FOUND: Final = (400, 401, 403, 404, 503)
_BATCHES: Final = "/v1/messages/batches"
_BATCH: Final = f"{_BATCHES}/{{id}}"

MESSAGE_BATCH_ROUTES: Final = (
    Route(
        *("POST", _BATCHES, "infer", batches.create, "Answer many conversations, as a batch."),
        request=wire.MessageBatchRequest,
        response=wire.MessageBatch,
        statuses=(400, 401, 403, 408, 409, 413, 415, 422, 429, 503),
        errors=ANTHROPIC_ERRORS,
    ),
    Route(
        *("GET", _BATCHES, "infer", batches.list_all, "The tenant's message batches, the newest first."),
        response=wire.MessageBatchPage,
        statuses=(400, 401, 403, 503),
        query=wire.MessageBatchesQuery,
        errors=ANTHROPIC_ERRORS,
    ),
    Route(
        *("GET", _BATCH, "infer", batches.retrieve, "A message batch: its status and counts."),
        response=wire.MessageBatch,
        statuses=_FOUND,
        errors=ANTHROPIC_ERRORS,
    ),
    Route(
        *("DELETE", _BATCH, "infer", batches.delete, "Delete a message batch that has ended."),
        response=wire.DeletedMessageBatch,
        statuses=_FOUND,
        errors=ANTHROPIC_ERRORS,
    ),
    Route(
        *("POST", f"{_BATCH}/cancel", "infer", batches.cancel, "Cancel a message batch; what was answered stays."),
        response=wire.MessageBatch,
        statuses=_FOUND,
        errors=ANTHROPIC_ERRORS,
    ),
    Route(
        *("GET", f"{_BATCH}/results", "infer", batches.results, "The results, one in each line."),
        media=batches.RESULTS_TYPE,
        statuses=_FOUND,
        errors=ANTHROPIC_ERRORS,
    ),
)
