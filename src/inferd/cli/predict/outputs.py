"""A prediction on a terminal: classes with their probabilities, short values whole, long ones abbreviated.

Knows the terminal and arrays; knows no server.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from inferd.cli.ready import shown
from inferd.predict.contract import Array
from inferd.types import TensorSpec

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_MOST_ROWS: Final = 20
_MOST_VALUES: Final = 8
_MOST_CHARS: Final = 400
_BAR_WIDTH: Final = 24


def table_of(outputs: Mapping[str, Array], specs: Mapping[str, TensorSpec], top: int | None) -> RenderableType:
    """A line for each row of each output; of classes the ``top`` most likely (None: as many as are read at a
    glance)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    num_rows = max((len(array) for array in outputs.values() if array.ndim), default=1)
    top = top or (5 if num_rows == 1 else 3 if num_rows <= 4 else 1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("output", *(("row",) if num_rows > 1 else ()), "value")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != "value", vertical="top")
    for name, array in outputs.items():
        rows = list(array) if array.ndim and len(array) == num_rows else [array]
        for number, row in enumerate(rows[:_MOST_ROWS]):
            cells = [Text(shown(name) if number == 0 else "", style="bold")]
            if num_rows > 1:
                cells.append(Text(str(number) if len(rows) > 1 else ""))
            table.add_row(*cells, _value(np.asarray(row), specs[name], top))
        if len(rows) > _MOST_ROWS:
            table.add_row(
                *([Text()] * (len(headings) - 1)), Text(f"... {len(rows) - _MOST_ROWS} more rows", style="dim")
            )
    return table


def _value(row: Array, spec: TensorSpec, top: int) -> Text:
    from rich.text import Text

    if spec.datatype == "BYTES":
        return Text("\n".join(text_of(value) for value in row.ravel().tolist()[:_MOST_ROWS]) or "(none)")
    if spec.labels and row.ndim == 1 and len(row) == len(spec.labels):
        return _classes(row, spec.labels, top)
    values = row.ravel()
    if values.size <= _MOST_VALUES:
        return Text(", ".join(number_text(value) for value in values.tolist()) or "(none)")
    first = ", ".join(number_text(value) for value in values[:_MOST_VALUES].tolist())
    shape = " x ".join(map(str, row.shape))
    return Text.assemble(f"{first}, ... ", (f"({shape} values, {_range(values)})", "dim"))


def _range(values: Array) -> str:
    if values.dtype.kind not in "iuf":
        return "of " + values.dtype.name
    return f"{number_text(values.min().item())} to {number_text(values.max().item())}"


def _classes(scores: Array, labels: tuple[str, ...], top: int) -> Text:
    """The best classes; a bar where the scores are probabilities."""
    from rich.text import Text

    best = np.argsort(scores, kind="stable")[::-1][:top]
    names = {place: shown(labels[place]) for place in best.tolist()}
    width = max(map(len, names.values()))
    are_probabilities = bool(scores.min() >= 0 and scores.max() <= 1.000001)
    found = Text()
    for number, place in enumerate(names):
        score = float(scores[place])
        bar = "━" * round(_BAR_WIDTH * score) if are_probabilities else ""
        found.append("\n" if number else "")
        found.append(f"{names[place]:<{width}}  ", style="bold" if number == 0 else "")
        found.append(f"{score:.4f}  " if are_probabilities else f"{number_text(score):>10}")
        found.append(bar, style="green" if number == 0 else "dim")
    return found


def number_text(value: object) -> str:
    """A number, rounded to a few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def text_of(value: object) -> str:
    """A BYTES element: its text, indented when it is JSON, or a description of bytes that are no text."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"({len(value):,} bytes that are no text; --json shows them in base64)"
    if text[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    cut = shown(text[:_MOST_CHARS], keep="\n\t")
    return cut if len(text) <= _MOST_CHARS else f"{cut}... ({len(text):,} characters)"


def document_of(
    model: str, version: str, outputs: Mapping[str, Array], specs: Mapping[str, TensorSpec]
) -> dict[str, object]:
    """The same for programs: KServe v2's answer, with the labels of classes. Bytes that are no text are in base64."""
    return {
        "model_name": model,
        "model_version": version,
        "outputs": [_output(specs[name], array) for name, array in outputs.items()],
    }


def _output(spec: TensorSpec, array: Array) -> dict[str, object]:
    found: dict[str, object] = {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape)}
    if spec.datatype != "BYTES":
        found["data"] = array.ravel().tolist()
    else:
        values = [value if isinstance(value, bytes) else str(value).encode() for value in array.ravel().tolist()]
        try:
            found["data"] = [value.decode() for value in values]
        except UnicodeDecodeError:
            found["parameters"] = {"content_type": "base64"}
            found["data"] = [base64.b64encode(value).decode() for value in values]
    if spec.labels:
        found["labels"] = list(spec.labels)
    return found
