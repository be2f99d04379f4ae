"""The registry as a running server uses it: each operation is a job of the database's thread.

Knows the event loop and the settings. The rows are ``registry.py``'s.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inferd.config.versioning import RegistryConfig
from inferd.errors import InvalidRequest
from inferd.lifecycle import registry
from inferd.lifecycle.files import described, read_files
from inferd.lifecycle.registry import Attachable, Entry, Version
from inferd.lifecycle.stages import Action, Kind, Policy
from inferd.state.database import Database
from inferd.state.thread import StateThread


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a version, and the newest line of the history then."""

    version: Version
    line: int
    hash: str


class RegistryActions:
    """Every method waits for the database for a bounded time. Raises StateUnavailable, ModelNotFound, InvalidRequest."""

    def __init__(self, state: StateThread, settings: Callable[[], RegistryConfig], now: Callable[[], float]) -> None:
        self._state = state
        self._settings = settings
        self._now = now

    async def versions(self, name: str | None) -> Sequence[Version]:
        return await self._state.call(functools.partial(registry.versions, name=name))

    async def find(self, name: str, ref: str) -> Version:
        return await self._state.call(functools.partial(registry.find, name=name, ref=ref))

    async def history(self, name: str, before: int | None, limit: int) -> Sequence[Entry]:
        return await self._state.call(functools.partial(registry.history, name=name, before=before, limit=limit))

    async def move(self, name: str, ref: str, action: Action, *, actor: str, reason: str, override: str) -> Changed:
        policy = policy_of(self._settings())

        def job(database: Database) -> Changed:
            found = registry.find(database, name, ref)
            after = registry.move(
                *(database, name, found.version, action),
                actor=actor,
                now=self._now(),
                policy=policy,
                reason=reason,
                override=override,
            )
            return _changed(database, after)

        return await self._state.call(job)

    async def attach(
        self,
        name: str,
        ref: str,
        kind: Attachable,
        report: Mapping[str, Any],
        *,
        passed: bool,
        summary: str,
        actor: str,
    ) -> Changed:
        def job(database: Database) -> Changed:
            found = registry.find(database, name, ref)
            after = registry.attach_evidence(
                *(database, name, found.version, kind, report),
                passed=passed,
                actor=actor,
                now=self._now(),
                summary=summary,
            )
            return _changed(database, after)

        return await self._state.call(job)

    async def register(self, name: str, asked: NewFiles, *, actor: str) -> Changed:
        """Register files of this machine as the next version of a model. Raises ModelLoadError as well."""
        path = Path(asked.source)
        if not path.is_absolute():
            raise InvalidRequest(
                f"source must be an absolute path on the server's machine, not {asked.source[:200]!r}.",
                param="source",
                code="registry_source",
            )
        settings = self._settings()
        new, read = await asyncio.to_thread(
            described,
            *(name, path, settings.verify),
            contract=None if asked.contract is None else msgspec.json.encode(asked.contract),
            allow_pickle=asked.allow_pickle,
            description=asked.description,
            tags=asked.tags,
            run_id=asked.run_id,
        )

        def job(database: Database) -> Changed:
            policy, now = policy_of(settings), self._now()
            return _changed(
                database,
                registry.register_verified(database, new, read.findings, actor=actor, now=now, policy=policy),
            )

        return await self._state.call(job)

    async def verify(self, name: str, ref: str, *, actor: str) -> Changed:
        """Read the files of a version, and record what was found. Raises ModelLoadError as well."""
        found, settings = await self.find(name, ref), self._settings()
        read = await asyncio.to_thread(read_files, found.source, found.digest, settings.verify)

        def job(database: Database) -> Changed:
            policy, now = policy_of(settings), self._now()
            after = registry.verify(database, name, found.version, read.findings, actor=actor, now=now, policy=policy)
            return _changed(database, after)

        return await self._state.call(job)

    async def alias(self, name: str, alias: str, ref: str | None, *, actor: str) -> Changed:
        """Point an alias at a version; None: remove it."""

        def job(database: Database) -> Changed:
            found = registry.find(database, name, alias if ref is None else ref)
            number = None if ref is None else found.version
            registry.set_alias(database, name, alias, number, actor=actor, now=self._now())
            return _changed(database, registry.find(database, name, str(found.version)))

        return await self._state.call(job)


class NewFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/registry/{model}/versions"""

    source: str  # absolute path of a file or folder on the server's machine
    description: str = ""
    tags: dict[str, str] = {}
    run_id: str = ""  # of the training
    contract: dict[str, Any] | None = None  # an answer of GET /v2/models/NAME; None: what the file says
    allow_pickle: bool = False


def policy_of(settings: RegistryConfig) -> Policy:
    """What the settings ask of a version."""
    kinds: set[Kind] = {*settings.evidence}
    if settings.verify is not None and settings.verify.mode == "enforce":
        kinds.add("signature")
    return Policy(evidence=frozenset(kinds), four_eyes=settings.four_eyes)


def _changed(database: Database, version: Version) -> Changed:
    line, digest = registry.head(database)
    return Changed(version=version, line=line, hash=digest)
