"""``inferd batch`` against a real server: files up, answers down, and what is told on the way."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.jobs.serving_jobs import line
from tests.predict.small_onnx import identity
from tests.server_process import Server, running
from tests.worker.watching import until_now

from inferd.cli.main import main
from inferd.cli.running import batch as command
from inferd.cli.running import batch_runs
from inferd.cli.running.batch_tables import requests_of, write_table
from inferd.cli.running.batch_tensors import output_cells, tensor_bodies
from inferd.cli.running.control import find_server
from inferd.errors import InvalidRequest
from inferd.gateway.kserve.models import ModelCondition, ModelMetadata, TensorMetadata

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(data_dir=tmp_path_factory.mktemp("data")) as started:
        yield started


def batch(server: Server, *words: str | Path) -> int:
    return main(["batch", *map(str, words), "--url", server.url])


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


def test_every_request_of_a_file_is_answered(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{number}", PATH, prompt="hello", max_tokens=4) for number in range(20)))
    assert batch(server, "run", source, "-o", output) == 0
    assert [one["custom_id"] for one in written(output)] == [f"r{number}" for number in range(20)]
    said = capsys.readouterr()
    assert "20 of 20 requests answered" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    name = said.err.partition("The job is ")[2].partition(";")[0]
    assert batch(server, "list") == 0
    assert name in capsys.readouterr().out
    assert batch(server, "show", name) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
    again = tmp_path / "again.jsonl"
    assert batch(server, "wait", name, "--output", again) == 0
    assert again.read_bytes() == output.read_bytes()


def test_requests_that_fail_are_told_by_their_codes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good, bad = line("good", PATH, prompt="hello", max_tokens=4), line("bad", PATH, prompt="hello", temperature=99)
    source.write_text(f"{good}\n{bad}\n")
    assert batch(server, "run", source, "-o", output) == 1
    assert [one["custom_id"] for one in written(output)] == ["good"]
    assert [one["custom_id"] for one in written(tmp_path / "out.errors.jsonl")] == ["bad"]
    said = capsys.readouterr()
    assert "1 of 2 requests answered" in said.out
    assert "1 x " in said.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("\n\n", "has no requests"),
        ("hello", "Line 1 of"),
        ('{"custom_id": "1"}', "Line 1 of"),
    ],
)
def test_a_file_without_requests_is_refused_before_its_upload(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    assert batch(server, "run", source, "-o", tmp_path / "out.jsonl") == 1
    assert words in capsys.readouterr().err


def test_what_the_server_refuses_is_told(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("1", "/v1/nothing", prompt="hello"))
    assert batch(server, "run", source, "-o", tmp_path / "out.jsonl") == 1
    assert "endpoint" in capsys.readouterr().err
    assert batch(server, "cancel", "batch_none") == 1
    assert "batch_none" in capsys.readouterr().err


def test_a_cancelled_job_is_resumed_by_its_id(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{number}", PATH, prompt="hello", max_tokens=4) for number in range(200)))
    made = command.uploaded(find_server(None, None, server.url, None), source)
    body = {"input_file_id": made.id, "endpoint": PATH, "completion_window": "24h"}
    name = httpx.post(f"{server.url}/v1/batches", json=body).json()["id"]
    assert batch(server, "cancel", name) == 0
    assert f"inferd batch resume {name}" in capsys.readouterr().out
    assert batch(server, "wait", name, "-o", output) == 1
    assert batch(server, "resume", name, "--output", output) == 0
    assert [one["custom_id"] for one in written(output)] == [f"r{number}" for number in range(200)]
    assert "200 of 200 requests answered" in capsys.readouterr().out
    assert batch(server, "resume", name) == 1
    assert "is completed" in capsys.readouterr().err


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(), newline="")))


def test_a_table_of_prompts_becomes_a_table_of_answers(server: Server, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(
        "\ufeffcustom_id,prompt,max_tokens,temperature\r\n"
        'a,"hello, you",4,\r\n'
        "b,12,4,99\r\n"
        'c,"two\nlines ""quoted""",2,0\r\n'
        "a,again,4,\r\n",
        newline="",
    )
    assert batch(server, "run", source, "-o", output, "--endpoint", PATH) == 1
    rows = table(output)
    assert [(row["custom_id"], row["status"], row["answer"]) for row in rows] == [
        ("a", "200", "abcd"),
        ("b", "400", ""),
        ("c", "200", "ab"),
        ("a", "", ""),
    ]
    assert "temperature" in rows[1]["error"]
    assert "custom_id" in rows[3]["error"]
    assert rows[0]["output_tokens"] == "4"
    assert json.loads(rows[0]["body"])["choices"][0]["text"] == "abcd"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


@given(st.text(max_size=6), st.sampled_from(["custom_id", "answer", "error", "body"]))
def test_no_cell_of_a_table_is_a_formula(text: str, column: str) -> None:
    result: dict[str, Any] = {"custom_id": text, "response": {"status_code": 200, "body": text}, "error": None}
    if column == "answer":
        result["response"]["body"] = {"choices": [{"text": text}]}
    elif column == "error":
        result |= {"response": None, "error": {"message": text}}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.csv"
        write_table(output, iter([json.dumps(result).encode()]))
        with output.open(newline="") as file:
            (row,) = csv.DictReader(file)
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())
    expected = json.dumps(text, ensure_ascii=False) if column == "body" else text
    assert row[column] in (expected, f"'{expected}")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.csv", b"", "has no rows"),
        ("in.csv", b"prompt\n", "has no rows"),
        ("in.csv", b"prompt,max_tokens\nhello, you,4\n", "Line 2 of"),
        ("in.csv", b'prompt\n"hello\n', "is not a CSV file"),
        ("in.csv", b"prompt\n\xff\xfe\n", "not UTF-8"),
        ("in.csv", b"question\nhello\n", "the column 'prompt'"),
        ("in.jsonl", b"\x1f\x8b\x08", "not UTF-8 text"),
        ("in.parquet", b"hello", "arquet"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_its_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, words: str
) -> None:
    source = tmp_path / name
    source.write_bytes(content)
    assert batch(server, "run", source, "-o", tmp_path / "out.csv") == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_parquet_needs_its_package(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert batch(server, "run", tmp_path / "in.csv", "-o", tmp_path / "out.parquet") == 1
    assert "pip install pyarrow" in capsys.readouterr().err


def test_a_parquet_file_of_prompts_becomes_one_of_answers(server: Server, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    count = 1500
    prompts = {"prompt": [f"hello {number}" for number in range(count)], "max_tokens": [4] * (count - 1) + [None]}
    parquet.write_table(arrow.table(prompts), source)
    assert batch(server, "run", source, "-o", output, "--endpoint", PATH) == 0
    found = parquet.read_table(output).to_pylist()
    assert [row["custom_id"] for row in found] == [f"row-{number}" for number in range(1, count + 1)]
    assert {row["answer"] for row in found[:-1]} == {"abcd"}
    assert found[0]["output_tokens"] == 4


def test_a_run_that_was_interrupted_goes_on(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{number}", PATH, prompt="hello", max_tokens=4) for number in range(5)))

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(command, "_awaited", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            batch(server, "run", source, "-o", output)
    assert not output.exists()
    capsys.readouterr()
    assert batch(server, "run", source, "-o", output) == 1
    assert "inferd batch resume" in capsys.readouterr().err
    assert main(["batch", "resume", str(output)]) == 0, "the run knows its server"
    assert [one["custom_id"] for one in written(output)] == [f"r{number}" for number in range(5)]
    assert batch(server, "resume", output) == 1
    assert "was interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_model_is_served_for_the_job_alone_under_the_name_that_the_file_asks(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @contextlib.contextmanager
    def own(*given: object) -> Iterator[str]:
        asked.append(given)
        yield server.url

    monkeypatch.setattr(batch_runs, "own_server", own)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", PATH, prompt="hello", max_tokens=4))
    words = ["batch", "run", str(source), "-o", str(output), "--model", "./my-model"]
    assert main(words) == 0
    ((model, flags, settings),) = asked
    assert (model, flags) == ("./my-model", ["--name", "tiny"])
    assert settings["INFERD_STATE__DATA_DIR"] == str(tmp_path / ".out.jsonl.job" / "data")
    assert [one["custom_id"] for one in written(output)] == ["a"]
    assert main([*words, "--url", server.url]) == 2
    assert "--model loads a model" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_job_with_a_model_of_its_own_survives_its_end(tmp_path: Path) -> None:
    """Real processes: the command is killed, and with it its server; resuming ends with every answer once."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"r{number}", PATH, model="m", prompt=f"Once {number}", max_tokens=40) for number in range(200)]
    source.write_text("\n".join(lines))
    inferd = [sys.executable, "-m", "inferd", "batch"]
    first = subprocess.Popen([*inferd, "run", source, "-o", output, "--model", "demo"], start_new_session=True)
    until_now((tmp_path / ".out.jsonl.job" / "job.json").exists, "the job is made", 120)
    results = tmp_path / ".out.jsonl.job" / "data" / "jobs" / "results"
    until_now(lambda: any(path.stat().st_size for path in results.iterdir()), "something is answered", 120)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not output.exists()
    subprocess.run([*inferd, "resume", output], check=True)
    assert [one["custom_id"] for one in written(output)] == [f"r{number}" for number in range(200)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_table_of_features_becomes_a_table_of_outputs(tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("custom_id,width,height\na,1.5,2\n,3,-4.25\nb,1,\n")
    asked = ["batch", "run", str(source), "-o", str(output), "--model", str(identity(tmp_path / "sums.onnx"))]
    assert main(asked) == 1
    assert not output.exists(), "the third row has one value of two"
    source.write_text("custom_id,width,height\na,1.5,2\n,3,-4.25\n")
    assert main(asked) == 0
    rows = table(output)
    assert [(row["custom_id"], row["status"], json.loads(row["y"])) for row in rows] == [
        ("a", "200", [1.5, 2.0]),
        ("row-2", "200", [3.0, -4.25]),
    ]
    assert list(rows[0]) == ["custom_id", "status", "y", "error", "body"]
    assert json.loads(rows[0]["body"])["outputs"][0]["shape"] == [1, 2]


def contract(*inputs: TensorMetadata, outputs: tuple[TensorMetadata, ...] = ()) -> ModelMetadata:
    condition = ModelCondition(
        condition="warm", state="ready", replicas_ready=1, replicas=1, waiting=0, tasks="predict", dtype="",
        max_batch_size=8, fingerprint="", batch_invariant=True,
    )  # fmt: skip
    return ModelMetadata(name="m", versions=(), platform="onnx", inputs=inputs, outputs=outputs, parameters=condition)


MIXED = contract(
    TensorMetadata("age", "INT64", (-1,)),
    TensorMetadata("score", "FP32", (-1, 1)),
    TensorMetadata("name", "BYTES", (-1,)),
    TensorMetadata("image", "FP32", (-1, 2, 2)),
)


def test_columns_are_the_inputs_of_their_names() -> None:
    body = tensor_bodies(MIXED)({"age": "41", "score": 2.5, "name": "12", "image": "[[1, 2], [3, 4]]"})
    assert body["inputs"] == [
        {"name": "age", "datatype": "INT64", "shape": [1], "data": [41]},
        {"name": "score", "datatype": "FP32", "shape": [1, 1], "data": [[2.5]]},
        {"name": "name", "datatype": "BYTES", "shape": [1], "data": ["12"]},
        {"name": "image", "datatype": "FP32", "shape": [1, 2, 2], "data": [[[1, 2], [3, 4]]]},
    ]


@pytest.mark.parametrize(
    ("cells", "words"),
    [("age\nforty\n", "Row 1.*'forty' in the column 'age'"), ("height\n3\n", "Row 1.*'height'.*age \\(INT64")],
)
def test_a_row_that_is_no_request_is_told_with_its_column(tmp_path: Path, cells: str, words: str) -> None:
    source = tmp_path / "in.csv"
    source.write_text(cells)
    with pytest.raises(InvalidRequest, match=words):
        list(requests_of(source, "/v2/models/m/infer", tensor_bodies(MIXED)))


@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    is_flat=st.booleans(),
)
def test_an_output_keeps_its_values_and_its_shape(shape: list[int], is_flat: bool) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape([1, *shape])
    data = values.ravel().tolist() if is_flat else values.tolist()
    body = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, *shape], "data": data}]}
    (cell, missing) = output_cells(
        body, [TensorMetadata("y", "FP32", (-1, *shape)), TensorMetadata("z", "FP32", (-1,))]
    )
    assert missing is None
    found = json.loads(cell) if isinstance(cell, str) else cell
    assert np.array_equal(np.asarray(found, np.float32).ravel(), values.ravel())
    if values.size > 1:
        assert np.shape(found) == tuple(shape)


@pytest.mark.parametrize(
    ("shape", "cell"), [((-1,), 5.0), ((-1, 1, 1), 5.0), ((-1, 1, -1), "[[5.0]]"), ((-1, -1, 1), "[[5.0]]")]
)
def test_the_cells_of_an_output_are_numbers_if_every_row_has_one(shape: tuple[int, ...], cell: object) -> None:
    """Whether another row of a size that is free has one value too is not known."""
    answer = {"name": "y", "datatype": "FP32", "shape": [1] * len(shape), "data": [5.0]}
    assert output_cells({"outputs": [answer]}, [TensorMetadata("y", "FP32", shape)]) == [cell]


def test_outputs_are_columns_of_their_types_in_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    outputs = (
        TensorMetadata("label", "BYTES", (-1,)), TensorMetadata("status", "FP32", (-1, 1)),
        TensorMetadata("scores", "FP64", (-1, 3)), TensorMetadata("count", "INT32", (-1,)),
    )  # fmt: skip
    shapes: list[tuple[TensorMetadata, list[int], list[Any]]] = [
        (outputs[0], [1], ["cat"]), (outputs[1], [1, 1], [0.5]), (outputs[2], [1, 3], [1, 2, 3]), (outputs[3], [1], [7])
    ]  # fmt: skip
    given_outputs = [
        {"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": data} for spec, shape, data in shapes
    ]
    good = {"custom_id": "a", "response": {"status_code": 200, "body": {"outputs": given_outputs}}, "error": None}
    bad = {"custom_id": "b", "response": None, "error": {"message": "no"}}
    path = tmp_path / "out.parquet"
    write_table(path, iter([json.dumps(good).encode(), json.dumps(bad).encode()]), outputs)
    first, second = parquet.read_table(path).to_pylist()
    assert (first["label"], first["output_status"], first["count"]) == ("cat", 0.5, 7)
    assert json.loads(first["scores"]) == [1, 2, 3]
    assert (second["label"], second["count"], second["error"]) == (None, None, "no")
