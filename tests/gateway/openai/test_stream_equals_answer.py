"""The law of streaming: its pieces, put together, are the answer that is given in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.fakes import Running, logprob, post, running, sse

from inferd.types import Delta, End, GenerateRequest, Output, PromptReport, Usage

PIECES = st.text(max_size=4) | st.sampled_from(
    ["<tool_call>", '{"name": "f"}', "</tool_call>", "<tool", "_call>", "\n", "data: [DONE]\n\n", "\u2028", ""]
)
STEPS = st.lists(st.tuples(st.integers(0, 1), PIECES.map(lambda s: s.encode("utf-8", "ignore").decode())), max_size=10)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


def script_of(steps: list[tuple[int, str]], finish: str) -> Any:
    def script(request: GenerateRequest) -> list[Output]:
        wants = request.sampling.logprobs
        outputs = [
            Output(
                request.id,
                (Delta(index, text, (len(text),), (logprob(text, top=wants or 0),) if wants is not None else None),),
                PromptReport(1) if number == 0 else None,
            )
            for number, (index, text) in enumerate(steps)
        ]
        ends = (Delta(0, finish_reason="stop"), Delta(1, finish_reason=finish, stop_reason="x"))  # type: ignore[arg-type]
        return [*outputs, Output(request.id, ends, None, End("done", Usage(1, len(steps))))]

    return script


@given(STEPS, st.sampled_from(["stop", "length"]), st.booleans(), st.booleans(), st.booleans())
def test_a_streamed_chat_is_the_collected_chat(
    server: Running, steps: list[tuple[int, str]], finish: str, tools: bool, logprobs: bool, ids: bool
) -> None:
    server.router.script = script_of(steps, finish)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "n": 2, "return_token_ids": ids}
    if tools:
        body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 1}
    whole = post(server, "/v1/chat/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *frames, last, done = sse(post(server, "/v1/chat/completions", {**body, **options}).text)
    assert done == "data: [DONE]"
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == choice["index"]]
        deltas = [part["delta"] for part in own]
        assert "".join(delta.get("content", "") for delta in deltas) == (choice["message"]["content"] or "")
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        expected = choice["message"].get("tool_calls", [])
        assert [call["function"] for call in calls] == [call["function"] for call in expected]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        streamed = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert streamed == (choice["logprobs"]["content"] if logprobs else [])
        assert [i for part in own for i in part.get("token_ids", [])] == choice.get("token_ids", [])


@given(STEPS, st.sampled_from(["stop", "length"]), st.booleans(), st.booleans(), st.integers(1, 3))
def test_streamed_completions_are_the_collected_ones(
    server: Running, steps: list[tuple[int, str]], finish: str, logprobs: bool, echo: bool, num_prompts: int
) -> None:
    server.router.script = script_of(steps, finish)
    body: dict[str, Any] = {
        "prompt": ["prompt"] * num_prompts,
        "n": 2,
        "echo": echo,
        "logprobs": 1 if logprobs else None,
    }
    whole = post(server, "/v1/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *frames, last, _ = sse(post(server, "/v1/completions", {**body, **options}).text)
    assert last["usage"] == whole["usage"]
    assert len(whole["choices"]) == 2 * num_prompts
    for choice in whole["choices"]:
        own = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        if logprobs:
            for name, values in choice["logprobs"].items():
                assert [x for part in own if part["logprobs"] for x in part["logprobs"][name]] == values
