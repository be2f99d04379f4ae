"""Contents of files, from and to clients: received part by part onto the disk, and sent piece by piece from it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple

from inferd import clock
from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest, Overloaded
from inferd.gateway.call import BODY_IDLE_TIMEOUT_S, SLOWEST_BODY, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import BodyTimeout, BodyTooLarge, invalid, printable, shown
from inferd.gateway.jobs.multipart import Begin, Data, Form, boundary_of
from inferd.jobs import refusals
from inferd.jobs.batch import new_id
from inferd.jobs.folder import PIECE, Folder, Upload, is_full
from inferd.jobs.store import JobStore
from inferd.jobs.survey import refuse_binary

_MAX_FIELD_BYTES: Final = 1024
_MAX_NAME_CHARS: Final = 255
_FORM_BYTES: Final = 64 * 1024
"""Bytes of a form beside the content of its file."""


class Received(NamedTuple):
    """A form with a file, whose content is in the folder under ``id``. No row names it yet."""

    id: str
    filename: str
    num_bytes: int
    fields: dict[str, str]
    digest: bytes  # SHA-256 of the content


def jobs_of(context: Context) -> JobStore:
    """Raises InvalidRequest where the server has no files and batches."""
    if context.jobs is None:
        raise invalid("path", "This server has no files and batches; jobs.enabled turns them on.", "unsupported_value")
    return context.jobs.store


async def receive(context: Context, call: Call, store: JobStore) -> Received:
    """Receive a form with one file. Raises InvalidRequest, BodyTooLarge, BodyTimeout, Overloaded where the disk is
    full, StateUnavailable and ClientLeft; then nothing of it is left."""
    form = Form(boundary_of(call.header(b"content-type")))
    most, tenant = store.config.max_file_bytes, call.principal.tenant
    await check_announced(call, store, _FORM_BYTES)
    receiving = _Receiving(store, tenant)
    try:
        async for data in body_of(call, most + _FORM_BYTES, context.body_timeout_s, most):
            for event in form.feed(data):
                await receiving.take(event)
        if not form.is_complete:
            raise InvalidRequest("The body ends before its last boundary; send all of it.", code="invalid_form")
        return await receiving.finish()
    except OSError as error:
        raise disk_failed(error) from None
    finally:
        receiving.close()


async def check_announced(call: Call, store: JobStore, rest_bytes: int) -> None:
    """Refuse a body by its announced length, before it is read. ``rest_bytes``: that it may have beside the content.
    Raises BodyTooLarge, and InvalidRequest where the tenant may not store so much."""
    announced = call.announced_bytes
    if announced > store.config.max_file_bytes + rest_bytes:
        raise _too_large(store.config.max_file_bytes)
    await store.check_room(call.principal.tenant, max(0, announced - rest_bytes))


def disk_failed(error: OSError) -> Overloaded:
    return refusals.disk_failed(error.strerror or str(error), is_full=is_full(error))


class Content:
    """The content of a file that arrives: onto the disk, piece by piece. Call ``close`` in any case.

    Raises OSError, and BodyTooLarge beyond jobs.max_file_bytes.
    """

    def __init__(self, store: JobStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._upload: Upload = store.folder.upload(store.gateway, new_id("file-"))
        self._waiting: list[bytes] = []
        self._num_waiting = 0
        self._is_finished = False
        self.num_bytes = 0

    @property
    def id(self) -> str:
        return self._upload.name

    async def add(self, data: bytes) -> None:
        if not data:
            return
        self.num_bytes += len(data)
        self._store.arriving(self._tenant, len(data))
        if self.num_bytes > self._store.config.max_file_bytes:
            raise _too_large(self._store.config.max_file_bytes)
        self._waiting.append(data)
        self._num_waiting += len(data)
        if self._num_waiting >= PIECE:
            await self._write()

    async def _write(self) -> None:
        data, self._waiting, self._num_waiting = b"".join(self._waiting), [], 0
        if data:
            await asyncio.to_thread(self._upload.write, data)

    async def finish(self) -> None:
        """Give it its name; durable when it returns."""
        await self._write()
        await asyncio.to_thread(self._upload.finish)
        self._is_finished = True

    def close(self) -> None:
        """Remove what is not finished."""
        self._store.arriving(self._tenant, -self.num_bytes)
        if not self._is_finished:
            self._upload.abort()


class _Receiving:
    """A form that arrives."""

    def __init__(self, store: JobStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._content: Content | None = None
        self._digest = hashlib.sha256()
        self._filename = ""
        self._field: str | None = None  # that arrives
        self._is_file = False  # it is the file that arrives
        self._fields: dict[str, str] = {}
        self._value = b""

    async def take(self, event: object) -> None:
        if isinstance(event, Begin):
            self._begin(event)
        elif isinstance(event, Data):
            if self._is_file:
                await self._add(event.data)
            else:
                self._value += event.data
                if len(self._value) > _MAX_FIELD_BYTES:
                    raise invalid(self._field or "", f"The field {shown(self._field)} is longer than 1 KiB.")
        elif self._is_file:
            self._is_file = False
        else:
            assert self._field is not None, "a part began"
            self._fields[self._field] = self._value.decode("utf-8", "replace")

    def _begin(self, part: Begin) -> None:
        if part.filename is None and part.name != "file":
            if part.name in self._fields:
                raise invalid(part.name, f"The field {shown(part.name)} is there twice; send it once.")
            self._field, self._value = part.name, b""
            return
        if part.name != "file" or self._content is not None:
            raise invalid(part.name, "The form must have one file, in the field 'file'.", "invalid_form")
        name = (part.filename or "file").replace("\\", "/").rpartition("/")[2]
        self._filename = printable(name, _MAX_NAME_CHARS)
        self._content = Content(self._store, self._tenant)
        self._is_file = True

    async def _add(self, data: bytes) -> None:
        assert self._content is not None, "its part began"
        if not self._content.num_bytes:
            reason = refuse_binary(data[:4096])
            if reason is not None:
                raise invalid("file", reason, "invalid_file")
        self._digest.update(data)
        await self._content.add(data)

    async def finish(self) -> Received:
        content = self._content
        if content is None:
            raise invalid("file", "The form has no file; send one in the field 'file'.", "missing_required_parameter")
        if not content.num_bytes:
            raise invalid("file", "The file is empty; send one with a request on each line.", "empty_file")
        await content.finish()
        return Received(content.id, self._filename, content.num_bytes, self._fields, self._digest.digest())

    def close(self) -> None:
        if self._content is not None:
            self._content.close()


async def body_of(call: Call, max_bytes: int, timeout_s: float, max_file_bytes: int) -> AsyncGenerator[bytes, None]:
    """The parts of a body as they arrive. Raises BodyTooLarge, BodyTimeout, ClientLeft."""
    began = clock.now()
    is_last = False
    while not is_last:
        left_s = began + timeout_s + call.request_bytes / SLOWEST_BODY - clock.now()
        try:
            async with asyncio.timeout(min(left_s, BODY_IDLE_TIMEOUT_S)):
                data, is_last = await call.read()
        except TimeoutError:
            raise BodyTimeout(
                f"The body did not arrive in time ({bytes_text(call.request_bytes)} of it did); send it faster, or "
                "raise server.body_timeout_s."
            ) from None
        call.request_bytes += len(data)
        if call.request_bytes > max_bytes:
            raise _too_large(max_file_bytes)
        yield data


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is larger than {bytes_text(most)} (jobs.max_file_bytes); divide it into several.",
        param="file",
        code="file_too_large",
    )


async def pieces_of(folder: Folder, name: str) -> AsyncGenerator[bytes, None]:
    """The content of a file. Raises StoredNotFound where it is gone."""
    try:
        file = await asyncio.to_thread(folder.content, name)
    except FileNotFoundError:
        raise refusals.lost_content(name) from None
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece
