"""A model's file replaced where it lies, under load: the operator's commands bring it, and a broken one brings nothing."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from pathlib import Path

import httpx
import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.predict.live import serving
from tests.predict.small_onnx import identity
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd.cli.main import main
from inferd.cli.running.control import find_server
from inferd.errors import InferdError
from inferd.gateway.control import ModelReport, ServerReport

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}]}


def put(path: Path, value: float) -> None:
    """A model that answers with ``value``, in the place of another one."""
    beside = identity(path.with_name("new"))
    proto = onnx.load(beside)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full(2, value, np.float32), "w"))
    beside.write_bytes(proto.SerializeToString())
    beside.replace(path)


def put_versions(folder: Path, *numbers: int) -> None:
    """Versions of a model below ``folder``/m, each of which answers with its number."""
    for number in numbers:
        (folder / "m" / str(number)).mkdir(parents=True)
        put(folder / "m" / str(number) / "model.onnx", number)


def inferd(*words: str) -> tuple[int, str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        return main(list(words)), shown.getvalue()


def model() -> ModelReport:
    report = find_server(None, None, None, None).get("/admin/status", ServerReport)
    return next(model for model in report.models if model.name == "m")


def artifacts() -> set[str]:
    return {replica.artifact for replica in model().replicas}


def answer_of(url: str) -> object:
    answer = httpx.post(f"{url}/v2/models/m/infer", json=BODY, timeout=30)
    return answer.json()["outputs"][0]["data"][0] if answer.status_code == 200 else answer.text


def is_kept(file: Path) -> bool:
    """Whether the server has a whole copy of it, and of no other."""
    copies = list((file.parent / "state" / "kept").glob(f"*/*/source/{file.name}"))
    return len(copies) == 1 and copies[0].read_bytes() == file.read_bytes()


class Clients:
    """Clients that send requests all the time: every answer, in order."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, object]] = []
        self._url = url
        self._now = 0
        self._newest: tuple[int, object] = (-1, None)  # when the question was asked, and its answer
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._is_over.is_set():
                asked = self._now
                answer = client.post("/v2/models/m/infer", json=BODY)
                said = answer.json()["outputs"][0]["data"][0] if answer.status_code == 200 else answer.text
                self.answers.append((answer.status_code, said))
                if asked == self._now:
                    self._newest = asked, said

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *gone: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def latest(self) -> object:
        """An answer to a question that is asked from now on; one that was asked before may come in late."""
        self._now += 1
        until_now(lambda: self._newest[0] == self._now, "answers go on")
        return self._newest[1]


@THOROUGH  # tests/test_reload.py: files are adopted and refused under load without a dropped request
def test_a_replaced_file_is_served_without_a_refused_request_and_a_broken_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    file = tmp_path / "m.onnx"
    put(file, 1)
    settings = {"m": {"source": str(file), "replicas": 2, "threads": 1}}
    with serving(tmp_path, settings) as server, Clients(server.url) as clients:
        (first,) = artifacts()
        assert first
        file.touch()
        assert inferd("reload") == (0, "Reloaded; nothing changed.\n")

        put(file, 2)
        good = onnx.load(file)
        assert clients.latest() == 1.0, "the new one was not asked for yet"
        code, said = inferd("reload")
        assert (code, "2 replicas replaced by new ones, as the model's files are others now" in said) == (0, True), said
        assert clients.latest() == 2.0
        (second,) = artifacts()
        assert second != first
        assert second in inferd("status")[1]

        file.write_bytes(file.read_bytes()[:-20])
        code, said = inferd("reload")
        assert code == 1
        assert "its bytes are no complete ModelProto" in said
        code, said = inferd("models", "load", "m")
        assert code == 1
        assert clients.latest() == 2.0
        assert (artifacts(), model().state) == ({second}, "ready")

        good.graph.node[0].op_type = "NoSuchOperator"
        file.write_bytes(good.SerializeToString())
        code, said = inferd("reload")
        assert (code, "Reloaded" in said) == (1, False)
        assert "The file is in use, but not every model could be changed to what it says" in said
        assert "What served before goes on serving" in said
        assert "What served before goes on serving" in inferd("status")[1]
        assert clients.latest() == 2.0
        other = msgspec.json.encode({"parameters": {"config": '{"max_batch_size": 3}'}})
        with pytest.raises(InferdError, match="What served before goes on serving"):
            find_server(None, None, None, None).send("/v2/repository/models/m/load", other, {})
        assert clients.latest() == 2.0

        put(file, 3)
        code, said = inferd("models", "load", "m")
        assert code == 0, said
        assert clients.latest() == 3.0
        assert len(artifacts()) == 1
    assert {status for status, _ in clients.answers} == {200}
    assert {said for _, said in clients.answers} == {1.0, 2.0, 3.0}


def test_a_model_that_could_not_be_loaded_is_tried_again_by_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    good, file = tmp_path / "good.onnx", tmp_path / "m.onnx"
    put(good, 1)
    file.write_bytes(good.read_bytes()[:-20])
    models = {"m": {"source": str(file)}, "good": {"source": str(good)}}
    with serving(tmp_path, models, memory_bytes=200_000_000) as server:
        assert model().state == "failed"
        put(file, 2)
        code, said = inferd("reload")
        assert (code, model().state) == (0, "ready"), said
        # No memory for two copies: a new file that turns out to be broken when the old one has gone brings the old one back.
        until_now(lambda: is_kept(file), "its file is kept")
        broken = onnx.load(good)
        broken.graph.node[0].op_type = "NoSuchOperator"
        file.write_bytes(broken.SerializeToString())
        assert inferd("reload")[0] == 1
        until_now(lambda: model().state == "ready", "what served before is back")
        assert answer_of(server.url) == 2.0
        # The old one stays where the new file need not even be begun with.
        file.write_bytes(good.read_bytes()[:-20])
        (before,) = [replica.pid for replica in model().replicas]
        assert inferd("models", "load", "m")[0] == 1
        assert [replica.pid for replica in model().replicas] == [before]
        assert answer_of(server.url) == 2.0


@THOROUGH
def test_a_worker_that_dies_comes_back_as_what_it_was_whatever_lies_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    file = tmp_path / "m.onnx"
    put(file, 1)

    def dies(file_is: float | None, answers: float) -> None:
        (before,) = model().replicas
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        until_now(lambda: model().replicas[0].restarts > before.restarts and model().state == "ready", "it is back")
        assert (answer_of(server.url), model().replicas[0].artifact) == (answers, before.artifact), file_is

    with serving(tmp_path, {"m": {"source": str(file)}}) as server:
        until_now(lambda: is_kept(file), "its file is kept")
        (kept,) = (tmp_path / "state" / "kept").glob("*/*")
        file.write_bytes(b"broken")
        dies(None, 1.0)
        dies(None, 1.0)
        put(file, 2)  # which was not asked for
        dies(2, 1.0)
        file.unlink()
        dies(None, 1.0)
        put(file, 3)
        assert inferd("reload")[0] == 0
        assert answer_of(server.url) == 3.0
        until_now(lambda: is_kept(file) and not kept.exists(), "the new one is kept instead")
        dies(3, 3.0)
    assert not list((tmp_path / "state" / "kept").iterdir())
