"""The console's files: one table, entity tags, gzip, and the headers of every answer below /console."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, running

from inferd.config import Config, ServerConfig
from inferd.gateway.console.assets import Assets
from inferd.gateway.console.parts import Console
from inferd.tenancy.principal import Principal

CONFIG = Config(server=ServerConfig(port=0, grace_s=1), models={})
PAGE = "<!doctype html><title>inferd</title>" + "<p>text</p>" * 200
DOCS = "<!doctype html><title>API</title>"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("package") / "assets"
    (folder / "vendor").mkdir(parents=True)
    (folder / "index.html").write_text(PAGE)
    (folder / "docs.html").write_text(DOCS)
    (folder / "main.js").write_text("export const one = 1;\n")
    (folder / "vendor" / "lib.js").write_text("export const two = 2;\n" * 100)
    (folder / ".hidden.js").write_text("secret")
    (folder / "notes.py").write_text("secret = 1")
    (folder.parent / "secret.js").write_text("secret")
    console = Console(CONFIG, assets=Assets(folder))
    door = FakeDoor({"sk-a": Principal(key_id="a", tenant="t")})
    with running(FakeRouter("a"), CONFIG, door=door, console=console) as started:
        yield started


def get(server: Running, path: str, **headers: str) -> httpx.Response:
    return server.http.get(server.url + path, headers=headers)


def test_the_page_and_its_files_need_no_key(server: Running) -> None:
    page = get(server, "/console/")
    assert (page.status_code, page.text) == (200, PAGE)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    script = get(server, "/console/assets/main.js")
    assert (script.status_code, script.text) == (200, "export const one = 1;\n")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert get(server, "/console/assets/vendor/lib.js").status_code == 200


def test_browsers_are_sent_to_the_console_by_a_relative_address(server: Running) -> None:
    start = get(server, "/", **BROWSER)
    assert (start.status_code, start.headers["location"], start.headers["vary"]) == (302, "console/", "accept")
    assert get(server, "/", accept="*/*").status_code == 401  # other clients get the short page, with a key
    assert get(server, "/console").headers["location"] == "console/"


def test_the_page_of_the_api_needs_no_key_and_has_the_policy_of_the_console(server: Running) -> None:
    page = get(server, "/docs")
    assert (page.status_code, page.text) == (200, DOCS)
    assert page.headers["content-security-policy"] == get(server, "/console/").headers["content-security-policy"]
    assert get(server, "/openapi.json").status_code == 401


def test_without_a_console_the_page_of_the_api_names_the_document() -> None:
    off = Config(server=ServerConfig(port=0, grace_s=1, console=False), models={})
    with running(FakeRouter("a"), off) as server:
        page = get(server, "/docs")
        assert (page.status_code, "openapi.json" in page.text, "<script" in page.text) == (200, True, False)
        assert get(server, "/", **BROWSER).status_code == 200


def test_an_answer_is_gzipped_where_that_is_accepted_and_smaller(server: Running) -> None:
    plain = get(server, "/console/", **{"accept-encoding": "identity"})
    zipped = get(server, "/console/", **{"accept-encoding": "br, gzip;q=0.5"})
    assert "content-encoding" not in plain.headers
    assert zipped.headers["content-encoding"] == "gzip"
    assert zipped.text == plain.text
    assert int(zipped.headers["content-length"]) < int(plain.headers["content-length"])
    assert plain.headers["vary"] == zipped.headers["vary"] == "accept-encoding"
    assert plain.headers["etag"] != zipped.headers["etag"]
    assert "content-encoding" not in get(server, "/console/", **{"accept-encoding": "gzip;q=0"}).headers
    assert "content-encoding" not in get(server, "/console/assets/main.js").headers  # too small


def test_a_client_that_has_a_file_gets_no_bytes_of_it(server: Running) -> None:
    for path in ("/console/", "/console/assets/vendor/lib.js"):
        first = get(server, path)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f'"other", W/{tag}', "*"):
            again = get(server, path, **{"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert get(server, path, **{"if-none-match": '"other"'}).status_code == 200


def test_head_has_the_headers_and_no_body(server: Running) -> None:
    full = get(server, "/console/assets/vendor/lib.js")
    head = server.http.head(server.url + "/console/assets/vendor/lib.js")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "content-encoding", "content-security-policy"):
        assert head.headers[name] == full.headers[name]


@pytest.mark.parametrize(
    "path",
    [
        "../secret.js",
        "..%2fsecret.js",
        "%2e%2e/secret.js",
        "vendor/../../secret.js",
        "vendor/../main.js",
        "./main.js",
        "/main.js",
        "vendor//lib.js",
        "%2fetc%2fpasswd",
        "main.js%00",
        "..\\secret.js",
        "vendor",
        "vendor/",
        ".hidden.js",
        "notes.py",
        "main.js/",
        "MAIN.JS",
    ],
)
def test_a_request_reaches_no_other_file(server: Running, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/console/assets/" + path)  # as it is: httpx would normalise it
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 404, body
        assert b"secret = 1" not in body
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/console"),
        ("GET", "/console/"),
        ("GET", "/console/assets/main.js"),
        ("GET", "/console/assets/nothing.js"),
        ("GET", "/console/session"),
        ("POST", "/console/session"),
        ("DELETE", "/console/session"),
        ("GET", "/console/live"),
        ("PUT", "/console/session"),
        ("OPTIONS", "/console/"),
    ],
)
def test_every_answer_has_the_policy(server: Running, method: str, path: str) -> None:
    answer = server.http.request(method, server.url + path)
    policy = {
        part.strip().partition(" ")[0]: part.strip() for part in answer.headers["content-security-policy"].split(";")
    }
    assert policy["default-src"] == "default-src 'none'"
    assert policy["script-src"] == "script-src 'self'"
    assert policy["style-src"] == "style-src 'self'"
    assert policy["frame-ancestors"] == "frame-ancestors 'none'"
    assert policy["require-trusted-types-for"] == "require-trusted-types-for 'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert {"camera=()", "microphone=()"} <= set(answer.headers["permissions-policy"].split(", "))
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert len(answer.headers.get_list("content-security-policy")) == 1


def test_a_server_without_a_console_has_no_route_of_it() -> None:
    config = Config(server=ServerConfig(port=0, grace_s=1, console=False), models={})
    with running(FakeRouter("a"), config) as server:
        for path in ("/console", "/console/", "/console/assets/main.js", "/console/session", "/console/live"):
            assert get(server, path).status_code == 404
        start = get(server, "/", **BROWSER)
        assert (start.status_code, start.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_a_package_without_the_page_says_so(tmp_path: Path) -> None:
    console = Console(CONFIG, assets=Assets(tmp_path / "nothing"))
    with running(FakeRouter("a"), CONFIG, console=console) as server:
        assert get(server, "/console/").json()["error"]["code"] == "route_not_found"
