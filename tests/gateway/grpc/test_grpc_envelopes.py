"""What is remembered of a request's envelope is what would be read of it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.grpc.envelope import MAX_KNOWN, Envelope, Envelopes, read_envelope
from inferd.predict.codecs.v2_parameters import parameter_entry
from inferd.protowire import sized

FIELDS = st.one_of(
    st.builds(sized, st.sampled_from([1, 2, 3]), st.sampled_from([b"a", b"b", b"\xff"])),
    st.builds(sized, st.sampled_from([5, 7]), st.binary(max_size=3)),
    st.builds(lambda value: sized(4, parameter_entry("p", value)), st.booleans()),
    st.sampled_from([b"\x0b\x0a\x01c\x0c", b"\x3b\x08\x01\x3c", b"\x08\x01", b"\x0a", b"\x3a\x05"]),
)


def read(body: bytes) -> Envelope | None:
    try:
        return read_envelope(body)
    except InvalidRequest:
        return None


@given(st.lists(st.lists(FIELDS, max_size=4).map(b"".join), max_size=30))
@example([b"\x0a\x01a" + sized(7, b"x") + b"\x0b\x0a\x01c\x0c", b"\x0a\x01a" + sized(7, b"x") + b"\x0a\x03abc"])
@example([sized(1, b"a") + sized(7, b"12345"), sized(1, b"a") + b"\x3a\x03123" + sized(1, b"")])
def test_an_envelope_is_read_the_same_whatever_came_before(bodies: list[bytes]) -> None:
    known = Envelopes()
    for body in bodies:
        for _ in range(2):
            try:
                found: Envelope | None = known.read(body)
            except InvalidRequest:
                found = None
            assert found == read(body)


def test_so_many_are_remembered() -> None:
    known = Envelopes()
    for size in range(3 * MAX_KNOWN):
        known.read(sized(1, b"m") + sized(7, bytes(size)))
    assert len(known._known) <= MAX_KNOWN
