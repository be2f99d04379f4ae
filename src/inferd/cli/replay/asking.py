"""What ``inferd replay`` and ``inferd evaluate`` share: the server that is asked, and the files of a report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import click
import msgspec

from inferd import clock
from inferd.benchmark.load import Connection
from inferd.cli.endpoint import DEFAULT_URL, Endpoint, find_endpoint
from inferd.cli.keys import opened_database
from inferd.cli.ranges import FloatRange
from inferd.cli.registry.opened import actor, changing, split
from inferd.errors import InvalidRequest
from inferd.lifecycle import registry
from inferd.lifecycle.registry import Attachable
from inferd.replay.server import AskedServer

MAX_SUMMARY: Final = 300

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def asking_options(function: Decorated) -> Decorated:
    """Options of every command that asks a server many requests."""
    options = (
        click.option(
            "--port",
            type=click.IntRange(1, 65535),
            default=None,
            help="Port of the server on this machine that has the model of --against.  [default: the only one]",
        ),
        click.option("--api-key", envvar=["INFERD_API_KEY"], default=None, help="Key for the server."),
        click.option(
            "--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="Requests at a time."
        ),
        click.option(
            "--rate",
            type=FloatRange(min=0, min_open=True),
            default=None,
            help="Requests per second at most.  [default: as fast as answers come]",
        ),
        click.option(
            "--timeout",
            type=FloatRange(min=0.1),
            default=600.0,
            show_default=True,
            metavar="SECONDS",
            help="Longest time for one answer.",
        ),
        click.option(
            "--patience",
            type=FloatRange(min=0),
            default=30.0,
            show_default=True,
            metavar="SECONDS",
            help="How long a server that is away is waited for.",
        ),
        click.option(
            "--attach",
            metavar="NAME@VERSION",
            help="Attach the figures to this version in the registry of this machine, as evidence.",
        ),
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path),
            help="The server's config file, where it names the registry's database; for --attach.",
        ),
        click.option(
            "--json", "as_json", type=click.Path(path_type=Path), default=None, help="Write the report as JSON."
        ),
        click.option(
            "--html", "as_html", type=click.Path(path_type=Path), default=None, help="Write the report as a page."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def asked_server(
    against: str, port: int | None, api_key: str | None, timeout_s: float, patience_s: float
) -> tuple[AskedServer, str]:
    """The server of a URL, or the one on this machine where ``against`` is a model; and the model, empty for a URL.

    Raises click.UsageError, and InferdError as ``find_endpoint`` does."""
    is_url = "://" in against
    if is_url and port is not None:
        raise click.UsageError(f"--against {against} names a server already; leave --port {port} out, or give a model.")
    endpoint = find_endpoint(against if is_url else None, port, api_key)
    if endpoint is None:
        endpoint = Endpoint(f"the server at {DEFAULT_URL}", DEFAULT_URL, api_key)
    connect: Callable[[float], Connection] = functools.partial(Endpoint.connection, endpoint)
    return AskedServer(endpoint.name, connect, timeout_s=timeout_s, patience_s=patience_s), "" if is_url else against


def attach_report(
    file: Path | None, version: str, kind: Attachable, report: msgspec.Struct, *, passed: bool, summary: str
) -> None:
    """Attach a report to a version of the registry. Raises ModelNotFound, InvalidRequest."""
    with changing(file, "attach", version) as (database, _, found):
        registry.attach_evidence(
            *(database, found.name, found.version, kind, msgspec.to_builtins(report)),
            passed=passed,
            actor=actor(),
            now=clock.wall(),
            summary=summary[:MAX_SUMMARY],
        )
    click.echo(f"Attached to {version} as evidence ({kind}): {'passed' if passed else 'failed'}.", err=True)


def check_attachable(file: Path | None, version: str | None) -> None:
    """Raises ModelNotFound where the registry does not have the version, before anything is asked."""
    if version is not None:
        with opened_database(file) as (database, _):
            registry.find(database, *split(version))


def check_writable(*files: Path | None) -> None:
    """Raises InvalidRequest where a report could not be written, before anything is asked."""
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise InvalidRequest(f"The report cannot be written to {file}: its folder does not exist.", param="json")


def write_report(report: msgspec.Struct, page: str, as_json: Path | None, as_html: Path | None) -> None:
    """Write the files that were asked for. Raises InvalidRequest."""
    try:
        if as_json is not None:
            as_json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        if as_html is not None:
            as_html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"The report cannot be written to {error.filename} ({error.strerror}).", param="json"
        ) from None
    written = [str(file) for file in (as_json, as_html) if file is not None]
    if written:
        click.echo(f"Written: {' and '.join(written)}", err=True)
