"""Sign-in: a key for a cookie that counts for this server's own pages, as long as the key is valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running
from tests.server_process import running as process

from inferd import clock
from inferd.config import Config, ServerConfig
from inferd.gateway.console import sessions
from inferd.gateway.console.sessions import MAX_FAILURES, MAX_SESSIONS_OF_KEY, Sessions
from inferd.state.folder import make_folder
from inferd.state.open import open_database
from inferd.tenancy.keys import KeySpec, create_key
from inferd.tenancy.principal import OPERATOR, OpenDoor, Principal

KEYS = {
    "sk-user": Principal(key_id="user", tenant="team", scopes=frozenset(("infer", "models"))),
    "sk-view": Principal(key_id="view", tenant="ops", scopes=frozenset(("models", "metrics"))),
    "sk-admin": Principal(key_id="admin", tenant="ops", scopes=frozenset(("admin",))),
}
CONFIG = Config(server=ServerConfig(port=0, grace_s=1, cors_origins=("https://friend.example",)), models={})
SAME = {"sec-fetch-site": "same-origin"}


@contextmanager
def served(config: Config = CONFIG, **app: Any) -> Iterator[Running]:
    app = {"door": FakeDoor(dict(KEYS)), "control": FakeControl(), **app}
    with running(FakeRouter("a"), config, **app) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served() as started:
        yield started


def ask(server: Running, method: str, path: str, cookie: str | None = None, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if cookie is not None:
        headers["cookie"] = cookie
    server.http.cookies.clear()  # each test says what is sent
    return server.http.request(method, server.url + path, headers=headers)


def origin(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def sign_in(server: Running, key: str = "sk-admin", **headers: str) -> httpx.Response:
    headers = {"origin": origin(server), **{name.replace("_", "-"): value for name, value in headers.items()}}
    server.http.cookies.clear()
    return server.http.post(server.url + "/console/session", json={"key": key}, headers=headers)


def cookie_of(answer: httpx.Response) -> str:
    assert answer.status_code == 204, answer.text
    return answer.headers["set-cookie"].partition(";")[0]


def attributes(answer: httpx.Response) -> dict[str, str]:
    parts = [part.strip().partition("=") for part in answer.headers["set-cookie"].split(";")[1:]]
    return {name.lower(): value for name, _, value in parts}


# -- the cookie ----------------------------------------------------------------------------------


def test_a_key_becomes_a_cookie_that_no_script_and_no_other_site_uses(server: Running) -> None:
    answer = sign_in(server)
    assert (answer.status_code, answer.content) == (204, b"")
    assert attributes(answer) == {"path": "/", "max-age": "43200", "httponly": "", "samesite": "Strict"}
    name, _, value = cookie_of(answer).partition("=")
    assert name == f"inferd-session-{server.port}"
    assert len(value) >= 43
    assert "sk-admin" not in answer.headers["set-cookie"]
    assert answer.headers["cache-control"] == "no-store"
    assert cookie_of(sign_in(server)) != cookie_of(answer)


def test_the_cookie_needs_https_where_the_page_came_by_it(server: Running) -> None:
    answer = sign_in(server, origin="https://llm.example", sec_fetch_site="same-origin")
    assert "secure" in attributes(answer)
    assert "secure" in attributes(sign_in(server, x_forwarded_proto="https"))


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({"x_forwarded_prefix": "/llm/"}, "/llm/"),
        ({"x_forwarded_prefix": "/a/b"}, "/a/b/"),
        ({"referer": "https://llm.example/some/prefix/console/?x#y"}, "/some/prefix/"),
        ({"referer": "https://llm.example/console/"}, "/"),
        ({"x_forwarded_prefix": "/a; Domain=evil.example"}, "/"),
        ({"x_forwarded_prefix": "//evil.example"}, "/evil.example/"),
        ({"x_forwarded_prefix": "/" + "a/" * 400}, "/"),
        ({"referer": "https://[broken/console/"}, "/"),
    ],
)
def test_the_cookie_is_for_the_prefix_at_which_the_browser_sees_the_server(
    server: Running, headers: dict[str, str], path: str
) -> None:
    answer = sign_in(server, **headers)
    assert attributes(answer)["path"] == path
    assert set(attributes(answer)) == {"path", "max-age", "httponly", "samesite"} | (
        {"secure"} if "https" in str(headers.get("origin")) else set()
    )
    shown = ask(server, "GET", "/console/session", **headers).json()
    assert shown["prefix"] == path


# -- what it opens -------------------------------------------------------------------------------


def test_a_session_has_the_scopes_of_its_key(server: Running) -> None:
    for key, status in (("sk-user", 403), ("sk-view", 403), ("sk-admin", 200)):
        cookie = cookie_of(sign_in(server, key))
        assert ask(server, "GET", "/v1/models", cookie).status_code == 200
        assert ask(server, "GET", "/admin/status", cookie).status_code == status
    shown = ask(server, "GET", "/console/session", cookie_of(sign_in(server, "sk-view"))).json()
    assert shown["auth"] == "required"
    assert shown["signed_in"] is True
    assert shown["tenant"] == "ops"
    assert shown["scopes"] == ["models", "metrics"]
    assert shown["version"]


def test_without_a_session_nothing_is_told(server: Running) -> None:
    expected = {"auth": "required", "signed_in": False, "tenant": "", "scopes": [], "version": "", "prefix": "/"}
    assert ask(server, "GET", "/console/session").json() == expected
    assert ask(server, "GET", "/console/session", f"inferd-session-{server.port}=unknown").json() == expected


def test_a_server_without_keys_says_what_it_allows() -> None:
    with running(FakeRouter("a"), CONFIG, door=OpenDoor()) as server:
        shown = ask(server, "GET", "/console/session").json()
        assert (shown["auth"], shown["signed_in"], shown["scopes"]) == ("off", False, ["infer", "models", "metrics"])
        assert sign_in(server, "sk-anything").status_code == 401
        # A cookie from another day is no credential, and no obstacle.
        assert ask(server, "GET", "/v1/models", f"inferd-session-{server.port}=old").status_code == 200


def test_a_key_in_a_header_goes_before_the_cookie(server: Running) -> None:
    cookie = cookie_of(sign_in(server, "sk-admin"))
    assert ask(server, "GET", "/admin/status", cookie, authorization="Bearer sk-user").status_code == 403
    assert ask(server, "GET", "/admin/status", cookie, x_api_key="sk-wrong").status_code == 401


def test_a_request_of_a_model_is_charged_to_the_session_key(server: Running) -> None:
    cookie = cookie_of(sign_in(server, "sk-user"))
    body = {"model": "a", "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"cookie": cookie, **SAME}
    for _ in range(3):  # from the second on the head is cached
        answer = server.http.post(server.url + "/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text


# -- its end -------------------------------------------------------------------------------------


def test_a_sign_out_ends_the_session_at_the_server(server: Running) -> None:
    cookie = cookie_of(sign_in(server))
    answer = ask(server, "DELETE", "/console/session", cookie, **SAME)
    assert answer.status_code == 204
    assert attributes(answer)["max-age"] == "0"
    after = ask(server, "GET", "/v1/models", cookie)
    assert (after.status_code, after.json()["error"]["code"]) == (401, "session_expired")
    assert ask(server, "DELETE", "/console/session").status_code == 204


def test_a_session_ends_with_its_key_also_where_the_head_is_cached() -> None:
    door = FakeDoor(dict(KEYS))
    with served(door=door) as server:
        headers = {"cookie": cookie_of(sign_in(server, "sk-user")), **SAME}
        body = {"model": "a", "messages": [{"role": "user", "content": "Hello"}]}

        def post() -> httpx.Response:
            return server.http.post(server.url + "/v1/chat/completions", json=body, headers=headers)

        assert [post().status_code for _ in range(3)] == [200, 200, 200]
        del door.keys["sk-user"]
        assert post().status_code == 401
        door.keys.update(KEYS)
        assert post().status_code == 401  # a session that ended does not come back


def test_a_session_ends_after_its_time_by_either_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        for name in ("now", "wall"):
            cookie = cookie_of(sign_in(server))
            assert ask(server, "GET", "/v1/models", cookie).status_code == 200
            real = getattr(clock, name)
            with monkeypatch.context() as patch:
                patch.setattr(clock, name, lambda real=real: real() + 43_201)
                assert ask(server, "GET", "/v1/models", cookie).json()["error"]["code"] == "session_expired"
            assert ask(server, "GET", "/v1/models", cookie).status_code == 401


def test_a_second_sign_in_replaces_the_first_session(server: Running) -> None:
    first = cookie_of(sign_in(server))
    second = cookie_of(sign_in(server, cookie=first))
    assert ask(server, "GET", "/v1/models", first).status_code == 401
    assert ask(server, "GET", "/v1/models", second).status_code == 200


def test_the_table_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 100)
    table, door = Sessions(), FakeDoor({f"sk-{n}": Principal(key_id=str(n)) for n in range(110)})
    own = [table.begin("1", 60.0) for _ in range(MAX_SESSIONS_OF_KEY + 1)]
    assert len(table) == MAX_SESSIONS_OF_KEY
    assert table.principal(own[-1], door).key_id == "1"
    for number in range(110):
        table.begin(str(number), 60.0)
    assert len(table) == 100


# -- pages of other origins ----------------------------------------------------------------------

FOREIGN = [
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},  # another port, or a sibling domain: the browser sends the cookie
    {"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:1"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "https://friend.example"},
    {"origin": "https://friend.example", "sec_fetch_site": "cross-site"},
    {"origin": "null"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_the_cookie_does_nothing_for_a_page_of_another_origin(server: Running, headers: dict[str, str]) -> None:
    cookie = cookie_of(sign_in(server))
    for path in ("/v1/models", "/admin/status", "/console/live", "/metrics"):
        answer = ask(server, "GET", path, cookie, **headers)
        assert answer.status_code == 401, (path, answer.text)
        assert "access-control-allow-credentials" not in answer.headers
    shown = ask(server, "GET", "/console/session", cookie, **headers).json()
    assert shown["signed_in"] is False
    assert ask(server, "POST", "/admin/drain", cookie, **headers).status_code in (401, 403)
    assert ask(server, "GET", "/v1/models", cookie).status_code == 200


def test_an_unsafe_method_needs_a_sign_of_its_origin(server: Running) -> None:
    cookie = cookie_of(sign_in(server))
    for method, path in (("POST", "/admin/reload"), ("DELETE", "/admin/keys/key0"), ("POST", "/v1/chat/completions")):
        assert ask(server, method, path, cookie).status_code == 401
        assert ask(server, method, path, cookie, sec_fetch_site="none").status_code == 401
    assert ask(server, "POST", "/admin/reload", cookie, **SAME).status_code == 200
    assert ask(server, "POST", "/admin/reload", cookie, origin=origin(server)).status_code == 200
    assert ask(server, "DELETE", "/console/session", cookie).status_code == 204
    assert ask(server, "GET", "/v1/models", cookie).status_code == 200  # the session did not end


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, True),
        ({"origin": "https://evil.example"}, True),
        ({"origin": "https://evil.example", "sec_fetch_site": "cross-site"}, True),
        ({"origin": "https://friend.example"}, True),
        (SAME, False),
    ],
)
def test_a_websocket_uses_the_cookie_for_an_own_page_alone(
    server: Running, headers: dict[str, str], is_refused: bool
) -> None:
    cookie = cookie_of(sign_in(server))
    upgrade = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13"}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    server.http.cookies.clear()
    answer = server.http.get(
        server.url + "/v2/models/nothing/stream",
        headers={**upgrade, "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "cookie": cookie, **given},
    )
    assert (answer.status_code in (401, 403)) is is_refused, answer.text
    assert is_refused or answer.status_code == 404  # past the key: there is no such model


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"])
def test_a_form_of_another_page_does_nothing(server: Running, content_type: str) -> None:
    cookie = cookie_of(sign_in(server))
    for headers in ({}, {"origin": "https://evil.example"}, {"origin": "null"}):
        given = {"cookie": cookie, "content-type": content_type, **headers}
        for path in ("/admin/reload", "/console/session", "/v1/chat/completions", "/admin/keys"):
            answer = server.http.post(server.url + path, content=b'{"key": "sk-user"}', headers=given)
            assert answer.status_code in (401, 403, 415), (path, answer.text)
            assert "set-cookie" not in answer.headers
    assert ask(server, "GET", "/admin/status", cookie).status_code == 200


def test_a_page_of_another_origin_cannot_sign_in(server: Running) -> None:
    for headers in FOREIGN[2:]:
        answer = sign_in(server, "sk-user", **headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), headers
    preflight = ask(
        server, "OPTIONS", "/console/session", origin="https://friend.example", access_control_request_method="POST"
    )
    assert "access-control-allow-origin" not in preflight.headers


def test_a_name_that_a_foreign_dns_server_points_here_is_refused(server: Running) -> None:
    for method, path in (("POST", "/console/session"), ("GET", "/console/session"), ("GET", "/console/")):
        given = {"host": "evil.example", "origin": "http://evil.example", **SAME}
        answer = server.http.request(method, server.url + path, headers=given, json={"key": "sk-user"})
        assert answer.status_code == 403, path


# -- wrong keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"key": 1}', b'{"key": "a", "more": 1}', b"[", b'{"key": "' + b"a" * 5000]
)
def test_a_body_that_is_no_sign_in_is_refused(server: Running, body: bytes) -> None:
    headers = {"content-type": "application/json", "origin": origin(server)}
    answer = server.http.post(server.url + "/console/session", content=body, headers=headers)
    assert answer.status_code in (400, 413), answer.text


def test_many_wrong_keys_are_followed_by_a_wait() -> None:
    with served() as server:
        for _ in range(MAX_FAILURES):
            wrong = sign_in(server, "sk-wrong")
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("sk-wrong", "sk-admin"):
            refused = sign_in(server, key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sign_ins")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask(server, "GET", "/v1/models", authorization="Bearer sk-user").status_code == 200


def test_failures_are_forgotten_in_time_and_their_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Sessions()
    for number in range(sessions.MAX_ADDRESSES + 5):
        for _ in range(MAX_FAILURES):
            table.failed(str(number))
    assert len(table._failures) == sessions.MAX_ADDRESSES
    with pytest.raises(Exception, match="Too many sign-ins"):
        table.check_failures("100")
    table.check_failures("0")  # the oldest address was forgotten
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now + sessions.FAILURES_S + 1)
    table.check_failures("100")


# -- a whole server ------------------------------------------------------------------------------


def test_an_operator_signs_in_acts_and_is_signed_out_by_the_end_of_the_key(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data")
    database = open_database(None, folder)
    try:
        made = create_key(database, KeySpec(tenant="ops", scopes=("admin",)), by=OPERATOR, now=clock.wall())
    finally:
        database.close()
    with process(data_dir=folder) as server, httpx.Client(base_url=server.url, timeout=10) as browser:
        assert browser.get("/admin/status").status_code == 401
        page = {"origin": server.url, "sec-fetch-site": "same-origin"}
        assert browser.post("/console/session", json={"key": made.key}, headers=page).status_code == 204
        assert browser.get("/admin/status", headers=page).json()["models"][0]["name"] == "tiny"
        new = browser.post("/admin/keys", json={"tenant": "ops"}, headers=page)
        assert new.status_code == 201
        assert browser.delete(f"/admin/keys/{made.info.id}", headers=page).status_code == 200
        ended = browser.get("/admin/status", headers=page)
        assert (ended.status_code, ended.json()["error"]["code"]) == (401, "session_expired")
        assert browser.post("/console/session", json={"key": made.key}, headers=page).status_code == 401
