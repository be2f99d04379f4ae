"""Message batches: POST and GET of /v1/messages/batches, and one batch: its state, its end and its results.

A batch is a job of the store that all dialects share. Its requests arrive in one body and are written to the job's
input one by one, so a batch of any size takes the memory of one request.
"""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from typing import Final

import msgspec

from inferd import clock
from inferd.eager import in_task
from inferd.errors import IdempotencyConflict, InvalidRequest, StoredNotFound
from inferd.gateway.anthropic.batch_wire import (
    BatchedMessage,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchCounts,
    MessageBatchesQuery,
    MessageBatchPage,
    frame_decoder,
    model_decoder,
    request_decoder,
)
from inferd.gateway.body.decode import decode
from inferd.gateway.body.query import read_query
from inferd.gateway.call import Answer, Call, Pieces, Response, require_json
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.fields import decode_open_body
from inferd.gateway.generation.requests import ignored_header
from inferd.gateway.generation.writer import encode
from inferd.gateway.idempotency import asks_for_repetition, repeated
from inferd.gateway.jobs.contents import Content, body_of, check_announced, disk_failed, jobs_of, pieces_of
from inferd.gateway.jobs.elements import MAX_REST_BYTES, Elements
from inferd.jobs import refusals
from inferd.jobs.batch import MESSAGES, MESSAGES_PREFIX, WINDOW_S, Batch, StoredFile, new_id
from inferd.jobs.rows import Query
from inferd.jobs.store import JobStore

RESULTS_TYPE: Final[bytes] = b"application/x-jsonl"


async def create(context: Context, call: Call, rest: str) -> Answer:
    """Begin a batch. Raises InvalidRequest, BodyTooLarge, BodyTimeout, Overloaded, StateUnavailable."""
    store = jobs_of(context)
    require_json(call)
    await in_task()
    await check_announced(call, store, MAX_REST_BYTES)
    content = Content(store, call.principal.tenant)
    try:
        received = _Requests(content, store.config.max_lines, context.max_body_bytes)
        most = store.config.max_file_bytes
        async for data in body_of(call, most + MAX_REST_BYTES, context.body_timeout_s, most):
            await received.take(data)
        call.ignored = await received.finish()
    except OSError as error:
        raise disk_failed(error) from None
    finally:
        content.close()
    try:
        earlier = None
        if asks_for_repetition(context, call):
            earlier = await repeated(context, call, received.digest, None)
        if earlier is None:
            batch = await _added(call, store, received)
            assert context.jobs is not None, "there is a store"
            context.jobs.wake()
            return Response(200, encode(_object(batch)), headers=ignored_header(call.ignored))
    except (InvalidRequest, IdempotencyConflict):
        # After another error its rows may be there; else the sweep removes the content.
        await asyncio.to_thread(store.folder.delete, (content.id,))
        raise
    await asyncio.to_thread(store.folder.delete, (content.id,))
    return earlier


async def list_all(context: Context, call: Call, rest: str) -> Answer:
    """Raises InvalidRequest."""
    store = jobs_of(context)
    asked = _query_of(call.head.query)
    query = Query(asked.after_id or "", asked.limit, before=asked.before_id or "")
    await in_task()
    page = await store.batches(call.principal.tenant, query, MESSAGES_PREFIX)
    listed = [_object(batch) for batch in page.batches]
    first, last = (listed[0].id, listed[-1].id) if listed else (None, None)
    return Response(200, encode(MessageBatchPage(listed, page.has_more, first, last)))


async def retrieve(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound."""
    return Response(200, encode(_object(await _found(context, call, rest))))


async def cancel(context: Context, call: Call, rest: str) -> Answer:
    """End it; a batch that has ended stays as it is. Raises StoredNotFound."""
    batch = await _found(context, call, rest)
    if not batch.has_ended:
        batch = await jobs_of(context).cancel(call.principal.tenant, rest)
    return Response(200, encode(_object(batch)))


async def delete(context: Context, call: Call, rest: str) -> Answer:
    """Delete a batch that has ended, with its results. Raises StoredNotFound, InvalidRequest."""
    batch = await _found(context, call, rest)
    await jobs_of(context).delete_batch(call.principal.tenant, batch.id)
    return Response(200, encode(DeletedMessageBatch(batch.id)))


async def results(context: Context, call: Call, rest: str) -> Pieces:
    """The results, one in each line. Raises StoredNotFound, and InvalidRequest before the batch has ended."""
    store = jobs_of(context)
    batch = await _found(context, call, rest)
    if not batch.has_ended:
        raise invalid(
            "message_batch_id",
            f"The batch {shown(rest)} has not ended; its results are there when processing_status is 'ended'.",
            "batch_not_ended",
        )
    if batch.output_file_id is None:
        raise StoredNotFound(
            f"The batch {shown(rest)} has no results: {batch.problems[0].message if batch.problems else 'it failed.'}",
            param="message_batch_id",
            code="file_not_found",
        )
    file = await store.file(call.principal.tenant, batch.output_file_id)
    if file.folder != store.folder.id:
        raise refusals.other_folder(file.id)
    return Pieces(pieces_of(store.folder, file.id), file.num_bytes, RESULTS_TYPE)


class _Requests:
    """The requests of a batch that arrive: each is checked and becomes a line of the job's input."""

    def __init__(self, content: Content, max_requests: int, max_bytes: int) -> None:
        self.content = content
        self.models: set[str] = set()  # up to two
        self.num_requests = 0
        self._elements = Elements("requests", max_bytes)
        self._max_requests = max_requests
        self._seen: set[str] = set()
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> bytes:
        """Of the whole body."""
        return self._digest.digest()

    async def take(self, data: bytes) -> None:
        # A piece has hundreds of requests, which would hold up the event loop.
        await self.content.add(await asyncio.to_thread(self._lines, data))

    async def finish(self) -> list[str]:
        """All of the body was taken: the names of the fields that had no effect. Raises InvalidRequest."""
        _, ignored = await decode_open_body(self._elements.close(), frame_decoder)
        if not self.num_requests:
            raise invalid("requests", "requests is empty; send at least one request.")
        await self.content.finish()
        return ignored

    def _lines(self, data: bytes) -> bytes:
        """The lines of the requests that are complete by these bytes."""
        self._digest.update(data)
        return b"".join([self._line(element) for element in self._elements.feed(data)])

    def _line(self, element: bytes) -> bytes:
        at = f"requests[{self.num_requests}]"
        self.num_requests += 1
        if self.num_requests > self._max_requests:
            raise invalid(
                "requests",
                f"requests has more than {self._max_requests} elements (jobs.max_lines); make several batches.",
                "too_many_lines",
            )
        read, model = _read(at, element)
        if read.custom_id in self._seen:
            raise invalid(
                f"{at}.custom_id",
                f"{at}.custom_id is {shown(read.custom_id)}, which an earlier request has too; give each its own.",
                "duplicate_custom_id",
            )
        self._seen.add(read.custom_id)
        if model is not None and len(self.models) < 2:
            self.models.add(model)
        params = bytes(read.params).replace(b"\n", b" ").replace(b"\r", b" ")  # blanks, outside of its texts
        return b'{"custom_id":"%b","url":"%b","body":%b}\n' % (read.custom_id.encode(), MESSAGES.encode(), params)


def _read(at: str, element: bytes) -> tuple[BatchedMessage, str | None]:
    """A request, and the model that it names. Raises InvalidRequest."""
    try:
        read = decode(element, request_decoder, texts=False)
        if not bytes(read.params).startswith(b"{"):
            raise InvalidRequest("params must be an object, a body of POST /v1/messages.", param="params")
    except InvalidRequest as error:
        where = at if error.param is None else f"{at}.{error.param}"
        raise InvalidRequest(f"{at}: {error.message}", param=where, code=error.code) from None
    try:
        return read, model_decoder.decode(read.params).model
    except msgspec.ValidationError:
        return read, None  # the request is answered with its error


async def _added(call: Call, store: JobStore, received: _Requests) -> Batch:
    now, name = clock.wall(), new_id(MESSAGES_PREFIX)
    content = received.content
    file = StoredFile(
        id=content.id,
        tenant=call.principal.tenant,
        created_at=now,
        expires_at=now + store.config.max_age_s,
        purpose="batch",
        filename=f"{name}.jsonl",
        num_bytes=content.num_bytes,
        folder=store.folder.id,
    )
    batch = Batch(
        id=name,
        tenant=call.principal.tenant,
        key_id=call.principal.key_id,
        endpoint=MESSAGES,
        input_file_id=file.id,
        created_at=now,
        expires_at=now + WINDOW_S,
        status="in_progress",  # its requests are counted
        in_progress_at=now,
        total=received.num_requests,
        model=next(iter(received.models)) if len(received.models) == 1 else None,
    )
    await store.add_batch(batch, file)
    return batch


async def _found(context: Context, call: Call, name: str) -> Batch:
    """A message batch of the tenant. Raises StoredNotFound."""
    store = jobs_of(context)
    if not name.startswith(MESSAGES_PREFIX):
        raise refusals.unknown_batch(name)
    await in_task()
    return await store.batch(call.principal.tenant, name)


def _query_of(text: str) -> MessageBatchesQuery:
    query = read_query(text, MessageBatchesQuery)
    if query.after_id is not None and query.before_id is not None:
        raise invalid("before_id", "after_id and before_id are both there; send one of them.", "invalid_query")
    return query


def _object(batch: Batch) -> MessageBatch:
    early = batch.num_early if batch.ending in ("cancelled", "expired") else 0
    counts = MessageBatchCounts(
        processing=0 if batch.has_ended else batch.total - batch.num_answered,
        succeeded=batch.num_done,
        errored=batch.num_failed - early,
        canceled=early if batch.ending == "cancelled" else 0,
        expired=early if batch.ending == "expired" else 0,
    )
    ended_at = next(
        (at for at in (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at) if at), None
    )
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if batch.has_ended else "canceling" if batch.ending == "cancelled" else "in_progress",
        request_counts=counts,
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=None if ended_at is None else _time(ended_at),
        cancel_initiated_at=None if batch.cancelling_at is None else _time(batch.cancelling_at),
        archived_at=None,
        results_url=f"/v1/messages/batches/{batch.id}/results" if batch.has_ended else None,
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
