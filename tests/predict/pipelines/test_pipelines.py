"""Pipelines compute what their steps compute one after the other, batched as alone, and drop abandoned requests."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.predict.fake_runtime import BAD, CONTRACT, POISON, Doubler, info, numbers, request
from tests.predict.pipelines.tiny_models import detector, linear, squares
from tests.predict.steps.pictures import picture, png

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import Cancelled, DeadlineExceeded, InferdError, InvalidRequest, ModelLoadError
from inferd.predict.backend import PredictBackend
from inferd.predict.batcher import Batcher, Limits
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import Array, Contract, object_array
from inferd.predict.load import load_runtime
from inferd.predict.pipelines.build import around
from inferd.predict.runtime import Item, Result, Runtime, Staged
from inferd.predict.runtimes import pipeline
from inferd.registry.artifact import Artifact, artifact_of
from inferd.registry.source import silent
from inferd.types import ModelInfo, Output, Prediction, PredictRequest


def model(**settings: Any) -> ModelConfig:
    return msgspec.convert({"source": "pipeline", **settings}, ModelConfig)


def loaded(config: ModelConfig) -> Runtime:
    return load_runtime("m", artifact_of(config), config, silent)


def item(name: str = "r", **inputs: Array) -> Item:
    rows = len(next(iter(inputs.values())))
    return Item(request_id=name, inputs=inputs, rows=rows, size=rows)


def predicted(runtime: Runtime, *items: Item) -> list[Result | InferdError]:
    for one in items:
        runtime.prepare(one)
    return list(runtime.predict(items))


def finished(steps: Generator[None, None, Sequence[Result | InferdError]]) -> Sequence[Result | InferdError]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            results: Sequence[Result | InferdError] = end.value
            return results


def answer(runtime: Runtime, **inputs: Array) -> dict[str, Array]:
    (result,) = predicted(runtime, item("r", **inputs))
    assert isinstance(result, Result), result
    return dict(result.outputs)


WEIGHTS = np.random.default_rng(3).normal(size=(12, 4)).astype(np.float32)


def classifier(folder: Path, **settings: Any) -> ModelConfig:
    """A photo's class: 2 x 2 pixels of 3 channels are 12 features."""
    return model(
        source=str(linear(folder / "linear.onnx", WEIGHTS)),
        preprocess=[
            {"op": "image.decode"},
            {"op": "image.resize", "options": {"width": 2, "height": 2, "filter": "nearest"}},
            {"op": "normalize", "options": {"std": 255}},
            {"op": "reshape", "options": {"shape": [12]}},
        ],
        postprocess=[
            {"op": "softmax"},
            {"op": "top_k", "options": {"k": 2}},
            {"op": "labels", "options": {"labels": ["ant", "bee", "cat", "dog"]}},
        ],
        **settings,
    )


def expected_labels(pixels: Array) -> list[bytes]:
    logits = (pixels.reshape(1, 12).astype(np.float32) / 255) @ WEIGHTS
    return [[b"ant", b"bee", b"cat", b"dog"][place] for place in np.argsort(-logits[0])[:2]]


def test_operations_around_a_model_take_photos_and_give_labels(tmp_path: Path) -> None:
    runtime = loaded(classifier(tmp_path))
    contract = runtime.contract
    assert [(spec.name, spec.datatype, spec.shape) for spec in contract.inputs] == [("image", "BYTES", (-1,))]
    assert {spec.name: (spec.datatype, spec.shape) for spec in contract.outputs} == {
        "scores": ("FP32", (-1, 2)),
        "labels": ("BYTES", (-1, 2)),
    }
    assert contract.max_batch_size > 1
    pixels = picture(2, 2)
    outputs = answer(runtime, image=object_array([png(pixels)]))
    assert outputs["labels"].tolist() == [expected_labels(pixels)]
    assert np.isclose(outputs["scores"].sum(axis=1), 1, atol=0.5)


def test_together_is_as_alone_and_a_model_sees_one_batch(tmp_path: Path) -> None:
    runtime = loaded(classifier(tmp_path))
    photos = [
        object_array([png(picture(2, 2, seed=one)) for one in range(start, start + count)])
        for start, count in ((0, 1), (5, 3), (9, 2))
    ]
    together = predicted(runtime, *(item(f"r{place}", image=photo) for place, photo in enumerate(photos)))
    for photo, result in zip(photos, together, strict=True):
        assert isinstance(result, Result)
        alone = answer(runtime, image=photo)
        for name, array in alone.items():
            assert np.array_equal(array, result.outputs[name]), name


def test_a_file_that_is_no_image_fails_alone(tmp_path: Path) -> None:
    runtime = loaded(classifier(tmp_path))
    good = object_array([png(picture(2, 2))])
    bad = object_array([png(picture(2, 2)), b"no image"])
    first, refused, last = predicted(runtime, item("a", image=good), item("b", image=bad), item("c", image=good))
    assert isinstance(first, Result)
    assert isinstance(refused, InvalidRequest)
    assert "The image in row 1 cannot be decoded" in refused.message
    assert isinstance(last, Result)
    assert np.array_equal(first.outputs["labels"], last.outputs["labels"])


def test_others_are_heard_between_the_photos_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = loaded(classifier(tmp_path))
    ticks = itertools.count(100.0, 0.01)  # every look at the clock is 10 ms later
    monkeypatch.setattr(clock, "now", lambda: next(ticks))
    assert isinstance(runtime, Staged)
    photos = [item(f"r{place}", image=object_array([png(picture(2, 2))])) for place in range(3)]
    steps = runtime.stages(photos)
    next(steps)
    photos[1].is_cancelled = True
    photos[2].expires_at = 100.0
    done, cancelled, late = finished(steps)
    assert isinstance(done, Result)
    assert isinstance(cancelled, Cancelled)
    assert isinstance(late, DeadlineExceeded)


def test_features_are_normalized_as_the_model_was_trained(tmp_path: Path) -> None:
    mean, std = np.arange(12.0), np.arange(1.0, 13.0)
    runtime = loaded(
        model(
            source=str(linear(tmp_path / "linear.onnx", WEIGHTS)),
            preprocess=[{"op": "normalize", "options": {"mean": mean.tolist(), "std": std.tolist()}}],
        )
    )
    (spec,) = runtime.contract.inputs
    assert (spec.name, spec.datatype, spec.shape) == ("input", "FP32", (-1, 12))
    features = np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32)
    outputs = answer(runtime, input=features)
    assert list(outputs) == ["logits"]
    assert np.allclose(outputs["logits"], ((features - mean) / std) @ WEIGHTS, atol=1e-4)


DETECTION = [
    {"op": "image.decode", "name": "photo", "inputs": {"image": "photo_file"}, "options": {"mode": "L"}},
    {"op": "image.resize", "options": {"width": 32, "height": 32, "filter": "nearest"}},
    {"op": "normalize", "inputs": {"input": "resize.image"}, "options": {"std": 255}},
    {"op": "transpose", "options": {"axes": [0, 3, 1, 2]}},
    {"model": "net"},
    {
        "op": "boxes",
        "inputs": {"boxes": "net.boxes", "scores": "net.scores", "transform": "resize.transform"},
        "options": {"units": "relative", "output": "pixels", "score_threshold": 0.9},
    },
    {"op": "labels", "inputs": {"classes": "boxes.classes"}, "options": {"labels": ["square"]}},
    {
        "op": "json",
        "inputs": {"box": "boxes.boxes", "label": "labels", "count": "boxes.count"},
        "options": {"records": True},
    },
]


def detection(folder: Path, *, rows: int | None, **settings: Any) -> ModelConfig:
    return model(
        pipeline={
            "inputs": {"photo_file": "auto"},
            "models": {"net": {"source": str(detector(folder / "detector.onnx", rows=rows))}},
            "steps": DETECTION,
            "outputs": {"found": "json.json", "boxes": "boxes.boxes", "count": "boxes.count"},
        },
        **settings,
    )


@pytest.mark.parametrize("rows", [None, 1])
def test_a_detector_finds_the_squares_of_a_photo_in_its_own_pixels(tmp_path: Path, rows: int | None) -> None:
    runtime = loaded(detection(tmp_path, rows=rows))
    assert runtime.contract.max_batch_size == (256 if rows is None else 1)
    outputs = answer(runtime, photo_file=object_array([png(squares((1, 2), width=160, height=80))]))
    assert json.loads(outputs["found"][0]) == [{"box": [40, 40, 80, 60], "label": "square"}]
    assert outputs["boxes"].tolist() == [[[40, 40, 80, 60]]]
    assert json.loads(answer(runtime, photo_file=object_array([png(squares())]))["found"][0]) == []


def backend_of(runtime: Runtime) -> PredictBackend:
    limits = Limits(max_rows=runtime.contract.max_batch_size or 1, max_delay_s=0.0)
    return PredictBackend(runtime, Batcher(limits), info(limits.max_rows), codecs=numbers)


class Spy(Doubler):
    """Doubles, and remembers the very arrays it was given."""

    def __init__(self) -> None:
        super().__init__(CONTRACT)
        self.given: list[Array] = []

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        self.given += [one.inputs["x"] for one in items]
        return super().predict(items)


def around_spy(*preprocess: dict[str, object], postprocess: Sequence[dict[str, object]] = ()) -> tuple[Spy, Runtime]:
    spy = Spy()
    return spy, around("spy", spy, model(source="spy", preprocess=preprocess, postprocess=postprocess))


def test_tensors_are_handed_from_step_to_step_without_a_copy() -> None:
    spy, runtime = around_spy({"op": "reshape", "options": {"shape": [1]}})
    assert runtime.contract.any_rank == ("input",)
    sent = np.array([[[1]], [[2]]])
    outputs = answer(runtime, input=sent)
    assert np.shares_memory(spy.given[0], sent)
    assert outputs["y"].tolist() == [[2], [4]]


# -- two models, and what happens between them ------------------------------------------------------

now = 100.0


TWO: dict[str, Any] = {
    "inputs": {"x": "auto"},
    "models": {"first": {"source": "first"}, "second": {"source": "second"}},
    "steps": [
        {"model": "first"},
        {"op": "cast", "options": {"datatype": "INT64"}},
        {"model": "second", "inputs": {"x": "cast.output"}},
    ],
    "outputs": {"y": "second.y"},
}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Doubler]:
    """Runtimes by the names of their models, instead of artifacts."""
    runtimes = {"first": Doubler(), "second": Doubler()}
    monkeypatch.setattr(
        pipeline, "artifact_of", lambda config, progress: Artifact("python", config.source, "python", "predict")
    )
    monkeypatch.setattr(pipeline, "load_runtime", lambda name, artifact, config, progress: runtimes[artifact.path])
    monkeypatch.setattr(clock, "now", lambda: now)
    return runtimes


def built(**changed: Any) -> Runtime:
    return pipeline.load("two", "pipeline", model(pipeline={**TWO, **changed}), silent)


def ended(made: PredictBackend) -> dict[str, Output]:
    outputs: list[Output] = []
    while made.due(now) is not None:
        outputs += made.step(now)[0]
    found = {output.request_id: output for output in outputs if output.end is not None}
    assert len(found) == sum(output.end is not None for output in outputs), "a request ended twice"
    return found


def test_rows_of_several_requests_meet_at_each_model(two: dict[str, Doubler]) -> None:
    made = backend_of(built())
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        made.add(request(name, number, number), now)
    found = ended(made)
    assert {name: output.prediction.body for name, output in found.items() if output.prediction} == {
        "a": b"[4,4]",
        "b": b"[8,8]",
        "c": b"[12,12]",
    }
    assert two["first"].batches == two["second"].batches == [["a", "b", "c"]]


def test_a_step_whose_model_has_batching_off_computes_each_request_alone(two: dict[str, Doubler]) -> None:
    models = {"first": {"source": "first", "batching": {"mode": "off"}}, "second": {"source": "second"}}
    made = backend_of(built(models=models))
    for name, number in (("a", 1), ("b", 2)):
        made.add(request(name, number, number), now)
    assert set(ended(made)) == {"a", "b"}
    assert two["first"].batches == [["a"], ["b"]]
    assert two["second"].batches == [["a", "b"]]


class Twofold(Doubler):
    """Gives the double and the square, and remembers which of them it was asked for."""

    def __init__(self) -> None:
        more = msgspec.structs.replace(CONTRACT.outputs[0], name="z")
        super().__init__(msgspec.structs.replace(CONTRACT, outputs=(*CONTRACT.outputs, more)))
        self.wanted: list[tuple[str, ...]] = []

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        self.wanted += [one.wanted for one in items]
        return [Result(outputs={"y": one.inputs["x"] * 2, "z": one.inputs["x"] ** 2}) for one in items]


@pytest.mark.parametrize(
    ("outputs", "wanted"),
    [
        ({"y": "second.y"}, ("y",)),
        ({"y": "second.y", "z": "first.z"}, ()),
        ({"y": "second.y", "x2": "first.y"}, ("y",)),
    ],
)
def test_a_model_is_asked_for_the_outputs_that_are_read(
    two: dict[str, Doubler], outputs: dict[str, str], wanted: tuple[str, ...]
) -> None:
    two["first"] = first = Twofold()
    found = answer(built(outputs=outputs), x=np.array([[3]]))
    values = {"second.y": 12, "first.y": 6, "first.z": 9}
    assert {name: array.tolist() for name, array in found.items()} == {
        name: [[values[tensor]]] for name, tensor in outputs.items()
    }
    assert first.wanted == [wanted]


def test_steps_run_as_they_depend_and_not_as_they_are_listed(two: dict[str, Doubler]) -> None:
    made = backend_of(
        built(
            steps=[
                TWO["steps"][2],
                TWO["steps"][1] | {"inputs": {"input": "first.y"}},
                TWO["steps"][0] | {"inputs": {"x": "x"}},
            ]
        )
    )
    made.add(request("a", 3), now)
    found = ended(made)["a"]
    assert found.prediction is not None, found.end
    assert found.prediction.body == b"[12]"
    assert (two["first"].batches, two["second"].batches) == ([["a"]], [["a"]])


def test_a_request_that_is_cancelled_between_two_steps_goes_no_further(two: dict[str, Doubler]) -> None:
    made = backend_of(built())
    for name in ("stays", "leaves"):
        made.add(request(name, 1), now)
    made.step(now)  # the first model
    made.cancel("leaves")
    made.add(request("late", 5), now)
    found = ended(made)
    assert {name: output.end.outcome for name, output in found.items() if output.end} == {
        "stays": "done",
        "leaves": "cancelled",
        "late": "done",
    }
    assert two["first"].batches == [["stays", "leaves"], ["late"]]
    assert two["second"].batches == [["stays"], ["late"]]


def test_after_the_last_client_has_left_no_further_step_is_computed(two: dict[str, Doubler]) -> None:
    made = backend_of(built())
    made.add(request("leaves", 1), now)
    made.step(now)
    made.cancel("leaves")
    ended(made)
    assert two["second"].batches == []
    assert made.due(now) is None


def test_a_deadline_that_passes_between_two_steps_ends_the_request(
    two: dict[str, Doubler], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = backend_of(built())
    made.add(request("slow", 1, arrived_at=now, deadline_s=5.0), now)
    made.add(request("patient", 2, arrived_at=now), now)
    made.step(now)
    monkeypatch.setattr(clock, "now", lambda: now + 6)
    found = ended(made)
    end = found["slow"].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.kind == DeadlineExceeded.kind
    assert found["patient"].end is not None
    assert found["patient"].end.outcome == "done"
    assert two["second"].batches == [["patient"]]


def test_one_bad_request_fails_alone_at_whatever_step(two: dict[str, Doubler]) -> None:
    made = backend_of(built())
    for name, number in (("a", 1), ("first", POISON), ("second", POISON // 2), ("d", 4), ("own", BAD)):
        made.add(request(name, number), now)
    found = ended(made)
    assert {name: output.end.outcome for name, output in found.items() if output.end} == {
        "a": "done",
        "first": "failed",
        "second": "failed",
        "d": "done",
        "own": "refused",
    }
    names = ["a", "first", "second", "d", "own"]
    assert two["first"].batches == [names, *([name] for name in names)]
    # No step is computed again because a later one failed: it may keep a state.
    assert two["second"].batches == [["a", "second", "d"], ["a"], ["second"], ["d"]]


def test_each_step_is_timed_in_a_header_and_for_the_metric(two: dict[str, Doubler]) -> None:
    made = backend_of(built())
    made.add(request("a", 1), now)
    output = ended(made)["a"]
    assert output.prediction is not None
    assert output.prediction.headers == (("server-timing", "first;dur=0.000, cast;dur=0.000, second;dur=0.000"),)
    assert output.end is not None
    assert output.end.timings.steps_s == {"first": 0.0, "cast": 0.0, "second": 0.0}


def test_a_pipeline_is_a_step_of_another(two: dict[str, Doubler], monkeypatch: pytest.MonkeyPatch) -> None:
    inner = built()
    monkeypatch.setattr(pipeline, "load_runtime", lambda name, artifact, config, progress: inner)
    outer = built(
        models={"inner": {"source": "inner"}},
        steps=[{"model": "inner"}, {"op": "rescale", "options": {"offset": 1}}],
        outputs={"y": "rescale"},
    )
    (result,) = predicted(outer, item(x=np.array([[1], [2]])))
    assert isinstance(result, Result)
    assert result.outputs["y"].tolist() == [[5], [9]]
    assert set(result.stages_s) == {"inner", "inner.first", "inner.cast", "inner.second", "rescale"}


def test_closing_closes_every_model(two: dict[str, Doubler]) -> None:
    built().close()
    assert all(runtime.is_closed for runtime in two.values())


def test_what_no_step_reads_any_more_is_let_go(two: dict[str, Doubler]) -> None:
    runtime = built(
        steps=[
            {"op": "cast", "options": {"datatype": "INT64"}},
            {"model": "first"},
            {"model": "second", "inputs": {"x": "first.y"}},
        ],
    )
    sent = np.array([[1]], dtype=np.int32)
    gone = weakref.ref(sent)
    one = item(x=sent)
    assert isinstance(runtime, Staged)
    steps = runtime.stages([one])
    next(steps)
    one.inputs = {}
    del sent
    assert gone() is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"outputs": {"y": "second.z"}}, ["output y: second has no output 'z'; there are second.y"]),
        (
            {
                "steps": [
                    {"model": "first", "inputs": {"q": "x"}},
                    {"op": "cast", "options": {"datatype": "INT64"}},
                    TWO["steps"][2],
                ]
            },
            ["step first: it has no input 'q'; it takes x", "step first: its input 'x' is missing"],
        ),
        (
            {"steps": [*TWO["steps"][:2], {"model": "second", "inputs": {"q": "cast"}}]},
            ["step second: it has no input 'q'; it takes x", "step second: its input 'x' is missing"],
        ),
        (
            {
                "steps": [
                    TWO["steps"][0],
                    {"op": "text.normalize", "name": "cast", "inputs": {"text": "first.y"}},
                    {"model": "second", "inputs": {"x": "cast.text"}},
                ]
            },
            ["its input 'text' must be texts (BYTES), not INT64"],
        ),
        (
            {
                "steps": [
                    TWO["steps"][0],
                    {"op": "reshape", "name": "cast", "options": {"shape": [1, 1]}},
                    TWO["steps"][2],
                ]
            },
            ["step second: its input 'x' takes the shape [-1, 1], but is given [-1, 1, 1]"],
        ),
        (
            {"steps": [{"op": "sofmax"}, {"op": "cast"}], "outputs": {"y": "cast"}},
            ["step 1: there is no operation 'sofmax'", "step 2: cast: Object missing required field `datatype`"],
        ),
        ({"models": {}}, ["has no settings of the model 'first'"]),
        (
            {"inputs": {"x": "FP32 [-1, 2]"}},
            ["step first: its input 'x' takes the shape [-1, 1], but is given [-1, 2]"],
        ),
        (
            {"steps": [{"op": "softmax"}], "outputs": {"y": "softmax"}},
            ["input x: the steps that read it do not determine its datatype and shape; declare them"],
        ),
    ],
)
def test_what_does_not_fit_together_is_told_when_it_is_loaded(
    two: dict[str, Doubler], changed: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        built(**changed)
    for expected in said:
        assert expected in caught.value.message


def test_a_language_model_is_no_step(two: dict[str, Doubler], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pipeline, "artifact_of", lambda config, progress: Artifact("llm", config.source, "inferd_llm", "generate")
    )
    with pytest.raises(ModelLoadError, match="has the step 'first', which is a language model"):
        built()


def test_a_request_of_several_images_is_answered_for_each_though_the_model_takes_one(tmp_path: Path) -> None:
    config = detection(tmp_path, rows=1)
    runtime = loaded(config)
    photos = [png(squares()), png(squares((0, 0), (2, 2))), png(squares((3, 1)))]

    class Photos:
        def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
            return DecodedRequest(inputs={"photo_file": object_array(photos)})

        def encode(
            self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo
        ) -> Prediction:
            return Prediction(
                msgspec.json.encode({name: array.tolist() for name, array in result.outputs.items() if name != "found"})
            )

    made = PredictBackend(runtime, Batcher(Limits(mode="off")), info(1), codecs=lambda dialect: Photos())
    made.add(request("r"), now)
    output = ended(made)["r"]
    assert output.prediction is not None
    answered = json.loads(output.prediction.body)
    assert answered["count"] == [0, 2, 1]
    assert answered["boxes"][2][0] == [48, 16, 64, 32]
    assert np.shape(answered["boxes"]) == (3, 2, 4)


def test_a_request_brings_a_photo_or_the_numbers_it_stands_for(tmp_path: Path) -> None:
    steps = [
        {"op": "image.decode", "inputs": {"image": "image"}},
        {"op": "rescale", "options": {"scale": 1 / 255}},
        {"op": "reshape", "options": {"shape": [12]}},
        {"op": "either", "inputs": {"image": "reshape", "numbers": "numbers"}},
        {"name": "model", "model": "linear"},
    ]
    weights = str(linear(tmp_path / "model.onnx", WEIGHTS))
    made = loaded(
        model(
            pipeline={
                "inputs": {"image": "BYTES [-1]", "numbers": "FP32 [-1, 12]"},
                "models": {"linear": {"source": weights}},
                "steps": steps,
                "outputs": {"scores": "model"},
            }
        )
    )
    assert all(spec.is_optional for spec in made.contract.inputs)
    photo = picture(2, 2)
    pixels = np.asarray(photo.reshape(1, 12), np.float32) / np.float32(255)
    seen, told = item("a", image=object_array([png(photo)])), item("b", numbers=pixels)
    first, second = predicted(made, seen, told)
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    scores = [np.asarray(one.outputs["scores"], np.float32) for one in (first, second)]
    assert np.allclose(scores[0], scores[1], rtol=1e-5)
    assert np.allclose(scores[1], pixels @ WEIGHTS, rtol=1e-4)
    for wrong, said in (
        (item("c", image=object_array([png(photo)]), numbers=pixels), "got 'image' and 'numbers'"),
        (Item(request_id="d", inputs={}, rows=1, size=1), "got none of them"),
    ):
        (refused,) = predicted(made, wrong)
        assert isinstance(refused, InvalidRequest)
        assert said in refused.message


def test_an_input_that_is_needed_besides_is_not_optional(tmp_path: Path) -> None:
    weights = str(linear(tmp_path / "model.onnx", WEIGHTS))
    steps = [
        {"op": "either", "inputs": {"a": "a", "b": "b"}},
        {"name": "model", "model": "linear"},
        {"name": "other", "model": "linear", "inputs": {"features": "b"}},
    ]
    config = model(
        pipeline={
            "inputs": {"a": "FP32 [-1, 12]", "b": "FP32 [-1, 12]"},
            "models": {"linear": {"source": weights}},
            "steps": steps,
            "outputs": {"one": "model", "two": "other"},
        }
    )
    assert {spec.name: spec.is_optional for spec in loaded(config).contract.inputs} == {"a": True, "b": False}


def test_inputs_that_differ_cannot_stand_for_each_other(tmp_path: Path) -> None:
    config = model(
        pipeline={
            "inputs": {"a": "FP32 [-1, 12]", "b": "FP32 [-1, 4]"},
            "steps": [{"op": "either", "inputs": {"a": "a", "b": "b"}}],
            "outputs": {"one": "either"},
        }
    )
    with pytest.raises(
        ModelLoadError, match=r"of one datatype and shape, not 'a' FP32 \[-1, 12\] and 'b' FP32 \[-1, 4\]"
    ):
        loaded(config)
