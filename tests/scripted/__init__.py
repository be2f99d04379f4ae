"""A model that answers from a script, token by token through the real engine, so that clients and whole loops of agents
can be tested without a capable model.

``write_scripted_answers`` puts a script beside any checkpoint that generates; ``python -m tests.scripted.server CONFIG``
serves it like ``tests/tiny_server.py``. A rule's answer is the model's own text, in the checkpoint's notation of
reasoning and calls. It is forced by a constraint with one text. The request's own constraint (a schema, the tools) must
allow this text, or the request is refused: a test of structured output or of tools shows that the masks let the right
answer through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from inferd.errors import InvalidRequest
from inferd.types import Chat, GenerateRequest, TextPrompt

SCRIPT = "script.json"


class Rule(NamedTuple):
    """``answer`` is given where ``pattern`` (a regular expression) occurs in the last message, or the text prompt.

    A message is written as JSON with its role. The first rule that matches counts; ``times``: for how many requests it
    counts, 0 for all. ``given``: a regular expression that must occur in the whole request, written as JSON with
    ``prompt`` and ``form``. An answer None is the model's own under the request's constraint.
    """

    pattern: str
    answer: str | None
    times: int = 0
    given: str = ""


def write_scripted_answers(folder: Path, rules: Sequence[Rule]) -> None:
    (folder / SCRIPT).write_text(json.dumps([list(rule) for rule in rules]), encoding="utf-8")


class Script:
    """The rules of a checkpoint's folder."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._used = [0] * len(rules)

    @classmethod
    def load(cls, folder: Path) -> Script:
        return cls([Rule(*rule) for rule in json.loads((folder / SCRIPT).read_text(encoding="utf-8"))])

    def answer_to(self, request: GenerateRequest) -> str | None:
        """Raises InvalidRequest where no rule matches."""
        match request.prompt:
            case Chat(messages=messages):
                last = _json(messages[-1])
            case TextPrompt(text=text):
                last = text
            case _:
                last = ""
        whole = _json(msgspec.to_builtins({"prompt": request.prompt, "form": request.form}))
        for number, rule in enumerate(self._rules):
            is_left = not 0 < rule.times <= self._used[number]
            if is_left and re.search(rule.pattern, last, re.DOTALL) and re.search(rule.given, whole, re.DOTALL):
                self._used[number] += 1
                return rule.answer
        raise InvalidRequest(f"no rule of the script matches {last[:500]!r}", param="messages")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
