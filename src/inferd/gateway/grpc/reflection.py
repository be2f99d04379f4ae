"""grpc.reflection: the protocol's descriptors, for tools such as ``grpcurl``. v1 and v1alpha have the same messages."""

from __future__ import annotations

from typing import Final

from inferd.errors import InferdError
from inferd.gateway.grpc.calls import Calls
from inferd.gateway.grpc.protocol import File, Protocol, protocol
from inferd.gateway.grpc.rpc import RpcClosed, StreamRpc
from inferd.gateway.grpc.statuses import Status
from inferd.protowire import LENGTH, fields, number, sized, text

NAMES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
METHOD: Final = "ServerReflectionInfo"
MAX_BYTES: Final = 1024  # the limit of a request, which has one name

# Fields of a request (the kind of query), and fields of an answer.
_BY_NAME: Final = 3
_BY_SYMBOL: Final = 4
_BY_EXTENSION: Final = 5
_EXTENSIONS_OF: Final = 6
_LIST: Final = 7
_QUERY_FIELDS: Final = range(_BY_NAME, _LIST + 1)
_FILES: Final = 4
_SERVICES: Final = 6
_ERROR: Final = 7


class Reflection:
    """The method ServerReflectionInfo: answers a stream's requests one after the other."""

    name: Final = METHOD
    scope: Final = "public"
    operation: Final = None
    max_bytes: Final = MAX_BYTES

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def begin(self, rpc: StreamRpc) -> None:
        if self._calls.has_room(rpc):
            self._calls.spawn(rpc, self._serve(rpc))

    async def _serve(self, rpc: StreamRpc) -> None:
        try:
            while (request := await rpc.read()) is not None:
                await rpc.write(answer(protocol(), request))
        except RpcClosed:
            return
        except InferdError:
            rpc.fail(Status.INVALID_ARGUMENT, "The request is no ServerReflectionRequest; send one.")
            return
        rpc.close()


def answer(known: Protocol, request: bytes) -> bytes:
    """The ServerReflectionResponse to a request. Raises InvalidRequest."""
    host, query, name = b"", 0, ""
    for key, wire, start, end in fields(request, 0, len(request)):
        if wire != LENGTH:
            continue
        if key == 1:
            host = sized(1, request[start:end])
        elif key in _QUERY_FIELDS:  # of a oneof the last field counts
            query, name = key, text(request, start, end)
    return host + sized(2, request) + _answer(known, query, name)


def _answer(known: Protocol, query: int, name: str) -> bytes:
    if query == _BY_NAME:
        return _files(known, known.files.get(name), name)
    if query == _BY_SYMBOL:
        return _files(known, known.file_of(name), name)
    if query == _LIST:
        names = [name for file in known.files.values() for name in file.services]
        return sized(_SERVICES, b"".join([sized(1, sized(1, name.encode())) for name in sorted(names)]))
    if query:
        return _error(Status.NOT_FOUND, "There are no extensions.")
    return _error(Status.UNIMPLEMENTED, "The request asks for nothing that this server knows.")


def _files(known: Protocol, file: File | None, name: str) -> bytes:
    """The answer with a descriptor file and the files that it imports."""
    if file is None:
        return _error(Status.NOT_FOUND, f"There is no {name[:200]!r} here.")
    found: dict[str, File] = {}
    wanted = [file]
    while wanted:
        one = wanted.pop()
        if one.name not in found:
            found[one.name] = one
            wanted += [known.files[need] for need in one.needs]
    return sized(_FILES, b"".join([sized(1, one.content) for one in found.values()]))


def _error(status: Status, message: str) -> bytes:
    return sized(_ERROR, b"\x08" + number(status) + sized(2, message.encode()))
