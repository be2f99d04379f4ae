"""What a stored response promises: it is there, for its tenant alone, until it is deleted or too old."""

from __future__ import annotations

import asyncio

import pytest
from tests.stored.conftest import Open, item, made

from inferd.errors import StoredNotFound


def test_a_response_is_read_as_it_was_written(open_store: Open) -> None:
    async def main() -> None:
        response = made()
        async with open_store() as store:
            await store.put(response)
            assert await store.get("a", response.id) == response
        async with open_store() as store:
            assert await store.get("a", response.id) == response

    asyncio.run(main())


def test_another_tenants_response_is_an_unknown_one(open_store: Open) -> None:
    async def main() -> None:
        response = made("a")
        async with open_store() as store:
            await store.put(response)
            with pytest.raises(StoredNotFound) as refused:
                await store.get("b", response.id)
            with pytest.raises(StoredNotFound):
                await store.delete("b", response.id)
            with pytest.raises(StoredNotFound):
                await store.history("b", response.id)
            await store.delete("a", response.id)
            with pytest.raises(StoredNotFound) as unknown:
                await store.get("b", response.id)
            assert refused.value.to_failure() == unknown.value.to_failure()

    asyncio.run(main())


def test_a_chain_is_read_from_its_beginning(open_store: Open) -> None:
    async def main() -> None:
        first = made(given="1", said="2")
        second = made(given="3", said="4", previous=first.id)
        async with open_store() as store:
            await store.put(first)
            await store.put(second)
            expected = [item("1", f"msg_in{first.id}"), item("2", f"msg_out{first.id}")]
            assert await store.history("a", first.id) == expected
            expected += [item("3", f"msg_in{second.id}"), item("4", f"msg_out{second.id}")]
            assert await store.history("a", second.id) == expected
            await store.delete("a", first.id)
            with pytest.raises(StoredNotFound, match=first.id) as refused:
                await store.history("a", second.id)
            assert refused.value.param == "previous_response_id"

    asyncio.run(main())
