"""openai-python, unmodified, against a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)
from tests.clients.conftest import MAX_RUNNING, Server
from tests.clients.scripted_model import ANSWER, ELSE, HELLO, SURE
from tests.worker.watching import until, until_now

GREETING = "".join(HELLO)
FOREVER = {"ignore_eos": True}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(text: str = "hi") -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asynchronous(server: Server, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=max_retries, timeout=60)


# -- answers -----------------------------------------------------------------------------------


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"


def test_a_chat_completion_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ask(), temperature=0)
    assert answer.choices[0].message.content == GREETING
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("hi") + 2
    assert answer.usage.completion_tokens == len(HELLO) + 1  # the end counts
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_completion_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="scripted", messages=ask(), temperature=0, stream=True) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GREETING
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_sdks_accumulating_stream_ends_with_the_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=ask(), temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == GREETING == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(client: openai.OpenAI) -> None:
    chat = list(
        client.chat.completions.create(
            model="scripted", messages=ask(), temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = list(
        client.completions.create(
            model="scripted",
            prompt="a",
            max_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for last, prompt, completion in ((chat[-1], 4, 6), (text[-1], 1, 5)):
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.prompt_tokens == prompt
        assert last.usage.completion_tokens == completion
        assert last.usage.total_tokens == prompt + completion
    assert all(chunk.usage is None for chunk in chat[:-1])
    assert all(chunk.usage is None for chunk in text[:-1])


def test_a_text_completion_continues_its_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="abc", max_tokens=4, temperature=0)
    assert answer.choices[0].text == "defg"
    assert answer.choices[0].finish_reason == "length"
    echoed = client.completions.create(model="scripted", prompt="abc", max_tokens=4, temperature=0, echo=True)
    assert echoed.choices[0].text == "abcdefg"


def test_several_prompts_of_text_or_ids_are_answered_in_order(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="scripted", prompt=["a", "0", "x"], max_tokens=3, temperature=0)
    assert [(c.index, c.text) for c in texts.choices] == [(0, "bcd"), (1, "123"), (2, "yza")]
    tokens = client.post("../tokenize", cast_to=dict[str, list[int]], body={"model": "scripted", "prompt": "5"})
    ids = client.completions.create(model="scripted", prompt=[tokens["tokens"]], max_tokens=3, temperature=0)
    assert [c.text for c in ids.choices] == ["678"]


def test_a_character_is_never_split_between_chunks(client: openai.OpenAI) -> None:
    for _ in range(20):
        with client.completions.create(
            model="scripted", prompt="~", max_tokens=1000, temperature=0, stream=True
        ) as stream:
            pieces = [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == "😀~" * 200
        if len(pieces) > 1:  # on a crowded machine all may come at once
            return
    pytest.fail("never more than one chunk")


def test_async_calls_run_at_once_and_keep_apart(server: Server) -> None:
    async def main() -> list[str]:
        async with asynchronous(server) as client:
            calls = [
                client.completions.create(model="scripted", prompt=start, max_tokens=3, temperature=0)
                for start in "adgjmp"
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == ["bcd", "efg", "hij", "klm", "nop", "qrs"]


def test_an_async_stream_is_the_answer_in_pieces(server: Server) -> None:
    async def main() -> str:
        async with asynchronous(server) as client:
            stream = await client.chat.completions.create(model="scripted", messages=ask(), temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(main()) == GREETING


# -- fields ------------------------------------------------------------------------------------


def test_n_choices_are_independent_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="scripted", messages=ask(), n=3, temperature=2, max_tokens=12, seed=seed, extra_body=FOREVER
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert len(set(draw(1))) == 3
    assert draw(1) == draw(1) != draw(2)


def test_streamed_choices_carry_their_index(client: openai.OpenAI) -> None:
    texts, ends = ["", "", ""], ["", "", ""]
    for chunk in client.chat.completions.create(
        model="scripted", messages=ask(), n=3, temperature=2, seed=1, max_tokens=8, stream=True, extra_body=FOREVER
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    whole = client.chat.completions.create(
        model="scripted", messages=ask(), n=3, temperature=2, seed=1, max_tokens=8, extra_body=FOREVER
    )
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == ["length"] * 3


def test_log_probabilities_of_a_chat_are_the_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=ask(), temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content][: len(HELLO)] == list(HELLO)
    for entry in logprobs.content:
        assert entry.logprob == pytest.approx(SURE, abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([SURE, ELSE], abs=1e-4)
        assert entry.top_logprobs[0].token == entry.token
        assert entry.bytes == list(entry.token.encode())


def test_log_probabilities_of_a_text_cover_its_echoed_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="abz", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "abz"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "z"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([SURE, ELSE], abs=1e-4)
    assert logprobs.top_logprobs[2]["c"] == pytest.approx(SURE, abs=1e-4)


def test_scoring_a_text_gives_one_more_log_probability_even_when_that_is_the_end(client: openai.OpenAI) -> None:
    """Evaluation harnesses score with one generated token and cut it off: it has to be there."""
    for prompt in ("ab", "ab!"):  # after "!" the model ends
        answer = client.completions.create(
            model="scripted", prompt=[prompt], max_tokens=1, temperature=0, echo=True, logprobs=1
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.tokens[: len(prompt)] == list(prompt)
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(prompt) + 1
        assert logprobs.token_logprobs[-1] == pytest.approx(SURE, abs=1e-4)


def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="a", stop=["xyz", "fg"], max_tokens=50, temperature=0)
    assert answer.choices[0].text == "bcde"
    assert answer.choices[0].finish_reason == "stop"
    pieces = client.completions.create(
        model="scripted", prompt="a", stop="fg", max_tokens=50, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == "bcde"


def test_logit_bias_and_penalties_change_the_answer(client: openai.OpenAI) -> None:
    tokens = client.post("../tokenize", cast_to=dict[str, list[int]], body={"model": "scripted", "prompt": "q"})
    biased = client.completions.create(
        model="scripted", prompt="a", max_tokens=3, temperature=0, logit_bias={str(tokens["tokens"][0]): 50}
    )
    assert biased.choices[0].text == "qqq"
    penalised = client.completions.create(
        model="scripted", prompt="0", max_tokens=12, temperature=0, frequency_penalty=2, presence_penalty=2
    )
    assert penalised.choices[0].text == "123456789012"  # a margin of 8 outlasts a penalty of 4
    assert penalised.choices[0].finish_reason == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_limit(client: openai.OpenAI, field: str) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ask(), temperature=0, extra_body={field: 2})
    assert answer.choices[0].message.content == "".join(HELLO[:2])
    assert answer.choices[0].finish_reason == "length"


def test_parts_of_text_are_a_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens >= 4


# -- tools -------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    messages = ask("What is the weather in Paris?")
    first = client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER], temperature=0)
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert first.choices[0].message.tool_calls is not None
    (call,) = first.choices[0].message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert call.function.arguments == '{"city": "Paris"}'
    messages.append(first.choices[0].message.to_dict())  # type: ignore[arg-type]  # as the SDK's examples do
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER], temperature=0)
    assert second.choices[0].message.content == "".join(ANSWER)
    assert second.choices[0].finish_reason == "stop"


def test_a_streamed_tool_call_is_put_together_by_the_sdk(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=ask(), tools=[WEATHER], temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls is not None
    (call,) = final.choices[0].message.tool_calls
    assert call.id
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')


def test_tool_choice_none_answers_in_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=ask(), tools=[WEATHER], tool_choice="none", temperature=0
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


# -- shapes ------------------------------------------------------------------------------------


def test_every_body_is_exactly_of_the_sdks_types(client: openai.OpenAI) -> None:
    """The SDK reads leniently; here its models validate strictly."""
    raw = client.with_raw_response
    Model.model_validate_json(raw.models.retrieve("scripted").text, strict=True)
    for extra in ({}, {"tools": [WEATHER]}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}):
        body = raw.chat.completions.create(model="scripted", messages=ask(), extra_body=extra)
        ChatCompletion.model_validate_json(body.text, strict=True)
        stream = client.chat.completions.create(
            model="scripted",
            messages=ask(),
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for line in stream.response.iter_lines():
            if line.startswith("data: {"):
                ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
    text = raw.completions.create(model="scripted", prompt="a", max_tokens=2)
    Completion.model_validate_json(text.text, strict=True)


# -- errors ------------------------------------------------------------------------------------


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=ask())
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.type == "invalid_request_error"
    assert "gpt-99" in caught.value.message
    assert "scripted" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")
    with pytest.raises(openai.BadRequestError, match="cannot embed"):
        client.embeddings.create(model="scripted", input="x")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", 3, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", -1, "top_p"),
        ("n", 0, "n"),
        ("max_tokens", 10**9, "messages"),
        ("no_such_field", 1, "no_such_field"),
        ("messages", [], "messages"),
        ("messages", [{"role": "user", "content": "x" * 70_000}], "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_is_a_bad_request_that_names_its_field(
    client: openai.OpenAI, field: str, value: object, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=ask(), stream=stream, extra_body={field: value})
    assert caught.value.type == "invalid_request_error"
    if field != "max_tokens":
        assert caught.value.param == param
    assert caught.value.request_id


def test_a_call_can_be_forced(client: openai.OpenAI) -> None:
    """The messages end with a tool's result, after which the model would answer in text."""
    messages: list[Any] = [
        *ask(),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        for stream in (False, True):
            arguments: Any = {
                "model": "scripted", "messages": messages, "tools": [WEATHER], "tool_choice": choice, "temperature": 0,
                "max_tokens": 400, "parallel_tool_calls": False,
            }  # fmt: skip
            if stream:
                with client.chat.completions.stream(**arguments) as events:
                    message = events.get_final_completion().choices[0]
            else:
                message = client.chat.completions.create(**arguments).choices[0]
            assert not message.message.content
            assert message.message.tool_calls is not None
            (call,) = message.message.tool_calls
            assert call.type == "function"
            assert call.function.name == "get_weather"


def test_what_would_change_the_answer_and_is_not_supported_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="scripted", messages=ask(), tools=[WEATHER], tool_choice={"type": "custom", "custom": {"name": "x"}}
        )
    assert caught.value.param == "tool_choice.type"


def test_a_passed_deadline_is_a_status_error_408(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model="scripted",
            prompt="a",
            max_tokens=60_000,
            extra_body=FOREVER,
            extra_headers={"x-inferd-timeout": "0.2"},
        )
    assert caught.value.status_code == 408
    assert caught.value.type == "timeout_error"


def test_a_dead_port_is_a_connection_error() -> None:
    with (
        openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def test_a_request_id_given_is_the_responses_and_the_logs(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=ask(), extra_headers={"x-request-id": "of-my-own"}
    )
    assert answer._request_id == "of-my-own"
    until_now(lambda: len(server.logged("of-my-own")) == 1, "the request is logged once", 5)


# -- leaving -----------------------------------------------------------------------------------


def kv_is_free(server: Server) -> bool:
    return server.metric("inferd_kv_usage_ratio") == 0 and server.metric("inferd_kv_blocks", state="used") == 0


def test_closing_a_stream_cancels_the_request_and_frees_its_blocks(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="scripted",
        prompt="a",
        max_tokens=60_000,
        stream=True,
        extra_body=FOREVER,
        extra_headers={"x-request-id": "closed-early"},
    )
    for _ in range(40):
        next(stream)
    until_now(lambda: server.metric("inferd_kv_blocks", state="used") > 0, "blocks are in use", 5)
    stream.close()
    until_now(lambda: kv_is_free(server), "all blocks are free", 1.0)
    until_now(lambda: len(server.logged("closed-early")) == 1, "the request is logged", 5)
    (line,) = server.logged("closed-early")
    assert (line["status"], line["outcome"]) == (499, "cancelled")
    assert line["usage"]["completion_tokens"] > 0, "what it had cost by then is in the log"
    assert line["timings"]["first_token"] > 0


def test_a_cancelled_task_cancels_the_request(server: Server) -> None:
    async def main() -> None:
        async with asynchronous(server) as client:
            call = asyncio.create_task(
                client.completions.create(model="scripted", prompt="a", max_tokens=60_000, extra_body=FOREVER)
            )
            await until(lambda: not kv_is_free(server), "the request runs")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(main())
    until_now(lambda: kv_is_free(server), "all blocks are free", 1.0)


def test_a_client_that_times_out_gets_its_error_and_leaves_nothing_behind(
    server: Server, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="scripted", prompt="a", max_tokens=60_000, extra_body=FOREVER
        )
    until_now(lambda: kv_is_free(server), "all blocks are free", 1.0)


# -- retries -----------------------------------------------------------------------------------


def test_a_full_queue_is_an_internal_server_error_and_retrying_gets_through(server: Server) -> None:
    async def main() -> None:
        async with asynchronous(server) as client, asynchronous(server, max_retries=3) as patient:
            endless = {"model": "scripted", "prompt": "a", "max_tokens": 60_000, "extra_body": FOREVER}
            blocking: list[asyncio.Task[Completion]] = []
            refused: openai.InternalServerError | None = None
            while refused is None:
                assert len(blocking) < 10 * MAX_RUNNING
                blocking.append(asyncio.create_task(client.completions.create(**endless)))  # type: ignore[call-overload]
                done, _ = await asyncio.wait(blocking, timeout=0.05)
                for task in done:
                    blocking.remove(task)
                    error = task.exception()
                    assert isinstance(error, openai.InternalServerError)
                    refused = error
            assert refused.status_code == 503
            assert refused.type == "server_error"
            assert 1 <= int(refused.response.headers["retry-after"]) <= 120  # what the SDK heeds
            headers = {"x-request-id": "retried"}
            retrying = asyncio.create_task(
                patient.completions.create(
                    model="scripted", prompt="a", max_tokens=3, temperature=0, extra_headers=headers
                )
            )
            await until(lambda: len(server.logged("retried")) == 1, "the first try is refused")
            for task in blocking:
                task.cancel()
            await asyncio.gather(*blocking, return_exceptions=True)
            answer = await retrying
            assert answer.choices[0].text == "bcd"

    asyncio.run(main())
    until_now(lambda: len(server.logged("retried")) == 2, "the second try is logged", 5)
    assert [line["status"] for line in server.logged("retried")] == [503, 200]


def test_a_bad_request_is_not_tried_again(server: Server) -> None:
    with (
        openai.OpenAI(base_url=server.api, api_key="none", max_retries=5) as client,
        pytest.raises(openai.BadRequestError),
    ):
        client.chat.completions.create(
            model="scripted", messages=ask(), temperature=3, extra_headers={"x-request-id": "bad-once"}
        )
    until_now(lambda: len(server.logged("bad-once")) == 1, "the request is logged", 5)


def test_a_worker_killed_under_a_stream_is_an_api_error_and_the_next_call_is_served(
    server: Server, client: openai.OpenAI
) -> None:
    stream = client.completions.create(model="scripted", prompt="a", max_tokens=60_000, stream=True, extra_body=FOREVER)
    next(stream)
    (worker,) = server.workers
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.type == "server_error"
    assert caught.value.code == "worker_died"
    answer = client.completions.create(model="scripted", prompt="a", max_tokens=3, temperature=0)
    assert answer.choices[0].text == "bcd"
