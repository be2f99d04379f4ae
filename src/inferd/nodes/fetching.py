"""A file's way from the server into a node's cache: chunk by chunk, from where an earlier try ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from inferd.errors import ModelLoadError
from inferd.nodes.cache import Cache
from inferd.nodes.dialling import NodeOptions, RefusedError, connect
from inferd.nodes.files import chunk_digest
from inferd.nodes.frames import Connection
from inferd.nodes.messages import Chunk, Fetch, ModelFile, Refused, ToFetcher, Whole, framed, to_fetcher_decoder

SILENT_S: Final = 10.0
TRIES: Final = 5
RETRY_S: Final = 0.5


async def fetch(options: NodeOptions, key: str, file: ModelFile, cache: Cache, came: Callable[[int], None]) -> None:
    """Bring one file into the cache. ``came`` gets the bytes of each chunk.

    A connection that breaks is opened again, and the file continued. Raises ModelLoadError.
    """
    came(cache.part_size(file))
    for left in reversed(range(TRIES)):
        try:
            await _try(options, key, file, cache, came)
            return
        except (OSError, TimeoutError) as error:
            if not left:
                raise ModelLoadError(
                    f"The file {file.label} could not be brought from the server ({error or type(error).__name__}); "
                    "what came is kept, and the next try continues it."
                ) from None
        except RefusedError as error:
            raise ModelLoadError(f"The file {file.label} could not be brought from the server: {error}.") from None
        await asyncio.sleep(RETRY_S)


async def _try(options: NodeOptions, key: str, file: ModelFile, cache: Cache, came: Callable[[int], None]) -> None:
    """One connection. Raises OSError, TimeoutError, RefusedError, ModelLoadError."""
    receiver = _Receiver()
    await connect(options, lambda: receiver)
    offset = cache.part_size(file)
    if not offset:
        await asyncio.to_thread(cache.append, file, 0, b"")
    receiver.write(framed(Fetch(key, file.sha256, offset)))
    try:
        while True:
            async with asyncio.timeout(SILENT_S):
                message = await receiver.next()
            match message:
                case Chunk(at, data, digest) if at == offset and chunk_digest(data) == digest:
                    await asyncio.to_thread(cache.append, file, offset, data)
                    offset += len(data)
                    came(len(data))
                case Whole():
                    await asyncio.to_thread(cache.complete, file)
                    return
                case Refused(code, said):
                    raise RefusedError(code, said)
                case _:
                    raise ConnectionError("the connection ended, or its bytes are not those that were sent")
    finally:
        receiver.abort()


class _Receiver(Connection[ToFetcher]):
    """Chunks, read as fast as they are written to the disk."""

    def __init__(self) -> None:
        super().__init__(to_fetcher_decoder)
        self._messages: asyncio.Queue[ToFetcher | None] = asyncio.Queue()

    async def next(self) -> ToFetcher | None:
        """The next message; None: the connection ended."""
        if self.is_open and self.transport is not None and self._messages.empty():
            self.transport.resume_reading()
        return await self._messages.get()

    def handle(self, message: ToFetcher) -> None:
        self._messages.put_nowait(message)
        if self.is_open and self.transport is not None:
            self.transport.pause_reading()

    def closed(self, error: Exception | None) -> None:
        self._messages.put_nowait(None)
