"""What is shown once models are ready: what each takes and gives, how it is batched, and a line for each kind of API."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import click
import msgspec
import numpy as np
import pytest
from rich.console import Console
from tests.predict.row_models import cumulative_sum

from inferd.cli.check import examine, show
from inferd.cli.predict.outputs import table_of, text_of
from inferd.cli.ready import contract_lines, curl_line, engine_line, python_lines, show_ready, spec_text, threads_text
from inferd.config import BatchingConfig, Config, KVCacheConfig, ModelConfig, NodesConfig, ServerConfig, StateConfig
from inferd.errors import ModelLoadError
from inferd.predict.load import create_backend
from inferd.registry.source import silent
from inferd.types import ModelInfo, TensorSpec

ADDRESS = "http://127.0.0.1:8000"


def info(*inputs: TensorSpec, tasks: tuple[str, ...] = ("predict",), rows: int = 256) -> ModelInfo:
    return ModelInfo(
        name="m",
        source="m.onnx",
        architecture="onnxruntime_onnx",
        dtype="float32",
        max_model_len=0,
        vocab_size=0,
        num_parameters=0,
        num_blocks=0,
        block_size=0,
        max_num_seqs=rows,
        kind="predict",
        platform="onnxruntime_onnx",
        tasks=tasks,
        inputs=inputs,
        outputs=(TensorSpec("probabilities", "FP32", (-1, 3), labels=("cat", "dog", "eel")),),
        max_batch_size=rows,
        num_threads=2,
    )


ROWS = TensorSpec("x", "FP32", (-1, 4))


def test_the_effective_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig(source="m.onnx", replicas=2)
    assert [click.unstyle(line) for line in contract_lines("m", info(ROWS), model)] == [
        "m  onnxruntime_onnx, up to 256 rows together, waiting at most 2 ms, 2 threads, 2 copies",
        "  takes  x              FP32 [any, 4]",
        "  gives  probabilities  FP32 [any, 3]: cat, dog, eel",
        "  ask    inferd predict m --input 0,0,0,0",
    ]
    show_ready(ADDRESS, Config(models={"m": model}), {"m": info(ROWS)})
    said = capsys.readouterr().out
    assert "FP32 [any, 3]: cat, dog, eel" in said
    assert "/v2/models/m/infer" in said
    assert "inferd chat" not in said


def test_what_computes_a_model_that_generates_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    told = msgspec.structs.replace(
        info(), kind="generate", architecture="LlamaForCausalLM", kernels="avx2", cores=(0, 1, 2, 5), num_threads=4,
        layout="2 ranks (tensor 1 x pipeline 2) on 2 machines"
    )  # fmt: skip
    model = ModelConfig(source="m")  # in which no layout is set
    line = (
        "m  LlamaForCausalLM, float32, avx2 kernels, 4 threads on cores 0-2,5, "
        "2 ranks (tensor 1 x pipeline 2) on 2 machines"
    )
    assert click.unstyle(engine_line("m", told, model)) == line
    show_ready(ADDRESS, Config(models={"m": model}), {"m": told})
    assert line in click.unstyle(capsys.readouterr().out)


def test_integers_of_weights_and_cache_are_told() -> None:
    told = msgspec.structs.replace(
        info(), kind="generate", architecture="Llama", kernels="avx2", quantization="int4/64"
    )
    model = ModelConfig(source="m", kv_cache=KVCacheConfig(dtype="int8"))
    line = "m  Llama, float32, int4/64 weights, int8 KV cache, avx2 kernels, 2 threads"
    assert click.unstyle(engine_line("m", told, model)) == line


def test_a_model_that_could_not_be_loaded_is_not_among_those_that_are_ready(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(models={"bad": ModelConfig(source="bad"), "m": ModelConfig(source="m.onnx")})
    show_ready(ADDRESS, config, {"m": info(ROWS)}, failed={"bad": "max_model_len is 9.\x1b[2J Set it to 8."})
    said = click.unstyle(capsys.readouterr().out)
    assert f"inferd is ready at {ADDRESS}  (m)\n" in said
    assert "bad is not served: max_model_len is 9.\\x1b[2J Set it to 8." in said
    assert "  takes  x              FP32 [any, 4]" in said, "what follows a model that failed is shown as well"


def written(**changes: object) -> ModelInfo:
    return msgspec.structs.replace(info(), kind="generate", architecture="Llama", **changes)


def test_a_model_without_a_chat_template_is_not_offered_for_chat(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(models={"m": ModelConfig(source="m")})
    show_ready(ADDRESS, config, {"m": written()})
    said = capsys.readouterr().out
    assert "inferd chat" not in said
    assert "/v1/chat/completions" not in said
    assert "client.chat" not in said
    assert "/v1/completions" in said
    assert "inferd generate 'Once upon'" in said
    show_ready(ADDRESS, config, {"m": written(has_chat_template=True)})
    said = capsys.readouterr().out
    assert "chat: inferd chat" in said
    assert "/v1/chat/completions" in said


@pytest.mark.parametrize(
    ("address", "state", "said"),
    [
        (ADDRESS, StateConfig(), "chat: inferd chat   stop"),
        ("http://127.0.0.1:9000", StateConfig(), "chat: inferd chat --port 9000   stop"),
        (ADDRESS, StateConfig(data_dir="/srv"), f"chat: inferd chat --url {ADDRESS}   stop"),
    ],
)
def test_commands_name_the_server_where_it_is_not_the_usual_one(
    address: str, state: StateConfig, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(models={"m": ModelConfig(source="m")}, state=state)
    show_ready(address, config, {"m": written(has_chat_template=True)})
    assert said in capsys.readouterr().out


def test_the_console_is_named_where_it_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(models={"m": ModelConfig(source="m")})
    show_ready(ADDRESS, config, {"m": written()})
    assert f"console {ADDRESS}/   API reference" in capsys.readouterr().out
    config = Config(models=config.models, server=ServerConfig(console=False))
    show_ready(ADDRESS, config, {"m": written()})
    assert "console" not in capsys.readouterr().out


def test_of_models_that_are_not_loaded_yet_nothing_is_offered_but_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    show_ready(ADDRESS, Config(models={"later": ModelConfig(source="m", load="on_demand")}), {})
    said = capsys.readouterr().out
    assert "inferd predict later" in said
    assert "curl" not in said
    assert "inferd chat" not in said


def test_a_model_whose_server_is_away_is_told_and_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    models = {"far": ModelConfig(source="openai:http://far/v1"), "m": ModelConfig(source="m")}
    show_ready(ADDRESS, Config(models=models), {"m": written(has_chat_template=True)}, away={"far": "No connection."})
    said = click.unstyle(capsys.readouterr().out)
    assert f"inferd is ready at {ADDRESS}  (m)" in said
    assert "far is unreachable at http://far/v1: No connection. It is asked again until it answers." in said
    assert '"model": "m"' in said


def test_a_model_that_waits_for_a_node_is_told_and_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(models={"m": ModelConfig(source="m")}, nodes=NodesConfig(listen="127.0.0.1:0"))
    show_ready(ADDRESS, config, {}, waiting={"m": "its ranks need 1 node; it starts when they are there"})
    said = click.unstyle(capsys.readouterr().out)
    assert f"inferd listens at {ADDRESS}  (no model is ready)" in said
    assert "m is not ready yet: its ranks need 1 node; it starts when they are there. inferd node token prints" in said
    assert "inferd predict" not in said


@pytest.mark.parametrize(
    "changes",
    [
        {"is_decoupled": True},
        {"inputs": (TensorSpec("image", "BYTES", (-1,)),)},
        {
            "inputs": (
                TensorSpec("image", "BYTES", (-1,), is_optional=True),
                TensorSpec("x", "FP32", (-1, 4), is_optional=True),
            )
        },
    ],
)
def test_a_request_that_made_up_values_cannot_make_is_not_offered(
    changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    told = msgspec.structs.replace(info(ROWS), **changes)
    show_ready(ADDRESS, Config(models={"m": ModelConfig(source="m")}), {"m": told})
    said = capsys.readouterr().out
    assert f"curl {ADDRESS}/v2/models/m\n" in said
    assert "from Python" not in said


@pytest.mark.parametrize(
    ("threads", "cores", "said"),
    [(0, [], ""), (1, [], "1 thread"), (1, [3], "1 thread on core 3"), (2, [0, 2], "2 threads on cores 0,2")],
)
def test_threads_are_told_with_their_cores(threads: int, cores: list[int], said: str) -> None:
    assert threads_text(threads, cores) == said


@pytest.mark.parametrize(
    ("batching", "rows", "said"),
    [
        (BatchingConfig(mode="off"), 8, "one request at a time"),
        (BatchingConfig(), 0, "one request at a time"),
        (BatchingConfig(), 1, "one request at a time"),
        (BatchingConfig(max_delay_ms=2), 2, "up to 2 rows together, waiting at most 2 ms"),
        (BatchingConfig(mode="static", max_batch_size=8), 8, "always 8 rows together"),
        (BatchingConfig(max_delay_ms=0.5), 8, "up to 8 rows together, waiting at most 0.5 ms"),
    ],
)
def test_batching_is_told_as_it_is(batching: BatchingConfig, rows: int, said: str) -> None:
    first = contract_lines("m", info(ROWS, rows=rows), ModelConfig(source="m", batching=batching))[0]
    assert said in first


def test_why_requests_are_computed_one_by_one_is_told_when_a_model_is_ready(tmp_path: Path) -> None:
    config = ModelConfig(source=str(cumulative_sum(tmp_path / "m.onnx")))
    first = contract_lines("m", create_backend("m", config, silent).info, config)[0]
    assert "one request at a time (its rows depend on each other: CumSum sums from row to row" in first
    assert "batching.max_batch_size declares that they do not" in first


@pytest.mark.parametrize("form", ["around a model", "of steps"])
def test_the_reason_of_a_pipelines_model_is_shown(tmp_path: Path, form: str) -> None:
    model = {"source": str(cumulative_sum(tmp_path / "m.onnx", "batch"))}
    rescale = {"op": "rescale", "options": {"scale": 0.5}}
    settings = (
        {**model, "preprocess": [rescale]}
        if form == "around a model"
        else {
            "source": "pipeline",
            "pipeline": {
                "models": {"m": model},
                "inputs": {"input": "FP32 [-1, 3]"},
                "steps": [rescale, {"model": "m", "inputs": {"x": "rescale"}}],
                "outputs": {"y": "m"},
            },
        }
    )
    config = msgspec.convert(settings, ModelConfig)
    found = create_backend("m", config, silent).info
    first = contract_lines("m", found, config)[0]
    step = "model" if form == "around a model" else "m"
    assert f"one request at a time (the step '{step}': its rows depend on each other: CumSum sums from row" in first
    assert "batching.max_batch_size declares that they do not" in first
    declared = msgspec.structs.replace(config, batching=BatchingConfig(max_batch_size=8))
    with pytest.raises(ModelLoadError, match=r"CumSum|changes with the rows beside it"):
        create_backend("m", declared, silent)


def test_a_tensor_is_told_with_its_labels() -> None:
    assert (
        spec_text(TensorSpec("y", "FP32", (-1, 9), labels=tuple("abcdefghi"))) == "FP32 [any, 9]: a, b, c, d, e, f, ..."
    )
    assert spec_text(TensorSpec("mask", "INT64", (-1, -1), is_optional=True)) == "INT64 [any, any], may be left out"


@pytest.mark.parametrize(
    ("tasks", "path"),
    [
        (("embed", "predict"), "/v1/embeddings"),
        (("rerank", "score"), "/rerank"),
        (("predict", "classify"), "/classify"),
        (("predict",), "/v2/models/m/infer"),
    ],
)
def test_the_line_to_paste_asks_the_api_that_the_model_is_for(tasks: tuple[str, ...], path: str) -> None:
    text = TensorSpec("text", "BYTES", (-1,))
    words = shlex.split(curl_line(ADDRESS, "m", info(ROWS if tasks == ("predict",) else text, tasks=tasks)))
    assert words[1] == ADDRESS + path
    body = json.loads(words[words.index("-d") + 1])
    assert body.get("model", "m") == "m"
    ast.parse(python_lines(ADDRESS, "m", info(text, tasks=tasks), needs_key=True))


def test_a_large_input_is_no_line_to_paste() -> None:
    image = TensorSpec("image", "FP32", (-1, 3, 224, 224))
    assert curl_line(ADDRESS, "m", info(image)) == f"curl {ADDRESS}/v2/models/m"


def test_check_lists_what_models_take_and_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "tree\nversion=v4\nnum_class=1\nmax_feature_idx=6\nobjective=regression\n"
    (tmp_path / "trees.txt").write_text(header)
    (tmp_path / "inferd.yaml").write_text(f"models: {{trees: {{source: {tmp_path}/trees.txt}}}}\n")
    report = examine(str(tmp_path / "inferd.yaml"), probe=False)
    assert report.ok, report.problems
    show(report)
    said = capsys.readouterr().out
    assert "trees  lightgbm_text" in said
    assert "takes  input-0  FP64 [any, 7]" in said
    assert "any number" in said


def test_nothing_in_a_models_names_steers_the_terminal() -> None:
    name = "x\x1b]0;owned\x07\x9b2J\n\u202e\ud800ü"
    spec = TensorSpec(name, "FP32", (-1, 2), labels=(name, name))
    of_model = msgspec.structs.replace(info(spec), outputs=(spec,))
    lines = [*contract_lines("m", of_model, ModelConfig(source="m.onnx"))[1:], curl_line(ADDRESS, "m", of_model)]
    assert [line for line in lines if not line.isprintable()] == []
    assert r"x\x1b]0;owned\x07\x9b2J\n\u202e\ud800ü" in lines[0]
    table = table_of({name: np.array([[0.25, 0.75]], np.float32)}, {name: spec}, None)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    told = captured.get()
    assert [line for line in told.split("\n") if not line.isprintable()] == []
    assert text_of(b"a\tb\n\x1b[31mc") == "a\tb\n\\x1b[31mc"
