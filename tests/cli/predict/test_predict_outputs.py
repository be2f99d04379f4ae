"""What a prediction looks like on a terminal: all of what is small, and the gist of what is large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from inferd.cli.predict.outputs import table_of, text_of
from inferd.types import TensorSpec


def shown(array: Any, labels: tuple[str, ...] = (), top: int | None = None, datatype: str = "FP32") -> list[list[str]]:
    """The cells of the table's lines, without its head."""
    spec = TensorSpec("y", datatype, (-1,), labels=labels)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of({"y": np.asarray(array)}, {"y": spec}, top))
    lines = [line.strip() for line in captured.get().splitlines() if line.strip()]
    return [[cell for cell in line.split("  ") if cell.strip()] for line in lines[2:]]


def only(array: Any, **how: Any) -> str:
    ((name, value),) = shown(array, **how)
    assert name == "y"
    return value.strip()


@pytest.mark.parametrize(
    ("array", "value"),
    [
        (np.zeros((1, 0), np.float32), "(none)"),
        (np.array(3, np.int64), "3"),
        (np.array([[7]], np.int64), "7"),
        (np.array([[0.5, 2.0, 1 / 3]], np.float32), "0.5, 2, 0.3333"),
        (np.arange(8)[None], "0, 1, 2, 3, 4, 5, 6, 7"),
        (np.arange(9)[None], "0, 1, 2, 3, 4, 5, 6, 7, ... (9 values, 0 to 8)"),
        (np.arange(12).reshape(1, 3, 4)[:, ::-1], "8, 9, 10, 11, 4, 5, 6, 7, ... (3 x 4 values, 0 to 11)"),
        (np.ones((1, 9), np.bool_), "True, True, True, True, True, True, True, True, ... (9 values, of bool)"),
    ],
)
def test_a_few_numbers_are_shown_and_many_are_summed_up(array: Any, value: str) -> None:
    assert only(array) == value


def test_each_row_has_a_line_and_those_beyond_twenty_are_counted() -> None:
    values = [row[-1].strip() for row in shown(np.arange(20)[:, None])]
    assert values == [str(number) for number in range(20)]
    values = [row[-1].strip() for row in shown(np.arange(23)[:, None])]
    assert values == [*(str(number) for number in range(20)), "... 3 more rows"]


@pytest.mark.parametrize(
    ("num_rows", "top", "each"), [(1, None, 5), (2, None, 3), (4, None, 3), (5, None, 1), (5, 2, 2), (1, 4, 4)]
)
def test_of_classes_the_most_likely_are_told(num_rows: int, top: int | None, each: int) -> None:
    labels = tuple(f"class-{number}" for number in range(6))
    scores = np.tile(np.array([0.05, 0.4, 0.1, 0.2, 0.25, 0.0], np.float32), (num_rows, 1))
    lines = shown(scores, labels=labels, top=top)
    assert len(lines) == num_rows * each
    told = [cell.strip() for line in lines for cell in line if cell.strip().startswith("class-")]
    assert told == ["class-1", "class-4", "class-3", "class-2", "class-0"][:each] * num_rows
    assert "0.4000" in " ".join(lines[0])
    assert any("━" in cell for cell in lines[0])


@pytest.mark.parametrize("scores", [[-1.5, 3.25], [0.5, 3.25], [-1.5, 0.5]])
def test_scores_that_are_no_probabilities_have_no_bars(scores: list[float]) -> None:
    lines = shown(np.array([scores], np.float32), labels=("a", "b"))
    low, high = (f"{score:g}" for score in scores)
    assert [[cell.strip() for cell in line][-2:] for line in lines] == [["b", high], ["a", low]]


def test_scores_stand_below_each_other_whatever_the_lengths_of_their_names() -> None:
    lines = shown(np.array([[0.25, 0.75]], np.float32), labels=("a", "a longer name"))
    assert [line[-2].strip() for line in lines] == ["0.7500", "0.2500"]
    console = Console(width=200)
    with console.capture() as captured:
        spec = TensorSpec("y", "FP32", (-1,), labels=("a", "a longer name"))
        console.print(table_of({"y": np.array([[0.25, 0.75]])}, {"y": spec}, None))
    places = {line.index("0.") for line in captured.get().splitlines() if "0." in line}
    assert len(places) == 1


def text(outputs: dict[str, Any]) -> list[list[str]]:
    """The words of a table's lines, with its head."""
    specs = {name: TensorSpec(name, "FP32", (-1,)) for name in outputs}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of(outputs, specs, None))
    lines = [line.replace("\u2500", " ").split() for line in captured.get().splitlines()]
    return [line for line in lines if line]


def test_rows_are_numbered_where_there_are_several_and_a_value_for_all_of_them_stands_beside_none() -> None:
    assert text({"y": np.array(3)}) == [["output", "value"], ["y", "3"]]
    assert text({"y": np.array([[1, 2]])}) == [["output", "value"], ["y", "1,", "2"]]
    assert text({"y": np.array([5, 6]), "z": np.array([7])}) == [
        ["output", "row", "value"],
        ["y", "0", "5"],
        ["1", "6"],
        ["z", "7"],
    ]


def test_of_a_long_text_the_beginning_and_the_length_are_shown() -> None:
    assert text_of(b"x" * 400) == "x" * 400
    assert text_of(b"x" * 1401) == "x" * 400 + "... (1,401 characters)"


def test_a_text_of_json_is_indented_and_another_is_not() -> None:
    for written in ('{"a": [1]}', '  {"a": [1]}', "{not json}"):
        wanted = '{\n  "a": [\n    1\n  ]\n}' if written == '{"a": [1]}' else written
        assert text_of(written.encode()) == wanted


def test_texts_are_shown_as_they_are() -> None:
    assert only(np.array([b"a text"], object), datatype="BYTES") == "a text"
