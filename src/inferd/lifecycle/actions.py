"""The registry as a running server uses it: each operation is a job of the database's thread.

Knows the event loop and the settings. The rows are ``registry.py``'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from inferd.config.versioning import RegistryConfig
from inferd.lifecycle import registry
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


def policy_of(settings: RegistryConfig) -> Policy:
    """What the settings ask of a version."""
    kinds: set[Kind] = {*settings.evidence}
    if settings.verify is not None and settings.verify.mode == "enforce":
        kinds.add("signature")
    return Policy(evidence=frozenset(kinds), four_eyes=settings.four_eyes)


def _changed(database: Database, version: Version) -> Changed:
    line, digest = registry.head(database)
    return Changed(version=version, line=line, hash=digest)
