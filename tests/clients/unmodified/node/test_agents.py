"""Agents in a whole loop: a file with a defect is read, changed wrongly, tested, mended, and tested again.

What the agent's model says is a script; the calls, the files and the shell are the agent's own. Each answer but the
first is given only when the result of the call before it is in the prompt.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.clients.unmodified.node.installed import NODE_MODULES, needs
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer
from tests.worker.watching import until_now

BUG, WRONG, RIGHT = "return a - b", "return a * b", "return a + b"
CODE = f"def add(a, b):\n    {BUG}\n"
TEST = """from add import add

for a, b in (2, 2), (2, 3):
    assert add(a, b) == a + b, f"add{a, b} is {add(a, b)}"
print("both", "hold")
"""
COMMAND = f"{sys.executable} -B test_add.py"  # edits within one second leave a stale cache of bytecode
THOUGHT = "Consider step"
DONE = "The sum is mended, and its test holds."
CONTEXT = 400_000  # the scripted model's tokens are bytes
LONG = 8_000
FILES = {
    "a.png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    ),
    "a.pdf": b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n",
}
BLOCK = 16  # tokens of a block of the prefix cache


def script(read: str, change: str, run: str, mend: str, *, tool: str) -> list[Rule]:
    """The answers in their order; each waits for the result of the call before. Requests without tools are others.

    The model thinks before each call, and the agent must send its reasoning back.
    """
    with_tools = rf'"name": "{tool}"'

    def step(number: int, answer: str, given: str) -> Rule:
        before = rf'"reasoning_content": "{THOUGHT} {number - 1}\.".*' if number else ""
        return Rule("", f"<think>\n{THOUGHT} {number}.\n</think>\n\n{answer}", times=1, given=before + given)

    return [
        step(0, read, with_tools),
        step(1, change, f"{BUG}.*{with_tools}"),
        step(2, run, with_tools),
        step(3, mend, rf"AssertionError: add\(2, 3\) is 6.*{with_tools}"),
        step(4, run, with_tools),
        step(5, DONE, f"both hold.*{with_tools}"),
        Rule("", "A title"),
    ]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "add.py").write_text(CODE, encoding="utf-8")
    (folder / "test_add.py").write_text(TEST, encoding="utf-8")
    return folder


def run(command: list[str], project: Path, env: dict[str, str] | None = None) -> str:
    """Run an agent's command in the project, with a home of its own; what it printed."""
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    ran = subprocess.run(
        [str(NODE_MODULES / ".bin" / command[0]), *command[1:]],
        cwd=project,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def check(server: ScriptedServer, project: Path, said: str, route: str) -> None:
    def turns() -> list[dict[str, int]]:
        """The usage of the requests of the loop. Requests of other kinds, for a title say, are far shorter."""
        used = [line["usage"] for line in server.lines() if line["route"] == route]
        return [usage for usage in used if usage["prompt_tokens"] > LONG]

    until_now(lambda: len(turns()) >= 6, "all turns are logged", 10)
    assert DONE in said, server.log()
    assert (project / "add.py").read_text(encoding="utf-8") == CODE.replace(BUG, RIGHT)
    assert {line["status"] for line in server.lines()} == {200}, server.log()
    assert len(turns()) == 6
    for before, after in pairwise(turns()):
        assert after["cached_tokens"] > before["prompt_tokens"] - 2 * BLOCK, "a turn computes its new tokens only"


def claude(server: ScriptedServer, project: Path, *arguments: str) -> str:
    env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none"}
    return run(["claude", "-p", *arguments], project, env)


def check_statuses(server: ScriptedServer, route: str, *expected: int) -> None:
    until_now(
        lambda: [line["status"] for line in server.lines() if line["route"] == route] == list(expected),
        f"{route} has had the statuses {expected}",
        10,
    )


@needs("@anthropic-ai/claude-code")
def test_claude_code_mends_a_file(serve: Serve, project: Path) -> None:
    path = str(project / "add.py")

    def edit(old: str, new: str) -> str:
        return call("Edit", json.dumps({"file_path": path, "old_string": old, "new_string": new}))

    run_test = call("Bash", json.dumps({"command": COMMAND}))
    read = call("Read", json.dumps({"file_path": path}))
    server = serve(
        script(read, edit(BUG, WRONG), run_test, edit(WRONG, RIGHT), tool="Edit"),
        max_positions=CONTEXT,
        reasons=True,
        reads_tools=True,
    )
    said = claude(server, project, "Mend add.py; test_add.py is its test.", "--allowedTools", "Bash,Edit,Read")
    check(server, project, said, "/v1/messages")


@needs("@anthropic-ai/claude-code")
def test_a_later_run_of_claude_code_computes_its_new_tokens_only(serve: Serve, project: Path) -> None:
    server = serve([Rule("", "Hello.")], max_positions=CONTEXT, reads_tools=True)
    claude(server, project, "Say hello.")
    claude(server, project, "--continue", "Say it again.")

    def turns() -> list[dict[str, int]]:
        return [line["usage"] for line in server.lines() if line["route"] == "/v1/messages"]

    until_now(lambda: len(turns()) == 2, "both turns are logged", 10)
    first, second = turns()
    print(first, second)
    assert first["prompt_tokens"] > 24_000
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > first["prompt_tokens"] - 2 * BLOCK


@needs("@anthropic-ai/claude-code")
@pytest.mark.parametrize("name", ["a.png", "a.pdf"])
def test_claude_code_goes_on_without_a_file_that_is_no_text(serve: Serve, project: Path, name: str) -> None:
    (project / name).write_bytes(FILES[name])
    read = call("Read", json.dumps({"file_path": str(project / name)}))
    server = serve([Rule("", read, times=1), Rule("", DONE)], max_positions=CONTEXT)
    assert DONE in claude(server, project, "Look at it.", "--allowedTools", "Read")
    assert DONE in claude(server, project, "--continue", "And now?")
    check_statuses(server, "/v1/messages", 200, 400, 200, 200)


@needs("@anthropic-ai/claude-code")
def test_claude_code_shortens_a_conversation_that_is_too_long(serve: Serve, project: Path) -> None:
    count = call("Bash", json.dumps({"command": "seq 1 2000", "description": "Count"}))
    server = serve([Rule("", count, times=3), Rule("", DONE)], max_positions=40_000)
    assert DONE in claude(server, project, "Count.", "--allowedTools", "Bash")
    refusals = {line["error_code"] for line in server.lines() if line["status"] == 400}
    assert refusals == {"context_length_exceeded"}


def sed(old: str, new: str) -> str:
    return f"sed -i 's/{old}/{new}/' add.py"


def codex(server: ScriptedServer, project: Path, **more: str | int) -> str:
    settings = {
        "model_provider": "inferd",
        "model_providers.inferd.name": "inferd",
        "model_providers.inferd.base_url": server.api,
        "model_providers.inferd.wire_api": "responses",
        **more,
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return run(
        ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *options, "Mend add.py."], project
    )


@needs("@openai/codex")
def test_codex_mends_a_file_in_the_shell(serve: Serve, project: Path) -> None:
    def shell(command: str) -> str:
        return call("exec_command", json.dumps({"cmd": command}))

    server = serve(
        script(
            shell("cat add.py"),
            shell(sed(BUG, WRONG.replace("*", r"\*"))),
            shell(COMMAND),
            shell(sed(WRONG.replace("*", r"\*"), RIGHT)),
            tool="exec_command",
        ),
        max_positions=CONTEXT,
        reasons=True,
        reads_tools=True,
    )
    check(server, project, codex(server, project, model="scripted"), "/v1/responses")


@needs("@openai/codex")
def test_codex_mends_a_file_by_patches(serve: Serve, project: Path) -> None:
    """A name that Codex knows stands for the model: its tool for patches is a text with a grammar."""

    def shell(command: str) -> str:
        return call("exec_command", json.dumps({"cmd": command}))

    def patch(old: str, new: str) -> str:
        lines = ["*** Begin Patch", "*** Update File: add.py", "@@", f"-    {old}", f"+    {new}", "*** End Patch", ""]
        return call("apply_patch", json.dumps({"input": "\n".join(lines)}))

    server = serve(
        script(shell("cat add.py"), patch(BUG, WRONG), shell(COMMAND), patch(WRONG, RIGHT), tool="apply_patch"),
        max_positions=CONTEXT,
        reasons=True,
        reads_tools=True,
    )
    check(server, project, codex(server, project, model="gpt-5.5"), "/v1/responses")


@needs("@openai/codex")
def test_codex_mends_a_file_without_a_setting_for_the_model(serve: Serve, project: Path) -> None:
    """It asks for OpenAI's newest model, and its tools come by an item: one runs JavaScript that calls the others."""

    def execute(line: str) -> str:
        return call("functions__exec", json.dumps({"input": f"text(JSON.stringify(await tools.{line}));\n"}))

    def shell(command: str) -> str:
        return execute(f"exec_command({json.dumps({'cmd': command})})")

    def patch(old: str, new: str) -> str:
        lines = ["*** Begin Patch", "*** Update File: add.py", "@@", f"-    {old}", f"+    {new}", "*** End Patch", ""]
        return execute(f"apply_patch({json.dumps(chr(10).join(lines))})")

    server = serve(
        script(shell("cat add.py"), patch(BUG, WRONG), shell(COMMAND), patch(WRONG, RIGHT), tool="functions__exec"),
        max_positions=CONTEXT,
        reasons=True,
        reads_tools=True,
    )
    check(server, project, codex(server, project), "/v1/responses")


@needs("@openai/codex")
def test_codex_needs_only_the_url(serve: Serve, project: Path) -> None:
    """It is OpenAI's provider with another address: it offers a WebSocket first, and tells the effort by an item."""
    server = serve([Rule("", DONE)], max_positions=CONTEXT)
    only = ["codex", "exec", "--skip-git-repo-check", "-c", f"openai_base_url={json.dumps(server.api)}", "Say hello."]
    assert DONE in run(only, project, {"CODEX_API_KEY": "none"})
    check_statuses(server, "/v1/responses", 426, 200)


@needs("@openai/codex")
def test_codex_goes_on_from_a_summary_when_its_context_is_full(serve: Serve, project: Path) -> None:
    tools, summary = '"name": "exec_command"', "add.py was read and subtracts."
    read = call("exec_command", json.dumps({"cmd": "cat add.py"}))
    server = serve(
        [
            Rule("", read, times=1, given=tools),
            Rule("", summary, times=1, given=f"{BUG}.*"),
            Rule("", DONE, given=summary.replace(".", r"\.")),
        ],
        max_positions=CONTEXT,
    )
    said = codex(server, project, model="scripted", model_auto_compact_token_limit=LONG // 2)
    assert DONE in said, server.log()
    assert [(line["route"], line["status"]) for line in server.lines()] == [("/v1/responses", 200)] * 3


@needs("opencode-ai")
def test_opencode_mends_a_file(serve: Serve, project: Path) -> None:
    path = str(project / "add.py")

    def edit(old: str, new: str) -> str:
        return call("edit", json.dumps({"filePath": path, "oldString": old, "newString": new}))

    run_test = call("bash", json.dumps({"command": COMMAND}))
    read = call("read", json.dumps({"filePath": path}))
    server = serve(
        script(read, edit(BUG, WRONG), run_test, edit(WRONG, RIGHT), tool="edit"),
        max_positions=CONTEXT,
        reasons=True,
        reads_tools=True,
    )
    options = {"baseURL": server.api, "apiKey": "none"}
    provider: Any = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "inferd",
        "options": options,
        "models": {"scripted": {"name": "scripted"}},
    }
    settings = {"provider": {"inferd": provider}, "model": "inferd/scripted", "small_model": "inferd/scripted"}
    (project / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    said = run(["opencode", "run", "--format", "json", "Mend add.py."], project)
    check(server, project, said, "/v1/chat/completions")
