"""What becomes of a stream's options with a model's inputs: the shape of a window, its other inputs, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.cli.test_ready import info

from inferd.errors import InvalidRequest
from inferd.gateway.windows.options import Plan, WindowOptions, options_of, plan_of
from inferd.types import TensorSpec

MOST = 10_000


def planned(takes: tuple[int, ...] | TensorSpec, /, *others: TensorSpec, max_bytes: int = MOST, **options: Any) -> Plan:
    spec = takes if isinstance(takes, TensorSpec) else TensorSpec("x", "FP32", takes)
    return plan_of("m", info(spec, *others), msgspec.convert(options, WindowOptions), max_bytes)


def tensors(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(plan.head)["inputs"]
    return found


def refused(takes: tuple[int, ...], /, *others: TensorSpec, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as found:
        planned(takes, *others, **options)
    return str(found.value.param)


@pytest.mark.parametrize(
    ("takes", "options", "shape"),
    [
        ((-1,), {"window": 6}, [6]),
        ((-1, -1), {"window": 6}, [1, 6]),
        ((-1, 1), {"window": 6}, [6, 1]),
        ((6, 1), {"window": 6}, [6, 1]),
        ((-1, -1, 1), {"window": 6}, [1, 6, 1]),
        ((1, 1, 6), {"window": 6}, [1, 1, 6]),
        ((-1, -1), {"window": 4, "context": 2}, [1, 6]),
        ((-1, 2), {"window": 3, "channels": 2}, [3, 2]),
        ((-1, -1, 2), {"window": 3, "channels": 2}, [1, 3, 2]),
        ((-1, -1), {"window": 6, "shape": (2, 3)}, [2, 3]),
        ((-1, -1), {"window": 6, "shape": (2, -1)}, [2, 3]),
        ((-1, -1), {"window": 6, "shape": (-1, 6)}, [1, 6]),
        ((-1, -1), {"window": 3, "channels": 2, "shape": (6, 1)}, [6, 1]),
        ((2, 3), {"window": 6, "shape": (-1, 3)}, [2, 3]),
    ],
)
def test_a_window_has_the_shape_that_was_asked_for_or_the_first_usual_one(
    takes: tuple[int, ...], options: dict[str, Any], shape: list[int]
) -> None:
    plan = planned(takes, **options)
    (tensor,) = tensors(plan)
    assert tensor["shape"] == shape
    assert tensor["parameters"] == {"binary_data_size": 24}
    assert plan.sample_bytes == 4 * options.get("channels", 1)


@pytest.mark.parametrize(
    ("takes", "options"),
    [
        ((-1, -1), {"window": 6, "shape": (2, 2)}),  # holds fewer
        ((-1, -1), {"window": 6, "shape": (4, 2)}),  # holds more
        ((-1, -1), {"window": 6, "shape": (4, -1)}),
        ((-1, -1), {"window": 6, "shape": (-1, -1)}),
        ((-1, -1), {"window": 6, "shape": (-2, -3)}),  # as many, and no shape
        ((-1, -1), {"window": 6, "shape": (0, -1)}),
        ((-1, -1), {"window": 6, "shape": (0, 6)}),
        ((-1, -1, -1, -1), {"window": 6, "shape": (2, -1, -1, 3)}),
        ((3, 2), {"window": 6, "shape": (2, 3)}),  # another one than the input's
        ((-1, -1), {"window": 6, "shape": (6,)}),
        ((5,), {"window": 6}),
        ((-1, 3), {"window": 3, "channels": 2}),
        ((-1,), {"window": 3, "channels": 2}),
    ],
)
def test_a_shape_that_does_not_hold_the_window_is_refused(takes: tuple[int, ...], options: dict[str, Any]) -> None:
    assert refused(takes, **options) == "shape"


@pytest.mark.parametrize(
    ("shape", "options", "param"),
    [
        ((-1,), {}, "window"),
        ((-1,), {"window": 7, "max_bytes": 27}, "window"),
        ((-1,), {"window": 6, "context": 1, "max_bytes": 27}, "window"),
        ((-1,), {"window": 6, "datatype": "INT8"}, "datatype"),
        ((-1,), {"window": 6, "datatype": "FP64"}, "datatype"),
        ((-1,), {"window": 6, "input": "y"}, "input"),
        ((-1,), {"window": 6, "inputs": {"y": 1}}, "inputs.y"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_its_name(
    shape: tuple[int, ...], options: dict[str, Any], param: str
) -> None:
    assert refused(shape, **options) == param


def test_a_window_may_be_as_large_as_a_body() -> None:
    assert planned((-1,), window=7, max_bytes=28).window == 7


@pytest.mark.parametrize(
    ("datatype", "sent", "is_scaled", "sample_bytes"),
    [("FP32", None, False, 4), ("FP32", "INT16", True, 2), ("INT16", "INT16", False, 2), ("FP64", "FP64", False, 8)],
)
def test_samples_are_the_inputs_numbers_or_scaled_integers(
    datatype: str, sent: str | None, is_scaled: bool, sample_bytes: int
) -> None:
    plan = planned(TensorSpec("x", datatype, (-1,)), window=6, datatype=sent)
    assert (plan.is_scaled, plan.sample_bytes, plan.datatype) == (is_scaled, sample_bytes, sent or datatype)
    assert tensors(plan)[0]["datatype"] == datatype


@pytest.mark.parametrize(("options", "hop"), [({"window": 6}, 6), ({"window": 6, "hop": 2}, 2)])
def test_windows_follow_each_other_unless_a_hop_is_asked_for(options: dict[str, Any], hop: int) -> None:
    assert planned((-1,), **options).hop == hop


@pytest.mark.parametrize("rate", ["sr", "sample_rate", "sampling_rate"])
def test_the_sample_rate_is_also_the_models_input_of_that_name(rate: str) -> None:
    spec = TensorSpec(rate, "INT64", (1,))
    plan = planned((-1,), spec, window=6, input="x", sample_rate=16_000)
    assert tensors(plan)[1] == {"name": rate, "shape": [1], "datatype": "INT64", "data": [16_000]}
    given = planned((-1,), spec, window=6, input="x", sample_rate=16_000, inputs={rate: 8_000})
    assert tensors(given)[1]["data"] == [8_000]
    assert given.sample_rate == 16_000
    assert refused((-1,), spec, window=6, input="x") == "inputs"


def test_other_inputs_go_with_every_window() -> None:
    scale = TensorSpec("scale", "FP32", (-1, -1))
    plan = planned((-1,), scale, window=6, inputs={"scale": [[1.0, 2.0, 3.0]]})
    assert tensors(plan)[1] == {"name": "scale", "shape": [1, 3], "datatype": "FP32", "data": [[1.0, 2.0, 3.0]]}
    assert tensors(planned((-1,), scale, window=6, inputs={"scale": 2.0}))[1]["shape"] == [1, 1]
    assert tensors(planned((-1,), scale, window=6, inputs={"scale": []}))[1]["shape"] == [0]


def test_the_option_input_says_which_of_several_takes_windows() -> None:
    two = TensorSpec("y", "FP32", (-1,))
    assert refused((-1,), two, window=6) == "input"
    plan = planned((-1,), two, window=6, input="y", inputs={"x": [1.0]})
    assert plan.input == "y"
    assert [tensor["name"] for tensor in tensors(plan)] == ["y", "x"]


def test_a_query_is_read_into_options() -> None:
    found = options_of("window=6&hop=2&shape=2,-1&inputs.scale=[1.5]&inputs.word=plain&datatype=FP32")
    assert (found.window, found.hop, found.shape, found.datatype) == (6, 2, (2, -1), "FP32")
    assert found.inputs == {"scale": [1.5], "word": "plain"}
    assert options_of("") == WindowOptions()


@pytest.mark.parametrize(
    "query", ["window=6&window=7", "inputs.a=1&inputs.a=2", "inputs=1", "window=0", "no=1", "hop=%ff"]
)
def test_a_query_that_says_something_twice_or_nothing_known_is_refused(query: str) -> None:
    with pytest.raises(InvalidRequest):
        options_of(query)
