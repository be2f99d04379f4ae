"""Text-generation-inference's routes over real sockets, with answers by script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.fakes import FakeRouter, Running, logprob, post, running, words

from inferd.answer_form import JsonSchema, Regex
from inferd.errors import Overloaded, WorkerDied
from inferd.types import Delta, End, GenerateRequest, Output, PromptReport, TextPrompt, Usage

JSON = dict[str, Any]
SCHEMA: JSON = {"type": "object"}
NAMED: tuple[JSON, ...] = ({}, {"model": "base"}, {"model": "support"})


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture
def server(shared: Running) -> Running:
    return shared.reset()


def ask(server: Running, parameters: JSON | None = None, path: str = "/generate", **body: object) -> httpx.Response:
    return post(server, path, {"inputs": "hi", "parameters": parameters or {}, **body})


def events_of(reply: httpx.Response) -> list[JSON]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("\n\n: end\n\n")
    return [json.loads(frame.removeprefix("data: ")) for frame in reply.text.split("\n\n")[:-2]]


def says(pieces: list[tuple[list[str], str]], reason: str = "stop", by: str | None = None) -> Any:
    """A script that says texts, each with tokens of its own; the end comes alone."""

    def script(request: GenerateRequest) -> list[Output]:
        outputs = [Output(request.id, (), PromptReport(3, seed=5))]
        outputs += [Output(request.id, (Delta(0, text, (), tuple(map(logprob, ids))),)) for ids, text in pieces]
        last = Delta(0, finish_reason=reason, stop_reason=by)  # type: ignore[arg-type]
        count = sum(len(ids) for ids, _ in pieces)
        return [*outputs, Output(request.id, (last,), None, End("done", Usage(3, count)))]

    return script


_PIECE = st.text(st.characters(codec="utf-8"), max_size=4)


@given(st.lists(st.tuples(st.lists(_PIECE, max_size=3), _PIECE | st.none()), max_size=6))
def test_the_tokens_of_a_stream_make_the_whole_text(shared: Running, given: list[tuple[list[str], str | None]]) -> None:
    """Also where a text comes later than its tokens, or with none."""
    pieces = [(ids, "".join(ids) if text is None else text) for ids, text in given]
    num_tokens = sum(len(ids) for ids, _ in pieces)
    shared.reset().router.script = says(pieces)
    whole = ask(shared, {"details": True}).json()
    assert whole["generated_text"] == "".join(text for _, text in pieces)
    assert len(whole["details"]["tokens"]) == whole["details"]["generated_tokens"] == num_tokens
    events = events_of(ask(shared, path="/generate_stream"))
    assert [event["index"] for event in events] == list(range(1, max(1, num_tokens) + 1))
    assert [event["generated_text"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["generated_text"] == whole["generated_text"]
    if any(ids for ids, _ in pieces[:1]):  # no text came before the first token
        assert "".join(event["token"]["text"] for event in events) == whole["generated_text"]
    details = events[-1]["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["input_length"], details["seed"]) == (
        *("eos_token", num_tokens, 3),
        5,
    )


@pytest.mark.parametrize(
    ("reason", "by", "told"), [("stop", None, "eos_token"), ("stop", "x", "stop_sequence"), ("length", None, "length")]
)
def test_why_an_answer_ended(server: Running, reason: str, by: str | None, told: str) -> None:
    server.router.script = says([(["a"], "a")], reason, by)
    assert ask(server, {"details": True}).json()["details"]["finish_reason"] == told
    assert server.served().finish_reasons == (told,)


def test_parameters_are_sampling(server: Running) -> None:
    server.router.script = words("a")
    given = {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": ["x"],
        "truncate": 5,
        "watermark": False,
        "best_of": 1,
        "typical_p": 1,
    }
    assert ask(server, given, of_tomorrow=1).headers["x-inferd-ignored-params"] == "of_tomorrow"
    request = server.router.last
    found = request.sampling
    assert (found.max_tokens, found.temperature, found.top_k, found.top_p) == (9, 0.5, 3, 0.9)
    assert (found.repetition_penalty, found.frequency_penalty) == (1.1, 0.3)
    assert (found.seed, found.stop, found.include_stop_str_in_output, found.logprobs) == (7, ("x",), True, None)
    assert (request.truncate_prompt_tokens, request.prompt) == (5, TextPrompt(text="hi"))


@pytest.mark.parametrize(
    ("given", "temperature"), [({}, 0), ({"do_sample": True}, 1), ({"top_k": 5}, 1), ({"temperature": 0.3}, 0.3)]
)
def test_the_most_likely_token_is_taken_unless_sampling_is_asked_for(
    server: Running, given: JSON, temperature: float
) -> None:
    server.router.script = words("a")
    ask(server, given)
    assert server.router.last.sampling.temperature == temperature
    assert server.router.last.sampling.max_tokens == 100


@pytest.mark.parametrize(
    ("grammar", "constraint"),
    [
        ({"type": "json", "value": SCHEMA}, JsonSchema(schema=SCHEMA, at="parameters.grammar.value")),
        ({"type": "json", "value": '{"type": "object"}'}, JsonSchema(schema=SCHEMA, at="parameters.grammar.value")),
        (
            {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}},
            JsonSchema(schema=SCHEMA, at="parameters.grammar.value.schema"),
        ),
        ({"type": "regex", "value": "a+"}, Regex(pattern="a+", at="parameters.grammar.value")),
    ],
)
def test_grammars_bind_the_answer(server: Running, grammar: JSON, constraint: object) -> None:
    server.router.script = words("a")
    ask(server, {"grammar": grammar})
    form = server.router.last.form
    assert form is not None
    assert (form.constraint, form.splits_reasoning) == (constraint, False)


def test_a_body_may_ask_for_a_stream(server: Running) -> None:
    server.router.script = words("a", "b")
    assert events_of(ask(server, stream=True))[-1]["generated_text"] == "ab"
    assert ask(server, {"return_full_text": True}).json() == {"generated_text": "hiab"}


def test_a_watermark_is_asked_for_and_reported(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        report = PromptReport(3, watermark="kgw" if request.sampling.watermark else "")
        last = (Delta(0, "a", finish_reason="stop"),)
        return [Output(request.id, (), report), Output(request.id, last, None, End("done", Usage(3, 1)))]

    server.router.script = script
    for path in ("/generate", "/generate_stream"):
        assert ask(server, {"watermark": True}, path).headers["x-inferd-watermark"] == "kgw"
        assert "x-inferd-watermark" not in ask(server, {"watermark": False}, path).headers


def test_adapter_id_names_the_adapter_that_answers() -> None:
    with running(FakeRouter("base", "other", "support")) as server:
        server.router.statuses[2].parent = "base"
        server.router.script = words("a")
        for extra in NAMED:
            assert ask(server, {"adapter_id": "support"}, **extra).status_code == 200
            assert server.router.last.model == "support"
        reply = ask(server, {"adapter_id": "support"}, model="other")
        assert reply.status_code == 400
        assert "belongs to 'base', and 'model' is \"other\"" in reply.json()["error"]
        assert ask(server, {"adapter_id": "unknown"}, model="base").status_code == 404


@pytest.mark.parametrize(
    ("path", "parameters", "words_of_error"),
    [
        ("/generate", {"max_new_tokens": 0}, "parameters.max_new_tokens must be at least 1"),
        ("/generate", {"temperature": 9}, "parameters.temperature must be"),
        ("/generate", {"top_n_tokens": 99}, "parameters.top_n_tokens must be"),
        ("/generate", {"truncate": -2}, "parameters.truncate must be"),
        ("/generate", {"stop": [""]}, "parameters.stop[0] is empty"),
        ("/generate", {"adapter_id": "tiny"}, "which is a model and no adapter"),
        ("/generate", {"best_of": 2}, "parameters.best_of is not supported"),
        ("/generate", {"typical_p": 0.5}, "parameters.typical_p is not supported"),
        ("/generate_stream", {"decoder_input_details": True}, "In a stream it is not"),
        ("/generate", {"grammar": {"type": "gbnf", "value": ""}}, "parameters.grammar.type must be"),
        ("/generate", {"grammar": {"type": "regex", "value": 1}}, "parameters.grammar.value must be the pattern"),
        ("/generate", {"grammar": {"type": "json", "value": "{"}}, "is a text that is no JSON Schema"),
        ("/generate", {"grammar": {"type": "json", "value": 1}}, "must be a JSON Schema, an object"),
        ("/generate", {"max_new_tokens": "many"}, "parameters.max_new_tokens"),
    ],
)
def test_what_is_wrong_is_named(server: Running, path: str, parameters: JSON, words_of_error: str) -> None:
    reply = ask(server, parameters, path)
    assert reply.status_code == 400
    assert reply.json()["error_type"] == "validation"
    assert words_of_error in reply.json()["error"]
    assert not server.router.streams


def test_errors_have_the_types_of_text_generation_inference(server: Running) -> None:
    assert ask(server, inputs="").json()["error"].startswith("inputs is empty")
    server.router.refusal = Overloaded("The queue is full; try again.")
    reply = ask(server)
    assert (reply.status_code, reply.json()["error_type"]) == (503, "overloaded")
    server.reset()

    def script(request: GenerateRequest) -> list[Any]:
        told = (logprob("a"), logprob("b"))
        return [Output(request.id, (Delta(0, "ab", (), told),), PromptReport(1)), WorkerDied("The worker died.")]

    server.router.script = script
    frames = ask(server, path="/generate_stream").text.removesuffix("\n\n").split("\n\n")
    assert json.loads(frames[-1].removeprefix("data: ")) == {"error": "The worker died.", "error_type": "overloaded"}


def test_the_only_model_that_writes_texts_is_asked_where_none_is_named() -> None:
    router = FakeRouter("one", "two")
    with running(router) as server:
        router.script = words("a")
        assert "name one of: one, two" in ask(server).json()["error"]
        assert ask(server, model="two").status_code == 200
        assert router.last.model == "two"
        assert ask(server, model="three").status_code == 404


def test_older_clients_get_a_whole_answer_in_a_list(server: Running) -> None:
    server.router.script = says([(["a"], "a"), (["b"], "b")])
    assert ask(server, path="/").json() == [{"generated_text": "ab"}]
    assert ask(server).json() == {"generated_text": "ab"}
    assert events_of(ask(server, path="/", stream=True))[-1]["generated_text"] == "ab"


def test_the_server_tells_of_its_model(server: Running) -> None:
    told = server.http.get(f"{server.url}/info").json()
    assert (told["model_id"], told["model_dtype"], told["model_pipeline_tag"]) == ("tiny", "float32", "text-generation")
    assert (told["max_total_tokens"], told["max_input_tokens"], told["router"]) == (128, 127, "inferd")
    assert ask(server, {"stop": ["x"] * told["max_stop_sequences"]}).status_code == 200
    assert ask(server, {"stop": ["x"] * (told["max_stop_sequences"] + 1)}).status_code == 400
    assert server.http.get(f"{server.url}/health").status_code == 200
    with running(FakeRouter("one", "two")) as several:
        assert "name one of: one, two" in several.http.get(f"{several.url}/info").json()["error"]
