"""Files: POST, GET and DELETE of /v1/files, and their contents. They are the inputs and results of batches."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec

from inferd import clock
from inferd.eager import in_task
from inferd.errors import IdempotencyConflict, InvalidRequest
from inferd.gateway.body.query import last_values
from inferd.gateway.call import Answer, Call, Pieces, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.writer import encode
from inferd.gateway.idempotency import asks_for_repetition, repeated
from inferd.gateway.jobs.contents import Received, jobs_of, pieces_of, receive
from inferd.jobs import refusals
from inferd.jobs.batch import StoredFile
from inferd.jobs.rows import Query
from inferd.jobs.store import JobStore

JSONL_TYPE: Final[bytes] = b"application/jsonl"
MAX_FILES: Final = 10_000
MAX_BATCHES: Final = 100
LEAST_LIFE_S: Final = 3600
MOST_LIFE_S: Final = 2_592_000

_PURPOSES: Final = ("batch", "batch_output")
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class FileForm(msgspec.Struct, frozen=True):
    """The form of POST /v1/files, as multipart/form-data."""

    file: str  # its content: requests as JSON lines
    purpose: Literal["batch"]


class FileObject(msgspec.Struct, frozen=True):
    """A file of the tenant."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: str = "file"
    status: str = "processed"
    status_details: None = None


class FileList(msgspec.Struct, frozen=True):
    """A page of the list of files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    """DELETE /v1/files/{id}"""

    id: str
    object: str = "file"
    deleted: bool = True


class FilesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of files."""

    after: str | None = None  # the id of the last file of the page before
    limit: int = MAX_FILES  # at most as many
    order: str = "desc"  # or asc: the oldest first
    purpose: str | None = None  # batch or batch_output; unset: all


async def create(context: Context, call: Call, rest: str) -> Answer:
    """Store a file. Raises what ``receive`` and ``repeated`` raise."""
    store = jobs_of(context)
    await in_task()
    received = await receive(context, call, store)
    try:
        earlier = None
        if asks_for_repetition(context, call):
            earlier = await repeated(context, call, _identity(received), None)
        if earlier is None:
            return Response(200, encode(await _stored(call, store, received)))
    except (InvalidRequest, IdempotencyConflict):
        # After another error its row may be there; else the sweep removes the content.
        await asyncio.to_thread(store.folder.delete, (received.id,))
        raise
    await asyncio.to_thread(store.folder.delete, (received.id,))
    return earlier


async def _stored(call: Call, store: JobStore, received: Received) -> FileObject:
    now = clock.wall()
    file = StoredFile(
        id=received.id,
        tenant=call.principal.tenant,
        created_at=now,
        expires_at=now + _life(received.fields, store),
        purpose="batch",
        filename=received.filename,
        num_bytes=received.num_bytes,
        folder=store.folder.id,
    )
    await store.add_file(file)
    return _object(file)


def _identity(received: Received) -> bytes:
    return encode((received.filename, sorted(received.fields.items()), received.digest.hex()))


async def list_all(context: Context, call: Call, rest: str) -> Answer:
    store = jobs_of(context)
    query = page_query(call, MAX_FILES, MAX_FILES)
    purpose = last_values(call.head.query).get("purpose")
    if purpose is not None and purpose not in _PURPOSES:
        raise invalid("purpose", f"purpose must be one of {', '.join(_PURPOSES)}, not {shown(purpose)}.")
    await in_task()
    page = await store.files(call.principal.tenant, purpose, query)
    ids = [file.id for file in page.files]
    listed = FileList([_object(file) for file in page.files], *ends_of(ids), page.has_more)
    return Response(200, encode(listed))


async def retrieve(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound."""
    store = jobs_of(context)
    await in_task()
    return Response(200, encode(_object(await store.file(call.principal.tenant, rest))))


async def content(context: Context, call: Call, rest: str) -> Pieces:
    """The content of a file. Raises StoredNotFound, and Overloaded where another server has it."""
    store = jobs_of(context)
    await in_task()
    file = await store.file(call.principal.tenant, rest)
    if file.folder != store.folder.id:
        raise refusals.other_folder(file.id)
    return Pieces(pieces_of(store.folder, file.id), file.num_bytes, JSONL_TYPE)


async def delete(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound, and InvalidRequest for the input of a batch that has not ended."""
    store = jobs_of(context)
    await in_task()
    await store.delete_file(call.principal.tenant, rest)
    return Response(200, encode(DeletedFile(rest)))


def page_query(call: Call, most: int, default: int) -> Query:
    """The part of a list that is asked for. Raises InvalidRequest."""
    asked = last_values(call.head.query)
    order = asked.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise invalid("order", f"order must be asc or desc, not {shown(order)}.")
    limit = asked.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise invalid("limit", f"limit must be an integer from 1 to {most}, not {shown(limit)}.")
    return Query(asked.get("after") or "", default if limit is None else int(limit), order == "desc")


def ends_of(ids: list[str]) -> tuple[str | None, str | None]:
    return (ids[0], ids[-1]) if ids else (None, None)


def _life(fields: dict[str, str], store: JobStore) -> float:
    """Seconds until the file is deleted. Raises InvalidRequest."""
    for name in fields:
        if name not in _FIELDS:
            raise invalid(
                name,
                f"The form has the unknown field {shown(name)}; it may have file, purpose and expires_after.",
                "unknown_parameter",
            )
    purpose = fields.get("purpose")
    if purpose != "batch":
        raise invalid("purpose", f"purpose must be 'batch', not {shown(purpose)}: this server has files for batches.")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return store.config.max_age_s
    if anchor != "created_at":
        raise invalid("expires_after", f"expires_after.anchor must be 'created_at', not {shown(anchor)}.")
    given = (
        int(seconds) if seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 12 else -1
    )
    return life_of(given, "expires_after", store)


def life_of(seconds: int, param: str, store: JobStore) -> float:
    """Raises InvalidRequest."""
    if not LEAST_LIFE_S <= seconds <= MOST_LIFE_S:
        raise invalid(param, f"{param}.seconds must be an integer from {LEAST_LIFE_S} to {MOST_LIFE_S}.")
    return min(float(seconds), store.config.max_age_s)


def _object(file: StoredFile) -> FileObject:
    return FileObject(file.id, file.num_bytes, int(file.created_at), int(file.expires_at), file.filename, file.purpose)
