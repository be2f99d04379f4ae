"""Rules of ONNX's operators for tables (ai.onnx.ml), which scikit-learn's and the boosters' converters write.

The operators: https://onnx.ai/onnx/operators/index.html#ai-onnx-ml.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inferd.registry.rows.value import (
    MixedRowsError,
    Rows,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    axis_of,
    dims_of,
    made,
    plain,
    times,
)

BY_ELEMENT: Final = frozenset({"Binarizer", "LabelEncoder", "CategoryMapper"})
"""The shape stays, and each element is computed from its own place."""

BY_ROW: Final = frozenset({"Scaler", "Imputer", "Normalizer"})
"""The shape stays, and each row [row, feature] is computed from itself."""

REGRESSORS: Final = frozenset({"LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor", "TreeEnsemble"})
CLASSIFIERS: Final = frozenset({"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"})


def table(value: Value) -> tuple[Size, ...]:
    """The dimensions of a table [row, feature]. Raises UnknownRuleError for a tensor of another rank, which the
    operators take as one row."""
    plain(value)
    dims = dims_of(value)
    if len(dims) != 2 or axis_of(value) not in (0, None):
        raise UnknownRuleError("takes a tensor that is no table of rows")
    return dims


def by_row(value: Value) -> Value:
    return made(table(value), axis_of(value))


def scores(value: Value, symbols: Symbols) -> Value:
    """A number of scores for each row."""
    return made([table(value)[0], symbols.size()], axis_of(value))


def labels(value: Value) -> Value:
    """A label for each row."""
    return made([table(value)[0]], axis_of(value))


def encoded(value: Value, symbols: Symbols) -> Value:
    """Each element as several: one for each category."""
    plain(value)
    return made([*dims_of(value), symbols.size()], axis_of(value))


def extracted(value: Value, places: Value) -> Value:
    """Slices of the last dimension, one for each place."""
    plain(value, places)
    dims, chosen = dims_of(value), dims_of(places)
    count, rows = times(*chosen), axis_of(places)
    if axis_of(value) == len(dims) - 1 or not dims:
        raise MixedRowsError("picks single rows")
    if rows is not None and (isinstance(value, Rows) or times(*chosen[:rows]) != Size(1)):
        raise UnknownRuleError("picks for each row from all rows")
    kept = dims[:-1] or (Size(1),)
    return made([*kept, count], axis_of(value) if rows is None else len(kept))


def joined(values: Sequence[Value], symbols: Symbols) -> Value:
    """Features of several tables beside each other."""
    rows = {(axis_of(value), table(value)[0]) for value in values}
    if len(rows) != 1:
        raise UnknownRuleError("joins tables of different numbers of rows")
    axis, count = rows.pop()
    return made([count, symbols.size()], axis)
