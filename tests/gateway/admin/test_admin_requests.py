"""``GET /admin/requests`` and ``inferd why`` explain the calls that the key may see, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, post, running

from inferd.cli.main import main
from inferd.observe.sink import Observer
from inferd.observe.why import Explainer
from inferd.tenancy.principal import LOCAL, Principal, Scope

_ADMIN: frozenset[Scope] = frozenset(("admin",))
_INFER: frozenset[Scope] = frozenset(("infer",))
KEYS = {
    "a": Principal(key_id="a", tenant="team-a", scopes=_INFER),
    "b": Principal(key_id="b", tenant="team-b", scopes=_INFER),
    "a-admin": Principal(key_id="a-admin", tenant="team-a", scopes=_ADMIN),
    "a-metrics": Principal(key_id="a-metrics", tenant="team-a", scopes=frozenset(("metrics",))),
    "local": LOCAL,
    "operator": Principal(key_id="operator", scopes=_ADMIN),
}
URL = "/v1/completions"


@pytest.fixture
def server() -> Iterator[Running]:
    explainer = Explainer(100)
    with running(FakeRouter("tiny"), door=FakeDoor(KEYS), explainer=explainer) as started:
        observer = Observer(models=["tiny"], explainer=explainer, access_log=False)
        started.app.emit = observer.emit
        yield started
        observer.close()


def ask(server: Running, path: str, key: str = "operator") -> httpx.Response:
    return server.http.get(server.url + "/admin/requests" + path, headers={"x-api-key": key})


def complete(server: Running, key: str, **headers: str) -> httpx.Response:
    return post(server, URL, {"prompt": "hi", "max_tokens": 3}, **{"x-api-key": key, **headers})


def test_the_id_in_the_header_of_an_answer_finds_its_record(server: Running) -> None:
    answer = complete(server, "a")
    assert answer.status_code == 200
    record = ask(server, "/" + answer.headers["x-request-id"]).json()
    assert (record["tenant"], record["key_id"], record["route"], record["status"]) == ("team-a", "a", URL, 200)
    assert sum(part["seconds"] for part in record["parts"]) == pytest.approx(record["total_s"], rel=1e-3)
    assert ask(server, "/" + answer.json()["id"]).json()["id"] == record["id"]


def test_a_refused_request_is_found_among_the_errors(server: Running) -> None:
    refused = post(server, URL, {"prompt": 3}, **{"x-api-key": "a"})
    (line,) = ask(server, "?order=errors").json()["data"]
    assert line["id"] == refused.headers["x-request-id"]
    assert line["error_code"] == refused.json()["error"]["code"]
    assert line["status"] == 400


def test_a_tenants_key_sees_the_calls_of_its_tenant_alone(server: Running) -> None:
    own, other = (complete(server, key).headers["x-request-id"] for key in "ab")
    assert ask(server, f"/{own}", "a-admin").status_code == 200
    assert ask(server, f"/{other}", "a-admin").status_code == 404
    assert ask(server, f"/{other}").status_code == 200
    seen = ask(server, "", "a-admin").json()["data"]
    assert [line["id"] for line in seen] == [own]
    assert ask(server, "?tenant=team-b", "a-admin").json() == {"data": []}
    assert [line["id"] for line in ask(server, "").json()["data"]] == [other, own]
    assert [line["id"] for line in ask(server, "?tenant=team-a").json()["data"]] == [own]
    assert ask(server, "", "a").status_code == 403
    assert ask(server, "", "a-metrics").json()["data"] == seen
    assert ask(server, f"/{other}", "a-metrics").status_code == 404


def test_without_a_key_the_calls_without_a_tenant_are_seen_and_no_others(server: Running) -> None:
    own, other = (complete(server, key).headers["x-request-id"] for key in ("local", "b"))
    assert [line["id"] for line in ask(server, "", "local").json()["data"]] == [own]
    assert ask(server, f"/{other}", "local").status_code == 404


def test_an_unknown_id_is_answered_with_the_remedy(server: Running) -> None:
    answer = ask(server, "/none")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("request_not_found", "id")
    assert "x-request-id" in error["message"]


def test_calls_with_the_same_id_are_listed_the_newest_first(server: Running) -> None:
    for _ in range(3):
        complete(server, "a", **{"x-request-id": "again"})
    listed = ask(server, "?id=again").json()["data"]
    assert len(listed) == 3
    arrivals = [line["arrived_at"] for line in listed]
    assert arrivals == sorted(arrivals, reverse=True)
    assert ask(server, "/again").json()["arrived_at"] == arrivals[0]
    before = ask(server, f"?before={arrivals[0]!r}").json()["data"]
    assert [line["arrived_at"] for line in before] == arrivals[1:]
    assert len(ask(server, "?order=slowest&limit=2").json()["data"]) == 2


@pytest.mark.parametrize(
    "query", ["?limit=0", "?limit=201", "?order=best", "?limit=1&limit=2", "?before=x", "?colour=red", "?model=%ff"]
)
def test_a_query_that_is_not_valid_is_refused(server: Running, query: str) -> None:
    answer = ask(server, query)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].endswith((".", "once."))


def test_the_command_shows_a_sentence_a_waterfall_and_tables(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    request_id = complete(server, "a", **{"x-request-id": "mine"}).headers["x-request-id"]
    where = ["--url", server.url, "--key", "operator"]
    assert main(["why", request_id, *where]) == 0
    said = capsys.readouterr().out
    assert "mine · tiny" in said
    assert "tenant team-a" in said
    assert "receive" in said
    assert "total" in said
    assert main(["why", request_id, "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "mine"
    for options in ([], ["--recent"], ["--model", "tiny"], ["--tenant", "team-a"]):
        assert main(["why", *options, *where]) == 0
        assert "mine" in capsys.readouterr().out, options
    assert main(["why", "--errors", *where]) == 0
    assert "No such request" in capsys.readouterr().err
    assert main(["why", "--recent", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["id"] == "mine"


def test_a_narrow_terminal_shows_ids_and_sentences_whole(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(server, "a", **{"x-request-id": "abbd072ef93c653f0ab875ea"})
    sentence = ask(server, "").json()["data"][0]["sentence"]
    narrow = Console(width=80, soft_wrap=True, force_terminal=True, color_system=None)
    monkeypatch.setattr("inferd.cli.terminal.console", lambda: narrow)
    assert main(["why", "--url", server.url, "--key", "operator"]) == 0
    found = capsys.readouterr().out
    assert "abbd072ef93c653f0ab875ea" in found
    assert sentence in found


def test_the_command_says_what_is_wrong(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--url", server.url, "--key", "operator"]
    assert main(["why", "none", *where]) == 1
    assert "No call with the id" in capsys.readouterr().err
    assert main(["why", "none", "--errors", *where]) == 2
    assert main(["why", "--recent", "--errors", *where]) == 2
