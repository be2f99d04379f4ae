"""A replica whose ranks are on this machine and on nodes: it answers as one process, and ends and comes back as one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from bench.namespaces import can_make_hosts, host
from tests.app.test_replaced_files import inferd
from tests.engine.test_engine import make_request
from tests.engine.test_engine import run as run_engine
from tests.nodes.joined import Cluster, Node, cluster
from tests.predict.live import serving
from tests.tiers import THOROUGH
from tests.worker.watching import children, is_running, next_output, outputs_of, text_of, until, until_now

from inferd import clock
from inferd.config import KVCacheConfig, ModelConfig, NodesConfig, ParallelConfig, SchedulerConfig
from inferd.engine.load import create_backend
from inferd.events import ReplicaChanged, Retried
from inferd.planning.memory import plan_model
from inferd.registry.source import resolve
from inferd.router.replicas.replica import LocalReplica
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, SamplingParams, TextPrompt
from inferd.worker.process import WORKER_COMMAND

TWO = ParallelConfig(pipeline=2, machines=2)
PROMPT = "Once upon a time there was a dog"


def spread(parallel: ParallelConfig = TWO, **settings: object) -> ModelConfig:
    return ModelConfig(
        source="demo",
        threads=1,
        dtype="float32",
        parallel=parallel,
        resume_streams=True,
        scheduler=SchedulerConfig(max_num_seqs=4),
        kv_cache=KVCacheConfig(num_blocks=200),
        **settings,  # type: ignore[arg-type]
    )


def request(name: str, tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=TextPrompt(text=PROMPT),
        sampling=sampling,
        explicit=SamplingParams.__struct_fields__,
        arrived_at=clock.now(),
    )


def answer_of_one_process(tokens: int) -> str:
    engine = create_backend("m", spread(ParallelConfig()), lambda *_: None)
    try:
        (found,) = run_engine(engine, make_request("r", PROMPT, max_tokens=tokens, temperature=0.0, ignore_eos=True))
        return found.text()
    finally:
        engine.close()


def replica_of(made: Cluster) -> LocalReplica:
    (replica,) = made.router.replicas("tiny")
    assert isinstance(replica, LocalReplica)
    return replica


def others_of(made: Cluster) -> tuple[str, ...]:
    """The nodes with ranks of the replica, where it is ready."""
    replica = replica_of(made)
    return replica.spot.others if replica.is_ready else ()


def ranks_on(node: Node) -> list[int]:
    return [pid for pid in children(node.process.pid) if b"ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def disturbed(made: Cluster, name: str, tokens: int, disturb: Callable[[], None], group: list[int]) -> str:
    """The text of a stream that is disturbed; every process of the group is gone then."""
    stream = open_stream(made.router, request(name, tokens))
    first = await next_output(stream)
    began = time.monotonic()
    disturb()
    await until(lambda: not any(map(is_running, group)), "the group is gone", 60)
    print(f"{name}: the group was gone after {time.monotonic() - began:.2f} s")
    found = await asyncio.wait_for(outputs_of(stream), 120)
    print(f"{name}: the answer ended after {time.monotonic() - began:.2f} s")
    assert found[-1].end is not None
    assert found[-1].end.outcome == "done", found[-1].end
    return text_of([first, *found])


def reasons(made: Cluster) -> list[str]:
    return [event.reason for event in made.witness.events if isinstance(event, ReplicaChanged) if event.state == "died"]


@THOROUGH
def test_a_replica_on_two_machines_answers_as_one_process_and_outlives_a_node(tmp_path: Path) -> None:
    tokens = 200

    async def scenario() -> None:
        async with cluster(tmp_path, spread(), command=WORKER_COMMAND) as made:
            await until(lambda: "its ranks need 1 node" in replica_of(made).reason, "it says what it waits for")
            one = await made.join("one")
            await until(lambda: others_of(made) == ("one",), "it is ready", 60)
            assert text_of(await outputs_of(open_stream(made.router, request("whole", tokens)))) == expected
            await made.join("two")
            rank_0 = replica_of(made).pid
            assert rank_0 is not None
            group = [rank_0, *ranks_on(one)]
            assert len(group) == 2
            assert await disturbed(made, "killed node", tokens, one.kill, group) == expected
            await until(lambda: others_of(made) == ("two",), "its rank is on the other node", 60)
            assert "its rank 1 was lost: its node one is gone" in reasons(made)[-1]
            assert [event.kind for event in made.witness.events if isinstance(event, Retried)] == ["continuation"]

    expected = answer_of_one_process(tokens)
    asyncio.run(scenario())


@pytest.mark.soak
def test_a_model_that_this_machine_does_not_hold_is_served_over_a_node_without_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 50
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("INFERD_NODES__LISTEN", "127.0.0.1:0")
    model = {"source": "demo", "device": "cpu", "threads": 1, "dtype": "float32", "kv_cache": {"memory_bytes": 10**8}}
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    def replica() -> dict[str, object]:
        ((found,),) = (each["replicas"] for each in json.loads(inferd("status", "--json")[1])["models"])
        return dict(found)

    one = plan_model("m", msgspec.convert(model, ModelConfig), free_bytes=1 << 40)
    assert one is not None
    expected = answer_of_one_process(tokens)
    with serving(tmp_path, {"m": model}, memory_bytes=one.total_bytes - 1) as server:
        assert "m is divided among 2 ranks (tensor 1 x pipeline 2) on 2 machines" in (tmp_path / "log").read_text()
        assert "its ranks need 1 node beside this machine, and none joined" in str(replica()["detail"])
        variable, *command = inferd("node", "token")[1].splitlines()[-1].split()
        environment = {**os.environ, "INFERD_NODE_TOKEN": variable.partition("=")[2]}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        words = [sys.executable, "-m", "inferd", *command[1:], "--name", "one", "--memory", "1GiB"]
        with subprocess.Popen([*words, "--cache", str(tmp_path / "cache")], env=environment) as node:
            try:
                until_now(lambda: replica()["state"] == "ready", "its ranks are on both machines", 60)
                assert replica()["rank_nodes"] == ["one"]
                answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
                assert answer.json()["choices"][0]["text"] == expected
            finally:
                node.kill()


FAULTS = [("kill", 0), ("kill", 1), ("stop", 0), ("stop", 1)]


@pytest.mark.soak
@pytest.mark.parametrize("parallel", [TWO, ParallelConfig(tensor=2, machines=2)], ids=["stages", "layers"])
@pytest.mark.parametrize(("fault", "lost"), FAULTS)
def test_a_lost_rank_ends_the_group_which_comes_back(
    fault: str, lost: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    tokens = 200

    async def scenario() -> None:
        async with cluster(tmp_path, spread(parallel), "one", command=WORKER_COMMAND) as made:
            await until(lambda: others_of(made) == ("one",), "it is ready", 60)
            rank_0 = replica_of(made).pid
            assert rank_0 is not None
            group = [rank_0, *ranks_on(made.nodes[0])]
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
            found = await disturbed(made, f"{fault} {lost}", tokens, lambda: os.kill(group[lost], number), group)
            assert found == expected
            assert made.states("one") == ["ready"]
            if (fault, lost) == ("kill", 1):
                assert "its rank 1 was lost: its process was killed by signal 9" in reasons(made)[-1]

    expected = answer_of_one_process(tokens)
    asyncio.run(scenario())


@pytest.mark.soak
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root, ip and tun")
def test_a_cut_link_ends_the_group_which_comes_back_on_another_node(tmp_path: Path) -> None:
    tokens = 200

    async def scenario() -> None:
        settings = NodesConfig(listen="0.0.0.0:0")
        with host(11) as near, host(12) as far:
            async with cluster(tmp_path, spread(), command=WORKER_COMMAND, settings=settings) as made:
                node = await made.join("far", on=far)
                await until(lambda: others_of(made) == ("far",), "it is ready", 60)
                await made.join("near", on=near)
                rank_0 = replica_of(made).pid
                assert rank_0 is not None
                group = [rank_0, *ranks_on(node)]
                assert len(group) == 2
                assert await disturbed(made, "cut link", tokens, far.cut, group) == expected
                await until(lambda: others_of(made) == ("near",), "its rank is on the other node", 60)
                assert reasons(made)[-1].endswith("and its machine acknowledges nothing")

    expected = answer_of_one_process(tokens)
    asyncio.run(scenario())


@pytest.mark.soak
def test_a_node_with_a_rank_that_leaves_is_drained_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, spread(), "one", command=WORKER_COMMAND) as made:
            await until(lambda: others_of(made) == ("one",), "it is ready", 60)
            await made.join("two")
            stream = open_stream(made.router, request("r", 400))
            first = await next_output(stream)
            made.nodes[0].process.send_signal(signal.SIGTERM)
            assert text_of([first, *await outputs_of(stream)]) == expected
            assert await made.nodes[0].ended() == 0
            await until(lambda: others_of(made) == ("two",), "its rank is on the other node", 60)
            assert not [event for event in made.witness.events if isinstance(event, Retried)]

    expected = answer_of_one_process(400)
    asyncio.run(scenario())


@pytest.mark.soak
def test_files_that_a_node_lacks_are_copied_and_the_answer_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLIND", "1")
    copy = tmp_path / "model"
    shutil.copytree(resolve("demo"), copy)

    async def scenario() -> None:
        model = msgspec.structs.replace(spread(), source=str(copy))
        async with cluster(tmp_path, model, "one", command=WORKER_COMMAND) as made:
            await until(lambda: others_of(made) == ("one",), "it is ready", 60)
            assert text_of(await outputs_of(open_stream(made.router, request("r", 50)))) == expected
            assert list((tmp_path / "cache-one" / "blobs").iterdir())

    expected = answer_of_one_process(50)
    asyncio.run(scenario())


@pytest.mark.soak
def test_a_node_with_too_little_memory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, spread(), command=WORKER_COMMAND) as made:
            await made.join("small", "--memory", "1MiB")
            await until(lambda: replica_of(made).failure is not None, "it has failed", 60)
            failure = replica_of(made).failure
            assert failure is not None
            assert "rank 1: its part of the weights takes" in failure.message
            assert failure.message.endswith("or let the node give more memory (inferd node --memory).")

    asyncio.run(scenario())
