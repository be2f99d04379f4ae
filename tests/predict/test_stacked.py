"""A function of stacked arrays as a runtime: what one request gets together with others is what it gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.config import BatchingConfig
from inferd.errors import InternalError
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Item, Result
from inferd.predict.stacked import Compute, Stacked
from inferd.types import TensorSpec

few = settings(max_examples=80, deadline=None)
calls: list[dict[str, tuple[int, ...]]] = []


def contract(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), **fields: object) -> Contract:
    return Contract(inputs=inputs, outputs=outputs, **{"max_batch_size": 64, "because": "declared", **fields})  # type: ignore[arg-type]


FIXED = contract(TensorSpec("x", "FP32", (-1, 3)), outputs=(TensorSpec("y", "FP32", (-1, 2)),))
TEXTUAL = contract(
    TensorSpec("ids", "INT64", (-1, -1)),
    TensorSpec("attention_mask", "INT64", (-1, -1)),
    outputs=(TensorSpec("sum", "INT64", (-1,)), TensorSpec("each", "INT64", (-1, -1))),
)


def noted(compute: Compute) -> Compute:
    calls.clear()

    def called(inputs: dict[str, Array]) -> dict[str, Array]:
        calls.append({name: array.shape for name, array in inputs.items()})
        return dict(compute(inputs))

    return called


def product(inputs: dict[str, Array]) -> dict[str, Array]:
    return {"y": np.matmul(inputs["x"], np.arange(6, dtype=np.float32).reshape(3, 2))}


def summed(inputs: dict[str, Array]) -> dict[str, Array]:
    """As a text model does: it looks only at what the mask lets it see."""
    seen = np.multiply(inputs["ids"], inputs["attention_mask"])
    return {"sum": seen.sum(axis=1), "each": seen * 2}


def item(name: str = "r", **inputs: Array) -> Item:
    rows = next(iter(inputs.values())).shape[0]
    return Item(request_id=name, inputs=inputs, rows=rows, size=rows)


def outputs_of(results: object) -> list[dict[str, Array]]:
    assert isinstance(results, list)
    assert all(isinstance(result, Result) for result in results)
    return [dict(result.outputs) for result in results]


@few
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 1000))
def test_rows_of_several_requests_give_what_they_give_alone(rows: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [item(x=rng.integers(-9, 9, (count, 3)).astype(np.float32)) for count in rows]
    runtime = Stacked(FIXED, noted(product))
    for one in items:
        runtime.prepare(one)
    together = outputs_of(runtime.predict(items))
    assert calls == [{"x": (sum(rows), 3)}]
    assert len({one.bucket for one in items}) == 1
    for one, found in zip(items, together, strict=True):
        (alone,) = outputs_of(runtime.predict([one]))
        np.testing.assert_array_equal(found["y"], alone["y"])
        assert found["y"].shape == (one.rows, 2)


@few
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=6),
    st.sampled_from([(), (4,), (4, 8)]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_padded_requests_give_what_they_give_alone(
    shapes: list[tuple[int, int]], buckets: tuple[int, ...], seed: int, has_mask: bool
) -> None:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, 9, shape) for shape in shapes]
    runtime = Stacked(TEXTUAL, summed, BatchingConfig(pad=True, buckets=buckets))
    masks = [{"attention_mask": np.ones_like(array)} if has_mask else {} for array in ids]
    items = [item("r", ids=array, **mask) for array, mask in zip(ids, masks, strict=True)]
    for one in items:
        runtime.prepare(one)
    by_bucket: dict[object, list[int]] = {}
    for place, one in enumerate(items):
        by_bucket.setdefault(one.bucket, []).append(place)
    if not buckets:
        assert len(by_bucket) == 1
    for places in by_bucket.values():
        found = outputs_of(runtime.predict([items[place] for place in places]))
        for place, parts in zip(places, found, strict=True):
            np.testing.assert_array_equal(parts["sum"], ids[place].sum(axis=1))
            np.testing.assert_array_equal(parts["each"], ids[place] * 2)


def test_padding_goes_to_the_bucket_and_is_counted() -> None:
    runtime = Stacked(TEXTUAL, noted(summed), BatchingConfig(pad=True, buckets=(4, 8)))
    short, long, huge = (item(ids=np.ones((1, length), np.int64)) for length in (2, 3, 11))
    for one in (short, long, huge):
        runtime.prepare(one)
    assert short.bucket == long.bucket != huge.bucket
    runtime.predict([short, long])
    assert calls == [{"ids": (2, 4), "attention_mask": (2, 4)}]
    assert runtime.padded_rows == 3
    runtime.predict([huge])
    assert runtime.padded_rows == 0


def test_a_mask_may_be_left_out_only_where_it_is_made() -> None:
    padding, strict = Stacked(TEXTUAL, summed, BatchingConfig(pad=True)), Stacked(TEXTUAL, summed)
    assert [spec.is_optional for spec in padding.contract.inputs] == [False, True]
    assert [spec.is_optional for spec in strict.contract.inputs] == [False, False]


def test_without_padding_only_equal_shapes_are_computed_together() -> None:
    runtime = Stacked(TEXTUAL, summed)
    buckets = []
    for length in (2, 3, 2):
        one = item(ids=np.ones((1, length), np.int64), attention_mask=np.ones((1, length), np.int64))
        runtime.prepare(one)
        buckets.append(one.bucket)
    assert buckets[0] == buckets[2] != buckets[1]


def test_an_optional_input_that_some_leave_out_keeps_them_apart() -> None:
    optional = contract(TensorSpec("x", "FP32", (-1, 3)), TensorSpec("bias", "FP32", (-1, 1), is_optional=True))
    runtime = Stacked(optional, product)
    plain, biased = item(x=np.zeros((1, 3))), item(x=np.zeros((1, 3)), bias=np.zeros((1, 1)))
    runtime.prepare(plain)
    runtime.prepare(biased)
    assert plain.bucket != biased.bucket


def test_a_model_without_a_batch_dimension_computes_each_request_alone() -> None:
    runtime = Stacked(
        contract(TensorSpec("x", "FP32", (3,)), max_batch_size=0), noted(lambda inputs: {"y": inputs["x"]})
    )
    runtime.predict([item(x=np.zeros(3, np.float32)), item(x=np.ones(3, np.float32))])
    assert calls == [{"x": (3,)}, {"x": (3,)}]


@pytest.mark.parametrize("wrong", [np.zeros(()), np.zeros((1, 2))])
def test_an_output_with_other_rows_than_the_batch_is_an_error_that_says_so(wrong: Array) -> None:
    runtime = Stacked(FIXED, lambda inputs: {"y": wrong})
    with pytest.raises(InternalError, match="first dimension must be the batch"):
        runtime.predict([item(x=np.zeros((2, 3), np.float32)), item(x=np.zeros((1, 3), np.float32))])


def test_texts_are_stacked_as_they_are() -> None:
    runtime = Stacked(
        contract(TensorSpec("t", "BYTES", (-1, 1))), lambda inputs: {"n": np.array([[len(t[0])] for t in inputs["t"]])}
    )
    items = [item(t=np.array([[text]], dtype=np.object_)) for text in (b"a", b"bcd")]
    assert [parts["n"].tolist() for parts in outputs_of(runtime.predict(items))] == [[[1]], [[3]]]
