"""Sessions of the console: an API key is exchanged for a cookie that holds for this server's own pages.

The server keeps the id of the key and a hash of the cookie's value, never the key. A session ends with its key: each
request asks whether the key is valid. Sessions live in memory, so a restart ends them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict, deque
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from inferd import clock
from inferd.errors import QuotaExceeded, Unauthenticated
from inferd.gateway.call import Call
from inferd.gateway.origin import is_same_origin
from inferd.tenancy.principal import Door, Principal

MAX_SESSIONS: Final = 4096
MAX_SESSIONS_OF_KEY: Final = 64
MAX_FAILURES: Final = 10  # sign-ins with a wrong key from one address within ``FAILURES_S``
FAILURES_S: Final = 60.0
MAX_ADDRESSES: Final = 1024

_ID_BYTES: Final = 32
_MAX_COOKIE_BYTES: Final = 16 * 1024
_PREFIX: Final = re.compile(r"/(?:[A-Za-z0-9._~%!$&'()*+,=:@-]+/)*")
_MAX_PREFIX_CHARS: Final = 512


class Session(NamedTuple):
    """One sign-in."""

    key_id: str
    ends_at: float  # on the monotonic clock, which stands still while the machine sleeps
    ends_wall: float  # since the epoch; the earlier of both counts


class Sessions:
    """All sessions, by the hash of their ids, the oldest first."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()  # times of failures, by the client's address

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, key_id: str, lasts_s: float) -> str:
        """Begin a session of a key; the id for its cookie. The key's oldest session ends where it has too many."""
        now, wall = clock.now(), clock.wall()
        for old in [name for name, session in self._sessions.items() if _is_over(session, now, wall)]:
            del self._sessions[old]
        own = [name for name, session in self._sessions.items() if session.key_id == key_id]
        if len(own) >= MAX_SESSIONS_OF_KEY:
            del self._sessions[own[0]]
        elif len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        session_id = secrets.token_urlsafe(_ID_BYTES)
        self._sessions[_hash(session_id)] = Session(key_id, now + lasts_s, wall + lasts_s)
        return session_id

    def end(self, session_id: str) -> None:
        """Idempotent."""
        self._sessions.pop(_hash(session_id), None)

    def principal(self, session_id: str, door: Door) -> Principal:
        """The principal of a session's key. Where no keys are needed, a session that ended counts as no credential.
        Raises Unauthenticated."""
        name = _hash(session_id)
        session = self._sessions.get(name)
        if session is not None:
            principal = door.holder(session.key_id)
            if principal is not None and not _is_over(session, clock.now(), clock.wall()):
                return principal
            del self._sessions[name]
        try:
            return door.authenticate(None)
        except Unauthenticated:
            raise Unauthenticated(
                "The session has ended; sign in to the console again with an API key.", code="session_expired"
            ) from None

    # -- failed sign-ins --------------------------------------------------------------------

    def check_failures(self, address: str) -> None:
        """Raises QuotaExceeded after too many sign-ins with a wrong key from an address."""
        failures, now = self._failures.get(address), clock.now()
        while failures and failures[0] <= now - FAILURES_S:
            failures.popleft()
        if failures and len(failures) >= MAX_FAILURES:
            raise QuotaExceeded(
                f"Too many sign-ins with a wrong key: {MAX_FAILURES} within {FAILURES_S:.0f} s; wait, and check the "
                "key.",
                code="too_many_sign_ins",
                retry_after_s=failures[0] + FAILURES_S - now,
            )

    def failed(self, address: str) -> None:
        """A sign-in from ``address`` had a wrong key."""
        failures = self._failures.pop(address, None) or deque(maxlen=MAX_FAILURES)
        failures.append(clock.now())
        self._failures[address] = failures
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)


def _hash(session_id: str) -> bytes:
    """Sessions are looked up by a hash: the time of a comparison tells nothing of an id."""
    return hashlib.sha256(session_id.encode("latin-1")).digest()


def _is_over(session: Session, now: float, wall: float) -> bool:
    return now >= session.ends_at or wall >= session.ends_wall


# -- the cookie ----------------------------------------------------------------------------------


def session_id_of(call: Call) -> str | None:
    """The session id in a call's cookies. None: there is none, or the call is not from a page of this server.

    Pages of other origins never use a session, not even those in server.cors_origins.
    """
    cookies = call.header(b"cookie")
    if cookies is None or len(cookies) > _MAX_COOKIE_BYTES or not is_same_origin(call):
        return None
    wanted = cookie_name(call)
    for part in cookies.split(b";"):
        name, _, value = part.strip().partition(b"=")
        if name == wanted:
            return value.decode("latin-1")
    return None


def cookie_name(call: Call) -> bytes:
    """The name has the port, because a browser sends the cookies of a host to all of its ports."""
    port = (call.header(b"host") or b"").rpartition(b":")[2]
    return b"inferd-session-" + port if port.isdigit() else b"inferd-session"


def set_cookie(call: Call, session_id: str, lasts_s: float) -> tuple[bytes, bytes]:
    """The header that gives a browser the cookie. An empty id removes it.

    HttpOnly: no script reads it. SameSite=Strict: no page of another site causes a request that has it. It is sent to
    the paths below the prefix at which a proxy serves this server.
    """
    parts = [
        b"%b=%b" % (cookie_name(call), session_id.encode("ascii")),
        b"Path=" + prefix_of(call).encode("ascii"),
        b"Max-Age=%d" % (lasts_s if session_id else 0),
        b"HttpOnly",
        b"SameSite=Strict",
    ]
    if _is_secure(call):
        parts.append(b"Secure")
    return (b"set-cookie", b"; ".join(parts))


def _is_secure(call: Call) -> bool:
    """Whether the browser reached the page by HTTPS: at this server, or at a proxy in front of it."""
    origin = call.header(b"origin") or call.header(b"referer") or b""
    return origin.lower().startswith(b"https://") or call.header(b"x-forwarded-proto") == b"https"


def prefix_of(call: Call) -> str:
    """The path at which the browser sees this server: / or, behind a proxy, for example /llm/.

    A proxy tells it in X-Forwarded-Prefix. Otherwise the page's own address in Referer shows it. A client that lies
    changes the path of its own cookie alone.
    """
    told = call.header(b"x-forwarded-prefix")
    if told is not None:
        prefix = "/" + told.decode("latin-1").strip().strip("/") + "/"
    else:
        try:
            path = urlsplit((call.header(b"referer") or b"").decode("latin-1")).path
        except ValueError:
            return "/"
        before, found, _ = path.rpartition("/console/")
        prefix = before + "/" if found else "/"
    prefix = prefix.replace("//", "/")
    return prefix if len(prefix) <= _MAX_PREFIX_CHARS and _PREFIX.fullmatch(prefix) else "/"
