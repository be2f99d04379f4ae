"""The command line from outside: help, mistakes in one sentence, exit codes."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from inferd import models
from inferd.cli.chat import converse
from inferd.cli.flags import MODEL_LEAVES, SERVER_LEAVES, flag_name
from inferd.cli.main import COMMANDS, cli, main
from inferd.cli.serve import serve_config
from inferd.config import Config
from inferd.types import JSON


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    source_folder = str(Path(models.__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "inferd", *words],
        env={**os.environ, "PYTHONPATH": source_folder, **env},
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
    names = [flag_name(leaf) for leaf in [*SERVER_LEAVES, *MODEL_LEAVES]]
    assert len(names) == len(set(names))
    assert {"--port", "--max-model-len", "--max-num-seqs", "--kv-cache-memory"} <= set(names)


def test_flags_reach_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_SERVER__PORT", "9000")
    seen: list[Config] = []

    def remember(config: Config, source: object = None, known: object = ()) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("inferd.cli.serve.run", remember)
    assert main(["serve", "--name", "m", "--kv-cache-memory", "1GiB", "--no-prefix-caching", "--grace", "5"]) == 0
    (config,) = seen
    assert config.server.port == 9000
    model = config.models["m"]
    assert (model.kv_cache.memory_bytes, model.scheduler.prefix_caching) == (2**30, False)


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
        (["serve", "./nowhere"], 1, "Error: There is no file or folder ./nowhere; check the path."),
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


def test_a_port_in_use_is_told_by_a_real_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_that_others_reach_needs_keys_or_a_flag(tmp_path: Path) -> None:
    words = ("serve", "openai:http://127.0.0.1:9/v1", "--name", "far", "--host", "0.0.0.0", "--port", "0")
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path)}
    done = run(*words, **env)
    assert done.returncode == 1
    assert "inferd keys create" in done.stderr
    assert "--auth off" in done.stderr
    assert "inferd is ready at http://127.0.0.1:" in serving(*words, "--insecure-no-auth", **env)
    done = run(*words, "--insecure-no-auth", "--auth", "required", **env)
    assert done.returncode == 2
    assert "contradict each other" in done.stderr


def test_with_keys_in_use_the_ready_message_shows_how_to_pass_one(tmp_path: Path) -> None:
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path), "INFERD_PORT": "1"}
    assert run("keys", "create", "--tenant", "t", **env).returncode == 0
    shown = serving("serve", "openai:http://127.0.0.1:9/v1", "--name", "far", "--port", "0", **env)
    assert '-H "authorization: Bearer $INFERD_API_KEY"' in shown
    assert 'api_key=os.environ["INFERD_API_KEY"]' in shown
    assert "Warning: INFERD_PORT is no setting" in shown


def serving(*words: str, **env: str) -> str:
    """What a server says until it is ready; then it leaves."""
    with subprocess.Popen(
        [sys.executable, "-m", "inferd", *words],
        env={**os.environ, "PYTHONPATH": str(Path(models.__file__).parents[2]), **env},
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
    return shown


def test_a_remote_server_is_served_under_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "openai:http://127.0.0.1:9/v1"]) == 2
    assert "--name" in capsys.readouterr().err


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
    env = {**os.environ, "PYTHONPATH": str(Path(models.__file__).parents[2])}
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
    ("words", "said"),
    [
        (["--method", "int4", "--bits", "8"], "--bits means nothing to the method int4"),
        (["--method", "gptq", "--bits", "8", "--symmetric"], "--symmetric means nothing to the method gptq of 8 bits"),
        (["--method", "gptq", "--tuning-tokens", "5"], "--tuning-tokens means nothing to the method gptq"),
        (["--mixed"], "--mixed means nothing to the method int8"),
        (["--samples", "3"], "--samples means nothing to the method int8"),
    ],
)
def test_a_flag_that_a_method_of_quantisation_does_not_read_is_refused(
    words: list[str], said: str, tmp_path: Path
) -> None:
    found = CliRunner().invoke(cli, ["quantize", "demo-draft", "--output", str(tmp_path / "small"), *words])
    assert found.exit_code == 2
    assert said in found.output
    assert not (tmp_path / "small").exists()


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


def test_a_worker_logs_in_the_form_of_the_server(tmp_path: Path) -> None:
    words = ["serve", "demo-draft", "--max-model-len", "999999", "--port", "0", "--log-format"]
    env = {"INFERD_STATE__DATA_DIR": str(tmp_path)}
    lines = run(*words, "json", **env).stderr.splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    (failure,) = [line for line in logged if line.get("worker") == "demo-draft/0"]
    assert (failure["event"], failure["level"]) == ("log", "error")
    assert failure["message"].startswith("loading failed: max_model_len is 999999")
    assert not any("ERROR worker" in line for line in lines)
    assert "ERROR worker demo-draft/0: loading failed: max_model_len" in run(*words, "text", **env).stderr
