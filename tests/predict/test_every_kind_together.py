"""A chat model, an embedding model, a reranker, ONNX, a text classifier, trees and a Python class behind one port, from one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import skops.io
import xgboost
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tests.predict.encoder.tiny_encoders import write_encoder
from tests.predict.live import serving
from tests.predict.small_onnx import identity
from tests.tiers import THOROUGH

from inferd import models

NAMES = {"chat", "same", "mood", "trees", "vectors", "judge", "mine"}
WEIGHTS = {".safetensors", ".onnx", ".skops", ".ubj"}
ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


class Served(NamedTuple):
    """A server's address, its process, and the folder of its models."""

    url: str
    pid: int
    folder: Path


def files_of_models(server: Served) -> list[Path]:
    """The files that hold weights, trees or tables."""
    folders = (server.folder, models.path("demo"))
    return [file for folder in folders for file in folder.rglob("*") if file.suffix in WEIGHTS]


@pytest.fixture(scope="module")
def booster() -> xgboost.Booster:
    settings = {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9], "verbosity": 0, "nthread": 1}
    return xgboost.train(settings, xgboost.DMatrix(ROWS, ROWS.sum(1)), 3)


@pytest.fixture(scope="module")
def server(booster: xgboost.Booster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("mixed")
    folder = home / "models"
    folder.mkdir()
    moods = make_pipeline(TfidfVectorizer(), LogisticRegression())
    skops.io.dump(moods.fit(["a good day", "a bad day"] * 10, ["good", "bad"] * 10), folder / "mood.skops")
    booster.save_model(folder / "trees.ubj")
    served: dict[str, dict[str, object]] = {
        "chat": {"source": "demo", "kv_cache": {"memory_bytes": 64 << 20}},
        "same": {"source": str(identity(folder / "same.onnx"))},
        "mood": {"source": str(folder / "mood.skops")},
        "trees": {"source": str(folder / "trees.ubj")},
        "vectors": {"source": str(write_encoder(folder / "vectors", "BertModel")), "threads": 1},
        "judge": {
            "source": str(write_encoder(folder / "judge", "BertForSequenceClassification", labels=1)),
            "threads": 1,
        },
        "mine": {"source": f"{folder / 'mine.py'}:Longest", "allow_code": True},
    }
    (folder / "mine.py").write_text(
        "class Longest:\n    def predict(self, texts: list[str]) -> str:\n        return max(texts, key=len)\n"
    )
    with serving(home, served, memory_bytes=4 << 30) as (url, _, pid):
        yield Served(url, pid, folder)


def ask_each(server: Served, booster: xgboost.Booster) -> None:
    """Ask every model, and check its answer."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert {one["id"] for one in client.get("/v1/models").json()["data"]} == NAMES
        said = client.post(
            "/v1/chat/completions",
            json={"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        )
        assert said.json()["choices"][0]["message"]["role"] == "assistant"
        classified = client.post("/classify", json={"model": "mood", "input": ["how good", "so bad"]})
        assert [one["label"] for one in classified.json()["data"]] == ["good", "bad"]
        rows = ROWS[:4]
        asked = {
            "inputs": [{"name": "input-0", "datatype": "FP32", "shape": [4, 3], "data": rows.ravel().tolist()}],
            "outputs": [{"name": "quantiles"}],
        }
        (output,) = client.post("/v2/models/trees/infer", json=asked).json()["outputs"]
        found = np.asarray(output["data"]).reshape(output["shape"])
        np.testing.assert_allclose(found, booster.predict(xgboost.DMatrix(rows)), rtol=1e-5)
        simple = client.post("/v1/models/trees:predict", json={"instances": rows.tolist()}).json()
        np.testing.assert_allclose(simple["predictions"], found, rtol=1e-5)
        asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
        assert client.post("/v2/models/same/infer", json=asked).json()["outputs"][0]["data"] == [1, 2]
        embedded = client.post("/v1/embeddings", json={"model": "vectors", "input": ["the cat", "a king plays"]})
        assert [len(one["embedding"]) for one in embedded.json()["data"]] == [32, 32]
        asked = {"model": "judge", "query": "the cat", "documents": ["a king plays", "dogs", "the garden"]}
        ranked = client.post("/rerank", json=asked).json()["results"]
        scores = [one["relevance_score"] for one in ranked]
        assert sorted(one["index"] for one in ranked) == [0, 1, 2]
        assert scores == sorted(scores, reverse=True)
        asked = {"inputs": [{"name": "texts", "datatype": "BYTES", "shape": [2], "data": ["a", "abc"]}]}
        assert client.post("/v2/models/mine/infer", json=asked).json()["outputs"][0]["data"] == ["abc"]


@THOROUGH
def test_each_is_asked_in_its_own_way(server: Served, booster: xgboost.Booster) -> None:
    ask_each(server, booster)


def test_models_stay_in_memory_and_no_request_reads_their_files(server: Served, booster: xgboost.Booster) -> None:
    """The files may be away. No worker keeps one open or mapped, and all of them together read less than the largest."""
    ask_each(server, booster)
    workers = psutil.Process(server.pid).children(recursive=True)
    assert len(workers) >= len(NAMES)
    before = sum(worker.io_counters().read_chars for worker in workers)
    files = files_of_models(server)
    largest = max(file.stat().st_size for file in files)
    assert before > largest, "what a worker reads is counted"
    away = server.folder.with_name("away")
    server.folder.rename(away)
    try:
        for _ in range(3):
            ask_each(server, booster)
        names = {str(file) for file in (*files, *away.rglob("*"))}
        used = {one.path for worker in workers for one in (*worker.open_files(), *worker.memory_maps(grouped=True))}
    finally:
        away.rename(server.folder)
    assert not used & names
    assert sum(worker.io_counters().read_chars for worker in workers) - before < largest
    assert {worker.pid for worker in workers} == {
        worker.pid for worker in psutil.Process(server.pid).children(recursive=True)
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "trees", "messages": [{"role": "user", "content": "Hello"}]}),
        ("/classify", {"model": "trees", "input": "so good"}),
        ("/v1/embeddings", {"model": "mood", "input": "so good"}),
        ("/v1/embeddings", {"model": "judge", "input": "so good"}),
        ("/v1/completions", {"model": "vectors", "prompt": "so good"}),
        ("/v2/models/chat/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}),
    ],
)
def test_a_model_that_is_asked_for_another_kinds_work_says_what_it_does(
    server: Served, path: str, body: dict[str, object]
) -> None:
    answer = httpx.post(server.url + path, json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/health/ready").status_code == 200
