"""Commands that ask a server below a path of a reverse proxy, by the address that its users have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.prefix_proxy import KINDS, below_path
from tests.server_process import Server, running

from inferd import clock
from inferd.cli.main import main
from inferd.state.folder import make_folder
from inferd.state.open import open_database
from inferd.tenancy.keys import KeySpec, create_key
from inferd.tenancy.principal import OPERATOR


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("proxied") / "data")


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    database = open_database(None, folder)
    try:
        spec = KeySpec(tenant="ops", scopes=("infer", "models", "metrics", "admin"))
        return create_key(database, spec, by=OPERATOR, now=clock.wall()).key
    finally:
        database.close()


@pytest.fixture(scope="module")
def server(folder: Path, key: str) -> Iterator[Server]:
    with running({"auth": "required"}, data_dir=folder) as started:
        yield started


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_asked_below_the_path_of_a_proxy(
    server: Server, key: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with below_path(kind, server.port, tmp_path) as base:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
        answer = httpx.post(base + "v1/completions", json=body, headers={"x-api-key": key}, timeout=30)
        assert answer.status_code == 200
        request_id = answer.headers["x-request-id"]
        for url in (base, base.rstrip("/"), base + "v1"):
            assert main(["status", "--json", "--url", url, "--key", key]) == 0
            assert json.loads(capsys.readouterr().out)["models"][0]["name"] == "tiny"
        assert main(["top", "--once", "--json", "--url", base, "--key", key]) == 0
        assert "tiny" in json.loads(capsys.readouterr().out)["models"]
        assert main(["why", request_id, "--json", "--url", base, "--key", key]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == request_id
        assert main(["models", "list", "--url", base, "--key", key]) == 0
        assert "tiny" in capsys.readouterr().out
        outside = base.replace("/llm/", "/other")
        assert main(["status", "--url", outside, "--key", key]) == 1


@pytest.mark.parametrize("url", ["http://host:99999", "http://[broken", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 1
    assert "is not a server's URL" in capsys.readouterr().err
