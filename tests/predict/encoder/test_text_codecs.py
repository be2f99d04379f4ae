"""What the dialects about texts ask of a model, and what they are answered: through the worker's own backend."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.predict.encoder.test_encoder_families import ask, load
from tests.predict.encoder.tiny_encoders import POSITIONS, VOCABULARY, write_encoder

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import InferdError, from_failure
from inferd.predict.backend import PredictBackend
from inferd.predict.batcher import Batcher
from inferd.predict.limits import limits_for
from inferd.predict.load import model_info
from inferd.predict.runtimes.encoder import EncoderRuntime
from inferd.registry.artifact import artifact_of
from inferd.types import Prediction, PredictRequest

LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2


class Model:
    """A loaded checkpoint, and its answers to bodies."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig(source=str(folder))
        self.runtime: EncoderRuntime = load(folder)
        contract = self.runtime.contract
        limits = limits_for(contract, config)
        info = model_info("tiny", config, artifact_of(config), contract, limits)
        self._backend = PredictBackend(self.runtime, Batcher(limits), info)

    def answer(self, dialect: str, body: object) -> Prediction:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        now = clock.now()
        self._backend.add(PredictRequest(id="predict-1", model="tiny", dialect=dialect, body=raw, arrived_at=now), now)
        prediction = None
        while (due := self._backend.due(clock.now())) is not None:
            for output in self._backend.step(due)[0]:
                prediction = output.prediction or prediction
                if output.end is not None and output.end.failure is not None:
                    raise from_failure(output.end.failure)
        assert prediction is not None
        return prediction

    def says(self, dialect: str, **body: object) -> Any:
        return json.loads(self.answer(dialect, body).body)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_encoder(tmp_path_factory.mktemp("embedder"), "BertModel"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_encoder(tmp_path_factory.mktemp("reranker"), "BertForSequenceClassification", labels=1))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("classifier")
    return Model(write_encoder(folder, "DistilBertForSequenceClassification", id2label={0: "good", 1: "bad", 2: "so"}))


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Model:
    labels = {0: "O", 1: "B-ANIMAL", 2: "I-ANIMAL"}
    return Model(write_encoder(tmp_path_factory.mktemp("tagger"), "BertForTokenClassification", id2label=labels))


def vectors(model: Model, *texts: str, **parameters: object) -> Any:
    (result,) = ask(model.runtime, {"text": list(texts)}, **parameters)
    return result.outputs["embedding"]


# -- embeddings ----------------------------------------------------------------------------------


def test_embeddings_come_as_numbers_or_as_base64_and_are_counted(embedder: Model) -> None:
    expected = vectors(embedder, "the cat", "dogs")
    told = embedder.says("openai.embeddings", input=["the cat", "dogs"], encoding_format="float")
    assert told["object"] == "list"
    assert told["model"] == "tiny"
    assert [entry["index"] for entry in told["data"]] == [0, 1]
    np.testing.assert_allclose([entry["embedding"] for entry in told["data"]], expected, atol=1e-6)
    assert told["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    packed = embedder.says("openai.embeddings", input=["the cat", "dogs"], encoding_format="base64")
    read = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    np.testing.assert_allclose(read, expected, atol=1e-6)


def test_embeddings_take_a_text_texts_ids_and_lists_of_ids(embedder: Model) -> None:
    ids = [VOCABULARY.index(word) for word in ("[CLS]", "the", "cat", "[SEP]")]
    expected = vectors(embedder, "the cat")[0]
    inputs: list[object] = ["the cat", ["the cat"], ids, [ids]]
    for given in inputs:
        (entry,) = embedder.says("openai.embeddings", input=given)["data"]
        np.testing.assert_allclose(entry["embedding"], expected, atol=1e-6)


def test_more_texts_than_a_batch_has_rows_are_answered_in_order(embedder: Model) -> None:
    texts = [f"{'the ' * (i % 7)}cat {i % 10}" for i in range(300)]
    told = embedder.says("openai.embeddings", input=texts)
    np.testing.assert_allclose([entry["embedding"] for entry in told["data"]], vectors(embedder, *texts), atol=1e-5)


def test_what_is_ignored_is_listed(embedder: Model) -> None:
    answer = embedder.answer("openai.embeddings", {"input": "a", "user": "me"})
    assert answer.headers == (("x-inferd-ignored-params", "user"),)
    assert embedder.answer("openai.embeddings", {"input": "a"}).headers == ()


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", ""]}, "input[1]", "input[1] is empty"),
        ({"input": ["a", 3]}, "input[1]", "differs in kind"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 entries, not 2049"),
        ({"input": [5000]}, "input", "token id 5000"),
        ({"input": [2**40]}, "input", "beyond 32 bits"),
        ({"input": [[]]}, "input", "empty list of token ids"),
        ({"input": LONG}, "input", f"54 tokens; this model reads at most {POSITIONS}"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "dimensions": 33}, "dimensions", "from 1 to 32"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "inputs": "b"}, "inputs", "not known"),
        ({"input": "a", "truncate_prompt_tokens": 99}, "truncate_prompt_tokens", "from 1 to 40, not 99"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "no prompt named 'query'"),
        ({}, "input", "missing"),
        (b'{"input": "a", "input": "b"}', "input", "twice"),
        (b'{"input": "\\ud800"}', None, "JSON"),
    ],
)
def test_a_bad_request_for_embeddings_is_told_where_it_is_bad(
    embedder: Model, body: object, param: str | None, said: str
) -> None:
    with pytest.raises(InferdError) as raised:
        embedder.answer("openai.embeddings", body)
    assert raised.value.kind in ("invalid_request", "context_length_exceeded")
    assert raised.value.param == param
    assert said in raised.value.message


def test_a_text_is_cut_where_that_is_asked_for(embedder: Model) -> None:
    cut = embedder.says("openai.embeddings", input=LONG, truncate_prompt_tokens=10)
    assert cut["usage"]["prompt_tokens"] == 10
    np.testing.assert_allclose(cut["data"][0]["embedding"], vectors(embedder, "a b c d e f g h")[0], atol=1e-6)


def test_cohere_gets_every_kind_it_asked_for(embedder: Model) -> None:
    told = embedder.says(
        "cohere.embed", texts=["the cat", LONG], input_type="search_query", embedding_types=["float", "base64"]
    )
    expected = vectors(embedder, "the cat", LONG, truncate=True)
    assert told["response_type"] == "embeddings_by_type"
    np.testing.assert_allclose(told["embeddings"]["float"], expected, atol=1e-6)
    np.testing.assert_allclose(
        [np.frombuffer(base64.b64decode(text), "<f4") for text in told["embeddings"]["base64"]], expected, atol=1e-6
    )
    assert told["meta"]["billed_units"] == {"input_tokens": 4 + POSITIONS}
    for most, read in ((5, 5), (10**6, POSITIONS)):
        cut = embedder.says("cohere.embed", texts=[LONG], max_tokens=most)
        assert cut["meta"]["billed_units"] == {"input_tokens": read}
    short = embedder.says("cohere.embed", texts=["a"], output_dimension=4, truncate="NONE")
    assert len(short["embeddings"]["float"][0]) == 4
    with pytest.raises(InferdError, match="reads at most"):
        embedder.says("cohere.embed", texts=[LONG], truncate="NONE")


def test_text_embeddings_inference_answers_bare_lists(embedder: Model) -> None:
    np.testing.assert_allclose(embedder.says("tei.embed", inputs="the cat"), vectors(embedder, "the cat"), atol=1e-6)
    raw = embedder.says("tei.embed", inputs=["the cat"], normalize=False, dimensions=3)
    np.testing.assert_allclose(raw, vectors(embedder, "the cat", normalize=False)[:, :3], atol=1e-5)
    left = embedder.says("tei.embed", inputs=LONG, truncate=True, truncation_direction="Left")
    expected = vectors(embedder, LONG, truncate=True, truncation_side="left")
    np.testing.assert_allclose(left, expected, atol=1e-6)


# -- pairs ---------------------------------------------------------------------------------------


def scores(model: Model, query: str, *texts: str, **parameters: object) -> list[float]:
    (result,) = ask(model.runtime, {"query": [query] * len(texts), "text": list(texts)}, **parameters)
    found: list[float] = result.outputs["score"].tolist()
    return found


DOCUMENTS = ["the cat sits", "dogs", "a king in the garden"]


def test_documents_are_ranked_best_first(reranker: Model) -> None:
    expected = scores(reranker, "a cat", *DOCUMENTS)
    order = sorted(range(3), key=lambda i: -expected[i])
    told = reranker.says("rerank", query="a cat", documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]])
    assert [entry["index"] for entry in told["results"]] == order
    assert [entry["document"]["text"] for entry in told["results"]] == [DOCUMENTS[i] for i in order]
    assert [entry["relevance_score"] for entry in told["results"]] == pytest.approx([expected[i] for i in order])
    assert told["usage"]["total_tokens"] > 20
    best = reranker.says("rerank", query="a cat", documents=DOCUMENTS, top_n=1, return_documents=False)
    assert best["results"] == [{"index": order[0], "relevance_score": pytest.approx(expected[order[0]])}]
    cohere = reranker.says("cohere.rerank", query="a cat", documents=[*DOCUMENTS, LONG], top_n=2)
    assert len(cohere["results"]) == 2
    assert "document" not in cohere["results"][0]
    assert cohere["meta"]["billed_units"] == {"search_units": 1}
    tei = reranker.says("tei.rerank", query="a cat", texts=DOCUMENTS, return_text=True, raw_scores=True)
    raw = scores(reranker, "a cat", *DOCUMENTS, raw_scores=True)
    assert tei == [{"index": i, "score": pytest.approx(raw[i]), "text": DOCUMENTS[i]} for i in order]


def test_texts_are_scored_one_against_several_or_pair_by_pair(reranker: Model) -> None:
    one = reranker.says("score", text_1="a cat", text_2=DOCUMENTS)
    assert [entry["score"] for entry in one["data"]] == pytest.approx(scores(reranker, "a cat", *DOCUMENTS))
    pairs = reranker.says("score", queries=["a cat", "dogs"], documents=DOCUMENTS[:2])
    expected = [*scores(reranker, "a cat", DOCUMENTS[0]), *scores(reranker, "dogs", DOCUMENTS[1])]
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx(expected)
    logits = reranker.says("score", data_1="a cat", data_2="dogs", use_activation=False)
    assert logits["data"][0]["score"] == pytest.approx(scores(reranker, "a cat", "dogs", raw_scores=True)[0])


def test_a_model_of_vectors_ranks_by_their_cosines(embedder: Model) -> None:
    made = vectors(embedder, "a cat", *DOCUMENTS)
    cosines = (made[1:] @ made[0]).tolist()
    told = embedder.says("score", text_1="a cat", text_2=DOCUMENTS)
    assert [entry["score"] for entry in told["data"]] == pytest.approx(cosines, abs=1e-5)
    ranked = embedder.says("rerank", query="a cat", documents=DOCUMENTS)["results"]
    assert [entry["index"] for entry in ranked] == sorted(range(3), key=lambda i: -cosines[i])


@pytest.mark.parametrize(
    ("dialect", "body", "param", "said"),
    [
        ("rerank", {"query": "a"}, "documents", "'documents' is missing"),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("rerank", {"documents": ["a"]}, "query", "missing"),
        ("rerank", {"query": "a", "documents": [LONG]}, "input", "56 tokens"),
        ("tei.rerank", {"query": "a", "texts": ["b"], "documents": ["c"]}, "texts", "one of the two"),
        ("score", {"text_1": "a"}, "text_2", "Send one of text_2, documents, items, data_2, not none"),
        ("score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1", "not text_1 and queries"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "text_1 has 2 texts and text_2 3"),
        ("openai.embeddings", {"input": "a"}, "model", "cannot embed; it can predict, rerank, score"),
        ("pooling", {"input": "a"}, "model", "cannot pool;"),
    ],
)
def test_a_bad_request_for_pairs_is_told_where_it_is_bad(
    reranker: Model, dialect: str, body: object, param: str, said: str
) -> None:
    with pytest.raises(InferdError) as raised:
        reranker.answer(dialect, body)
    assert raised.value.param == param
    assert said in raised.value.message


# -- classes -------------------------------------------------------------------------------------


def test_classes_come_with_their_names_and_probabilities(classifier: Model) -> None:
    (result,) = ask(classifier.runtime, {"text": DOCUMENTS})
    expected = result.outputs["probabilities"]
    told = classifier.says("classify", input=DOCUMENTS)
    names = ["good", "bad", "so"]
    for entry, row in zip(told["data"], expected, strict=True):
        assert entry["label"] == names[int(row.argmax())]
        assert entry["probs"] == pytest.approx(row.tolist())
        assert sum(entry["probs"]) == pytest.approx(1.0)
        assert entry["num_classes"] == 3
    one = classifier.says("tei.predict", inputs=DOCUMENTS[0])
    assert [entry["label"] for entry in one] == [names[i] for i in np.argsort(-expected[0])]
    several = classifier.says("tei.predict", inputs=[[text] for text in DOCUMENTS])
    assert several[0] == one
    assert len(several) == 3
    pooled = classifier.says("pooling", input=DOCUMENTS[0])
    assert pooled["data"][0]["data"] == pytest.approx(expected[0].tolist())


def test_pairs_are_classified_too(classifier: Model, reranker: Model) -> None:
    (result,) = ask(classifier.runtime, {"text": ["a cat"], "text_pair": ["dogs"]})
    told = classifier.says("tei.predict", inputs=["a cat", "dogs"])
    best = result.outputs["probabilities"][0]
    assert told[0]["score"] == pytest.approx(float(best.max()))
    (score,) = reranker.says("tei.predict", inputs=["a cat", "dogs"])
    assert score["score"] == pytest.approx(scores(reranker, "a cat", "dogs")[0])
    with pytest.raises(InferdError, match="all hold one text, or all two"):
        classifier.says("tei.predict", inputs=[["a"], ["a", "b"]])


def test_entities_are_told_where_tokens_are_classified(tagger: Model) -> None:
    (result,) = ask(tagger.runtime, {"text": ["the cats sit"]})
    told = tagger.says("classify", input="the cats sit")
    assert told["data"] == [{"index": 0, "entities": json.loads(result.outputs["entities"][0])}]
    plain = tagger.says("classify", input="the cats sit", aggregation_strategy="none")["data"][0]["entities"]
    assert all("entity" in entity and "entity_group" not in entity for entity in plain)
    with pytest.raises(InferdError, match="no class of a whole text"):
        tagger.says("tei.predict", inputs="the cats sit")


def test_a_class_or_a_vector_is_not_asked_of_a_model_that_has_none(embedder: Model, classifier: Model) -> None:
    for model, dialect, body, said in (
        (embedder, "classify", {"input": "a"}, "cannot classify; it can predict, embed"),
        (classifier, "openai.embeddings", {"input": "a"}, "cannot embed; it can predict, classify"),
        (classifier, "rerank", {"query": "a", "documents": ["b"]}, "cannot score; it can predict, classify"),
    ):
        with pytest.raises(InferdError, match=said):
            model.answer(dialect, body)
