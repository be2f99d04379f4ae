"""``/invocations`` with a table as text/csv, in the form of MLflow's scoring server: a line of columns, then the rows.

Every cell is a text. The datatype of its input decides what it means. An empty cell is a missing value: NaN in an input
of floats. ``invocations`` turns frames into inputs.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Final

from inferd.errors import InvalidRequest
from inferd.predict.bounds import most_in_table, too_large
from inferd.predict.codecs.duplicates import first_repeated
from inferd.predict.codecs.invocations import answer_in_rows, table
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import shown
from inferd.predict.codecs.values import wanted_outputs
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

WITHOUT_HEADER: Final = "invocations.csv.rows"
"""The dialect of a table whose first line is a row already (``text/csv; header=absent``)."""

_PARAM: Final = "body"
_MOST_COLUMNS: Final = 65_536
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER: Final = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|inf|infinity|nan)", re.I
)
_PLAIN: Final = re.compile(r"[0-9+\-.eEinfatyINFATY]*")  # of such characters ``float`` reads what ``_NUMBER`` allows
_FLOATS: Final = frozenset(("FP16", "BF16", "FP32", "FP64"))
_TRUTHS: Final = {"true": True, "false": False, "1": True, "0": False}


class InvocationsCsvCodec:
    """Dialects ``invocations.csv`` and, without a line of columns, ``invocations.csv.rows``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        names, rows = _read(request.body, contract, has_header=request.dialect != WITHOUT_HEADER)
        datatypes = {spec.name: spec.datatype for spec in contract.inputs}
        if names is not None and datatypes.keys() & set(names):
            wanted = [datatypes.get(name, "BYTES") for name in names]
        else:  # all of them are one input's
            only = [spec.datatype for spec in contract.inputs if not spec.is_optional] or ["BYTES"]
            wanted = only[:1] * len(rows[0][1])
        is_numbers = all(datatype in _FLOATS for datatype in wanted)
        values = [
            (_numbers(row) if is_numbers else None)
            or [_value(cell, datatype, line) for cell, datatype in zip(row, wanted, strict=True)]
            for line, row in rows
        ]
        inputs = table(names, values, contract, _PARAM)
        return DecodedRequest(inputs=inputs, wanted=wanted_outputs(contract), is_json_answer=True)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        return answer_in_rows(result, decoded.wanted, info)


def _read(body: bytes, contract: Contract, *, has_header: bool) -> tuple[list[str] | None, list[tuple[int, list[str]]]]:
    """The columns' names and the rows, each with its line in the text. Raises InvalidRequest."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest("The table is not valid UTF-8; encode it as UTF-8.", code="invalid_utf8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    most_rows, most_cells = most_in_table(contract, has_header=has_header)
    cells = 0
    try:
        for row in reader:
            if not row:
                continue
            cells += len(row)
            if len(rows) >= most_rows or cells > most_cells:
                raise too_large(len(rows) + 1 - has_header, cells, contract)
            if rows and len(row) != len(rows[0][1]):
                raise InvalidRequest(
                    f"Line {reader.line_num} of the table has {len(row)} values; {len(rows[0][1])} are expected, one "
                    "for each column.",
                    param=_PARAM,
                )
            rows.append((reader.line_num, row))
    except csv.Error as error:
        raise InvalidRequest(
            f"Line {reader.line_num} of the table is no CSV ({error}); quote values that hold commas, quotes or ends "
            "of lines.",
            param=_PARAM,
        ) from None
    names = rows.pop(0)[1] if has_header and rows else None
    if not rows:
        raise InvalidRequest(
            "The table has no rows; send a line with the columns' names and a line for each row.", param=_PARAM
        )
    if len(rows[0][1]) > _MOST_COLUMNS:
        raise InvalidRequest(
            f"The table has {len(rows[0][1])} columns; at most {_MOST_COLUMNS} are taken.", param=_PARAM
        )
    twice = first_repeated(names or ())
    if twice is not None:
        raise InvalidRequest(
            f"The table has the column {shown(twice)} twice; columns are told apart by their names.", param=_PARAM
        )
    return names, rows


def _numbers(row: list[str]) -> list[object] | None:
    """The cells as floats, where all are plain numbers; None: each cell needs a look of its own."""
    if _PLAIN.fullmatch("".join(row)) is None:
        return None
    try:
        return [float(cell) if cell else None for cell in row]
    except ValueError:
        return None


def _value(cell: str, datatype: str, line: int) -> object:
    """What the cell stands for. Raises InvalidRequest."""
    if datatype == "BYTES":
        return cell
    plain = cell.strip(" \t")
    if datatype == "BOOL":
        found = _TRUTHS.get(plain.lower())
        if found is None:
            raise _wrong(cell, "true or false", line)
        return found
    is_float = datatype in _FLOATS
    if not plain and is_float:
        return None
    if not _NUMBER.fullmatch(plain):  # Python's own words for numbers are more: 1_000, and every script's digits
        raise _wrong(cell, "a number", line)
    if not is_float and _WHOLE.fullmatch(plain):
        return int(plain)
    return float(plain)  # 3.0 is a whole number too; the check decides whether it fits


def _wrong(cell: str, wanted: str, line: int) -> InvalidRequest:
    return InvalidRequest(f"Line {line} of the table has {shown(cell)} where {wanted} is expected.", param=_PARAM)
