"""Commands that want texts find the server that runs, ask it, and say which it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from inferd.cli.endpoint import find_endpoint
from inferd.cli.main import main
from inferd.errors import Unavailable


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def port(data_dir: Path) -> Iterator[int]:
    """A server on a port of its own, of a model that predicts and one that chats."""
    file = data_dir / "inferd.yaml"
    file.write_text("server: {port: 0}\nmodels: {digits: {source: demo-digits}, talker: {source: demo-draft}}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(data_dir)}
    command = [sys.executable, "-m", "inferd", "serve", str(file), "--log-format", "text"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield next(
            int(line.split("ready at ")[1].split()[0].rpartition(":")[2]) for line in process.stdout if "ready" in line
        )
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(autouse=True)
def here(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(data_dir))
    for name in ("INFERD_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_generate_asks_the_server_that_runs_and_says_so(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--raw"], ["--port", str(port)], ["--model", "talker"]):
        assert main(["generate", "Hello", "--max-tokens", "4", *words]) == 0
        said = capsys.readouterr()
        assert said.err == f"Asking talker, the server with port {port}.\n"
        assert said.out.strip()


def test_chat_asks_the_server_that_runs(
    port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    assert main(["chat"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Talking to talker, the server with port {port}.")
    assert len(said.splitlines()) > 1


def test_a_name_that_the_server_does_not_have_is_told_before_the_conversation(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--model", "tlaker"]) == 1
    said = capsys.readouterr()
    assert 'The model "tlaker" does not exist; this server has: digits, talker.' in said.err
    assert "Talking to" not in said.out
    assert main(["chat", "--model", "digits"]) == 1
    said = capsys.readouterr()
    assert "digits does not answer conversations; use inferd predict digits --input VALUE." in said.err
    assert main(["generate", "Hi", "--model", "digits"]) == 1
    assert "digits does not write texts; use inferd predict digits --input VALUE." in capsys.readouterr().err
    assert "Talking to" not in said.out


def test_a_model_that_cannot_answer_is_told_before_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as away:
        away.bind(("127.0.0.1", 0))  # and does not listen
        source = f"openai:http://127.0.0.1:{away.getsockname()[1]}/v1"
        file = tmp_path / "inferd.yaml"
        file.write_text(f"server: {{port: 0}}\nmodels: {{far: {{source: '{source}'}}}}\n")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "inferd", "serve", str(file), "--log-format", "text"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(line.split("listens at ")[1].split()[0] for line in server.stdout if "listens at" in line)
                monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path))
                for words in ([], ["--url", url], ["--model", "far"]):
                    assert main(["chat", *words]) == 1
                    said = capsys.readouterr()
                    assert "far cannot answer at the server " in said.err
                    assert "now (replica 0 is unreachable); try again later" in said.err
                    assert "Talking to" not in said.out
            finally:
                server.terminate()
                server.communicate(timeout=30)


class _Deaf:
    """A model during whose load Ctrl-C comes, and is dropped by what is imported."""

    def __init__(self, source: str) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


@pytest.mark.parametrize("words", [["chat", "demo"], ["generate", "--model", "./elsewhere", "Hello"]])
def test_a_ctrl_c_that_an_import_dropped_ends_the_load(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.llm.LLM", _Deaf)
    assert main(words) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_bench_measures_the_server_that_runs(port: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "--concurrency",
        "1",
        "--requests",
        "1",
        "--warmup",
        "0",
        "--output-len",
        "4",
        "--output",
        str(tmp_path / "b"),
    ]
    assert main(["bench", *words]) == 0
    assert capsys.readouterr().err == f"Testing the server at http://127.0.0.1:{port}.\n"
    report = json.loads((tmp_path / "b.json").read_text())
    assert (report["url"], report["model"]) == (f"http://127.0.0.1:{port}", "talker")


def test_bench_refuses_a_name_that_the_server_does_not_have(
    port: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for where in ([], ["--port", str(port)], ["demo-draft"]):
        words = ["--model", "tlaker", "--warmup", "0", "--requests", "1", "--concurrency", "1"]
        assert main(["bench", *where, *words, "--output", str(tmp_path / "b")]) == 1
        names = "demo-draft" if where == ["demo-draft"] else "digits, talker"
        assert f'The model "tlaker" does not exist; this server has: {names}.' in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()


def test_a_port_at_which_nothing_runs_is_an_error_and_no_second_model(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["chat"], ["generate", "Hello"], ["bench"]):
        assert main([*words, "--port", "1"]) == 1
        assert f"running: port {port}" in capsys.readouterr().err
    with pytest.raises(Unavailable, match="No server with port 1 answers"):
        find_endpoint(None, 1, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat", "./nowhere"], "There is no file or folder ./nowhere; check the path."),
        (["generate", "Hello", "--model", "no/where.onnx"], "There is no file or folder no/where.onnx"),
        (
            ["chat", "demo-digits"],
            "makes predictions and writes no text (onnxruntime_onnx); serve it with inferd serve demo-digits",
        ),
    ],
)
def test_a_source_that_writes_no_text_is_refused_before_torch_is_imported(words: list[str], said: str) -> None:
    code = f"import sys; from inferd.cli.main import main; main({words!r}); print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
    assert said in done.stderr
