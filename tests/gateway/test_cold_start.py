"""The header of KEDA's HTTP add-on: whether a request waited for a model that is loaded for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.fakes import FakeRouter, FakeStatus, Running, info, post, running

from inferd.config import Config, ModelConfig, ScalingConfig, ServerConfig
from inferd.errors import Overloaded
from inferd.gateway.upstream import ModelState

HEADER = "x-keda-http-cold-start"
MODELS = {
    "tiny": ModelConfig(source="demo"),
    "lazy": ModelConfig(source="demo", load="on_demand"),
    "scaled": ModelConfig(source="demo", scaling=ScalingConfig(min=0, max=2)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeRouter(*MODELS), Config(server=ServerConfig(port=0), models=MODELS)) as started:
        yield started


@pytest.mark.parametrize(
    ("model", "state", "value"),
    [
        ("tiny", "loading", None),
        ("lazy", "unloaded", "true"),
        ("lazy", "loading", "true"),
        ("lazy", "ready", "false"),
        ("lazy", "degraded", "false"),
        ("scaled", "unloaded", "true"),
        ("scaled", "ready", "false"),
    ],
)
def test_an_answer_says_whether_its_model_was_loaded_for_it(
    server: Running, model: str, state: ModelState, value: str | None
) -> None:
    # A refusal of the router ends the request at once, and comes after the header was chosen.
    server.router.refusal = Overloaded("full")
    server.router.statuses = [FakeStatus(name, state if name == model else "ready", info(name)) for name in MODELS]
    answer = post(server, "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 503
    assert answer.headers.get(HEADER) == value
