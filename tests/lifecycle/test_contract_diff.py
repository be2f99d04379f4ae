"""How the contracts of two versions differ, in words, and which differences clients may notice."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd import models
from inferd.errors import InvalidRequest
from inferd.lifecycle.contract_diff import Contract, contract_of, difference, read_contract
from inferd.types import TensorSpec

X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1, 3), labels=("a", "b", "c"))
BASE = Contract(inputs=(X,), outputs=(Y,))

names = st.sampled_from("xyz")
tensors = st.builds(
    TensorSpec,
    names,
    st.sampled_from(["FP32", "INT64", "BYTES"]),
    st.lists(st.sampled_from([-1, 1, 4]), max_size=3).map(tuple),
    st.booleans(),
    st.sampled_from([(), ("a",), ("a", "b")]),
)
contracts = st.builds(
    Contract,
    inputs=st.lists(tensors, max_size=3, unique_by=lambda one: one.name).map(tuple),
    outputs=st.lists(tensors, max_size=3, unique_by=lambda one: one.name).map(tuple),
)


@pytest.mark.parametrize(
    ("new", "words", "is_break"),
    [
        (Contract(inputs=(X,), outputs=()), "the output 'y' is gone", True),
        (Contract(inputs=(X,), outputs=(Y, TensorSpec("z", "FP32", (1,)))), "the output 'z' is new", True),
        (
            Contract(inputs=(X,), outputs=(TensorSpec("y", "FP64", (-1, 3), labels=Y.labels),)),
            "the output 'y' is FP64 instead of FP32",
            True,
        ),
        (
            Contract(inputs=(X,), outputs=(TensorSpec("y", "FP32", (-1, 4), labels=Y.labels),)),
            "the output 'y' has the shape [-1, 4] instead of [-1, 3]",
            True,
        ),
        (
            Contract(inputs=(X,), outputs=(TensorSpec("y", "FP32", (-1, 3), labels=("b", "a", "c")),)),
            "the output 'y' has the labels b, a, c instead of the labels a, b, c",
            True,
        ),
        (
            Contract(inputs=(TensorSpec("x", "FP32", (-1, 5)),), outputs=(Y,)),
            "the input 'x' has the shape [-1, 5] instead of [-1, 4]",
            True,
        ),
        (
            Contract(inputs=(TensorSpec("x", "FP32", (-1, -1)),), outputs=(Y,)),
            "the input 'x' has the shape [-1, -1] instead of [-1, 4]",
            False,
        ),
        (Contract(inputs=(X, TensorSpec("w", "FP32", (1,))), outputs=(Y,)), "the input 'w' is new", True),
        (Contract(inputs=(X, TensorSpec("w", "FP32", (1,), True)), outputs=(Y,)), "the input 'w' is new", False),
        (Contract(inputs=(), outputs=(Y,)), "the input 'x' is gone", True),
    ],
)
def test_each_difference_is_said_in_words(new: Contract, words: str, is_break: bool) -> None:
    change = difference(BASE, new, 7)
    assert change.words == (words,)
    assert change.breaks == ((words,) if is_break else ())
    assert (change.base, change.unknown) == (7, "")


def test_what_is_gone_hides_no_other_difference() -> None:
    outputs = (TensorSpec("a", "FP32", (1,)), TensorSpec("b", "FP32", (1,)), TensorSpec("c", "FP32", (1,)))
    change = difference(
        Contract(inputs=(), outputs=outputs), Contract(inputs=(), outputs=(TensorSpec("c", "INT64", (1,)),)), 7
    )
    words = ("the output 'a' is gone", "the output 'b' is gone", "the output 'c' is INT64 instead of FP32")
    assert (change.words, change.breaks) == (words, words)


@given(contracts, contracts)
def test_equal_contracts_and_only_these_have_no_difference(one: Contract, other: Contract) -> None:
    assert difference(one, one).words == ()
    same = all(
        {spec.name: spec for spec in before} == {spec.name: spec for spec in after}
        for before, after in ((one.inputs or (), other.inputs or ()), (one.outputs or (), other.outputs or ()))
    )
    change = difference(one, other)
    assert (change.words == ()) == same
    assert set(change.breaks) <= set(change.words)
    assert [word for word in change.words if "output" in word] == [word for word in change.breaks if "output" in word]


def test_unknown_outputs_are_named_and_break_nothing() -> None:
    change = difference(BASE, Contract(inputs=(X,)), 2)
    assert (change.breaks, change.unknown) == ((), "its own outputs are not known before it is loaded")
    assert "version 2's outputs" in difference(Contract(), BASE, 2).unknown


def test_the_contract_of_a_file_is_read_before_it_is_loaded() -> None:
    found = contract_of(models.path("demo-digits"))
    assert found.inputs
    assert found.outputs
    assert difference(found, found).words == ()


def test_a_contract_is_read_from_the_metadata_of_a_model() -> None:
    metadata = {
        "name": "m",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 3], "parameters": {"labels": ["a", "b", "c"]}},
        ],
    }
    assert read_contract(json.dumps(metadata).encode()) == BASE


@pytest.mark.parametrize(
    ("outputs", "part"),
    [
        ([{"name": "y", "datatype": "FLOAT", "shape": [1]}], "unknown datatype 'FLOAT'"),
        ([{"name": "y", "datatype": "FP32", "shape": [-2]}], "size below -1"),
        ([{"name": "y", "datatype": "FP32", "shape": [1]}] * 2, "occurs twice"),
        ([{"name": "y", "datatype": "FP32"}], "missing required field"),
        ("all", "Expected"),
    ],
)
def test_a_contract_that_is_none_is_refused_by_name(outputs: object, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        read_contract(msgspec.json.encode({"inputs": [], "outputs": outputs}))


def test_a_damaged_file_has_no_contract(tmp_path: Path) -> None:
    from inferd.errors import ModelLoadError

    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError):
        contract_of(tmp_path / "model.onnx")
