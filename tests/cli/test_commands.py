"""The command line from outside: help, mistakes in one sentence, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import httpx
import pytest
import skops.io
import yaml
from click.testing import CliRunner
from sklearn.ensemble import RandomForestClassifier
from tests.predict.row_models import cumulative_sum
from tests.tiers import THOROUGH

from inferd.cli.chat import converse
from inferd.cli.flags import MODEL_LEAVES, NODES_LEAVES, SERVER_LEAVES, flag_name, in_flags
from inferd.cli.main import COMMANDS, cli, main
from inferd.cli.serve import serve_config
from inferd.config import Config, ParallelConfig
from inferd.types import JSON


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferd", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_configuration_without_a_model_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("models: {}\n")
    done = run("serve", str(path))
    assert done.returncode == 1
    assert "names no model" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(cli, [name, "--help"])
    assert shown.exit_code == 0
    assert f"inferd {name}" in shown.output
    assert "Example" in shown.output


def test_no_two_settings_share_a_flag() -> None:
    names = [flag_name(leaf) for leaf in [*SERVER_LEAVES, *MODEL_LEAVES, *NODES_LEAVES]]
    assert len(names) == len(set(names))
    assert {"--port", "--max-model-len", "--max-num-seqs", "--kv-cache-memory"} <= set(names)


def test_flags_reach_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_SERVER__PORT", "9000")
    seen: list[Config] = []

    def remember(config: Config, source: object = None, known: object = (), words: object = None) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("inferd.cli.serve.run", remember)
    assert main(["serve", "--name", "m", "--kv-cache-memory", "1GiB", "--no-prefix-caching", "--grace", "5"]) == 0
    (config,) = seen
    assert config.server.port == 9000
    model = config.models["m"]
    assert (model.kv_cache.memory_bytes, model.scheduler.prefix_caching) == (2**30, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--machines 2 --nodes-listen :0", "--machines: 2, but 1 rank does not divide by it; take another number of"),
        ("--pipeline-parallel 3 --machines 2 --nodes-listen :0", "or of stages (--pipeline-parallel)."),
        ("--pipeline-parallel 2 --machines 2", "none can join; set --nodes-listen to HOST:PORT."),
        (
            "--pipeline-parallel 2 --machines 2 --nodes-listen :0 --devices-memory 1GiB",
            "--machines: all ranks are placed on this machine by --devices-memory; leave one of the two out.",
        ),
    ],
)
def test_flags_that_do_not_spread_a_replica_over_machines_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo-draft", *words.split()]) == 1
    assert said in capsys.readouterr().err


def test_flags_spread_a_replica_over_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def remember(config: Config, source: object = None, known: object = (), words: object = None) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("inferd.cli.serve.run", remember)
    words = "--pipeline-parallel 2 --machines 2 --nodes-listen 127.0.0.1:0"
    assert main(["serve", "demo-draft", *words.split()]) == 0
    (config,) = seen
    model = config.models["demo-draft"]
    assert (model.parallel, config.nodes.listen) == (ParallelConfig(pipeline=2, machines=2), "127.0.0.1:0")


def test_a_files_models_take_flags_when_it_is_clear_which(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("models:\n  a: {source: demo}\n  b: {source: demo}\n")
    assert serve_config(str(path), "b", {"dtype": "float16"}).models["b"].dtype == "float16"
    with pytest.raises(click.UsageError, match="say with --name"):
        serve_config(str(path), None, {"dtype": "float16"})


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["srve"], 2, "did you mean 'inferd serve'?"),
        (["serve", "--port", "x"], 2, "'x' is not an integer from 0 to 65535."),
        (
            ["serve", "./nowhere", "--log-format", "text"],
            1,
            "Error: There is no file or folder ./nowhere; check the path.",
        ),
        (["serve", "none.yaml"], 1, "none.yaml does not exist"),
        (["generate", " "], 2, "The prompt is empty"),
        (["bench", "--url", "http://127.0.0.1:1"], 1, "inferd serve"),
        (["bench", "--concurrency", "1,x"], 2, "positive numbers"),
        (["chat", "--url", "http://127.0.0.1:1"], 1, "No server answers"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_several_sources_are_refused_with_the_way_to_serve_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "model.onnx"]) == 2
    refusal = capsys.readouterr().err
    assert "SOURCE is one model, not 2 (demo, model.onnx)" in refusal
    assert "name several in a file" in refusal


def test_a_port_in_use_is_told_by_a_real_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port))
    assert done.returncode == 1
    message = f"Port {port} on 127.0.0.1 is in use; stop the other program or choose another --port."
    assert json.loads(done.stderr.splitlines()[-1])["message"] == message
    assert "Traceback" not in done.stderr


def test_an_address_that_others_reach_needs_keys_or_a_flag(tmp_path: Path) -> None:
    words = ("serve", "openai:http://127.0.0.1:9/v1", "--name", "far", "--host", "0.0.0.0", "--port", "0")
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path)}
    done = run(*words, **env)
    assert done.returncode == 1
    assert "inferd keys create" in done.stderr
    assert "--auth off" in done.stderr
    assert "inferd listens at http://127.0.0.1:" in serving(*words, "--insecure-no-auth", **env)
    done = run(*words, "--insecure-no-auth", "--auth", "required", **env)
    assert done.returncode == 2
    assert "contradict each other" in done.stderr


def test_with_keys_in_use_the_ready_message_shows_how_to_pass_one(tmp_path: Path) -> None:
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path), "INFERD_PORT": "1"}
    assert run("keys", "create", "--tenant", "t", **env).returncode == 0
    shown = serving("serve", "demo-draft", "--port", "0", **env)
    assert '-H "authorization: Bearer $INFERD_API_KEY"' in shown
    assert 'api_key=os.environ["INFERD_API_KEY"]' in shown
    assert "INFERD_PORT is no setting" in shown


def serving(*words: str, **env: str) -> str:
    """What a server says that leaves as soon as it is ready."""
    with subprocess.Popen(
        [sys.executable, "-m", "inferd", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        shown = ""
        for line in process.stdout:
            shown += line
            if "stop: Ctrl-C" in line:
                break
        process.terminate()
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0, shown + rest
    return shown + rest


def test_a_remote_server_that_does_not_say_its_models_is_served_under_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "openai:http://127.0.0.1:9/v1"]) == 2
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9/v1 did not list its models" in said
    assert "Name the model: inferd serve openai:" in said
    assert main(["serve", "openai:10.0.0.5:8000"]) == 2
    assert "'10.0.0.5:8000' is not the base URL of a server such as https://host/v1." in capsys.readouterr().err


@contextmanager
def listing(*models: Mapping[str, object]) -> Iterator[str]:
    """A server elsewhere that lists these models; yields its base URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": models}).encode() if self.path == "/far/v1/models" else b"{}"
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Not among the test's own output."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/far/v1"
        finally:
            server.shutdown()
            thread.join()


def test_without_a_name_the_models_that_a_remote_server_lists_are_served() -> None:
    with listing({"id": "org/a"}, {"id": "b", "tasks": ["generate"]}, {"id": "c", "tasks": ["predict"]}) as url:
        config = serve_config(f"openai:{url}", None, {})
        with pytest.raises(click.UsageError, match=r"lists no model\. Say with --name"):
            serve_config(f"openai:{url.replace('far', 'elsewhere')}", None, {})
    assert {name: model.source for name, model in config.models.items()} == dict.fromkeys(
        ("org/a", "b"), f"openai:{url}"
    )
    with listing(*({"id": f"m{number}"} for number in range(40))) as url, pytest.raises(click.UsageError) as raised:
        serve_config(f"openai:{url}", None, {})
    assert "lists 40 models (m0, m1, " in raised.value.format_message()


def test_a_remote_server_that_is_away_is_told_where_the_ready_message_would_be(tmp_path: Path) -> None:
    words = ("serve", "openai:http://127.0.0.1:9/v1", "--name", "far", "--port", "0")
    said = serving(*words, INFERD_STATE__DATA_DIR=str(tmp_path))
    assert "inferd listens at http://127.0.0.1:" in said
    assert "far is unreachable at http://127.0.0.1:9/v1: " in said
    assert "It is asked again until it answers." in said
    assert "curl" not in said
    assert "inferd chat" not in said


def test_config_commands_show_check_and_describe(tmp_path: Path) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text("models: {chat: {source: demo}}\n")
    shown = CliRunner().invoke(cli, ["config", "show", str(path)])
    assert yaml.safe_load(shown.output)["models"]["chat"]["scheduler"]["max_num_seqs"] == 64
    assert "is good" in CliRunner().invoke(cli, ["config", "check", str(path)]).output
    path.write_text("model: {}\n")
    assert main(["config", "check", str(path)]) == 1


def test_the_server_command_imports_neither_torch_nor_the_hub() -> None:
    code = "import inferd.cli.serve, inferd.cli.main, sys; print([m for m in ('torch', 'huggingface_hub', 'yaml') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_conversation_remembers_and_forgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def answer(messages: list[JSON]) -> Generator[str, None, None]:
        asked.append([message["content"] for message in messages])
        yield from ("an", "swer")

    lines = "one\ntwo\n/reset\nthree\n/system be brief\nfour\n/nothing\n/help\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    converse(answer, None)
    assert asked == [["one"], ["one", "answer", "two"], ["three"], ["be brief", "four"]]
    shown = capsys.readouterr().out
    assert "answer\n" in shown
    assert "no command /nothing" in shown


@pytest.mark.parametrize(
    ("line", "is_command"),
    [("/n", True), ("/nothing", True), ("/nothing at all", True), ("/", False), ("/2", False), ("/usr/bin", False)],
)
def test_a_line_that_looks_like_a_command_is_not_sent_to_the_model(
    line: str, is_command: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(messages: list[JSON]) -> Generator[str, None, None]:
        asked.append(messages[-1]["content"])
        yield "answer"

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\n{line}\n"))
    converse(answer, None)
    assert asked == ([] if is_command else [line])
    assert ("There is no command" in capsys.readouterr().out) == is_command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "int4", "--bits", "8"], "--bits has no effect with the method int4"),
        (
            ["--method", "gptq", "--bits", "8", "--symmetric"],
            "--symmetric has no effect with the method gptq of 8 bits",
        ),
        (["--method", "gptq", "--tuning-tokens", "5"], "--tuning-tokens has no effect with the method gptq"),
        (["--mixed"], "--mixed has no effect with the method int8"),
        (["--samples", "3"], "--samples has no effect with the method int8"),
    ],
)
def test_a_flag_that_a_method_of_quantisation_does_not_read_is_refused(
    words: list[str], said: str, tmp_path: Path
) -> None:
    found = CliRunner().invoke(cli, ["quantize", "demo-draft", "--output", str(tmp_path / "small"), *words])
    assert found.exit_code == 2
    assert said in found.output
    assert not (tmp_path / "small").exists()


_FLAGS = {
    "--bits": ["--bits", "4"],
    "--group-size": ["--group-size", "64"],
    "--symmetric": ["--symmetric"],
    "--mixed": ["--mixed"],
    "--samples": ["--samples", "3"],
    "--damping": ["--damping", "0.5"],
    "--act-order": ["--no-act-order"],
    "--tuning-tokens": ["--tuning-tokens", "5"],
}
_READ = {
    "int8": set(),
    "int4": {"--group-size", "--symmetric"},
    "gptq": {"--bits", "--group-size", "--symmetric", "--mixed", "--samples", "--damping", "--act-order"},
    "tuned": set(_FLAGS) - {"--bits"},
}


@pytest.mark.parametrize("method", _READ)
@pytest.mark.parametrize("flag", _FLAGS)
def test_each_method_of_quantisation_takes_the_flags_that_it_reads(method: str, flag: str, tmp_path: Path) -> None:
    words = ["quantize", str(tmp_path / "none"), "--output", str(tmp_path / "small"), "--method", method]
    found = CliRunner().invoke(cli, [*words, *_FLAGS[flag]])
    is_refused = f"{flag} has no effect with the method {method}" in found.output
    assert is_refused == (flag not in _READ[method]), found.output


@pytest.mark.parametrize("command", [["quantize", "--output", "small"], ["perplexity"]])
def test_a_text_that_is_not_there_is_told_before_anything_is_read(command: list[str]) -> None:
    found = CliRunner().invoke(cli, [*command, "demo-draft", "--data", "nowhere.txt"])
    assert found.exit_code == 2
    assert "'nowhere.txt' does not exist" in found.output


@pytest.mark.parametrize("command", [["serve"], ["check"]])
def test_a_draft_model_that_is_not_there_is_told_with_its_setting(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text("models: {d: {source: demo-draft, speculation: {draft: ./none}}}")
    found = run(*command, str(path))
    assert found.returncode == 1
    assert "speculation.draft: There is no file or folder ./none; check the path." in found.stderr + found.stdout


BROKEN = """
class Loads:
    def load(self):
        _read("nowhere.csv")

    def predict(self, x: float) -> float:
        return x


class Predicts:
    def predict(self, x: float) -> float:
        return _scaled(x)


def _read(path):
    return open(path).read()


def _scaled(x):
    raise ValueError(f"secret {x}")
"""


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_class_that_does_not_load_is_told_once_with_its_own_lines(form: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["serve", f"{tmp_path}/broken.py:Loads", "--port", "0", "--log-format", form]
    said = run(*words, INFERD_STATE__DATA_DIR=str(tmp_path)).stderr
    if form == "json":
        entries = [json.loads(line) for line in said.splitlines()]  # each line is JSON
        said = "\n".join(entry.get("message", "") for entry in entries)
    assert said.count("could not be loaded") == 1
    assert said.count("Loads.load failed: FileNotFoundError") == (1 if form == "json" else 2)  # the log, and at the end
    innermost, outer = said.index("broken.py:16 in _read"), said.index("broken.py:4 in load")
    assert innermost < outer
    assert "inferd/predict" not in said


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_class_that_fails_shows_its_lines_to_the_operator_and_not_to_the_client(form: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["serve", f"{tmp_path}/broken.py:Predicts", "--port", "0", "--log-format", form]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "inferd", *words]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(line.split("ready at ")[1].split()[0] for line in process.stdout if "ready at " in line)
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [7.5]}]}
        answer = httpx.post(f"{address}/v2/models/Predicts/infer", json=body, timeout=30)
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "broken.py" not in answer.text
    if form == "json":
        entries = [json.loads(line) for line in said.splitlines()]
        (failure,) = [entry for entry in entries if entry.get("worker") == "Predicts/0"]
        assert (failure["level"], failure["error"]) == ("error", "ValueError")
        assert failure["message"].endswith(" failed: ValueError")
        said = failure["trace"]
    else:
        assert re.search(r"^\d\d:\d\d:\d\d error: Predicts/0: request \S+ failed: ValueError$", said, re.M)
    lines = iter(said.splitlines())
    assert any(line == "ValueError: secret 7.5" for line in lines)
    assert "broken.py:20 in _scaled: raise ValueError" in next(lines)
    assert "broken.py:12 in predict: return _scaled(x)" in next(lines)


def test_with_json_logs_every_line_on_stderr_is_json(tmp_path: Path) -> None:
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path), "INFERD_PORT": "1"}
    done = run("serve", "demo-draft", "--max-model-len", "999999", "--port", "0", **env)
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert entries[0]["message"].startswith("INFERD_PORT is no setting")
    assert entries[-1]["message"].startswith("--max-model-len is 999999")
    assert [entry["state"] for entry in entries if entry["event"] == "replica"][-2:] == ["failed", "stopped"]


def test_without_a_word_there_is_help_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["keys"], ["config"]):
        assert main(words) == 0
        shown = capsys.readouterr()
        assert "Commands:" in shown.out
        assert shown.err == ""


def test_help_of_a_command_is_what_its_flag_shows(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["serve"], ["keys", "create"], ["help"]):
        assert main(["help", *words]) == 0
        shown = capsys.readouterr().out
        assert main([*words, "--help"]) == 0
        assert capsys.readouterr().out == shown
    assert main(["help", "serv"]) == 2
    assert "did you mean 'inferd serve'?" in capsys.readouterr().err
    assert main(["help", "keys", "creat"]) == 2
    assert "did you mean 'inferd keys create'?" in capsys.readouterr().err


def test_no_sentence_of_a_list_of_commands_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--help"], ["keys", "--help"], ["models", "--help"], ["config", "--help"]):
        shown = CliRunner().invoke(cli, words).output
        assert "..." not in shown.partition("Commands:")[2]
        listed = re.findall(
            r"^  \w+ {2,}\w.*?\.$(?=\n  \w|\Z)", shown.partition("Commands:\n")[2].rstrip(), re.M | re.S
        )
        assert listed
        assert all(one.endswith(".") for one in listed)


def test_the_flags_of_serve_are_listed_by_section_and_the_common_ones_first() -> None:
    shown = CliRunner().invoke(cli, ["serve", "--help"]).output
    sections = re.findall(r"^([a-zA-Z_]+)(?: \(.*\))?:$", shown, re.M)
    assert sections[sections.index("Options") :][:6] == [*("Options", "server", "tls", "devices", "nodes", "model")]
    assert {"batching", "scheduler", "kv_cache", "queue"} <= set(sections)
    first = shown.partition("Options:")[2].partition("server (")[0]
    assert all(flag in first for flag in ("--name", "--port", "--max-model-len", "--kv-cache-memory", "--options"))
    assert first.index("--name") < first.index("--port") < first.index("--max-model-len")
    assert "--queue-timeout" not in first
    assert max(map(len, shown.splitlines())) <= 100


def test_options_of_a_runtime_are_entries_of_a_flag() -> None:
    flags: dict[str, object] = {"options": (("trusted", "a.B,c.D"), ("quantiles", [0.1, 0.9]))}
    config = serve_config("demo-draft", None, flags)
    assert config.models["demo-draft"].options == {"trusted": "a.B,c.D", "quantiles": [0.1, 0.9]}
    found = CliRunner().invoke(cli, ["serve", "demo", "--options", "trusted"])
    assert (found.exit_code, "'trusted' is not NAME=VALUE." in found.output) == (2, True)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Lower kv_cache.memory_bytes or max_model_len.", "Lower --kv-cache-memory or --max-model-len."),
        ("name them: options.trusted: a.B,c.D", "name them: --options trusted=a.B,c.D"),
        ("Set allow_code: true (--allow-code) if you trust it.", "Set --allow-code if you trust it."),
        ("choose another server.port.", "choose another --port."),
        ("models.m.source: 'x' is nothing.", "'x' is nothing."),
        ('models."org/m".max_model_len: -1 is less.', "--max-model-len: -1 is less."),
        ("the seed of a device", "the seed of a device"),
    ],
)
def test_messages_name_flags_where_the_user_typed_flags(said: str, shown: str) -> None:
    assert in_flags(said, is_alone=True) == shown


def test_a_failed_load_names_the_flags_that_were_typed_wherever_it_is_told(tmp_path: Path) -> None:
    words = ("serve", "demo", "--kv-cache-memory", "900GiB", "--port", "0", "--log-format", "text")
    said = serving(*words, INFERD_STATE__DATA_DIR=str(tmp_path))
    assert "demo is not served: --kv-cache-memory is 900 GiB" in said
    assert "demo/0 failed: --kv-cache-memory is 900 GiB" in said
    assert "kv_cache." not in said


def test_the_reason_for_one_request_at_a_time_names_the_flag_where_there_is_no_file(tmp_path: Path) -> None:
    path = cumulative_sum(tmp_path / "m.onnx")
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path)}
    for said in (serving("serve", str(path), "--port", "0", **env), run("check", str(path), **env).stdout):
        assert "CumSum sums from row to row; --batching-max-batch-size declares that they do not" in said
        assert "batching.max_batch_size" not in said


def test_check_names_no_place_in_a_file_where_there_is_none(tmp_path: Path) -> None:
    found = run("check", f"{tmp_path}/iris.onnx")
    assert found.returncode == 1
    assert f"Error: There is no file or folder {tmp_path}/iris.onnx; check the path." in found.stderr


def test_help_names_flags_and_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in commands():
        shown = CliRunner().invoke(cli, [*words, "--help"]).output
        assert [line for line in shown.splitlines() if len(line) > 80] == [], words
    shown = " ".join(CliRunner().invoke(cli, ["serve", "--help"]).output.split())
    settings = {leaf.name for leaf in (*MODEL_LEAVES, *SERVER_LEAVES) if "_" in leaf.name}
    assert sorted(name for name in settings if re.search(rf"(?<![\w-]){name}\b", shown)) == []
    assert "enough for --max-num-seqs sequences" in shown
    assert "may wait for --queue-timeout" in shown


def commands(words: tuple[str, ...] = (), found: click.Command = cli) -> Iterator[tuple[str, ...]]:
    """The words of every command, with those that have commands of their own."""
    yield words
    if isinstance(found, click.Group):
        for name in found.list_commands(click.Context(found)):
            inner = found.get_command(click.Context(found), name)
            assert inner is not None
            yield from commands((*words, name), inner)


@THOROUGH
def test_a_forest_in_skops_is_served_with_what_the_refusal_says(tmp_path: Path) -> None:
    path = tmp_path / "forest.skops"
    forest = RandomForestClassifier(2).fit([[0.0, 1.0], [1.0, 0.0]], [0, 1])
    skops.io.dump(forest, path)
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path)}
    done = run("serve", str(path), "--port", "0", "--log-format", "text", **env)
    assert done.returncode == 1
    words = done.stderr.splitlines()[-1].partition("name them: ")[2].split()
    assert words[0] == "--options"
    assert "inferd is ready at" in serving("serve", str(path), "--port", "0", *words, **env)
