"""A listener that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tests.gateway.grpc.running import GrpcRunning, running


@pytest.fixture(scope="module")
def listening() -> Iterator[GrpcRunning]:
    with running() as server:
        yield server


@pytest.fixture
def server(listening: GrpcRunning) -> GrpcRunning:
    return listening.reset()


@pytest.fixture(scope="module")
def connected(listening: GrpcRunning) -> Iterator[grpc.Channel]:
    with listening.channel() as channel:
        yield channel
