"""``inferd batch``: the requests of a file, answered by a running server as a batch job."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

import click
import msgspec

from inferd.cli.help import Commands
from inferd.cli.running.control import WORK_S, Server, server_options
from inferd.cli.terminal import ReportProgress, console, is_live, loading, note, warn
from inferd.errors import InvalidRequest
from inferd.gateway.openai.batches import BatchList, BatchObject
from inferd.gateway.openai.files import FileObject

POLL_S: Final = 0.5
PIECE_BYTES: Final = 1 << 20
MAX_FIRST_BYTES: Final = 16 << 20
"""Of the lines that are read before the upload, to find the endpoint."""

MAX_SHOWN: Final = 10
"""Errors of lines that are shown."""

_ENDED: Final = ("completed", "failed", "expired", "cancelled")


@click.group("batch", cls=Commands)
def command() -> None:
    """Answer the requests of a file as a batch job of a running server.

    Each line of the file is one request: {"custom_id": ..., "method": "POST",
    "url": "/v1/chat/completions", "body": {...}}. The job takes what other
    requests leave of the model, and survives restarts of the server.

    \b
    Examples:
      inferd batch run input.jsonl --output output.jsonl
      inferd batch list
      inferd batch wait batch_1f0c --output output.jsonl
      inferd batch cancel batch_1f0c
    """


_OUTPUT = click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File for the answers; those that failed go to one beside it, with .errors before its suffix.",
)


@command.command("run")
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@_OUTPUT
@server_options
def run(server: Server, source: Path, output: Path) -> int:
    """Upload FILE, wait for all answers and write them.

    Ctrl-C leaves the job running; 'inferd batch wait' goes on from there. Exit code 0 when every request was answered,
    1 otherwise.
    """
    endpoint = endpoint_of(source)
    file = _uploaded(server, source)
    asked = msgspec.json.encode({"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"})
    made = server.send("/v1/batches", asked, {"content-type": "application/json"})
    batch = msgspec.json.decode(made.body, type=BatchObject)
    note(f"The job is {batch.id}; it goes on when this command ends (inferd batch wait {batch.id} -o {output}).")
    return _finish(server, batch.id, output)


@command.command("wait")
@click.argument("batch_id", metavar="ID")
@_OUTPUT
@server_options
def wait(server: Server, batch_id: str, output: Path) -> int:
    """Wait for the job ID and write its answers."""
    return _finish(server, batch_id, output)


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Newest jobs.")
@server_options
def show_all(server: Server, limit: int) -> None:
    """List the newest jobs."""
    from rich.table import Table

    found = server.get(f"/v1/batches?limit={limit}", BatchList).data
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "status", "model", "answered", "failed", "of", "begun"):
        table.add_column(name, justify="right" if name in ("answered", "failed", "of") else "left")
    for batch in found:
        counts = batch.request_counts
        begun = datetime.fromtimestamp(batch.created_at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        numbers = map(str, (counts.completed, counts.failed, counts.total))
        table.add_row(batch.id, batch.status, batch.model or "", *numbers, begun)
    console().print(table if found else "There are no jobs.")


@command.command("show")
@click.argument("batch_id", metavar="ID")
@server_options
def show(server: Server, batch_id: str) -> None:
    """Print a job as JSON."""
    batch = _get(server, batch_id)
    click.echo(msgspec.json.format(msgspec.json.encode(batch), indent=2).decode())


@command.command("cancel")
@click.argument("batch_id", metavar="ID")
@server_options
def cancel(server: Server, batch_id: str) -> None:
    """End a job; the answers so far stay."""
    batch = server.post(f"/v1/batches/{batch_id}/cancel", BatchObject)
    click.echo(f"{batch.id} is {batch.status}.")


class _First(msgspec.Struct, frozen=True):
    """The field of a line that the whole job shares."""

    url: str


def endpoint_of(source: Path) -> str:
    """The endpoint of a file's first request. Raises InvalidRequest."""
    try:
        with source.open("rb") as file:
            start = file.read(MAX_FIRST_BYTES)
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(start.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not line.strip():
            continue
        try:
            return msgspec.json.decode(line, type=_First).url
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f'Line {number} of {source} is no request ({error}); write {{"custom_id": "1", "method": "POST", '
                '"url": "/v1/chat/completions", "body": {...}} in each line.'
            ) from None
    raise InvalidRequest(f"{source} has no requests; write one in each line.")


def _uploaded(server: Server, source: Path) -> FileObject:
    """Upload a file in pieces, with a bar where it is large."""
    boundary = f"inferd-{secrets.token_hex(16)}"
    head = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{_plain(source.name)}"\r\n'
        "content-type: application/jsonl\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    size = source.stat().st_size
    headers = {
        "content-type": f"multipart/form-data; boundary={boundary}",
        "content-length": str(len(head) + size + len(tail)),
    }
    with source.open("rb") as file, loading(f"Uploading {source.name}") as report:
        answer = server.send("/v1/files", _pieces(head, file, tail, size, report), headers, WORK_S)
    return msgspec.json.decode(answer.body, type=FileObject)


def _plain(name: str) -> str:
    """A file's name without what ends a quoted text."""
    return "".join("_" if letter in '"\\\r\n' else letter for letter in name)


def _pieces(head: bytes, file: IO[bytes], tail: bytes, size: int, report: ReportProgress) -> Iterator[bytes]:
    yield head
    done = 0
    while piece := file.read(PIECE_BYTES):
        done += len(piece)
        report("upload", done, size)
        yield piece
    yield tail


def _get(server: Server, batch_id: str) -> BatchObject:
    return server.get(f"/v1/batches/{batch_id}", BatchObject)


def _finish(server: Server, batch_id: str, output: Path) -> int:
    """Wait for a job's end, write its files and tell what became of it."""
    batch = _awaited(server, batch_id)
    written = 0
    if batch.output_file_id is not None:
        written = _download(server, batch.output_file_id, output)
    errors = output.with_suffix(f".errors{output.suffix}")
    if batch.error_file_id is not None:
        _download(server, batch.error_file_id, errors)
    counts, usage = batch.request_counts, batch.usage
    seconds = _seconds(batch)
    console().print(
        f"{batch.id} is {batch.status}: {written} of {counts.total} requests answered in {seconds:.1f} s"
        f" ({written / max(seconds, 1e-3):.1f}/s), {usage.input_tokens} tokens in, {usage.output_tokens} out.",
        highlight=False,
    )
    if batch.errors is not None:
        for one in batch.errors.data[:MAX_SHOWN]:
            warn(f"{'the file' if one.line is None else f'line {one.line}'}: {one.message}")
    if batch.error_file_id is not None:
        for code, number in _codes(errors).most_common(MAX_SHOWN):
            warn(f"{number} x {code} (see {errors})")
    return 0 if batch.status == "completed" and written == counts.total else 1


def _awaited(server: Server, batch_id: str) -> BatchObject:
    """The job once it has ended; a line tells how far it is."""
    with _progress(batch_id) as tell:
        while True:
            batch = _get(server, batch_id)
            tell(batch)
            if batch.status in _ENDED:
                return batch
            time.sleep(POLL_S)


@contextlib.contextmanager
def _progress(batch_id: str) -> Iterator[Callable[[BatchObject], None]]:
    """A function that shows how far a job is: a bar with rate and time left, on a terminal."""
    if not is_live():
        yield lambda batch: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(batch_id, total=None, told="")

        def tell(batch: BatchObject) -> None:
            counts = batch.request_counts
            done, passed = counts.completed + counts.failed, _seconds(batch)
            rate = f"{done / passed:.1f}/s" if passed > 0 else ""
            told = f"{rate} {counts.failed} failed" if counts.failed else rate
            text = batch.status if batch.note is None else f"{batch.status}: {batch.note}"
            bar.update(task, completed=done, total=counts.total or None, told=told, description=text)

        yield tell


def _seconds(batch: BatchObject) -> float:
    """Seconds for which a job's requests were asked, so far or in all."""
    if batch.in_progress_at is None:
        return 0.0
    ends = [at for at in (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at) if at is not None]
    return max(0.0, (min(ends) if ends else time.time()) - batch.in_progress_at)


def _download(server: Server, file_id: str, to: Path) -> int:
    """Write a file's content, whole or not at all; returns the number of its lines."""
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    number = 0
    try:
        with part.open("wb") as file:
            for line in server.lines(f"/v1/files/{file_id}/content", WORK_S):
                file.write(line)
                number += 1
        part.replace(to)
    except OSError as error:
        raise InvalidRequest(f"{to} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)
    return number


class _Code(msgspec.Struct, frozen=True):
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Code | str | None = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int = 0
    body: _ErrorBody | None = None


class _ErrorLine(msgspec.Struct, frozen=True):
    """What a line of the file of errors has of its reason."""

    error: _Code | None = None
    response: _Response | None = None


def _codes(errors: Path) -> Counter[str]:
    """How often each error occurs in a file of errors."""
    found: Counter[str] = Counter()
    decoder = msgspec.json.Decoder(_ErrorLine)
    with errors.open("rb") as file:
        for line in file:
            found[_code_of(decoder.decode(line))] += 1
    return found


def _code_of(line: _ErrorLine) -> str:
    if line.error is not None and line.error.code is not None:
        return line.error.code
    if line.response is None:
        return "unknown"
    inner = line.response.body.error if line.response.body is not None else None
    code = inner.code if isinstance(inner, _Code) else None
    return code or f"status {line.response.status_code}"
