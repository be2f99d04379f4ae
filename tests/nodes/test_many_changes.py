"""A soak: requests without a pause while replicas come and go and nodes are killed. Each request is answered.

Workers are not killed one by one: a request that was in flight in two workers that died by themselves is refused as the
probable cause.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.nodes.joined import Cluster, cluster, tiny
from tests.worker.tiny_backend import letters
from tests.worker.watching import ask, outputs_of, text_of, until

from inferd.config import Config, ModelConfig, PlacementConfig, QueueConfig
from inferd.router.stream import open_stream

NUM_REQUESTS = 10_000
NUM_CHANGES = 200
CLIENTS = 12
TOKENS = 8


class Changes:
    """Random changes of one model's replicas and of its nodes, one after the other."""

    def __init__(self, made: Cluster, model: ModelConfig, chance: random.Random) -> None:
        self._made = made
        self._model = model
        self._random = chance
        self.counts: Counter[str] = Counter()

    async def make_one(self) -> None:
        kinds = (self.scale, self.reload, self.replace_workers, self.kill_node)
        kind = self._random.choice(kinds)
        await kind()
        self.counts[kind.__name__] += 1

    async def scale(self) -> None:
        others = [number for number in (1, 2, 3, 4) if number != self._model.replicas]
        await self._apply(replicas=self._random.choice(others))

    async def reload(self) -> None:
        await self._apply(queue=QueueConfig(timeout_s=self._random.uniform(300, 900)))

    async def replace_workers(self) -> None:
        await self._made.router.restart("tiny")

    async def kill_node(self) -> None:
        """A node dies without a word, and a new one joins under its name."""
        node = self._random.choice(self._made.nodes)
        self._made.nodes.remove(node)
        node.kill()
        await until(lambda: node.name not in self._made.names, f"{node.name} is gone", 60)
        await self._made.join(node.name)

    async def _apply(self, **changes: object) -> None:
        self._model = msgspec.structs.replace(self._model, **changes)
        applied = await self._made.router.apply(Config(models={"tiny": self._model}))
        assert applied.failed == []


@pytest.mark.soak
def test_of_ten_thousand_requests_none_fails_over_two_hundred_changes(tmp_path: Path) -> None:
    chance = random.Random(17)
    answers: Counter[str] = Counter()
    failures: list[str] = []

    async def scenario() -> None:
        model = tiny(3, PlacementConfig(), resume_streams=True)
        async with cluster(tmp_path, model, "one", "two") as made:
            await asyncio.wait_for(made.router.settled(), 60)
            changes, numbers = Changes(made, model, chance), iter(range(NUM_REQUESTS))

            async def client() -> None:
                for number in numbers:
                    asked = ask("pace=0.002", name=f"r{number}", max_tokens=TOKENS)
                    outputs = await outputs_of(open_stream(made.router, asked))
                    end = outputs[-1].end
                    assert end is not None
                    answers[end.outcome] += 1
                    if end.outcome != "done" or text_of(outputs) != letters(TOKENS):
                        failures.append(f"r{number} after {sum(changes.counts.values())} changes: {end}")
                    while sum(answers.values()) > NUM_REQUESTS / NUM_CHANGES * (sum(changes.counts.values()) + 1):
                        if sum(changes.counts.values()) >= NUM_CHANGES:
                            break
                        await asyncio.sleep(0.01)  # requests and changes end together

            clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
            for _ in range(NUM_CHANGES):
                await changes.make_one()
            await asyncio.gather(*clients)
            print(f"{dict(answers)}; {dict(changes.counts)}")

    asyncio.run(scenario())
    assert failures == []
    assert answers == {"done": NUM_REQUESTS}
