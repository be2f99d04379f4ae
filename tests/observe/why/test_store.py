"""What is kept of the calls, against a plain list of all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.why.calls import call

from inferd.observe.why.record import RequestRecord
from inferd.observe.why.recorder import record_of
from inferd.observe.why.store import NUM_SLOWEST, RecordStore

_ADDED = st.lists(
    st.tuples(
        st.sampled_from("abc"),  # id
        st.sampled_from(("chat", "digits")),
        st.integers(1, 50),  # tenths of a second
        st.sampled_from((200, 200, 200, 503)),
        st.integers(0, 3),  # hour
    ),
    max_size=60,
)


class Plain:
    """All records, in the order in which their calls ended."""

    def __init__(self, added: list[tuple[str, str, int, int, int]]) -> None:
        self.records: list[tuple[RequestRecord, int, int, float]] = []  # with hour, status and seconds
        clock = 0.0
        for id, model, tenths, status, hour in added:
            clock += 1.0
            total = tenths / 8  # exact in 32 bits
            event = call(id=id, model=model, total=total, status=status, at=clock - total)
            self.records.append((record_of(event, hour * 3600.0 + total), hour, status, total))

    def fill(self, store: RecordStore) -> None:
        for record, hour, status, total in self.records:
            store.add(record, hour * 3600.0 + 1, total, status)


@settings(max_examples=60)
@given(_ADDED, st.integers(1, 20))
def test_the_last_the_slowest_and_the_errors_are_kept(added: list[tuple[str, str, int, int, int]], size: int) -> None:
    plain, store = Plain(added), RecordStore(size)
    plain.fill(store)
    newest = [record for record, _, _, _ in reversed(plain.records)]
    assert [record for record, _ in store.select("recent", lambda *_: True, 1000)] == newest[:size]
    failed = [record for record, _, status, _ in reversed(plain.records) if status >= 400]
    assert [record for record, _ in store.select("errors", lambda *_: True, 1000)] == failed[:size]
    slow = [record for record, _ in store.select("slowest", lambda *_: True, 1000)]
    assert [record.span[1] for record in slow] == sorted([total for *_, total in plain.records], reverse=True)


@settings(max_examples=60)
@given(_ADDED, st.sampled_from("abc"))
def test_calls_with_the_same_id_are_all_found_the_newest_first(
    added: list[tuple[str, str, int, int, int]], wanted: str
) -> None:
    plain, store = Plain(added), RecordStore(1000)
    plain.fill(store)
    expected = [record for record, *_ in reversed(plain.records) if record.id == wanted]
    assert [id(record) for record in store.find(wanted)] == [id(record) for record in expected]


@settings(max_examples=40)
@given(_ADDED)
def test_neighbours_are_the_calls_that_were_open_at_the_same_time(
    added: list[tuple[str, str, int, int, int]],
) -> None:
    plain, store = Plain(added), RecordStore(1000)
    plain.fill(store)
    for record, *_ in plain.records:
        began, total = record.span
        expected = {
            id(other)
            for other, *_ in plain.records
            if other is not record
            and other.model == record.model
            and other.span[0] < began + total
            and sum(other.span) > began
        }
        assert {id(other) for other, _ in store.beside(record)} == expected


def test_a_slow_call_outlives_thousands_of_fast_ones() -> None:
    store = RecordStore(100)
    for number in range(5000):
        total = 9.0 if number == 7 else 0.1 + number / 1e6
        store.add(record_of(call(id=str(number), total=total), total), 10.0, total, 200)
    slowest = store.select("slowest", lambda *_: True, 1000)
    assert len(slowest) == NUM_SLOWEST
    assert slowest[0][0].id == "7"
    assert store.find("7")


def test_the_number_of_records_is_bounded_whatever_the_models_are() -> None:
    store = RecordStore(100)
    for number in range(20_000):
        record = record_of(call(model=f"m{number % 500}", total=1.0, status=503), 0.0)
        store.add(record, number * 60.0, 1.0, 503)
    assert len(store) <= 100 + 100 + 128 * NUM_SLOWEST


def test_a_store_of_no_records_keeps_none() -> None:
    store = RecordStore(10)
    store.add(record_of(call(), 0.0), 0.0, 1.0, 503)
    store.resize(0)
    store.add(record_of(call(), 0.0), 0.0, 1.0, 503)
    assert len(store) == 0
    assert store.find("r") == []
