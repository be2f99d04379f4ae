"""The console in the hands of hostile clients, models and pages, and of a person with two tabs or with keys alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.console.browser import Demo, Tab, expect
from tests.http_server import answering
from tests.tiers import THOROUGH

pytestmark = pytest.mark.timeout(300)

MARKUP = "<img src=x onerror=document.title='broken'>"
HOSTILE = "a\u202eb" + MARKUP + "\u200b"
PAGES = ("overview", "playground", "models", "requests", "keys", "events", "sign-in")


# -- addresses -----------------------------------------------------------------------------------


@THOROUGH
@THOROUGH
def test_an_address_that_is_broken_leads_to_a_page(page: Any, server: Demo) -> None:
    for address, title in {
        "console/#/constructor": "Overview",
        "console/#/__proto__/x": "Overview",
        "console/#/requests/%": "Request %",
        "console/#/requests/%3Cimg%20src%3Dx%3E": "Request <img src=x>",
        "console/#/playground/%E2%80%AEx": "Playground",
        "docs#%": "HTTP API",
        "docs#<img src=x>": "HTTP API",
    }.items():
        page.goto("about:blank")
        page.goto(server.url + address)
        page.get_by_role("heading", level=1, name=title).wait_for()
        assert page.locator("main img").count() == 0
    page.get_by_role("button", name="Send").wait_for()


# -- two tabs ------------------------------------------------------------------------------------


@THOROUGH
def test_a_sign_out_and_a_sign_in_in_one_tab_are_ones_in_the_other(tab: Tab, server: Demo) -> None:
    one = tab.sign_in(server.admin)
    other = tab.context.new_page()
    other.goto(server.url + "console/#/keys")
    other.get_by_role("button", name="Create a key").wait_for()
    one.get_by_role("button", name="Sign out").click()
    other.get_by_role("heading", level=1, name="Sign in").wait_for()
    one.get_by_label("API key").fill(server.viewer)
    one.get_by_role("button", name="Sign in").click()
    other.get_by_text("This page needs a key with the scope admin").wait_for()
    expect(other.locator("footer")).to_contain_text("watchers")
    other.get_by_text("Live", exact=True).wait_for()


# -- texts of clients and models -----------------------------------------------------------------


def test_texts_of_clients_stay_texts(page: Any, server: Demo) -> None:
    named = {"tenant": "ops", "name": MARKUP, "scopes": ["infer"], "rpm": 1000}
    assert server.call("POST", "admin/keys", {**named, "name": HOSTILE}).status_code == 400
    made = server.call("POST", "admin/keys", named)
    assert made.status_code == 201, made.text
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
    for _ in range(2):  # one id for two requests
        headers = {"authorization": f"Bearer {made.json()['key']}", "x-request-id": "twice-told"}
        assert server.post("v1/completions", body, headers).status_code == 200
    assert server.post("v1/completions", {**body, "model": HOSTILE}, headers).status_code == 404
    page.goto(server.url + "console/#/keys")
    page.get_by_role("row").filter(has_text="<img src=x").first.wait_for()
    page.goto(server.url + "console/#/requests")
    expect(page.get_by_role("row").filter(has_text="twice-told").filter(has_text="200")).to_have_count(2)
    page.get_by_role("link", name="twice-told").first.click()
    page.get_by_role("heading", name="Where the time went").wait_for()
    assert page.locator("img[src=x]").count() == 0
    assert page.title() != "broken"


@THOROUGH
def test_a_tool_call_with_any_index_is_one_call(page: Any, server: Demo) -> None:
    sent: list[Any] = []
    streams: list[str] = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        body = streams.pop() if streams else "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.goto(server.url + "console/#/playground/demo")
    page.route("**/v1/chat/completions", answer)
    for index in ("__proto__", 1_000_000_000, -1, "constructor"):
        part = {"index": index, "id": HOSTILE, "function": {"name": HOSTILE, "arguments": '{"a": 1}'}}
        chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [part, part]}, "finish_reason": "tool_calls"}]}
        streams.append(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
        page.get_by_label("Message").fill("Weather?")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("heading", name="The model asks for tools").wait_for()
        page.get_by_label("Result of").fill("none")
        with page.expect_response("**/v1/chat/completions"):
            page.get_by_role("button", name="Send the results").click()
        page.locator(".turn.tool").wait_for()
        (call,) = sent[-1]["messages"][-2]["tool_calls"]
        function = {"name": HOSTILE * 2, "arguments": '{"a": 1}' * 2}
        assert call == {"id": HOSTILE, "type": "function", "function": function}
        page.get_by_role("button", name="Clear").click()
        page.locator(".turn").first.wait_for(state="detached")
    assert page.evaluate("Object.prototype.id === undefined && Array.prototype.id === undefined")


def fulfilling(answer: dict[str, Any]) -> Callable[[Any], None]:
    return lambda route: route.fulfill(**answer)


@THOROUGH
def test_a_broken_stream_ends_and_the_page_goes_on(page: Any, server: Demo) -> None:
    page.goto(server.url + "console/#/playground/demo")
    for stream in (
        "data: {broken\n\n",
        'data: {"choices": 5}\n\n',
        'data: {"choices": [{"delta": {"content": {"toString": 1}}}]}\n\n',
        'data: {"error": {"message": "<img src=x>"}}\n\n',
        "data: null\n\n",
        "\x00\xff" * 1000,
    ):
        answer = {"status": 200, "content_type": "text/event-stream", "body": stream}
        page.route("**/v1/chat/completions", fulfilling(answer))
        page.get_by_label("Message").fill("Hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").wait_for(state="detached")
        page.unroute("**/v1/chat/completions")
        page.get_by_label("Message").fill("Again")
        page.get_by_role("button", name="Send").click()
        page.locator(".turn.assistant").last.get_by_text("tokens, end: ").wait_for()
        assert page.locator("main img").count() == 0
        page.get_by_role("button", name="Clear").click()
        page.locator(".turn").first.wait_for(state="detached")


# -- keys without scopes, pages of other origins -------------------------------------------------


def test_a_viewer_asks_for_nothing_that_it_may_not_have(tab: Tab, server: Demo) -> None:
    page = tab.sign_in(server.viewer)
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status in (401, 403) else None)
    for name in PAGES:
        page.goto(f"{server.url}console/#/{name}")
        page.get_by_role("heading", level=1).wait_for()
    page.get_by_text("Live", exact=True).wait_for()
    assert refused == []


@contextmanager
def foreign_page(script: str) -> Iterator[str]:
    """The address of a page of another origin on the same site: another port of the same host."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = f"<!doctype html><title>foreign</title><script>{script}</script>".encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(content)

    with answering(Page) as port:
        yield f"http://127.0.0.1:{port}/"


def test_a_page_of_another_origin_does_and_reads_nothing_with_the_session(tab: Tab, server: Demo) -> None:
    tab.sign_in(server.admin)
    (cookie,) = tab.context.cookies()
    script = f"""
      const base = {server.url!r};
      const ways = [
        fetch(base + "admin/drain", {{method: "POST", credentials: "include", mode: "no-cors"}}),
        fetch(base + "admin/models/digits/unload", {{method: "POST", credentials: "include", mode: "no-cors"}}),
        fetch(base + "console/session", {{method: "DELETE", credentials: "include"}}),
        fetch(base + "admin/keys", {{credentials: "include"}}).then((answer) => answer.text()),
        fetch(base + "console/session", {{credentials: "include"}}).then((answer) => answer.text()),
        new Promise((done, failed) => {{
          const source = new EventSource(base + "console/live", {{withCredentials: true}});
          source.onmessage = done; source.onopen = done; source.onerror = () => (source.close(), failed());
        }}),
      ];
      Promise.allSettled(ways).then((found) => {{
        document.title = "read " + found.filter((one) => one.status === "fulfilled" && one.value && one.value.type !== "opaque").length;
      }});
    """
    foreign = tab.context.new_page()
    statuses: dict[str, int] = {}
    foreign.on("response", lambda answer: statuses.update({answer.request.method + answer.url: answer.status}))
    with foreign_page(script) as url:
        foreign.goto(url)
        expect(foreign).to_have_title("read 0")
    asked = {name.replace(server.url, " "): status for name, status in statuses.items()}
    for name in ("POST admin/drain", "POST admin/models/digits/unload"):
        assert asked[name] in (401, 403), asked
    assert tab.context.cookies() == [cookie]
    tab.page.reload()
    tab.page.get_by_role("button", name="Sign out").wait_for()
    status = server.call("GET", "admin/status").json()
    assert status["status"] == "serving"
    assert {model["name"]: model["state"] for model in status["models"]}["digits"] == "ready"


def test_the_console_in_a_frame_of_another_page_shows_nothing(tab: Tab, server: Demo) -> None:
    tab.sign_in(server.admin)
    foreign = tab.context.new_page()
    script = f"onload = () => (document.body.innerHTML = '<iframe src={server.url}console/></iframe>')"
    with foreign_page(script) as url, foreign.expect_event("requestfailed") as failed:
        foreign.goto(url)
    assert failed.value.url == server.url + "console/"
    assert "BLOCKED_BY_RESPONSE" in failed.value.failure


# -- keys alone ----------------------------------------------------------------------------------


def test_a_person_without_a_mouse_signs_in_chats_and_asks_before_an_unload(tab: Tab, server: Demo) -> None:
    page = tab.open("")
    page.get_by_label("API key").wait_for()
    page.keyboard.press("Tab")  # Skip to the content
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type(server.admin)
    page.keyboard.press("Enter")
    expect(page.locator("h1:focus")).to_have_text("Overview")
    for key in "gp":
        page.keyboard.press(key)
    expect(page.locator("h1:focus")).to_have_text("Playground")
    page.get_by_label("Message").wait_for()
    page.get_by_label("Message").focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Control+Enter")
    page.get_by_text("first token").wait_for()
    expect(page.get_by_label("Message")).to_be_focused()
    page.get_by_role("link", name="Models").focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1:focus")).to_have_text("Models")
    unload = page.get_by_role("button", name="Unload digits", exact=True)
    unload.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    for _ in range(4):  # the focus stays in the dialog, or in the browser's own bar
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    expect(unload).to_be_focused()


# -- a server that goes away ---------------------------------------------------------------------


def test_a_page_that_did_not_load_is_loaded_again(page: Any, server: Demo) -> None:
    page.route("**/pages/events.js", lambda route: route.abort())
    page.get_by_role("link", name="Events").click()
    page.get_by_role("alert").filter(has_text="This page did not load").wait_for()
    page.unroute("**/pages/events.js")
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("heading", level=1, name="Events").wait_for()


@pytest.mark.soak
def test_a_restart_of_the_server_leads_to_the_sign_in_and_back(browser: Any, tmp_path: Path) -> None:
    server = Demo(tmp_path)
    tab = Tab(browser, server)
    try:
        server.await_ready()
        page = tab.sign_in(server.admin)
        for name in ("playground/demo", "models"):
            page.goto(f"{server.url}console/#/{name}")
            title = "Playground" if "play" in name else "Models"
            page.get_by_role("heading", level=1, name=title).wait_for()
            page.get_by_text("Live", exact=True).wait_for()
            server.restart()
            page.get_by_role("heading", level=1, name="Sign in").wait_for()
            assert page.url.endswith(name)
            page.get_by_label("API key").fill(server.admin)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_text("Live", exact=True).wait_for()
            page.get_by_role("heading", level=1, name=title).wait_for()
        assert [line for line in tab.complaints if "ERR_" not in line] == []
    finally:
        tab.context.close()
        server.close()
