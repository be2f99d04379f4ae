"""``inferd check``: all problems, the memory plan, the clients that may use the server; and the example file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import onnx
import pytest
from rich.console import Console
from tests.app.test_registry_served import adding
from tests.predict.row_models import FLOAT, cumulative_sum, node, saved
from tests.predict.small_onnx import identity
from tests.registry.mlflow_stand_in import logged, standing_in

from inferd.cli.check import CheckReport, RemoteReport, _show_plan, access, examine, show
from inferd.cli.main import main
from inferd.config import load_config
from inferd.lifecycle.sources import References
from inferd.planning.memory import MemoryEstimate, Plan
from inferd.registry.signature import ANY_ROWS
from inferd.types import TensorSpec

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "inferd.yaml"
    path.write_text(text)
    return path


@contextmanager
def upstream(status: int, wanted_key: str = "") -> Iterator[str]:
    """A server that lists its models, or fails."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("authorization") == f"Bearer {wanted_key}" if wanted_key else True
            self.send_response(status if is_known and self.path == "/v1/models" else 401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_shipped_example_can_be_served_here() -> None:
    report = examine(str(ROOT / "examples" / "inferd.yaml"), probe=False)
    assert report.problems == ()
    assert report.plan is not None
    assert {model.name: model.replicas for model in report.plan.models} == {"chat": 2, "nightly": 1}
    assert all(model.total_bytes <= 640 * 2**20 for model in report.plan.models)
    assert report.plan.startup_bytes < report.plan.all_bytes <= report.plan.budget_bytes
    assert [remote.fallback for remote in report.remotes] == [True]


def test_every_problem_is_told_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "server: {port: x}\nmodels: {m: {source: openai:nowhere}, n: {}}\n")
    assert main(["check", str(path)]) == 1
    said = capsys.readouterr().err
    assert "3 problems" in said
    for part in ("server.port: 'x'", "models.m.source: 'nowhere'", "models.n.source: missing"):
        assert part in said
    assert main(["config", "check", str(path)]) == 1


def test_what_does_not_fit_is_told_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "models: {m: {source: demo, memory_bytes: 1MiB}, n: {source: ./nowhere}}\n")
    assert main(["check", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert len(report["problems"]) == 2
    assert any("models.m" in problem for problem in report["problems"])
    assert any("./nowhere" in problem for problem in report["problems"])


@pytest.mark.parametrize(("there", "nodes", "is_problem"), [(1, "", True), (2, "", False), (1, "0.0.0.0:8001", False)])
def test_ranks_that_have_too_few_gpus_here_are_a_problem(
    there: int, nodes: str, is_problem: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nodes can join, one of them may have enough."""
    monkeypatch.setattr("inferd.cli.check.num_visible_gpus", lambda: there)
    text = "models: {m: {source: demo, device: cuda, parallel: {tensor: 2}}}\n"
    text += f"nodes: {{listen: '{nodes}'}}\n" if nodes else ""
    found = [line for line in examine(str(written(tmp_path, text)), probe=False).problems if "CUDA" in line]
    assert bool(found) == is_problem, found
    assert all("models.m: parallel has 2 ranks" in line and f"has {there} CUDA devices" in line for line in found)


def test_the_plan_is_a_table_of_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "models: {m: {source: demo, replicas: 3, kv_cache: {memory_bytes: 64MiB}}}\n")
    assert main(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if line.split()[:1] == ["m"]]
    assert "64.0 MiB" in row
    assert f"{path} is good" in " ".join(shown.split())
    assert "Tool calls and reasoning of m: hermes (calls <tool_call>; from the chat template)" in " ".join(
        shown.split()
    )


def test_a_notation_that_is_not_parsed_back_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>"
        '[{"name": "{{ c.function.name | upper }}", "x": {{ c.function.arguments | tojson }}}] as a JSON list zq_tool'
        "{% endfor %}{% endfor %}"
    )
    path = written(tmp_path, f"models: {{m: {{source: demo, chat_template: {template}}}}}\n")
    assert main(["check", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "MISMATCH" in report["answer_formats"]["m"]
    assert any(warning.startswith("models.m: a call") for warning in report["warnings"])


def test_the_plan_of_eighty_columns_cuts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "organisation-with-a-long-name/and-a-model-too"
    path = written(tmp_path, f"models: {{{name}: {{source: demo}}, d: {{source: demo-digits}}}}\n")
    monkeypatch.setattr("inferd.cli.check.console", lambda: Console(width=80, highlight=False))
    assert main(["check", str(path)]) == 0
    table = capsys.readouterr().out.partition("d  onnx")[0]
    assert "\u2026" not in table
    assert max(map(len, table.splitlines())) <= 80
    assert name in "".join(line.split()[0] for line in table.splitlines()[2:] if line.split())
    for heading in ("weights", "KV cache", "process", "copies", "together", "at once"):
        assert heading in table


def test_what_is_said_below_the_plan_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    model = MemoryEstimate(
        name="m[bold]",
        folder="m",
        weights_bytes=1,
        headroom_bytes=1,
        replicas=1,
        checkpoint="gptq, int4",
        rope_factors="the short factors [red] are taken",
        roles="1 for prompts and 2 for answers",
        layout="2 ranks (tensor 2 x pipeline 1)",
    )
    _show_plan([model])
    said = " ".join(capsys.readouterr().out.split())
    assert "m[bold] is a quantised checkpoint: gptq, int4." in said
    assert "m[bold]: the short factors [red] are taken." in said
    assert "m[bold] has replicas with roles: 1 for prompts and 2 for answers." in said
    assert "m[bold] is divided among 2 ranks (tensor 2 x pipeline 1); the figures are of all ranks." in said


def predicting(**fields: Any) -> MemoryEstimate:
    return MemoryEstimate(
        name="m", folder="m", weights_bytes=1, headroom_bytes=1, replicas=1, kind="predict", platform="onnx", **fields
    )


@pytest.mark.parametrize(
    ("max_batch_size", "said"),
    [
        (None, "known when loaded"),
        (0, "1 request"),
        (1, "1 request"),
        (2, "2 rows"),
        (ANY_ROWS - 1, f"{ANY_ROWS - 1} rows"),
        (ANY_ROWS, "any number"),
    ],
)
def test_the_plan_says_how_many_rows_are_computed_at_once(
    max_batch_size: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _show_plan([predicting(max_batch_size=max_batch_size)])
    assert said in " ".join(capsys.readouterr().out.split())


def shown(capsys: pytest.CaptureFixture[str], *models: MemoryEstimate, remotes: int = 0) -> str:
    plan = Plan(models=models, budget_bytes=2**30, startup_bytes=1, all_bytes=1)
    asked = tuple(RemoteReport(model="r", url="https://far/v1", fallback=False) for _ in range(remotes))
    show(CheckReport(ok=True, file="f", address="here:1", plan=plan, remotes=asked))
    return capsys.readouterr().out


def test_what_a_model_takes_and_gives_is_told_as_far_as_its_files_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    both = {"inputs": (TensorSpec("x", "FP32", (-1, 4)),), "outputs": (TensorSpec("y", "INT64", (-1,)),)}
    said = shown(capsys, predicting(**both)).splitlines()
    assert "m  onnx" in said
    for missing, sentence in (
        (("inputs",), "inputs are known when it is loaded"),
        (("outputs",), "outputs are known when it is loaded"),
        (("inputs", "outputs"), "inputs and outputs are known when it is loaded"),
    ):
        model = predicting(**{noun: specs for noun, specs in both.items() if noun not in missing})
        assert f"m  onnx: {sentence}" in shown(capsys, model).splitlines()
    assert "requests together" not in "".join(said)
    assert "one request at a time" not in "".join(said)
    assert "  one request at a time: its rows are one" in shown(capsys, predicting(not_batched="its rows are one"))
    named = shown(capsys, predicting(named_rows="the name batch calls it so"))
    assert "  requests together: the name batch calls it so, and nothing refutes it" in named


def test_remote_servers_that_were_not_asked_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "f is good.\n" in shown(capsys, predicting())
    assert "f is good but for 1 remote server, not asked" in shown(capsys, predicting(), remotes=1)
    assert "f is good but for 2 remote servers, not asked" in shown(capsys, predicting(), remotes=2)


def test_a_plan_of_sixty_columns_cuts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inferd.cli.check.console", lambda: Console(width=60, soft_wrap=True))
    path = written(tmp_path, "models: {chat: {source: demo, memory_bytes: 640MiB}, digits: {source: demo-digits}}\n")
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "…" not in said
    assert {"chat", "digits", "weights", "cache", "together", "MiB", "640"} <= set(said.split())


def test_remote_servers_are_asked_only_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "right")
    with upstream(200, wanted_key="right") as good, upstream(500) as bad:
        path = written(
            tmp_path,
            "models:\n"
            f"  m: {{source: 'openai:{good}', remote: {{api_key_env: KEY}}}}\n"
            f"  n: {{source: 'openai:{good}', remotes: [{{url: '{bad}'}}, {{url: 'http://127.0.0.1:9/v1'}}]}}\n",
        )
        assert examine(str(path), probe=False).ok
        report = examine(str(path), probe=True)
    assert [remote.answers for remote in report.remotes] == [True, False, False, False]
    assert [problem.partition(" ")[0] for problem in report.problems] == ["models.n:"] * 3
    assert "refuses the API key (status 401)" in report.problems[0]
    assert "is not well (status 500)" in report.problems[1]
    assert "does not answer" in report.problems[2]


def test_a_rollout_with_one_replica_of_each_version_is_warned_of(tmp_path: Path) -> None:
    text = "models: {m: {source: demo, version: '1', rollout: {stable: 1, new: 2}}, m@2: {source: demo, version: '2'}}"
    report = examine(str(written(tmp_path, text)), probe=False)
    assert report.ok
    assert any(warning.startswith("models.m.replicas: each of the two versions") for warning in report.warnings)


def test_a_key_that_would_travel_unencrypted_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret-value")
    monkeypatch.setenv("INFERD_SERVER_PORT", "9000")
    path = written(tmp_path, "models: {m: {source: 'openai:http://far.example/v1', remote: {api_key_env: KEY}}}\n")
    report = examine(str(path), probe=False)
    assert report.ok
    assert any("unencrypted" in warning for warning in report.warnings)
    assert any("did you mean INFERD_SERVER__PORT?" in warning for warning in report.warnings)
    assert "secret-value" not in str(report)


@pytest.mark.parametrize(
    ("host", "auth", "said"),
    [
        ("127.0.0.1", "auto", "as soon as one exists"),
        ("0.0.0.0", "auto", "does not start before one exists"),
        ("0.0.0.0", "off", "any client that reaches it may use it"),
        ("::1", "off", "this machine alone may use it"),
        ("0.0.0.0", "required", "API keys for every client"),
    ],
)
def test_the_check_says_which_clients_may_use_the_server(host: str, auth: str, said: str) -> None:
    assert said in access(load_config(None, {}, {"server": {"host": host, "auth": auth}}))


def test_a_model_is_checked_as_it_would_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity(tmp_path / "digits.onnx")
    report = examine(str(tmp_path / "digits.onnx"), probe=False)
    assert (report.ok, report.problems) == (True, ())
    assert report.plan is not None
    (model,) = report.plan.models
    assert (model.name, model.platform) == ("digits", "onnxruntime_onnx")
    (tmp_path / "iris.pkl").write_bytes(b"\x80\x04N.")
    report = examine(str(tmp_path / "iris.pkl"), probe=False)
    assert not report.ok
    assert "--allow-pickle" in report.problems[0]


def test_what_a_flag_allows_is_allowed_for_a_model_and_said_in_a_file_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "iris.pkl").write_bytes(b"\x80\x04N.")
    assert main(["check", str(tmp_path / "iris.pkl"), "--allow-pickle"]) == 0
    (tmp_path / "inferd.yaml").write_text("models: {chat: {source: demo}}")
    assert main(["check", str(tmp_path / "inferd.yaml"), "--allow-code"]) != 0
    assert "set allow_code and allow_pickle for its models there" in capsys.readouterr().err


def test_rows_that_may_depend_on_each_other_are_told_with_the_setting_that_claims_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cumulative_sum(tmp_path / "m.onnx", "batch")
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "one request at a time: its rows depend on each other: CumSum sums from row to row" in said
    assert "--batching-max-batch-size declares that they do not" in said
    (tmp_path / "inferd.yaml").write_text(f"models: {{m: {{source: {path}, batching: {{max_batch_size: 8}}}}}}")
    assert main(["check", str(tmp_path / "inferd.yaml")]) == 0
    assert "one request at a time" not in capsys.readouterr().out


def test_a_fixed_first_dimension_is_told_and_inputs_that_the_server_fills_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = onnx.load(identity(tmp_path / "m.onnx"))
    for value in (*one.graph.input, *one.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    (tmp_path / "m.onnx").write_bytes(one.SerializeToString())
    assert main(["check", str(tmp_path / "m.onnx")]) == 0
    said = capsys.readouterr().out
    assert "one request at a time: the first dimension of the input 'x' is fixed at 1; export it as a free one" in said
    settings = f"{{source: {tmp_path / 'm.onnx'}, sequence: {{states: {{y: x}}}}}}"
    (tmp_path / "inferd.yaml").write_text(f"models: {{m: {settings}}}")
    report = examine(str(tmp_path / "inferd.yaml"), probe=False)
    assert report.plan is not None
    assert (report.plan.models[0].inputs, report.plan.models[0].outputs) == ((), ())


@pytest.mark.parametrize(
    ("source", "models"),
    [("demo", {"demo", "digits", "intents"}), ("demo-draft", {"demo-draft"}), ("maker.py:Model", {"Model"})],
)
def test_what_serve_takes_is_checked_like_a_file(
    source: str, models: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maker.py").write_text("class Model:\n    def predict(self, x):\n        return x\n")
    report = examine(source, probe=False)
    assert report.problems == ()
    assert report.plan is not None
    assert {one.name for one in report.plan.models} == models


def test_a_name_that_is_no_source_is_a_problem() -> None:
    assert "'nowhere' is no model source" in examine("nowhere", probe=False).problems[0]


def test_a_reference_to_a_registry_is_not_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "models: {m: {source: 'registry:churn@production'}}\n")
    assert main(["check", str(file)]) == 3
    assert "registry:churn@production (m) is looked up in the registry when it is served" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["check"], ["serve"]])
def test_a_path_with_a_typo_is_not_taken_for_a_hub_id(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    identity(tmp_path / "models" / "iris.onnx")
    assert main([*command, "models/irs.onnx"]) == 1
    said = capsys.readouterr()
    assert "There is no file or folder models/irs.onnx; did you mean models/iris.onnx?" in said.err
    assert "is good" not in said.out
    (tmp_path / "models" / "prices.py").write_text("class Model: ...\n")
    assert main([*command, "models/price.py:Model"]) == 1
    said = capsys.readouterr()
    assert "There is no file models/price.py; did you mean models/prices.py?" in said.err
    assert "is good" not in said.out
    path = written(tmp_path, "models: {a: {source: elsewhere/iris.onnx}, b: {source: models/iris}}\n")
    assert main([*command, str(path)]) == 1
    said = capsys.readouterr()
    assert "models.a: There is no file or folder elsewhere/iris.onnx" in said.err
    assert "models.b: There is no file or folder models/iris; did you mean models/iris.onnx?" in said.err


def test_what_could_not_be_looked_at_is_not_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["check", "org/not-here"]) == 3
    said = capsys.readouterr().out
    assert "org/not-here is not checked in full" in said
    assert "org/not-here (org/not-here) is not downloaded yet" in said
    assert "is good" not in said
    path = written(tmp_path, "models: {m: {source: demo, speculation: {draft: org/small}}}\n")
    assert main(["check", str(path), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["problems"]) == (False, [])
    assert "org/small (m) is not downloaded yet" in report["unchecked"][0]


def test_a_name_that_is_the_only_reason_for_batches_is_called_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node("NonZero", "x", "places"), node("Shape", "places", "s"), node("Sub", "s s", "z")]
    nodes += [node("Cast", "z", "r", to=FLOAT), node("ReduceMax", "r", "k", keepdims=0), node("Add", "x k", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])})
    assert main(["check", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "requests together: the file calls its first dimension 'batch', and nothing refutes it" in said
    assert "a trial at load has the last word" in said


def test_a_python_class_is_good_where_the_text_of_its_file_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "shop" / "prices.py").write_text(
        "try:\n    from a import Other\nexcept ImportError: ...\nclass Model: ...\n"
    )
    (tmp_path / "broken.py").write_text("class Model:\n")
    for source in ("shop/prices.py:Model", "shop.prices:Model", "shop.prices:Other", "json:JSONDecoder"):
        assert main(["check", source]) == 0
        assert f"{source} is good" in capsys.readouterr().out
    for source in (
        "json:Nope",
        "nowhere:Nope",
        "json.nowhere:Nope",
        "sys:Nope",
        "shop/prices.py:Nope",
        "shop.prices:Nope",
        "broken.py:Model",
    ):
        assert main(["check", source]) == 3
        said = capsys.readouterr().out
        assert f"{source} is not checked in full, though nothing wrong was found" in said
        assert f"{source} ({source.rpartition(':')[2]}) is Python code, which check does not run" in said
        assert "is good" not in said
    pipeline = "{inputs: {x: FP32}, models: {a: {source: 'json:Nope', allow_code: true}}, steps: [{model: a, inputs: {x: x}}], outputs: {y: a.y}}"
    path = written(tmp_path, f"models: {{p: {{source: pipeline, pipeline: {pipeline}}}}}\n")
    assert main(["check", str(path), "--json"]) == 3
    assert "json:Nope (p) is Python code" in json.loads(capsys.readouterr().out)["unchecked"][0]


def test_a_model_of_mlflow_is_judged_by_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with standing_in() as server:
        file = adding(tmp_path / "made" / "model.onnx", 1.0).read_bytes()
        server.add("adding", 1, logged("onnx", {"model.onnx": file}, data="model.onnx"))
        server.add("code", 1, logged("spam", {"x": b""}))
        server.add("unread", 1, logged("onnx", {"model.onnx": file}, "no list", data="model.onnx"))
        server.add("far", 1, logged("onnx", {"model.onnx": file}, data="model.onnx"))
        server.roots["far", "1"] = "s3://bucket/models"
        server.aliases["adding", "champion"] = "1"

        def checked(source: str) -> tuple[int, str]:
            path = written(tmp_path, f"mlflow: {{url: '{server.url}'}}\nmodels: {{m: {{source: '{source}'}}}}\n")
            code = main(["check", str(path)])
            said = capsys.readouterr()
            return code, " ".join((said.out + said.err).split())

        code, said = checked("mlflow:models:/adding@champion")
        assert (code, "(m) is adding version 1, " in said, "and can be served" in said) == (3, True, True), said
        assert not (tmp_path / "cache").exists(), "nothing is kept"
        for source, problem in (
            ("mlflow:models:/adding@gone", "models.m.source: "),
            ("mlflow:models:/code/1", "code version 1 cannot be served"),
            ("mlflow:models:/unread/1", "The signature in the MLmodel of unread version 1 cannot be read"),
            ("mlflow:models:/far/1", "--serve-artifacts"),
        ):
            code, said = checked(source)
            assert (code, problem in said) == (1, True), said
        server.status = 503
        code, said = checked("mlflow:models:/adding@champion")
        assert (code, "did not answer" in said) == (1, True), said
        server.status = 0
        path = written(
            tmp_path, f"mlflow: {{url: '{server.url}'}}\nmodels: {{m: {{source: 'mlflow:models:/adding@champion'}}}}\n"
        )
        References().resolved(load_config(path, {}, {}))
        server.status = 503
        code, said = checked("mlflow:models:/adding@champion")
        assert (code, "A start now would serve adding version 1" in said) == (3, True), said
