"""Checks of the Host and Origin headers: the names of this server, and the web pages that may call it.

A web page can attack a server through its visitor's browser. It may use a name that a foreign DNS server points at
127.0.0.1 (DNS rebinding), or a form or script of another origin. Both are refused. Programs other than browsers send
no Origin, and only their Host header is checked.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from inferd.config import ServerConfig
from inferd.errors import Forbidden, InvalidRequest
from inferd.gateway.call import Call
from inferd.gateway.errors import printable
from inferd.http.exchange import Headers

_HOST: Final = re.compile(
    rb"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253})|\[[0-9A-Fa-f:.]{2,45}(?:%25[A-Za-z0-9._-]{1,32})?\])"
    rb"(?::(?P<port>[0-9]{1,5}))?"
)
_SAFE: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_MAX_HOST_RESULTS: Final = 256
_EXPOSED: Final = (
    b"x-request-id, retry-after, idempotent-replayed, x-inferd-cache, x-inferd-ignored-params, "
    b"x-inferd-unenforced-params, x-inferd-watermark, x-keda-http-cold-start, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    b"inference-header-content-length"
)
_VARY: Final = (b"vary", b"origin")


class Origins:
    """The allowed hosts and origins of one configuration."""

    __slots__ = ("_any_origin", "_host_results", "_hosts", "_origins")

    def __init__(self, config: ServerConfig) -> None:
        hosts = config.allowed_hosts
        if not hosts and is_loopback(config.host):
            hosts = ("localhost", "*.localhost")
        self._hosts: tuple[str, ...] = () if "*" in hosts else tuple(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in config.cors_origins)
        self._any_origin = b"*" in self._origins
        self._host_results: dict[bytes, bool] = {}  # answers for Host headers seen before

    def check_host(self, call: Call) -> None:
        """Raises InvalidRequest for a missing or malformed Host header, and Forbidden for a host that is not
        allowed."""
        host = call.header(b"host")
        if host is None:
            if call.head.http_version == "1.0":
                return
            raise InvalidRequest("The Host header is missing; HTTP/1.1 needs one.", code="invalid_host")
        allowed = self._host_results.get(host)
        if allowed is None:
            allowed = self._is_allowed(host)
            if len(self._host_results) < _MAX_HOST_RESULTS:
                self._host_results[host] = allowed
        if call.head.count(b"host") > 1:
            raise InvalidRequest("The Host header came twice; send it once.", code="invalid_host")
        if not allowed:
            name = printable(host.decode("latin-1"))
            raise Forbidden(
                f"This server does not answer to the name {name!r}; add it to server.allowed_hosts.",
                code="host_not_allowed",
            )

    def _is_allowed(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host)
        if match is None or int(match["port"] or 0) > 65_535:
            raise InvalidRequest("The Host header is not a host name or address.", code="invalid_host")
        if not self._hosts:
            return True
        name = match["name"].decode("ascii").lower().rstrip(".")
        if _is_address(name.strip("[]")):
            return True  # an address needs no DNS, so it cannot be rebound
        return any(name == rule or (rule.startswith("*.") and name.endswith(rule[1:])) for rule in self._hosts)

    def cors_headers(self, call: Call, *, same_origin_only: bool) -> Headers:
        """The CORS headers that let a page of an allowed origin read the answer, also an error.

        ``same_origin_only``: the route allows no page of another origin, whatever is configured.
        """
        origin = call.header(b"origin")
        if origin is None:
            return (_VARY,) if self._origins else ()
        if same_origin_only or not self._allows(origin):
            return ()
        return (
            (b"access-control-allow-origin", b"*" if self._any_origin else origin),
            (b"access-control-expose-headers", _EXPOSED),
            _VARY,
        )

    def check_origin(self, call: Call, *, same_origin_only: bool) -> Headers:
        """The same headers. Raises Forbidden for an unsafe method, or a WebSocket, from a page of an origin that is not
        allowed."""
        headers = self.cors_headers(call, same_origin_only=same_origin_only)
        origin = call.header(b"origin")
        # A browser lets every page read a WebSocket of another origin, so the server must refuse it.
        if origin is None or headers or (call.method in _SAFE and call.offer is None):
            return headers
        if not is_same_origin(call):
            name = printable(origin.decode("latin-1"))
            raise Forbidden(
                f"Pages of the origin {name!r} may not call this server; add it to server.cors_origins.",
                code="origin_not_allowed",
            )
        return headers

    def preflight(self, call: Call, allow: str) -> Headers | None:
        """The headers of the answer to a browser's preflight request. None: the call is no preflight request, or its
        origin is not allowed."""
        origin = call.header(b"origin")
        if origin is None or call.header(b"access-control-request-method") is None or not self._allows(origin):
            return None
        return (
            (b"access-control-allow-origin", b"*" if self._any_origin else origin),
            (b"access-control-allow-methods", allow.encode("ascii")),
            (b"access-control-allow-headers", _ALLOWED_HEADERS),
            (b"access-control-max-age", b"600"),
            _VARY,
        )

    def _allows(self, origin: bytes) -> bool:
        return self._any_origin or origin.lower() in self._origins


_ALLOWED_HEADERS: Final = (
    b"authorization, content-type, x-api-key, idempotency-key, x-request-id, x-client-request-id, x-session-id, "
    b"x-inferd-session, x-inferd-priority, x-inferd-timeout, x-request-timeout, x-stainless-arch, x-stainless-lang, "
    b"x-stainless-os, x-stainless-package-version, x-stainless-retry-count, x-stainless-runtime, "
    b"x-stainless-runtime-version, x-stainless-timeout, x-stainless-helper-method, "
    b"inference-header-content-length, content-encoding"
)


def is_same_origin(call: Call) -> bool:
    """Whether a page of this server sent the request, or a person opened its address.

    A page cannot set Sec-Fetch-Site or Origin. Sec-Fetch-Site counts first: it is also right behind a proxy that
    changes the Host header. Browsers send it to HTTPS and loopback addresses alone, and Origin with every unsafe
    method. Without both headers only a safe method counts, because another origin cannot read its answer.
    """
    is_safe = call.method in _SAFE and call.offer is None
    site = call.header(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin" or (site == b"none" and is_safe)
    origin = call.header(b"origin")
    if origin is None:
        return is_safe
    return origin.lower().partition(b"://")[2] == (call.header(b"host") or b"").lower()


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a listener on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
