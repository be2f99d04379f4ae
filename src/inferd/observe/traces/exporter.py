"""Sends spans to a collector as OTLP over HTTP, from a thread of its own.

``put`` never waits: what ended goes into a bounded queue, and the thread makes its spans. A collector that is slow,
full or gone fills the queue, and what does not fit is dropped and counted. Retries follow the specification of OTLP
(opentelemetry.io/docs/specs/otlp): after 429, 502, 503, 504 and failed connections, with growing pauses, and not before
the time in ``Retry-After``.
"""

from __future__ import annotations

import email.utils
import gzip
import http.client
import logging
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from inferd import __version__, clock
from inferd.errors import ConfigError
from inferd.observe.traces.conventions import SCHEMA_URL
from inferd.observe.traces.otlp import encode_request, rejected
from inferd.observe.traces.settings import Settings

RETRIED: Final = frozenset((429, 502, 503, 504))
FIRST_PAUSE_S: Final = 0.5  # before the first retry; doubles with each
LONGEST_PAUSE_S: Final = 5.0
LONGEST_RETRY_AFTER_S: Final = 300.0
MAX_ANSWER_BYTES: Final = 64 * 1024
CLOSE_S: Final = 2.0
"""How long the end of the server waits for spans to be sent."""

REST_AFTER: Final = 32  # ended requests
REST_S: Final = 0.0005
"""The thread rests this long after so many, because the event loop waits for the interpreter while spans are made."""

Reason = Literal["queue_full", "refused", "unavailable", "shutdown", "defect"]
Item = TypeVar("Item")

_log = logging.getLogger("inferd.traces")


class Counts(NamedTuple):
    """Where the exporter counts what became of what was put into it. Called from two threads."""

    exported: Callable[[int], None]
    dropped: Callable[[Reason, int], None]
    rejected: Callable[[int], None]  # spans that the collector took out of a batch


class _Answer(NamedTuple):
    status: int  # 0: there was none
    retry_after: str | None
    body: bytes
    detail: str  # what went wrong, for the log


class Exporter(Generic[Item]):
    """``make_spans`` turns an item into spans, as fields of their scope (``otlp.span_field``); it is given the wall
    clock less the monotonic one.

    The constructor raises ConfigError for certificates that cannot be used.
    """

    def __init__(self, settings: Settings, make_spans: Callable[[Item, float], list[bytes]], counts: Counts) -> None:
        self._settings = settings
        self._make_spans = make_spans
        self._counts = counts
        self._resource = dict(settings.resource)
        self._target = urlsplit(settings.url)
        self._context = _tls_context(settings) if self._target.scheme == "https" else None
        self._connection: http.client.HTTPConnection | None = None
        self._queue: deque[Item] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._is_failing = False
        self._not_before = 0.0  # the collector's Retry-After
        self._deadline = float("inf")  # of ``close``
        self._thread = threading.Thread(target=self._run, name="inferd-traces", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Have an item's spans sent. Never waits."""
        queue = self._queue
        if len(queue) >= self._settings.max_queue or self._closing.is_set():
            self._counts.dropped("queue_full", 1)
            return
        queue.append(item)
        if len(queue) == self._settings.max_batch:
            self._wake.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, for at most ``timeout_s``; the rest is dropped. Idempotent."""
        if self._closing.is_set():
            return
        self._deadline = clock.now() + timeout_s
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)  # if the collector is stuck, the daemon thread ends with the process
        left = len(self._queue)
        if left:
            self._queue.clear()
            self._counts.dropped("shutdown", left)
            _log.warning("the server ends, and the spans of %d requests were not sent", left)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        settings, queue = self._settings, self._queue
        while True:
            self._wake.wait(settings.delay_s)
            self._wake.clear()
            while queue and clock.now() < self._deadline:
                self._export([queue.popleft() for _ in range(min(len(queue), settings.max_batch))])
            if self._closing.is_set():
                self._disconnect()
                return

    def _export(self, items: list[Item]) -> None:
        body, count = self._encoded(items)
        reason = self._sent(body) if count else None
        if reason is None:
            self._counts.exported(count)
        else:
            self._counts.dropped(reason, count)

    def _encoded(self, items: list[Item]) -> tuple[bytes, int]:
        """The request to the collector, and the number of items in it."""
        count = 0
        offset_s = clock.wall() - clock.now()
        spans: list[bytes] = []
        for number, item in enumerate(items, start=1):
            try:
                spans += self._make_spans(item, offset_s)
                count += 1
            except Exception:  # a defect loses the spans of one request, and not the thread
                _log.exception("the spans of a request could not be made")
                self._counts.dropped("defect", 1)
            if number % REST_AFTER == 0:
                time.sleep(REST_S)
        body = encode_request(self._resource, ("inferd", __version__), SCHEMA_URL, spans)
        return gzip.compress(body, 1) if self._settings.is_compressed else body, count

    def _sent(self, body: bytes) -> Reason | None:
        """Why a batch was not sent in the end; None: it was sent."""
        give_up_at, pause_s = clock.now() + self._settings.give_up_s, FIRST_PAUSE_S
        while True:
            self._pause_until(min(self._not_before, self._deadline))
            answer = self._post(body)
            if 200 <= answer.status < 300:
                self._note_success(answer.body)
                return None
            if answer.status and answer.status not in RETRIED:
                self._note_failure(answer.detail)
                return "refused"
            self._note_failure(answer.detail)
            now = clock.now()
            again_at = now + pause_s * random.uniform(0.5, 1.5)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if answer.retry_after is not None:
                self._not_before = again_at = now + min(_seconds(answer.retry_after), LONGEST_RETRY_AFTER_S)
            if again_at > self._deadline:
                return "shutdown"
            if again_at > give_up_at:
                return "unavailable"
            self._pause_until(again_at)

    def _pause_until(self, at: float) -> None:
        """Wait, and no longer than a closing server can."""
        while (left := min(at, self._deadline) - clock.now()) > 0:
            if self._closing.is_set():
                time.sleep(left)
            else:
                self._closing.wait(left)

    def _post(self, body: bytes) -> _Answer:
        """One request. A kept connection that the collector has closed meanwhile is replaced once."""
        was_kept = self._connection is not None
        try:
            return self._ask(body)
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            if not was_kept or isinstance(error, TimeoutError):
                return _Answer(0, None, b"", str(error) or type(error).__name__)
        try:
            return self._ask(body)
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            return _Answer(0, None, b"", str(error) or type(error).__name__)

    def _ask(self, body: bytes) -> _Answer:
        connection = self._connected()
        headers = {"content-type": "application/x-protobuf", "user-agent": f"inferd/{__version__}"}
        if self._settings.is_compressed:
            headers["content-encoding"] = "gzip"
        headers.update(self._settings.headers)
        path = self._target.path or "/"
        connection.request("POST", path + (f"?{self._target.query}" if self._target.query else ""), body, headers)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES)
        if not response.isclosed() and response.read(1):
            self._disconnect()  # an answer of this size is not read to its end
        return _Answer(
            response.status, response.getheader("retry-after"), answer, f"{response.status} {response.reason}"
        )

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            timeout_s = min(self._settings.timeout_s, max(0.05, self._deadline - clock.now()))
            host, port = self._target.hostname or "", self._target.port
            self._connection = (
                http.client.HTTPConnection(host, port, timeout=timeout_s)
                if self._context is None
                else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context)
            )
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- the log ----------------------------------------------------------------------------

    def _note_success(self, body: bytes) -> None:
        if self._is_failing:
            self._is_failing = False
            _log.info("the collector at %s takes traces again", self._target.hostname)
        count, message = rejected(body)
        if count:
            self._counts.rejected(count)
            _log.warning("the collector rejected %d spans: %s", count, message[:200])

    def _note_failure(self, detail: str) -> None:
        """One line for each outage."""
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "traces cannot be sent to %s (%s); serving goes on, and what does not fit into the queue is dropped",
                self._target.hostname,
                detail,
            )


def _seconds(retry_after: str) -> float:
    """The seconds of a header ``Retry-After``, which has a number or a date. 0: it has neither."""
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - clock.wall())
    except ValueError:
        return 0.0


def _tls_context(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.certificate is not None:
            context.load_cert_chain(*settings.certificate)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The certificates for the collector of traces cannot be used: {error}; correct tracing.ca_file or "
            "OTEL_EXPORTER_OTLP_CERTIFICATE.",
            param="ca_file",
        ) from None
    return context
