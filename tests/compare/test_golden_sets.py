"""Golden sets: which files are read, and which answers are the expected ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferd.compare.answers import Answer, Label, Numbers, Text
from inferd.compare.golden import GoldenItem, read_golden, unmet
from inferd.errors import ConfigError

CHAT = {"path": "/v1/chat/completions", "request": {"messages": []}, "contains": "Paris"}


def lines(*items: object) -> str:
    return "\n".join(item if isinstance(item, str) else json.dumps(item) for item in items)


def item(**fields: Any) -> GoldenItem:
    return GoldenItem(path="/classify", request={}, **fields)


def test_items_are_named_by_their_line_unless_they_have_a_name() -> None:
    first, second = read_golden(lines("", CHAT, {**CHAT, "path": "/v1/completions", "name": "capital"}), "g.jsonl")
    assert (first.name, second.name) == ("2", "capital")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("is empty", "one item per line")),
        ("{", ("line 1", "JSON object with path")),
        (
            lines({"path": "/x", "request": {}, "wanted": 1}),
            ("line 1", "'wanted' is unknown", "There are path, request, name, contains, equals, label"),
        ),
        (lines({**CHAT, "path": "chat"}), ("line 1", "'chat'")),
        (
            lines({"path": "/v2/models/digits@2/infer", "request": {}, "label": "1"}),
            ("line 1", "the model 'digits@2'; write /v2/models/MODEL/infer"),
        ),
        (
            lines({"path": "/v2/models/digits/versions/1/infer", "request": {}, "label": "1"}),
            ("line 1", "the model 'digits'; write /v2/models/MODEL/infer"),
        ),
        (
            lines({"path": "/v1/models/MODELS:predict", "request": {}, "label": "1"}),
            ("line 1", "the model 'MODELS'; write /v1/models/MODEL:predict"),
        ),
        (lines({"path": "/x", "request": {}}), ("line 1", "add contains, equals or label")),
        (lines({**CHAT, "request": {"stream": True}}), ("line 1", "request.stream")),
        (lines(CHAT, "", {**CHAT, "contains": "x"}), ("line 3", "that of line 1")),
    ],
)
def test_a_broken_set_is_refused_with_the_line_and_the_remedy(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_golden(text, "g.jsonl")
    for word in ("g.jsonl", *words):
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("expected", "answer", "is_met"),
    [
        (item(contains="Paris"), (Text("t", "It is Paris."),), True),
        (item(contains=["Paris", "France"]), (Text("t", "It is Paris."),), False),
        (item(contains="Paris"), (), False),
        (item(equals="4"), (Text("t", " 4\n"),), True),
        (item(equals="4"), (Text("t", "44"),), False),
        (item(label="spam"), (Label("data[0].label", "spam"),), True),
        (item(label="spam"), (Label("choices[0].finish_reason", "spam"),), False),
        (item(label="spam"), (Label("l", "ham\nspam"),), False),
        (item(equals={"x": 1.0}), (Numbers("x", (1.0000001,)), Text("other", "")), True),
        (item(equals={"x": 1.0}), (Numbers("x", (1.1,)),), False),
        (item(equals={"x": 1.0}), (), False),
        (item(equals="4", contains="5"), (Text("t", "4"),), False),
    ],
)
def test_an_answer_is_the_expected_one_or_the_reason_is_told(
    expected: GoldenItem, answer: Answer, is_met: bool
) -> None:
    found = unmet(expected, answer)
    assert (found is None) == is_met
    assert found is None or found.endswith(".")
