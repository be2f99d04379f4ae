"""Real trained checkpoints, where they lie beside the checkout: our greedy answers equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig
from inferd.engine.load import create_backend
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

pytestmark = pytest.mark.shared

MODELS = ["llm-stories260k", "llm-tinystories-656k", "llm-babyllama-char105", "llm-stories3m", "llm-tinychat-neo3m"]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_equal_the_golden_ones(name: str, shared_data: Path) -> None:
    check_answers(name, shared_data / name, ParallelConfig())


@pytest.mark.soak
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", [name for name in MODELS if "neo" not in name])
def test_ranks_give_the_golden_answers(name: str, layout: tuple[int, int], shared_data: Path) -> None:
    check_answers(name, shared_data / name, ParallelConfig(tensor=layout[0], pipeline=layout[1]))


def check_answers(name: str, folder: Path, parallel: ParallelConfig) -> None:
    engine = create_backend(
        name,
        ModelConfig(
            source=str(folder),
            dtype="float32",
            threads=1,
            use_generation_config=False,
            kv_cache=KVCacheConfig(num_blocks=200),
            parallel=parallel,
        ),
        lambda phase, done, total: None,
    )
    cases = json.loads((folder / "golden_greedy.json").read_text())["cases"]
    answers: dict[str, list[int]] = {}
    for i, case in enumerate(cases):
        sampling = SamplingParams(temperature=0.0, max_tokens=len(case["output_ids"]))
        request = GenerateRequest(
            id=str(i), model=name, prompt=TokenPrompt(token_ids=case["prompt_ids"]), sampling=sampling
        )
        engine.add(engine.prepare(request), 0.0)
        answers[str(i)] = []
    while engine.due(0.0) is not None:
        for output in engine.step(0.0)[0]:
            answers[output.request_id] += [t for delta in output.deltas for t in delta.token_ids]
    engine.close()
    for i, case in enumerate(cases):
        got, wanted, scores = answers[str(i)], case["output_ids"], case["top3_logprobs"]
        for step, (ours, theirs) in enumerate(zip(got, wanted, strict=False)):
            if ours != theirs:
                # Two correct implementations may part where the two best are this close.
                margin = scores[step][0][1] - scores[step][1][1]
                assert margin < 1e-3, f"case {i} parts at step {step} with a margin of {margin}"
                break
        else:
            assert len(got) == len(wanted)
