"""What holds of states between the requests of one sequence."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from inferd.config import ModelConfig, SequenceConfig
from inferd.errors import InferdError, InvalidRequest, ModelLoadError, Overloaded
from inferd.predict.contract import Array
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes.onnx import load
from inferd.predict.sequences import Sequences
from inferd.registry.rows.verdict import DECLARED

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx-models" / "silero-vad"
STATES = {"sumN": "sum"}


def write_sum(path: Path, *, layers: int = 2, state_rows: str | int = "n", reduces_rows: bool = False) -> Path:
    """y = sum + x * scale; the sum goes on. Its state has the batch in the middle, as recurrent networks do.

    ``reduces_rows``: y is one number for all rows.
    """
    float_ = TensorProto.FLOAT
    state: list[str | int | None] = [layers, state_rows, 1]
    answer: list[str | int | None] = [1] if reduces_rows else ["n", 1]
    axes = [0, 1] if reduces_rows else [0]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "scale"], ["scaled"]),
            helper.make_node("Add", ["sum", "scaled"], ["sumN"]),
            helper.make_node("ReduceSum", ["sumN", "axes"], ["y"], keepdims=0),
        ],
        "sum",
        [
            helper.make_tensor_value_info("x", float_, ["n", 1]),
            helper.make_tensor_value_info("scale", float_, []),
            helper.make_tensor_value_info("sum", float_, state),
        ],
        [helper.make_tensor_value_info("y", float_, answer), helper.make_tensor_value_info("sumN", float_, state)],
        [helper.make_tensor("axes", TensorProto.INT64, [len(axes)], axes)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def silent(phase: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Sequences]:
    path = write_sum(tmp_path_factory.mktemp("sum") / "sum.onnx")

    def made(clock: Clock | None = None, **sequence: object) -> Sequences:
        config = ModelConfig(source=str(path), sequence=SequenceConfig(**{"states": STATES, **sequence}))  # type: ignore[arg-type]
        return Sequences("sum", load("sum", path, config, silent), config, clock or Clock(), rows=DECLARED)

    return made


def item(
    sequence: str, *values: float, start: bool = False, end: bool = False, tenant: str = "", scale: float = 1.0
) -> Item:
    inputs = {"x": np.array(values or (1.0,), np.float32)[:, None], "scale": np.array(scale, np.float32)}
    return Item(
        request_id=sequence, inputs=inputs, tenant=tenant, sequence=sequence, sequence_start=start, sequence_end=end
    )


def ask(model: Sequences, *items: Item) -> list[list[float]]:
    for one in items:
        model.prepare(one)
    answers = []
    for result in model.predict(items):
        assert isinstance(result, Result), result
        assert set(result.outputs) == {"y"}
        y: Array = result.outputs["y"]
        answers.append(y[:, 0].tolist())
    return answers


def test_a_sequence_goes_on_from_its_last_request(make: Callable[..., Sequences]) -> None:
    model = make()
    assert model.contract.is_stateful
    assert [spec.name for spec in model.contract.inputs if not spec.is_optional] == ["x", "scale"]
    assert [spec.name for spec in model.contract.outputs] == ["y"]
    assert ask(model, item("a", 1, start=True)) == [[2.0]]
    assert ask(model, item("a", 2)) == [[6.0]]
    assert ask(model, item("a", 3, end=True)) == [[12.0]]
    assert len(model) == 0
    with pytest.raises(InvalidRequest) as error:
        model.prepare(item("a", 1))
    assert error.value.code == "sequence_not_found"
    assert "sequence_start" in error.value.message


def test_starting_again_begins_with_nothing(make: Callable[..., Sequences]) -> None:
    model = make()
    ask(model, item("a", 5, start=True))
    assert ask(model, item("a", 1, start=True)) == [[2.0]]
    assert len(model) == 1


Steps = st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(Steps, st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_sequences_in_any_batches_equal_each_alone(
    make: Callable[..., Sequences], steps: list[tuple[int, int]], sizes: list[int]
) -> None:
    model, seen, sums = make(), set[int](), [0] * 4
    expected, items = [], []
    for which, value in steps:
        items.append(item(f"s{which}", value, start=which not in seen))
        seen.add(which)
        sums[which] += value
        expected.append([2.0 * sums[which]])
    found: list[list[float]] = []
    turn = 0
    while items:
        size = sizes[turn % len(sizes)]
        batch, items = items[:size], items[size:]
        found += ask(model, *batch)
        turn += 1
    assert found == expected


def test_sequences_of_different_rows_are_computed_together(make: Callable[..., Sequences]) -> None:
    model = make()
    assert ask(model, item("a", 1, 2, start=True), item("b", 10, start=True)) == [[2.0, 4.0], [20.0]]
    assert ask(model, item("b", 1), item("a", 1, 1)) == [[22.0], [4.0, 6.0]]
    with pytest.raises(InvalidRequest, match="2 rows"):
        model.prepare(item("a", 1))


@pytest.mark.parametrize(
    ("changes", "is_together"),
    [({}, True), ({"state_rows": 1}, False), ({"reduces_rows": True}, False)],
    ids=["rows everywhere", "a state without rows", "an answer without rows"],
)
def test_sequences_are_computed_together_only_if_states_and_answers_have_rows(
    tmp_path: Path, changes: dict[str, Any], is_together: bool
) -> None:
    path = write_sum(tmp_path / "sum.onnx", **changes)
    config = ModelConfig(source=str(path), sequence=SequenceConfig(states=STATES))
    model = Sequences("sum", load("sum", path, config, silent), config, Clock(), rows=DECLARED)
    assert (model.contract.max_items > 0) == is_together


def test_inputs_that_are_shared_keep_requests_apart(make: Callable[..., Sequences]) -> None:
    model = make()
    one, other = item("a", start=True), item("b", start=True, scale=3.0)
    model.prepare(one)
    model.prepare(other)
    assert one.bucket != other.bucket


def test_a_name_belongs_to_its_tenant(make: Callable[..., Sequences]) -> None:
    model = make()
    ask(model, item("a", 5, start=True, tenant="one"))
    with pytest.raises(InvalidRequest):
        model.prepare(item("a", 1, tenant="two"))
    assert ask(model, item("a", 1, start=True, tenant="two"), item("a", 1, tenant="one")) == [[2.0], [12.0]]


def test_what_is_idle_for_too_long_is_forgotten(make: Callable[..., Sequences]) -> None:
    clock = Clock()
    model = make(clock, idle_s=10)
    ask(model, item("a", start=True), item("b", start=True))
    clock.now = 9.0
    ask(model, item("b"))
    clock.now = 12.0
    ask(model, item("b"))
    with pytest.raises(InvalidRequest, match="idle for 10 s"):
        model.prepare(item("a"))
    assert len(model) == 1


def test_no_more_sequences_than_allowed(make: Callable[..., Sequences]) -> None:
    clock = Clock()
    model = make(clock, max_sequences=2, idle_s=10)
    ask(model, item("a", start=True), item("b", start=True))
    with pytest.raises(Overloaded, match="max_sequences"):
        model.prepare(item("c", start=True))
    ask(model, item("a", end=True))
    ask(model, item("c", start=True))
    clock.now = 20.0
    ask(model, item("d", start=True), item("e", start=True))


def test_a_failed_request_leaves_the_state_as_it_was(make: Callable[..., Sequences]) -> None:
    model = make()
    ask(model, item("a", 1, start=True))
    bad, good = item("a", 7), item("b", 1, start=True)
    model.prepare(bad)
    model.prepare(good)
    bad.inputs = {**bad.inputs, "x": np.array([["no"]], object)}
    results = model.predict([bad, good])
    assert isinstance(results[0], InferdError)
    assert isinstance(results[1], Result)
    assert ask(model, item("a", 1)) == [[4.0]]


def test_a_request_that_brings_its_state_needs_no_sequence(make: Callable[..., Sequences]) -> None:
    model = make()
    alone = item("", 1)
    with pytest.raises(InvalidRequest) as error:
        model.prepare(alone)
    assert error.value.code == "missing_sequence"
    alone.inputs = {**alone.inputs, "sum": np.full((2, 1, 1), 5, np.float32)}
    assert ask(model, alone) == [[12.0]]
    assert len(model) == 0


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ({"nope": "sum"}, "no output 'nope'"),
        ({"sumN": "nope"}, "no input 'nope'"),
        ({"y": "sum"}, "'y' is [-1, 1], and 'sum' takes [2, -1, 1]"),
    ],
)
def test_states_that_do_not_fit_are_told(make: Callable[..., Sequences], states: dict[str, str], says: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        make(states=states)
    assert says in error.value.message


def samples(path: Path) -> Array:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared test data is not here")
def test_silero_hears_in_interleaved_sequences_what_it_hears_alone() -> None:
    config = ModelConfig(source="silero", sequence=SequenceConfig(states={"stateN": "state"}))
    model = Sequences("vad", load("vad", SHARED / "silero_vad.onnx", config, silent), config, rows=DECLARED)
    golden = [case for case in json.loads((SHARED / "golden_probs.json").read_text())["cases"] if case["chunk"] == 512]
    assert len(golden) >= 2
    sounds = [samples(SHARED / case["file"]) for case in golden]
    found: list[list[float]] = [[] for _ in golden]
    for chunk in range(120):
        items = []
        for place, sound in enumerate(sounds):
            begin = chunk * 512
            before = sound[max(0, begin - 64) : begin]
            window = np.concatenate([np.zeros(64 - len(before), np.float32), before, sound[begin : begin + 512]])
            inputs = {"input": window[None], "sr": np.array(16000, np.int64)}
            items.append(Item(request_id="", inputs=inputs, sequence=f"s{place}", sequence_start=chunk == 0))
        for one in items:
            model.prepare(one)
        assert len({str(one.bucket) for one in items}) == 1
        for place, result in enumerate(model.predict(items)):
            assert isinstance(result, Result)
            found[place].append(float(result.outputs["output"][0, 0]))
    for case, heard in zip(golden, found, strict=True):
        assert np.allclose(heard, case["probs"][:120], atol=2e-4)


def test_what_the_model_needs_of_memory_is_freed_with_its_sequences(make: Callable[..., Sequences]) -> None:
    model = make()
    ask(model, *[item(f"s{n}", 1, start=True) for n in range(8)])
    for sequence in model._sequences.values():
        assert sequence.state is not None
        assert all(array.base is None or array.base.nbytes == array.nbytes for array in sequence.state.values())
