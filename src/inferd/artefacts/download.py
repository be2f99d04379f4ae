"""Downloads that go on where they stopped, hashed while they are read.

``download`` fetches one file over HTTP or HTTPS. The bytes go to ``NAME.part`` beside the target. After a broken
connection, or in a later process, the download goes on with a Range request (RFC 9110, section 14). If-Range with the
server's validator makes the server send the whole file again when it has another one. Knows no registry and no model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import IO, BinaryIO, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from inferd.artefacts.copying import unwritable
from inferd.artefacts.manifest import CHUNK_BYTES, HashedFile, Progress, Totals, hash_file, silent
from inferd.artefacts.tree import find_files, not_verified
from inferd.errors import ModelLoadError

INTERRUPTED: Final = "download_interrupted"
"""The code of the error for a server that did not give the whole file. Trying again later makes sense."""

_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
_MAX_PAUSE_S: Final = 30.0
_OWN_HEADERS: Final = frozenset({"accept-encoding", "range", "if-range"})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a server."""

    url: str  # http: or https:
    headers: Mapping[str, str] = {}  # such as Authorization; sent to the URL's own host alone
    size: int | None = None  # bytes, where they are known before
    sha256: str | None = None  # 64 hexadecimal digits, where they are known before


class _Note(msgspec.Struct):
    """What a part file was read from."""

    url: str
    validator: str = ""  # a strong ETag, or a date; empty: the server named none


class _Broken(Exception):
    """The answer ended early, or did not begin; trying again makes sense, after so many seconds if the server says."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _Answer(Protocol):
    status: int
    headers: Message

    def read1(self, n: int) -> bytes: ...


def download(
    wanted: Wanted,
    target: Path,
    *,
    progress: Progress = silent,
    max_bytes: int | None = None,
    timeout_s: float = 30.0,
    attempts: int = 5,
    pause: Callable[[float], None] = time.sleep,
) -> HashedFile:
    """Download a file to ``target`` and return its name, size and digest. Another process that downloads it is awaited.

    An existing target is hashed instead of being fetched again. ``max_bytes``: a longer file is refused. ``timeout_s``:
    of connecting and of each read; the time of the whole is the caller's. ``attempts``: so many in sequence that bring
    no byte end the download. What has arrived stays for the next call. Raises ModelLoadError that names the URL without
    its query, and the expected and the found digest or size.
    """
    parts = urlsplit(wanted.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise not_verified(f"{_shown(wanted.url)} is no HTTP address.", param="source")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _part_of(target) as part:
            if target.is_file():  # another process has ended it meanwhile
                (file,) = find_files(target)
                hashed = hash_file(file, Totals(file.size, progress, "verify").add)
                _check(wanted, hashed)
                return hashed
            limit = min((size for size in (wanted.size, max_bytes) if size is not None), default=None)
            transfer = _Transfer(wanted, target, part, limit, progress)
            _run(transfer, timeout_s, attempts, pause)
            hashed = HashedFile(target.name, transfer.size, transfer.hash.hexdigest())
            try:
                _check(wanted, hashed)
            except ModelLoadError:
                transfer.forget()
                raise
            transfer.keep()
            return hashed
    except OSError as error:
        raise unwritable(target, error) from None


def _run(transfer: _Transfer, timeout_s: float, attempts: int, pause: Callable[[float], None]) -> None:
    """Ask until the file is complete. Raises ModelLoadError after so many attempts that brought nothing."""
    transfer.read_part()
    failures = 0
    while not transfer.is_complete:
        size = transfer.size
        try:
            transfer.ask(timeout_s)
        except _Broken as broken:
            failures = 1 if transfer.size > size else failures + 1
            if failures >= attempts:
                raise ModelLoadError(
                    f"{transfer.shown} could not be downloaded: {broken} after {transfer.size} bytes, in {attempts} "
                    "attempts. What has arrived is kept; check the server and the connection, and try again.",
                    param="source",
                    code=INTERRUPTED,
                ) from None
            pause(min(broken.after_s or 0.5 * 2 ** (failures - 1), _MAX_PAUSE_S))


def _check(wanted: Wanted, hashed: HashedFile) -> None:
    if wanted.size is not None and wanted.size != hashed.size:
        raise not_verified(
            f"{_shown(wanted.url)} has {hashed.size} bytes, but {wanted.size} are expected.", param="source"
        )
    if wanted.sha256 is not None and wanted.sha256 != hashed.sha256:
        raise not_verified(
            f"{_shown(wanted.url)} has the digest sha256:{hashed.sha256}, but sha256:{wanted.sha256} is expected: the "
            "server gave other bytes than it announced. Nothing of it is used.",
            param="source",
        )


@contextlib.contextmanager
def _part_of(target: Path) -> Iterator[BinaryIO]:
    """The part file of a target, locked: one process downloads it, the others wait. Raises OSError."""
    path = target.with_name(target.name + ".part")
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as part:
            fcntl.flock(part, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(part.fileno()), path.stat()):
                    try:
                        yield part
                    finally:
                        if target.is_file():
                            path.unlink(missing_ok=True)
                    return
        # The process before has renamed or removed it: this is a descriptor of another file now.


class _Transfer:
    """One file on its way to the disk."""

    def __init__(self, wanted: Wanted, target: Path, part: BinaryIO, limit: int | None, progress: Progress) -> None:
        self._wanted = wanted
        self._target = target
        self._part = part
        self._part_path = target.with_name(target.name + ".part")
        self._note_path = target.with_name(target.name + ".part.json")
        self._limit = limit
        self._progress = progress
        self._note = _Note(wanted.url)
        self._total = wanted.size  # bytes of the whole file; None: unknown
        self.shown = _shown(wanted.url)
        self.hash = hashlib.sha256()
        self.size = 0
        self.is_complete = False

    def read_part(self) -> None:
        """Hash what an earlier download left, if this one may go on with it."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._note = msgspec.json.decode(self._note_path.read_bytes(), type=_Note)
        may_go_on = self._note.url == self._wanted.url and (self._note.validator or self._wanted.sha256)
        if not may_go_on:
            self._begin_again()
            return
        self._part.seek(0)
        while part := self._part.read(CHUNK_BYTES):
            self._add(part, is_new=False)

    def ask(self, timeout_s: float) -> None:
        """One request for what is missing. Raises _Broken, ModelLoadError, or OSError of the disk."""
        headers = {**self._wanted.headers, "Accept-Encoding": "identity"}
        if not self._note.validator and not self._wanted.sha256:
            self._begin_again()  # nothing would notice that the file was replaced between two requests
        if self.size:
            headers["Range"] = f"bytes={self.size}-"
            if self._note.validator:
                headers["If-Range"] = self._note.validator
        request = urllib.request.Request(self._wanted.url, headers=headers)
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                self._receive(answer)
        except urllib.error.HTTPError as error:
            with error:
                self._refused(error)
        except ModelLoadError:
            raise
        except _Broken:
            raise
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise not_verified(f"{self.shown}: {error.reason.verify_message}.", param="source") from None
            raise _Broken(str(error.reason)) from None
        except (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
            raise _Broken(str(error) or type(error).__name__) from None

    def keep(self) -> None:
        """The part becomes the target."""
        self._part.flush()
        os.fchmod(self._part.fileno(), 0o400)
        os.replace(self._part_path, self._target)
        self._note_path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what has arrived."""
        self._part_path.unlink(missing_ok=True)
        self._note_path.unlink(missing_ok=True)

    def _receive(self, answer: _Answer) -> None:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise not_verified(f"{self.shown} was sent compressed although that was not allowed.", param="source")
        validator = _validator(answer.headers)
        if answer.status == 206:
            begin, total = self._range_of(answer)
            if begin != self.size or (self._note.validator and validator and validator != self._note.validator):
                self._begin_again()
                raise _Broken("the server sent another part than the one that was asked for")
        else:
            self._begin_again()
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
        self._announced(total)
        self._remember(validator)
        while part := answer.read1(CHUNK_BYTES):
            self._add(part)
        self._part.flush()
        if self._total is not None and self.size < self._total:
            raise _Broken("the answer ended early")
        self.is_complete = True

    def _range_of(self, answer: _Answer) -> tuple[int, int | None]:
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if match is None or match[1] is None:
            raise not_verified(f"{self.shown} was sent in parts of unknown place (Content-Range).", param="source")
        return int(match[1]), None if match[3] == "*" else int(match[3])

    def _announced(self, total: int | None) -> None:
        """Refuse a file of another size than expected before it is read."""
        if total is None:
            return
        if self._wanted.size is not None and total != self._wanted.size:
            raise not_verified(f"{self.shown} has {total} bytes, but {self._wanted.size} are expected.", param="source")
        if self._limit is not None and total > self._limit:
            raise not_verified(f"{self.shown} has {total} bytes; at most {self._limit} are allowed.", param="source")
        self._total = total

    def _refused(self, error: urllib.error.HTTPError) -> None:
        """An answer without the file."""
        if error.code == 416:
            match = _CONTENT_RANGE.fullmatch(error.headers.get("Content-Range", ""))
            if match is not None and match[3] == str(self.size):
                self._announced(self.size)
                self.is_complete = True
                return
            self._begin_again()
            raise _Broken("the server refused to go on")
        if error.code in _AGAIN:
            after = error.headers.get("Retry-After", "")
            raise _Broken(f"the server answered {error.code}", float(after) if after.isdecimal() else None)
        raise not_verified(
            f"{self.shown} was answered with {error.code} {error.reason}; check the address and the credentials.",
            param="source",
        )

    def _begin_again(self) -> None:
        self._part.seek(0)
        self._part.truncate()
        self.hash, self.size = hashlib.sha256(), 0
        self._note = _Note(self._wanted.url)

    def _remember(self, validator: str) -> None:
        self._note = _Note(self._wanted.url, validator)
        self._note_path.write_bytes(msgspec.json.encode(self._note))

    def _add(self, part: bytes, *, is_new: bool = True) -> None:
        most = self._total if self._total is not None else self._limit
        if most is not None and self.size + len(part) > most:
            self._begin_again()
            raise not_verified(f"{self.shown} sends more than the {most} bytes that were announced.", param="source")
        if is_new:
            self._part.write(part)
        self.hash.update(part)
        self.size += len(part)
        self._progress("download", self.size, max(self._total or 0, self.size))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, without the caller's headers to another host, and not from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
            raise not_verified(f"{_shown(req.full_url)} leads to {_shown(newurl)}, which is less safe.", param="source")
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            for name in list(made.headers):
                if name.lower() not in _OWN_HEADERS:
                    made.remove_header(name)
        return made


_OPENER: Final = urllib.request.build_opener(_Redirects)


def _validator(headers: Message) -> str:
    """What If-Range may name: a strong ETag, or a date of change; empty where there is neither."""
    tag = str(headers.get("ETag", ""))
    return tag if tag.startswith('"') else str(headers.get("Last-Modified", ""))


def _shown(url: str) -> str:
    """A URL without credentials and query, which may hold secrets."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
