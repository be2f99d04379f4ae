"""What roles change for running answers: ``python -m bench.roles [--model demo] [--seconds 15]``.

Two servers' routers, one after the other, with two workers of one thread each: two ordinary replicas, and one replica
for prompts with one for answers. Answers run all the time, and a long prompt with an answer of one token arrives every
``--every`` seconds. Prints Markdown: the gaps between tokens of the running answers, the time of the long prompts, and
how many of them were handed over.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from typing import Final

from bench.report import markdown
from inferd import clock
from inferd.config import Config, ModelConfig, SpeculationConfig
from inferd.config.generation import RolesConfig
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, SamplingParams, TextPrompt

NUM_ANSWERS: Final = 4
_WORDS: Final = ("river", "stone", "cloud", "paper", "seven", "green")


def request(name: str, text: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model="chat",
        prompt=TextPrompt(text=text),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        explicit=SamplingParams.__struct_fields__,
        arrived_at=clock.now(),
    )


class Seen:
    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.prompts_s: list[float] = []
        self.num_handed = 0


async def answer(router: Router, name: str, num_tokens: int, seen: Seen) -> None:
    """Answers that follow one another, until cancelled."""
    number = 0
    while True:
        number += 1
        last = None
        async for _ in open_stream(router, request(f"{name}-{number}", f"Number {name}", num_tokens)):
            now = clock.now()
            if last is not None:
                seen.gaps_s.append(now - last)
            last = now


async def ask_long(router: Router, number: int, num_words: int, seen: Seen) -> None:
    draw = random.Random(number)
    began = clock.now()
    text = " ".join(draw.choice(_WORDS) for _ in range(num_words))
    async for item in open_stream(router, request(f"long-{number}", text, 1)):
        end = item.end
    assert end is not None
    assert end.outcome == "done", end.failure
    seen.prompts_s.append(clock.now() - began)
    hand_over = None if end.routing is None else end.routing.hand_over
    seen.num_handed += hand_over is not None and hand_over.replica is not None


async def measure(model: ModelConfig, options: argparse.Namespace) -> Seen:
    router, seen = Router(Config(models={"chat": model})), Seen()
    await router.start()
    await router.settled()
    answers = [asyncio.create_task(answer(router, str(i), options.tokens, seen)) for i in range(NUM_ANSWERS)]
    prompts: list[asyncio.Task[None]] = []
    try:
        await asyncio.sleep(1.0)
        seen.gaps_s.clear()
        for number in range(int(options.seconds / options.every)):
            prompts.append(asyncio.create_task(ask_long(router, number, options.words, seen)))
            await asyncio.sleep(options.every)
        await asyncio.gather(*prompts)
    finally:
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await router.stop()
    return seen


def row(name: str, seen: Seen) -> list[str]:
    cuts = statistics.quantiles(seen.gaps_s, n=100)
    longest = max(seen.gaps_s)
    return [
        name,
        f"{len(seen.gaps_s):,}",
        *(f"{1000 * value:.1f}" for value in (cuts[49], cuts[98], longest)),
        f"{1000 * statistics.median(seen.prompts_s):.0f}",
        f"{seen.num_handed} of {len(seen.prompts_s)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="source of the model")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration with each of the two")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two long prompts")
    parser.add_argument("--words", type=int, default=400, help="words of a long prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each running answer")
    options = parser.parse_args()

    def model(**settings: object) -> ModelConfig:
        return ModelConfig(source=options.model, threads=1, speculation=SpeculationConfig(method="none"), **settings)  # type: ignore[arg-type]

    rows = [
        row("two replicas", asyncio.run(measure(model(replicas=2), options))),
        row("roles", asyncio.run(measure(model(roles=RolesConfig()), options))),
    ]
    heads = ["", "gaps", "p50 ms", "p99 ms", "longest ms", "long prompt ms", "handed over"]
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
