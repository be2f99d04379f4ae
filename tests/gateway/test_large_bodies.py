"""Large bodies are put together and decompressed in pieces, and are what one call would have made."""

from __future__ import annotations

import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.body import joined as joining
from inferd.gateway.body.inflate import decompress
from inferd.gateway.body.joined import joined
from inferd.gateway.errors import BodyTooLarge

MB = 1 << 20


@given(st.lists(st.binary(max_size=40)), st.integers(1, 16))
def test_parts_are_joined_whatever_their_sizes(parts: list[bytes], size: int) -> None:
    whole = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "PIECE_BYTES", size)
        assert joined(parts, len(whole)) == whole


def test_a_joined_body_is_not_copied_once_more_and_shares_no_memory() -> None:
    part = b"x" * MB
    first, second = joined([part, part], 2 * MB), joined([part], MB)
    assert type(first) is bytes
    assert (first, second) == (part * 2, part)


BODIES = {
    "nothing": b"",
    "a letter": b"a",
    "what one call gives": b" " * MB,
    "a byte more than one call gives": b" " * (MB + 1),
    "many calls' worth": b" " * (5 * MB),
    "what cannot be compressed": os.urandom(3 * MB // 2),
    "both": os.urandom(200_000) + b"a" * (2 * MB) + os.urandom(200_000),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("level", [0, 1, 9])
def test_a_body_is_decompressed_whatever_the_pieces_are(name: str, level: int) -> None:
    body = BODIES[name]
    deflate = zlib.compressobj(level, wbits=31)
    packed = deflate.compress(body) + deflate.flush()
    assert decompress(packed, "gzip", len(body)) == body
    if body:
        with pytest.raises(BodyTooLarge):
            decompress(packed, "gzip", len(body) - 1)
    with pytest.raises(InvalidRequest, match="behind its end"):
        decompress(packed + b"\0" * 100_000, "gzip", len(body))
    with pytest.raises(InvalidRequest, match="ends before it is complete"):
        decompress(packed[:-1], "gzip", len(body))
