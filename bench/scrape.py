"""What a scrape of /metrics costs: ``python -m bench.scrape``, and ``python -m bench.scrape --overload``.

An observer of 50 models with 4 replicas each, in which all replicas, one in ten, or none have changed since the last
page. The time of making the page in the text format and in OpenMetrics, with and without vLLM's names; and, in an event
loop that is kept busy by other tasks, how long a page takes and how long it holds the loop at once.

With ``--overload``: scrapes of ``inferd serve`` with as many models, while clients ask one of them for more than it can
do. Its queue is full, the other requests are refused as fast as they come, and every processor is busy. Exit status 1: a
scrape took longer than a second, or there was no overload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import http.client
import io
import json
import multiprocessing
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from inferd.config import AliasDialect
from inferd.events import HttpServed, RequestEnded, StepDone
from inferd.observe import Observer
from inferd.types import StepParts, StepStats, Timings, Usage

_TIMINGS = Timings(dispatched=0.1, tokenized=0.15, scheduled=0.2, first_token=0.4, finished=1.4)
_STATS = StepStats(
    step_tokens=20, step_sequences=4, step_s=0.01, parts=StepParts(forward=0.01), num_running=4, blocks_total=100
)
_OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def work(observer: Observer, model: str, replica: int, number: int) -> None:
    """One request and one step of a replica."""
    usage = Usage(prompt_tokens=10 + number, completion_tokens=5)
    observer.emit(
        RequestEnded(
            model=model,
            replica=replica,
            request_id=f"r{number}",
            tenant="",
            outcome="done",
            finish_reasons=("stop",),
            usage=usage,
            timings=_TIMINGS,
            inter_token_s=(0.25,) * 4,
        )
    )
    observer.emit(StepDone(model=model, replica=replica, stats=_STATS))
    observer.emit(
        HttpServed(
            request_id=f"r{number}",
            method="POST",
            route="/v1/completions",
            status=200,
            duration_s=1.5,
            model=model,
            replica=replica,
            outcome="done",
            finish_reasons=("stop",),
            usage=usage,
            timings=_TIMINGS,
        )
    )


def an_observer(
    models: int, replicas: int, aliases: tuple[AliasDialect, ...]
) -> tuple[Observer, list[tuple[str, int]]]:
    names = [f"model-{number}" for number in range(models)]
    observer = Observer(models=dict.fromkeys(names, replicas), aliases=aliases, access_log=False, stream=io.StringIO())
    return observer, [(name, replica) for name in names for replica in range(replicas)]


async def page_ms(
    observer: Observer, changed: list[tuple[str, int]], accept: str, repeat: int
) -> tuple[float, float, int]:
    """The median times of a page after each of these replicas has worked, by the processor's clock and by the wall's, and
    the page's bytes."""
    taken, waited, size = [], [], 0
    for number in range(repeat + 1):
        for model, replica in changed:
            work(observer, model, replica, number)
        observer.tally_of("")  # counts the events that wait, which requests pay for
        before, began = time.perf_counter(), time.thread_time()
        size = len((await observer.page(accept)).body)
        taken.append((time.thread_time() - began) * 1000)
        waited.append((time.perf_counter() - before) * 1000)
    return statistics.median(taken[1:]), statistics.median(waited[1:]), size


async def under_load(observer: Observer, all_replicas: list[tuple[str, int]], tasks: int, busy_ms: float) -> None:
    """Pages while other tasks keep the loop busy, and the processor's time between two of their turns."""
    longest = turn = 0.0
    is_over = False

    async def other() -> None:
        nonlocal longest, turn
        while not is_over:
            longest = max(longest, time.thread_time() - turn)
            end = time.thread_time() + busy_ms / 1000
            while time.thread_time() < end:
                pass
            turn = time.thread_time()
            await asyncio.sleep(0)

    gc.collect()
    gc.freeze()  # as the server does when it is ready
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    turn = time.thread_time()
    others = [asyncio.create_task(other()) for _ in range(tasks)]
    taken, holds = [], []
    for number in range(5):
        for model, replica in all_replicas:
            work(observer, model, replica, number)
        await asyncio.sleep(0.1)
        longest = 0.0
        before = time.thread_time()  # of the loop's thread: what would pass on a machine that does nothing else
        await observer.page()
        taken.append(time.thread_time() - before)
        holds.append(longest)
    is_over = True
    await asyncio.gather(*others)
    print(
        f"busy loop, {tasks} tasks of {busy_ms:g} ms, all changed: page {statistics.median(taken) * 1000:.0f} ms "
        f"(worst {max(taken) * 1000:.0f}), held the loop for at most {max(holds) * 1000:.1f} ms at once, by the processor's clock"
    )


PORT = 9310
QUEUE = 32
CLIENTS = 64
MOST_S = 1.0
_URL = f"http://127.0.0.1:{PORT}"


def flood(seconds: float) -> None:
    """Clients that ask again as soon as they were answered or refused. A process of its own."""
    body = json.dumps({"model": "model-0", "prompt": "Once", "max_tokens": 64, "ignore_eos": True}).encode()
    until = time.monotonic() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        while time.monotonic() < until:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            connection.getresponse().read()

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def scrape() -> tuple[float, str]:
    """The seconds of a scrape, as Prometheus sends it, and the page."""
    began = time.monotonic()
    request = urllib.request.Request(f"{_URL}/metrics", headers={"accept": _OPENMETRICS})
    with urllib.request.urlopen(request, timeout=60) as answer:
        page = answer.read().decode()
    return time.monotonic() - began, page


def of_page(page: str, name: str) -> float:
    """The sum of the samples of a name that are of the flooded model."""
    return sum(float(value) for value in re.findall(rf'^{name}{{[^}}]*"model-0"[^}}]*}} (\S+)', page, re.M))


@contextlib.contextmanager
def overloaded(models: int, replicas: int, seconds: float):
    """``inferd serve`` with a flooded model, and others that wait for their first request."""
    names = [f"model-{number}" for number in range(models)]
    config = {name: {"source": "demo", "replicas": replicas, "load": "on_demand"} for name in names}
    config["model-0"] = {"source": "demo", "queue": {"max_requests": QUEUE}, "scheduler": {"max_num_seqs": 8}}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scrape.yaml"
        server_section = {"port": PORT, "access_log": False, "auth": "off"}
        state = {"data_dir": str(Path(folder) / "data")}
        file.write_text(json.dumps({"server": server_section, "state": state, "models": config}))
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen([sys.executable, "-m", "inferd", "serve", str(file)], stdout=log, stderr=log)
            clients = multiprocessing.get_context("spawn").Process(target=flood, args=(seconds,))
            try:
                _until_ready(server)
                clients.start()
                time.sleep(3.0)
                yield
            finally:
                if clients.is_alive():
                    clients.terminate()
                server.send_signal(signal.SIGTERM)
                server.wait(60)


def _until_ready(server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{_URL}/health/ready", timeout=2):
            return
        time.sleep(0.2)
    raise SystemExit("The server did not become ready.")


def overload(models: int, replicas: int, scrapes: int) -> int:
    with overloaded(models, replicas, 3.0 + scrapes * 1.5):
        psutil.cpu_percent()
        _, first = scrape()
        began = time.monotonic()
        taken, queued, size = [], [], 0
        for _ in range(scrapes):
            time.sleep(0.5)
            seconds, page = scrape()
            taken.append(seconds)
            queued.append(of_page(page, "inferd_queue_waiting"))
            size = len(page)
        refused = (of_page(page, "inferd_refused_total") - of_page(first, "inferd_refused_total")) / (
            time.monotonic() - began
        )
        busy = psutil.cpu_percent()
    print(
        f"overload, {models} models, {CLIENTS} clients: processors {busy:.0f} % busy, queue {statistics.median(queued):.0f} "
        f"of {QUEUE}, {refused:.0f} refused per second\n{scrapes} scrapes of {size:,} bytes: median "
        f"{statistics.median(taken) * 1000:.0f} ms, longest {max(taken) * 1000:.0f} ms"
    )
    return int(max(taken) > MOST_S or refused <= 0 or statistics.median(queued) < QUEUE / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--overload", action="store_true", help="scrape a server that is asked for too much")
    parser.add_argument("--scrapes", type=int, default=30, help="of the overloaded server")
    options = parser.parse_args()
    if options.overload:
        sys.exit(overload(options.models, options.replicas, options.scrapes))
    import inferd.observe.series as series

    print(f"{'compiled' if series.__file__.endswith('.so') else 'interpreted'} series, {options.models} models of "
          f"{options.replicas} replicas")  # fmt: skip
    print("| names | format | changed | processor | wall | bytes |\n| --- | --- | --- | --- | --- | --- |")
    for aliases in ((), ("vllm",)):
        for media, accept in (("text", ""), ("OpenMetrics", _OPENMETRICS)):
            observer, all_replicas = an_observer(options.models, options.replicas, aliases)
            for words, changed in (("all", all_replicas), ("a tenth", all_replicas[::10]), ("none", [])):
                ms, wall_ms, size = asyncio.run(page_ms(observer, changed, accept, options.repeat))
                names = ", ".join(("own", *aliases))
                print(f"| {names} | {media} | {words} | {ms:.1f} ms | {wall_ms:.1f} ms | {size:,} |")
            observer.close()
    observer, all_replicas = an_observer(options.models, options.replicas, ())
    asyncio.run(under_load(observer, all_replicas, tasks=16, busy_ms=1.0))
    observer.close()


if __name__ == "__main__":
    main()
