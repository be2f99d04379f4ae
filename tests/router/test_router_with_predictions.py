"""Predictions through the router and real worker processes: answered, tried again, ended once."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from tests.predict.test_sequences import STATES, write_sum
from tests.router.tickets import ticket_of
from tests.worker.watching import IMPATIENT, Witness, outputs_of, until

from inferd import clock
from inferd.config import BatchingConfig, Config, ModelConfig, SequenceConfig
from inferd.events import StepDone
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import Stream, open_stream
from inferd.types import Failure, GenerateRequest, Output, PredictRequest, TextPrompt

MODEL = """
import os, time

class Squares:
    inputs = {"n": "INT64[-1, 1]"}
    outputs = {"square": "INT64[-1, 1]"}
    max_batch_size = 8
    def predict(self, n):
        if (n == 13).any():
            raise ValueError("thirteen")
        while (n == 7).any() and not os.path.exists(__file__ + ".go"):
            open(__file__ + ".begun", "w").close()
            time.sleep(0.005)
        return n * n

class Shares:
    inputs = {"n": "INT64[-1, 1]"}
    outputs = {"share": "INT64[-1, 1]"}
    max_batch_size = 8
    def predict(self, n):
        return n * 100 // n.sum()

class Countdown:
    def predict(self, n: int) -> int:
        while n:
            yield n
            n -= 1
"""

_numbers = itertools.count()


def asked(*rows: int, model: str = "squares", shape: tuple[int, ...] = (), **fields: object) -> PredictRequest:
    tensor = {"name": "n", "datatype": "INT64", "shape": shape or (len(rows), 1), "data": rows}
    return PredictRequest(
        id=f"p{next(_numbers)}",
        model=model,
        dialect="v2",
        body=json.dumps({"inputs": [tensor]}).encode(),
        arrived_at=clock.now(),
        **fields,  # type: ignore[arg-type]
    )


def answer(output: Output) -> list[int]:
    assert output.prediction is not None, output.end
    found: list[int] = msgspec.json.decode(output.prediction.body)["outputs"][0]["data"]
    return found


async def last(stream: Stream) -> Output:
    (*_, output) = await outputs_of(stream)
    assert output.end is not None
    return output


def failure(output: Output) -> Failure:
    assert output.end is not None
    assert output.end.failure is not None
    return output.end.failure


@asynccontextmanager
async def serving(folder: Path, cls: str = "Squares", **fields: object) -> AsyncIterator[tuple[Router, Witness]]:
    path = folder / "model.py"
    path.write_text(MODEL)
    config = ModelConfig(source=f"{path}:{cls}", allow_code=True, **fields)  # type: ignore[arg-type]
    witness = Witness()
    router = Router(Config(models={cls.lower(): config}), witness, patience=IMPATIENT)
    await router.start()
    try:
        await router.settled()
        assert not router.load_failures()
        yield router, witness
    finally:
        await router.stop()


async def answered(folder: Path) -> None:
    async with serving(folder) as (router, witness):
        outputs = [await last(open_stream(router, asked(number))) for number in range(5)]
        assert [answer(output) for output in outputs] == [[0], [1], [4], [9], [16]]
        for output in outputs:
            assert output.end is not None
            told = output.end.timings
            stages = (told.dispatched, told.tokenized, told.scheduled, told.first_token, told.finished)
            assert list(stages) == sorted(stage for stage in stages if stage is not None)
        good, bad, also_good = [await last(s) for s in [open_stream(router, asked(number)) for number in (1, 13, 2)]]
        assert (answer(good), answer(also_good)) == ([1], [4])
        assert failure(bad).kind == "internal"
        assert "thirteen" not in failure(bad).message
        assert answer(await last(open_stream(router, asked(*range(20, 45))))) == [
            number * number for number in range(20, 45)
        ]
        chat = GenerateRequest(id="chat", model="squares", prompt=TextPrompt(text="hi"), arrived_at=clock.now())
        assert "generates no text" in failure(await last(open_stream(router, chat))).message
        rows = [event.stats.batch_rows for event in witness.events if isinstance(event, StepDone)]
        assert sum(rows) >= 5 + 2 + 25
        assert max(rows) <= 8


def test_predictions_are_answered_and_one_that_fails_fails_alone(tmp_path: Path) -> None:
    asyncio.run(answered(tmp_path))


async def audited(folder: Path) -> None:
    async with serving(folder, "Shares", batching=BatchingConfig(audit=1.0)) as (router, witness):
        assert answer(await last(open_stream(router, asked(1, 3, model="shares")))) == [25, 75]

        def told() -> str:
            (status,) = router.models()
            assert status.info is not None
            return status.info.not_batched

        await until(lambda: bool(told()), "the audit's finding is told")
        assert told() == "an audit found that the output 'share' of a row changes with the rows beside it"
        (audit,) = [event for event in witness.events if isinstance(event, StepDone) and event.stats.audited_rows]
        assert audit.stats.not_batched == told()


def test_a_model_whose_audit_finds_a_difference_says_so_in_its_status(tmp_path: Path) -> None:
    asyncio.run(audited(tmp_path))


async def continued(folder: Path) -> None:
    states = SequenceConfig(states=STATES)
    config = ModelConfig(source=str(write_sum(folder / "sum.onnx", layers=1)), replicas=2, sequence=states)
    router = Router(Config(models={"sum": config}), Witness(), patience=IMPATIENT)
    await router.start()
    try:
        await router.settled()
        for place in range(3):
            for name in range(12):
                tensors: list[dict[str, object]] = [
                    {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [name]},
                    {"name": "scale", "datatype": "FP32", "shape": [], "data": [1]},
                ]
                request = PredictRequest(
                    id=f"{name}.{place}",
                    model="sum",
                    dialect="v2",
                    body=json.dumps({"inputs": tensors}).encode(),
                    arrived_at=clock.now(),
                    sequence=f"s{name}",
                    sequence_start=not place,
                )
                assert answer(await last(open_stream(router, request))) == [name * (place + 1)]
    finally:
        await router.stop()


def test_all_requests_of_a_sequence_go_to_the_replica_that_has_its_state(tmp_path: Path) -> None:
    asyncio.run(continued(tmp_path))


async def streamed(folder: Path) -> None:
    async with serving(folder, "Countdown") as (router, _):
        request = asked(5, model="countdown", shape=(1,))
        outputs = await outputs_of(open_stream(router, request))
        assert [answer(output) for output in outputs[:-1]] == [[5], [4], [3], [2], [1]]
        assert outputs[-1].end is not None
        assert outputs[-1].end.outcome == "done"
        left = open_stream(router, asked(10**9, model="countdown", shape=(1,)))
        await anext(left)
        left.close()
        assert (await last(left)).end is not None
        assert router.replicas("countdown")[0].num_in_flight == 0


def test_several_answers_come_in_order_and_a_reader_may_leave(tmp_path: Path) -> None:
    asyncio.run(streamed(tmp_path))


async def slowly_read(folder: Path) -> None:
    async with serving(folder, "Countdown") as (router, _):
        stream = open_stream(router, asked(10**9, model="countdown", shape=(1,)))
        await until(lambda: ticket_of(stream).is_paused, "the reader is found to be slow")
        await asyncio.sleep(0.5)  # in which a model that were not told would answer many thousand times
        read = 0
        while ticket_of(stream).is_paused:
            await anext(stream)
            read += 1
        assert read < 5000  # of a milliard: what waited was bounded
        for _ in range(3 * read):
            await anext(stream)
        stream.close()
        assert (await last(stream)).end is not None


def test_a_slow_reader_of_several_answers_slows_the_model_down(tmp_path: Path) -> None:
    asyncio.run(slowly_read(tmp_path))


async def killed(folder: Path) -> None:
    async with serving(folder, replicas=1) as (router, _):
        gate, begun = folder / "model.py.go", folder / "model.py.begun"
        again = open_stream(router, asked(7))
        never = open_stream(router, asked(7, idempotent=False))
        await until(begun.exists, "a request is being computed")
        (replica,) = router.replicas("squares")
        assert isinstance(replica, LocalReplica)
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        assert failure(await last(never)).kind == "worker_died"
        gate.touch()
        assert answer(await last(again)) == [49]


def test_a_prediction_whose_worker_dies_runs_again_if_it_may(tmp_path: Path) -> None:
    asyncio.run(killed(tmp_path))


async def cancelled(folder: Path) -> None:
    async with serving(folder) as (router, _):
        running = open_stream(router, asked(7))
        await until((folder / "model.py.begun").exists, "a request is being computed")
        waiting = open_stream(router, asked(1))
        waiting.close()
        (folder / "model.py.go").touch()
        assert answer(await last(running)) == [49]
        assert (end := (await last(waiting)).end) is not None
        assert end.outcome == "cancelled"


def test_a_reader_that_leaves_cancels_what_waits(tmp_path: Path) -> None:
    asyncio.run(cancelled(tmp_path))
