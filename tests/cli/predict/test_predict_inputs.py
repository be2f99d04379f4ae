"""Whatever a person has at hand becomes what the model takes, or a sentence that says what was expected and what came."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inferd.cli.predict.inputs import tensors_of
from inferd.cli.predict.layout import Layout, example_input, layout_of, takes_pictures
from inferd.cli.predict.pictures import Range
from inferd.errors import InvalidRequest
from inferd.predict.contract import Array
from inferd.types import TensorSpec

PIXELS = TensorSpec("pixels", "FP32", (-1, 4))
TEXT = TensorSpec("text", "BYTES", (-1,))
IDS = TensorSpec("ids", "INT64", (-1, 1))
FREE = TensorSpec("pixels", "FP32", (-1, 4), is_optional=True)
IMAGE = TensorSpec("image", "BYTES", (-1,), is_optional=True)


def made(
    *words: str, specs: tuple[TensorSpec, ...] = (PIXELS,), brightness: Range = "0-1", lines: bool = False
) -> dict[str, Array]:
    return tensors_of(words, specs, brightness=brightness, lines=lines, say=lambda sentence: None)


def refused(*words: str, specs: tuple[TensorSpec, ...] = (PIXELS,)) -> str:
    with pytest.raises(InvalidRequest) as error:
        made(*words, specs=specs)
    return error.value.message


def written(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def picture(path: Path, pixels: Array) -> str:
    Image.fromarray(pixels).save(path)
    return str(path)


@pytest.mark.parametrize(
    "word", ["1,2,3,4", "1 2 3 4", "[1, 2, 3, 4]", "[[1, 2], [3, 4]]", "pixels=1, 2, 3, 4", '{"pixels": [[1,2,3,4]]}']
)
def test_numbers_are_a_row_however_they_are_written(word: str) -> None:
    found = made(word)["pixels"]
    assert found.dtype == np.float32
    assert found.tolist() == [[1, 2, 3, 4]]


class _RunsWhenRead:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_an_array_of_objects_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([_RunsWhenRead(tmp_path / "ran")], object), allow_pickle=True)
    assert "is no array that can be read" in refused(str(tmp_path / "x.npy"))
    assert not (tmp_path / "ran").exists()


def test_values_that_are_given_again_are_more_rows(tmp_path: Path) -> None:
    rows = np.arange(8.0).reshape(2, 4)
    np.save(tmp_path / "x.npy", rows)
    table = written(tmp_path / "x.csv", "8,9,10,11\n12,13,14,15\n")
    found = made(str(tmp_path / "x.npy"), table)["pixels"]
    assert found.tolist() == np.arange(16.0).reshape(4, 4).tolist()


@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=30)
def test_rows_of_a_table_are_what_was_written(rows: list[list[float]]) -> None:
    text = json.dumps(rows)
    assert made(text)["pixels"].tolist() == rows


def test_columns_of_a_table_go_to_the_inputs_of_their_names(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "ids,text\n1,one\n2,two\n")
    found = made(table, specs=(TEXT, IDS))
    assert found["ids"].tolist() == [[1], [2]]
    assert found["text"].tolist() == [b"one", b"two"]
    assert "names the input 'a'" in refused(written(tmp_path / "u.csv", "a,text\n1,2\n"), specs=(TEXT, IDS))


def test_a_table_with_names_of_its_own_is_rows_where_one_input_takes_numbers(tmp_path: Path) -> None:
    table = written(tmp_path / "iris.csv", "a,b,c,d\n1,2,3,4\n5,6,7,8\n")
    assert made(table)["pixels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_request_of_kserve_is_taken_as_it_is() -> None:
    body = {"inputs": [{"name": "pixels", "shape": [2, 4], "datatype": "FP32", "data": list(range(8))}]}
    assert made(json.dumps(body))["pixels"].shape == (2, 4)
    body["inputs"][0]["shape"] = [3, 4]
    assert "do not have their declared shape [3, 4]" in refused(json.dumps(body))


def test_texts_of_a_request_of_kserve_are_texts() -> None:
    body: dict[str, Any] = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["1", "b"]}]}
    assert made(json.dumps(body), specs=(TEXT,))["text"].tolist() == [b"1", b"b"]
    body["inputs"][0]["data"] = ["1", 2]
    assert "is neither texts nor numbers" in refused(json.dumps(body), specs=(TEXT,))
    for nameless in ({"data": [1]}, 1):
        assert "Nothing was given" in refused(json.dumps({"inputs": [nameless]}))


def test_texts_that_are_written_like_numbers_are_texts_where_the_input_takes_texts(tmp_path: Path) -> None:
    for word in ('{"text": ["1", "2"]}', written(tmp_path / "t.csv", "text\n1\n2\n")):
        assert made(word, specs=(TEXT,))["text"].tolist() == [b"1", b"2"]
    assert made('{"ids": ["1", "2"]}', specs=(IDS,))["ids"].tolist() == [[1], [2]]


def test_columns_of_different_lengths_are_refused() -> None:
    said = refused('{"a": [1, 2], "b": [1, 2], "c": [1], "d": [1, 2]}')
    assert "its columns have different numbers of values: a 2, b 2, c 1, d 2." in said


@pytest.mark.parametrize("word", ['["a", 1]', '{"text": ["1", 2]}', '{"ids": ["1", 2]}', "[[1, 2], [3]]"])
def test_a_list_of_texts_and_numbers_is_refused(word: str) -> None:
    assert "neither texts nor numbers" in refused(word, specs=(TEXT, IDS))


def test_an_object_with_another_value_than_columns_is_no_table() -> None:
    assert "names the input 'a'" in refused('{"a": [1, 2], "b": 3}')


def test_values_without_names_go_to_one_input_after_the_other() -> None:
    first, second = TensorSpec("first", "FP32", (-1, 1)), TensorSpec("second", "FP32", (-1, 1))
    found = made("1", "2", specs=(first, second))
    assert {name: array.tolist() for name, array in found.items()} == {"first": [[1]], "second": [[2]]}


def test_a_text_may_contain_an_equals_sign_and_a_files_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made("texts=a", specs=(TEXT,))["text"].tolist() == [b"texts=a"], "one input needs no name"
    assert made("a=b", "ids=1", specs=(TEXT, IDS))["text"].tolist() == [b"a=b"]
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run=1.csv", "1,2,3,4\n")
    assert made("run=1.csv")["pixels"].tolist() == [[1, 2, 3, 4]]


def test_one_value_stands_beside_each_of_several() -> None:
    query = TensorSpec("query", "BYTES", (-1,))
    found = made("query=what?", "text=a", "text=b", specs=(query, TEXT))
    assert found["query"].tolist() == [b"what?", b"what?"]
    assert found["text"].tolist() == [b"a", b"b"]
    assert made("ids=7", "text=a", "text=b", specs=(IDS, TEXT))["ids"].tolist() == [[7], [7]]
    assert made("ids=7", "text=a", specs=(IDS, TEXT))["ids"].tolist() == [[7]]


@pytest.mark.parametrize(
    ("shape", "word", "wanted"),
    [
        ((2, 2), "1,2,3,4", [[1, 2], [3, 4]]),
        ((-1, -1), "[[1, 2, 3]]", [[1, 2, 3]]),
        ((-1, -1), "1,2,3", [[1, 2, 3]]),
        ((-1,), "[[1, 2], [3, 4]]", [1, 2, 3, 4]),
        ((-1, 2, 2), "[[1, 2], [3, 4]]", [[[1, 2], [3, 4]]]),
        ((-1, -1, 2), "[1, 2]", [[[1, 2]]]),
    ],
)
def test_numbers_are_brought_to_the_declared_shape(shape: tuple[int, ...], word: str, wanted: object) -> None:
    assert made(word, specs=(TensorSpec("x", "FP32", shape),))["x"].tolist() == wanted


@pytest.mark.parametrize(("shape", "word"), [((2, 2), "1,2,3"), ((-1, -1), "[[[1], [2]]]"), ((-1, 2), "1,2,3")])
def test_numbers_of_another_shape_are_refused(shape: tuple[int, ...], word: str) -> None:
    assert "values of the shape" in refused(word, specs=(TensorSpec("x", "FP32", shape),))


def test_texts_come_from_words_files_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letter = written(tmp_path / "letter.txt", "12 monkeys\nsecond line\n")
    assert made(letter, specs=(TEXT,))["text"].tolist() == [b"12 monkeys\nsecond line"]
    assert made(letter, specs=(TEXT,), lines=True)["text"].tolist() == [b"12 monkeys", b"second line"]
    assert made("a = b", "42", specs=(TEXT,))["text"].tolist() == [b"a = b", b"42"]
    for written_bytes, lines, texts in (("né\n", False, ["né"]), ("né\n", True, ["né"]), ("1\n2\n", True, ["1", "2"])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written_bytes.encode())))
        assert made("-", specs=(TEXT,), lines=lines)["text"].tolist() == [text.encode() for text in texts]


def test_a_text_file_of_numbers_is_a_text(tmp_path: Path) -> None:
    found = made(written(tmp_path / "letter.txt", "12\n"), "ids=1", specs=(IDS, TEXT))
    assert found["text"].tolist() == [b"12"]


def test_a_text_that_begins_like_a_picture_is_a_text(tmp_path: Path) -> None:
    makers = written(tmp_path / "makers", "BMW\nAudi\n")
    assert made(makers, specs=(TEXT,), lines=True)["text"].tolist() == [b"BMW", b"Audi"]


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp", "tiff", "webp"])
def test_a_picture_is_sent_as_it_is_to_a_model_that_takes_files(tmp_path: Path, kind: str) -> None:
    file = picture(tmp_path / f"p.{kind}", np.zeros((3, 5), np.uint8))
    found = made(file, specs=(FREE, IMAGE))
    assert found["image"].tolist() == [Path(file).read_bytes()]
    assert "No input of the model takes numbers" in refused("42", specs=(IMAGE,))
    assert made("1,2,3,4", specs=(FREE, IMAGE)).keys() == {"pixels"}


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((-1, 3, 2, 2), (0, 1, 0, 1)),
        ((-1, 2, 2, 3), (0, 0, 1, 1)),
        ((1, 3, -1, -1), (0, 1, 0, 1)),
        ((1, -1, -1, 3), (0, 0, 1, 1)),
        ((3, 2, 2), (1, 0, 1)),
    ],
)
def test_a_picture_becomes_pixels_in_the_models_layout(
    tmp_path: Path, shape: tuple[int, ...], place: tuple[int, ...]
) -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[0, 1, 1] = 255  # green, at the top right
    file = picture(tmp_path / "p.png", pixels)
    found = made(file, specs=(TensorSpec("x", "FP32", shape),))["x"]
    assert found[place] == 1
    assert found.sum() == 1
    whole = made(file, specs=(TensorSpec("x", "UINT8", shape),))["x"]
    assert whole[place] == 255


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((-1, 8, 9), Layout(8, 9, 1, None)),
        ((8, 9), Layout(8, 9, 1, None)),
        ((8, 8), Layout(8, 8, 1, None)),
        ((7, 9), None),
        ((-1, 8, 7), None),
        ((1, -1, -1, 3), Layout(0, 0, 3, False)),
        ((-1, -1, 3), Layout(0, 0, 3, False)),
        ((-1, 3, -1, 5), Layout(0, 5, 3, True)),
        ((-1, 5, -1, 4), Layout(5, 0, 4, False)),
        ((2, 3, 8, 8), None),
        ((-1, 5, 8, 8), None),
        ((-1,), None),
    ],
)
def test_what_could_be_a_picture_is_told_by_a_shape(shape: tuple[int, ...], wanted: Layout | None) -> None:
    spec = TensorSpec("x", "FP32", shape)
    assert layout_of(spec) == wanted
    assert takes_pictures(spec) == (wanted is not None)


def test_a_grey_picture_needs_no_axis_for_its_channel(tmp_path: Path) -> None:
    said: list[str] = []
    grey = np.arange(72, dtype=np.uint8).reshape(8, 9)
    file = picture(tmp_path / "p.png", grey)
    spec = TensorSpec("x", "FP32", (-1, 8, 9))
    found = tensors_of([file], [spec], brightness="0-255", lines=False, say=said.append)["x"]
    assert found.tolist() == [grey.tolist()]
    assert said == [f"{file}: brightness as 0-255 (--brightness chooses another)"]


def test_a_picture_is_resized_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    file = picture(tmp_path / "p.png", np.full((6, 10), 100, np.uint8))
    spec = TensorSpec("x", "FP32", (-1, 1, 4, 4))
    found = tensors_of([file], [spec], brightness="0-255", lines=False, say=said.append)["x"]
    assert found.shape == (1, 1, 4, 4)
    assert set(found.ravel().tolist()) == {100}
    assert "resized from 10 x 6 to 4 x 4 pixels" in said[0]
    coloured = TensorSpec("x", "FP32", (-1, 3, 6, 10))
    scaled = made(file, specs=(coloured,), brightness="imagenet")["x"][0, :, 0, 0]
    assert scaled == pytest.approx(
        [(100 / 255 - 0.485) / 0.229, (100 / 255 - 0.456) / 0.224, (100 / 255 - 0.406) / 0.225], abs=1e-5
    )


def test_what_does_not_fit_is_told_with_what_was_expected_and_what_came(tmp_path: Path) -> None:
    assert "takes FP32 [any, 4]; the value given has 3 values" in refused("1,2,3")
    assert "There is no file nowhere.png" in refused("nowhere.png")
    assert "its inputs are pixels (FP32 [any, 4]). Try --input 0,0,0,0" in refused("hello")
    assert "Did you mean 'pixels'?" in refused("pixel=1,2,3,4", specs=(PIXELS, IMAGE))
    assert "has no input 'y'" in refused("y=1,2,3,4")
    assert "has no input 'label'; its inputs are" in refused("label=3", specs=(PIXELS, IMAGE))
    assert "holds numbers" in refused("text=[1, 2]", specs=(TEXT,))
    assert "is no picture's layout" in refused("pixels=" + picture(tmp_path / "p.png", np.zeros((2, 2), np.uint8)))
    assert "values with fractions" in refused("1.5", specs=(IDS,))
    assert "row 2 has 1 values where the first has 2" in refused(written(tmp_path / "t.csv", "1,2\n3\n"))
    assert "is not valid JSON" in refused(written(tmp_path / "t.json", "{"))
    assert "is no array" in refused(_broken(tmp_path / "t.npy"))
    assert "'picture' is missing" in refused("text=a", specs=(TEXT, TensorSpec("picture", "BYTES", (-1,))))


def _broken(path: Path) -> str:
    path.write_bytes(b"\x93NUMPY nothing")
    return str(path)


@pytest.mark.parametrize(
    ("specs", "line"),
    [
        ((PIXELS,), "--input 0,0,0,0"),
        ((TensorSpec("pixels", "FP32", (-1, 64)),), "--input VALUES.npy"),
        ((TEXT,), "--input 'some text'"),
        ((IMAGE, FREE), "--input PICTURE.jpg"),
        ((TEXT, IDS), "--input text='some text' --input ids=0"),
    ],
)
def test_the_example_names_what_is_needed(specs: tuple[Any, ...], line: str) -> None:
    assert example_input(specs) == line
