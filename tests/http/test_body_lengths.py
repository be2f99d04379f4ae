"""What a request says of its body's length, before any of the body is read."""

from __future__ import annotations

import asyncio

import pytest

from inferd.errors import InvalidRequest
from inferd.gateway.call import Call, read_body
from inferd.gateway.errors import BodyTooLarge
from inferd.http.head import RequestHead


def read(length: bytes, body: bytes) -> bytes:
    class Sent(Call):
        async def read(self) -> tuple[bytes, bool]:
            return body, True

    call = Sent(RequestHead("POST", b"/", [(b"content-length", length)], "1.1"), 0.0)
    return asyncio.run(read_body(call, max_bytes=10, timeout_s=5))


def test_blanks_behind_a_length_are_none_of_it() -> None:
    assert read(b"5", b"hello") == read(b"5 ", b"hello") == read(b"5 \t", b"hello") == b"hello"


@pytest.mark.parametrize("length", [b"", b" ", b"5 5", b"-5", b"0x5"])
def test_what_is_no_number_is_refused(length: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Content-Length is not a number"):
        read(length, b"hello")


@pytest.mark.parametrize("length", [b"11", b"9" * 30])
def test_what_is_too_large_is_refused_unread(length: bytes) -> None:
    with pytest.raises(BodyTooLarge):
        read(length, b"")
