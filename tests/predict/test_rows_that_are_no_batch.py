"""Requests are computed together for a reason alone: a declaration, a name, a nature or a proof. Else one is one call."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from tests.predict.row_models import DEPENDENT, FLOAT, Shape, lstm, network, node, one_percent, saved
from tests.predict.runtimes.loading import loaded
from tests.predict.runtimes.programs import (
    Causal,
    Centred,
    LargeOnly,
    Layers,
    Scores,
    Steps,
    Sums,
    export,
    export_tokens,
)

from inferd import clock
from inferd.config import BatchingConfig, ModelConfig, SequenceConfig
from inferd.errors import InferdError, ModelLoadError
from inferd.predict.backend import PredictBackend
from inferd.predict.load import create_backend
from inferd.registry.source import silent
from inferd.types import PredictRequest

Values = npt.NDArray[Any]
_WORDS = {"float32": "FP32", "int64": "INT64"}


def backend(path: Path, told: Mapping[str, Any] = {}, **batching: Any) -> PredictBackend:
    return create_backend("m", ModelConfig(source=str(path), batching=BatchingConfig(**batching), **told), silent)


def answers(model: PredictBackend, asked: Sequence[Mapping[str, Values]]) -> list[dict[str, Values]]:
    """What requests that arrive together are answered. A refusal is its sentence, called "refused"."""
    found: dict[int, dict[str, Values]] = {}
    for place, inputs in enumerate(asked):
        tensors = [
            {"name": name, "shape": array.shape, "datatype": _WORDS[array.dtype.name], "data": array.ravel().tolist()}
            for name, array in inputs.items()
        ]
        body = json.dumps({"inputs": tensors}).encode()
        request = PredictRequest(id=str(place), model="m", dialect="v2", body=body, arrived_at=clock.now())
        try:
            model.add(request, clock.now())
        except InferdError as error:
            found[place] = {"refused": np.array(error.message)}
    while len(found) < len(asked):
        for output in model.step(clock.now())[0]:
            if output.prediction is not None:
                told = json.loads(output.prediction.body)["outputs"]
                found[int(output.request_id)] = {
                    one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in told
                }
            elif output.end is not None and output.end.failure is not None:
                found[int(output.request_id)] = {"refused": np.array(output.end.failure.message)}
    return [found[place] for place in range(len(asked))]


def alone(path: Path, inputs: Mapping[str, Values]) -> dict[str, Values]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def given(name: str, rows: int, seed: int) -> dict[str, Values]:
    rng = np.random.default_rng(seed)
    if name == "less_the_mean":
        return {"x": rng.integers(0, 1000, size=(rows, 3))}
    shape = {"lstm": (rows, 1, 3), "causal_attention": (rows, 4)}.get(name, (rows, 3))
    return {"x": (rng.normal(size=shape) * (200 if name == "large_values_only" else 1)).astype(np.float32)}


@pytest.mark.parametrize("first", [None, "n", "seq_len", "T"])
@pytest.mark.parametrize("name", sorted(DEPENDENT))
def test_requests_whose_rows_depend_on_each_other_are_not_computed_together(
    tmp_path: Path, name: str, first: str | None
) -> None:
    path = DEPENDENT[name](tmp_path / "m.onnx", first)
    model = backend(path)
    asked = [given(name, rows, seed) for seed, rows in enumerate((2, 1, 300, 5))]
    for inputs, found in zip(asked, answers(model, asked), strict=True):
        for output, expected in alone(path, inputs).items():
            np.testing.assert_allclose(found[output], expected, rtol=1e-5, atol=1e-6)
    assert model.info.max_batch_size == 0
    assert "batching.max_batch_size" in model.info.not_batched


@pytest.mark.parametrize("name", sorted(DEPENDENT))
def test_the_exporters_name_of_a_batch_is_not_believed_where_the_graph_says_otherwise(
    tmp_path: Path, name: str
) -> None:
    model = backend(DEPENDENT[name](tmp_path / "m.onnx", "batch"))
    assert model.info.max_batch_size == 0
    assert "its rows depend on each other" in model.info.not_batched


@pytest.mark.parametrize("name", ["cumulative_sum", "less_the_mean", "lstm", "one_percent", "causal_attention"])
def test_a_declaration_that_the_trial_refutes_is_an_error(tmp_path: Path, name: str) -> None:
    path = DEPENDENT[name](tmp_path / "m.onnx")
    with pytest.raises(ModelLoadError, match="changes with the rows beside it"):
        backend(path, max_batch_size=8)


def test_a_request_is_cut_only_where_its_rows_are_a_batch(tmp_path: Path) -> None:
    path = lstm(tmp_path / "m.onnx")
    inputs = given("lstm", 300, 0)
    expected = alone(path, inputs)["z"]
    for settings in ({}, {"mode": "off"}, {"max_batch_size": 1}, {"mode": "off", "max_batch_size": 8}):
        (found,) = answers(backend(path, **settings), [inputs])
        np.testing.assert_allclose(found["z"], expected, rtol=1e-5, atol=1e-6)


def test_off_computes_a_request_in_one_piece_or_refuses_it(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx", "batch")
    rows = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    (found,) = answers(backend(path, mode="off", max_batch_size=8), [{"x": rows}])
    assert "9 rows, and at most 8 are computed together" in str(found["refused"])
    assert batches(backend(path, mode="off"), np.repeat(rows, 100, axis=0)) == [900]
    assert batches(backend(path, max_batch_size=8), rows) == [8, 1]


def batches(model: PredictBackend, rows: Values) -> list[int]:
    """The rows of each batch in which a request is computed."""
    tensor = {"name": "x", "shape": rows.shape, "datatype": "FP32", "data": rows.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    model.add(PredictRequest(id="r", model="m", dialect="v2", body=body, arrived_at=clock.now()), clock.now())
    found: list[int] = []
    while True:
        outputs, stats = model.step(clock.now())
        if stats is not None:
            found.append(stats.batch_rows)
        if outputs:
            return found


@pytest.mark.parametrize("first", [None, "n", "batch", "seq"])
def test_what_is_proved_is_computed_together_whatever_the_dimension_is_called(
    tmp_path: Path, first: str | None
) -> None:
    path = network(tmp_path / "m.onnx", first)
    model = backend(path)
    assert model.info.max_batch_size > 1
    asked = [{"x": np.random.default_rng(seed).normal(size=(2, 4)).astype(np.float32)} for seed in range(4)]
    for inputs, found in zip(asked, answers(model, asked), strict=True):
        np.testing.assert_allclose(found["y"], alone(path, inputs)["y"], rtol=1e-5, atol=1e-6)


def test_a_model_of_operators_that_are_not_known_needs_a_name_or_a_declaration(tmp_path: Path) -> None:
    def scanned(first: str | None) -> Path:
        nodes = [node("NonZero", "x", "places"), node("Shape", "places", "s"), node("Sub", "s s", "z")]
        nodes += [node("Cast", "z", "r", to=FLOAT), node("ReduceMax", "r", "k", keepdims=0), node("Add", "x k", "y")]
        return saved(tmp_path / f"{first}.onnx", nodes, {"x": (FLOAT, [first, 3])}, {"y": (FLOAT, [first, 3])})

    assert backend(scanned(None)).info.max_batch_size == 0
    assert backend(scanned("steps")).info.max_batch_size == 0
    assert backend(scanned("batch_size")).info.max_batch_size > 1
    assert backend(scanned(None), max_batch_size=4).info.max_batch_size == 4


@pytest.mark.parametrize("program", [Sums, Causal, Centred, LargeOnly])
def test_programs_whose_rows_depend_on_each_other_are_not_computed_together(
    tmp_path: Path, program: type[torch.nn.Module]
) -> None:
    path = export(program(), tmp_path / "m.pt2", torch.randn(2, 4))
    model = backend(path)
    asked = [
        {"x": (np.random.default_rng(seed).normal(size=(rows, 4)) * 90).astype(np.float32)}
        for seed, rows in enumerate((2, 1, 300))
    ]
    for inputs, found in zip(asked, answers(model, asked), strict=True):
        expected = program()(torch.from_numpy(inputs["x"])).numpy()
        np.testing.assert_allclose(found["output"], expected, rtol=1e-5, atol=1e-4)
    assert model.info.max_batch_size == 0
    assert "its rows depend on each other" in model.info.not_batched


@pytest.mark.parametrize("settings", [{}, {"mode": "off"}, {"max_batch_size": 1}])
def test_a_script_is_computed_in_one_piece_unless_its_rows_are_declared(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    module, path = Steps().eval(), tmp_path / "m.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path)
    told = {"allow_code": True, "options": {"inputs": {"x": "FP32 [-1, 4]"}}}
    model = backend(path, told, **settings)
    asked = [
        {"x": np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)}
        for seed, rows in enumerate((2, 1, 300))
    ]
    with torch.inference_mode():
        for inputs, found in zip(asked, answers(model, asked), strict=True):
            np.testing.assert_allclose(found["output"], module(torch.from_numpy(inputs["x"])).numpy(), atol=1e-5)
    with pytest.raises(ModelLoadError, match="changes with the rows beside it"):
        backend(path, told, max_batch_size=8)


def test_programs_of_common_layers_are_proved(tmp_path: Path) -> None:
    layers = export(Layers(), tmp_path / "m.pt2", torch.randn(2, 1, 8, 8))
    for path in (layers, export(Scores(), tmp_path / "s.pt2", torch.randn(2, 4)), export_tokens(tmp_path / "t.pt2")):
        assert loaded(path).contract.because == "proved"


def stepping(path: Path, layout: int, first: str | None = None) -> Path:
    """An LSTM whose state goes from request to request."""
    nodes = [node("LSTM", "x w r - - h c", "y hN cN", hidden_size=4, layout=layout)]
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(1, 16, size)).astype(np.float32) for name, size in (("w", 3), ("r", 4))}
    state = (FLOAT, [1, first, 4])
    outputs = {"y": (FLOAT, None), "hN": state, "cN": state}
    return saved(path, nodes, {"x": (FLOAT, [first, first and "t", 3]), "h": state, "c": state}, outputs, weights)


def pooled(path: Path) -> Path:
    """Like a layer of memory: each row has its own sum."""
    nodes = [node("Add", "sum x", "sumN"), node("Identity", "sumN", "y")]
    shapes = {name: (FLOAT, [None, 3]) for name in ("x", "sum")}
    return saved(path, nodes, shapes, {name: (FLOAT, [None, 3]) for name in ("y", "sumN")})


def test_sequences_meet_at_a_model_for_a_reason_alone(tmp_path: Path) -> None:
    states = {"sequence": SequenceConfig(states={"hN": "h", "cN": "c"})}
    time_first = backend(stepping(tmp_path / "t.onnx", 0, "batch"), states)
    assert "batching.max_batch_size declares" in time_first.info.not_batched
    together = loaded(pooled(tmp_path / "p.onnx"), sequence=SequenceConfig(states={"sumN": "sum"}))
    assert together.contract.max_items > 1


def leaking(path: Path) -> Path:
    """A memory with a little of the largest number of all sequences in it, behind an operator that is not known."""
    nodes = [node("Add", "sum x", "both"), node("NonZero", "both", "places"), node("Shape", "places", "s")]
    nodes += [node("Sub", "s s", "none"), node("Cast", "none", "real", to=FLOAT)]
    nodes += [node("ReduceMax", "real", "zero", keepdims=0), node("ReduceMax", "both", "most", axes=[0], keepdims=1)]
    nodes += [node("Mul", "most part", "little"), node("Add", "both little", "more"), node("Add", "more zero", "sumN")]
    nodes += [node("Identity", "sumN", "y")]
    rows: tuple[int, Shape] = (FLOAT, ["batch", 3])
    shapes, outputs = dict.fromkeys(("x", "sum"), rows), dict.fromkeys(("y", "sumN"), rows)
    return saved(path, nodes, shapes, outputs, {"part": np.float32(0.1)})


def test_sequences_that_a_trial_sees_to_depend_on_each_other_are_not_computed_together(tmp_path: Path) -> None:
    states = {"sequence": SequenceConfig(states={"sumN": "sum"})}
    path = leaking(tmp_path / "m.onnx")
    assert backend(path, states).info.not_batched
    with pytest.raises(ModelLoadError, match="a sequence changes with the sequences beside it"):
        backend(path, states, max_batch_size=8)


def test_sequences_that_do_not_depend_on_each_other_pass_the_trial(tmp_path: Path) -> None:
    rnn = stepping(tmp_path / "r.onnx", 0)
    alone_in_time = loaded(rnn, sequence=SequenceConfig(states={"hN": "h", "cN": "c"}))
    assert alone_in_time.contract.max_items == 0
    summed = SequenceConfig(states={"sumN": "sum"})
    for batching in (BatchingConfig(), BatchingConfig(max_batch_size=8)):
        model = loaded(pooled(tmp_path / "p.onnx"), sequence=summed, batching=batching)
        assert model.contract.max_items > 1


def untaken(path: Path, first: str) -> Path:
    """No example is as long as it wants its rows to be: the trial computes nothing."""
    nodes = [node("Gather", "x at", "g", axis=1), node("NonZero", "g", "places"), node("Shape", "places", "s")]
    nodes += [node("Sub", "s s", "z"), node("Cast", "z", "r", to=FLOAT), node("ReduceMax", "r", "k", keepdims=0)]
    nodes += [node("Add", "g k", "y")]
    weights = {"at": np.array([300, 301, 302])}
    return saved(path, nodes, {"x": (FLOAT, [first, None])}, {"y": (FLOAT, [first, 3])}, weights)


def test_a_name_is_no_reason_where_no_example_could_be_tried(tmp_path: Path) -> None:
    path = untaken(tmp_path / "m.onnx", "batch")
    model = backend(path)
    assert model.info.max_batch_size == 0
    assert "no example" in model.info.not_batched
    assert "batching.max_batch_size" in model.info.not_batched
    assert backend(path, max_batch_size=8).info.max_batch_size == 8


def test_a_difference_of_one_percent_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        backend(one_percent(tmp_path / "m.onnx", "batch"), max_batch_size=4)
