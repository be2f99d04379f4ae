"""Published clients that `make test-clients` installs, each in an environment of its own. Elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer, serving

Serve = Callable[..., ScriptedServer]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Serve a model with these rules until the module's end."""
    with ExitStack() as running:

        def start(rules: Sequence[Rule], **more: Any) -> ScriptedServer:
            return running.enter_context(serving(tmp_path_factory.mktemp("served"), rules, **more))

        yield start


def call(name: str, arguments: str) -> str:
    """An answer that calls a tool, in the scripted model's notation."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
