"""Chat completions over a real socket, with the public client and with bare HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import openai
import pytest
from tests.gateway.fakes import FakeRouter, Running, logprob, post, running, sse, words

from inferd.answer_form import AnswerForm, ToolUse
from inferd.types import CallDelta, Chat, Delta, End, Failure, GenerateRequest, Output, PromptReport, Usage

HI = [{"role": "user", "content": "hi"}]


def chat_of(server: Running) -> Chat:
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    return prompt


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_the_public_client_gets_a_message(server: Running) -> None:
    with client(server) as api:
        reply = api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == "Hello world!"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 3, 6)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    assert reply.system_fingerprint == "fp_fake"
    assert reply.id.startswith("chatcmpl-")


def test_the_public_client_streams(server: Running) -> None:
    with client(server) as api:
        chunks = list(
            api.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                n=2,
                stream_options={"include_usage": True},
            )
        )
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert own[0].delta.content == ""
        assert "".join(choice.delta.content or "" for choice in own) == "Hello world!"
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_asynchronous_client_streams(server: Running) -> None:
    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
            pieces = await api.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])

    assert asyncio.run(text()) == "Hello world!"


def test_langchain_gets_a_message_and_a_stream(server: Running) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="none", model="tiny", max_retries=0)
    assert model.invoke("hi").content == "Hello world!"
    assert "".join(chunk.content for chunk in model.stream("hi")) == "Hello world!"


def test_a_streams_bytes_are_exact(server: Running) -> None:
    server.router.script = words("a\n\n", "é💡", '"')
    reply = post(server, "/v1/chat/completions", {"messages": HI, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    frames = sse(reply.text)
    assert frames[-1] == "data: [DONE]"
    assert [frame["choices"][0]["delta"].get("content") for frame in frames[:-1]] == ["", "a\n\n", "é💡", '"']
    assert all("usage" not in frame for frame in frames[:-1])


def test_usage_comes_with_every_frame_when_asked_for(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = sse(post(server, "/v1/chat/completions", {"messages": HI, "stream": True, "stream_options": options}).text)
    counts = [frame["usage"]["completion_tokens"] for frame in frames[:-1]]
    assert counts == [1, 1, 2, 3, 3]
    assert all(frame["usage"]["prompt_tokens"] == 3 for frame in frames[:-1])


def test_probabilities_are_shown_in_both_forms(server: Running) -> None:
    server.router.script = words("é", "b")
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    choice = post(server, "/v1/chat/completions", body).json()["choices"][0]
    assert choice["token_ids"] == [100, 101]
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "é"
    assert first["bytes"] == [0xC3, 0xA9]
    assert [top["token"] for top in first["top_logprobs"]] == ["é", "alt1"]
    frames = sse(post(server, "/v1/chat/completions", {**body, "stream": True}).text)[:-1]
    assert frames[0]["prompt_token_ids"] == [1, 2, 3]
    streamed = [entry for f in frames for entry in (f["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert [i for f in frames for i in f["choices"][0].get("token_ids", [])] == [100, 101]


def test_impossible_probabilities_are_still_json(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        items = (logprob("a", float("-inf"), 2), logprob("b", float("nan"), 2))
        delta = Delta(0, "ab", (1, 2), items, "stop")
        return [Output(request.id, (delta,), PromptReport(1), End("done", Usage(1, 2)))]

    server.router.script = script
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    content = post(server, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-9999.0, -9999.0]


def test_tokens_can_be_shown_as_ids(server: Running) -> None:
    body = {"messages": HI, "logprobs": True, "return_tokens_as_token_ids": True}
    content = post(server, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "token_id:7"


def test_prompt_probabilities_have_vllms_shape(server: Running) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": HI, "prompt_logprobs": 1}).json()
    assert reply["prompt_logprobs"][0] is None
    assert reply["prompt_logprobs"][1] == {"7": {"logprob": -2.0, "rank": 1, "decoded_token": "t2"}}


def test_messages_reach_the_template_as_it_expects_them(server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"text": "d"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    assert post(server, "/v1/chat/completions", body).status_code == 200
    prompt = chat_of(server)
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert prompt.messages[1]["content"] == "one\ntwo"
    assert prompt.messages[2]["content"] == ""
    assert prompt.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert prompt.messages[3] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert prompt.template_kwargs == {"enable_thinking": False}
    assert prompt.documents == [{"text": "d"}]
    assert prompt.tools is not None
    assert prompt.add_generation_prompt


def test_continuing_a_message_adds_no_generation_prompt(server: Running) -> None:
    post(server, "/v1/chat/completions", {"messages": HI, "continue_final_message": True})
    assert chat_of(server).continue_final_message
    assert not chat_of(server).add_generation_prompt


def test_every_knob_reaches_the_engine_and_is_marked_as_the_clients(server: Running) -> None:
    knobs = {
        "max_completion_tokens": 7, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"5": -100},
        "bad_words": ["no"], "allowed_token_ids": [1, 2], "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": True,
        "include_stop_str_in_output": True, "n": 2, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "length_penalty": 1.5, "watermark": True,
    }  # fmt: skip
    extra = {"priority": -1, "timeout": 9, "cache_salt": "s", "truncate_prompt_tokens": 10, "add_special_tokens": True}
    reply = post(server, "/v1/chat/completions", {"messages": HI, **knobs, **extra}, **{"x-inferd-timeout": "2.5"})
    assert reply.status_code == 200, reply.text
    request = server.router.last
    expected = {**knobs, "max_tokens": 7, "logit_bias": {5: -100.0}}
    del expected["max_completion_tokens"]
    for name, value in expected.items():
        assert getattr(request.sampling, name) == (tuple(value) if isinstance(value, list) else value), name
    assert set(request.explicit) == set(expected)
    assert (request.priority, request.cache_salt, request.truncate_prompt_tokens) == (-1, "s", 10)
    assert request.deadline_s == 2.5
    assert chat_of(server).add_special_tokens


def test_absent_and_null_fields_are_defaults_and_not_the_clients(server: Running) -> None:
    nulls = {
        "temperature": None,
        "top_k": None,
        "stop": None,
        "logit_bias": None,
        "tools": None,
        "user": None,
        "audio": None,
    }
    reply = post(server, "/v1/chat/completions", {"messages": HI, **nulls})
    assert reply.status_code == 200
    assert "x-inferd-ignored-params" not in reply.headers
    assert server.router.last.explicit == ()
    assert server.router.last.sampling.max_tokens is None


def test_harmless_fields_are_ignored_and_listed(server: Running) -> None:
    body = {"messages": HI, "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    reply = post(server, "/v1/chat/completions", body)
    assert reply.status_code == 200
    assert set(reply.headers["x-inferd-ignored-params"].split(",")) == {"user", "store", "metadata", "service_tier"}


def test_unknown_keys_within_messages_and_tools_are_listed_and_change_nothing(server: Running) -> None:
    asked = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": asked}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    part = {"type": "text", "text": "x"}
    result = {"role": "tool", "tool_call_id": "c", "content": [part]}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"p": {}}}}
    tool = {"type": "function", "function": function}
    assert (
        post(server, "/v1/chat/completions", {"messages": [*HI, message, result], "tools": [tool]}).status_code == 200
    )
    plain = server.router.last.prompt
    marked_call = {**call, "function": {**asked, "parsed": 1}, "index": 1}
    sent = {
        "messages": [
            {**HI[0], "weight": 1},
            {**message, "annotations": [], "audio": None, "tool_calls": [marked_call], "weight": 2},
            {**result, "content": [{**part, "cache_control": {"type": "ephemeral"}}, "y"]},
        ],
        "tools": [{**tool, "cache_control": {"type": "ephemeral"}, "function": {**function, "kind": "k"}}],
    }
    reply = post(server, "/v1/chat/completions", sent)
    assert reply.status_code == 200
    assert reply.headers["x-inferd-ignored-params"].split(",") == [
        "messages.weight",
        "messages.tool_calls.function.parsed",
        "messages.tool_calls.index",
        "messages.content.cache_control",
        "tools.function.kind",
        "tools.cache_control",
    ]
    told = server.router.last.prompt
    assert isinstance(told, Chat)
    assert isinstance(plain, Chat)
    assert told.tools == plain.tools
    assert told.messages[:2] == plain.messages[:2]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well.\nNo."),
        ({"content": [{"type": "text", "text": "Well."}], "refusal": "No."}, "Well.\nNo."),
        ({"content": "Well.", "refusal": None}, "Well."),
    ],
)
def test_the_refusal_of_an_assistant_message_is_a_part_of_its_text(
    server: Running, fields: dict[str, object], text: str
) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": [*HI, {"role": "assistant", **fields}, *HI]})
    assert reply.status_code == 200
    assert "x-inferd-ignored-params" not in reply.headers
    asked = server.router.last.prompt
    assert isinstance(asked, Chat)
    assert asked.messages[1]["content"] == text


def test_the_limits_of_a_number_are_told_exactly(server: Running) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": HI, "seed": 2**63})
    assert f"at least {-(2**63)} and at most {2**63 - 1}, not {2**63}." in reply.json()["error"]["message"]


def test_keys_without_effect_where_they_stand_are_listed(server: Running) -> None:
    part = {"type": "text", "text": "x", "refusal": "No."}
    tool = {"type": "function", "function": {"name": "f"}, "x": 1}
    sent = {"messages": [{"role": "user", "content": [part], "refusal": "No."}], "tools": [tool]}
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = post(server, path, sent)
        assert reply.status_code == 200, reply.text
        listed = reply.headers["x-inferd-ignored-params"]
        assert listed == "messages.content.refusal,tools.x,messages.refusal"


def test_a_call_of_another_type_is_refused(server: Running) -> None:
    call = {"id": "c", "type": "other", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = post(server, "/v1/chat/completions", {"messages": [*HI, message]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[1].tool_calls[0].type"


@pytest.mark.parametrize("name", ["function_call", "audio", "prefix", "partial"])
def test_keys_of_messages_that_would_change_the_answer_are_refused(server: Running, name: str) -> None:
    message = {"role": "assistant", "content": "Once"}
    assert post(server, "/v1/chat/completions", {"messages": [*HI, {**message, name: None}]}).status_code == 200
    reply = post(server, "/v1/chat/completions", {"messages": [*HI, {**message, name: {"id": "a"}}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"messages[1].{name}"
    assert reply.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("content", [None, "", []])
def test_a_refusal_is_the_text_of_its_message(server: Running, content: object) -> None:
    message = {"role": "assistant", "content": content, "refusal": "I will not."}
    assert post(server, "/v1/chat/completions", {"messages": [*HI, message, *HI]}).status_code == 200
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[1] == {"role": "assistant", "content": "I will not."}


def parts(*deltas: Delta) -> Callable[[GenerateRequest], list[Output]]:
    """A script that gives each delta in an output of its own."""

    def script(request: GenerateRequest) -> list[Output]:
        outputs = [Output(request.id, (delta,)) for delta in deltas]
        return [*outputs, Output(request.id, end=End("done", Usage(3, 9, 0, 4)))]

    return script


def test_calls_and_reasoning_are_the_same_streamed_or_not(server: Running) -> None:
    server.router.script = parts(
        Delta(0, reasoning="Hm, "),
        Delta(0, reasoning="so."),
        Delta(0, "Let me see."),
        Delta(0, calls=(CallDelta(0, "add", '{"a": '),)),
        Delta(0, calls=(CallDelta(0, None, "1}"), CallDelta(1, "add", ""))),
        Delta(0, calls=(CallDelta(1, None, "{}"),), finish_reason="stop"),
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    body = {"messages": HI, "tools": tools}
    reply = post(server, "/v1/chat/completions", body).json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Hm, so."
    functions = [{"name": "add", "arguments": '{"a": 1}'}, {"name": "add", "arguments": "{}"}]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == functions
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert server.router.last.form == AnswerForm(tools=ToolUse())
    with (
        client(server) as api,
        api.chat.completions.stream(model="tiny", **body) as stream,  # type: ignore[arg-type]
    ):
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert final.message.content == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, so."
    calls = final.message.tool_calls or []
    assert [{"name": c.function.name, "arguments": c.function.arguments} for c in calls] == functions
    assert len({call.id for call in calls}) == 2
    assert final.finish_reason == "tool_calls"
    # The name, the id and the type of a call are in its first part and in no other.
    named = [part for delta in deltas for part in delta.tool_calls or [] if part.id is not None]
    assert [(part.index, part.function.name, part.type) for part in named if part.function is not None] == [
        (0, "add", "function"),
        (1, "add", "function"),
    ]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, AnswerForm(tools=ToolUse())),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, AnswerForm(tools=ToolUse(is_parallel=False))),
        ({"tool_choice": "none"}, AnswerForm()),
        ({"tools": []}, AnswerForm()),
    ],
)
def test_tools_are_told_to_the_worker(server: Running, fields: dict[str, object], form: AnswerForm) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert post(server, "/v1/chat/completions", {"messages": HI, "tools": tools, **fields}).status_code == 200
    assert server.router.last.form == form


def test_a_failure_before_the_first_token_is_a_status(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        failure = Failure(
            "context_length_exceeded", "The prompt has 200 tokens.", "messages", "context_length_exceeded"
        )
        return [Output(request.id, end=End("refused", failure=failure))]

    server.router.script = script
    for stream in (False, True):
        reply = post(server, "/v1/chat/completions", {"messages": HI, "stream": stream})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert reply.json()["error"]["param"] == "messages"


def test_a_failure_after_the_first_token_is_an_event_and_the_end(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        failure = Failure("worker_died", "The replica is gone.", None, "worker_died")
        return [
            Output(request.id, (Delta(0, "par"),), PromptReport(1)),
            Output(request.id, (Delta(0, "tial", finish_reason="error"),), end=End("failed", failure=failure)),
        ]

    server.router.script = script
    reply = post(server, "/v1/chat/completions", {"messages": HI, "stream": True})
    frames = sse(reply.text)
    assert reply.status_code == 200
    assert frames[-1]["error"]["code"] == "worker_died"
    assert frames[-2]["choices"][0]["delta"]["content"] == "tial"
    assert frames[-2]["choices"][0]["finish_reason"] is None
    served = server.served()
    assert (served.outcome, served.error_code, served.status) == ("failed", "worker_died", 200)
    with client(server) as api, pytest.raises(openai.APIError):
        list(api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True))
    assert post(server, "/v1/chat/completions", {"messages": HI}).status_code == 503


def test_the_request_id_is_taken_or_made_and_always_given(server: Running) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": HI}, **{"x-request-id": "abc.1:2_3-4"})
    assert reply.headers["x-request-id"] == "abc.1:2_3-4"
    assert reply.json()["id"].startswith("chatcmpl-abc.1:2_3-4-")
    again = post(server, "/v1/chat/completions", {"messages": HI}, **{"x-request-id": "abc.1:2_3-4"})
    assert again.json()["id"] != reply.json()["id"]
    for bad in ("a b", "x" * 129, "a;b", "a\tb"):
        reply = post(server, "/v1/chat/completions", {"messages": HI}, **{"x-request-id": bad})
        assert reply.headers["x-request-id"] != bad
        assert reply.headers["x-request-id"].isalnum()
    reply = post(server, "/v1/chat/completions", {"messages": HI, "request_id": "mine"})
    assert reply.headers["x-request-id"] == "mine"


def test_the_model_may_be_left_out_only_where_one_is_served() -> None:
    with running(FakeRouter("a", "b/c")) as server:
        reply = post(server, "/v1/chat/completions", {"messages": HI})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        assert "b/c" in reply.json()["error"]["message"]
        reply = post(server, "/v1/chat/completions", {"messages": HI, "model": "b/c"})
        assert reply.json()["model"] == "b/c"
        reply = post(server, "/v1/chat/completions", {"messages": HI, "model": "d"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert server.served().error_code is not None


def test_one_event_per_request_says_what_happened(server: Running) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": HI, "stream": True})
    served = server.served()
    assert served.request_id == reply.headers["x-request-id"]
    assert (served.route, served.status, served.stream, served.model) == ("/v1/chat/completions", 200, True, "tiny")
    assert (served.outcome, served.finish_reasons) == ("done", ("stop",))
    assert served.usage == Usage(3, 3, 1)
    assert served.response_bytes == len(reply.content)
    assert len(server.events) == 1
    assert server.router.streams[-1].closed.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_was_loading_when_asked_still_has_its_fingerprint(server: Running, stream: bool) -> None:
    status = server.router.statuses[0]
    status.info, loaded = None, status.info

    def script(request: GenerateRequest) -> Sequence[Output]:
        status.info = loaded
        return words("late")(request)  # type: ignore[return-value]

    server.router.script = script
    reply = post(server, "/v1/chat/completions", {"messages": HI, "stream": stream})
    answers = sse(reply.text)[:-1] if stream else [reply.json()]
    assert {answer["system_fingerprint"] for answer in answers} == {"fp_fake"}
