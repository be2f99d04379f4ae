"""``inferd batch``: the requests of a file, answered as a batch job by a running server or one of its own."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

import click
import msgspec

from inferd.cli.help import Commands
from inferd.cli.running.batch_runs import Record, Run, Where, written_whole
from inferd.cli.running.batch_tables import check_table, in_order, is_table, requests_of, text_bodies, write_table
from inferd.cli.running.batch_tensors import contract_of, infer_endpoint, infers, tensor_bodies
from inferd.cli.running.control import WORK_S, Server, find_server, server_options, which_server
from inferd.cli.terminal import ReportProgress, console, is_live, loading, note, print_rows, warn
from inferd.errors import InferdError, InvalidRequest
from inferd.gateway.control import ServerReport
from inferd.gateway.openai.batches import BatchList, BatchObject
from inferd.gateway.openai.files import FileObject
from inferd.gateway.openai.wire import ModelList
from inferd.jobs.batch import BATCH_PREFIX, MESSAGES
from inferd.jobs.survey import refuse_binary

CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
POLL_S: Final = 0.5
PIECE_BYTES: Final = 1 << 20
MAX_FIRST_BYTES: Final = 16 << 20
"""Of the lines that are read before the upload, to find the endpoint."""

MAX_SHOWN: Final = 10
"""Errors of lines that are shown."""

_ENDED: Final = ("completed", "failed", "expired", "cancelled")


@click.group("batch", cls=Commands)
def command() -> None:
    """Answer the requests of a file as a batch job.

    Each line of the file is one request: {"custom_id": ..., "method": "POST",
    "url": "/v1/chat/completions", "body": {...}}. The job takes what other
    requests leave of the model, and survives restarts of the server.

    \b
    Examples:
      inferd batch run input.jsonl --output output.jsonl
      inferd batch run input.jsonl --output output.jsonl --model ./my-model
      inferd batch resume output.jsonl
      inferd batch list
      inferd batch wait batch_1f0c --output output.jsonl
      inferd batch cancel batch_1f0c
      inferd batch resume batch_1f0c --output output.jsonl
    """


_OUTPUT = click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File for the answers: .jsonl, where those that failed go to one beside it with .errors before its suffix; or "
    "a table, .csv or .parquet.",
)


@command.command("run")
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@_OUTPUT
@click.option(
    "--model",
    "-m",
    metavar="SOURCE",
    default=None,
    help="Load this model for the job, without a server that runs: a SOURCE as of 'inferd serve'.",
)
@click.option(
    "--endpoint",
    default=None,
    help="Of the rows of a table.  [default: /v1/chat/completions, or what the model can do]",
)
@click.option("--name", default=None, help="The model that rows of a table ask.  [default: the only one that can]")
@which_server
def run(
    source: Path,
    output: Path,
    model: str | None,
    endpoint: str | None,
    name: str | None,
    port: int | None,
    config: Path | None,
    url: str | None,
    key: str | None,
) -> int:
    """Answer the requests of FILE: JSON lines, or a table (.csv, .parquet).

    A row of a table is a request, and its columns are fields of the body: 'prompt' (and 'system') of a conversation or
    text, 'input' of embeddings, 'max_tokens' and so on. 'custom_id' names the row. Parquet needs the package pyarrow.
    For a model that predicts, columns are its inputs, and its outputs are columns of the answers.

    Ctrl-C leaves the job: 'inferd batch resume OUTPUT' goes on from there. Exit code 0 when every request was answered,
    1 otherwise.

    \b
    Examples:
      inferd batch run input.jsonl -o output.jsonl
      inferd batch run input.jsonl -o output.jsonl --model ./my-model
      inferd batch run prompts.csv -o answers.csv --name demo
      inferd batch run flowers.csv -o kinds.csv --name iris
    """
    for table in (source, output):
        check_table(table)
    if model is not None and (port, config, url) != (None, None, None):
        raise click.UsageError("--model loads a model for the job, and --port, --config and --url name a server.")
    if not is_table(source) and (endpoint, name) != (None, None):
        raise click.UsageError("--endpoint and --name are for tables; the lines of other files name both.")
    first = None if is_table(source) else first_of(source)
    run = Run(output)
    run.check_new()
    served_as = name if first is None else first.body.model
    if model is None or model.endswith((".yaml", ".yml")) or Path(model, "config.pbtxt").exists():
        served_as = None  # they name their models
    where = Where(model, served_as, port, None if config is None else str(config.absolute()), url)
    with run.server(where, key) as server:
        if first is None:
            asked = endpoint or _endpoint_of(server, name)
            if infers(asked):
                bodies = tensor_bodies(contract_of(server, asked))
            else:
                bodies = text_bodies(asked, name or _only_model(server, asked))
            file = _uploaded_lines(server, source, requests_of(source, asked, bodies))
        else:
            asked, file = first.url, uploaded(server, source)
        body = msgspec.json.encode({"input_file_id": file.id, "endpoint": asked, "completion_window": "24h"})
        made = server.send("/v1/batches", body, {"content-type": "application/json"})
        batch = msgspec.json.decode(made.body, type=BatchObject)
        run.begun(Record(batch.id, where))
        keeps = "waits" if model is not None else "goes on"
        note(f"The job is {batch.id}; it {keeps} when this command ends (inferd batch resume {output}).")
        return _finish(server, batch.id, output, run)


@command.command("resume")
@click.argument("what", metavar="OUTPUT|ID")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="File for the answers of the job ID."
)
@which_server
def resume(
    what: str, output: Path | None, port: int | None, config: Path | None, url: str | None, key: str | None
) -> int:
    """Go on with a run or a job.

    OUTPUT is the file of a run that was interrupted. Its server, or its model, is that of the run; the options name the
    server anew. ID is a job that was cancelled or has expired: its requests without an answer are asked, and its
    answers stay. With --output the command waits for its end and writes all of them.

    \b
    Examples:
      inferd batch resume output.jsonl
      inferd batch resume batch_1f0c --output output.jsonl
    """
    run = Run(Path(what))
    found = run.record()
    if found is None and what.startswith(BATCH_PREFIX):
        return _resume_job(find_server(port, config, url, key), what, output)
    if output is not None:
        raise InvalidRequest(f"--output is for the id of a job; the run of {what} writes into {what}.")
    output = Path(what)
    if found is None:
        raise InvalidRequest(
            f"No run into {output} was interrupted; 'inferd batch list' shows the jobs of a server, and 'inferd batch "
            f"wait ID -o {output}' writes the answers of one."
        )
    where = found.where
    if (port, config, url) != (None, None, None):
        if where.model is not None:
            raise InvalidRequest(
                f"The run into {output} has loaded its model itself; leave --port, --config, --url out."
            )
        where = Where(None, None, port, None if config is None else str(config.absolute()), url)
    with run.server(where, key) as server:
        if _get(server, found.batch_id).status in ("cancelled", "expired"):
            _resumed(server, found.batch_id)
        return _finish(server, found.batch_id, output, run)


def _resume_job(server: Server, batch_id: str, output: Path | None) -> int:
    if output is not None:
        check_table(output)
    batch = _resumed(server, batch_id)
    if output is not None:
        return _finish(server, batch_id, output)
    click.echo(f"{batch.id} is {batch.status}; 'inferd batch wait {batch.id} -o FILE' writes its answers.")
    return 0


def _resumed(server: Server, batch_id: str) -> BatchObject:
    return server.post(f"/v1/batches/{batch_id}/resume", BatchObject)


@command.command("wait")
@click.argument("batch_id", metavar="ID")
@_OUTPUT
@server_options
def wait(server: Server, batch_id: str, output: Path) -> int:
    """Wait for the job ID and write its answers."""
    check_table(output)
    return _finish(server, batch_id, output)


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Newest jobs.")
@server_options
def show_all(server: Server, limit: int) -> None:
    """List the newest jobs."""
    found = server.get(f"/v1/batches?limit={limit}", BatchList).data
    if not found:
        click.echo("There are no jobs.")
        return
    rows = []
    for batch in found:
        counts = batch.request_counts
        begun = datetime.fromtimestamp(batch.created_at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        numbers = map(str, (counts.completed, counts.failed, counts.total))
        rows.append((batch.id, batch.status, batch.model or "", *numbers, begun))
    numbered = ("answered", "failed", "of")
    print_rows(("job", "status", "model", *numbered, "begun"), rows, numbered)


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
    """End a job; the answers so far stay, and it can be resumed."""
    batch = server.post(f"/v1/batches/{batch_id}/cancel", BatchObject)
    hint = "" if batch.endpoint == MESSAGES else f"; 'inferd batch resume {batch.id}' asks what has no answer"
    click.echo(f"{batch.id} is {batch.status}{hint}.")


class _FirstBody(msgspec.Struct, frozen=True):
    model: str | None = None


class First(msgspec.Struct, frozen=True):
    """The fields of a request that the whole job shares."""

    url: str
    body: _FirstBody


def first_of(source: Path) -> First:
    """What a file's first request shares with the others. Raises InvalidRequest."""
    try:
        with source.open("rb") as file:
            start = file.read(MAX_FIRST_BYTES)
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be read: {error.strerror}.") from None
    reason = refuse_binary(start[:4096])
    if reason is not None:
        raise InvalidRequest(f"{source}: {reason}")
    for number, line in enumerate(start.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            return msgspec.json.decode(line, type=First)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f'Line {number} of {source} is no request ({error}); write {{"custom_id": "1", "method": "POST", '
                '"url": "/v1/chat/completions", "body": {...}} in each line.'
            ) from None
    raise InvalidRequest(f"{source} has no requests; write one in each line.")


def _endpoint_of(server: Server, name: str | None) -> str:
    """Where rows of a table are asked: conversations, unless the model that is named, or the only one, predicts."""
    cards = server.get("/v1/models", ModelList).data
    if name is None and len(cards) == 1:
        name = cards[0].id
    tasks = next((card.tasks for card in cards if card.id == name), None)
    if name is None or tasks is None or "generate" in tasks:
        return CHAT
    return EMBEDDINGS if "embed" in tasks else infer_endpoint(name)


def _only_model(server: Server, endpoint: str) -> str:
    """The only model of a server that an endpoint asks. Raises InvalidRequest."""
    task = "embed" if endpoint == EMBEDDINGS else "generate"
    able = [card.id for card in server.get("/v1/models", ModelList).data if card.tasks is None or task in card.tasks]
    if len(able) != 1:
        names = ", ".join(able) or "no model that can"
        raise InvalidRequest(f"{endpoint} of the server {server.name} asks {names}; choose one with --name.")
    return able[0]


def _uploaded_lines(server: Server, source: Path, lines: Iterator[bytes]) -> FileObject:
    """Upload the rows of a table as lines."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{source.stem}.jsonl"
        with made.open("wb") as file:
            file.writelines(lines)
        return uploaded(server, made)


def uploaded(server: Server, source: Path) -> FileObject:
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


def _finish(server: Server, batch_id: str, output: Path, run: Run | None = None) -> int:
    """Wait for a job's end, write its files and tell what became of it."""
    batch = _awaited(server, batch_id)
    with tempfile.TemporaryDirectory() as folder:
        errors = output.with_suffix(f".errors{output.suffix}")
        answered = output
        if is_table(output):
            if batch.endpoint == MESSAGES:
                raise InvalidRequest(f"The results of {batch.id} are messages; write them to a .jsonl file.")
            answered, errors = Path(folder) / "output", Path(folder) / "errors"
        for name, path in ((batch.output_file_id, answered), (batch.error_file_id, errors)):
            if name is not None:
                _download(server, name, path)
        codes = _codes(errors) if batch.error_file_id is not None else Counter()
        if is_table(output):
            _write_table(server, batch, output, answered, errors)
    if run is not None:
        run.ended()
    counts, usage = batch.request_counts, batch.usage
    seconds = _seconds(batch)
    console().print(
        f"{batch.id} is {batch.status}: {counts.completed} of {counts.total} requests answered in {seconds:.1f} s"
        f" ({counts.completed / max(seconds, 1e-3):.1f}/s), {usage.input_tokens} tokens in, {usage.output_tokens} out"
        f"{_cost(server, batch)}.",
        highlight=False,
    )
    if batch.errors is not None:
        for one in batch.errors.data[:MAX_SHOWN]:
            warn(f"{'the file' if one.line is None else f'line {one.line}'}: {one.message}")
    for code, number in codes.most_common(MAX_SHOWN):
        warn(f"{number} x {code} (see {output if is_table(output) else errors})")
    return 0 if batch.status == "completed" and counts.completed == counts.total else 1


def _write_table(server: Server, batch: BatchObject, output: Path, answered: Path, errors: Path) -> None:
    try:
        with contextlib.ExitStack() as stack:
            part = stack.enter_context(written_whole(output))
            files = [
                iter(stack.enter_context(path.open("rb"))) if path.exists() else iter(()) for path in (answered, errors)
            ]
            lines = server.lines(f"/v1/files/{batch.input_file_id}/content", WORK_S)
            outputs = contract_of(server, batch.endpoint).outputs if infers(batch.endpoint) else None
            write_table(part, in_order(lines, *files), outputs)
    except OSError as error:
        raise InvalidRequest(f"{output} cannot be written: {error.strerror}.") from None


def _cost(server: Server, batch: BatchObject) -> str:
    """What the job has cost, at the model's cost of a token since the server's start; empty where there are no prices,
    or the key may not read the status."""
    try:
        energy = server.get("/admin/status", ServerReport).energy
    except InferdError:
        return ""
    uses = [] if energy is None else [use for use in energy.models if use.name == batch.model]
    if energy is None or not uses or uses[0].cost is None or not uses[0].tokens:
        return ""
    return f", about {uses[0].cost / uses[0].tokens * batch.usage.total_tokens:.4f} {energy.currency}"


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
    number = 0
    try:
        with written_whole(to) as part, part.open("wb") as file:
            for line in server.lines(f"/v1/files/{file_id}/content", WORK_S):
                file.write(line)
                number += 1
    except OSError as error:
        raise InvalidRequest(f"{to} cannot be written: {error.strerror}.") from None
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
