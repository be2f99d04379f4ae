"""A chat model, an embedding model, a reranker, ONNX, a text classifier, trees and a Python class behind one port, from one file."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import skops.io
import xgboost
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tests.predict.encoder.tiny_encoders import write_encoder
from tests.predict.live import serving
from tests.predict.small_onnx import identity

NAMES = {"chat", "same", "mood", "trees", "vectors", "judge", "mine"}
ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def booster() -> xgboost.Booster:
    settings = {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9], "verbosity": 0, "nthread": 1}
    return xgboost.train(settings, xgboost.DMatrix(ROWS, ROWS.sum(1)), 3)


@pytest.fixture(scope="module")
def server(booster: xgboost.Booster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mixed")
    moods = make_pipeline(TfidfVectorizer(), LogisticRegression())
    skops.io.dump(moods.fit(["a good day", "a bad day"] * 10, ["good", "bad"] * 10), folder / "mood.skops")
    booster.save_model(folder / "trees.ubj")
    models: dict[str, dict[str, object]] = {
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
    with serving(folder, models, memory_bytes=4 << 30) as (url, _, _):
        yield url


def test_each_is_asked_in_its_own_way(server: str, booster: xgboost.Booster) -> None:
    with httpx.Client(base_url=server, timeout=30) as client:
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
    server: str, path: str, body: dict[str, object]
) -> None:
    answer = httpx.post(server + path, json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    with httpx.Client(base_url=server, timeout=30) as client:
        assert client.get("/health/ready").status_code == 200
