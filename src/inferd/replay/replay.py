"""Recorded requests are asked again, and each answer is compared with the recorded one.

Start with ``replay``. An answer must be equal to the bit where the server's model has the fingerprint that was recorded,
its answers do not depend on the batch, and the answer is not drawn at random. Everywhere else a difference is a finding.

Where answers depend on the batch, a request whose answer differs is asked again alone, after all others: the recorded
answer may have been computed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from inferd import clock
from inferd.compare.answers import EXACT, Tolerance
from inferd.replay.answers import Answer, read_answer
from inferd.replay.difference import Difference, difference_of
from inferd.replay.records import Recorded
from inferd.replay.server import AskedServer, Reply, ServedModel, ServerGone
from inferd.types import JSON

_GENERATES: Final = ("chat", "completions", "messages", "responses", "generate")
_HEADERS: Final = {"X-Inferd-Priority": "batch", "Cache-Control": "no-cache, no-store"}
"""Replayed requests wait for all others, and are computed, not taken from the response cache."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its two answers."""

    request_id: str
    route: str
    is_same_version: bool  # both fingerprints are known and equal
    is_batched: bool  # the answer may depend on the requests that are computed together with it
    is_random: bool  # drawn without a seed: two answers of one version differ as well
    difference: Difference | None = None  # None: one of the answers failed
    error: str = ""  # of the new answer, where the recorded one was none
    was_error: str = ""  # of the recorded answer, where the new one is none
    before_s: float
    after_s: float = 0.0
    usage_before: tuple[int, int] | None = None
    usage_after: tuple[int, int] | None = None

    @property
    def is_equal(self) -> bool:
        """Whether both answers are equal to the bit."""
        return self.difference is not None and self.difference.is_equal

    @property
    def is_broken(self) -> bool:
        """Whether the answer should have been equal to the bit and was not."""
        if not self.is_same_version or self.is_random or self.is_batched:
            return False
        return not self.is_equal


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how fast."""

    model: str | None = None  # instead of the recorded one, such as digits@2
    concurrency: int = 4
    rate: float | None = None  # requests per second at most; None: as fast as the answers come
    tolerance: Tolerance = EXACT  # of numbers


class Outcome(msgspec.Struct, kw_only=True):
    """What a replay has found so far."""

    pairs: list[Pair] = []
    stopped: str = ""  # why it ended before all records were asked; empty: it did not
    fingerprints: dict[str, list[str]] = {}  # by model asked: those recorded, then the server's


async def replay(
    server: AskedServer, records: Iterable[Recorded], target: Target, on_pair: Callable[[Pair], None]
) -> Outcome:
    """Ask every record. The outcome is partial where the server is gone for good.

    Raises Unavailable before the first request where the server, or a model, is not there.
    """
    outcome = Outcome(pairs=[], fingerprints={})
    source = iter(records)
    served: dict[str, ServedModel] = {}
    again: list[tuple[int, Recorded, ServedModel]] = []
    began = clock.now()
    counter = 0
    looking = asyncio.Lock()

    async def found(name: str) -> ServedModel:
        async with looking:
            if name not in served:
                served[name] = await server.model(name)
            return served[name]

    first = next(source, None)
    if first is None:
        return outcome
    await found(target.model or asked_model(first))

    def remaining() -> Iterator[Recorded]:
        yield first
        yield from source

    shared = remaining()

    async def turns() -> AsyncIterator[Recorded]:
        nonlocal counter
        for record in shared:
            if target.rate is not None:
                wait_s = began + counter / target.rate - clock.now()
                counter += 1
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
            if outcome.stopped:
                return
            yield record

    async def client() -> None:
        async for record in turns():
            name = target.model or asked_model(record)
            try:
                now = await found(name)
                known = outcome.fingerprints.setdefault(name, [now.fingerprint])
                if record.fingerprint not in known[1:]:
                    known.append(record.fingerprint)
                pair = await _ask(server, record, target, now)
            except ServerGone as gone:
                outcome.stopped = str(gone)
                return
            if pair.is_same_version and pair.is_batched and not pair.is_equal:
                again.append((len(outcome.pairs), record, now))
            outcome.pairs.append(pair)
            on_pair(pair)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(target.concurrency):
                group.create_task(client())
        for index, record, now in again:
            if not outcome.stopped:
                alone = await _ask(server, record, target, now)
                if alone.is_equal:
                    outcome.pairs[index] = alone
    except* asyncio.CancelledError:
        outcome.stopped = outcome.stopped or "It was interrupted."
    except* ServerGone as gone:
        outcome.stopped = str(gone.exceptions[0])
    for name, known in served.items():
        if not outcome.stopped and (await server.model(name)).fingerprint != known.fingerprint:
            outcome.stopped = f"The server has replaced {name!r} meanwhile, so the answers are of two versions."
    return outcome


async def _ask(server: AskedServer, record: Recorded, target: Target, now: ServedModel) -> Pair:
    path, body = question(record, target.model)
    before = read_answer(record.route, record.status, record.answer, is_stream=record.is_stream)
    try:
        reply = await server.ask("POST", path, body, {"content-type": "application/json", **record.headers, **_HEADERS})
    except TimeoutError:
        return _pair(record, now, before, None, None, target.tolerance)
    after = read_answer(record.route, reply.status, reply.body, is_stream=record.is_stream)
    return _pair(record, now, before, after, reply, target.tolerance)


def _pair(
    record: Recorded,
    now: ServedModel,
    before: Answer,
    after: Answer | None,
    reply: Reply | None,
    tolerance: Tolerance,
) -> Pair:
    error = was_error = ""
    difference: Difference | None = None
    if after is None:
        error = "no complete answer within --timeout"
    elif bool(before.error) == bool(after.error):
        difference = difference_of(before, after, tolerance)
    elif after.error:
        error = after.error
    else:
        was_error = before.error
    return Pair(
        request_id=record.request_id,
        route=record.route,
        is_same_version=bool(now.fingerprint) and now.fingerprint == record.fingerprint,
        is_batched=not now.is_batch_invariant,
        is_random=is_random(record),
        difference=difference,
        error=error,
        was_error=was_error,
        before_s=record.duration_s,
        after_s=0.0 if reply is None else reply.total_s,
        usage_before=before.usage or record.usage,
        usage_after=None if after is None else after.usage,
    )


def asked_model(record: Recorded) -> str:
    """The name under which the client asked for its model; of a request without one the entry that answered."""
    if "{model}" in record.route:
        name = record.path[len(record.route.partition("{")[0]) :]
        return name.removesuffix(record.route.rpartition("}")[2]).replace("/versions/", "@")
    named = _document(record).get("model")
    return named if isinstance(named, str) and named else record.model


def question(record: Recorded, model: str | None) -> tuple[str, bytes]:
    """The path and the body to send; ``model``: to ask instead of the recorded one."""
    if model is None:
        return quote(record.path), record.body
    if "{model}" in record.route:
        return record.route.replace("/versions/{version}", "").replace("{model}", quote(model, safe="@")), record.body
    document = _document(record)
    if not document or ("model" not in document and not record.route.startswith("/v1/")):
        return quote(record.path), record.body
    return quote(record.path), msgspec.json.encode({**document, "model": model})


def is_random(record: Recorded) -> bool:
    """Whether the answer is drawn without a seed, so that it cannot be expected again."""
    if record.status != 200 or (record.route.startswith("/v2/models/") and "generate" not in record.route):
        return False
    if not any(word in record.route for word in _GENERATES):
        return False
    document = _document(record)
    parameters = document.get("parameters")
    fields: Mapping[str, Any] = parameters if isinstance(parameters, dict) else document
    if fields.get("seed") is not None:
        return False
    return fields.get("temperature") != 0 and fields.get("top_k") != 1


def _document(record: Recorded) -> JSON:
    try:
        found = msgspec.json.decode(record.body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
