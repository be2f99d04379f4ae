"""``inferd keys``: API keys and their usage. Works on the database, with or without a running server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar, get_args

import click
import msgspec

from inferd import clock
from inferd.cli import terminal
from inferd.cli.audit import recorded
from inferd.cli.flags import Parsed
from inferd.cli.help import Commands
from inferd.config import Config, load_config
from inferd.config.units import NotAllowedError, count
from inferd.errors import StateUnavailable
from inferd.state.database import Database
from inferd.state.folder import data_folder, make_folder
from inferd.state.open import open_database
from inferd.tenancy.keys import PREFIX, KeyInfo, KeySpec, NewKey, create_key, list_keys, revoke_key, rotate_key
from inferd.tenancy.principal import GRANTABLE, OPERATOR, KeyScope
from inferd.tenancy.usage import COLUMNS, Column, UsageJournal, read_usage
from inferd.types import CLASSES, PriorityClass

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
Decorated = TypeVar("Decorated", bound=Callable[..., object])


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", text)
    if match is None:
        raise NotAllowedError("a duration such as 30d, 12h, 90m or 45s")
    return float(match[1]) * _UNITS[match[2]]


def _day(text: str) -> datetime:
    """The first moment of a UTC day."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise NotAllowedError("a day such as 2026-11-01") from None


def _words(metavar: str, allowed: Sequence[str] = (), names: Mapping[str, str] = {}) -> Parsed:
    """A list, from a,b,c; ``allowed`` limits what may be in it, ``names`` has other words for some."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        words = tuple(names.get(word, word) for word in words)
        for word in words:
            if allowed and word not in allowed:
                raise click.BadParameter(f"{word!r} is not one of {', '.join(allowed)}.")
        return words

    return Parsed("list", metavar, parse)


_DURATION: Final = Parsed("duration", "30d|12h|90m", _seconds)
DAY: Final = Parsed("day", "YYYY-MM-DD", _day)
_COUNT: Final = Parsed("count", "N", count)


def _common(function: Decorated) -> Decorated:
    function = click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        help="The server's config file, where it names the database (state.url or state.data_dir).",
    )(function)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


@click.group("keys", cls=Commands)
def command() -> None:
    """Make, list, revoke and rotate API keys, and see what each has used.

    Works with the server running or not: both use the same database (state.db in the user's data folder, or
    what the config file or INFERD_STATE__URL names). A running server follows within a second.

    \b
    Examples:
      inferd keys create --tenant team-a
      inferd keys create --tenant team-a --models chat --rpm 600 --tpm 200k
      inferd keys create --tenant ops --scopes metrics --expires 30d
      inferd keys list
      inferd keys rotate a1B2c3D4e5F6 --overlap 1h
      inferd keys revoke a1B2c3D4e5F6
      inferd keys usage --by tenant,day
    """


@command.command("create")
@click.option(
    "--tenant",
    required=True,
    metavar="NAME",
    help="The tenant of the key; all keys of a tenant share its limits and its usage.",
)
@click.option("--name", default="", metavar="TEXT", help="What the key is for, for people.")
@click.option(
    "--scopes",
    type=_words("A,B", GRANTABLE),
    default=("infer", "models"),
    help="infer: use models; models: list them; metrics: read numbers; admin: everything.  [default: infer,models]",
)
@click.option(
    "--models", type=_words("A,B*"), default=(), help="Models it may use, names or patterns.  [default: every model]"
)
@click.option("--rpm", type=_COUNT, help="Requests per minute.  [default: no limit]")
@click.option("--tpm", type=_COUNT, help="Tokens per minute, prompt and answer: 200k.  [default: no limit]")
@click.option("--max-in-flight", type=_COUNT, help="Requests at the same time.  [default: no limit]")
@click.option(
    "--priority",
    type=click.Choice(CLASSES),
    default="normal",
    help="Class of its requests, and the best one they may ask for.  [default: normal]",
)
@click.option("--expires", type=_DURATION, help="When it ends by itself, from now.  [default: never]")
@_common
def create(
    tenant: str,
    name: str,
    scopes: tuple[KeyScope, ...],
    models: tuple[str, ...],
    rpm: int | None,
    tpm: int | None,
    max_in_flight: int | None,
    priority: PriorityClass,
    expires: float | None,
    file: Path | None,
    as_json: bool,
) -> None:
    """Make a key and print it, this once: only a hash of it is kept.

    The key alone goes to stdout, its permissions to stderr.

    \b
    Examples:
      inferd keys create --tenant team-a --models chat --rpm 600 --tpm 200k
      export OPENAI_API_KEY=$(inferd keys create --tenant me)
    """
    spec = KeySpec(
        tenant=tenant,
        name=name,
        scopes=scopes,
        models=models,
        rpm=rpm,
        tpm=tpm,
        max_in_flight=max_in_flight,
        priority=priority,
        expires_in_s=expires,
    )
    with opened_database(file) as (database, config), recorded(config, "create_key", tenant) as outcome:
        made = create_key(database, spec, by=OPERATOR, now=clock.wall())
        outcome.detail = f"new key {made.info.id}"
    _show_new(made, as_json)
    if config.tenants and tenant not in config.tenants:
        click.echo(
            f"The config file has no tenant {tenant!r}, so its keys share no limits; it knows: "
            f"{', '.join(config.tenants)}.",
            err=True,
        )


@command.command("list")
@click.option("--tenant", metavar="NAME", help="Only this tenant's.")
@_common
def show(tenant: str | None, file: Path | None, as_json: bool) -> None:
    """List keys: what they may do, how they stand, what they have used. Never the keys themselves.

    \b
    Example:
      inferd keys list --tenant team-a
    """
    with opened_database(file) as (database, config):
        infos = list_keys(database, now=clock.wall(), tenant=tenant)
        _journal(config).recover(database)
        used = {row.key_id: row for row in read_usage(database, by=("key_id",))}
    if as_json:
        _print_json(infos)
        return
    if not infos:
        whose = f" of the tenant {tenant}" if tenant else ""
        click.echo(f"There are no keys{whose}. Make one: inferd keys create --tenant {tenant or 'NAME'}", err=True)
        return
    rows = []
    for info in infos:
        row = used.get(info.id)
        rows.append(
            (
                info.id,
                info.tenant,
                info.name,
                info.state
                if info.expires_at is None or info.state != "active"
                else f"until {_time(info.expires_at)[:10]}",
                ", ".join(info.scopes),
                ", ".join(info.models) or "all",
                _limits(info),
                info.priority,
                f"{row.requests:,} req, {row.prompt_tokens + row.completion_tokens:,} tok" if row else "-",
            )
        )
    terminal.print_rows(("id", "tenant", "name", "state", "scopes", "models", "limits", "priority", "used"), rows)


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@_common
def revoke(key_id: str, file: Path | None, as_json: bool) -> None:
    """End a key. Running servers refuse it within a second; requests that are in flight still finish.

    ID is the part between sk-inf- and the next dash; 'inferd keys list' shows it.

    \b
    Example:
      inferd keys revoke a1B2c3D4e5F6
    """
    with opened_database(file) as (database, config), recorded(config, "revoke_key", _id(key_id)):
        info = revoke_key(database, _id(key_id), now=clock.wall())
    if as_json:
        _print_json(info)
    else:
        click.echo(f"The key {info.id} of {info.tenant} is revoked.", err=True)


@command.command("rotate")
@click.argument("key_id", metavar="ID")
@click.option(
    "--overlap",
    type=_DURATION,
    default="0s",
    help="How long the old key stays valid beside the new one.  [default: 0s]",
)
@_common
def rotate(key_id: str, overlap: float, file: Path | None, as_json: bool) -> None:
    """Replace a key by a new one that may do the same, and print that, this once.

    Both count towards the same limits during the overlap.

    \b
    Example:
      inferd keys rotate a1B2c3D4e5F6 --overlap 1h
    """
    with opened_database(file) as (database, config), recorded(config, "rotate_key", _id(key_id)) as outcome:
        made = rotate_key(database, _id(key_id), by=OPERATOR, overlap_s=overlap, now=clock.wall())
        outcome.detail = f"new key {made.info.id}"
    _show_new(made, as_json)


@command.command("usage")
@click.option(
    "--by",
    type=_words("A,B", get_args(Column), {"key": "key_id"}),
    default=COLUMNS,
    help="Sum by these.  [default: day,tenant,key,model]",
)
@click.option("--tenant", metavar="NAME", help="Only this tenant's.")
@click.option("--key", "key_id", metavar="ID", help="Only this key's.")
@click.option(
    "--since",
    type=DAY,
    help="From this UTC day on.  [default: everything]",
)
@_common
def usage(
    by: tuple[Column, ...],
    tenant: str | None,
    key_id: str | None,
    since: datetime | None,
    file: Path | None,
    as_json: bool,
) -> None:
    """Show how many requests, tokens, seconds and joules of devices were used, by day (UTC), tenant, key and model.

    A running server enters what happened within a second, and the use of devices every five. Devices are used by
    tenants: these rows have no key.

    \b
    Examples:
      inferd keys usage --by tenant,day --since 2026-11-01
      inferd keys usage --tenant team-a --json
    """
    with opened_database(file) as (database, config):
        _journal(config).recover(database)
        rows = read_usage(
            database,
            by=by,
            tenant=tenant,
            key_id=None if key_id is None else _id(key_id),
            since=None if since is None else since.strftime("%Y-%m-%d"),
        )
    if as_json:
        _print_json(rows)
        return
    columns = [column for column in COLUMNS if column in by]
    numbers = ("requests", "prompt tokens", "answer tokens", "device s", "joules")
    terminal.print_rows(
        (*columns, *numbers),
        [
            (
                *(getattr(row, column) or "-" for column in columns),
                f"{row.requests:,}",
                f"{row.prompt_tokens:,}",
                f"{row.completion_tokens:,}",
                f"{row.device_s:,.1f}",
                "-" if row.energy_j is None else f"{row.energy_j:,.0f}",
            )
            for row in rows
        ],
        numbers,
    )


@contextmanager
def opened_database(file: Path | None) -> Iterator[tuple[Database, Config]]:
    """The database of a configuration file, which need not exist yet. Raises ConfigError, click.ClickException."""
    config = load_config(file, os.environ, {})
    folder = make_folder(data_folder(config.state))
    try:
        database = open_database(config.state.url, folder)
        try:
            yield database, config
        finally:
            database.close()
    except StateUnavailable as error:
        raise click.ClickException(error.message) from error


def _journal(config: Config) -> UsageJournal:
    """What servers that were killed left behind counts as well."""
    return UsageJournal(data_folder(config.state), config.state.url)


def _id(text: str) -> str:
    """The id in an argument: the id alone, or the beginning of a key as listings show it."""
    return text.removeprefix(PREFIX).partition("-")[0] if text.startswith(PREFIX) else text


def _show_new(made: NewKey, as_json: bool) -> None:
    if as_json:
        _print_json(made)
        return
    info = made.info
    click.echo(made.key)
    click.echo(
        f"Key {info.id} of {info.tenant}: {', '.join(info.scopes)} on {', '.join(info.models) or 'every model'}; "
        f"{_limits(info)}; {info.priority}; "
        f"{'never expires' if info.expires_at is None else 'expires ' + _time(info.expires_at)}. "
        "It is not shown again. A server that runs takes it within a second.",
        err=True,
    )


def _limits(info: KeyInfo) -> str:
    named = (
        (info.rpm, "req/min"),
        (info.tpm, "tok/min"),
        (info.max_in_flight, "at once"),
    )
    return ", ".join(f"{number:,} {unit}" for number, unit in named if number is not None) or "no limits"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
