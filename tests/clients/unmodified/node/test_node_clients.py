"""Clients from npm. ``INFERD_TEST_NODE_MODULES`` names the folder node_modules that has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.clients.unmodified.node.installed import NODE_MODULES, needs
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

CITY = '{"name": "Oslo", "population": 700000}'
RULES = [
    Rule("which city", call("json", CITY), given='"name": "json"'),
    Rule("which city", CITY),
    Rule("the weather", call("weather", '{"city": "Oslo"}')),
    Rule('"role": "tool".*-3 degrees', "It is cold in Oslo."),
    Rule("a refund", call("transfer_to_Refunds", "{}"), given="transfer_to_Refunds"),
    Rule('"role": "tool".*assistant', "Your refund is on its way."),
    Rule("hello", "Hello to you."),
    Rule("long", "so long " * 400),
]


@pytest.fixture(scope="module")
def server(serve: Serve) -> ScriptedServer:
    return serve(RULES)


@pytest.mark.parametrize(
    "client",
    [
        pytest.param("openai", marks=needs("openai")),
        pytest.param("ai", marks=needs("ai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")),
        pytest.param("anthropic", marks=needs("@anthropic-ai/sdk")),
        pytest.param("agents", marks=needs("@openai/agents")),
    ],
)
def test_a_client_for_node_holds_its_checks(server: ScriptedServer, tmp_path: Path, client: str) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    script = tmp_path / "clients.mjs"
    script.write_text(Path(__file__).with_name("clients.mjs").read_text(encoding="utf-8"), encoding="utf-8")
    ran = subprocess.run(
        ["node", str(script), server.url, client],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
