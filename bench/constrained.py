"""What a constraint costs: tokens per second with a schema against without, and the seconds that a new schema adds.

The engine runs in this process, with the garbage collector as in a worker. Runs with and without a schema alternate, so
that another program on the machine slows both, and the ratio is the median of the pairs. In a pair each client's answer
has the same number of tokens in both runs, and each prompt is new to the prefix cache from its first block on.
``record`` is an object of eight properties, most of whose tokens are certain; in ``text`` a long string is free.
``steps`` is the number of steps with a schema against without.

    python -m bench.constrained src/inferd/models/demo
    python -m bench.constrained /tmp/qwen3-0.6b-random --clients 1 --pairs 3
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from inferd.answer_form import AnswerForm, JsonSchema
from inferd.config import ModelConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.types import GenerateRequest, SamplingParams, TextPrompt

_FIRST, _APART = 100_000, 500_000  # of the customers; between those of answers with a schema and without
_PROPERTIES: dict[str, Any] = {
    "first_name": {"type": "string", "maxLength": 24},
    "last_name": {"type": "string", "maxLength": 24},
    "email_address": {"type": "string", "maxLength": 32},
    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
    "preferred_colour": {"enum": ["red", "green", "blue"]},
    "is_subscribed": {"type": "boolean"},
    "recent_scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
}


def schema(number: int) -> JsonSchema:
    """A schema of its own for each number: an object of seven properties, one of them named by the number."""
    properties = {**_PROPERTIES, f"property_{number}": {"type": "boolean"}}
    return JsonSchema(
        schema={
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
        at="response_format.json_schema.schema",
        whitespace="",
    )


def text_schema() -> JsonSchema:
    """An object whose only property is a text of 150 to 200 characters."""
    properties = {"text": {"type": "string", "minLength": 150, "maxLength": 200}}
    return JsonSchema(
        schema={"type": "object", "properties": properties, "required": ["text"], "additionalProperties": False},
        at="response_format.json_schema.schema",
        whitespace="",
    )


def ask(name: str, form: AnswerForm | None, max_tokens: int, seed: int) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model="m",
        prompt=TextPrompt(text=f"{_FIRST + seed} is the number of a customer. Write the record as JSON:"),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=seed, ignore_eos=form is None),
        explicit=("max_tokens", "temperature"),
        form=form,
    )


class Run(NamedTuple):
    tokens: list[int]  # of each answer
    seconds: float  # from the first step to the last
    processor_s: float
    num_steps: int


def run(engine: Engine, requests: list[GenerateRequest]) -> Run:
    """Answer the requests, which are prepared before."""
    prepared = [engine.prepare(request) for request in requests]
    began, worked = time.perf_counter(), time.process_time()
    tokens: dict[str, int] = {}
    num_steps = 0
    for one in prepared:
        engine.add(one, began)
    while engine.due(began) is not None:
        num_steps += 1
        for output in engine.step(began)[0]:
            if output.end is not None:
                tokens[output.request_id] = output.end.usage.completion_tokens
    return Run([tokens[r.id] for r in requests], time.perf_counter() - began, time.process_time() - worked, num_steps)


def throughput(engine: Engine, shape: str, clients: int, pairs: int) -> dict[str, float | str]:
    form = AnswerForm(constraint=schema(0) if shape == "record" else text_schema())
    ratios, worked, plain_rate, formed_rate, steps = [], [], [], [], []
    for pair in range(-2, pairs):
        seeds = [pair * clients + i for i in range(clients)]
        formed = run(engine, [ask(f"f{s}", form, 400, s) for s in seeds])
        counts = formed.tokens
        # Prompts of their own: those of the run before are in the prefix cache.
        plain = run(engine, [ask(f"p{s}", None, count, s + _APART) for s, count in zip(seeds, counts, strict=True)])
        assert plain.tokens == counts
        if pair >= 0:
            plain_rate.append(sum(counts) / plain.seconds)
            formed_rate.append(sum(counts) / formed.seconds)
            ratios.append(plain.seconds / formed.seconds)
            worked.append(formed.processor_s / plain.processor_s)
            steps.append(formed.num_steps / plain.num_steps)
    return {
        "shape": shape,
        "clients": clients,
        "plain_tokens_per_s": round(statistics.median(plain_rate), 1),
        "schema_tokens_per_s": round(statistics.median(formed_rate), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_greatest": round(max(ratios), 4),
        "processor_time": round(statistics.median(worked), 4),
        "steps": round(statistics.median(steps), 4),
    }


def first_token(engine: Engine, count: int) -> dict[str, float]:
    """Milliseconds of preparing a request whose schema is new, beyond those of one that is known."""
    numbers = random.Random(0).sample(range(1, 10**6), count)
    run(engine, [ask("warm", AnswerForm(constraint=schema(0)), 2, 0)])
    added = []
    for number in numbers:
        form = AnswerForm(constraint=schema(number))
        times = []
        for _ in range(2):
            began = time.perf_counter()
            engine.prepare(ask("r", form, 2, 0))
            times.append(time.perf_counter() - began)
        added.append((times[0] - times[1]) * 1000)
    added.sort()
    return {"new_schema_p50_ms": round(added[count // 2], 3), "new_schema_p99_ms": round(added[count * 99 // 100], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--shapes", nargs="+", choices=["record", "text"], default=["record", "text"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    config = ModelConfig(source=str(given.folder), device="cpu", max_model_len=1024, threads=given.threads)
    engine = create_backend("m", config, lambda phase, done, total: None)
    gc.freeze()  # as a worker does: the loaded model is not examined again
    for shape in given.shapes:
        for clients in given.clients:
            print(json.dumps(throughput(engine, shape, clients, given.pairs)), flush=True)
    print(json.dumps(first_token(engine, given.schemas)))
    engine.close()
    gc.unfreeze()


if __name__ == "__main__":
    main()
