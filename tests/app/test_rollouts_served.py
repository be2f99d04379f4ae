"""Rollouts of a running server: a classifier that is really worse goes, a good one stays, and a killed server goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper
from tests.app.test_replaced_files import BODY, inferd, put, put_versions
from tests.predict.live import serving
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd import models

datasets = pytest.importorskip("sklearn.datasets")
tritonclient = pytest.importorskip("tritonclient.grpc")


def rollout_of(name: str) -> dict[str, Any]:
    code, shown = inferd("rollout", "status", name, "--json")
    assert code == 0, shown
    return dict(json.loads(shown))


def state_of(name: str) -> str:
    return str(rollout_of(name)["progress"]["state"])


def worse_digits(path: Path) -> None:
    """The bundled classifier of digits, with half of its hidden units gone."""
    proto = onnx.load(models.path("demo-digits") / "model.onnx")
    weight = next(one for one in proto.graph.initializer if one.name == "hidden.weight")
    values = numpy_helper.to_array(weight).copy()
    values[:, ::2] = 0
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    path.write_bytes(proto.SerializeToString())


def test_a_worse_classifier_is_taken_back_and_clients_see_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients know the right labels, and report wrong ones."""
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    for number in (1, 2):
        (tmp_path / "digits" / str(number)).mkdir(parents=True)
    (tmp_path / "digits" / "1" / "model.onnx").write_bytes((models.path("demo-digits") / "model.onnx").read_bytes())
    worse_digits(tmp_path / "digits" / "2" / "model.onnx")
    rollout = {
        "stable": 1,
        "new": 2,
        "steps": [{"weight": 20, "for_s": 3600}, {"weight": 100}],
        "guards": {"errors": {}, "reported": {}},
    }
    digits = datasets.load_digits()
    with (
        serving(tmp_path, {"digits": {"source": str(tmp_path / "digits"), "rollout": rollout}}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        wrong: Counter[str] = Counter()
        asked: Counter[str] = Counter()

        def ask(index: int) -> None:
            pixels, label = digits.data[index % len(digits.data)], int(digits.target[index % len(digits.data)])
            tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": pixels.tolist()}
            answer = client.post("/v2/models/digits/infer", json={"inputs": [tensor]})
            assert answer.status_code == 200, answer.text
            document = answer.json()
            asked[document["model_version"]] += 1
            (found,) = next(one["data"] for one in document["outputs"] if one["name"] == "label")
            if int(found) != label:
                wrong[document["model_version"]] += 1
                code, shown = inferd("rollout", "report", "digits", answer.headers["x-request-id"])
                assert code == 0, shown

        for index in range(20):
            ask(index)
        assert asked == {"1": 20}, "before its start no request is the new version's"
        assert not wrong
        code, shown = inferd("rollout", "report", "digits", "never-seen")
        assert (code, "was not divided by the rollout" in shown) == (1, True), shown
        code, shown = inferd("rollout", "start", "digits", "--reason", "a smaller model")
        assert code == 0, shown
        until_now(lambda: state_of("digits") == "running", "the rollout is running")
        index = 20
        while state_of("digits") == "running":
            for _ in range(10):
                ask(index)
                index += 1
            assert index < 3000, wrong
        assert state_of("digits") == "rolled_back"
        assert wrong["2"] > wrong["1"]
        before = asked["2"]
        for _ in range(100):
            ask(index)
            index += 1
        assert asked["2"] == before, "a version that was taken back serves nothing"

        code, shown = inferd("rollout", "status", "digits")
        assert code == 0
        assert "digits from version 1 to 2: rolled back, 0 % of the units" in shown
        assert "start by control-socket" in shown
        assert "a smaller model" in shown
        code, shown = inferd("audit", "show")
        assert ("rollout_start" in shown, "rolled back" in shown, "reported: " in shown) == (True,) * 3, shown
        page = client.get("/metrics").text.splitlines()
        assert 'inferd_rollout_weight{model="digits",version="1"} 1' in page
        assert 'inferd_rollout_weight{model="digits",version="2"} 0' in page
        assert 'inferd_rollout_state{model="digits",state="rolled_back"} 1' in page
        assert 'inferd_rollout_changes_total{model="digits",state="rolled_back"} 1' in page
    log = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if '"event":"rollout"' in line]
    assert [line["state"] for line in lines] == ["running", "rolled_back"]
    assert lines[-1]["level"] == "warning"


def failing(path: Path) -> None:
    """A model that answers with 2, and fails for an x[0, 0] that is neither 0 nor 1: its index is out of bounds."""
    weight = numpy_helper.from_array(np.full(2, 2, np.float32), "w")
    corner = numpy_helper.from_array(np.zeros((1, 2), np.int64), "corner")
    graph = helper.make_graph(
        [
            helper.make_node("GatherND", ["x", "corner"], ["value"]),
            helper.make_node("Cast", ["value"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["w", "index"], ["picked"]),
            helper.make_node("Add", ["x", "w"], ["sum"]),
            helper.make_node("Sub", ["sum", "x"], ["two"]),
            helper.make_node("Max", ["two", "picked"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [weight, corner],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(proto.SerializeToString())


def test_requests_that_fail_in_the_new_version_are_answered_by_the_stable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    for number in (1, 2):
        (tmp_path / "m" / str(number)).mkdir(parents=True)
    put(tmp_path / "m" / "1" / "model.onnx", 0)
    failing(tmp_path / "m" / "2" / "model.onnx")
    rollout = {"stable": 1, "new": 2, "steps": [{"weight": 20, "for_s": 3600}, {"weight": 100}], "start": "auto"}
    with (
        serving(tmp_path, {"m": {"source": str(tmp_path / "m"), "rollout": rollout}}, grpc_port=0) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        until_now(lambda: state_of("m") == "running", "the rollout is running")

        def ask(value: float, model: str = "m") -> httpx.Response:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, 0]}
            return client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})

        good = Counter(ask(0).json()["model_version"] for _ in range(60))
        assert good["2"], "the new version answers what it can"
        assert ask(9, "m@2").status_code == 500, "it is named, and fails"
        grpc = tritonclient.InferenceServerClient(server.grpc)
        given = tritonclient.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.array([[9, 0]], np.float32))
        assert {grpc.infer("m", [given]).get_response().model_version for _ in range(15)} == {"1"}
        grpc.close()
        asked = 0
        while state_of("m") == "running":
            for _ in range(5):
                answer = ask(9)
                assert (answer.status_code, answer.json()["model_version"]) == (200, "1"), answer.text
                asked += 1
            assert asked < 500
        assert state_of("m") == "rolled_back"
        reason = rollout_of("m")["progress"]["reason"]
        assert reason.startswith("errors: "), reason
        page = client.get("/metrics").text.splitlines()
        failed = [line for line in page if line.startswith("inferd_requests_total") and 'outcome="failed"' in line]
        assert sum(float(line.rpartition(" ")[2]) for line in failed if 'model="m@2"' in line) > 1
        assert sum(float(line.rpartition(" ")[2]) for line in failed if 'model="m"' in line) == 0


def test_a_version_whose_files_vanish_is_no_reason_to_change_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload without the files is refused, and where the version's worker dies as well the stable version answers."""
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    put_versions(tmp_path, 1, 2)
    rollout = {"stable": 1, "new": 2, "steps": [{"weight": 50, "for_s": 3600}, {"weight": 100}], "start": "auto"}
    with (
        serving(tmp_path, {"m": {"source": str(tmp_path / "m"), "rollout": rollout}}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        until_now(lambda: state_of("m") == "running", "the rollout is running")

        def versions() -> Counter[str]:
            answers = [client.post("/v2/models/m/infer", json=BODY) for _ in range(40)]
            assert {answer.status_code for answer in answers} == {200}
            return Counter(answer.json()["model_version"] for answer in answers)

        before = rollout_of("m")["progress"]
        (tmp_path / "m" / "2").rename(tmp_path / "elsewhere")
        code, shown = inferd("reload")
        assert code == 1
        assert "models.m.rollout.new: there is no version 2; the folder has 1." in shown
        assert rollout_of("m")["progress"] == before
        assert min(versions()["1"], versions()["2"]) > 0

        for model in json.loads(inferd("status", "--json")[1])["models"]:
            if model["name"] == "m@2":
                os.kill(model["replicas"][0]["pid"], signal.SIGKILL)
        assert versions()["1"] > 0
        (tmp_path / "elsewhere").rename(tmp_path / "m" / "2")
        code, shown = inferd("reload")
        assert code == 0, shown
        until_now(lambda: versions()["2"] > 0, "the version is loaded again", 60)
        assert rollout_of("m")["progress"]["state"] == "running"


def started(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(folder / "state")}
    with (folder / "log").open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(folder / "inferd.yaml")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
        )
    assert process.stdout is not None
    for line in process.stdout:
        if "inferd is ready at " in line:
            return process, line.split("inferd is ready at ")[1].split(",")[0].split()[0].rstrip(".,")
    raise AssertionError((folder / "log").read_text()[-3000:])


@THOROUGH
def test_a_killed_server_goes_on_with_its_rollout_and_promotes_it_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    put_versions(tmp_path, 1, 2)
    rollout = {
        "stable": 1,
        "new": 2,
        "steps": [{"weight": 50}, {"weight": 100}],
        "guards": {"errors": {"max_fraction": 0.2}},
        "start": "auto",
    }
    file = {
        "server": {"port": 0, "reload": False},
        "models": {"m": {"source": str(tmp_path / "m"), "rollout": rollout}},
    }
    (tmp_path / "inferd.yaml").write_text(yaml.safe_dump(file))

    def share(url: str, number: int = 60) -> float:
        found = Counter(
            httpx.post(f"{url}/v2/models/m/infer", json=BODY, timeout=30).json()["model_version"] for _ in range(number)
        )
        return found["2"] / number

    process, url = started(tmp_path)
    try:
        until_now(lambda: state_of("m") == "inconclusive", "the rollout is inconclusive")
        code, shown = inferd("rollout", "pause", "m", "--reason", "let us see")
        assert code == 0, shown
        assert 0.2 < share(url) < 0.8
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        process, url = started(tmp_path)
        assert rollout_of("m")["progress"]["is_paused"]
        assert 0.2 < share(url) < 0.8, "from the first request on"
        code, shown = inferd("rollout", "promote", "m", "--full", "--reason", "enough")
        assert code == 0, shown
        assert "promoted, 100 % of the units: promote by control-socket" in shown
        assert share(url) == 1.0
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        process, url = started(tmp_path)
        assert share(url) == 1.0, "from the first request on"
        code, shown = inferd("rollout", "undo", "m")
        assert code == 0, shown
        assert share(url) == 0.0
        code, shown = inferd("rollout", "undo", "m")
        assert (code, "aborted, so 'undo' is not possible" in shown) == (1, True), shown
        code, shown = inferd("rollout", "start", "m")
        assert code == 0, shown
        until_now(lambda: state_of("m") == "inconclusive", "the rollout is inconclusive")
        share(url, 200)
        until_now(lambda: state_of("m") == "promoted", "the rollout is promoted")
        assert share(url) == 1.0
    finally:
        process.kill()
        process.communicate(timeout=30)


@THOROUGH
def test_a_rollout_that_is_taken_out_of_the_file_of_a_killed_server_is_aborted_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    put_versions(tmp_path, 1, 2)

    def write(model: dict[str, Any]) -> None:
        file = {
            "server": {"port": 0, "reload": False},
            "models": {"m": {"source": str(tmp_path / "m"), **model}},
        }
        (tmp_path / "inferd.yaml").write_text(yaml.safe_dump(file))

    def versions(url: str) -> set[str]:
        return {
            httpx.post(f"{url}/v2/models/m/infer", json=BODY, timeout=30).json()["model_version"] for _ in range(60)
        }

    rollout = {"stable": 1, "new": 2, "steps": [{"weight": 50}], "guards": {"errors": None}, "start": "auto"}
    write({"rollout": rollout})
    process, url = started(tmp_path)
    try:
        until_now(lambda: state_of("m") == "awaiting_approval", "half of the units are the new version's")
        assert versions(url) == {"1", "2"}
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        write({"versions": {"policy": "specific", "only": [1]}})
        process, url = started(tmp_path)
        assert versions(url) == {"1"}

        def told() -> str:
            code, shown = inferd("audit", "show")
            assert code == 0, shown
            return str(shown)

        until_now(lambda: "the configuration does not have it any more" in told(), "the audit log has the end")
        assert "m from version 1 to 2 was under way when the server ended" in (tmp_path / "log").read_text()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        write({"rollout": {**rollout, "start": "command"}})
        process, url = started(tmp_path)
        progress = rollout_of("m")["progress"]
        assert (progress["state"], progress["share"]) == ("aborted", 0.0)
        assert versions(url) == {"1"}
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_the_next_rollout_begins_without_a_request_to_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promoted version takes the model's name, under load."""
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    put_versions(tmp_path, 1, 2, 3)
    rollout = {"stable": 1, "new": 2, "steps": [{"weight": 100}], "start": "auto"}
    with serving(tmp_path, {"m": {"source": str(tmp_path / "m"), "rollout": rollout}}) as server:
        until_now(lambda: state_of("m") == "promoted", "the rollout is promoted")
        seen: Counter[tuple[int, str]] = Counter()
        is_over = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=30) as client:
                while not is_over.is_set():
                    answer = client.post("/v2/models/m/infer", json=BODY)
                    seen[answer.status_code, str(answer.json().get("model_version"))] += 1

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            until_now(lambda: seen[200, "2"] > 20, "the promoted version answers")
            file = tmp_path / "inferd.yaml"
            settings = yaml.safe_load(file.read_text())
            settings["models"]["m"]["rollout"] = {"stable": 2, "new": 3, "steps": [{"weight": 100}]}
            file.write_text(yaml.safe_dump(settings))
            code, shown = inferd("reload")
            assert code == 0, shown
            assert state_of("m") == "pending"
            before = seen[200, "2"]
            until_now(lambda: seen[200, "2"] > before + 20, "it still answers")
            code, shown = inferd("rollout", "start", "m")
            assert code == 0, shown
            until_now(lambda: seen[200, "3"] > 20, "the next version answers")
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert set(seen) == {(200, "2"), (200, "3")}, seen
