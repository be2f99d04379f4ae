"""Protocol buffers' wire format: what is written is read back, and every border of what is refused."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.protowire import FIXED32, FIXED64, LENGTH, VARINT, fields, head, number, packed, signed, sized, text, varint

ALL_64 = 2**64 - 1


def groups(depth: int) -> bytes:
    """So many groups, each inside the one before."""
    return bytes([0x0B]) * depth + bytes([0x0C]) * depth


def is_refused(body: bytes) -> bool:
    try:
        fields(body, 0, len(body))
    except InvalidRequest:
        return True
    return False


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_number_is_read_back(value: int) -> None:
    written = number(value)
    assert varint(written, 0, len(written)) == (value & ALL_64, len(written))
    assert len(written) <= 10
    assert varint(b"\xff" + written + b"\xff", 1, len(written) + 1) == (value & ALL_64, len(written) + 1)


@pytest.mark.parametrize(
    ("value", "meant"),
    [(0, 0), (1, 1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (ALL_64, -1), (ALL_64 - 1, -2)],
)
def test_the_upper_half_of_a_number_is_negative(value: int, meant: int) -> None:
    assert signed(value) == meant
    assert varint(number(meant), 0, 10)[0] == value


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), st.binary(max_size=300) | st.integers(0, ALL_64)), max_size=5))
def test_fields_are_read_back_in_their_order_and_lie_where_they_are_said_to(
    sent: list[tuple[int, bytes | int]],
) -> None:
    body = b"before"
    for name, value in sent:
        body += sized(name, value) if isinstance(value, bytes) else number(name << 3 | VARINT) + number(value)
    end = len(body)
    found = fields(body + b"\xff behind", 6, end)
    assert [(name, body[start:stop] if wire == LENGTH else start) for name, wire, start, stop in found] == sent


def test_a_head_is_what_goes_before_the_bytes() -> None:
    for size in (0, 1, 127, 128, 300):
        assert head(5, size) + b"x" * size == sized(5, b"x" * size)


@pytest.mark.parametrize(("values", "content"), [((), b""), ((0,), b"\x00"), ((1, 300), b"\x01\xac\x02")])
def test_numbers_are_packed_and_none_are_nothing(values: tuple[int, ...], content: bytes) -> None:
    assert packed(3, values) == (sized(3, content) if values else b"")


def test_fixed_numbers_have_four_and_eight_bytes() -> None:
    body = b"\x0d" + b"abcd" + b"\x11" + b"12345678" + b"\x18\x05"
    assert fields(body, 0, len(body)) == [(1, FIXED32, 1, 5), (2, FIXED64, 6, 14), (3, VARINT, 5, 0)]
    for end in (1, 4, 6, 13, 15):
        assert is_refused(body[:end])
    for end in (5, 14):
        assert not is_refused(body[:end])


@pytest.mark.parametrize(
    "body",
    [
        b"\x0b\x0c",  # a group of nothing
        b"\x0b\x08\x96\x01\x0c",  # with a number
        b"\x0b\x0d\x01\x02\x03\x04\x0c",  # of four bytes
        b"\x0b\x09\x01\x02\x03\x04\x05\x06\x07\x08\x0c",  # of eight
        b"\x0b\x12\x03abc\x0c",  # with bytes
        b"\x0b\x13\x14\x0c",  # with another group
        groups(99),
    ],
)
def test_groups_are_stepped_over(body: bytes) -> None:
    assert fields(body + b"\x28\x07", 0, len(body) + 2) == [(5, VARINT, 7, 0)]
    for cut in range(1, len(body)):
        assert is_refused(body[:cut])


@pytest.mark.parametrize(
    "body",
    [
        b"\x00\x01",  # there is no field 0
        b"\x07\x01",  # nor a wire type 7
        b"\x06\x01",
        b"\x0c",  # a group ends that did not begin
        b"\x0b\x14",  # or another one
        b"\x0b\x0f\x0c",  # a wire type 7 within a group
        b"\x0b\x12\x05abc\x0c",  # bytes beyond the end
        b"\x0a\x04abc",
        b"\x0a",
        b"\x08",
        b"\x08\x80",
        b"\x08" + b"\xff" * 10 + b"\x01",  # a number of eleven bytes
        b"\x80\x80\x80\x80\x10\x00",  # a tag of 33 bits
        b"\x88\x80\x80\x80\x80\x00\x01",  # a tag of six bytes
        b"\x0b\x88\x80\x80\x80\x80\x00\x01\x0c",
    ],
)
def test_what_is_no_message_is_refused_as_by_the_reference(body: bytes) -> None:
    assert is_refused(body)
    with pytest.raises(DecodeError):
        FileDescriptorSet.FromString(body)


@pytest.mark.parametrize(
    "body", [b"\x88\x80\x80\x80\x00\x01", b"\xf8\xff\xff\xff\x0f\x01", b"\x10" + b"\xff" * 9 + b"\x01", groups(100)]
)
def test_what_is_just_a_message_is_read_as_by_the_reference(body: bytes) -> None:
    assert not is_refused(body)
    FileDescriptorSet.FromString(body)


def test_there_is_no_field_0_within_a_group_either() -> None:
    assert is_refused(b"\x0b\x02\x00\x0c")
    assert not is_refused(b"\x0b\x0a\x00\x0c")


def test_groups_are_not_nested_without_end() -> None:
    assert is_refused(groups(101))


@pytest.mark.parametrize("body", [b"\x10\x01" * 3, b"\x13\x10\x01\x14"])
def test_more_fields_than_a_message_may_have_are_refused(body: bytes) -> None:
    assert fields(body, 0, len(body), 3) == fields(body, 0, len(body))
    for most in (0, 1, 2):
        with pytest.raises(InvalidRequest, match=f"more than {most} fields"):
            fields(body, 0, len(body), most)


def test_a_text_is_utf8() -> None:
    assert text("aé".encode(), 0, 3) == "aé"
    assert text("aé".encode(), 1, 3) == "é"
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        text("aé".encode(), 0, 2)
