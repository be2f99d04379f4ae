"""openai-python, langchain-openai and plain HTTP, unmodified, against a real server of a text encoder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from tests.predict.encoder.tiny_encoders import write_encoder, write_modules

TEXTS = ["the cat sits outside", "dogs", "a king plays in the garden"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_encoder(tmp_path_factory.mktemp("encoder"), "BertModel")
    write_modules(folder, prompts={"query": "the king "})
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(folder), "--name", "tiny", "--port", "0", "--threads", "1"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if "is ready at" in line), "")
        assert ready, log.read_text(encoding="utf-8")
        yield re.findall(r"http://\S+", ready)[0]
        process.terminate()
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(url: str, path: str, **body: object) -> Any:
    return httpx.post(url + path, json=body, timeout=30).json()


def test_openais_client_reads_vectors_in_both_encodings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64 by itself
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert len(one.embedding) == 32
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 12
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
    assert len(short.data[0].embedding) == 8


def test_openais_client_gets_errors_it_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reads at most 40") as raised:
        client.embeddings.create(model="tiny", input="a " * 100)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="'tiny' cannot generate; it can predict, embed, score, rerank"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError, match="gpt-99"):
        client.embeddings.create(model="gpt-99", input="a")


def test_langchain_embeds_documents_and_queries(url: str, client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(model="tiny", **settings)
    expected = [entry.embedding for entry in client.embeddings.create(model="tiny", input=TEXTS).data]
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), expected[0], atol=1e-6)


def test_all_dialects_give_the_same_vectors(url: str, client: openai.OpenAI) -> None:
    expected = [entry.embedding for entry in client.embeddings.create(model="tiny", input=TEXTS).data]
    np.testing.assert_allclose(ask(url, "/embed", inputs=TEXTS), expected, atol=1e-6)
    cohere = ask(url, "/v2/embed", model="tiny", texts=TEXTS, embedding_types=["float"])
    np.testing.assert_allclose(cohere["embeddings"]["float"], expected, atol=1e-6)
    pooled = ask(url, "/pooling", model="tiny", input=TEXTS)
    np.testing.assert_allclose([entry["data"] for entry in pooled["data"]], expected, atol=1e-6)
    tensor = {"name": "text", "shape": [3], "datatype": "BYTES", "data": TEXTS}
    (output,) = ask(url, "/v2/models/tiny/infer", inputs=[tensor])["outputs"]
    assert output["shape"] == [3, 32]
    np.testing.assert_allclose(np.reshape(output["data"], (3, 32)), expected, atol=1e-6)


def test_documents_are_ranked_under_every_path(url: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "query": "a cat", "documents": TEXTS}
    found = [ask(url, path, **body)["results"] for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    orders = [[entry["index"] for entry in results] for results in found]
    assert sorted(orders[0]) == [0, 1, 2]
    assert orders[0] == orders[1] == orders[2]
    tei = ask(url, "/rerank", query="a cat", texts=TEXTS)
    assert [entry["index"] for entry in tei] == orders[0]
    for path in ("/score", "/v1/score"):
        told = ask(url, path, model="tiny", text_1="a cat", text_2=TEXTS)["data"]
        assert sorted(range(3), key=lambda i: -told[i]["score"]) == orders[0]


def test_the_model_is_told_of_as_text_embeddings_inference_does(url: str) -> None:
    told = httpx.get(f"{url}/info", timeout=30).json()
    assert told["model_id"] == "tiny"
    assert told["model_type"] == {"embedding": {}}
    assert told["max_input_length"] == 40
    wrong = httpx.post(f"{url}/embed", json={"inputs": "a " * 100}, timeout=30)
    assert wrong.status_code == 400
    assert wrong.json()["error_type"] == "Validation"
    assert "reads at most 40" in wrong.json()["error"]


def test_usage_and_batches_are_counted(url: str) -> None:
    ask(url, "/v1/embeddings", model="tiny", input=TEXTS)
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    counted = re.findall(r'^inferd_prompt_tokens_total\{[^}]*model="tiny"[^}]*\} (\S+)', metrics, re.MULTILINE)
    assert counted, [line for line in metrics.splitlines() if "tokens" in line][:20]
    assert sum(map(float, counted)) > 0
    assert json.loads(httpx.get(f"{url}/v1/models", timeout=30).text)["data"][0]["id"] == "tiny"


def test_ollamas_client_gets_vectors_of_length_one(url: str, client: openai.OpenAI) -> None:
    wanted = [row.embedding for row in client.embeddings.create(model="tiny", input=TEXTS).data]
    with ollama.Client(host=url, timeout=30) as made:
        several = made.embed("tiny", TEXTS, keep_alive="5m", options={"num_ctx": 512})
        np.testing.assert_allclose(several.embeddings, wanted, atol=1e-6)
        assert several.prompt_eval_count is not None
        assert several.prompt_eval_count > 12
        assert len(made.embed("tiny", TEXTS[0], dimensions=8).embeddings[0]) == 8
        np.testing.assert_allclose(made.embeddings("tiny", TEXTS[0]).embedding, wanted[0], atol=1e-6)
        assert made.embed("tiny:latest", "a " * 100).embeddings  # a text that is too long is cut
        with pytest.raises(ollama.ResponseError, match="reads at most 40"):
            made.embed("tiny", "a " * 100, truncate=False)
        assert made.show("tiny").capabilities == ["embedding"]
