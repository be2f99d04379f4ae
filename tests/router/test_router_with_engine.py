"""The real engine behind the border: same answers as in this process, also after its worker was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.conftest import write_tiny_model
from tests.tiers import THOROUGH, sample
from tests.worker.watching import Witness, interrupted, outputs_of, text_of, until, worker_pid

from inferd import clock
from inferd.config import Config, ModelConfig
from inferd.events import Retried
from inferd.llm import LLM
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, Output, SamplingParams, TextPrompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ("Once upon a time", "1 + 1 =", "x")


@pytest.mark.slow
def test_answers_are_those_of_the_engine_in_process_before_and_after_a_kill(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, max_positions=8192)  # so that a long answer is not over before the kill
    with LLM(str(model), progress=False) as llm:
        expected = [completion.text for completion in llm.generate(list(PROMPTS), GREEDY, progress=False)]

    def request(name: str, text: str, sampling: SamplingParams = GREEDY) -> GenerateRequest:
        explicit = SamplingParams.__struct_fields__
        return GenerateRequest(
            id=name,
            model="tiny",
            prompt=TextPrompt(text=text),
            sampling=sampling,
            explicit=explicit,
            arrived_at=clock.now(),
        )

    async def scenario() -> None:
        witness = Witness()
        router = Router(Config(models={"tiny": ModelConfig(source=str(model))}), witness)
        await router.start()
        try:
            for life in (1, 2):
                early = [open_stream(router, request(f"{life}-{i}", text)) for i, text in enumerate(PROMPTS)]
                answers = [text_of(await outputs_of(stream)) for stream in early]
                assert answers == expected
                assert witness.count("ready") == life
                long = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)
                stream = open_stream(router, request(f"{life}-long", "abc", long))
                await anext(stream)
                os.kill(worker_pid(router), signal.SIGKILL)
                end = (await outputs_of(stream))[-1].end
                assert end is not None
                assert end.failure is not None
                assert end.failure.kind == "worker_died"
            await until(lambda: witness.count("ready") == 3, "it is ready once more", 60)
        finally:
            await router.stop()
        assert {event.outcome for event in witness.ended()} == {"done", "failed"}

    asyncio.run(scenario())


@THOROUGH
@pytest.mark.slow
@pytest.mark.parametrize("temperature", sample([0.0, 1.0], 1.0))
def test_a_stream_goes_on_token_by_token_after_its_worker_was_killed(tmp_path: Path, temperature: float) -> None:
    tiny_model = write_tiny_model(tmp_path, max_positions=4096)  # so that the answer is not over before the kill
    sampling = SamplingParams(temperature=temperature, seed=11, max_tokens=1000, ignore_eos=True)

    async def kill(worker: int) -> None:
        os.kill(worker, signal.SIGKILL)

    model = ModelConfig(source=str(tiny_model), resume_streams=True)
    whole, outputs, witness = asyncio.run(interrupted(model, sampling, kill))
    assert [tokens_of(outputs), text_of(outputs)] == [tokens_of(whole), text_of(whole)]
    assert [event.kind for event in witness.events if isinstance(event, Retried)] == ["continuation"]
    assert [event.usage.completion_tokens for event in witness.ended()] == [1000, 1000]
    assert len([output for output in outputs if output.prompt is not None]) == 1


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for delta in output.deltas for token in delta.token_ids]
