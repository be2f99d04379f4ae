"""What a tenant may store, and what is left of what was deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.stored.conftest import Open, item, made
from tests.tiers import THOROUGH

from inferd.errors import InvalidRequest, StateUnavailable, StoredNotFound
from inferd.events import Event, StoredCounted, StoredDropped
from inferd.state.database import Database
from inferd.stored import refusals
from inferd.stored.documents import id_of
from inferd.stored.port import PageQuery
from inferd.stored.store import DurableStore


def test_a_flood_deletes_its_own_tenants_oldest_alone(open_store: Open) -> None:
    async def main() -> None:
        async with open_store(max_bytes=20_000) as store:
            other = made("b", given="x" * 5000)
            await store.put(other)
            flood = [made("a", given="x" * 2000) for _ in range(30)]
            for response in flood:
                await store.put(response)
            assert await store.get("b", other.id) == other
            left = []
            for response in flood:
                try:
                    left.append((await store.get("a", response.id)).id)
                except StoredNotFound:
                    assert not left, "the oldest go first"
            assert 4 < len(left) < 10
            assert left == [response.id for response in flood[-len(left) :]]
            with pytest.raises(InvalidRequest, match="max_bytes") as refused:
                await store.put(made("a", given="x" * 20_000))
            assert refused.value.code == "stored_bytes_exceeded"
            assert (await store.get("a", left[0])).id == left[0], "what was refused deletes nothing"

    asyncio.run(main())


def test_the_sums_of_a_tenant_are_exact(open_store: Open) -> None:
    async def main() -> None:
        async with open_store() as store:
            conversation = await store.create_conversation("a", b"{}", [item("1"), item("2")])
            first = made("a", conversation=conversation.id)
            await store.put(first)
            queued = made("a", status="queued", background=True)
            await store.begin(queued, key_id="", request=b"request")
            await store.put(msgspec.structs.replace(made("a", background=True, name=queued.id)))
            cancelled = made("a", status="queued", background=True)
            await store.begin(cancelled, key_id="", request=b"request")
            await store.cancel("a", cancelled.id)
            items = (await store.conversation_page("a", conversation.id, PageQuery())).items
            assert len(items) == 4
            await store.delete_conversation_item("a", conversation.id, id_of(items[0]))
            await store.update_conversation("a", conversation.id, b'{"a":"b"}')
            for name in (first.id, queued.id, cancelled.id):
                await store.delete("a", name)
            await store.delete_conversation("a", conversation.id)
            found = await store._read(lambda rows: rows.rows("SELECT * FROM stored_totals"))
            assert found == [("a", 0, 0, 0)]

    asyncio.run(main())


def test_what_is_still_computed_is_neither_too_old_nor_in_the_way(open_store: Open) -> None:
    async def main() -> None:
        async with open_store(max_bytes=20_000) as store:
            running = made("a", status="queued", background=True, given="x" * 3000)
            await store.begin(running, key_id="", request=b"request")
            for _ in range(10):
                await store.put(made("a", given="x" * 3000))
            assert (await store.get("a", running.id)).status == "queued", "the oldest, and not deleted for others"
        async with open_store(max_age_s=0.0) as store:
            ended = made("b")
            await store.put(ended)
            await store._state.call(store._expire)
            left = await store._read(lambda rows: rows.rows("SELECT tenant, id FROM responses"))
            assert left == [("a", running.id)]

    asyncio.run(main())


def test_the_longest_unused_goes_first_whether_response_or_conversation(open_store: Open) -> None:
    async def main() -> None:
        async with open_store(max_bytes=1 << 20) as store:
            unused = (await store.create_conversation("a", b"{}", [item("x" * 3000)])).id
            first = made("a", given="x" * 3000)
            await store.put(first)
            used = (await store.create_conversation("a", b"{}", [item("x" * 3000)])).id
        async with open_store(max_bytes=12_000) as store:
            await store.put(made("a", given="x" * 3000))
            with pytest.raises(StoredNotFound):
                await store.conversation_items("a", unused)
            assert await store.get("a", first.id) == first
            await store.put(made("a", given="x" * 3000))
            with pytest.raises(StoredNotFound):
                await store.get("a", first.id)
            assert await store.conversation_items("a", used)

    asyncio.run(main())


def test_what_all_tenants_have_stored_and_lost_is_told(open_store: Open) -> None:
    told: list[Event] = []

    async def main() -> None:
        async with open_store(max_bytes=20_000, tell=told.append) as store:
            await store.put(made("b", given="x" * 1000))
            await store.create_conversation("b", b"{}", [item("1")])
            for _ in range(30):
                await store.put(made("a", given="x" * 2000))
            gone = made("c")
            await store.put(gone)
            await store.delete("c", gone.id)
            await store._state.call(store._count)
            await store._state.call(store._count)  # behind what the changes tell
            dropped = sum(one.count for one in told if isinstance(one, StoredDropped) and one.reason == "bytes")
            first, second = store.tenants()
            assert (first.tenant, second.tenant) == ("a", "b")
            assert first.num_responses == 30 - dropped
            assert (second.num_responses, second.num_conversations) == (1, 1)
            counted = told[-1]
            assert counted == StoredCounted(
                num_bytes=first.num_bytes + second.num_bytes,
                num_responses=first.num_responses + 1,
                num_conversations=1,
                num_tenants=2,
                most_used=first.num_bytes / 20_000,
            )
            assert 0.7 < first.num_bytes / 20_000 <= 1.0

    asyncio.run(main())


def test_what_is_too_old_is_gone(open_store: Open) -> None:
    told: list[Event] = []

    async def main() -> None:
        async with open_store(max_age_s=0.05, tell=told.append) as store:
            response, conversation = made(), await store.create_conversation("a", b"{}", [item("1")])
            await store.put(response)
            await asyncio.sleep(0.1)
            with pytest.raises(StoredNotFound):
                await store.get("a", response.id)
            with pytest.raises(StoredNotFound):
                await store.conversation_items("a", conversation.id)
            await store._state.call(store._expire)
            found = await store._read(lambda rows: rows.rows("SELECT * FROM stored_totals"))
            assert found == [("a", 0, 0, 0)]
            assert sum(one.count for one in told if isinstance(one, StoredDropped) and one.reason == "age") == 2

    asyncio.run(main())


def test_deleted_text_is_in_no_file(open_store: Open, state_url: str, tmp_path: Path) -> None:
    if not state_url.startswith("sqlite"):
        pytest.skip("PostgreSQL removes deleted rows by its vacuum")

    def has_canary() -> bool:
        return any(b"canary" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    async def main() -> None:
        async with open_store() as store:
            response = made(given="a canary's song, " * 2000)
            await store.put(response)
            conversation = await store.create_conversation("a", b"{}", [item("canary " * 3000)])
            assert has_canary()
            await store.delete("a", response.id)
            await store.delete_conversation("a", conversation.id)
            assert not has_canary()

    asyncio.run(main())


def test_a_deletion_whose_request_is_cancelled_is_erased(open_store: Open, state_url: str, tmp_path: Path) -> None:
    if not state_url.startswith("sqlite"):
        pytest.skip("PostgreSQL removes deleted rows by its vacuum")

    def has_canary() -> bool:
        return any(b"canary" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    async def main() -> None:
        async with open_store() as store:
            response = made(given="a canary's song, " * 2000)
            await store.put(response)
            await store._state.call(store._erasure.erase)  # as at the start of a server
            assert has_canary()
            deletion = asyncio.create_task(store.delete("a", response.id))
            await asyncio.sleep(0)
            store._state.submit(lambda database: None).result(60)  # it is deleted, and the loop has not heard of it
            deletion.cancel()
            with pytest.raises(asyncio.CancelledError):
                await deletion
            await store._state.call(store._erasure.erase)  # as within a second
            assert not has_canary()

    asyncio.run(main())


@THOROUGH
def test_a_chain_of_ten_thousand_is_read(open_store: Open) -> None:
    async def main() -> None:
        async with open_store() as store:
            chain = [made(given="0")]
            for number in range(1, 10_000):
                chain.append(made(given=str(number), previous=chain[-1].id))
            for start in range(0, len(chain), 5000):  # more at once than the thread's queue holds
                await asyncio.gather(*(store.put(response) for response in chain[start : start + 5000]))
            items = await store.history("a", chain[-1].id)
            assert len(items) == 20_000
            assert [id_of(each) for each in items[::2]] == [f"msg_in{response.id}" for response in chain]

    asyncio.run(main())


def test_a_chain_is_read_up_to_its_number_of_responses_and_its_bytes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with open_store() as store:
            first = made(given="one")
            second = made(given="two", previous=first.id)
            for response in (first, second):
                await store.put(response)
            found = await store._read(lambda rows: rows.rows("SELECT item_bytes FROM responses"))
            size = sum(int(str(row[0])) for row in found)
            assert size > 0
            for number, num_bytes, is_read in ((2, size, True), (1, size, False), (2, size - 1, False)):
                monkeypatch.setattr(refusals, "MAX_CHAIN", number)
                monkeypatch.setattr(refusals, "MAX_HISTORY_BYTES", num_bytes)
                if is_read:
                    assert len(await store.history("a", second.id)) == 4
                    continue
                with pytest.raises(InvalidRequest, match="more than 1 responses" if number == 1 else "of items") as no:
                    await store.history("a", second.id)
                assert (no.value.code, no.value.param) == ("history_too_long", "previous_response_id")

    asyncio.run(main())


def test_a_conversation_takes_items_up_to_its_bytes(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_store() as store:
            name = (await store.create_conversation("a", b"{}", [item("1", "msg_1")])).id
            query = "SELECT num_bytes FROM conversations"
            ((before,),) = await store._read(lambda rows: rows.rows(query))
            await store.append("a", name, [item("2", "msg_2")])
            ((after,),) = await store._read(lambda rows: rows.rows(query))
            assert isinstance(before, int)
            assert isinstance(after, int)
            monkeypatch.setattr(refusals, "MAX_HISTORY_BYTES", 2 * after - before)
            await store.append("a", name, [item("3", "msg_3")])
            with pytest.raises(InvalidRequest) as refused:
                await store.append("a", name, [item("4", "msg_4")])
            assert (refused.value.code, refused.value.param) == ("history_too_long", "conversation")
            monkeypatch.setattr(refusals, "MAX_HISTORY_BYTES", 1)
            await store.delete_conversation_item("a", name, "msg_2")  # one that is too long may become shorter
            assert len(await store.conversation_items("a", name)) == 2

    asyncio.run(main())


def test_appends_at_the_same_time_lose_nothing(open_store: Open) -> None:
    async def main() -> None:
        async with open_store() as one, open_store() as two:
            conversation = (await one.create_conversation("a", b"{}", [])).id

            async def append(store: DurableStore, writer: int) -> None:
                for number in range(20):
                    await store.append("a", conversation, [item(f"{writer}.{number}.{part}", "same") for part in "ab"])

            await asyncio.gather(*(append(store, i) for i, store in enumerate((one, two, one, two))))
            texts = [
                msgspec.json.decode(each)["content"][0]["text"]
                for each in await one.conversation_items("a", conversation)
            ]
            for writer in range(4):
                own = [text for text in texts if text.startswith(f"{writer}.")]
                assert own == [f"{writer}.{number}.{part}" for number in range(20) for part in "ab"]
            assert all(texts[i][:-1] == texts[i + 1][:-1] for i in range(0, len(texts), 2)), "an append is one piece"

    asyncio.run(main())


def test_a_database_that_fails_is_told_of(open_store: Open) -> None:
    async def main() -> None:
        async with open_store() as store:

            def fail(database: Database) -> None:
                raise StateUnavailable("broken")

            with pytest.raises(StateUnavailable):
                await store._state.call(fail)
            with pytest.raises(StateUnavailable):
                store.check()
            with pytest.raises(StateUnavailable):
                await store.put(made())

    asyncio.run(main())
