"""Golden sets: problems by their lines, and every check with an answer that meets it and one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.compare.golden import question
from inferd.compare.golden import read_golden as read_for_rollouts
from inferd.errors import InvalidRequest
from inferd.replay.checks import failures
from inferd.replay.golden import Case, read_golden

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def cases(folder: Path, *lines: Any) -> list[Case]:
    file = folder / "golden.jsonl"
    file.write_text("\n".join([line if isinstance(line, str) else json.dumps(line) for line in lines]))
    return read_golden(file)


def problem(folder: Path, *lines: Any) -> str:
    with pytest.raises(InvalidRequest) as found:
        cases(folder, *lines)
    return found.value.message


def test_every_problem_is_listed_with_its_line(tmp_path: Path) -> None:
    said = problem(
        tmp_path,
        {"name": "a", "request": CHAT, "contains": "x"},
        {"name": "a", "request": {**CHAT, "n": 2}, "contains": "x"},
        {"name": "b", "request": CHAT, "contains": "y"},
        {"request": {**CHAT, "n": 3}},
        {"request": {**CHAT, "n": 4}, "regex": "("},
        {"request": {**CHAT, "n": 5}, "json_schema": {"type": "nothing"}},
        {"request": {**CHAT, "stream": True}, "contains": "x"},
        {"request": {"n": 6}, "contains": "x"},
        {"request": {**CHAT, "n": 7}, "contain": "x"},
        {"request": {**CHAT, "n": 8}, "max_distance": {"text": "x", "distance": -1}},
        "not json",
        {"request": {**CHAT, "n": 9}, "numeric": {"value": 1, "relative": 0.1}},
    )
    for words in (
        "line 2: the name 'a' is that of line 1",
        "line 3: the request is that of line 1",
        "line 4: nothing is expected",
        "line 5: regex is no regular expression",
        "line 6: ",
        "line 7: request.stream is true",
        "line 8: the route does not follow from the request",
        "line 9: the field 'contain' is unknown; did you mean 'contains'? There are request, path, name, contains, ",
        "line 10: ",
        "line 11: ",
        "line 12: the field 'relative' of numeric is unknown; leave it out. There are value, abs, rel",
    ):
        assert words in said
    assert "line 1:" not in said


def test_a_path_names_a_route_and_no_model(tmp_path: Path) -> None:
    said = problem(
        tmp_path,
        {"path": "/v2/models/digits/infer", "request": {"inputs": []}, "label": "1"},
        {"path": "chat", "request": CHAT, "contains": "x"},
    )
    assert "line 1: path names the model 'digits'; write /v2/models/MODEL/infer, " in said
    assert "line 2: path is 'chat'; write the route's path" in said


def test_an_empty_set_and_a_missing_file_are_named(tmp_path: Path) -> None:
    assert "is empty" in problem(tmp_path, "", " ")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_golden(tmp_path / "none")


def test_many_problems_are_cut(tmp_path: Path) -> None:
    assert "and 5 more" in problem(tmp_path, *["x"] * 25)


def test_a_set_for_a_rollout_is_read_alike(tmp_path: Path) -> None:
    lines = [
        {"path": "/v1/chat/completions", "request": CHAT, "name": "a", "contains": "x"},
        {"path": "/v2/models/MODEL/infer", "request": {"inputs": []}, "label": "1"},
    ]
    text = "\n".join(map(json.dumps, lines))
    assert [case.item for case in cases(tmp_path, *lines)] == read_for_rollouts(text, "golden.jsonl")


def test_a_case_asks_the_model_that_is_named_or_its_own(tmp_path: Path) -> None:
    chat, infer = cases(
        tmp_path, {"request": {**CHAT, "model": "own"}, "contains": "x"}, {"request": {"inputs": []}, "label": "1"}
    )
    assert question(chat.item, "other@2") == ("/v1/chat/completions", {**CHAT, "model": "other@2"})
    assert question(chat.item, None)[1]["model"] == "own"
    assert question(infer.item, "digits@2") == ("/v2/models/digits@2/infer", {"inputs": []})


def said(text: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}).encode()


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ({"contains": ["Paris", "France"]}, "Paris is in France", "Paris"),
        ({"equals": "Paris"}, " Paris\n", "Paris."),
        ({"regex": r"^\d+ days$"}, "14 days", "14 days."),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', '{"b": 1}'),
        ({"numeric": {"value": 1234.5, "abs": 0.1}}, "It costs 1,234.45 euros", "It costs 1,234.7 euros"),
        ({"numeric": {"value": [1, 2], "rel": 0.5}}, "1.5 and 2.9", "1.5 and 2.9 and 3"),
        ({"max_distance": {"text": "colour", "distance": 1}}, "color", "colr"),
    ],
)
def test_each_check_of_a_text(tmp_path: Path, check: dict[str, Any], good: str, bad: str) -> None:
    (case,) = cases(tmp_path, {"request": CHAT, **check})
    assert failures(case, 200, said(good)) == []
    (reason,) = failures(case, 200, said(bad))
    assert reason.partition(":")[0] in (*check, "expected")


def test_labels_and_numbers_of_tensors(tmp_path: Path) -> None:
    (case,) = cases(
        tmp_path,
        {"request": {"inputs": []}, "label": "cat", "numeric": {"value": [0.25, 0.75], "abs": 0.01}},
    )

    def answered(label: str, score: float) -> bytes:
        words = {"name": "label", "datatype": "BYTES", "shape": [1], "data": [label]}
        scores = {"name": "p", "datatype": "FP32", "shape": [1, 2], "data": [score, 1 - score]}
        return json.dumps({"outputs": [words, scores]}).encode()

    assert failures(case, 200, answered("cat", 0.255)) == []
    assert len(failures(case, 200, answered("dog", 0.4))) == 2


def test_a_failed_request_fails_its_case(tmp_path: Path) -> None:
    (case,) = cases(tmp_path, {"request": CHAT, "contains": "x"})
    (reason,) = failures(case, 503, b'{"error": {"message": "the queue is full"}}')
    assert reason == "failed: 503: the queue is full"
    assert failures(case, 200, b"x")[0].startswith("failed: ")
