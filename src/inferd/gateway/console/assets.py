"""The console's files: every one with its type, its entity tag and its compressed form.

The files are those of one folder of the package. A request names an entry of a table, and not a path of the file
system, so no request reaches another file.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib.resources
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from inferd.gateway.body.compression import MIN_BYTES
from inferd.gateway.call import Call, Response
from inferd.gateway.errors import RouteNotFound, printable
from inferd.http.exchange import Headers

PAGE: Final = "index.html"
DOCS_PAGE: Final = "docs.html"  # at /docs

_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "mjs": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "png": b"image/png",
    "ico": b"image/x-icon",
    "json": b"application/json",
    "webmanifest": b"application/manifest+json",
    "woff2": b"font/woff2",
    "md": b"text/plain; charset=utf-8",
    "txt": b"text/plain; charset=utf-8",
}
_COMPRESSED: Final = (b"image/png", b"image/x-icon", b"font/woff2")  # types that gzip does not make smaller

_HEADERS: Final[Headers] = (
    # A stored file is used after the server has confirmed it: names stay the same from version to version.
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept-encoding"),
)


class Asset(NamedTuple):
    """One file."""

    content_type: bytes
    body: bytes
    tag: bytes
    gzipped: bytes  # empty: it would not be smaller


class Assets:
    """The files of a folder. They are read, and compressed, when the first of them is requested."""

    def __init__(self, folder: Traversable | None = None) -> None:
        """None: the folder of the package."""
        self._folder = folder
        self._files: dict[str, Asset] | None = None
        self._reading = asyncio.Lock()

    async def answer(self, call: Call, name: str) -> Response:
        """The file ``name``, or status 304 for a client that has it. Raises RouteNotFound."""
        files = self._files
        if files is None:
            async with self._reading:
                if self._files is None:
                    self._files = await asyncio.to_thread(_read, self._folder)
                files = self._files
        asset = files.get(name)
        if asset is None:
            raise RouteNotFound(f"The console has no file {printable(name, 100)!r}; its page is console/.")
        is_gzipped = bool(asset.gzipped) and accepts_gzip(call)
        tag = asset.tag + b'-gz"' if is_gzipped else asset.tag + b'"'
        headers = (*_HEADERS, (b"etag", tag))
        if _has(call, tag):
            return Response(304, b"", asset.content_type, headers)
        if is_gzipped:
            return Response(200, asset.gzipped, asset.content_type, (*headers, (b"content-encoding", b"gzip")))
        return Response(200, asset.body, asset.content_type, headers)


def accepts_gzip(call: Call) -> bool:
    """Whether the client takes a gzipped answer (RFC 9110, section 12.5.3)."""
    for part in (call.header(b"accept-encoding") or b"").lower().split(b","):
        name, _, quality = part.partition(b";")
        if name.strip() == b"gzip":
            return quality.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return False


def _has(call: Call, tag: bytes) -> bool:
    """Whether the client has this form of the file. A proxy may have made its tag a weak one (RFC 9110, 13.1.2)."""
    known = call.header(b"if-none-match")
    if known is None:
        return False
    return any(part.strip().removeprefix(b"W/") in (tag, b"*") for part in known.split(b","))


def _read(folder: Traversable | None) -> dict[str, Asset]:
    root = importlib.resources.files("inferd") / "console" / "assets" if folder is None else folder
    found: dict[str, Asset] = {}
    for name, file in _files(root, ""):
        content_type = _TYPES.get(name.rpartition(".")[2])
        if content_type is None:
            continue  # no file that the console needs
        body = file.read_bytes()
        gzipped = b""
        if content_type not in _COMPRESSED and len(body) >= MIN_BYTES:
            gzipped = gzip.compress(body, 9, mtime=0)
        tag = b'"' + hashlib.sha256(body).hexdigest()[:32].encode("ascii")
        found[name] = Asset(content_type, body, tag, gzipped if len(gzipped) < len(body) else b"")
    return found


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    """The files below a folder, with their paths. A missing folder has none."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from _files(entry, f"{path}{entry.name}/")
            elif not entry.name.startswith("."):
                yield path + entry.name, entry
