"""HPACK beside the library of that name, which shares no line with ours: any blocks mean the same headers, or none."""

from __future__ import annotations

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.http.http2 import hpack as ours
from inferd.http.http2 import huffman

CODE = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b":path", b"user-agent", b"x", b"grpc-timeout", b"x" * 200]) | st.binary(max_size=6),
        st.binary(max_size=12) | st.sampled_from([b"", b"/a", b"1S", b"y" * 3000]),
    ),
    max_size=6,
)


def test_the_static_table_is_the_specifications() -> None:
    assert ours.STATIC == HeaderTable.STATIC_TABLE


@given(st.binary(max_size=60))
def test_every_string_is_decoded(text: bytes) -> None:
    assert huffman.decode(CODE.encode(text)) == text


@given(st.binary(max_size=8) | st.lists(st.sampled_from([0xFF, 0xFE, 0x3F, 0]), max_size=6).map(bytes))
def test_what_the_library_does_not_decode_is_refused(coded: bytes) -> None:
    try:
        theirs = decode_huffman(coded)
    except hpack.HPACKDecodingError:
        with pytest.raises(huffman.HuffmanError):
            huffman.decode(coded)
    else:
        assert huffman.decode(coded) == theirs


@given(
    st.lists(
        st.tuples(HEADERS, st.booleans(), st.none() | st.sampled_from([0, 33, 34, 39, 40, 66, 72, 73, 105, 4096])),
        max_size=6,
    )
)
def test_blocks_of_one_connection_are_read_in_their_order(
    blocks: list[tuple[list[ours.Header], bool, int | None]],
) -> None:
    """With a table that grows, overflows and changes its size."""
    encoder, decoder = hpack.Encoder(), ours.Decoder()
    for headers, is_coded, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        assert decoder.decode(encoder.encode(headers, huffman=is_coded), 1 << 20) == headers


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=24), min_size=1, max_size=4))
def test_of_any_bytes_we_read_what_the_library_reads_or_nothing(blocks: list[bytes]) -> None:
    theirs, decoder = hpack.Decoder(), ours.Decoder()
    for block in blocks:
        try:
            read = decoder.decode(block, 1 << 20)
        except ours.HpackError:
            with pytest.raises((hpack.HPACKError, IndexError)):
                theirs.decode(block, raw=True)
            return
        assert read == [tuple(header) for header in theirs.decode(block, raw=True)]


@given(HEADERS)
def test_what_we_write_is_read(headers: list[ours.Header]) -> None:
    written = b"".join([ours.literal(*header) for header in headers])
    assert [tuple(header) for header in hpack.Decoder().decode(written, raw=True)] == headers


def test_a_block_that_changes_the_table_changes_its_version() -> None:
    encoder, decoder = hpack.Encoder(), ours.Decoder()
    first, again = encoder.encode([(b"a", b"b")]), encoder.encode([(b"a", b"b")])
    before = decoder.version
    decoder.decode(first, 1000)
    assert decoder.version != before
    before = decoder.version
    assert decoder.decode(again, 1000) == [(b"a", b"b")]
    assert decoder.version == before


def test_a_block_that_resizes_the_table_changes_its_version() -> None:
    """Its fields mean something else afterwards, or nothing."""
    encoder, decoder = hpack.Encoder(), ours.Decoder()
    decoder.decode(encoder.encode([(b"a", b"b")]), 1000)
    again, before = encoder.encode([(b"a", b"b")]), decoder.version
    assert decoder.decode(again, 1000) == [(b"a", b"b")]
    assert decoder.decode(b"\x20", 1000) == []
    assert decoder.version != before
    with pytest.raises(ours.HpackError):
        decoder.decode(again, 1000)


def test_headers_that_are_too_large_are_not_kept_and_the_table_is() -> None:
    encoder, decoder = hpack.Encoder(), ours.Decoder()
    encoder.encode([(b"big", b"v" * 3000)])
    again = encoder.encode([(b"big", b"v" * 3000)])
    assert decoder.decode(hpack.Encoder().encode([(b"big", b"v" * 3000)]) + again * 50, 65536) is None
    assert decoder.decode(again, 65536) == [(b"big", b"v" * 3000)]
    with pytest.raises(ours.HpackError, match="stand for more than"):
        decoder.decode(again * 5000, 65536)


@pytest.mark.parametrize(("size", "is_kept"), [(0, False), (33, False), (34, True)])
def test_a_table_that_shrinks_forgets_what_it_has_no_room_for(size: int, is_kept: bool) -> None:
    """Also where it grows again at once: what is gone stays gone (RFC 7541, section 4.3)."""
    decoder = ours.Decoder()
    assert decoder.decode(b"\x40\x01a\x01b", 1000) == [(b"a", b"b")]
    resized = bytes((0x20 | size,)) if size < 31 else bytes((0x3F, size - 31))
    if is_kept:
        assert decoder.decode(resized + b"\x3f\xe1\x1f\xbe", 1000) == [(b"a", b"b")]
    else:
        with pytest.raises(ours.HpackError, match="no header 62"):
            decoder.decode(resized + b"\x3f\xe1\x1f\xbe", 1000)


def test_a_new_entry_takes_the_place_of_the_oldest_where_both_have_no_room() -> None:
    decoder = ours.Decoder()
    added = b"".join(b"\x40\x01a\x01" + value for value in (b"1", b"2", b"3"))  # of 34 bytes each
    assert decoder.decode(b"\x3f\x25" + added + b"\xbe\xbf", 1000) == [
        *((b"a", value) for value in (b"1", b"2", b"3")),
        *((b"a", value) for value in (b"3", b"2")),
    ], "a table of 68 bytes"
    with pytest.raises(ours.HpackError, match="no header 64"):
        decoder.decode(b"\xc0", 1000)


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # header 0
        b"\xfe",  # one that is not there
        b"\xff\xff\xff\xff\xff\x7f",  # a number without end
        b"\x3f\xe2\x1f",  # a table of 4097 bytes
        b"\x82\x20",  # which changes within a block
        b"\x00\x05ab",  # a string that is cut off
        b"\x00\x81\x00\x00",  # one whose padding is not ones
        b"\x40",
        b"\x3f\x03\x40\x01a\x01b\x40\x01c\x01d\xbf",  # a header that a table of 34 bytes has no room for any more
    ],
)
def test_what_is_no_block_is_refused(block: bytes) -> None:
    with pytest.raises(ours.HpackError):
        ours.Decoder().decode(block, 65536)
