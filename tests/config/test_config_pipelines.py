"""A pipeline's steps are checked as a whole before anything is loaded, and everything wrong is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import Config, PipelineConfig, StepConfig, load_config
from inferd.config.pipeline_graph import needs, order, read_spec, step_names
from inferd.errors import ConfigError, ModelLoadError
from inferd.predict.pipelines.wiring import check_steps


def config(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "inferd.yaml"
    file.write_text(text)
    return load_config(file, {}, {})


def refused(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, text)
    head, *rest = caught.value.message.split("\n  - ")
    return rest or [head]


def test_every_mistake_is_told_with_its_place(tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        """
models:
  chat: {source: "openai:http://host/v1"}
  faces:
    source: pipeline
    pipeline:
      inputs: {image: BYTES, unused: auto, wrong: "FP31 [3]"}
      models:
        private: {source: here, tsk: embed}
      steps:
        - {op: image.decode, inputs: {image: image}}
        - {op: softmax, name: a, inputs: {input: b}}
        - {op: softmax, name: b, inputs: {input: a.output}}
        - {op: softmax, name: c, inputs: {input: nowhere.x}}
        - {op: softmax, name: c, inputs: {input: decode}}
        - {name: both, op: softmax, model: private}
        - {name: neither}
        - {model: gone}
        - {model: chat}
      outputs: {label: decode.image, other: image, lost: a.output.b.c}
""",
    )
    place = "models.faces.pipeline"
    for expected in (
        f"{place}.models.private.tsk: no such field",
        f"{place}.inputs.wrong: 'FP31 [3]' is not auto, a datatype",
        f"{place}.inputs.unused: no step reads it",
        f"{place}.steps: a, b wait for each other; a pipeline has no cycles.",
        f"{place}.steps[3].inputs.input: 'nowhere.x' is neither an input of the pipeline nor a step; there are image,",
        f"{place}.steps[4].name: another step is called 'c'",
        f"{place}.steps[4]: no step reads an output of 'c'",
        f"{place}.steps[5]: it needs either an op or a model, not both.",
        f"{place}.steps[6]: it needs either an op or a model.",
        f"{place}.steps[7].model: there is no model 'gone' in this file; there are private, chat, faces.",
        f"{place}.steps[8].model: 'chat' is a remote server; the models of a pipeline run in its own worker.",
        f"{place}.outputs.other: 'image' is an input of the pipeline",
    ):
        assert any(line.startswith(expected) for line in said), (expected, said)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("{source: here, preprocess: [{model: x}]}", "models.m.preprocess[0]: it has no op"),
        ("{source: pipeline}", "models.m.pipeline.steps: missing"),
        ("{source: here, pipeline: {outputs: {a: b}}}", "models.m.pipeline: it has no steps"),
        (
            "{source: here, pipeline: {inputs: {x: auto}, steps: [{op: softmax}], outputs: {y: softmax}}}",
            "models.m.source: 'here' would not be read",
        ),
        (
            "{source: pipeline, pipeline: {inputs: {x: auto}, steps: [{op: softmax}]}}",
            "models.m.pipeline.outputs: missing",
        ),
        (
            "{source: pipeline, pipeline: {inputs: {x: auto, y: auto}, steps: [{op: softmax}], outputs: {z: softmax}}}",
            "models.m.pipeline.steps[0].inputs: missing",
        ),
        (
            "{source: pipeline, pipeline: {inputs: {x: auto}, steps: [{model: m}], outputs: {z: m.z}}}",
            "models.m.pipeline.steps[0].model: 'm' contains this pipeline again.",
        ),
        (
            "{source: 'openai:http://host/v1', postprocess: [{op: softmax}]}",
            "models.m.postprocess: operations run beside",
        ),
    ],
)
def test_what_a_model_cannot_mean_is_refused(tmp_path: Path, model: str, expected: str) -> None:
    said = refused(tmp_path, f"models: {{m: {model}}}")
    assert any(line.startswith(expected) for line in said), said


def test_a_pipeline_is_given_the_models_it_names_and_changes_with_them(tmp_path: Path) -> None:
    text = """
models:
  net: {source: a.onnx, dtype: DTYPE}
  inner:
    source: pipeline
    pipeline: {inputs: {x: auto}, steps: [{model: net}], outputs: {y: net.y}}
  outer:
    source: pipeline
    pipeline: {inputs: {x: auto}, steps: [{model: inner}], outputs: {y: inner.y}}
  other: {source: b.onnx}
"""
    before = config(tmp_path, text.replace("DTYPE", "auto")).models
    after = config(tmp_path, text.replace("DTYPE", "float32")).models
    assert before["inner"].pipeline.models["net"]["source"] == "a.onnx"
    assert before["outer"].pipeline.models["inner"]["pipeline"]["models"]["net"]["source"] == "a.onnx"
    assert {name for name in before if before[name] != after[name]} == {"net", "inner", "outer"}


def test_pipelines_that_contain_each_other_are_refused(tmp_path: Path) -> None:
    one = "{source: pipeline, pipeline: {inputs: {x: auto}, steps: [{model: %s}], outputs: {y: %s.y}}}"
    said = refused(tmp_path, f"models: {{a: {one % ('b', 'b')}, b: {one % ('a', 'a')}}}")
    assert any("contains this pipeline again" in line for line in said), said


def test_operations_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    text = """
models:
  m:
    source: pipeline
    pipeline:
      inputs: {x: auto}
      models: {net: {source: /nowhere/net.onnx}}
      steps:
        - {op: image.decode, inputs: {imge: x}}
        - {op: image.resize, options: {width: 3, height: 3}}
        - {model: net, inputs: {input: resize.pixels}}
        - {op: boxes.split}
        - {op: boxes, inputs: {boxes: split.boxes}}
      outputs: {boxes: boxes.boxes}
"""
    with pytest.raises(ModelLoadError) as caught:
        check_steps("m", config(tmp_path, text).models["m"])
    assert caught.value.message.split("\n  - ")[1:] == [
        "step decode: it has no input 'imge'; it takes image",
        "step decode: its input 'image' is missing",
        "step net: resize has no output 'pixels'; there are resize.image, resize.transform",
        "step boxes: its input 'scores' is missing",
        "model net: There is no file or folder /nowhere/net.onnx; check the path.",
    ]


def test_steps_without_a_configured_name_get_one() -> None:
    steps = (
        StepConfig(op="image.decode"),
        StepConfig(op="decode"),
        StepConfig(model="my/net"),
        StepConfig(name="decode_2"),
    )
    assert step_names(steps) == ("decode", "decode_3", "my_net", "decode_2")


@given(st.lists(st.sets(st.integers(0, 7), max_size=3), max_size=8))
def test_the_order_puts_every_step_behind_those_it_waits_for(waits: list[set[int]]) -> None:
    waits = [{before for before in one if before < len(waits)} for one in waits]
    found = order(waits)
    assert len(set(found)) == len(found)
    for number, place in enumerate(found):
        assert waits[place] <= set(found[:number])
    left = set(range(len(waits))) - set(found)
    assert all(waits[place] & left for place in left), "what is left out waits for something that is left out"


def test_a_step_without_inputs_waits_for_the_one_before() -> None:
    steps = (
        StepConfig(op="softmax", name="a", inputs={"input": "x"}),
        StepConfig(op="softmax", name="b"),
        StepConfig(op="softmax", name="c", inputs={"input": "a.output"}),
    )
    assert needs(PipelineConfig(inputs={"x": "auto"}, steps=steps), ("a", "b", "c")) == [set(), {0}, {0}]


def test_declared_tensors_are_read() -> None:
    assert read_spec("auto") is None
    assert read_spec("BYTES") == ("BYTES", None, ())
    assert read_spec(" FP32 [ -1, 30 ] ") == ("FP32", (-1, 30), ())
    assert read_spec("INT8[]") == ("INT8", (), ())
    for wrong in ("FP31", "FP32 [-2]", "FP32 [a]", "fp32", "FP32 [3", ""):
        with pytest.raises(ValueError, match=r"is not auto|below -1"):
            read_spec(wrong)
