"""The arguments of ``inferd predict`` as a model's inputs: pictures, arrays, tables, JSON, texts, numbers.

The kind of an argument is recognised by its content: what is no text is a picture, or bytes of a kind that the model
knows. Then it is brought to the declared shape if there is only one way. Knows files and a model's metadata; knows no
server.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from inferd.cli.predict.layout import example_input, layout_of, takes_pictures
from inferd.cli.predict.pictures import Range, pixels_of
from inferd.cli.ready import spec_text
from inferd.errors import InvalidRequest
from inferd.predict.check import Checker
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import Array, Contract, object_array
from inferd.types import TensorSpec

_NAMED: Final = re.compile(r"([A-Za-z_][\w.:/-]*)=(.*)", re.DOTALL)
_FILE: Final = re.compile(r"\S+\.(jpe?g|png|webp|gif|bmp|tiff?|json|npy|csv|txt)", re.IGNORECASE)

_json: Final = msgspec.json.Decoder()


class Given(NamedTuple):
    """One argument, with the kind that its content shows."""

    kind: Literal["picture", "numbers", "object", "texts", "table"]
    value: object  # bytes; an array; a dict; a list of texts; a dict of columns
    origin: str  # its name in errors
    text: str = ""  # the text that the numbers were read from, where it may have been meant as a text


def tensors_of(
    words: Sequence[str], specs: Sequence[TensorSpec], *, brightness: Range, lines: bool, say: Callable[[str], None]
) -> dict[str, Array]:
    """The model's inputs from the values of ``--input``. ``say`` is called with notes about choices that were made.
    Raises InvalidRequest with what was expected and what was given."""
    by_name = {spec.name: spec for spec in specs}
    found: dict[str, list[Array]] = {}

    def add(spec: TensorSpec, given: Given) -> None:
        found.setdefault(spec.name, []).append(_fitted(spec, given, brightness, say))

    for word in words:
        name, rest = _split(word, by_name)
        given = _read(rest, lines=lines)
        if name is not None:
            add(by_name[name], given)
        elif given.kind in ("object", "table"):
            assert isinstance(given.value, Mapping)
            for key, value in _members(given.value, by_name, given.origin).items():
                add(by_name[key], _recognised(value, f"{given.origin}, {key}"))
        else:
            add(_input_for(given, specs, found), given)
    made = {name: _joined(by_name[name], parts) for name, parts in found.items()}
    return _checked(_level(made, by_name), specs)


# -- reading -------------------------------------------------------------------------------------


def _split(word: str, by_name: Mapping[str, TensorSpec]) -> tuple[str | None, str]:
    """``name=value``. A text may contain an equals sign, so the part before it counts only if it is an input's name."""
    match = _NAMED.fullmatch(word)
    if match is None:
        return None, word
    if match[1] in by_name:
        return match[1], match[2]
    close = difflib.get_close_matches(match[1], by_name, cutoff=0.75) if len(by_name) > 1 else []
    if close:
        raise InvalidRequest(f"The model has no input {match[1]!r}. Did you mean {close[0]!r}?")
    texts = (spec.datatype == "BYTES" and not takes_pictures(spec) for spec in by_name.values())
    if any(texts) or Path(word).is_file():
        return None, word
    raise InvalidRequest(f"The model has no input {match[1]!r}; its inputs are {_listed(by_name.values())}.")


def _read(word: str, *, lines: bool) -> Given:
    """Of a file, of stdin, or of the word itself."""
    if word == "-":
        return _content(sys.stdin.buffer.read(), "stdin", "", lines=lines)
    path = Path(word.removeprefix("@")).expanduser()
    try:
        is_file = bool(word) and path.is_file()
    except (OSError, ValueError):  # longer than a path can be
        is_file = False
    if is_file:
        try:
            return _content(path.read_bytes(), str(path), path.suffix.lower(), lines=lines)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}.") from None
    if word.startswith("@") or _FILE.fullmatch(word):
        raise InvalidRequest(f"There is no file {word.removeprefix('@')}; check the path.")
    return _content(word.encode(), "the value given", "", lines=False)


def _content(data: bytes, origin: str, suffix: str, *, lines: bool) -> Given:
    if data.startswith(b"\x93NUMPY"):
        try:
            return Given("numbers", np.load(io.BytesIO(data), allow_pickle=False), origin)
        except (ValueError, EOFError) as error:
            raise InvalidRequest(f"{origin} is no array that can be read: {error}.") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Given("picture", data, origin)
    if "\0" in text:  # every picture format has such a byte or is invalid UTF-8
        return Given("picture", data, origin)
    if suffix == ".csv":
        return _table(text, origin)
    if suffix == ".json" or text.lstrip()[:1] in ("{", "["):
        try:
            value = _json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            if suffix == ".json":
                raise InvalidRequest(f"{origin} is not valid JSON: {error}.") from None
        else:
            return _recognised(value, origin)
    texts = text.splitlines() if lines else [text.removesuffix("\n")]
    numbers = None if lines or suffix == ".txt" else _numbers(text)
    return Given("texts", texts, origin) if numbers is None else Given("numbers", numbers, origin, text)


def _recognised(value: object, origin: str) -> Given:
    """JSON: an object of inputs, texts, or numbers in lists of equal lengths."""
    if isinstance(value, Mapping):
        return Given("object", value, origin)
    if isinstance(value, str):
        return Given("texts", [value], origin)
    if isinstance(value, np.ndarray):
        return Given("numbers", value, origin)
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return Given("texts", value, origin)
    try:
        array = np.array(value)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise InvalidRequest(f"{origin} is neither texts nor numbers in lists of equal lengths.")
    return Given("numbers", array, origin)


def _numbers(text: str) -> Array | None:
    """Numbers with commas or blanks between them."""
    words = text.replace(",", " ").split()
    try:
        return np.array([float(word) for word in words]) if words else None
    except ValueError:
        return None


def _table(text: str, origin: str) -> Given:
    """CSV: rows of numbers, or columns with names."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if not rows:
        raise InvalidRequest(f"{origin} has no rows.")
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise InvalidRequest(f"{origin}: row {number} has {len(row)} values where the first has {width}.")
    if _numbers(" ".join(rows[0])) is not None:
        return Given("numbers", _cells(rows, origin), origin)
    names, values = [name.strip() for name in rows[0]], rows[1:]
    if not values:
        raise InvalidRequest(f"{origin} has a line of names and no rows.")
    columns = {name: [row[place] for row in values] for place, name in enumerate(names)}
    return Given("table", columns, origin)


def _cells(rows: list[list[str]], origin: str) -> Array:
    try:
        return np.array(rows, dtype=np.float64)
    except ValueError as error:
        raise InvalidRequest(f"{origin} holds values that are not numbers: {error}.") from None


def _rows(columns: Mapping[str, object], origin: str) -> Array:
    """Of columns in lists."""
    found = [column for column in columns.values() if isinstance(column, list)]
    try:
        rows = [list(row) for row in zip(*found, strict=True)]
    except ValueError:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(columns, found, strict=True))
        raise InvalidRequest(f"{origin}: its columns have different numbers of values: {lengths}.") from None
    return _cells(rows, origin)


def _members(value: Mapping[str, object], by_name: Mapping[str, TensorSpec], origin: str) -> dict[str, object]:
    """An object's or table's parts by the inputs' names; all of a table's columns, where no input has such names."""
    body = value.get("inputs")
    if isinstance(body, list) and "inputs" not in by_name:  # KServe v2's own form
        value = {str(one["name"]): _sent(one, origin) for one in body if isinstance(one, Mapping) and "name" in one}
    is_table = all(isinstance(column, list) for column in value.values())
    known = {key: part for key, part in value.items() if key in by_name}
    if len(known) == len(value):
        return {key: part if by_name[key].datatype == "BYTES" else _column(part) for key, part in known.items()}
    numeric = [name for name, spec in by_name.items() if spec.datatype != "BYTES"]
    if is_table and not known and len(numeric) == 1:
        return {numeric[0]: _rows(value, origin)}
    unknown = next(key for key in value if key not in by_name)
    raise InvalidRequest(
        f"{origin} names the input {unknown!r}, which the model does not have; its inputs are "
        f"{_listed(by_name.values())}."
    )


def _sent(one: Mapping[str, object], origin: str) -> object:
    """One of KServe v2's inputs."""
    data, shape = one.get("data"), one.get("shape")
    if not isinstance(data, list) or any(isinstance(text, str) for text in data):
        return data
    try:
        array = np.array(data)
        return array if shape is None else array.reshape(shape)  # type: ignore[call-overload]
    except (ValueError, TypeError):
        raise InvalidRequest(
            f"{origin}: the data of {one['name']!r} do not have their declared shape {shape}."
        ) from None


def _column(part: object) -> object:
    """The numbers of a CSV file's column, if all of them are numbers."""
    if isinstance(part, list) and part and all(isinstance(one, str) for one in part):
        numbers = _numbers(" ".join(part))
        return part if numbers is None or len(numbers) != len(part) else numbers
    return part


# -- fitting -------------------------------------------------------------------------------------


def _input_for(given: Given, specs: Sequence[TensorSpec], taken: Mapping[str, object]) -> TensorSpec:
    """The input for an argument without a name: the first that fits, required and free ones before others."""

    def rank(spec: TensorSpec) -> tuple[bool, bool]:
        return (spec.name in taken, spec.is_optional)

    able = [spec for spec in sorted(specs, key=rank) if _can_take(spec, given)]
    if not able and given.text:
        able = [spec for spec in sorted(specs, key=rank) if not takes_pictures(spec)]
    if not able:
        what = {"picture": "a file of bytes, such as a picture", "texts": "a text", "numbers": "numbers"}[given.kind]
        raise InvalidRequest(
            f"No input of the model takes {what} ({given.origin}); its inputs are {_listed(specs)}. Try "
            f"{example_input(specs)}."
        )
    return able[0]


def _can_take(spec: TensorSpec, given: Given) -> bool:
    match given.kind:
        case "picture":
            return spec.datatype == "BYTES" or layout_of(spec) is not None
        case "texts":
            return spec.datatype == "BYTES" and not takes_pictures(spec)
    return spec.datatype != "BYTES"


def _fitted(spec: TensorSpec, given: Given, brightness: Range, say: Callable[[str], None]) -> Array:
    value = given.value
    if given.kind == "picture" and spec.datatype == "BYTES":
        assert isinstance(value, bytes)
        return _shaped(spec, object_array([value]), given.origin)
    if given.kind == "picture":
        assert isinstance(value, bytes)
        return _shaped(spec, pixels_of(spec, value, given.origin, brightness, say), given.origin)
    if given.kind == "texts":
        assert isinstance(value, list)
        if spec.datatype != "BYTES":
            raise InvalidRequest(f"The input {spec.name!r} takes {_expected_text(spec)}; {given.origin} is text.")
        return _shaped(spec, object_array([text.encode() for text in value]), given.origin)
    if not isinstance(value, np.ndarray):
        raise InvalidRequest(f"The input {spec.name!r} takes {_expected_text(spec)}; {given.origin} is an object.")
    if spec.datatype == "BYTES":
        if not given.text:
            raise InvalidRequest(f"The input {spec.name!r} takes {_expected_text(spec)}; {given.origin} holds numbers.")
        value = object_array([given.text.removesuffix("\n").encode()])
    return _shaped(spec, value, given.origin)


def _shaped(spec: TensorSpec, array: Array, origin: str) -> Array:
    """The values in the declared shape: as they are, as one row, or as rows of what the shape fixes."""
    wanted = spec.shape
    array = array.reshape((1,) * (len(wanted) - array.ndim) + array.shape)
    if array.ndim == len(wanted) and all(want in (-1, has) for want, has in zip(wanted, array.shape, strict=True)):
        return array
    try:
        return array.reshape(wanted)
    except ValueError:
        raise InvalidRequest(
            f"The input {spec.name!r} takes {_expected_text(spec)}; {origin} has {array.size} values of the shape "
            f"{list(array.shape)}."
        ) from None


def _joined(spec: TensorSpec, parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    try:
        return np.concatenate(parts)
    except ValueError:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise InvalidRequest(f"The values for the input {spec.name!r} have different shapes: {shapes}.") from None


def _level(made: dict[str, Array], by_name: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """One text for all rows of the other inputs: a query and its documents."""
    rows = max([1, *(len(array) for array in made.values() if array.ndim)])
    return {
        name: np.repeat(array, rows, axis=0)
        if array.ndim and len(array) == 1 < rows and by_name[name].shape[:1] == (-1,)
        else array
        for name, array in made.items()
    }


def _checked(made: Mapping[str, Array], specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """In the declared datatypes, where no value is lost. Raises InvalidRequest."""
    if not made:
        raise InvalidRequest(f"Nothing was given; try {example_input(specs)}.")
    checked, _ = Checker(Contract(inputs=tuple(specs), outputs=())).check(DecodedRequest(inputs=made))
    return dict(checked)


def _expected_text(spec: TensorSpec) -> str:
    return spec_text(msgspec.structs.replace(spec, is_optional=False))


def _listed(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} ({_expected_text(spec)})" for spec in specs) or "none"
