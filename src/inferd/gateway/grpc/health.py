"""grpc.health.v1.Health, for load balancers and Kubernetes' gRPC probes. It reports the server's health, not that of
models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from inferd.errors import InferdError
from inferd.gateway.grpc.calls import SERVICE, Calls
from inferd.gateway.grpc.rpc import RpcClosed, StreamRpc, UnaryRpc
from inferd.gateway.grpc.statuses import Status
from inferd.http.cost import PROTOBUF_FIELD
from inferd.protowire import LENGTH, fields, text

SERVICE_NAME: Final = "grpc.health.v1.Health"
_MAX_FIELDS: Final = 16
MAX_BYTES: Final = 1024  # the limit of a message, which has the name of a service

# Answers: field 1 is the status.
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_SERVICE_UNKNOWN: Final = b"\x08\x03"

_KNOWN: Final = frozenset(("", SERVICE))
_UNKNOWN: Final = f"There is no such service here; ask for {SERVICE}, or for none."


class Health:
    """The health of the server. The empty name and the inference service have the same."""

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        self._is_serving = is_serving
        self._last_status = is_serving()
        self._changed = asyncio.Event()

    def status(self) -> bytes:
        return _SERVING if self._is_serving() else _NOT_SERVING

    async def follow(self, every_s: float) -> None:
        """Check for changes every ``every_s`` seconds, until cancelled."""
        while True:
            self.notify_changes()
            await asyncio.sleep(every_s)

    def notify_changes(self) -> None:
        """Wake the ``Watch`` calls if the health has changed."""
        if self._is_serving() != self._last_status:
            self._last_status = not self._last_status
            self._changed.set()
            self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()


class Check:
    """The method Check: the health now, in one answer."""

    name: Final = "Check"
    scope: Final = "public"
    operation: Final = None
    max_bytes: Final = MAX_BYTES

    def __init__(self, health: Health) -> None:
        self._health = health

    def take(self, rpc: UnaryRpc, body: bytes) -> None:
        rpc.connection.charge(len(body) * PROTOBUF_FIELD)
        name = service_in(body)
        if name is None:
            rpc.fail(Status.INVALID_ARGUMENT, "The request is no HealthCheckRequest; send one.")
        elif name not in _KNOWN:
            rpc.fail(Status.NOT_FOUND, _UNKNOWN)
        else:
            rpc.finish(self._health.status(), b"")

    def given_up(self, rpc: UnaryRpc, num_bytes: int) -> None:
        """A health check is not logged."""

    def take_compressed(self, rpc: UnaryRpc, body: bytes) -> None:
        rpc.fail(Status.UNIMPLEMENTED, "A health check is not taken compressed; send it as it is.")


class Watch:
    """The method Watch: one answer now, and one with every change."""

    name: Final = "Watch"
    scope: Final = "public"
    operation: Final = None
    max_bytes: Final = MAX_BYTES

    def __init__(self, health: Health, calls: Calls) -> None:
        self._health = health
        self._calls = calls

    def begin(self, rpc: StreamRpc) -> None:
        if self._calls.has_room(rpc):
            self._calls.spawn(rpc, self._serve(rpc))

    async def _serve(self, rpc: StreamRpc) -> None:
        try:
            body = await rpc.read()
            name = service_in(body) if body is not None else None
            if name is None:
                rpc.fail(Status.INVALID_ARGUMENT, "The request is no HealthCheckRequest; send one.")
                return
            if name not in _KNOWN:
                await rpc.write(_SERVICE_UNKNOWN)
                await (
                    asyncio.get_running_loop().create_future()
                )  # an unknown service stays unknown: wait until the client disconnects
            while True:
                status = self._health.status()
                await rpc.write(status)
                while self._health.status() == status:
                    await self._health.changed()
        except RpcClosed:
            return


def service_in(body: bytes) -> str | None:
    """The service that a HealthCheckRequest names; None: the bytes are no HealthCheckRequest."""
    try:
        found = [
            text(body, start, end)
            for key, wire, start, end in fields(body, 0, len(body), _MAX_FIELDS)
            if (key, wire) == (1, LENGTH)
        ]
    except InferdError:
        return None
    return found[-1] if found else ""
