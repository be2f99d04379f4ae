"""Outputs that wait for a slow reader are merged without loss, and in their order."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.merging import MergedOutput, joined
from inferd.types import CallDelta, Delta, Output

deltas = st.lists(
    st.tuples(st.integers(0, 1), st.text(max_size=3), st.sampled_from(["text", "reasoning", "call", "more"])),
    min_size=2,
    max_size=12,
)


def runs(outputs: list[Output], index: int) -> tuple[list[tuple[str, str]], list[int]]:
    """What a choice says, with one entry for each run of text, reasoning or calls, and its tokens."""
    own = [delta for output in outputs for delta in output.deltas if delta.index == index]
    said: list[tuple[str, str]] = []
    for kind, run in groupby((delta for delta in own if delta.kind), key=lambda delta: delta.kind):
        said.append((kind, "".join(_written(delta) for delta in run)))
    return said, [token for delta in own for token in delta.token_ids]


def _written(delta: Delta) -> str:
    calls = [part.arguments if part.name is None else f"<{part.name}>{part.arguments}" for part in delta.calls]
    return delta.text + delta.reasoning + "".join(calls)


@given(deltas)
def test_merged_outputs_have_all_parts_in_their_order(drawn: list[tuple[int, str, str]]) -> None:
    outputs: list[Output] = []
    num_calls = [0, 0]
    for number, (index, text, kind) in enumerate(drawn):
        calls: tuple[CallDelta, ...] = ()
        if kind == "call":
            calls = (CallDelta(num_calls[index], f"f{number}", '{"a'),)
            num_calls[index] += 1
        elif kind == "more" and num_calls[index]:
            calls = (CallDelta(num_calls[index] - 1, None, text),)
        shown, thought = text if kind == "text" else "", text if kind == "reasoning" else ""
        outputs.append(Output("r", (Delta(index, shown, (number,), reasoning=thought, calls=calls),)))
    merged: Output | MergedOutput = outputs[0]
    for output in outputs[1:]:
        merged = joined(merged, output)
    assert isinstance(merged, MergedOutput)
    for index in (0, 1):
        assert runs([merged.output()], index) == runs(outputs, index)
