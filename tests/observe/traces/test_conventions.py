"""The table of attributes: complete, on its page, and about every route that asks a model for something."""

from __future__ import annotations

from pathlib import Path

from inferd.gateway.anthropic.batch_routes import MESSAGE_BATCH_ROUTES
from inferd.gateway.openai.job_routes import JOB_ROUTES
from inferd.gateway.responses.stored_routes import STORED_ROUTES
from inferd.gateway.routes import ROUTES
from inferd.observe.traces.conventions import TABLE, table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "traces.md"


def test_every_route_to_a_model_has_an_operation_and_no_other_route_has() -> None:
    kept = {route.pattern for route in STORED_ROUTES}  # answered from the state database
    kept |= {
        route.pattern for route in (*JOB_ROUTES, *MESSAGE_BATCH_ROUTES)
    }  # the requests of a batch have operations of their own
    refused = {"/v1/responses/compact"}  # its answer tells what to do instead
    asks = {
        route.pattern
        for route in ROUTES
        if route.scope == "infer" and route.pattern not in kept | refused and not route.pattern.startswith("/v1/async")
    }
    assert {route.pattern for route in ROUTES if route.operation is not None} == asks


def test_a_key_has_one_row() -> None:
    keys = [row.key for row in TABLE]
    assert sorted(set(keys)) == sorted(keys)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text("utf-8")
