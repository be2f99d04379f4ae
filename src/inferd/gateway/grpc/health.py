"""grpc.health.v1.Health: what balancers and Kubernetes' gRPC probes ask. The server is asked for, not its models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from grpc_health.v1 import health, health_pb2

from inferd.gateway.grpc.calls import SERVICE, Context

SERVICE_NAME: Final[str] = health.SERVICE_NAME


class Health(health.aio.HealthServicer):
    """Of the whole server (the empty name) and of the inference service, which are the same."""

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        super().__init__()
        self._is_serving = is_serving
        self._told: bool | None = None

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        await self._tell()
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return answer

    async def follow(self, every_s: float) -> None:
        """Keep those who watch informed."""
        while True:
            await self._tell()
            await asyncio.sleep(every_s)

    async def _tell(self) -> None:
        is_serving = self._is_serving()
        if is_serving == self._told:
            return
        self._told = is_serving
        statuses = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self.set(name, statuses.SERVING if is_serving else statuses.NOT_SERVING)
