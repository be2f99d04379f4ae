"""An answer that another worker goes on with is, to the byte, the answer that one worker would have given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inferd.config import KVCacheConfig, ModelConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.errors import InvalidRequest
from inferd.native.paged_attention import native_available
from inferd.native.triton import switch
from inferd.types import Continuation, GenerateRequest, Output, SamplingParams, TextPrompt

CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.0},  # the seed is the worker's own, and told in the first part
    {"temperature": 1.5, "seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.2, "seed": 3, "min_tokens": 12, "stop": ("e", "a b", "\u00fc")},
    {"temperature": 1.3, "seed": 8, "stop": ("th", "in", "\u00e4n"), "include_stop_str_in_output": True},
    {"temperature": 2.0, "seed": 21, "logprobs": 2},  # unlikely tokens: bytes of unfinished characters among them
    {"temperature": 2.0, "seed": 22, "min_tokens": 30, "logit_bias": {65: 4.0}, "bad_words": ("e",)},
    {"temperature": 0.8, "seed": 2, "ignore_eos": True, "skip_special_tokens": False, "top_p": 0.9, "top_k": 20},
]
PROMPTS = ["Hello", "The quick brown fox jumps over", "Zw\u00f6lf Boxk\u00e4mpfer \U0001f600"]


def load(folder: Path, *, attention: str = "auto") -> Engine:
    config = ModelConfig(
        source=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=128,
        attention=attention,  # type: ignore[arg-type]
        kv_cache=KVCacheConfig(block_size=4, num_blocks=256),
    )
    return create_backend("tiny", config, lambda phase, done, total: None)


@pytest.fixture(scope="module")
def workers(tiny_model: Path) -> tuple[Engine, Engine]:
    """Two replicas of one model."""
    return load(tiny_model), load(tiny_model)


def request(number: int, options: dict[str, Any], prompt: str) -> GenerateRequest:
    fields = {"max_tokens": 40, **options}
    sampling = SamplingParams(**fields)
    return GenerateRequest(
        id=f"r{number}", model="tiny", prompt=TextPrompt(text=prompt), sampling=sampling, explicit=tuple(fields)
    )


def outputs(engine: Engine, asked: GenerateRequest) -> Iterator[Output]:
    engine.add(engine.prepare(asked), 0.0)
    while engine.due(0.0) is not None:
        yield from engine.step(0.0)[0]


def text_of(parts: list[Output]) -> str:
    return "".join(delta.text for part in parts for delta in part.deltas)


def ids_of(parts: list[Output]) -> list[int]:
    return [token for part in parts for delta in part.deltas for token in delta.token_ids]


def logprobs_of(parts: list[Output]) -> list[Any]:
    return [entry for part in parts for delta in part.deltas for entry in delta.logprobs or ()]


def ending(parts: list[Output]) -> tuple[object, ...]:
    last, end = parts[-1].deltas[-1], parts[-1].end
    assert end is not None
    return last.finish_reason, last.stop_reason, end.outcome, end.usage.prompt_tokens, end.usage.completion_tokens


def cut(first: Engine, second: Engine, asked: GenerateRequest, after: int) -> list[Output]:
    """``after`` outputs of the one worker, the rest from the other."""
    seen: list[Output] = []
    for output in outputs(first, asked):
        seen.append(output)
        if len(seen) == after and output.end is None:
            first.cancel(asked.id)
            break
    for _ in range(3):  # the one that died is left with nothing
        if first.due(0.0) is not None:
            first.step(0.0)
    assert first.pool.num_used == 0
    if seen[-1].end is not None:
        return seen
    report = seen[0].prompt
    assert report is not None
    assert report.seed is not None
    so_far = Continuation(token_ids=tuple(ids_of(seen)), seed=report.seed)
    rest = list(outputs(second, msgspec.structs.replace(asked, resumes=so_far)))
    assert all(part.prompt is None for part in rest), "the report was sent with the first part"
    assert second.pool.num_used == 0
    return seen + rest


@pytest.mark.skipif(
    not native_available(torch.float32, 8),
    reason="bit-equal rows need the native kernels; torch's products depend on the batch",
)
@pytest.mark.parametrize("options", CASES, ids="-".join)
def test_two_parts_are_the_whole_answer_wherever_it_is_cut(
    workers: tuple[Engine, Engine], options: dict[str, Any]
) -> None:
    draw = random.Random(7)
    for number, prompt in enumerate(PROMPTS):
        asked = request(number, options, prompt)
        whole = list(outputs(workers[0], asked))
        report = whole[0].prompt
        assert report is not None
        assert report.seed is not None
        asked = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, seed=report.seed))
        for after in {1, len(whole) - 1, *(draw.randint(1, max(len(whole) - 1, 1)) for _ in range(5))} - {0}:
            parts = cut(*workers, asked, after)
            assert ids_of(parts) == ids_of(whole)
            assert text_of(parts) == text_of(whole)
            assert ending(parts) == ending(whole)
            assert logprobs_of(parts) == logprobs_of(whole)


def test_on_the_reference_path_parts_differ_only_at_near_ties(tiny_model: Path) -> None:
    first, second = load(tiny_model, attention="reference"), load(tiny_model, attention="reference")
    for number, prompt in enumerate(PROMPTS):
        asked = request(number, {"temperature": 0.0, "logprobs": 2, "ignore_eos": True}, prompt)
        whole = list(outputs(first, asked))
        for after in (3, 20):
            parts = cut(first, second, asked, after)
            assert len(ids_of(parts)) == len(ids_of(whole)) == 40
            for ours, theirs in zip(logprobs_of(parts), logprobs_of(whole), strict=True):
                if ours.token_id != theirs.token_id:
                    assert theirs.top[0].logprob - theirs.top[1].logprob < 1e-3
                    break


def test_an_answer_cut_after_its_last_token_only_ends(workers: tuple[Engine, Engine]) -> None:
    asked = request(0, {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5}, "Hello")
    whole = list(outputs(workers[0], asked))
    so_far = Continuation(token_ids=tuple(ids_of(whole)), seed=1)
    (rest,) = list(outputs(workers[1], msgspec.structs.replace(asked, resumes=so_far)))
    assert (rest.deltas[0].text, rest.deltas[0].token_ids, rest.deltas[0].finish_reason) == ("", (), "length")
    assert rest.end is not None
    assert rest.end.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("options", "token_ids"), [({"n": 2}, (1,)), ({"use_beam_search": True, "best_of": 2}, (1,)), ({}, (10**6,))]
)
def test_what_cannot_be_continued_is_refused(
    workers: tuple[Engine, Engine], options: dict[str, Any], token_ids: tuple[int, ...]
) -> None:
    asked = request(0, {"temperature": 1.0, **options}, "Hello")
    with pytest.raises(InvalidRequest, match="Send the request again") as refusal:
        workers[0].prepare(msgspec.structs.replace(asked, resumes=Continuation(token_ids=token_ids, seed=1)))
    assert refusal.value.code == "invalid_value"


@pytest.mark.parametrize("options", [{"n": 2}, {"best_of": 2}, {"use_beam_search": True}], ids="-".join)
def test_choices_that_cannot_be_continued_report_no_seed(
    workers: tuple[Engine, Engine], options: dict[str, Any]
) -> None:
    asked = request(0, {"temperature": 0.0 if "use_beam_search" in options else 1.0, "max_tokens": 2, **options}, "Hi")
    (report,) = [part.prompt for part in outputs(workers[0], asked) if part.prompt is not None]
    assert report.seed is None


def test_an_attention_that_needs_no_triton_loads_without_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "installed", lambda: False)
    assert load(tiny_model, attention="reference").info.name
