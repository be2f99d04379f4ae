"""A batch is worked on to its end, whatever happens to the server, the disk and the batch."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.jobs.job_site import TENANT, Crash, Echo, Points, Server, Site, ids_of, in_loop, lines

from inferd import clock
from inferd.config.server import JobsConfig
from inferd.errors import InvalidRequest, Overloaded, StoredNotFound
from inferd.events import BatchEnded, LinesAnswered
from inferd.jobs import machine
from inferd.jobs import run as run_module
from inferd.jobs.batch import Batch, Place, Progress, StoredFile, Tokens
from inferd.jobs.folder import Disk, Folder
from inferd.jobs.results import Answer
from inferd.jobs.rows import ROW_BYTES, Query
from inferd.jobs.runner import Runner
from inferd.jobs.store import LeaseLost
from inferd.jobs.survey import Survey


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines make several commits."""
    for name, value in (("MAX_AHEAD", 4), ("_GROUP", 3), ("COMMIT_S", 0.0), ("TICK_S", 0.002), ("LOOK_S", 0.01)):
        monkeypatch.setattr(run_module, name, value)
    monkeypatch.setattr(run_module, "PAUSE_S", 0.01)


@pytest.fixture
def site(tmp_path: Path, state_url: str) -> Site:
    return Site(tmp_path, state_url)


async def until(server: Server, batch: Batch, **fields: object) -> Batch:
    """Wait until the batch has these fields."""
    async with asyncio.timeout(60):
        while True:
            found: Batch = await server.store.batch(TENANT, batch.id)
            if all(getattr(found, name) == value for name, value in fields.items()):
                return found
            await asyncio.sleep(0.005)


@in_loop
async def test_every_request_is_answered_in_the_order_of_the_lines(site: Site) -> None:
    async with site.server() as server:
        await site.add(server, lines(20, fails=5))
        batch = await server.work()
        assert (batch.status, batch.total, batch.num_done, batch.num_failed) == ("completed", 20, 16, 4)
        assert batch.tokens == Tokens(32, 0, 16)
        output, errors = site.results(batch)
        assert ids_of(output) == [f"r{number}" for number in range(20) if number % 5 != 4]
        assert ids_of(errors) == ["r4", "r9", "r14", "r19"]
        first = json.loads(output.splitlines()[0])
        assert first["response"]["body"]["echo"] == "p0"
        assert server.sender.most_at_work > 1
        assert site.left() == []
        files = await server.store.files(TENANT, "batch_output", Query())
        assert {file.id: file.num_bytes for file in files.files} == {
            batch.output_file_id: len(output),
            batch.error_file_id: len(errors),
        }
        answered = [event for event in site.told if isinstance(event, LinesAnswered)]
        assert sum(event.num_done for event in answered) == 16
        assert [event for event in site.told if isinstance(event, BatchEnded)] == [BatchEnded(status="completed")]


class Slow(Echo):
    async def ask(self, batch: Batch, body: bytes, request_id: str, note: Callable[[str], None]) -> Answer:
        answer = await super().ask(batch, body, request_id, note)
        await asyncio.sleep(0.05)
        return answer


class WaitingDisk(Disk):
    """Writes only after another request was asked, as long as there are more."""

    def __init__(self, sender: Echo, most: int) -> None:
        self._sender = sender
        self._most = most
        self.num_waits = 0

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        before = self._sender.asked.total()
        if 0 < before < self._most:  # 0: it is the upload
            self.num_waits += 1
            end = time.monotonic() + 30
            while self._sender.asked.total() == before:
                assert time.monotonic() < end, "no request is asked while answers are written"
                time.sleep(0.005)
        super().write(descriptor, data, offset)


@in_loop
async def test_requests_are_asked_while_answers_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_AHEAD", 64)
    site = Site(tmp_path, f"sqlite://{tmp_path}/state.db", max_in_flight=4)
    sender = Slow()
    disk = WaitingDisk(sender, 100)
    async with site.server(disk=disk) as server:
        server.sender = sender
        await site.add(server, lines(100))
        batch = await server.work()
        assert batch.status == "completed"
        assert ids_of(site.results(batch)[0]) == [f"r{number}" for number in range(100)]
        assert disk.num_waits


@in_loop
async def test_no_more_bytes_of_lines_are_held_in_memory_than_may_be(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = lines(9)
    monkeypatch.setattr(run_module, "MAX_AHEAD", 64)
    monkeypatch.setattr(run_module, "MAX_HELD_BYTES", 3 * len(content.splitlines()[0]))
    async with site.server() as server:
        server.sender.is_open.clear()
        await site.add(server, content)
        work = asyncio.create_task(server.work())
        async with asyncio.timeout(60):
            while server.sender.at_work < 3:
                await asyncio.sleep(0.001)
        server.sender.is_open.set()
        assert (await work).num_done == 9
        assert server.sender.most_at_work == 3


class OneByOne(Echo):
    """Answers one request after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = asyncio.Lock()

    async def ask(self, batch: Batch, body: bytes, request_id: str, note: Callable[[str], None]) -> Answer:
        async with self._turn:
            await asyncio.sleep(0.01)
            return await super().ask(batch, body, request_id, note)


@in_loop
async def test_answers_that_come_within_the_interval_are_written_together(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "MAX_AHEAD", 64)
    monkeypatch.setattr(run_module, "COMMIT_S", 60.0)
    async with site.server() as server:
        server.sender = OneByOne()
        await site.add(server, lines(20))
        assert (await server.work()).status == "completed"
        counts = [event.num_done for event in site.told if isinstance(event, LinesAnswered)]
        assert sum(counts) == 20
        assert len(counts) <= 2, "the first answers, which none were written before, and all others"


async def cancelled_after(server: Server, batch: Batch, count: int) -> Batch:
    """Work on the batch, and cancel it when so many of its requests are answered."""
    ask = server.sender.ask

    async def ask_some(self: Echo, *given: object) -> object:
        if server.sender.asked.total() == count:
            server.sender.is_open.clear()
        return await ask(*given)  # type: ignore[arg-type]

    server.sender.ask = ask_some.__get__(server.sender)  # type: ignore[method-assign]
    work = asyncio.create_task(server.work())
    await until(server, batch, num_answered=count)
    await server.store.cancel(TENANT, batch.id)
    found = await work
    server.sender.ask = ask  # type: ignore[method-assign]
    server.sender.is_open.set()
    return found


async def killed_at(
    tmp_path: Path, number: int, content: bytes, *, resumed_after: int = 0
) -> tuple[bool, bytes, bytes]:
    """Kill the server at a point, and let others end its work: whether it was killed, and the results.
    ``resumed_after``: before, the batch is cancelled after so many answers, and resumed."""
    folder = tmp_path / str(number)
    folder.mkdir()
    site = Site(folder, f"sqlite://{folder}/state.db")
    async with site.server() as first:
        batch = await site.add(first, content)
        if resumed_after:
            await cancelled_after(first, batch, resumed_after)
            await first.store.resume(TENANT, batch.id)
    points = Points(number)
    was_killed = False
    async with site.server(points) as server:
        try:
            await server.work()
        except Crash:
            was_killed = True
    async with site.server() as server:
        taken = await server.store.take(frozenset(), 1)
        for batch, lease in taken:
            await server.run(batch, lease).go()
        await server.store.sweep()
        batch = await server.store.batch(TENANT, "batch_1")
        assert batch.status == "completed"
        output, errors = site.results(batch)
        there = sorted(path.name for path in (folder / "jobs" / "files").iterdir())
        assert {batch.input_file_id, batch.output_file_id, batch.error_file_id} <= set(there)
        files = await server.store.files(TENANT, "batch_output", Query())
        assert {file.id for file in files.files} == {batch.output_file_id, batch.error_file_id}
        assert site.left() == []
    return was_killed, output, errors


async def killed_everywhere(tmp_path: Path, content: bytes, step: int, *, resumed_after: int = 0) -> int:
    """Kill a server at each ``step``-th point of a whole run; the number of points."""
    was_killed, *expected = await killed_at(tmp_path, -1, content)
    assert not was_killed
    number = 0
    while True:
        was_killed, *found = await killed_at(tmp_path, number, content, resumed_after=resumed_after)
        assert found == expected, f"killed at point {number}"
        if not was_killed:
            return number
        number += step


@in_loop
async def test_a_server_that_is_killed_at_any_write_changes_no_result(tmp_path: Path) -> None:
    assert await killed_everywhere(tmp_path, lines(9, fails=4), step=7) > 30


@in_loop
async def test_a_server_that_is_killed_while_it_works_on_a_resumed_batch_changes_no_result(tmp_path: Path) -> None:
    assert await killed_everywhere(tmp_path, lines(9, fails=4), step=11, resumed_after=5) > 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@in_loop
async def test_a_server_that_is_killed_at_every_write_of_a_long_run_changes_no_result(tmp_path: Path) -> None:
    assert await killed_everywhere(tmp_path, lines(240, fails=4), step=1) > 300


@in_loop
async def test_a_server_that_was_thought_dead_changes_nothing(site: Site) -> None:
    """It goes on to write while another one has its batch."""
    async with site.server() as one, site.server() as two:
        made = await site.add(one, lines(12))
        batch, lease = await one.take()
        one.sender.is_open.clear()
        lost = asyncio.create_task(one.run(batch, lease).go())
        async with asyncio.timeout(60):
            while not one.sender.at_work:
                await asyncio.sleep(0.005)
        assert await two.store.take(frozenset(), 1) == [], "a living server keeps its batch"
        await two.store.give_back(lease._replace(fence=99))
        await one.store.give_back(lease)
        two.sender.is_open.clear()
        second = asyncio.create_task(two.work())
        async with asyncio.timeout(60):
            while not two.sender.at_work:
                await asyncio.sleep(0.005)
        one.sender.is_open.set()
        with pytest.raises(LeaseLost):
            await lost
        two.sender.is_open.set()
        batch = await second
        assert batch.status == "completed"
        assert ids_of(site.results(batch)[0]) == [f"r{number}" for number in range(12)]
        assert made.id == batch.id


@pytest.mark.parametrize("how", ["cancelled", "expired", "failed"])
@in_loop
async def test_what_is_not_answered_at_an_early_end_says_why(site: Site, how: str) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(6), expires_at=clock.wall() + (0.0 if how == "expired" else 3600))
        server.sender.is_open.clear()
        work = asyncio.create_task(server.work())
        if how != "expired":
            await until(server, batch, status="in_progress")
        if how == "cancelled":
            assert (await server.store.cancel(TENANT, batch.id)).status == "cancelling"
        elif how == "failed":
            server.sender.is_valid = False
        found = await work
        assert (found.status, found.num_done, found.num_failed) == (how, 0, 6)
        output, errors = site.results(found)
        assert output == b""
        assert ids_of(errors) == [f"r{number}" for number in range(6)]
        assert {json.loads(line)["error"]["code"] for line in errors.splitlines()} == {f"batch_{how}"}
        assert server.sender.at_work == 0, "its requests have ended"
        if how == "failed":
            assert found.problems[0].code == "invalid_api_key"


@in_loop
async def test_a_cancelled_batch_that_is_resumed_asks_what_has_no_answer(site: Site) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(12, fails=5))
        before = await cancelled_after(server, batch, 6)
        assert (before.status, before.num_done, before.num_failed) == ("cancelled", 5, 7)
        output, errors = site.results(before)
        assert sorted(ids_of(output) + ids_of(errors)) == sorted(f"r{number}" for number in range(12))
        resumed = await server.store.resume(TENANT, batch.id)
        assert (resumed.status, resumed.total, resumed.num_answered) == ("in_progress", 12, 0)
        with pytest.raises(InvalidRequest, match="in_progress"):
            await server.store.resume(TENANT, batch.id)
        asked = server.sender.asked.copy()
        found = await server.work()
        again = server.sender.asked - asked
        assert (found.status, found.num_done, found.num_failed, found.num_early) == ("completed", 10, 2, 0)
        assert found.tokens == Tokens(20, 0, 10), "answers before count too"
        output, errors = site.results(found)
        assert ids_of(output) == [f"r{number}" for number in range(12) if number % 5 != 4]
        assert ids_of(errors) == ["r4", "r9"]
        assert sum(again.values()) == 6, "what was answered is not asked again"
        assert site.left() == []
        files = await server.store.files(TENANT, "batch_output", Query())
        assert {file.id for file in files.files} == {found.output_file_id, found.error_file_id}
        former = [name for name in (before.output_file_id, before.error_file_id) if name is not None]
        assert [site.content(name).exists() for name in former] == [False, False], "these results are in the new ones"
        answered = [event for event in site.told if isinstance(event, LinesAnswered)]
        assert sum(event.num_done for event in answered) == 10, "each answer is counted once"
        assert sum(event.num_failed for event in answered) == 7 + 1, "r4 failed before, and is not counted again"
        with pytest.raises(InvalidRequest, match="completed"):
            await server.store.resume(TENANT, batch.id)


@in_loop
async def test_an_expired_batch_that_is_resumed_has_another_window(site: Site) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(6, fails=3), expires_at=clock.wall())
        before = await server.work()
        assert (before.status, before.num_early) == ("expired", 6)
        resumed = await server.store.resume(TENANT, batch.id)
        assert resumed.expired_at is None
        assert resumed.expires_at > clock.wall() + 3600
        found = await server.work()
        assert (found.status, found.num_done, found.num_failed, found.num_early) == ("completed", 4, 2, 0)
        output, errors = site.results(found)
        assert ids_of(output) + ids_of(errors) == ["r0", "r1", "r3", "r4", "r2", "r5"]
        assert site.left() == []


@in_loop
async def test_a_resumed_batch_asks_again_what_was_in_a_file_that_its_client_has_deleted(site: Site) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(8))
        before = await cancelled_after(server, batch, 4)
        assert before.output_file_id is not None
        await server.store.delete_file(TENANT, before.output_file_id)
        await server.store.resume(TENANT, batch.id)
        found = await server.work()
        assert ids_of(site.results(found)[0]) == [f"r{number}" for number in range(8)]
        await server.store.delete_file(TENANT, batch.input_file_id)
        other = await site.add(server, lines(3), name="batch_2")
        await server.store.cancel(TENANT, other.id)
        await server.work()
        await server.store.delete_file(TENANT, other.input_file_id)
        with pytest.raises(StoredNotFound, match=other.input_file_id):
            await server.store.resume(TENANT, other.id)


@in_loop
async def test_a_resumed_batch_asks_again_what_is_damaged_in_its_former_results(site: Site) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(8))
        before = await cancelled_after(server, batch, 4)
        assert before.output_file_id is not None
        path = site.content(before.output_file_id)
        first, second, *others = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join((first, second[: len(second) // 2] + b"\n", *others)))
        await server.store.resume(TENANT, batch.id)
        asked = server.sender.asked.copy()
        found = await server.work()
        assert ids_of(site.results(found)[0]) == [f"r{number}" for number in range(8)]
        assert sum((server.sender.asked - asked).values()) == 4 + 1


class FullDisk(Disk):
    """Has no room, or fails, while ``error`` is set."""

    error: int | None = None

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        if self.error is not None:
            super().write(descriptor, data[:3], offset)
            raise OSError(self.error, "no")
        super().write(descriptor, data, offset)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@in_loop
async def test_a_batch_waits_for_a_disk_that_is_full_or_fails(site: Site, number: int) -> None:
    disk = FullDisk()
    async with site.server(disk=disk) as server:
        batch = await site.add(server, lines(8, fails=3))
        disk.error = number
        work = asyncio.create_task(server.work())
        async with asyncio.timeout(60):
            while "disk of jobs.folder" not in (await server.store.batch(TENANT, batch.id)).note:
                await asyncio.sleep(0.005)
        disk.error = None
        found = await work
        assert (found.status, found.note) == ("completed", "")
        output, errors = site.results(found)
        assert sorted(ids_of(output) + ids_of(errors)) == [f"r{number}" for number in range(8)]
        assert max(server.sender.asked.values()) == 1, "nothing is computed twice"


@in_loop
async def test_a_batch_waits_for_its_tenants_bytes(site: Site) -> None:
    async with site.server() as server:
        other = await site.add(server, lines(8), "batch_0")
        await server.store.cancel(TENANT, other.id)
        await server.work()
        batch = await site.add(server, lines(8))
        used = sum(file.num_bytes + ROW_BYTES for file in (await server.store.files(TENANT, None, Query())).files)
        server.store.config = JobsConfig(max_bytes=used + 200)
        work = asyncio.create_task(server.work())
        async with asyncio.timeout(60):
            while "jobs.max_bytes" not in (await server.store.batch(TENANT, batch.id)).note:
                await asyncio.sleep(0.005)
        with pytest.raises(InvalidRequest, match="is the input of the batch"):
            await server.store.delete_file(TENANT, batch.input_file_id)
        for file in (await server.store.files(TENANT, None, Query())).files:
            if file.id != batch.input_file_id:
                await server.store.delete_file(TENANT, file.id)
        assert (await work).status == "completed"


@in_loop
async def test_an_input_that_is_gone_fails_its_batch(site: Site, tmp_path: Path) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(2))
        server.store.folder.delete((batch.input_file_id,))
        found = await server.work()
        assert (found.status, found.problems[0].code) == ("failed", "input_file_lost")


@in_loop
async def test_a_file_without_requests_fails_its_batch_with_its_problems(site: Site) -> None:
    async with site.server() as server:
        await site.add(server, b"no json\n")
        found = await server.work()
        assert found.status == "failed"
        assert [problem.code for problem in found.problems] == ["no_requests", "invalid_json"]
        assert found.output_file_id is found.error_file_id is None


@in_loop
async def test_wrong_lines_are_answered_and_the_others_go_on(site: Site) -> None:
    async with site.server() as server:
        wrong = b"{\n\n" + b"x" * 20_000 + b"\r\n"
        await site.add(server, b"\xef\xbb\xbf" + lines(3) + wrong + lines(4))
        found = await server.work()
        assert (found.status, found.total, found.num_done, found.num_failed) == ("completed", 9, 4, 5)
        output, errors = site.results(found)
        assert ids_of(output) == ["r0", "r1", "r2", "r3"]
        codes = [json.loads(line)["error"]["code"] for line in errors.splitlines()]
        assert codes == ["invalid_json", "line_too_long", *["duplicate_custom_id"] * 3]
        assert [problem.line for problem in found.problems] == [4, 6, 7, 8, 9]


@in_loop
async def test_what_is_too_old_is_deleted_and_what_crashes_left(site: Site, tmp_path: Path) -> None:
    async with site.server() as server:
        made = await site.add(server, lines(1), results_last_s=-1.0)
        abandoned = server.store.folder.upload("gone", "file-1")
        abandoned.write(b"x")
        running = server.store.folder.upload(server.store.gateway, "file-2")
        found = await server.work()
        assert found.status == "completed"
        with pytest.raises(StoredNotFound):
            await server.store.file(TENANT, found.output_file_id or "")
        await server.store.sweep()
        assert [path.name for path in (tmp_path / "jobs" / "files").iterdir()] == [made.input_file_id]
        assert site.left() == [f"{server.store.gateway}.file-2"]
        running.abort()
        abandoned.abort()


@in_loop
async def test_only_the_tenant_has_its_files_and_batches(site: Site) -> None:
    async with site.server() as server:
        batch = await site.add(server, lines(1))
        for asked in (
            server.store.batch("other", batch.id),
            server.store.cancel("other", batch.id),
            server.store.file("other", batch.input_file_id),
            server.store.delete_file("other", batch.input_file_id),
            server.store.add_batch(Batch(id="b", tenant="other", key_id="", endpoint="", created_at=0, expires_at=0,
                                         input_file_id=batch.input_file_id)),
        ):  # fmt: skip
            with pytest.raises(StoredNotFound):
                await asked
        assert (await server.store.batches("other", Query())).batches == []
        assert (await server.store.files("other", None, Query())).files == []


@in_loop
async def test_lists_have_pages_in_both_orders(site: Site) -> None:
    async with site.server() as server:
        names = [(await site.add(server, lines(1), f"batch_{number}")).id for number in range(5)]
        for is_newest_first in (True, False):
            seen: list[str] = []
            while True:
                page = await server.store.batches(TENANT, Query(seen[-1] if seen else "", 2, is_newest_first))
                seen += [batch.id for batch in page.batches]
                if not page.has_more:
                    break
            assert seen == (names[::-1] if is_newest_first else names)
        with pytest.raises(InvalidRequest, match="after"):
            await server.store.batches(TENANT, Query("batch_9"))


@in_loop
async def test_lists_are_read_backwards_and_of_one_kind(site: Site) -> None:
    async with site.server() as server:
        names = [(await site.add(server, lines(1), f"msgbatch_{number}")).id for number in range(5)]
        await site.add(server, lines(1), "batch_1")

        async def listed(query: Query) -> tuple[list[str], bool]:
            page = await server.store.batches(TENANT, query, "msgbatch_")
            return [batch.id for batch in page.batches], page.has_more

        assert await listed(Query()) == (names[::-1], False)
        assert await listed(Query(limit=2, before=names[0])) == ([names[2], names[1]], True)
        assert await listed(Query(limit=4, before=names[0])) == (names[:0:-1], False)
        assert await listed(Query(limit=2, before=names[4])) == ([], False)
        with pytest.raises(InvalidRequest, match="before"):
            await listed(Query(before="msgbatch_9"))


@in_loop
async def test_a_deleted_batch_takes_its_files_along(site: Site, tmp_path: Path) -> None:
    async with site.server() as server:
        await site.add(server, lines(4, fails=2))
        batch, lease = await server.take()
        with pytest.raises(InvalidRequest, match="when it has ended"):
            await server.store.delete_batch(TENANT, batch.id)
        await server.run(batch, lease).go()
        with pytest.raises(StoredNotFound):
            await server.store.delete_batch("another", batch.id)
        other = Batch(id="batch_2", tenant=TENANT, key_id="k", endpoint="/v1/completions", created_at=clock.wall(),
                      expires_at=clock.wall() + 60, input_file_id=batch.input_file_id)  # fmt: skip
        await server.store.add_batch(other)
        await server.store.delete_batch(TENANT, batch.id)
        left = [path.name for path in (tmp_path / "jobs" / "files").iterdir()]
        assert left == [batch.input_file_id], "another batch needs it"
        await server.work()
        await server.store.delete_batch(TENANT, other.id)
        assert list((tmp_path / "jobs" / "files").iterdir()) == []
        assert (await server.store.files(TENANT, None, Query())).files == []


@in_loop
async def test_a_deletion_whose_request_is_cancelled_is_erased(site: Site, tmp_path: Path, state_url: str) -> None:
    if not state_url.startswith("sqlite"):
        pytest.skip("PostgreSQL removes deleted rows by its vacuum")

    def has_canary() -> bool:
        return any(b"canary" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    async with site.server() as server:
        store, state = server.store, server.store._state
        now = clock.wall()
        made = StoredFile(id="file-1", tenant=TENANT, created_at=now, expires_at=now + 60, purpose="batch",
                          filename="canary.jsonl", num_bytes=0, folder=store.folder.id)  # fmt: skip
        content = store.folder.path / "files" / made.id
        content.write_bytes(b"canary")
        await store.add_file(made)
        await state.call(store._erasure.erase)  # as at the start of a server
        assert has_canary()
        deletion = asyncio.create_task(store.delete_file(TENANT, made.id))
        await asyncio.sleep(0)
        state.submit(lambda database: None).result(60)  # the row is deleted, and the loop has not heard of it
        deletion.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deletion
        await state.call(store._erasure.erase)
        while content.exists():
            await asyncio.sleep(0.01)
        assert not has_canary()


@in_loop
async def test_a_tenant_has_a_bounded_number_of_open_batches(tmp_path: Path, state_url: str) -> None:
    site = Site(tmp_path, state_url, max_open=2)
    async with site.server() as server:
        for number in range(2):
            await site.add(server, lines(1), f"batch_{number}")
        with pytest.raises(Overloaded, match=r"jobs\.max_open"):
            await site.add(server, lines(1))


@in_loop
async def test_a_runner_takes_what_waits_and_leaves_it_to_the_next(site: Site) -> None:
    is_leaving = False
    async with site.server() as one:
        batch = await site.add(one, lines(5))
        one.sender.is_open.clear()
        runner = Runner(one.store, one.sender, lambda: is_leaving, max_line_bytes=1000)
        keeping = asyncio.create_task(runner.keep())
        await until(one, batch, status="in_progress")
        is_leaving = True
        runner.wake()
        async with site.server() as two, asyncio.timeout(60):
            while not (taken := await two.store.take(frozenset(), 1)):
                await asyncio.sleep(0.005)
            await two.run(*taken[0]).go()
            assert (await two.store.batch(TENANT, batch.id)).status == "completed"
        keeping.cancel()


@in_loop
async def test_contents_of_another_database_are_not_swept(tmp_path: Path) -> None:
    first = Site(tmp_path, f"sqlite://{tmp_path}/one.db")
    async with first.server() as server:
        made = await first.add(server, lines(1))
        await server.store.sweep()
        path = tmp_path / "jobs" / "files" / made.input_file_id
        os.utime(path, (0, 0))
        await server.store.sweep()
        assert path.exists()
    second = Site(tmp_path, f"sqlite://{tmp_path}/two.db")
    async with second.server() as server:
        await server.store.sweep()
        assert path.exists()
    async with first.server() as server:
        orphan = tmp_path / "jobs" / "files" / "file-orphan"
        orphan.write_text("x")
        await server.store.sweep()
        assert orphan.exists(), "its row may be on its way"
        os.utime(orphan, (0, 0))
        await server.store.sweep()
        assert not orphan.exists()


@in_loop
async def test_results_that_wait_for_their_rows_are_not_swept(site: Site) -> None:
    """A server was killed between the files of results and their rows."""
    async with site.server() as server:
        await site.add(server, lines(2))
        _, lease = await server.take()
        for step in (
            lambda batch: machine.surveyed(batch, Survey(2, "m", frozenset(), ()), 1.0),
            lambda batch: machine.advanced(
                batch,
                Progress(begin=Place(), end=Place(2, 9), num_done=1, num_failed=1, output_bytes=5, error_bytes=4),
                1,
            ),
            lambda batch: machine.finalized(batch, "file-output", "file-errors", 2.0),
        ):
            await server.store.change(lease, step)
        paths = [site.content(name) for name in ("file-output", "file-errors", "file-of-none")]
        for path in paths:
            path.write_bytes(b"x")
            os.utime(path, (0, 0))
        await server.store.sweep()
        assert [path.exists() for path in paths] == [True, True, False]


@in_loop
async def test_an_input_that_has_become_shorter_fails_its_batch(site: Site, tmp_path: Path) -> None:
    async with site.server() as server:
        made = await site.add(server, lines(8))
        batch, lease = await server.take()
        await server.store.change(lease, lambda batch: machine.surveyed(batch, Survey(9, "m", frozenset(), ()), 1.0))
        await server.run(batch, lease).go()
        found = await server.store.batch(TENANT, made.id)
        assert (found.status, found.problems[0].code) == ("failed", "input_file_changed")


@in_loop
async def test_a_batch_that_has_begun_does_not_follow_another_bound_of_lines(site: Site) -> None:
    async with site.server() as server:
        await site.add(server, lines(4) + lines(1))
        batch, lease = await server.take()
        await server.store.change(lease, lambda batch: machine.surveyed(batch, Survey(5, "m", frozenset(), ()), 1.0))
        server.store.config = JobsConfig(max_lines=2)
        await server.run(await server.store.held(lease), lease).go()
        found = await server.store.batch(TENANT, batch.id)
        assert (found.status, found.num_done, found.num_failed) == ("completed", 4, 1)


def test_a_file_that_a_thread_writes_to_is_closed_by_it(tmp_path: Path) -> None:
    """A number that is closed too early is the next file's."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Disk):
        def write(self, descriptor: int, data: bytes, offset: int) -> None:
            begun.set()
            assert go_on.wait(60)
            super().write(descriptor, data, offset)

    folder = Folder(tmp_path / "jobs", Slow())
    folder.open()
    results = folder.results("batch_1", 1)
    thread = threading.Thread(target=results.write, args=("output", b"answer", 0))
    thread.start()
    assert begun.wait(60)
    results.close()
    other = (tmp_path / "other").open("wb")
    go_on.set()
    thread.join(60)
    other.close()
    assert (tmp_path / "other").read_bytes() == b""
    assert folder.result_path("batch_1", 1, "output").read_bytes() == b"answer"
    with pytest.raises(OSError, match="closed"):
        results.write("output", b"more", 6)


@in_loop
async def test_the_tenant_with_the_fewest_batches_at_work_comes_first_then_the_oldest_batch(site: Site) -> None:
    async with site.server() as server:
        for number in range(3):
            await site.add(server, lines(1), name=f"batch_many_{number}", created_at=10.0 - number)
        few = StoredFile(
            id="file-few", tenant="few", created_at=0.0, expires_at=clock.wall() + 3600, purpose="batch",
            filename="in.jsonl", num_bytes=1, folder=server.store.folder.id,
        )  # fmt: skip
        await server.store.add_file(few)
        await server.store.add_batch(
            Batch(
                id="batch_few", tenant="few", key_id="k", endpoint="/v1/completions", input_file_id="file-few",
                created_at=20.0, expires_at=clock.wall() + 3600,
            )
        )  # fmt: skip
        first = await server.store.take(frozenset(), 2)
        assert [batch.id for batch, _ in first] == ["batch_many_2", "batch_few"]
        rest = await server.store.take(frozenset(batch.id for batch, _ in first), 2)
        assert [batch.id for batch, _ in rest] == ["batch_many_1", "batch_many_0"]
