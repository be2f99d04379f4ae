"""Opens the database that ``state.url`` names: SQLite in a file, or PostgreSQL on a server.

The driver is imported only when it is needed.
"""

from __future__ import annotations

from pathlib import Path

from inferd.errors import ConfigError
from inferd.state.database import Database


def open_database(url: str | None, folder: Path) -> Database:
    """The database that ``url`` names (None: ``state.db`` in ``folder``), with its schema up to date.

    Raises ConfigError for what cannot go away by itself: an invalid address, a file that is not a database or
    cannot be written, a schema newer than this build. Raises StateUnavailable for everything else.
    """
    path = sqlite_path(url, folder)
    if path is not None:
        from inferd.state.sqlite import SqliteDatabase

        return SqliteDatabase(path)
    from inferd.state.postgres import PostgresDatabase

    assert url is not None
    return PostgresDatabase(url)


def sqlite_path(url: str | None, folder: Path) -> Path | None:
    """The file of a SQLite database; None for PostgreSQL. Raises ConfigError."""
    if url is None:
        return folder / "state.db"
    scheme, _, rest = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        return None
    if scheme != "sqlite" or not rest.startswith("/"):
        raise ConfigError(
            "state.url is neither sqlite:///path nor postgresql://user@host/database; write one of these.",
            param="state.url",
        )
    # sqlite:///var/x.db and, as SQLAlchemy writes it, sqlite:////var/x.db are both /var/x.db.
    return Path("/" + rest.lstrip("/"))
