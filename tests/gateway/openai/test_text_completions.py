"""Text completions: every kind of prompt, echo, and prompt scoring as lm-eval asks for it."""

from __future__ import annotations

import openai
import pytest
from tests.gateway.fakes import Running, post, sse, words

from inferd.errors import Unavailable, WorkerDied
from inferd.types import Delta, End, Failure, GenerateRequest, Output, PromptReport, TextPrompt, TokenPrompt, Usage


def test_the_public_client_gets_text_and_a_stream(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
        reply = api.completions.create(model="tiny", prompt="hi")
        assert reply.choices[0].text == "Hello world!"
        assert reply.object == "text_completion"
        pieces = api.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "Hello world!"


def test_sixteen_tokens_are_made_unless_asked_otherwise(server: Running) -> None:
    post(server, "/v1/completions", {"prompt": "hi"})
    assert server.router.last.sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "kinds"),
    [("a", [TextPrompt]), (["a", "b"], [TextPrompt] * 2), ([1, 2], [TokenPrompt]), ([[1], [2, 3]], [TokenPrompt] * 2)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt_is_taken(server: Running, prompt: object, kinds: list[type], stream: bool) -> None:
    reply = post(server, "/v1/completions", {"prompt": prompt, "n": 2, "stream": stream})
    assert reply.status_code == 200, reply.text
    assert [type(s.request.prompt) for s in server.router.streams] == kinds
    assert len({s.request.id for s in server.router.streams}) == len(kinds)
    texts = dict.fromkeys(range(2 * len(kinds)), "")
    if stream:
        for frame in sse(reply.text)[:-1]:
            texts[frame["choices"][0]["index"]] += frame["choices"][0]["text"]
    else:
        for choice in reply.json()["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(2 * len(kinds)), "Hello world!")


def test_a_prompt_is_scored_without_generating(server: Running) -> None:
    body = {"prompt": [[5, 6, 7]], "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    assert server.router.last.sampling.max_tokens == 0
    assert server.router.last.sampling.prompt_logprobs == 2
    assert choice["text"] == "t5t6t7"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["t5", "t6", "t7"]
    assert logprobs["token_logprobs"] == [None, -6.0, -7.0]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][1]) == {"t6", "alt1"}
    assert logprobs["text_offset"] == [0, 2, 4]


def test_lm_evals_request_yields_the_prompts_probabilities_then_the_tokens(server: Running) -> None:
    server.router.script = words("Z", finish="length")
    body = {
        "model": "tiny",
        "prompt": [[5, 6, 7]],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "seed": 1234,
    }
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"][1:-1] == [-6.0, -7.0]
    assert choice["logprobs"]["tokens"][-1] == "Z"
    for value, top in zip(
        choice["logprobs"]["token_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True
    ):
        assert max(top.values()) == value


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_streams_what_it_answers_at_once(server: Running, logprobs: int | None) -> None:
    body = {"prompt": "t1t2t3", "echo": True, "logprobs": logprobs}
    whole = post(server, "/v1/completions", body).json()["choices"][0]
    frames = sse(post(server, "/v1/completions", {**body, "stream": True}).text)[:-1]
    assert "".join(frame["choices"][0]["text"] for frame in frames) == whole["text"] == "t1t2t3Hello world!"
    if logprobs is not None:
        for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [x for frame in frames for x in frame["choices"][0]["logprobs"][part]]
            assert streamed == whole["logprobs"][part]


def test_offsets_point_into_the_text(server: Running) -> None:
    body = {"prompt": "t1t2t3", "echo": True, "logprobs": 0}
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_usage_adds_up_over_prompts(server: Running) -> None:
    body = {"prompt": ["a", "b", "c"], "stream": True, "stream_options": {"include_usage": True}}
    assert post(server, "/v1/completions", {"prompt": ["a", "b", "c"]}).json()["usage"]["total_tokens"] == 18
    assert sse(post(server, "/v1/completions", body).text)[-2]["usage"]["total_tokens"] == 18
    assert server.served().usage == Usage(9, 9, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_prompt_fails_the_request_and_closes_the_others(server: Running, stream: bool) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        if isinstance(request.prompt, TextPrompt) and request.prompt.text == "bad":
            return [Output(request.id, end=End("refused", failure=Failure("invalid_request", "No.", "prompt")))]
        return []

    server.router.script = script
    reply = post(server, "/v1/completions", {"prompt": ["good", "bad"], "stream": stream})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "No.")
    assert all(stream.closed.wait(5) for stream in server.router.streams)


def test_a_stream_that_raises_midway_ends_with_an_error_for_several_prompts(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output | WorkerDied]:
        return [Output(request.id, (Delta(0, "a"),), PromptReport(1)), WorkerDied("The replica is gone.")]

    server.router.script = script
    frames = sse(post(server, "/v1/completions", {"prompt": ["x", "y"], "stream": True}).text)
    assert frames[-1]["error"]["code"] == "worker_died"


def test_a_refusal_is_a_status_with_a_time_to_come_back(server: Running) -> None:
    server.router.refusal = Unavailable("The model is loading.")
    reply = post(server, "/v1/completions", {"prompt": "a"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.headers.get("connection") != "close"
    server.router.draining = True
    assert post(server, "/v1/completions", {"prompt": "a"}).headers["connection"] == "close"


def test_ids_are_returned_when_asked_for(server: Running) -> None:
    body = {"prompt": [4, 5], "return_token_ids": True, "prompt_logprobs": 0}
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([4, 5], [100, 101, 102])
    assert choice["prompt_logprobs"][0] is None


def test_text_becomes_ids_and_ids_become_text(server: Running) -> None:
    reply = post(server, "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert reply == {"count": 2, "max_model_len": 128, "tokens": [97, 98], "token_strs": ["a", "b"]}
    reply = post(server, "/tokenize", {"messages": [{"role": "user", "content": "ab"}], "model": "tiny"}).json()
    assert reply["tokens"] == [97, 98]
    assert post(server, "/detokenize", {"tokens": [1, 2]}).json() == {"prompt": "t1t2"}
    assert post(server, "/tokenize", {}).status_code == 400
    assert post(server, "/tokenize", {"prompt": "a", "messages": []}).status_code == 400
    assert post(server, "/detokenize", {"tokens": [-1]}).json()["error"]["param"] == "tokens[0]"
    assert post(server, "/detokenize", {"tokens": [1], "model": "x"}).status_code == 404
