"""The numbers over a real router and real worker processes: they add up, also when a worker is killed."""

from __future__ import annotations

import asyncio
import io
import os
import signal

from prometheus_client.parser import text_string_to_metric_families
from tests.worker.watching import Witness, ask, outputs_of, serving, until, worker_pid

from inferd.observe import Observer
from inferd.router.stream import open_stream
from inferd.types import Output, Relayed


class Scraper:
    """Feeds what the router said to an observer, scrapes it, and sees to it that no counter goes back."""

    def __init__(self, witness: Witness) -> None:
        self.observer = Observer(models={"tiny": 1}, stream=io.StringIO())
        self._witness = witness
        self._num_fed = 0
        self.page: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def scrape(self) -> None:
        for event in self._witness.events[self._num_fed :]:
            self.observer.emit(event)
        self._num_fed = len(self._witness.events)
        families = list(text_string_to_metric_families(self.observer.render_metrics().decode()))
        page = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
        counters = {(s.name, frozenset(s.labels.items())) for f in families if f.type == "counter" for s in f.samples}
        assert all(
            page[series] >= self.page.get(series, 0.0)
            for series in counters
            if series[0] != "process_cpu_seconds_total"
        )
        self.page = page

    def tells_of_no_request(self) -> bool:
        self.scrape()
        return self.sum("inferd_in_flight") == 0

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for (found, own), value in self.page.items() if found == name and own >= set(labels.items()))


def usage_of(outputs: list[Output | Relayed]) -> tuple[int, int]:
    end = outputs[-1].end
    assert end is not None
    return end.usage.prompt_tokens, end.usage.completion_tokens


def test_what_was_answered_is_what_was_counted_though_a_worker_was_killed() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            scraper = Scraper(witness)
            answers: list[list[Output | Relayed]] = [
                list(await outputs_of(open_stream(router, ask(name=f"done-{i}", max_tokens=3)))) for i in range(3)
            ]
            scraper.scrape()
            assert scraper.sum("inferd_requests_total", outcome="done") == 3

            left = open_stream(router, ask("pace=0.01", name="left", max_tokens=1000))
            await anext(left)
            left.close()
            answers.append([o async for o in left])

            broken = open_stream(router, ask("pace=0.01", name="broken", max_tokens=1000))
            first = await anext(broken)
            os.kill(worker_pid(router), signal.SIGKILL)
            answers.append([first, *[o async for o in broken]])
            scraper.scrape()
            assert scraper.sum("inferd_replica_faults_total", fault="died") == 1
            assert scraper.sum("inferd_running") == 0

            await until(lambda: router.models()[0].replicas_ready == 1, "the replica is back")
            answers.append(list(await outputs_of(open_stream(router, ask(name="after", max_tokens=3)))))
            await until(scraper.tells_of_no_request, "the last QueueChanged is told in a later turn")

            outcomes = {
                o: scraper.sum("inferd_requests_total", outcome=o) for o in ("done", "cancelled", "failed", "refused")
            }
            assert outcomes == {"done": 4, "cancelled": 1, "failed": 1, "refused": 0}
            assert scraper.sum("inferd_errors_total", kind="worker_died") == 1
            assert scraper.sum("inferd_prompt_tokens_total") == sum(usage_of(a)[0] for a in answers)
            assert scraper.sum("inferd_generation_tokens_total") == sum(usage_of(a)[1] for a in answers)
            assert scraper.sum("inferd_replica_restarts_total") == 1
            assert scraper.sum("inferd_replica_state", state="ready") == 1
            assert scraper.sum("inferd_queue_waiting") == scraper.sum("inferd_in_flight") == 0
            assert scraper.sum("inferd_observer_failures_total") == 0
            scraper.observer.close()

    asyncio.run(scenario())
