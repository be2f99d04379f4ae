"""Requests about texts for a model whose versions share them out: the user keeps its version, a key its rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.fakes import FakeRouter, Running, post, running
from tests.gateway.openai.test_text_requests import TextRouter, text_model

from inferd.config import Config, ModelConfig, VersionsConfig

VERSIONS = VersionsConfig(aliases={"stable": 1}, weights={"1": 50, "2": 50})


def config(name: str) -> Config:
    return Config(
        models={
            f"{name}@1": ModelConfig(source="x", version="1", versions=VERSIONS),
            name: ModelConfig(source="x", version="2", versions=VERSIONS),
        }
    )


@pytest.fixture
def texts() -> Iterator[tuple[Running, TextRouter]]:
    router = TextRouter()
    router.statuses = [text_model("vectors@1", "embed"), text_model("vectors", "embed")]
    with running(router, config=config("vectors")) as server:
        yield server, router


def test_a_user_keeps_its_version_and_a_failed_version_gets_no_users(texts: tuple[Running, TextRouter]) -> None:
    server, router = texts

    def asked(**fields: str) -> str:
        return str(post(server, "/v1/embeddings", {"model": "vectors", "input": "a", **fields}).json()["model"])

    seen = {user: asked(user=user) for user in map(str, range(12))}
    assert set(seen.values()) == {"vectors", "vectors@1"}
    assert seen == {user: asked(user=user) for user in seen}
    assert {asked(model="vectors@stable") for _ in range(8)} == {"vectors@1"}
    router.statuses[1].state = "failed"
    assert {asked(user=user) for user in seen} == {"vectors@1"}


def test_a_chat_keeps_its_version() -> None:
    router = FakeRouter("chat@1", "chat")
    with running(router, config=config("chat")) as server:

        def asked(user: str) -> str:
            body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "user": user}
            post(server, "/v1/chat/completions", body)
            return router.last.model

        seen = {user: asked(user) for user in map(str, range(12))}
        assert set(seen.values()) == {"chat", "chat@1"}
        assert seen == {user: asked(user) for user in seen}


def test_a_request_that_names_its_model_looks_at_no_other(texts: tuple[Running, TextRouter]) -> None:
    """Else every model that is served would make every request slower."""
    server, router = texts
    for name in ("vectors", "vectors@1", "vectors@stable"):
        assert post(server, "/v1/embeddings", {"model": name, "input": "a"}).status_code == 200
    assert router.num_listed == 0
    assert post(server, "/v1/embeddings", {"model": "other", "input": "a"}).status_code == 404
    assert router.num_listed == 1  # for the sentence that names them
