"""The type of a route, and the table that finds the routes of a path.

Knows patterns of paths. The routes themselves are in ``routes.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import UnionType
from typing import Any, Literal, NamedTuple

import msgspec

from inferd.events import Operation
from inferd.gateway.call import Answer, Call, Pieces, Switched
from inferd.gateway.context import Context
from inferd.gateway.errors import OPENAI_ERRORS, ErrorShape
from inferd.http.exchange import Headers
from inferd.observe.payloads.texts import Texts
from inferd.tenancy.principal import Scope

Endpoint = Callable[[Context, Call, str], Awaitable[Answer | Pieces | Switched]]


class Route(NamedTuple):
    """One route: a method and a path pattern, the scope of its keys, the endpoint, and its values for the OpenAPI
    document."""

    method: Literal["GET", "POST", "DELETE"]
    pattern: str  # a name in braces matches any text, slashes included, because names of models may have slashes
    scope: Scope
    endpoint: Endpoint
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | type[list[Any]] | UnionType | None = None
    chunk: type[msgspec.Struct] | UnionType | None = None  # the type of each event of a streamed answer
    media: bytes = b"application/json"
    statuses: tuple[int, ...] = ()  # of error answers
    success: int = 200
    also: tuple[int, ...] = ()  # further statuses whose answer is a ``response``
    needs_body: bool = True  # where there is a ``request``
    request_media: str = "application/json"
    errors: ErrorShape = OPENAI_ERRORS
    query: type[msgspec.Struct] | None = None
    headers: Headers = ()  # of every answer of this route, errors included
    of_console: bool = False  # for this server's own pages; not served where server.console is off
    events: str = ""  # the form of the events of type ``chunk``, for the OpenAPI document; empty: OpenAI's
    stream_media: bytes = b"text/event-stream"  # of such an answer
    operation: Operation | None = None  # that it asks a model for, for records, traces and metrics
    texts: Texts | None = None  # the texts that may be kept in records of payloads; None: sizes and digests alone
    page: bytes = b""  # the relative address of the page that a browser gets instead, where there is a console


class Match(NamedTuple):
    """The routes of a path, by method, and the text of the path that the pattern's names match (``rest``)."""

    pattern: str
    by_method: dict[str, Route]
    rest: str

    @property
    def first(self) -> Route:
        """The route that speaks for the path where none has the request's method. Its scope is needed before an answer
        says anything about the path."""
        return next(iter(self.by_method.values()))

    @property
    def allow(self) -> str:
        methods = list(self.by_method)
        if "GET" in self.by_method:
            methods.append("HEAD")
        return ", ".join([*methods, "OPTIONS"])


class RouteTable:
    """Finds the routes of a path.

    A pattern with two names, such as ``/v2/models/{model}/versions/{version}``, matches one text for both: ``rest`` is
    that text, with the separator inside it.
    """

    __slots__ = ("_exact", "_open_ended")

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        found: dict[str, dict[str, Route]] = {}
        for route in routes:
            (found if "{" in route.pattern else self._exact).setdefault(route.pattern, {})[route.method] = route
        self._open_ended = [(*_literals(pattern), pattern, by_method) for pattern, by_method in found.items()]
        # Patterns with more literal text go first.
        self._open_ended.sort(key=lambda entry: -len(entry[1]) - len(entry[2]))

    def find(self, path: str) -> Match | None:
        exact = self._exact.get(path)
        if exact is not None:
            return Match(path, exact, "")
        for prefix, between, suffix, pattern, by_method in self._open_ended:
            if path.startswith(prefix) and path.endswith(suffix) and len(path) > len(prefix) + len(suffix):
                rest = path[len(prefix) : len(path) - len(suffix)]
                if not between or between in rest[1:-1]:
                    return Match(pattern, by_method, rest)
        return None


def _literals(pattern: str) -> tuple[str, str, str]:
    """The literal texts before, between and behind a pattern's names."""
    prefix, _, rest = pattern.partition("{")
    between, _, suffix = rest.partition("}")[2].rpartition("{")
    return (prefix, between, suffix.partition("}")[2]) if between else (prefix, "", rest.partition("}")[2])
