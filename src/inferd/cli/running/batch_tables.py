"""Batch jobs as tables: requests from CSV and Parquet files, and results into them.

A row is a request. The column ``custom_id`` names it; without it the name is ``row-`` and the number. Every other
column is a field of the request's body; an empty cell leaves it out. Of a conversation ``prompt`` is the user's message
and ``system`` the one before it.
Columns of models that predict are in ``batch_tensors``. Reads and writes row by row, Parquet files with pyarrow.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from inferd.cli.running.batch_tensors import Bodies, is_scalar, output_cells
from inferd.errors import InvalidRequest
from inferd.gateway.kserve.models import TensorMetadata

TABLES: Final = (".csv", ".parquet")
MAX_CELL_BYTES: Final = 64 * 1024 * 1024

_TEXTS: Final = frozenset(("custom_id", "model", "prompt", "system", "input", "user"))
"""Columns whose cells are texts, whatever they look like."""

_CHAT: Final = "/v1/chat/completions"
_ROWS: Final = 1024  # of a Parquet file, at a time
_encode: Final = msgspec.json.Encoder().encode

Row = Mapping[str, Any]


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def check_table(path: Path) -> None:
    """Raises InvalidRequest where the packages for such a file are missing."""
    if path.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise InvalidRequest(
            f"{path} needs the package pyarrow: pip install pyarrow. CSV and JSON lines need nothing more."
        )


# -- requests ---------------------------------------------------------------------------------


def requests_of(path: Path, endpoint: str, body_of: Bodies) -> Iterator[bytes]:
    """The lines of a batch's input. Raises InvalidRequest."""
    number = 0
    for number, row in enumerate(_rows(path), 1):
        yield _request(path, number, row, endpoint, body_of)
    if not number:
        raise InvalidRequest(f"{path} has no rows; write one request in each, below the names of the columns.")


def _rows(path: Path) -> Iterator[Row]:
    return _parquet_rows(path) if path.suffix.lower() == ".parquet" else _csv_rows(path)


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(MAX_CELL_BYTES)
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise InvalidRequest(
                        f"Line {reader.line_num} of {path} has another number of cells than the first line; "
                        "quote cells that have commas."
                    )
                yield row
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8 text; save it as CSV with the encoding UTF-8.") from None
    except csv.Error as error:
        raise InvalidRequest(f"{path} is not a CSV file: {error}.") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    arrow: Any = importlib.import_module("pyarrow")
    try:
        with contextlib.closing(parquet.ParquetFile(path)) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise InvalidRequest(f"{path} cannot be read as a Parquet file: {error}.") from None


def _request(path: Path, number: int, row: Row, endpoint: str, body_of: Bodies) -> bytes:
    cells = {name: value for name, value in row.items() if value is not None and value != ""}
    name = str(cells.pop("custom_id", f"row-{number}"))
    try:
        body = body_of(cells)
    except ValueError as error:
        raise InvalidRequest(f"Row {number} of {path} {error}") from None
    try:
        return _encode({"custom_id": name, "method": "POST", "url": endpoint, "body": body}) + b"\n"
    except TypeError as error:
        raise InvalidRequest(
            f"Row {number} of {path} has a value that is no JSON ({error}); write it as text."
        ) from None


def text_bodies(endpoint: str, model: str) -> Bodies:
    """How rows become requests of a model that reads texts. ``model``: of rows that name none."""

    def body(row: Row) -> dict[str, Any]:
        made = {name: _cell(name, value) for name, value in row.items()}
        made.setdefault("model", model)
        if endpoint == _CHAT and "messages" not in made:
            prompt, system = made.pop("prompt", None), made.pop("system", None)
            if prompt is None:
                raise ValueError(f"has no prompt; {endpoint} needs the column 'prompt', or 'messages' with JSON.")
            said = [] if system is None else [{"role": "system", "content": system}]
            made["messages"] = [*said, {"role": "user", "content": prompt}]
        return made

    return body


def _cell(name: str, value: Any) -> Any:
    """The value of a cell: JSON where it is written as JSON, else a text."""
    if not isinstance(value, str) or name in _TEXTS:
        return value
    try:
        return msgspec.json.decode(value.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return value


# -- results ----------------------------------------------------------------------------------


class _Response(msgspec.Struct, frozen=True):
    status_code: int = 0
    body: Any = None


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""


class _Result(msgspec.Struct, frozen=True):
    custom_id: str | None = None
    response: _Response | None = None
    error: _Problem | None = None


class _Id(msgspec.Struct, frozen=True):
    custom_id: str | None = None


_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_COLUMNS: Final = {
    "custom_id": "string",
    "status": "int64",
    "answer": "string",
    "error": "string",
    "input_tokens": "int64",
    "output_tokens": "int64",
    "body": "string",
}
"""The columns of a table of texts, and their types in pyarrow."""

_result_decoder: Final = msgspec.json.Decoder(_Result)
_id_decoder: Final = msgspec.json.Decoder(_Id)


def in_order(lines: Iterable[bytes], answers: Iterator[bytes], errors: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of both files of results in the order of the input's lines, of which each has one result."""
    answer = next(answers, None)
    for line in lines:
        if not line.strip():
            continue
        if answer is not None and _name_of(line) == _name_of(answer):
            yield answer
            answer = next(answers, None)
        elif (error := next(errors, None)) is not None:
            yield error


def write_table(path: Path, results: Iterator[bytes], outputs: Sequence[TensorMetadata] | None = None) -> None:
    """Write results as a table. ``outputs``: of the model, where it predicts. Raises OSError."""
    columns = _COLUMNS if outputs is None else _columns_of(outputs)
    rows = (_row(_result_decoder.decode(line), outputs) for line in results)
    writing = _write_parquet if path.suffix.lower() == ".parquet" else _write_csv
    writing(path, columns, rows)


def _columns_of(outputs: Sequence[TensorMetadata]) -> dict[str, str]:
    """The columns of a table of predictions. An output has another column's name with ``output_`` before it."""
    kept = ("custom_id", "status", "error", "body")
    own = {
        f"output_{spec.name}" if spec.name in kept else spec.name: _arrow_type(spec.datatype)
        if is_scalar(spec)
        else "string"
        for spec in outputs
    }
    return {"custom_id": "string", "status": "int64", **own, "error": "string", "body": "string"}


def _arrow_type(datatype: str) -> str:
    """Of a column with values of an output's datatype."""
    if datatype.startswith(("FP", "BF")):
        return "float64"
    if datatype == "BOOL":
        return "bool_"
    return "string" if datatype == "BYTES" else "uint64" if datatype == "UINT64" else "int64"


def _name_of(line: bytes) -> str | None:
    try:
        return _id_decoder.decode(line).custom_id
    except (ValueError, RecursionError):
        return None


def _row(result: _Result, outputs: Sequence[TensorMetadata] | None) -> tuple[Any, ...]:
    response = result.response or _Response()
    body = response.body if isinstance(response.body, dict) else {}
    given = body.get("usage")
    usage: dict[str, Any] = given if isinstance(given, dict) else {}
    failed = response.status_code >= 400 or result.error is not None
    begin = (result.custom_id, response.status_code or None)
    error = _reason(result, body) if failed else None
    whole = None if result.response is None else _encode(response.body).decode()
    if outputs is not None:
        return (*begin, *output_cells({} if failed else body, outputs), error, whole)
    tokens = (usage.get(f"{old}_tokens", usage.get(f"{new}_tokens")) for old, new in _SIDES)
    return (*begin, None if failed else _answer(body), error, *tokens, whole)


_SIDES: Final = (("prompt", "input"), ("completion", "output"))


def _reason(result: _Result, body: Row) -> str:
    if result.error is not None:
        return result.error.message
    error = body.get("error")
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def _answer(body: Row) -> str | None:
    """The text of an answer, or its vector as JSON; None: the body tells it alone."""
    found = _first(body.get("choices")) or {}
    text = found.get("text") if "text" in found else (found.get("message") or {}).get("content")
    if text is not None:
        return str(text)
    parts = body.get("content") or (_last(body.get("output")) or {}).get("content")
    if isinstance(parts, list):
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    vector = (_first(body.get("data")) or {}).get("embedding")
    return None if vector is None else _encode(vector).decode()


def _first(value: Any) -> dict[str, Any] | None:
    return value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def _last(value: Any) -> dict[str, Any] | None:
    return _first(value[::-1]) if isinstance(value, list) else None


def _write_csv(path: Path, columns: Mapping[str, str], rows: Iterator[tuple[Any, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([_inert(name) for name in columns])
        for row in rows:
            writer.writerow([_inert(cell) for cell in row])


def _inert(cell: Any) -> Any:
    """A text that a spreadsheet would compute as a formula gets an apostrophe before it, as OWASP advises (CSV
    injection): answers and names of requests come from outside."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def _write_parquet(path: Path, columns: Mapping[str, str], rows: Iterator[tuple[Any, ...]]) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        for some in _groups(rows, _ROWS):
            cells = [list(column) for column in zip(*some, strict=True)]
            writer.write_table(arrow.table(dict(zip(columns, cells, strict=True)), schema))


def _groups(rows: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    some: list[tuple[Any, ...]] = []
    for row in rows:
        some.append(row)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
