"""Downloads from a real HTTP server that breaks, lies and changes its mind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.artefacts.download import Wanted, download
from inferd.artefacts.manifest import HashedFile
from inferd.errors import ModelLoadError

DATA = os.urandom(3_000_001)
SHA256 = hashlib.sha256(DATA).hexdigest()


class Origin(ThreadingHTTPServer):
    """A server of one file. Each entry of ``cuts`` breaks one answer after so many bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.data = DATA
        self.etag = '"one"'
        self.cuts: list[int] = []
        self.codes: list[int] = []  # answers without the file, first
        self.ranges = True
        self.announced: int | None = None
        self.headers: dict[str, str] = {}
        self.redirect = ""
        self.seen: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/models/weights.bin"

    def handle_error(self, request: object, client_address: object) -> None:
        """The client went away."""


class _Answers(BaseHTTPRequestHandler):
    server: Origin
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        origin = self.server
        origin.seen.append({name.lower(): value for name, value in self.headers.items()})
        if origin.codes:
            return self._empty(origin.codes.pop(0))
        if origin.redirect:
            return self._empty(302, Location=origin.redirect)
        begin = 0
        asked = self.headers.get("Range", "")
        same = self.headers.get("If-Range", origin.etag) == origin.etag
        if asked and origin.ranges and same:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(origin.data):
                return self._empty(416, **{"Content-Range": f"bytes */{len(origin.data)}"})
        body = origin.data[begin:]
        self.send_response(206 if asked and origin.ranges and same else 200)
        if asked and origin.ranges and same:
            self.send_header("Content-Range", f"bytes {begin}-{len(origin.data) - 1}/{len(origin.data)}")
        self.send_header("Content-Length", str(len(body) if origin.announced is None else origin.announced))
        if origin.etag:
            self.send_header("ETag", origin.etag)
        for name, value in origin.headers.items():
            self.send_header(name, value)
        self.end_headers()
        cut = origin.cuts.pop(0) if origin.cuts else len(body)
        self.wfile.write(body[:cut])
        self.close_connection = True
        return None

    def _empty(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextlib.contextmanager
def running() -> Iterator[Origin]:
    with Origin() as origin:
        thread = threading.Thread(target=origin.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield origin
        finally:
            origin.shutdown()
            thread.join()


@pytest.fixture
def origin() -> Iterator[Origin]:
    with running() as made:
        yield made


def fetch(
    origin: Origin, target: Path, attempts: int = 3, max_bytes: int | None = None, **wanted: object
) -> HashedFile:
    made = Wanted(**{"url": origin.url, **wanted})  # type: ignore[arg-type]
    return download(made, target, attempts=attempts, max_bytes=max_bytes, pause=lambda seconds: None)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole_with_its_digest_and_nothing_else_is_left(origin: Origin, tmp_path: Path) -> None:
    hashed = fetch(origin, tmp_path / "weights.bin", size=len(DATA), sha256=SHA256)
    assert hashed == HashedFile("weights.bin", len(DATA), SHA256)
    assert (tmp_path / "weights.bin").read_bytes() == DATA
    assert left(tmp_path) == ["weights.bin"]


def test_a_target_that_is_there_is_hashed_and_not_fetched_again(origin: Origin, tmp_path: Path) -> None:
    fetch(origin, tmp_path / "weights.bin")
    assert fetch(origin, tmp_path / "weights.bin", sha256=SHA256).sha256 == SHA256
    assert len(origin.seen) == 1
    with pytest.raises(ModelLoadError, match="other bytes than it announced"):
        fetch(origin, tmp_path / "weights.bin", sha256="0" * 64)


@given(st.lists(st.integers(0, len(DATA) - 1), max_size=5), st.booleans(), st.booleans(), st.booleans())
def test_however_often_it_breaks_the_file_is_the_same(
    cuts: list[int], ranges: bool, has_etag: bool, is_known: bool
) -> None:
    with running() as origin, tempfile.TemporaryDirectory() as name:
        origin.cuts, origin.ranges, origin.etag = list(cuts), ranges, '"one"' if has_etag else ""
        hashed = fetch(origin, Path(name) / "weights.bin", attempts=9, sha256=SHA256 if is_known else None)
        assert hashed.sha256 == SHA256
        assert (Path(name) / "weights.bin").read_bytes() == DATA


def test_a_broken_download_goes_on_where_it_stopped_in_a_later_call(origin: Origin, tmp_path: Path) -> None:
    origin.cuts = [1_000_000, 0, 0]
    with pytest.raises(ModelLoadError, match="What has arrived is kept"):
        fetch(origin, tmp_path / "weights.bin", attempts=2)
    assert "weights.bin" not in left(tmp_path)
    size = (tmp_path / "weights.bin.part").stat().st_size
    assert size > 0
    origin.seen.clear()
    assert fetch(origin, tmp_path / "weights.bin").sha256 == SHA256
    assert (origin.seen[0]["range"], origin.seen[0]["if-range"]) == (f"bytes={size}-", '"one"')
    assert left(tmp_path) == ["weights.bin"]


def test_a_file_that_was_replaced_meanwhile_is_read_from_its_beginning(origin: Origin, tmp_path: Path) -> None:
    origin.cuts = [1_000_000, 0]
    with pytest.raises(ModelLoadError):
        fetch(origin, tmp_path / "weights.bin", attempts=1)
    origin.data, origin.etag, origin.cuts = b"new" * 500_000, '"two"', []
    assert fetch(origin, tmp_path / "weights.bin").sha256 == hashlib.sha256(origin.data).hexdigest()
    assert (tmp_path / "weights.bin").read_bytes() == origin.data


def test_a_complete_part_file_needs_no_further_byte(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "weights.bin.part").write_bytes(DATA)
    (tmp_path / "weights.bin.part.json").write_text(f'{{"url": "{origin.url}", "validator": "\\"one\\""}}')
    assert fetch(origin, tmp_path / "weights.bin").sha256 == SHA256
    assert origin.seen[0]["range"] == f"bytes={len(DATA)}-"


def test_a_damaged_part_file_is_found_by_the_digest(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "weights.bin.part").write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:1000])
    (tmp_path / "weights.bin.part.json").write_text(f'{{"url": "{origin.url}", "validator": "\\"one\\""}}')
    with pytest.raises(ModelLoadError, match="other bytes"):
        fetch(origin, tmp_path / "weights.bin", sha256=SHA256)
    assert left(tmp_path) == []
    assert fetch(origin, tmp_path / "weights.bin", sha256=SHA256).sha256 == SHA256


def test_a_part_file_of_another_address_is_not_used(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "weights.bin.part").write_bytes(b"x" * 1000)
    (tmp_path / "weights.bin.part.json").write_text('{"url": "http://elsewhere/", "validator": "\\"one\\""}')
    assert fetch(origin, tmp_path / "weights.bin").sha256 == SHA256
    assert "range" not in origin.seen[0]


def test_bytes_that_are_not_the_announced_ones_are_refused_by_both_digests(origin: Origin, tmp_path: Path) -> None:
    origin.data = DATA[:-1] + bytes([DATA[-1] ^ 1])
    with pytest.raises(ModelLoadError) as caught:
        fetch(origin, tmp_path / "weights.bin", sha256=SHA256)
    assert SHA256 in caught.value.message
    assert hashlib.sha256(origin.data).hexdigest() in caught.value.message
    assert left(tmp_path) == []


def test_a_file_of_another_size_is_refused_before_it_is_read(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"has {len(DATA)} bytes, but 7 are expected"):
        fetch(origin, tmp_path / "weights.bin", size=7)
    with pytest.raises(ModelLoadError, match="at most 1000 are allowed"):
        fetch(origin, tmp_path / "weights.bin", max_bytes=1000)
    assert (tmp_path / "weights.bin.part").stat().st_size == 0


def test_a_server_that_announces_more_than_it_sends_is_asked_again_and_then_refused(
    origin: Origin, tmp_path: Path
) -> None:
    origin.announced, origin.ranges = len(DATA) + 5, False
    with pytest.raises(ModelLoadError, match="the answer ended early"):
        fetch(origin, tmp_path / "weights.bin", attempts=2)


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_a_refusal_is_told_at_once_without_the_query(origin: Origin, tmp_path: Path, code: int) -> None:
    origin.codes = [code]
    with pytest.raises(ModelLoadError, match=f"answered with {code}") as caught:
        fetch(origin, tmp_path / "weights.bin", url=f"{origin.url}?token=secret")
    assert "secret" not in caught.value.message
    assert len(origin.seen) == 1


def test_a_busy_server_is_asked_again(origin: Origin, tmp_path: Path) -> None:
    origin.codes = [503, 429, 500]
    assert fetch(origin, tmp_path / "weights.bin", attempts=4).sha256 == SHA256


def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    with running() as origin:
        pass
    with pytest.raises(ModelLoadError, match=r"weights\.bin could not be downloaded.*2 attempts"):
        fetch(origin, tmp_path / "weights.bin", attempts=2)


def test_credentials_do_not_follow_a_redirect_to_another_host(origin: Origin, tmp_path: Path) -> None:
    with running() as store:
        origin.redirect = store.url
        secret = {"Authorization": "Bearer secret", "X-Token": "secret"}
        assert fetch(origin, tmp_path / "weights.bin", headers=secret).sha256 == SHA256
        assert origin.seen[0]["authorization"] == "Bearer secret"
        assert "secret" not in str(store.seen)
        assert store.seen[0]["accept-encoding"] == "identity"


def test_other_schemes_and_redirects_to_them_are_refused(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no HTTP address"):
        fetch(origin, tmp_path / "weights.bin", url="file:///etc/passwd")
    origin.redirect = "ftp://127.0.0.1/weights.bin"
    with pytest.raises(ModelLoadError, match="less safe"):
        fetch(origin, tmp_path / "weights.bin")


def test_a_compressed_answer_is_refused(origin: Origin, tmp_path: Path) -> None:
    origin.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(ModelLoadError, match="sent compressed"):
        fetch(origin, tmp_path / "weights.bin")


def test_two_downloads_of_one_target_fetch_it_once(origin: Origin, tmp_path: Path) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch(origin, tmp_path / "weights.bin").sha256))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [SHA256] * 4
    assert len(origin.seen) == 1
    assert left(tmp_path) == ["weights.bin"]
