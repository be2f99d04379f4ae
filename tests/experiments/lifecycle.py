"""Workers that die, hang or fail; servers that start, leave, reload and restart (F01 to F13, F29 to F31, F61 to F63)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.experiments.books import Page
from tests.experiments.catalogue import experiment
from tests.experiments.client import JSON, Client, Stream
from tests.experiments.field import Field, Server, together
from tests.stopwatch import Stopwatch
from tests.worker.watching import children, is_running

SLOW = "pace=0.02"
TWO_REPLICAS: JSON = {"models": {"tiny": {"source": "tiny", "replicas": 2}}}


@contextlib.contextmanager
def load(clients: int, ask: Callable[[], str | None]) -> Iterator[list[str]]:
    """So many clients, one request after the other; what went wrong is in the list."""
    wrong: list[str] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            try:
                said = ask()
            except (OSError, ValueError, AssertionError) as error:
                said = f"{type(error).__name__}: {error}"
            if said is not None:
                wrong.append(said)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def is_served(client: Client, **options: Any) -> str | None:
    answer = client.complete("hello", **options)
    return None if answer.status == 200 else repr(answer)


# -- workers -------------------------------------------------------------------------------------


@experiment(
    "F01",
    injects="kill -9 of one of two workers in the middle of streams",
    holds="its streams end with an error event within 2 s, the other's go on, one restart, ready within 5 s",
    control="SIGSTOP instead, which causes no notification",
    red="error event",
    tier="thorough",
)
def killed_worker(field: Field) -> None:
    with field.serve(TWO_REPLICAS) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(server.client.stream(SLOW, max_tokens=100)) for _ in range(4)]
        for stream in streams:
            stream.first()
        victim = server.worker_pids()[0]
        began = Stopwatch()
        os.kill(victim, field.either(signal.SIGKILL, signal.SIGSTOP))
        errors: list[float] = []

        def read(number: int) -> None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed under its reader by a failed check
                streams[number].rest()
            if streams[number].error is not None:
                errors.append(began.seconds)

        reading = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(4)]
        for thread in reading:
            thread.start()
        while not errors and not began.is_past(3.0):
            time.sleep(0.01)
        assert errors, "no stream of the dead worker ended with an error event within 3 s"
        assert max(errors) <= 2.0, "an error event came after more than 2 s"
        for thread in reading:
            thread.join(20)
        assert 1 <= len(errors) <= 3, f"{len(errors)} of 4 streams on two workers failed"
        server.until(server.is_ready, "ready again", 5)
        assert server.metrics().sum("inferd_replica_restarts_total") == 1


@experiment(
    "F02",
    injects="a step that never ends",
    holds="the worker is killed after hang_timeout_s and started again; its streams end with an error event",
    control="hang_timeout_s: 60",
    red="no error",
    tier="thorough",
)
def hung_worker(field: Field) -> None:
    model = {"source": "tiny", "hang_timeout_s": field.either(0.5, 60.0)}
    with field.serve({"models": {"tiny": model}}) as server:
        try:
            with server.client.stream("hang@3", max_tokens=10, seconds=4) as stream:
                stream.rest()
                assert stream.error is not None, "no error event"
        except TimeoutError:
            raise AssertionError("no error event within 4 s") from None
        server.until(server.is_ready, "ready again", 5)
        assert server.metrics().sum("inferd_replica_faults_total", fault="hung") == 1


@experiment(
    "F03",
    injects="an exception in one step",
    holds="the requests of that step fail, those after it are served, the worker stays",
    control="the step kills its worker instead",
    red="worker",
    tier="everyday",
)
def failing_step(field: Field) -> None:
    with field.serve() as server:
        before = server.worker_pids()
        answer = server.client.complete(field.either("raise", "die"))
        assert answer.status == 500, answer
        assert answer.code == "internal_error", f"not the step but its worker failed: {answer}"
        assert server.worker_pids() == before, "the worker was replaced"


@experiment(
    "F04",
    injects="a request that kills every worker it comes to, among innocent ones",
    holds="given up after two deaths; every innocent one is answered",
    control="two such requests",
    red="deaths|innocent",
    tier="thorough",
)
def poison(field: Field) -> None:
    gate = field.folder / "gate"
    with field.serve(TWO_REPLICAS) as server:
        num_poison = field.either(1, 2)

        def ask(number: int) -> None:
            if number < num_poison:
                answer = server.client.complete("die")
                assert answer.status == 503, answer
                assert answer.code == "poison_request", answer
            else:  # without output before the deaths are over: what has some is not begun anew
                answer = server.client.complete(f"gate={gate}", max_tokens=3, seconds=20)
                assert answer.status == 200, f"an innocent request: {answer}"

        threading.Timer(1.5, gate.touch).start()
        together(6, ask)
        server.until(server.is_ready, "ready again", 10)
        deaths = server.metrics().sum("inferd_replica_faults_total", fault="died")
        assert deaths <= 2, f"{deaths} deaths"


@experiment(
    "F12",
    injects="the process may open no more descriptors, so that no worker and no connection can be had",
    holds="degraded, not wedged: alive, and whole again when there are some",
    control="there never are",
    red="whole again",
)
def no_descriptors(field: Field) -> None:
    with field.serve(checked=not field.is_control) as server:
        pid = server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        time.sleep(1.0)  # some tries at a new worker fail
        assert server.process.poll() is None, "the server ended"
        if not field.is_control:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        watch = Stopwatch()
        while not watch.is_past(10):
            with contextlib.suppress(OSError):
                if server.client.get("/health/ready", seconds=1.0).status == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the server was not whole again within 10 s")


# -- leaving -------------------------------------------------------------------------------------


@experiment(
    "F05",
    injects="SIGTERM to an idle server",
    holds="exit code 0 within 2 s",
    control="drain_delay_s: 3",
    red="took",
    tier="everyday",
)
def sigterm_idle(field: Field) -> None:
    with field.serve({"server": {"drain_delay_s": field.either(0.0, 3.0)}}, checked=False) as server:
        code, took = server.end()
        assert code == 0
        assert took <= 2.0, f"leaving took {took:.1f} s"


@experiment(
    "F06",
    injects="SIGTERM to one of two loaded servers behind a balancer that looks at readiness",
    holds="no request fails",
    control="drain_delay_s: 0",
    red="failed",
    tier="thorough",
)
def sigterm_under_load(field: Field) -> None:
    config = {"server": {"drain_delay_s": field.either(1.0, 0.0)}}
    with field.serve(config, checked=False) as leaving, field.serve(config) as staying:
        balanced = [leaving, staying]
        over = threading.Event()

        def balance() -> None:
            while not over.wait(0.3):  # as often as a balancer looks, or rather more
                with contextlib.suppress(OSError):
                    if leaving.client.get("/health/ready").status == 200:
                        continue
                balanced[:] = [staying]

        looking = threading.Thread(target=balance, daemon=True)
        looking.start()
        turn = iter(range(10**9))
        with load(8, lambda: is_served(balanced[next(turn) % len(balanced)].client)) as wrong:
            time.sleep(0.3)
            code, _ = leaving.end()
            time.sleep(0.3)
        over.set()
        looking.join()
        assert code == 0
        assert not wrong, f"{len(wrong)} requests failed: {wrong[0]}"


@experiment(
    "F07",
    injects="work longer than grace_s, and a second SIGTERM",
    holds="ended with an error event after grace_s; the countdown does not begin again",
    control="grace_s: 20",
    red="did not exit",
)
def work_beyond_grace(field: Field) -> None:
    with field.serve({"server": {"grace_s": field.either(1.0, 20.0)}}, checked=False) as server:
        with server.client.stream("pace=0.05", max_tokens=100_000) as stream:
            stream.first()
            server.worker_pids()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.7)
            server.process.send_signal(signal.SIGTERM)
            code = server.ended(3.0)
            stream.rest()
            assert stream.error is not None
        assert code == 0


@experiment(
    "F08a",
    injects="SIGTERM while a model is loading",
    holds="exit code 0 within 5 s, no worker left",
    control="the server is stopped (SIGSTOP), as one that hangs would be",
    red="did not exit",
    tier="everyday",
)
def sigterm_while_loading(field: Field) -> None:
    gate = field.folder / "gate"
    with field.serve({"models": {"tiny": {"source": f"gate={gate}"}}}, wait=False) as server:
        server.until(lambda: bool(children(server.process.pid)), "a worker loads")
        server.worker_pids()
        if field.is_control:
            os.kill(server.process.pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(5.0) == 0


@experiment(
    "F08b",
    injects="SIGTERM in the middle of a rolling restart",
    holds="exit code 0 within 5 s, no worker left",
    control="the server is stopped (SIGSTOP), as one that hangs would be",
    red="did not exit",
)
def sigterm_while_rolling(field: Field) -> None:
    with field.serve(TWO_REPLICAS, checked=False) as server:
        asking = threading.Thread(target=_restart_quietly, args=(server,), daemon=True)
        asking.start()
        server.until(lambda: len(server.worker_pids()) > 2, "a new worker starts", 10)
        if field.is_control:
            os.kill(server.process.pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(5.0) == 0
        asking.join(10)


def _restart_quietly(server: Server) -> None:
    with contextlib.suppress(OSError):
        server.operator.post("/admin/models/tiny/restart")


@experiment(
    "F09",
    injects="kill -9 of the server",
    holds="its workers are gone within 10 s and its port can be used again",
    control="one more process is looked for, which does not watch its parent",
    red="alive",
    tier="thorough",
)
def killed_parent(field: Field) -> None:
    with field.serve(TWO_REPLICAS, checked=False) as server, subprocess.Popen(["sleep", "30"]) as careless:
        workers = [*server.worker_pids(), *field.either([], [careless.pid])]
        server.process.kill()
        server.process.wait()
        try:
            watch, most_s = Stopwatch(), field.either(10.0, 2.0)
            while any(map(is_running, workers)):
                assert not watch.is_past(most_s), "workers of a killed server are alive"
                time.sleep(0.02)
        finally:
            careless.kill()
        with field.serve({"server": {"port": server.port}}):
            pass


@experiment(
    "F10",
    injects="a second server on the same port and data folder",
    holds="exits with a status other than 0 within 3 s; the first is unharmed",
    control="another port",
    red="did not exit",
    tier="thorough",
)
def second_instance(field: Field) -> None:
    with field.serve() as server:
        config = {"server": {"port": field.either(server.port, 0)}, "state": server.config["state"]}
        with field.serve(config, wait=False) as second:
            assert second.ended(3.0) != 0
            assert "Traceback" not in second.log


@experiment(
    "F13",
    injects="three times Ctrl-C under load, with ten minutes of grace",
    holds="exit code 0 within 3 s",
    control="one time",
    red="did not exit",
)
def triple_interrupt(field: Field) -> None:
    with (
        field.serve({"server": {"grace_s": 600.0}}, checked=False) as server,
        server.client.stream("pace=0.05", max_tokens=100_000) as stream,
    ):
        stream.first()
        server.worker_pids()
        for _ in range(field.either(3, 1)):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert server.ended(3.0) == 0
        stream.rest()


@experiment(
    "F19",
    injects="half a minute of clients that crash, leave and ask nonsense, while workers are killed",
    holds="books, descriptors, memory and golden answers as before",
    control="connections that are never closed (--leak)",
    red="FAILED",
)
def short_soak(field: Field) -> None:
    command = [sys.executable, "-m", "bench.soak", "--minutes", "0.5", "--kill-every", "6", "--port", "8771"]
    done = subprocess.run(
        command + field.either([], ["--leak"]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=os.getcwd(),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# -- models and configuration --------------------------------------------------------------------


@experiment(
    "F29",
    injects="a configuration file that becomes bad, half-written, missing, and good again, under load",
    holds="the old configuration serves and the refusal is visible; the good one is adopted without a failed request",
    control="server.reload: false",
    red="was not adopted",
    tier="thorough",
)
def reloads(field: Field) -> None:
    base = {"server": {"reload": field.either(True, False)}}
    with field.serve(base) as server, load(4, lambda: is_served(server.client)) as wrong:
        good = server.config
        if not field.is_control:
            for bad in (json.dumps({**good, "models": {"tiny": {"sauce": 1}}}), json.dumps(good)[:40], "- a\nb: ["):
                refused = server.metrics().sum("inferd_config_reloads_total", result="refused")
                server.file.write_text(bad)
                server.until(
                    lambda before=refused: (
                        server.metrics().sum("inferd_config_reloads_total", result="refused") > before
                    ),  # type: ignore[misc]
                    "the refusal is counted",
                    5,
                )
                assert server.metrics().sum("inferd_config_last_reload_successful") == 0
            server.file.unlink()
            time.sleep(1.2)  # two looks at nothing
        more = {**good, "models": {**good["models"], "second": {"source": "tiny"}}}
        server.write(more)
        watch = Stopwatch()
        while server.client.complete("hello", model="second").status != 200:
            assert not watch.is_past(6.0), "a good configuration was not adopted"
            time.sleep(0.05)
        server.write(good)
        server.until(lambda: server.client.complete("hello", model="second").status == 404, "the model is gone", 10)
        assert not wrong, f"{len(wrong)} requests failed: {wrong[0]}"
        assert server.is_ready()


ON_DEMAND: JSON = {"models": {"tiny": {"source": "tiny"}, "late": {"source": "tiny", "load": "on_demand"}}}


@experiment(
    "F30",
    injects="100 concurrent loads and unloads of one model, among requests for it",
    holds="one at a time: never more than one worker of it, each call is answered, and it serves afterwards",
    control="the model has three replicas",
    red="workers",
)
def load_and_unload(field: Field) -> None:
    models = {**ON_DEMAND["models"], "late": {**ON_DEMAND["models"]["late"], "replicas": field.either(1, 3)}}
    with field.serve({"models": models}) as server:
        most = 0
        over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.01):
                most = max(most, len(server.worker_pids()))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()

        def act(number: int) -> int:
            if number % 10 == 0:
                return server.client.complete("hello", model="late", seconds=60).status
            return server.operator.post(f"/admin/models/late/{('load', 'unload')[number % 2]}", seconds=60).status

        statuses = together(100, act)
        over.set()
        watching.join()
        assert set(statuses) <= {200, 409, 503}, statuses
        assert most <= 3, f"{most} workers at once for two models"  # an old one may be leaving
        assert server.client.complete("hello", model="late").status == 200
        _unload(server, "late")


@experiment(
    "F31",
    injects="unloading a model with work in flight",
    holds="the work is finished first, or the unload refused",
    control="its worker is killed instead",
    red="cut off",
)
def unload_in_use(field: Field) -> None:
    with field.serve(ON_DEMAND) as server:
        first_workers = server.worker_pids()
        assert server.client.complete("hello", model="late").status == 200
        with server.client.stream(SLOW, model="late", max_tokens=60) as stream:
            first = stream.first()
            if field.is_control:
                (worker,) = set(server.worker_pids()) - set(first_workers)
                os.kill(worker, signal.SIGKILL)
            unloading = threading.Thread(target=_unload_quietly, args=(server,), daemon=True)
            unloading.start()
            text = first["choices"][0]["text"] + stream.rest()
            assert stream.error is None, f"work was cut off: {stream.error}"
            assert len(text) == 60
            unloading.join(20)
        assert not unloading.is_alive()
        assert len(server.worker_pids()) == 1, "the model is still there"


def _unload_quietly(server: Server) -> None:
    with contextlib.suppress(OSError):
        server.operator.post("/admin/models/late/unload", seconds=40)


@experiment(
    "F61",
    injects="scrapes all the while a worker is killed and the server is overloaded",
    holds="each within 1 s, counters never go back",
    control="the server is stopped for 2 s",
    red="a scrape took",
    tier="thorough",
)
def scrapes(field: Field) -> None:
    with field.serve() as server, load(12, lambda: _asked(server)):
        page: Page | None = None
        began = Stopwatch()
        for turn in range(20):
            if turn == 5:
                os.kill(server.worker_pids()[0], signal.SIGKILL)
            if turn == 8 and field.is_control:
                os.kill(server.process.pid, signal.SIGSTOP)
                threading.Timer(2.0, os.kill, (server.process.pid, signal.SIGCONT)).start()
            asked = Stopwatch()
            latest = server.metrics()
            took = asked.seconds
            assert took <= 1.0, f"a scrape took {took:.1f} s"
            assert page is None or not latest.decreased(page), latest.decreased(page)
            page = latest
            time.sleep(0.05)
        assert began.seconds < 20


def _asked(server: Server) -> None:
    server.client.complete("pace=0.005", max_tokens=8)


@experiment(
    "F62",
    injects="a model that takes its time to load",
    holds="live and not ready meanwhile; what is asked waits and is answered",
    control="it loads at once",
    red="ready while",
    tier="everyday",
)
def slow_load(field: Field) -> None:
    gate = field.folder / "gate"
    models = {"tiny": {"source": "tiny"}, "slow": {"source": f"gate={gate}", "load": "on_demand"}}
    if field.is_control:
        gate.touch()
    with field.serve({"models": models}) as server:
        # A model on demand is no part of readiness until it is asked for; its own state says the rest.
        asked: list[int] = []
        asking = threading.Thread(
            target=lambda: asked.append(server.client.complete("hello", model="slow").status), daemon=True
        )
        asking.start()
        server.until(lambda: _state(server, "slow") in ("loading", "ready"), "the model is being loaded", 10)
        time.sleep(1.0)
        assert _state(server, "slow") != "ready", "the model is ready while it loads"
        assert server.client.get("/health/live").status == 200
        assert not asked
        gate.touch()
        asking.join(20)
        assert asked == [200]
        _unload(server, "slow")


def _unload(server: Server, model: str) -> None:
    """Back to how things were before the model was asked for."""
    assert server.operator.post(f"/admin/models/{model}/unload", seconds=40).status == 200


def _state(server: Server, model: str) -> str:
    report = server.operator.get("/admin/status").json
    return next(str(found["state"]) for found in report["models"] if found["name"] == model)


@experiment(
    "F63",
    injects="a rolling restart under load, with clients that never try again",
    holds="no request fails, and every worker is another one afterwards",
    control="the workers are killed instead",
    red="failed",
    tier="everyday",
)
def rolling_restart(field: Field) -> None:
    with field.serve(TWO_REPLICAS) as server:
        before = set(server.worker_pids())
        with load(6, lambda: _streamed(server)) as wrong:
            time.sleep(0.2)
            if field.is_control:
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
                server.until(lambda: not before & set(server.worker_pids()) and server.is_ready(), "others work", 20)
            else:
                assert server.operator.post("/admin/models/tiny/restart", seconds=60).status == 200
            time.sleep(0.2)
        assert not wrong, f"{len(wrong)} requests failed: {wrong[0]}"
        assert not before & set(server.worker_pids()), "a worker of before is still there"


def _streamed(server: Server) -> str | None:
    stream = Stream(server.client, "pace=0.01", max_tokens=10)
    try:
        text = stream.rest()
        return (
            None
            if stream.status == 200 and len(text) == 10 and stream.error is None
            else f"{stream.status} {stream.error}"
        )
    finally:
        stream.leave()
