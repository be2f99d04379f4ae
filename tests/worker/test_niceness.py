"""A batch model's worker yields the cores; the others keep the server's own share."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from tests.worker.watching import IMPATIENT, TINY_WORKER, Witness, until, worker_pid

from inferd.config import Config, ModelConfig
from inferd.router.router import Router
from inferd.types import PriorityClass
from inferd.worker.niceness import NICE


async def niceness_of_a_worker(priority: PriorityClass) -> tuple[int, int | None]:
    """(the loop thread's, the group's where the system has groups)."""
    router = Router(
        Config(models={"tiny": ModelConfig(source="tiny", priority=priority)}),
        Witness(),
        command=TINY_WORKER,
        patience=IMPATIENT,
    )
    await router.start()
    try:
        await until(lambda: router.models()[0].replicas_ready == 1, "it is ready")
        pid = worker_pid(router)
        group = Path(f"/proc/{pid}/autogroup")
        found = re.search(r"nice (-?\d+)", group.read_text()) if group.exists() else None
        return os.getpriority(os.PRIO_PROCESS, pid), int(found[1]) if found else None
    finally:
        await router.stop()


@pytest.mark.parametrize("priority", ["critical", "normal", "batch"])
def test_a_workers_niceness_is_its_models_class(priority: PriorityClass) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    thread, group = asyncio.run(niceness_of_a_worker(priority))
    assert thread == min(own + NICE[priority], 19)
    if group is not None:
        assert group == (thread if priority == "batch" else 0)


def test_no_class_asks_for_more_than_it_may_without_privileges() -> None:
    assert min(NICE.values()) == 0
    assert NICE["normal"] == 0, "a lone model of the default class loses nothing"
    assert NICE["batch"] > NICE["normal"]
