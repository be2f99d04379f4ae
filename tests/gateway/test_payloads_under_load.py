"""Recording under load: a disk that is slow, full or hangs slows no request, and every record is written or counted."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.gateway.fakes import FakeRouter, running
from tests.tiers import THOROUGH

from inferd.config import PayloadsConfig
from inferd.observe.payloads import log as payload_log
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.payloads.store import PayloadStore

NUM_REQUESTS = 400
NUM_CLIENTS = 4
SLOW_S = 0.1
"""Of one record: if requests waited for the disk, all of them would take 40 s."""

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def served_s(payloads: PayloadLog | None) -> float:
    """How long the requests take, all of which are answered."""
    with running(FakeRouter("tiny"), payloads=payloads) as server:

        def client(_: int) -> list[int]:
            with httpx.Client(timeout=60) as http:
                url = server.url + "/v1/chat/completions"
                return [http.post(url, json=BODY).status_code for _ in range(NUM_REQUESTS // NUM_CLIENTS)]

        began = time.monotonic()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            statuses = [status for found in pool.map(client, range(NUM_CLIENTS)) for status in found]
        took_s = time.monotonic() - began
    assert statuses == [200] * NUM_REQUESTS
    return took_s


def slow(append: Callable[..., None]) -> Callable[..., None]:
    def slowed(*words: object) -> None:
        time.sleep(SLOW_S)
        append(*words)

    return slowed


def full(append: Callable[..., None]) -> Callable[..., None]:
    def refused(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return refused


@THOROUGH
@pytest.mark.parametrize("disk", [slow, full])
def test_a_slow_or_full_disk_slows_no_request_and_every_loss_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    plain_s = served_s(None)
    monkeypatch.setattr(payload_log, "MAX_WAITING", 32)
    monkeypatch.setattr(PayloadStore, "append", disk(PayloadStore.append))
    dropped: list[None] = []
    log = PayloadLog(
        tmp_path, PayloadsConfig(tenants=("*",), keep=("prompts", "answers")), lambda: dropped.append(None)
    )
    try:
        took_s = served_s(log)
    finally:
        log.close(60)
    written = list(PayloadStore(tmp_path).records())
    print(f"{disk.__name__}: {took_s:.2f} s with records, {plain_s:.2f} s without; {len(dropped)} dropped")
    assert len(dropped) + len(written) == NUM_REQUESTS
    assert len(dropped) > NUM_REQUESTS // 4
    assert bool(written) == (disk is slow)
    assert took_s < 3 * plain_s + 5


def test_a_disk_that_hangs_holds_no_request_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_log, "MAX_WAITING", 32)
    again = threading.Event()
    monkeypatch.setattr(PayloadStore, "append", lambda *words: again.wait(60))
    dropped: list[None] = []
    log = PayloadLog(tmp_path, PayloadsConfig(tenants=("*",)), lambda: dropped.append(None))
    try:
        served_s(log)
        assert len(dropped) >= NUM_REQUESTS - 33
        began = time.monotonic()
        log.close(0.2)
        assert time.monotonic() - began < 30
    finally:
        again.set()
        log.close(60)
