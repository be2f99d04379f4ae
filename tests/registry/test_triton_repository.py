"""A Triton model repository becomes ordinary settings; what would answer differently here is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.registry.repositories import ENSEMBLE, SIMPLE, repository, simple_model, write

from inferd.app.config_file import version
from inferd.cli.check import examine
from inferd.config import Config, ModelConfig, load_config
from inferd.errors import ConfigError
from inferd.registry.triton import is_repository, read_repository


def settings(folder: Path) -> Config:
    return load_config(None, {}, {"models": read_repository(folder).models})


def one(tmp_path: Path, config: str, *, file: str = "1/model.onnx", warnings: list[str] | None = None) -> ModelConfig:
    """The settings of a repository of one model."""
    write(tmp_path, {f"m/{file}": "", "m/config.pbtxt": config})
    found = read_repository(tmp_path)
    if warnings is not None:
        warnings += found.warnings
    return load_config(None, {}, {"models": found.models}).models["m"]


def refused(tmp_path: Path, config: str, *, file: str = "1/model.onnx") -> str:
    with pytest.raises(ConfigError) as caught:
        one(tmp_path, config, file=file)
    return caught.value.message


def test_the_common_fields_have_their_meaning(tmp_path: Path) -> None:
    model = settings(repository(tmp_path)).models["simple"]
    assert (model.runtime, model.source, model.version) == ("onnx", str(tmp_path / "simple/1"), "1")
    assert (model.replicas, model.device) == (2, "cpu")
    batching = model.batching
    assert (batching.mode, batching.max_batch_size, batching.max_delay_ms) == ("dynamic", 8, 0.1)
    assert batching.preferred_sizes == (4, 8)
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in model.inputs] == [
        ("INPUT0", "INT32", (-1, 16)),
        ("INPUT1", "INT32", (-1, 16)),
    ]
    assert model.outputs[0].labels_file == str(tmp_path / "simple/labels.txt")


def test_an_ensemble_is_a_pipeline_with_its_models_inside(tmp_path: Path) -> None:
    model = settings(repository(tmp_path)).models["both"]
    pipeline = model.pipeline
    assert model.source == "pipeline"
    assert pipeline.inputs == {"A": "INT32 [-1, 16]", "B": "INT32 [-1, 16]"}
    assert [(step.name, step.model, step.inputs) for step in pipeline.steps] == [
        ("simple", "simple", {"INPUT0": "A", "INPUT1": "B"}),
        ("triple", "triple", {"IN": "simple.OUTPUT0"}),
    ]
    assert pipeline.outputs == {"TRIPLED": "triple.OUT"}
    assert set(pipeline.models) == {"simple", "triple"}


def test_without_dynamic_batching_requests_are_computed_one_by_one(tmp_path: Path) -> None:
    model = one(tmp_path, 'backend: "onnxruntime" max_batch_size: 4')
    assert (model.batching.mode, model.batching.max_batch_size) == ("off", 4)
    assert one(tmp_path, 'backend: "onnxruntime"').batching.max_batch_size is None


def test_without_a_batch_dims_are_the_whole_shape(tmp_path: Path) -> None:
    config = 'backend: "onnxruntime" input { name: "x" data_type: TYPE_STRING dims: [ 1, -1 ] reshape { shape: [] } }'
    (tensor,) = one(tmp_path, config).inputs
    assert (tensor.datatype, tensor.shape, tensor.reshape) == ("BYTES", (1, -1), ())
    (tensor,) = one(tmp_path, config + "max_batch_size: 1").inputs
    assert (tensor.shape, tensor.reshape) == ((-1, 1, -1), (-1,))


def test_a_model_without_a_configuration_is_what_its_file_says(tmp_path: Path) -> None:
    simple_model(tmp_path / "simple/3/model.onnx")
    write(tmp_path, {"torch/1/model.pt2": "", "script/1/model.pt": "", "python/1/model.py": "", "docs/readme": ""})
    found = read_repository(tmp_path)
    assert {name: tree["runtime"] for name, tree in found.models.items()} == {
        "simple": "onnx",
        "torch": "torch",
        "script": "torch",
        "python": "triton_python",
    }
    assert len(found.warnings) == 1
    assert "docs is no model and is ignored" in found.warnings[0]


def test_versions_are_chosen_by_their_policy(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        simple_model(tmp_path / f"m/{number}/model.onnx")
    write(tmp_path, {"m/11": "a file, and no version", "m/notes/model.onnx": "in a folder that is no version"})

    def served(policy: str) -> set[str]:
        write(tmp_path, {"m/config.pbtxt": f'backend: "onnxruntime" {policy}'})
        return {f"{name}={model.version}" for name, model in settings(tmp_path).models.items()}

    assert served("") == {"m=10"}
    assert served("version_policy: { latest { num_versions: 2 } }") == {"m=10", "m@2=2"}
    assert served("version_policy: { all { } }") == {"m=10", "m@2=2", "m@1=1"}
    assert served("version_policy: { specific { versions: [1, 2] } }") == {"m=2", "m@1=1"}


def test_a_file_of_another_name_is_found_by_it(tmp_path: Path) -> None:
    simple_model(tmp_path / "m/1/net.onnx")
    write(tmp_path, {"m/config.pbtxt": 'backend: "onnxruntime" default_model_filename: "net.onnx"'})
    model = settings(tmp_path).models["m"]
    assert (model.source, model.version) == (str(tmp_path / "m/1/net.onnx"), "1")


def test_sequences_keep_their_states_and_controls(tmp_path: Path) -> None:
    model = one(
        tmp_path,
        """
backend: "onnxruntime" max_batch_size: 4
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  direct { }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ]
  state [ { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ 2 ] initial_state { zero_data: true } } ]
}""",
    )
    assert model.sequence.states == {"hn": "h"}
    assert model.sequence.controls == {"START": "start", "ID": "id"}
    assert model.sequence.idle_s == 5.0
    assert (model.batching.mode, model.batching.max_delay_ms) == ("dynamic", 0.0)


def test_devices_queues_and_unknown_fields(tmp_path: Path) -> None:
    warnings: list[str] = []
    model = one(
        tmp_path,
        """
backend: "onnxruntime" max_batch_size: 4 unheard_of: 3 optimization { cuda { graphs: true } }
instance_group [ { kind: KIND_GPU gpus: [ 1, 2 ] count: 2 } ]
dynamic_batching { default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 250000 } }
""",
        warnings=warnings,
    )
    assert (model.device, model.replicas) == ("cuda:1", 2)
    assert (model.queue.max_requests, model.queue.timeout_s) == (9, 0.25)
    assert [warning.partition(": ")[2] for warning in warnings] == [
        "unheard_of is not known and is ignored.",
        "instance_group names the GPUs [1, 2]; all replicas run on 1.",
    ]


@pytest.mark.parametrize(
    ("groups", "replicas", "device", "told"),
    [
        ("", 1, "auto", None),
        ("{ }", 1, "auto", None),
        ("{ count: 3 }", 3, "auto", None),
        ("{ kind: KIND_MODEL }", 1, "auto", None),
        ("{ kind: KIND_CPU }, { kind: KIND_CPU count: 2 }", 3, "cpu", None),
        ("{ kind: KIND_CPU }, { kind: KIND_GPU passive: true }", 1, "cpu", None),
        ("{ kind: KIND_GPU passive: true }", 1, "auto", None),
        ("{ kind: KIND_GPU }", 1, "cuda", None),
        ("{ kind: KIND_GPU gpus: [ 3 ] }", 1, "cuda:3", None),
        (
            "{ kind: KIND_GPU gpus: [ 3 ] }, { kind: KIND_GPU gpus: [ 2 ] }",
            2,
            "cuda:2",
            "GPUs [2, 3]; all replicas run on 2",
        ),
    ],
)
def test_instances_are_replicas_on_one_device(
    tmp_path: Path, groups: str, replicas: int, device: str, told: str | None
) -> None:
    warnings: list[str] = []
    model = one(tmp_path, f'backend: "onnxruntime" {groups and f"instance_group [ {groups} ]"}', warnings=warnings)
    assert (model.replicas, model.device) == (replicas, device)
    assert len(warnings) == (told is not None)
    assert told is None or told in warnings[0]


@pytest.mark.parametrize(
    ("policy", "max_requests", "timeout_s"),
    [
        ("", None, None),
        ("max_queue_size: 9", 9, None),
        ("default_timeout_microseconds: 250000", None, 0.25),
        ("timeout_action: DELAY default_timeout_microseconds: 250000", None, None),
    ],
)
def test_a_queue_is_bounded_as_its_policy_says(
    tmp_path: Path, policy: str, max_requests: int | None, timeout_s: float | None
) -> None:
    model = one(
        tmp_path, f'backend: "onnxruntime" max_batch_size: 4 dynamic_batching {{ default_queue_policy {{ {policy} }} }}'
    )
    usual = ModelConfig(source="m").queue
    assert model.queue.max_requests == (usual.max_requests if max_requests is None else max_requests)
    assert model.queue.timeout_s == (usual.timeout_s if timeout_s is None else timeout_s)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('name: "other"', "calls the model 'other', but its folder is called 'm'"),
        ('platform: "tensorrt_plan"', "give the ONNX model it was built from"),
        ('backend: "vllm"', "serve the checkpoint itself"),
        ('backend: "my_own"', "the backend 'my_own' is not part of inferd"),
        ("max_batch_size: -1", "max_batch_size is -1"),
        ("max_batch_size: many", "config.pbtxt: line 1: max_batch_size: Couldn't parse integer: many"),
        ('backend: "pytorch"', "version 1 has no model.pt2 or model.pt"),
        ('default_model_filename: "../../secret.onnx"', "is no name of a file in a version's folder"),
        (
            'output { name: "y" data_type: TYPE_FP32 label_filename: "../../labels" }',
            "is no file in the model's folder",
        ),
        ('input { name: "x" data_type: TYPE_COMPLEX }', "input.data_type: "),
        ('input { name: "x" }', "x has the data_type TYPE_INVALID; expected one of TYPE_BOOL, "),
        ('input { name: "x" data_type: TYPE_FP32 dims: -2 }', "x has the dims [-2]"),
        ('input { name: "x" data_type: TYPE_FP32 is_shape_tensor: true }', "shape tensor"),
        ("batch_input { kind: 1 }", "batch_input is not supported"),
        ("model_operations { op_library_filename: 'x.so' }", "set options.custom_ops"),
        (
            "instance_group [ { kind: KIND_TPU } ]",
            "has no value named KIND_TPU; expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL",
        ),
        ("instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU } ]", "mixes KIND_CPU and KIND_GPU"),
        ("model_transaction_policy { decoupled: true }", "decoupled is for models in Python"),
        (
            "sequence_batching { control_input { name: 'S' control { kind: CONTROL_SEQUENCE_END int32_false_true: [1, 0] } } }",
            "only 0 and 1 are supported",
        ),
        ("sequence_batching { state { initial_state { data_file: 'x' } } }", "only zeros are supported"),
        ('platform: "ensemble"', "ensemble_scheduling has no step"),
        (
            'platform: "ensemble" output { name: "y" } ensemble_scheduling { step { model_name: "a" } }',
            "the output takes 'y', which is no input of the ensemble and no step's output",
        ),
    ],
)
def test_what_cannot_be_served_as_it_is_is_refused_with_the_reason(tmp_path: Path, config: str, said: str) -> None:
    assert said in refused(tmp_path, config)


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, {f"m{place}/1/model.onnx": "" for place in range(3)})
    write(tmp_path, {"m0/config.pbtxt": "name: 3", "m1/config.pbtxt": 'backend: "x"', "m2/config.pbtxt": ""})
    with pytest.raises(ConfigError) as caught:
        read_repository(tmp_path)
    head, *lines = caught.value.message.split("\n  - ")
    assert head == f"2 models of the repository {tmp_path} cannot be served:"
    assert [line.split(": ")[1] for line in lines] == ["line 1", "the backend 'x' is not part of inferd"]


def test_what_is_a_repository_and_what_is_not(tmp_path: Path) -> None:
    repository(tmp_path / "all")
    assert is_repository(tmp_path / "all")
    assert is_repository(tmp_path / "all/simple"), "one model of a repository"
    assert set(read_repository(tmp_path / "all/simple").models) == {"simple"}
    simple_model(tmp_path / "versions/1/model.onnx")
    assert not is_repository(tmp_path / "versions"), "numbered folders alone are one model's"
    write(tmp_path / "checkpoint", {"config.json": "{}", "onnx/1/model.onnx": ""})
    assert not is_repository(tmp_path / "checkpoint")
    assert not is_repository(tmp_path / "gone")


def test_check_examines_a_repository(tmp_path: Path) -> None:
    repository(tmp_path)
    report = examine(str(tmp_path), probe=False)
    assert any("triple" in problem and "allow_code" in problem for problem in report.problems)
    assert examine(str(tmp_path), probe=False, allowed={"allow_code": True}).ok
    write(tmp_path, {"triple/config.pbtxt": 'backend: "onnxruntime"'})
    assert examine(str(tmp_path), probe=False).problems[0].endswith("version 1 has no model.onnx.")


def test_an_ensemble_of_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"both/config.pbtxt": ENSEMBLE, "simple/config.pbtxt": SIMPLE, "simple/labels.txt": "a"})
    simple_model(tmp_path / "simple/1/model.onnx")
    with pytest.raises(ConfigError, match="there is no model 'triple' in this file"):
        settings(tmp_path)


def test_a_change_anywhere_in_a_repository_is_seen(tmp_path: Path) -> None:
    repository(tmp_path)
    seen = {version(tmp_path)}
    write(tmp_path, {"simple/config.pbtxt": SIMPLE + " "})
    seen.add(version(tmp_path))
    simple_model(tmp_path / "simple/2/model.onnx")
    seen.add(version(tmp_path))
    (tmp_path / "simple/2/model.onnx").unlink()
    seen.add(version(tmp_path))
    assert len(seen) == 4
    assert version(tmp_path) == version(tmp_path)
