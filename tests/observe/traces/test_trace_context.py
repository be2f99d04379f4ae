"""W3C trace context as the specification has it, and the law of sampling: one trace, one decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.observe.traces.context import Parent, Sampler, is_sampled, parent_of, state_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
hexadecimal = st.integers(1, (1 << 128) - 1).map(lambda number: f"{number:032x}")
uniques = st.integers(0, (1 << 96) - 1).map(lambda number: f"{number:024x}")
ratios = st.floats(0, 1, allow_nan=False)


def test_a_valid_header_is_continued() -> None:
    assert parent_of(f"00-{TRACE}-{SPAN}-01".encode()) == Parent(TRACE, SPAN, 1)
    assert parent_of(f" 00-{TRACE}-{SPAN}-00\t".encode()) == Parent(TRACE, SPAN, 0)


def test_flags_other_than_sampled_and_random_are_not_passed_on() -> None:
    assert parent_of(f"00-{TRACE}-{SPAN}-ff".encode()) == Parent(TRACE, SPAN, 3)


def test_of_a_later_version_the_known_fields_are_read() -> None:
    assert parent_of(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings".encode()) == Parent(TRACE, SPAN, 1)
    assert parent_of(f"cc-{TRACE}-{SPAN}-01".encode()) == Parent(TRACE, SPAN, 1)
    assert parent_of(f"cc-{TRACE}-{SPAN}-01.what".encode()) is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "rubbish",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"0-{TRACE}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
    ],
)
def test_an_invalid_header_is_ignored(header: str) -> None:
    assert parent_of(header.encode()) is None


@given(st.binary(max_size=80))
def test_no_bytes_raise(header: bytes) -> None:
    parent = parent_of(header)
    assert parent is None or parent_of(parent.text.encode()) == parent
    assert state_of([header]).isascii()


def test_the_members_of_several_tracestates_are_joined_in_order() -> None:
    assert state_of([b"congo=t61rcWkgMzE", b"", b" rojo=00f067 , tenant@vendor=x "]) == (
        "congo=t61rcWkgMzE,rojo=00f067,tenant@vendor=x"
    )


@pytest.mark.parametrize("state", [b"a=1,a=2", b"A=1", b"a", b"a=", b"a=\xff", b"a=b=c", b"=1"])
def test_an_invalid_tracestate_is_dropped_as_a_whole(state: bytes) -> None:
    assert state_of([state]) == ""


def test_a_tracestate_of_33_members_is_dropped_and_a_long_one_shortened() -> None:
    assert state_of([b",".join(b"k%d=v" % number for number in range(33))]) == ""
    assert len(state_of([b",".join(b"k%d=v" % number for number in range(32))]).split(",")) == 32
    long = b",".join(b"k%d=%b" % (number, b"v" * 100) for number in range(6))
    kept = state_of([long])
    assert len(kept) <= 512
    assert long.decode().startswith(kept)
    assert len(kept.split(",")) == 4


# -- sampling ------------------------------------------------------------------------------------


@given(ratios, hexadecimal, uniques, uniques)
def test_the_same_trace_gets_the_same_decision_from_every_server(
    ratio: float, trace_id: str, here: str, there: str
) -> None:
    parent = Parent(trace_id, SPAN, 0)
    first, second = Sampler(ratio, follows_parent=False), Sampler(ratio, follows_parent=False, prefix="00000000")
    assert is_sampled(first.trace(parent, here)) == is_sampled(second.trace(parent, there)) == first.keeps(trace_id)


@given(ratios, uniques)
def test_a_trace_that_begins_here_is_kept_by_the_next_server_with_this_ratio_as_well(ratio: float, unique: str) -> None:
    sampler = Sampler(ratio)
    trace = sampler.trace(None, unique)
    assert trace == "" or is_sampled(trace)
    told = trace or sampler.untraced(unique)
    next_server = Sampler(ratio, follows_parent=False)
    assert is_sampled(told) == is_sampled(trace) == next_server.keeps(told[3:35])
    assert parent_of(told.encode()) is not None or unique[:16] == "0" * 16


@given(ratios, ratios, uniques)
def test_what_a_small_share_keeps_a_larger_one_keeps_too(one: float, other: float, unique: str) -> None:
    small, large = sorted((one, other))
    assert not Sampler(small).trace(None, unique) or Sampler(large).trace(None, unique)


@given(ratios, hexadecimal, uniques, st.integers(0, 3))
def test_the_callers_decision_is_followed(ratio: float, trace_id: str, unique: str, flags: int) -> None:
    trace = Sampler(ratio).trace(Parent(trace_id, SPAN, flags), unique)
    assert trace == f"00-{trace_id}-{unique[:16]}-{flags:02x}"


@given(uniques)
def test_the_ends_of_the_range_are_all_and_none(unique: str) -> None:
    assert Sampler(1.0).trace(None, unique)
    assert not Sampler(0.0).trace(None, unique)


def test_a_ratio_keeps_about_its_share() -> None:
    import random

    draw = random.Random(1)
    kept = sum(bool(Sampler(0.01).trace(None, f"{draw.getrandbits(96):024x}")) for _ in range(20_000))
    assert 140 < kept < 260
