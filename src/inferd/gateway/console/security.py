"""The headers that keep a page of the console from loading, or being loaded by, anything foreign."""

from __future__ import annotations

from typing import Final

from inferd.http.exchange import Headers

POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'"
)
"""The Content-Security-Policy: scripts and styles are files of this server, and no text becomes a script."""

CONSOLE_HEADERS: Final[Headers] = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),  # for browsers without frame-ancestors
    # The sign-in reads the path prefix of a proxy from the Referer of this page's own requests.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()"),
)
"""Headers of every answer below /console."""
