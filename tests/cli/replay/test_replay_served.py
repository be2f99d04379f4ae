"""A real server, real traffic that it records, and what replays and golden sets say of its versions."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.app.test_rollouts_served import worse_digits
from tests.predict.encoder.tiny_encoders import write_encoder
from tests.predict.live import serving
from tests.worker.watching import until_now

from inferd import models
from inferd.cli.main import main
from inferd.observe.payloads.store import PayloadStore

datasets = pytest.importorskip("sklearn.datasets")

NUM_DIGITS = 40


class Recorded(NamedTuple):
    """A server that runs, the file with its records, and a folder."""

    url: str
    records: Path
    folder: Path


def tensor(number: int) -> dict[str, Any]:
    return {
        "name": "pixels",
        "datatype": "FP32",
        "shape": [1, 64],
        "data": datasets.load_digits().data[number].tolist(),
    }


def traffic(client: httpx.Client) -> int:
    """Ask every kind of model; returns the number of requests."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v2/models/digits/versions/1/infer", {"inputs": [tensor(number)]}) for number in range(NUM_DIGITS)
    ]
    asked += [
        (path, {"model": "chat", **prompt, "max_tokens": 12, "stream": stream, **drawn})
        for path, prompt in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me of the king"}]}),
            ("/v1/completions", {"prompt": "Once upon a time", "logprobs": 1}),
        )
        for stream in (False, True)
        for drawn in ({"temperature": 0}, {"seed": 3}, {})
    ]
    asked += [
        ("/v1/messages", {"model": "chat", "max_tokens": 9, "temperature": 0, **CHAT, "stream": True}),
        ("/v1/responses", {"model": "chat", "max_output_tokens": 9, "temperature": 0, "input": "hi", "stream": True}),
        ("/v2/models/chat/generate", {"text_input": "hi", "parameters": {"temperature": 0, "max_tokens": 5}}),
        ("/v2/models/intents/infer", {"inputs": [INTENT]}),
        ("/v1/embeddings", {"model": "vectors", "input": ["the cat sits outside", "the king"]}),
        ("/v1/completions", {"model": "chat", "prompt": "x", "max_tokens": -1}),
        ("/v1/chat/completions", {"model": "chat", "temperature": 0, **MAIL, "max_tokens": 4}),
    ]
    for path, body in asked:
        client.post(path, json=body)
    return len(asked)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MAIL = {"messages": [{"role": "user", "content": "I am anna@example.com"}]}
INTENT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["where is my order?"]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Version 2 of the classifier is the bundled one with half of its hidden units gone."""
    folder = tmp_path_factory.mktemp("recorded")
    for number in (1, 2):
        (folder / "digits" / str(number)).mkdir(parents=True)
    (folder / "digits" / "1" / "model.onnx").write_bytes((models.path("demo-digits") / "model.onnx").read_bytes())
    worse_digits(folder / "digits" / "2" / "model.onnx")
    write_encoder(folder / "vectors", "BertModel")
    served: dict[str, dict[str, Any]] = {
        "chat": {"source": "demo"},
        "small": {"source": "demo", "quantization": "int4"},
        "digits": {"source": str(folder / "digits"), "versions": {"policy": "all"}, "batching": {"mode": "off"}},
        "intents": {"source": "demo-intents"},
        "vectors": {"source": str(folder / "vectors")},
    }
    with pytest.MonkeyPatch.context() as patch:
        state = folder / "state"
        patch.setenv("INFERD_STATE__DATA_DIR", str(state))
        patch.setenv("INFERD_PAYLOADS__TENANTS", "*")
        patch.setenv("INFERD_PAYLOADS__KEEP", "replay")
        with serving(folder, served) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            number = traffic(client)
            until_now(lambda: len(list(PayloadStore(state).records())) == number, "the records of all requests")
            records = folder / "asked.jsonl"
            records.write_text(shown("payloads", "export"))
            yield Recorded(server.url, records, folder)


def shown(*words: str, code: int = 0) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(words)) == code
    return out.getvalue()


def test_one_version_answers_the_same_to_the_bit(recorded: Recorded) -> None:
    """Chat (greedy and seeded, whole and streamed), completions with log-probabilities, messages, responses, vectors,
    two classifiers, and an error."""
    report = recorded.folder / "same.json"
    said = shown("replay", "--from", str(recorded.records), "--against", recorded.url, "--json", str(report))
    assert "are equal, and so is every such answer that is not drawn at random." in said
    found = json.loads(report.read_text())
    assert found["skipped"] == {"redacted": 1}
    assert found["asked"] == NUM_DIGITS + 12 + 6
    assert found["same_version"] == found["asked"] - 1  # the request that was refused reached no version
    assert (found["random"], found["broken"], found["failed"]) == (4, 0, 0)
    assert found["equal"]["count"] == found["equal"]["number"] == found["asked"] - 4
    assert {route["route"] for route in found["routes"]} >= {"/v1/embeddings", "/v1/messages", "/v1/responses"}
    assert all(known[0] and known[0] in known[1:] for known in found["fingerprints"].values())


def test_a_worse_version_is_found_to_differ(recorded: Recorded) -> None:
    report, page = recorded.folder / "worse.json", recorded.folder / "worse.html"
    words = ("--from", str(recorded.records), "--against", "digits@2", "--only", "digits@1")
    shown("replay", *words, "--json", str(report), "--html", str(page))
    found = json.loads(report.read_text())
    assert (found["asked"], found["same_version"], found["broken"]) == (NUM_DIGITS, 0, 0)
    assert found["equal"]["count"] == 0
    assert found["labels"]["number"] == NUM_DIGITS
    assert found["labels"]["flips"] == sum(flip["count"] for flip in found["labels"]["table"]) > 0
    (scores,) = [one for one in found["tensors"] if one["name"] == "probabilities"]
    assert 0 < scores["max_abs"] <= 1
    shown("replay", *words, "--max-different", "0.5", code=1)
    text = page.read_text()
    assert "<svg" in text
    assert "<script" not in text
    assert "http://" not in text.replace(recorded.url, "")


def test_numbers_are_equivalent_within_a_tolerance_and_labels_that_flip_are_not(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(recorded.folder / "registry"))
    report = recorded.folder / "equivalence.json"
    for number in (1, 2):
        shown("registry", "register", "digits", str(recorded.folder / "digits" / str(number)))
    words = ("replay", "--from", str(recorded.records), "--only", "digits@1", "--equivalence", "--relative", "1e-3")
    asked = ("--model", "digits@2", "--against", recorded.url, "--attach", "digits@2", "--json", str(report))
    assert "0 are equal within the tolerance" in shown(*words, *asked, code=1)
    found = json.loads(report.read_text())
    assert found["tolerance"] == {"relative": 1e-3, "absolute": 0.0}
    assert found["within"]["count"] == 0
    (scores,) = [one for one in found["tensors"] if one["name"] == "probabilities"]
    assert 0 < scores["number_beyond"] <= scores["number_different"]
    same = ("--model", "digits@1", "--against", recorded.url, "--attach", "digits@1")
    assert f"{NUM_DIGITS} are equal within the tolerance" in shown(*words, *same)
    evidence = json.loads(shown("registry", "list", "digits", "--json"))
    kinds = [{one["kind"]: one["passed"] for one in version["record"]["evidence"]} for version in evidence]
    assert kinds == [{"digest": True, "equivalence": True}, {"digest": True, "equivalence": False}]
    nothing = ("--model", "digits@1", "--against", recorded.url, "--limit", "1", "--only", "no-such-model")
    shown("replay", "--from", str(recorded.records), "--equivalence", *nothing, code=1)


def test_a_golden_set_tells_the_better_version(recorded: Recorded) -> None:
    golden, report, page = (recorded.folder / name for name in ("golden.jsonl", "golden.json", "golden.html"))
    labels = datasets.load_digits().target
    lines = [
        {"name": f"digit {number}", "request": {"inputs": [tensor(number)]}, "label": str(labels[number])}
        for number in range(80)
    ]
    golden.write_text("\n".join(map(json.dumps, lines)))
    assert "at least the 98 %" in shown("evaluate", str(golden), "--against", "digits@1", "--min-pass", "0.98")
    words = ("evaluate", str(golden), "--against", recorded.url, "--model", "digits@2", "--min-pass", "0")
    shown(*words)
    said = shown(*words, "--not-worse-than", "digits@1", "--json", str(report), "--html", str(page), code=1)
    assert "It is worse than digits@1" in said
    found = json.loads(report.read_text())
    assert found["comparison"]["only_other"] == len(found["comparison"]["lost"]) > 5
    assert found["comparison"]["p"] < 0.05
    assert found["score"]["passed"]["count"] == 80 - len(found["score"]["failed"])
    assert "digit 1" in page.read_text()


def test_the_perplexity_at_a_server_is_that_of_the_model_in_process(recorded: Recorded) -> None:
    golden, text, report = (recorded.folder / name for name in ("one.jsonl", "text.txt", "perplexity.json"))
    golden.write_text(json.dumps({"request": {**CHAT, "temperature": 0, "max_tokens": 4}, "regex": "."}))
    text.write_text("The king went to the tower, and the old woman sang to him. " * 8)
    words = ("--against", "chat", "--perplexity", str(text), "--context", "48", "--json", str(report))
    shown("evaluate", str(golden), *words)
    mine = json.loads(report.read_text())["perplexity"]
    its = json.loads(shown("perplexity", "demo", "--data", str(text), "--context", "48", "--json"))
    assert mine["value"] == pytest.approx(its["perplexity"], rel=1e-6)
    assert (mine["num_scored"], mine["num_windows"]) == (its["num_scored"], its["num_windows"])
    shown("evaluate", str(golden), *words, "--max-perplexity", "1.5", code=1)


def test_a_quantised_model_is_compared_with_the_one_that_it_was_made_from(recorded: Recorded) -> None:
    golden, text, report = (recorded.folder / name for name in ("whole.jsonl", "words.txt", "quantised.json"))
    prompts = ["Once upon a time", "The king", "In the morning", "She said", "Far away", "A dog and a cat"]
    lines = []
    for prompt in prompts:
        body = {"model": "chat", "prompt": prompt, "temperature": 0, "max_tokens": 24}
        said = httpx.post(f"{recorded.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        del body["model"]
        lines.append(json.dumps({"name": prompt, "path": "/v1/completions", "request": body, "equals": said.strip()}))
    golden.write_text("\n".join(lines))
    text.write_text("The king went to the tower, and the old woman sang to him. " * 8)
    shown("evaluate", str(golden), "--against", "chat")
    measured = ("--perplexity", str(text), "--context", "48", "--json", str(report))
    words = ("evaluate", str(golden), "--against", "small", "--min-pass", "0", "--not-worse-than", "chat", *measured)
    assert main(list(words)) == 1
    found = json.loads(report.read_text())
    assert 0 < found["comparison"]["only_other"] == len(found["comparison"]["lost"])
    assert found["score"]["passed"]["count"] == len(prompts) - found["comparison"]["only_other"]
    told = [
        json.loads(shown("perplexity", "demo", "--data", str(text), "--context", "48", "--quantization", way, "--json"))
        for way in ("none", "int4")
    ]
    assert found["perplexity"]["value"] == pytest.approx(told[1]["perplexity"], rel=1e-6)
    assert told[0]["perplexity"] != told[1]["perplexity"]


def test_reports_become_evidence_of_a_version(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    golden = recorded.folder / "one_digit.jsonl"
    golden.write_text(json.dumps({"request": {"inputs": [tensor(0)]}, "label": "0"}))
    shown("registry", "register", "digits", str(recorded.folder / "digits" / "2"))
    words = ("--from", str(recorded.records), "--against", "digits@2", "--only", "digits@1", "--attach", "digits@1")
    shown("replay", *words, "--max-different", "0.5", code=1)
    shown("evaluate", str(golden), "--against", "digits@2", "--attach", "digits@1")
    version = json.loads(shown("registry", "show", "digits@1", "--json"))
    assert {(one["kind"], one["passed"]) for one in version["record"]["evidence"]} >= {
        ("replay", False),
        ("golden", True),
    }
    capsys.readouterr()
    assert main(["replay", *words[:-1], "digits@77"]) == 1
    said = capsys.readouterr()
    assert "digits has no version, alias or stage '77'" in said.err
    assert said.out == "", "nothing was asked"


def test_a_model_that_is_not_there_is_named(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "--from", str(recorded.records), "--against"]
    assert main([*words, "digits@9"]) == 1
    assert "does not have the model 'digits@9'" in capsys.readouterr().err


def test_a_server_of_this_machine_is_chosen_by_its_port(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    port = recorded.url.rpartition(":")[2]
    golden = recorded.folder / "one_of_a_port.jsonl"
    golden.write_text(json.dumps({"request": {"inputs": [tensor(0)]}, "label": "0"}))
    asked = ["evaluate", str(golden), "--against", "digits@1"]
    assert "1 of 1" in shown(*asked, "--port", port)
    assert main([*asked, "--port", "1"]) == 1
    assert f"No server with port 1 answers in {recorded.folder / 'state' / 'run'} (running: port {port})" in (
        capsys.readouterr().err
    )
    again = ["replay", "--from", str(recorded.records), "--against", recorded.url, "--port", port]
    assert main(again) == 2
    assert f"leave --port {port} out, or give a model" in " ".join(capsys.readouterr().err.split())
