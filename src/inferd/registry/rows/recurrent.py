"""Rules of recurrent layers, which carry a state along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.registry.rows.value import (
    Fixed,
    MixedRowsError,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    axis_of,
    dims_of,
    made,
    plain,
)


def recurrent(
    value: Value,
    weights: Sequence[Value | None],
    lengths: Value | None,
    states: Sequence[Value | None],
    *,
    hidden: Size,
    directions: int,
    batch_first: bool,
    kind: str,
) -> tuple[Value, Value]:
    """ONNX's LSTM, GRU and RNN. ``value``: [time, batch, features], or [batch, time, features]. The whole output and
    the last state, as ONNX lays them out."""
    plain(value, lengths, *weights, *states)
    dims, axis = dims_of(value), axis_of(value)
    if len(dims) != 3:
        raise UnknownRuleError("has no sequence as its input")
    if any(not isinstance(weight, Fixed | None) for weight in weights):
        raise UnknownRuleError("takes its weights from the rows")
    batch = 0 if batch_first else 1
    if axis is None:
        if any(not isinstance(one, Fixed | None) for one in (lengths, *states)):
            raise UnknownRuleError("begins with states of rows that its input has not")
    elif axis == 2:
        raise MixedRowsError("sums over the rows")
    elif axis != batch:
        raise MixedRowsError(
            f"carries the state of its {kind} from row to row: its layout has time along that dimension"
        )
    rows = dims[batch]
    for one, place in ((lengths, 0), *((state, 0 if batch_first else 1) for state in states)):
        if one is not None and axis is not None and (axis_of(one) != place or dims_of(one)[place] != rows):
            raise UnknownRuleError("begins with states of another number of rows")
    ways = Size(directions)
    whole = (rows, dims[1], ways, hidden) if batch_first else (dims[0], ways, rows, hidden)
    last = (rows, ways, hidden) if batch_first else (ways, rows, hidden)
    places = (None, None) if axis is None else (0, 0) if batch_first else (2, 1)
    return made(whole, places[0]), made(last, places[1])


def hidden_size(weight: Value | None, symbols: Symbols) -> Size:
    """The last dimension of the recurrent weights [directions, gates x hidden, hidden]."""
    if weight is None or not isinstance(weight, Fixed) or weight.dims is None or not weight.dims:
        return symbols.size()
    return weight.dims[-1]
