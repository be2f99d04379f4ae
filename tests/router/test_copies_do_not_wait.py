"""Copies of requests in the router: they are dispatched at once or refused, and no event tells of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.worker.tiny_backend import letters
from tests.worker.watching import ask, outputs_of, serving, text_of, until, worker

from inferd.errors import Overloaded
from inferd.events import RequestRefused
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import RANKS, GenerateRequest


def copy_of(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request, id=f"copy-{request.id}", priority=RANKS["batch"], idempotent=False, is_copy=True
    )


def refused(router: Router) -> None:
    with pytest.raises(Overloaded) as caught:
        open_stream(router, copy_of(ask(name="refused")))
    assert caught.value.code == "copy_dropped"


def test_a_copy_is_answered_like_a_request_and_counted_as_none() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            outputs = await outputs_of(open_stream(router, copy_of(ask(max_tokens=5))))
            assert text_of(outputs) == letters(5)
            assert not witness.ended()
            await outputs_of(open_stream(router, ask()))
            assert [event.request_id for event in witness.ended()] == ["r"]

    asyncio.run(scenario())


def test_a_copy_is_refused_while_no_worker_is_ready_and_while_requests_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with serving(until_ready=False) as (router, witness):
            refused(router)
            await until(lambda: router.models()[0].replicas_ready == 1, "the replica is ready")
            capacity = worker(router).capacity
            held = [open_stream(router, ask(f"gate={gate}", name=f"held-{i}")) for i in range(capacity)]
            refused(router)
            waiting = open_stream(router, ask(name="waiting"))
            assert router.models()[0].waiting == 1
            refused(router)
            assert router.models()[0].waiting == 1, "the request was not displaced"
            gate.touch()
            for stream in (*held, waiting):
                assert text_of(await outputs_of(stream)) == letters(4)
            assert not [event for event in witness.events if isinstance(event, RequestRefused)]

    asyncio.run(scenario())


def test_a_copy_whose_worker_dies_or_refuses_is_not_tried_again() -> None:
    async def scenario() -> None:
        async with serving(replicas=2) as (router, witness):
            (end,) = [output.end for output in await outputs_of(open_stream(router, copy_of(ask("die"))))]
            assert end is not None
            assert end.failure is not None
            assert (end.outcome, end.failure.kind) == ("failed", "worker_died")
            (end,) = [output.end for output in await outputs_of(open_stream(router, copy_of(ask("refused"))))]
            assert end is not None
            assert end.failure is not None
            assert end.failure.kind == "overloaded"
            assert witness.count("died") == 1

    asyncio.run(scenario())
