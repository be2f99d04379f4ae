"""deploy/metrics-contract.json: what dashboards and alerts of others may rely on, printed from the tables.

``python -m inferd.observe.contract`` compares the tables with the published contract first, and refuses a change of a
stable metric that comes without another version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from inferd.observe.aliases import ALIASES, Alias
from inferd.observe.metrics import CONTRACT_VERSION, TABLE, Metric, unit_of

PUBLISHED = Path("deploy/metrics-contract.json")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is promised of one name. ``alias_of``: the server whose name it is."""

    name: str
    type: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    stability: str = "stable"
    since: str = ""
    alias_of: str = ""
    rule: str = ""


class Contract(msgspec.Struct, frozen=True):
    """All names, in the order of the tables."""

    version: int
    metrics: tuple[Entry, ...]


def contract_of(table: Iterable[Metric], aliases: Iterable[Alias], version: int) -> Contract:
    """The contract that the tables make."""
    own = [Entry(row.name, row.kind, row.unit, row.labels, row.buckets, row.stability, row.since) for row in table]
    others = [
        Entry(
            name=name,
            type=rows[0].kind,
            unit=unit_of(name),
            labels=rows[0].labels,
            alias_of=rows[0].dialect,
            rule="; ".join(row.rule for row in rows),
        )
        for name, rows in ((name, list(rows)) for name, rows in groupby(aliases, key=lambda alias: alias.name))
    ]
    return Contract(version, (*own, *others))


def broken(published: Contract, now: Contract) -> Iterator[str]:
    """A sentence for each promise of the published contract that is not kept. Another version is a new promise."""
    if now.version > published.version:
        return
    if now.version < published.version:
        yield f"The version went back from {published.version} to {now.version}; versions only rise."
    known = {entry.name: entry for entry in now.metrics}
    for entry in published.metrics:
        if entry.stability != "stable":
            continue
        found = known.get(entry.name)
        if found is None:
            yield f"{entry.name} was removed or renamed."
            continue
        for promise in ("type", "unit", "labels", "buckets", "stability"):
            before, after = getattr(entry, promise), getattr(found, promise)
            if before != after:
                yield f"{entry.name}: {promise} was {before!r} and is {after!r}."


REMEDY = (
    "Undo the change, or raise CONTRACT_VERSION in src/inferd/observe/metrics.py, run `make docs`, and name the change "
    "in CHANGELOG.md: dashboards and alerts of others read these names."
)


def read(path: Path) -> Contract:
    """The published contract. Raises OSError, and msgspec.ValidationError for a file that is none."""
    return msgspec.json.decode(path.read_bytes(), type=Contract)


def main() -> int:
    now = contract_of(TABLE, ALIASES, CONTRACT_VERSION)
    if PUBLISHED.exists():
        sentences = list(broken(read(PUBLISHED), now))
        if sentences:
            print("\n".join([*sentences, REMEDY]), file=sys.stderr)
            return 1
    print(msgspec.json.format(msgspec.json.encode(now), indent=1).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
