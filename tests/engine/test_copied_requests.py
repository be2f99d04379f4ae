"""Copies of requests in the engine: the answers of requests, and an end of their own where memory is short."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.engine.test_engine import Build, build, make_request, run

from inferd.engine.engine import Engine
from inferd.types import RANKS, GenerateRequest

__all__ = ["build"]  # a fixture


def copy_of(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request, id=f"copy-{request.id}", priority=RANKS["batch"], is_copy=True, tenant="(copies)"
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 3, "n": 3},
        {"n": 2, "use_beam_search": True},
    ],
)
def test_a_copy_has_the_answer_of_its_request_and_leaves_the_cache_as_it_is(
    build: Build, sampling: dict[str, Any]
) -> None:
    engine = build()
    request = make_request("r", "The quick brown fox jumps over", max_tokens=12, **sampling)
    (answer,) = run(engine, request)
    cached = sorted(engine.pool._by_key.items())
    (copy,) = run(engine, copy_of(request))
    for index in range(request.sampling.n):
        assert (copy.text(index), copy.finish(index)) == (answer.text(index), answer.finish(index))
    assert copy.report is not None
    assert copy.report.cached_tokens == 0
    assert sorted(engine.pool._by_key.items()) == cached
    assert engine.pool.num_free == engine.pool.num_blocks - len(cached)


def test_a_copy_without_memory_ends_by_name_and_requests_are_not_preempted_for_it(build: Build) -> None:
    def answered(engine: Engine, *copies: GenerateRequest) -> list[str]:
        requests = [make_request(f"r{i}", f"{i} little boxes", max_tokens=20, arrived_at=float(i)) for i in range(3)]
        found = run(engine, *copies, *requests)
        for copy in found[: len(copies)]:
            assert copy.end is not None
            assert copy.end.failure is not None
            assert (copy.end.outcome, copy.end.failure.code) == ("failed", "copy_dropped")
        ends = [one.end for one in found[len(copies) :]]
        assert [end.outcome for end in ends if end is not None] == ["done"] * 3
        return [one.text() for one in found[len(copies) :]]

    alone = answered(build(num_blocks=36))
    copies = [copy_of(make_request(f"c{i}", "A long copied prompt " * 2, max_tokens=60)) for i in range(2)]
    assert answered(build(num_blocks=36), *copies) == alone
