"""``inferd registry export``: a version as one JSON document."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from inferd import __version__, clock
from inferd.cli.keys import opened_database
from inferd.cli.registry.opened import common, split
from inferd.cli.registry.progress import reading
from inferd.errors import InvalidRequest
from inferd.lifecycle import registry
from inferd.worker.timestamp import timestamp


@click.command("export")
@click.argument("version", metavar="NAME@VERSION")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="A file.  [default: stdout]")
@common
def command(version: str, output: Path | None, file: Path | None, as_json: bool) -> None:
    """Write a version as JSON: its files by their digests, its contract, evidence, signature state and history.

    The files are read and must be those that were registered; they are not part of the document. 'inferd check' checks
    it, with and without the files.

    \b
    Examples:
      inferd registry export churn@3 --output churn-3.json
      inferd check churn-3.json
    """
    from inferd.lifecycle.export import document_of

    name, ref = split(version)
    with opened_database(file) as (database, _):
        found = registry.find(database, name, ref)
        with reading(f"Reading {found.source}") as progress:
            document = document_of(
                *(database, found),
                exported_at=timestamp(clock.wall()),
                exported_by=f"inferd {__version__}",
                progress=progress,
            )
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{output} cannot be written ({error.strerror}).", param="output") from None
    click.echo(f"Written: {output}", err=True)
