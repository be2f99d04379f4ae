"""Batches: POST and GET of /v1/batches; GET, cancel and resume of one."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from inferd import clock
from inferd.eager import in_task
from inferd.gateway.body.decode import decode_body, json_body
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.writer import encode
from inferd.gateway.idempotency import asks_for_repetition, repeated
from inferd.gateway.jobs.contents import jobs_of
from inferd.gateway.openai.files import MAX_BATCHES, ends_of, life_of, page_query
from inferd.jobs.batch import BATCH_PREFIX, WINDOW_S, Batch, Status, new_id

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_INFER: Final = re.compile(r"/v2/models/(?P<model>[^/].*?)(?:/versions/[^/]+)?/infer")
_MAX_PAIRS: Final = 16
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512
_MAX_ENDPOINT_CHARS: Final = 512


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str  # of every line: one of ENDPOINTS, or /v2/models/{model}/infer
    completion_window: str  # 24h
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True):
    """What is wrong with a line, or with the whole file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(msgspec.Struct, frozen=True):
    """The first 100 errors."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests of a batch, by their results."""

    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True):
    """The tokens of all answers so far."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchObject(msgspec.Struct, frozen=True):
    """A batch of the tenant."""

    id: str
    endpoint: str
    input_file_id: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    usage: BatchUsage
    model: str | None
    errors: BatchErrors | None
    metadata: dict[str, str] | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    note: str | None  # why it does not go on at the moment; inferd's own field
    object: str = "batch"
    completion_window: str = "24h"


class BatchList(msgspec.Struct, frozen=True):
    """A page of the list of batches."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class BatchesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of batches."""

    after: str | None = None  # the id of the last batch of the page before
    limit: int = 20  # at most 100


batch_decoder: Final = msgspec.json.Decoder(BatchRequest)


async def create(context: Context, call: Call, rest: str) -> Answer:
    """Begin a batch. Raises StoredNotFound for an unknown file, InvalidRequest, Overloaded, StateUnavailable."""
    store = jobs_of(context)
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body = await decode_body(raw, batch_decoder)
    model = _checked(body)
    earlier = await repeated(context, call, raw, None) if asks_for_repetition(context, call) else None
    if earlier is not None:
        return earlier
    lasts = body.output_expires_after
    now = clock.wall()
    batch = Batch(
        id=new_id(BATCH_PREFIX),
        tenant=call.principal.tenant,
        key_id=call.principal.key_id,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=body.metadata,
        results_last_s=None if lasts is None else life_of(lasts.seconds, "output_expires_after", store),
        model=model,
    )
    await in_task()
    await store.add_batch(batch)
    assert context.jobs is not None, "there is a store"
    context.jobs.wake()
    return Response(200, encode(batch_object(batch)))


async def list_all(context: Context, call: Call, rest: str) -> Answer:
    store = jobs_of(context)
    query = page_query(call, MAX_BATCHES, 20)
    await in_task()
    page = await store.batches(call.principal.tenant, query)
    ids = [batch.id for batch in page.batches]
    listed = BatchList([batch_object(batch) for batch in page.batches], *ends_of(ids), page.has_more)
    return Response(200, encode(listed))


async def retrieve(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound."""
    store = jobs_of(context)
    await in_task()
    return Response(200, encode(batch_object(await store.batch(call.principal.tenant, rest))))


async def cancel(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound, and InvalidRequest for a batch that has ended."""
    store = jobs_of(context)
    await in_task()
    return Response(200, encode(batch_object(await store.cancel(call.principal.tenant, rest))))


async def resume(context: Context, call: Call, rest: str) -> Answer:
    """inferd's own. Raises StoredNotFound, InvalidRequest for a batch that is neither cancelled nor expired, and
    Overloaded."""
    store = jobs_of(context)
    await in_task()
    batch = await store.resume(call.principal.tenant, rest)
    assert context.jobs is not None, "there is a store"
    context.jobs.wake()
    return Response(200, encode(batch_object(batch)))


def _checked(body: BatchRequest) -> str | None:
    """The model that the endpoint names, if it names one. Raises InvalidRequest."""
    if body.completion_window != "24h":
        raise invalid("completion_window", f"completion_window must be '24h', not {shown(body.completion_window)}.")
    infers = _INFER.fullmatch(body.endpoint) if len(body.endpoint) <= _MAX_ENDPOINT_CHARS else None
    if body.endpoint not in ENDPOINTS and infers is None:
        raise invalid(
            "endpoint",
            f"endpoint must be one of {', '.join(ENDPOINTS)} or /v2/models/MODEL/infer, not {shown(body.endpoint)}.",
        )
    pairs = body.metadata or {}
    if len(pairs) > _MAX_PAIRS or any(
        len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS for key, value in pairs.items()
    ):
        raise invalid(
            "metadata",
            f"metadata may have {_MAX_PAIRS} pairs, with keys of {_MAX_KEY_CHARS} and values of {_MAX_VALUE_CHARS} "
            "characters at most.",
        )
    return None if infers is None else infers["model"]


def batch_object(batch: Batch) -> BatchObject:
    def at(seconds: float | None) -> int | None:
        return None if seconds is None else int(seconds)

    problems = [BatchError(each.code, each.message, each.line, each.param) for each in batch.problems]
    used = batch.tokens
    times: dict[str, Any] = {
        name: at(getattr(batch, name))
        for name in ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at")
    }
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        status=batch.status,
        created_at=int(batch.created_at),
        expires_at=int(batch.expires_at),
        request_counts=RequestCounts(batch.total, batch.num_done, batch.num_failed),
        usage=BatchUsage(
            used.input,
            InputDetails(used.cached),
            used.output,
            OutputDetails(used.reasoning),
            used.input + used.output,
        ),
        model=batch.model,
        errors=BatchErrors(problems) if problems else None,
        metadata=batch.metadata,
        output_file_id=batch.output_file_id if batch.has_ended else None,
        error_file_id=batch.error_file_id if batch.has_ended else None,
        cancelled_at=at(batch.cancelled_at),
        note=batch.note or None,
        **times,
    )
