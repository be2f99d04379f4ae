"""A request's head, and the cache of parsed heads.

A client that reuses its connection sends the same head with every request. The cache finds a parsed head by its bytes
without the digits of Content-Length (``head_pattern``), and with it what the application derived from the head.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

import httptools

from inferd.head_pattern import SplitHead, is_exact, pattern_of

MAX_CACHED_HEADS: Final = 512
"""Heads in one of the two generations of ``HeadCache``."""

MAX_CACHED_HEAD_BYTES: Final = 1536  # a longer head is not cached


class BadTarget(Exception):
    """The request's target is no path."""


class RequestHead:
    """Method, target and headers of a request, which do not change.

    ``headers`` have lower-case names. In a cached head the Content-Length is that of the first request with the head;
    the exchange has the length of the current body.
    """

    __slots__ = ("_first", "_parts", "headers", "http_version", "method", "note", "target")

    def __init__(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], http_version: str) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.http_version = http_version
        self.note: Any = None
        """What the application derived from this head alone. The application checks whether that is still valid."""
        self._first = dict(reversed(headers))
        self._parts: tuple[str, str] | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first header of a lower-case name."""
        return self._first.get(name)

    @property
    def path(self) -> str:
        """The decoded path. Raises BadTarget."""
        return self._split()[0]

    @property
    def query(self) -> str:
        """The query string, not decoded. Raises BadTarget."""
        return self._split()[1]

    def _split(self) -> tuple[str, str]:
        if self._parts is None:
            self._parts = _split(self.target)
        return self._parts

    def count(self, name: bytes) -> int:
        """The number of headers with this lower-case name."""
        return sum(key == name for key, _ in self.headers)


class HeadCache:
    """Parsed heads by their patterns.

    There are two generations. A head that is used moves to the younger one, and the older one is dropped when the
    younger is full. So heads without repetition do not displace heads that are used.
    """

    __slots__ = ("_latest", "_latest_head", "_old", "_young")

    def __init__(self) -> None:
        self._latest_head: RequestHead | None = None  # the last one: most clients of a server send the same head
        self._latest = SplitHead(b"")
        self._young: dict[bytes, RequestHead] = {}
        self._old: dict[bytes, RequestHead] = {}

    def find(self, data: bytes) -> tuple[RequestHead, bytes] | None:
        """The head and the body of a request, if ``data`` is all of it and the head is cached."""
        if self._latest_head is not None and (begin := self._latest.body_at(data)) > 0:
            return self._latest_head, data[begin:]
        end = data.find(b"\r\n\r\n")
        pattern, digits = pattern_of(data, end)
        head = self._young.get(pattern)
        if head is None:
            head = self._old.pop(pattern, None)
            if head is None:
                return None
            self._keep(pattern, head)
        if not digits.isdigit() or int(digits) != len(data) - end - 4:
            return None
        self._latest, self._latest_head = SplitHead(data[:end]), head
        return head, data[end + 4 :]

    def add(self, raw: bytes, head: RequestHead) -> None:
        """Cache a head that was parsed from the bytes ``raw``, if requests with equal heads differ in their body alone.

        Heads without a length are not cached, nor heads whose requests need more than the parsed head: with an offer to
        upgrade, ``Expect``, or a connection that will be closed.
        """
        if (
            head.http_version == "1.1"
            and is_exact(raw)
            and not _SPECIAL.intersection([name for name, _ in head.headers])
        ):
            self._keep(pattern_of(raw, len(raw))[0], head)

    def _keep(self, pattern: bytes, head: RequestHead) -> None:
        if len(self._young) >= MAX_CACHED_HEADS:
            self._old, self._young = self._young, {}
        self._young[pattern] = head


_SPECIAL: Final = frozenset((b"expect", b"upgrade", b"transfer-encoding", b"http2-settings", b"trailer"))


def _split(target: bytes) -> tuple[str, str]:
    """Decoded path, and query, of a request's target."""
    if target == b"*":
        return "*", ""
    try:
        url = httptools.parse_url(target)
        path = (url.path or b"/").decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise BadTarget from None
    if "%" in path:
        path = unquote(path)
    return path, (url.query or b"").decode("latin-1")
