"""Asking servers that run: what is said when there is none, when it refuses, and when it babbles."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from inferd import clock
from inferd.app.control_socket import open_control_socket
from inferd.cli.main import main
from inferd.cli.running.control import find_server, model_path
from inferd.cli.running.status import duration, exit_code, planned_text, rendered, restarts_text
from inferd.errors import InferdError, InvalidRequest, Unauthenticated, Unavailable
from inferd.gateway.control import ModelReport, ReplicaReport, ServerReport, UnloadReport


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path))
    monkeypatch.delenv("INFERD_API_KEY", raising=False)
    return tmp_path


@contextmanager
def saying(data_dir: Path, answer: bytes, port: int = 8000) -> Iterator[list[bytes]]:
    """A control socket with one answer for every request; yields the requests that it got."""
    made = open_control_socket(data_dir, port)
    asked: list[bytes] = []
    made.listener.setblocking(True)

    def serve() -> None:
        while True:
            try:
                connection, _ = made.listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if request:  # else the client only tried whether a server listens
                    asked.append(request)
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        made.listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        made.close()


def http(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)


def test_without_a_server_the_folder_and_the_remedy_are_named(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["status"], ["reload"], ["drain"], ["models", "list"], ["models", "unload", "m"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert f"nothing answers in {data_dir / 'run'}" in said
        assert "inferd serve" in said


def test_a_server_that_was_killed_is_not_among_those_that_run(data_dir: Path) -> None:
    left = open_control_socket(data_dir, 8000)
    left.listener.close()
    with saying(data_dir, http(200, b"{}"), port=8001):
        assert find_server(None, None, None, None).name == "with port 8001"
        with pytest.raises(Unavailable, match="running: port 8001"):
            find_server(8000, None, None, None)


def test_what_a_server_refuses_is_said_in_its_words(data_dir: Path) -> None:
    body = b'{"error": {"message": "There is no such model.", "code": "model_not_found"}}'
    with (
        saying(data_dir, http(404, body)) as asked,
        pytest.raises(InvalidRequest, match=r"^There is no such model\.$"),
    ):
        find_server(None, None, None, None).post(model_path("org/name", "load"), ModelReport)
    assert asked[0].startswith(b"POST /admin/models/org%2Fname/load HTTP/1.1")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http(401, b"{}"), Unauthenticated),
        (http(503, b"<html>"), Unavailable),
        (http(200, b"[1"), Unavailable),
        (http(200, b'{"status": 3}'), Unavailable),
        (b"nonsense\r\n\r\n", Unavailable),
        (b"", Unavailable),
    ],
)
def test_an_answer_that_is_none_is_an_error_in_a_sentence(
    data_dir: Path, answer: bytes, kind: type[InferdError]
) -> None:
    with saying(data_dir, answer), pytest.raises(kind):
        find_server(None, None, None, None).get("/admin/status", ServerReport)


def test_what_became_of_every_replica_is_said(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = ReplicaReport(index=0, kind="local", name="m/0", state="ready")
    failed = ReplicaReport(index=1, kind="local", name="m/1", state="failed", detail="No file.")
    loaded = ModelReport(
        name="m",
        state="degraded",
        load="startup",
        replicas_ready=1,
        replicas=[ready, failed],
        waiting=0,
        in_flight=0,
        memory_bytes=2**20,
    )
    for word in ("load", "restart"):
        with saying(data_dir, http(200, msgspec.json.encode(loaded))):
            assert main(["models", word, "m"]) == 1
        said = capsys.readouterr().out
        assert said == "m is degraded: 1 of 2 replicas ready, 1.00 MiB.\n  m/1 failed: No file.\n"
    with saying(data_dir, http(200, msgspec.json.encode(UnloadReport(model="m", freed_bytes=0)))):
        assert main(["models", "unload", "m"]) == 0
    assert capsys.readouterr().out == "m is unloaded.\n"


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a server's URL"):
        find_server(None, None, url, None)


def test_a_server_elsewhere_that_is_away_is_told_without_numbers_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "does not answer (Connection refused); check that it runs, and the address." in capsys.readouterr().err


def test_a_server_elsewhere_gets_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[bytes] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(65536))
                connection.sendall(http(403, b'{"error": {"message": "Not you."}}'))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("INFERD_API_KEY", "sk-inf-a-b")
        assert main(["status", "--url", url]) == 1
        thread.join()
    assert b"authorization: Bearer sk-inf-a-b\r\n" in asked[0]


def report(status: str, *states: str) -> ServerReport:
    models = [
        ModelReport(
            name=f"m{index}",
            state=state,  # type: ignore[arg-type]
            load="startup",
            replicas_ready=1,
            replicas=[],
            waiting=0,
            in_flight=0,
        )
        for index, state in enumerate(states)
    ]
    return ServerReport(
        status=status,  # type: ignore[arg-type]
        version="1",
        pid=1,
        started_at=0,
        config_path=None,
        last_reload=None,
        reload_since=None,
        memory_bytes=0,
        memory_budget_bytes=None,
        models=models,
    )


def test_the_exit_code_says_whether_every_model_can_be_used() -> None:
    assert exit_code(report("serving", "ready", "degraded", "unloaded")) == 0
    assert exit_code(report("serving", "ready", "failed")) == 1
    assert exit_code(report("draining", "ready")) == 1


def shown(report: ServerReport) -> str:
    written = io.StringIO()
    Console(file=written, width=200).print(rendered(report, "here"))
    return written.getvalue()


def test_everything_about_a_model_stands_beside_it_from_110_columns_on() -> None:
    model = ModelReport(
        name="m",
        state="ready",
        load="startup",
        replicas_ready=1,
        replicas=[],
        waiting=0,
        in_flight=0,
        memory_bytes=0,
        not_batched="its rows",
    )
    whole = msgspec.structs.replace(report("serving"), models=[model])

    def lines(width: int) -> list[str]:
        written = io.StringIO()
        Console(file=written, width=200).print(rendered(whole, "here", width))
        return written.getvalue().splitlines()

    assert lines(110) == lines(200)
    assert lines(109) == lines(80) != lines(110)


def test_the_role_and_the_ranks_of_a_replica_are_shown() -> None:
    (model,) = report("serving", "ready").models
    replicas = [
        ReplicaReport(index=i, kind="local", name=f"m/{i}", state="ready", role=role, layout=f"{i + 2} ranks")
        for i, role in enumerate(("prefill", "decode"))
    ]
    written = io.StringIO()
    whole = msgspec.structs.replace(report("serving"), models=[msgspec.structs.replace(model, replicas=replicas)])
    Console(file=written, width=200).print(rendered(whole, "here", 200))
    assert "2 ranks, prefill" in written.getvalue()
    assert "3 ranks, decode" in written.getvalue()


def test_a_status_of_eighty_columns_cuts_nothing() -> None:
    name = "organisation-with-a-long-name/and-a-model-too"
    replicas = [
        ReplicaReport(
            index=place, kind="local", name=f"{name}/{place}", state="ready", pid=12345, artifact="0a1b2c3d4e5f"
        )
        for place in range(2)
    ]
    model = ModelReport(
        name=name,
        state="unavailable",
        load="startup",
        replicas_ready=2,
        replicas=replicas,
        waiting=1000,
        in_flight=64,
        memory_bytes=300 * 2**20,
        not_batched="the output 'y' has no first dimension of its own",
        num_threads=2,
    )
    written = io.StringIO()
    whole = msgspec.structs.replace(report("serving"), models=[model])
    Console(file=written, width=80).print(rendered(whole, "here", 80))
    text = written.getvalue()
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for cell in (
        "unavailable",
        "2/2",
        "1000",
        "300 MiB",
        "process 12345, files 0a1b2c3d4e5f",
        "2 threads",
        "one request",
    ):
        assert cell in words


@pytest.mark.parametrize("width", [80, 200])
def test_the_notation_of_calls_and_the_result_of_its_check_are_shown(width: int) -> None:
    told = "hermes (calls <tool_call>; from the chat template), a call and two calls parsed back"
    whole = report("serving", "ready", "ready")
    models = [msgspec.structs.replace(whole.models[0], answer_format=told), whole.models[1]]
    written = io.StringIO()
    Console(file=written, width=width).print(rendered(msgspec.structs.replace(whole, models=models), "here", width))
    words = " ".join(written.getvalue().split())
    assert words.count("tool calls and reasoning: ") == 1
    assert told in words


def test_a_reload_that_takes_its_time_is_shown() -> None:
    quiet = report("serving", "ready")
    assert "reload" not in shown(quiet)
    assert "reload   under way for 1 min 1" in shown(msgspec.structs.replace(quiet, reload_since=clock.wall() - 61))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (125, "2 min 5 s"), (3600, "1 h"), (90061, "1 d 1 h"), (-1, "0 s")],
)
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_restarts_are_counted_as_people_count() -> None:
    assert [restarts_text(count) for count in (0, 1, 2)] == ["", "1 restart", "2 restarts"]


@pytest.mark.parametrize(
    ("taken", "planned", "text"),
    [
        (0, 10**9, ""),
        (10**9, 0, ""),
        (2**30, 2 * 2**30, "50 % of the planned 2.00 GiB"),
        (1050 * 2**20, 1000 * 2**20, "105 % of the planned 0.98 GiB"),
        (1060 * 2**20, 1000 * 2**20, "106 % of the planned 0.98 GiB, MORE THAN PLANNED"),
    ],
)
def test_a_replica_is_compared_with_its_plan(taken: int, planned: int, text: str) -> None:
    replica = ReplicaReport(index=0, kind="local", name="m/0", state="ready", memory_bytes=taken, planned_bytes=planned)
    assert planned_text(replica) == text
