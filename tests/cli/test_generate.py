"""What ``inferd generate`` asks of a server, or of a model in its own process, for each of its options."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

import pytest

from inferd.cli.endpoint import Endpoint
from inferd.cli.main import main
from inferd.types import JSON, SamplingParams

PLAIN: JSON = {"prompt": "Hello"}
CHAT: JSON = {"messages": [{"role": "user", "content": "Hello"}]}
TERSE: JSON = {"messages": [{"role": "system", "content": "Be terse."}, *CHAT["messages"]]}


class Asked(NamedTuple):
    path: str
    body: JSON


@contextmanager
def server(tasks: dict[str, str]) -> Iterator[tuple[str, list[Asked]]]:
    """A server of these models, with what each can do; and what it is asked."""
    asked: list[Asked] = []

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            if self.path == "/v1/models":
                self._send(200, "application/json", json.dumps({"data": [{"id": name} for name in tasks]}).encode())
            elif name in tasks:
                body = {"name": name, "parameters": {"tasks": tasks[name]}}
                self._send(200, "application/json", json.dumps(body).encode())
            else:
                self._send(404, "application/json", b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(Asked(self.path, body))
            chunks: list[JSON] = [{"choices": [{"delta": {"content": "Good"}}]}, {"choices": [{"text": " day"}]}]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}", asked
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        ([], "/v1/chat/completions", {"model": "talker", "max_tokens": 256, **CHAT}),
        (["--max-tokens", "3"], "/v1/chat/completions", {"model": "talker", "max_tokens": 3, **CHAT}),
        (
            ["--temperature", "0"],
            "/v1/chat/completions",
            {"model": "talker", "max_tokens": 256, "temperature": 0, **CHAT},
        ),
        (["--seed", "0"], "/v1/chat/completions", {"model": "talker", "max_tokens": 256, "seed": 0, **CHAT}),
        (["--system", "Be terse."], "/v1/chat/completions", {"model": "talker", "max_tokens": 256, **TERSE}),
        (["--raw"], "/v1/completions", {"model": "writer", "max_tokens": 256, **PLAIN}),
        (["--raw", "--model", "talker"], "/v1/completions", {"model": "talker", "max_tokens": 256, **PLAIN}),
        (["--model", "writer"], "/v1/completions", {"model": "writer", "max_tokens": 256, **PLAIN}),
        (["--model", "other"], "/v1/chat/completions", {"model": "other", "max_tokens": 256, **CHAT}),
    ],
)
def test_a_server_is_asked_for_what_the_options_say_and_for_nothing_else(
    words: Sequence[str], path: str, body: JSON, capsys: pytest.CaptureFixture[str]
) -> None:
    with server({"writer": "generate", "talker": "generate,chat"}) as (url, asked):
        assert main(["generate", "Hello", "--url", url, *words]) == 0
    assert asked == [Asked(path, {**body, "stream": True})]
    said = capsys.readouterr()
    assert said.out == "Good day\n"
    assert said.err == f"Asking {body['model']}, the server at {url}.\n"


@pytest.mark.parametrize("words", [["--raw"], ["--model", "writer"]])
def test_a_system_message_is_refused_where_there_is_no_conversation(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with server({"writer": "generate", "talker": "generate,chat"}) as (url, asked):
        assert main(["generate", "Hello", "--url", url, "--system", "Be terse.", *words]) == 2
    assert asked == []
    assert "--system needs a model with a chat template" in capsys.readouterr().err


class Model:
    """The model of the process: what it was opened with and asked for."""

    has_chat_template = True
    opened: list[str]
    asked: list[tuple[object, SamplingParams, tuple[str, ...]]]

    def __init__(self, source: str) -> None:
        self.opened.append(source)
        self.info = self
        self.max_model_len = 100

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.opened.append("closed")

    def stream(self, prompt: object, sampling: SamplingParams, *, explicit: tuple[str, ...]) -> Iterator[str]:
        self.asked.append((prompt, sampling, explicit))
        yield from ("Good", " day")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> type[Model]:
    """No server runs on this machine."""

    class Made(Model):
        opened = []
        asked = []

    monkeypatch.setattr("inferd.llm.LLM", Made)
    monkeypatch.setattr("inferd.cli.generate.find_endpoint", lambda url, port, key: None)
    return Made


@pytest.mark.parametrize(
    ("words", "prompt", "sampling", "explicit"),
    [
        ([], CHAT["messages"], {"max_tokens": 99}, ()),
        (["--max-tokens", "98"], CHAT["messages"], {"max_tokens": 98}, ()),
        (["--max-tokens", "100"], CHAT["messages"], {"max_tokens": 99}, ()),
        (["--temperature", "0"], CHAT["messages"], {"max_tokens": 99, "temperature": 0.0}, ("temperature",)),
        (["--seed", "7"], CHAT["messages"], {"max_tokens": 99, "seed": 7}, ()),
        (["--system", "Be terse."], TERSE["messages"], {"max_tokens": 99}, ()),
        (["--raw"], "Hello", {"max_tokens": 99}, ()),
    ],
)
def test_a_model_of_the_process_is_asked_for_what_the_options_say(
    words: Sequence[str],
    prompt: object,
    sampling: dict[str, Any],
    explicit: tuple[str, ...],
    model: type[Model],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "Hello", *words]) == 0
    assert model.opened == ["demo", "closed"]
    assert model.asked == [
        (prompt, SamplingParams(**{"temperature": 1.0, **sampling}), ("max_tokens", "seed", *explicit))
    ]
    said = capsys.readouterr()
    assert said.out == "Good day\n"
    assert said.err == "Loading demo into this process.\n"


def test_a_prompt_is_read_from_stdin_where_it_is_a_hyphen(
    model: type[Model], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, code in (("Hello", 0), (" \n", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["generate", "-"]) == code
    assert [prompt for prompt, _, _ in model.asked] == [CHAT["messages"]]
    assert "The prompt is empty" in capsys.readouterr().err


def test_a_model_without_a_chat_template_continues_the_prompt(
    model: type[Model], capsys: pytest.CaptureFixture[str]
) -> None:
    model.has_chat_template = False
    assert main(["generate", "Hello", "--model", "./here"]) == 0
    assert main(["generate", "Hello", "--system", "Be terse."]) == 2
    assert [prompt for prompt, _, _ in model.asked] == ["Hello"]
    assert model.opened == ["./here", "closed", "demo", "closed"]
    assert "--system needs a model with a chat template" in capsys.readouterr().err


def test_a_name_that_the_server_of_this_machine_does_not_serve_is_loaded_here(
    model: type[Model], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server({"talker": "generate,chat"}) as (url, asked):
        monkeypatch.setattr("inferd.cli.generate.find_endpoint", lambda *named: Endpoint("the server with port 1", url))
        assert main(["generate", "Hello", "--model", "./here"]) == 0
        assert model.opened == ["./here", "closed"]
        assert "as the server with port 1 does not serve it." in capsys.readouterr().err
        assert asked == []
        assert main(["generate", "Hello", "--model", "talker"]) == 0
        assert len(asked) == 1
