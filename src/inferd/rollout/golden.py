"""Questions of a golden set to the versions of a rollout, for the guard ``golden``.

The questions are drawn from the set by chance, with replacement. So each is a unit of its own, and is answered wrongly
with the probability that the version has on the whole set, however small the set is and however often a question
comes. Where the guard compares with the stable version, each question goes to one of the two by chance.

Knows golden sets and their answers. How a question is asked is the caller's, and what the counts say the judge's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from inferd.compare.golden import DEFAULT_TOLERANCE, GoldenItem, question, read_golden, unmet
from inferd.compare.reading import answer_of_body
from inferd.compare.tensors import UnreadableAnswer
from inferd.config import Config
from inferd.errors import ConfigError, InferdError
from inferd.rollout.plan import Guard
from inferd.types import JSON

MAX_FILE_BYTES: Final = 64 << 20
MAX_FAILURES: Final = 20
"""Wrong answers that are reported."""

MAX_REASON: Final = 300
"""Characters of a reason that is reported."""

_random = random.Random()
_DROPPED: Final = frozenset((0, 404, 405, 429, 499, 503, 504))
"""Statuses that say nothing of the version's answer: it had other work or no worker, there is no such route, it took
too long. 0: there was no answer in time."""


class Reply(NamedTuple):
    """What came of a question. ``status`` is that of HTTP."""

    status: int
    body: bytes


Ask = Callable[[str, JSON], Awaitable[Reply]]
"""Asks the server a question, by its path and body, as a client does."""


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """A question that was not answered as expected."""

    name: str  # of the golden set's line
    reason: str


class GoldenReport(msgspec.Struct, frozen=True, kw_only=True):
    """The questions that this server has asked the new version, in this run."""

    questions: int  # in the set
    asked: int = 0  # and answered, rightly or wrongly
    wrong: int = 0
    dropped: int = 0  # it had other work, or no worker
    problem: str = ""  # of the last one that was dropped
    last_wrong: tuple[Wrong, ...] = ()


class Answered(NamedTuple):
    """An answer. ``reason``: why it is not the expected one, or was dropped."""

    result: Literal["right", "wrong", "dropped"]
    reason: str = ""


class Questions:
    """The questions to the versions of one run of a rollout, at this gateway."""

    def __init__(self, items: Sequence[GoldenItem], guard: Guard, ask: Ask) -> None:
        self._items = items
        self._guard = guard
        self._ask = ask
        self.report = GoldenReport(questions=len(items))

    def is_new(self) -> bool:
        """Whether the next question is the new version's, drawn by the guard's share."""
        return _random.random() < self._guard.share

    async def ask(self, entry: str, *, is_new: bool) -> Answered:
        """Ask the version ``entry`` a question that is drawn from the set."""
        item = _random.choice(self._items)
        found = await self._answer(item, entry)
        if is_new:
            self._note(item, found)
        return found

    async def _answer(self, item: GoldenItem, entry: str) -> Answered:
        reply = await self._ask(*question(item, entry))
        if reply.status in _DROPPED:
            return Answered("dropped", _sentence(reply))
        if reply.status != 200:
            return Answered("wrong", _sentence(reply))
        # In a thread: an answer may be large, and the event loop serves others.
        reason = await asyncio.to_thread(_unmet, item, reply.body, self._guard)
        return Answered("right") if reason is None else Answered("wrong", reason)

    def _note(self, item: GoldenItem, found: Answered) -> None:
        report = self.report
        if found.result == "dropped":
            self.report = msgspec.structs.replace(report, dropped=report.dropped + 1, problem=found.reason)
            return
        last = report.last_wrong
        if found.result == "wrong":
            last = (*last[-MAX_FAILURES + 1 :], Wrong(name=item.name, reason=found.reason[:MAX_REASON]))
        self.report = msgspec.structs.replace(
            report, asked=report.asked + 1, wrong=report.wrong + (found.result == "wrong"), last_wrong=last
        )


def _unmet(item: GoldenItem, body: bytes, guard: Guard) -> str | None:
    try:
        return unmet(item, answer_of_body(body), guard.tolerance or DEFAULT_TOLERANCE)
    except (UnreadableAnswer, InferdError) as error:
        return str(error)


class _Error(msgspec.Struct):
    message: str = ""


class _Failed(msgspec.Struct):
    error: _Error | str = ""


_failed_decoder: Final = msgspec.json.Decoder(_Failed)


def _sentence(reply: Reply) -> str:
    if not reply.status:
        return "There was no answer in time."
    try:
        error = _failed_decoder.decode(reply.body).error
    except msgspec.MsgspecError:
        error = ""
    said = error if isinstance(error, str) else error.message
    return f"{reply.status}: {said}"[:MAX_REASON]


def read_golden_sets(config: Config) -> dict[str, list[GoldenItem]]:
    """The golden sets of the models' rollouts, by model. Reads files. Raises ConfigError, with every problem."""
    found, problems = {}, []
    for name, model in config.models.items():
        guard = None if model.rollout is None else model.rollout.guards.golden
        if guard is None:
            continue
        try:
            found[name] = read_golden(_text(Path(guard.file).expanduser()), guard.file)
        except (ConfigError, OSError, ValueError) as error:
            said = error.message if isinstance(error, ConfigError) else f"{guard.file} cannot be read ({_why(error)})."
            problems.append(f"models.{name}.rollout.guards.golden.file: {said}")
    if problems:
        raise ConfigError("\n".join(problems), param="models")
    return found


def _text(path: Path) -> str:
    with path.open("rb") as file:
        encoded = file.read(MAX_FILE_BYTES + 1)
    if len(encoded) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return encoded.decode("utf-8")


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
