"""Predictive models are planned from their files beside language models, within one budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from tests.predict.runtimes.programs import Scores, export
from tests.tiers import THOROUGH

from inferd.config import BatchingConfig, Config, KVCacheConfig, ModelConfig, PipelineConfig, ServerConfig
from inferd.errors import ConfigError, ModelLoadError
from inferd.machine.torch_build import CUDA_BUILD_BYTES, cuda_build_bytes
from inferd.planning.memory import MemoryEstimate, bind, plan_config, plan_model

GB = 10**9


def planned(config: ModelConfig, free_bytes: int = 8 * GB) -> MemoryEstimate:
    estimate = plan_model("m", config, free_bytes=free_bytes)
    assert estimate is not None
    return estimate


def detector(path: Path, *, megabytes: int = 4, is_external: bool = False) -> ModelConfig:
    """A model of one product, with weights of a size."""
    width = megabytes * 250
    weight = numpy_helper.from_array(np.random.default_rng(0).random((1000, width), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["image", "w"], ["boxes"])],
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 1000])],
        [helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["n", width])],
        [weight],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(proto, path, save_as_external_data=is_external, location="weights.bin", size_threshold=0)
    return ModelConfig(source=str(path))


def encoder(folder: Path, *, count: int = 1_000_000) -> ModelConfig:
    folder.mkdir()
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert", **sizes}))
    save_file({"embeddings": np.zeros(count, np.float16)}, folder / "model.safetensors")
    return ModelConfig(source=str(folder))


@pytest.mark.parametrize("is_external", [False, True])
def test_an_onnx_models_weights_are_planned_wherever_they_lie(tmp_path: Path, is_external: bool) -> None:
    estimate = planned(detector(tmp_path / "m.onnx", is_external=is_external))
    assert 4_000_000 <= estimate.weights_bytes < 4_010_000
    assert (estimate.kv_bytes, estimate.kind, estimate.platform) == (0, "predict", "onnxruntime_onnx")
    assert [(spec.name, spec.shape) for spec in estimate.inputs] == [("image", (-1, 1000))]


def test_a_batch_takes_memory_by_its_rows(tmp_path: Path) -> None:
    config = detector(tmp_path / "m.onnx")
    few, many = (
        planned(msgspec.structs.replace(config, batching=BatchingConfig(max_batch_size=rows))).headroom_bytes
        for rows in (1, 9)
    )
    assert many - few >= 8 * 2 * 1000 * 4, "a row more is at least its input and its output"


def headroom(path: Path, width: int, max_batch_size: int | None) -> int:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", width])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    batching = BatchingConfig(max_batch_size=max_batch_size)
    return planned(ModelConfig(source=str(path), batching=batching)).headroom_bytes


@pytest.mark.parametrize(
    ("width", "rows"), [(1, 256), (4096, 256), (8192, 128), (1 << 18, 4), (1 << 20, 4), (1 << 21, 4)]
)
def test_a_batch_is_planned_for_some_megabytes_of_rows_where_nothing_says_how_many(
    tmp_path: Path, width: int, rows: int
) -> None:
    path = tmp_path / "m.onnx"
    assert headroom(path, width, None) == headroom(path, width, rows)
    assert headroom(path, width, rows + 1) > headroom(path, width, rows)


def test_each_row_of_a_batch_takes_the_same(tmp_path: Path) -> None:
    one, two, three = (headroom(tmp_path / "m.onnx", 1000, rows) for rows in (1, 2, 3))
    assert three - two == two - one >= 2 * 4 * 1000


def test_an_encoders_weights_are_planned_in_the_format_they_are_computed_in(tmp_path: Path) -> None:
    config = encoder(tmp_path / "e")
    assert planned(config).weights_bytes == 4_000_000
    assert planned(msgspec.structs.replace(config, dtype="bfloat16")).weights_bytes == 2_000_000


def test_a_pipeline_takes_what_its_models_take_in_one_process(tmp_path: Path) -> None:
    config = detector(tmp_path / "m.onnx")
    steps = {"a": {"source": config.source}, "b": {"source": config.source}}
    both = planned(ModelConfig(source="pipeline", runtime="pipeline", pipeline=PipelineConfig(models=steps)))
    one = planned(config)
    assert both.weights_bytes == 2 * one.weights_bytes
    assert one.total_bytes < both.total_bytes < 2 * one.total_bytes


def test_one_budget_holds_an_embedding_model_a_detector_and_a_chat_model(tmp_path: Path) -> None:
    models = {
        "embed": encoder(tmp_path / "e"),
        "detect": msgspec.structs.replace(detector(tmp_path / "m.onnx"), batching=BatchingConfig(max_batch_size=4)),
        "chat": ModelConfig(source="demo", kv_cache=KVCacheConfig(memory_bytes=64 << 20)),
    }
    both = 2 * cuda_build_bytes()  # of the two that are computed by torch
    budget = (800 << 20) + both
    bound = bind(Config(server=ServerConfig(memory_bytes=budget), models=models)).models
    shares = {name: model.memory_bytes or 0 for name, model in bound.items()}
    assert all(shares.values())
    assert sum(shares.values()) <= budget
    plan = plan_config(Config(models=models), free_bytes=8 * GB)
    assert {estimate.name: estimate.total_bytes for estimate in plan.models} == shares
    tight = Config(server=ServerConfig(memory_bytes=(600 << 20) + both), models=models)
    with pytest.raises(ConfigError, match=r"planned so far: embed 1 x .*models.\w+: A replica of \w+ takes"):
        bind(tight)


def test_a_model_that_does_not_fit_its_own_bound_is_refused_with_the_plan(tmp_path: Path) -> None:
    config = msgspec.structs.replace(detector(tmp_path / "m.onnx"), memory_bytes=50 << 20)
    with pytest.raises(ModelLoadError, match=r"takes about .*weights 3\.81 MiB.*but 50\.0 MiB may be used"):
        planned(config)
    with pytest.raises(ModelLoadError, match="may be used"):
        planned(msgspec.structs.replace(config, memory_bytes=None), free_bytes=50 << 20)


def test_planning_imports_neither_arrays_nor_runtimes(tmp_path: Path) -> None:
    config = detector(tmp_path / "m.onnx")
    code = (
        "import sys; from inferd.config import ModelConfig; from inferd.planning.memory import plan_model; "
        f"plan_model('m', ModelConfig(source={config.source!r})); "
        "assert not {'numpy', 'torch', 'onnx', 'onnxruntime', 'sklearn'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_worker_takes_no_more_than_was_planned(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        detector(tmp_path / "m.onnx", megabytes=40), batching=BatchingConfig(max_batch_size=2), threads=1
    )
    code = (
        "import inferd.worker.main; from inferd.config import ModelConfig, BatchingConfig; "
        "from inferd.predict.load import create_backend; "
        f"create_backend('m', ModelConfig(source={config.source!r}, threads=1, batching=BatchingConfig(max_batch_size=2)), "
        "lambda *said: None); "
        "print(int(open('/proc/self/statm').read().split()[1]) * 4096)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert 0.4 * planned(config).total_bytes < int(run.stdout) < planned(config).total_bytes


_PLAN = """
import json, sys
from inferd.config import Config, ModelConfig
from inferd.planning.memory import plan_config
models = {name: ModelConfig(source=source) for name, source in (word.split("=") for word in sys.argv[1:])}
plan = plan_config(Config(models=models), free_bytes=8 * 10**9)
assert plan.fits, plan.problems
print(json.dumps({each.name: each.headroom_bytes for each in plan.models}))
"""


@THOROUGH
def test_a_plan_counts_the_build_of_torch_that_is_installed_without_importing_it(tmp_path: Path) -> None:
    """The folder ``torch`` stands for a build; its import ends the process."""
    models = {
        "chat": "demo",
        "vectors": encoder(tmp_path / "vectors").source,
        "program": str(export(Scores(), tmp_path / "program.pt2", torch.randn(2, 4))),
        "detect": detector(tmp_path / "m.onnx").source,
    }

    def headroom(*libraries: str) -> dict[str, int]:
        package = tmp_path / f"with-{len(libraries)}" / "torch"
        (package / "lib").mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        for library in libraries:
            (package / "lib" / library).touch()
        ran = subprocess.run(
            [sys.executable, "-c", _PLAN, *(f"{name}={source}" for name, source in models.items())],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])},
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found: dict[str, int] = json.loads(ran.stdout)
        return found

    plain, cuda = headroom("libtorch_cpu.so"), headroom("libtorch_cpu.so", "libtorch_cuda.so")
    more = {name: cuda[name] - plain[name] for name in models}
    assert more == {**dict.fromkeys(("chat", "vectors", "program"), CUDA_BUILD_BYTES), "detect": 0}
