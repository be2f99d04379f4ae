"""A gateway that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.fakes import Running, running


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture
def server(shared_server: Running) -> Running:
    return shared_server.reset()
