"""One batch, from its first line to its last, as the holder of its lease works on it.

Lines are asked several at a time and answered in any order. Their answers are written in the order of the lines: to the
files of results first, flushed, and then their number and the bytes that count to the database, in one transaction that
checks the lease. A crash between the two leaves bytes that do not count, which the next holder does not read, and lines
that are asked once more. So each request has exactly one answer in the files, however often it was computed.

Memory holds the lines and answers between the first line without an answer and the last one that was asked: at most
``MAX_AHEAD`` lines and about ``MAX_HELD_BYTES``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import BinaryIO, Final, Protocol, TypeVar

from inferd import clock
from inferd.config.server import JobsConfig
from inferd.config.units import bytes_text
from inferd.errors import StateUnavailable
from inferd.events import BatchEnded, Emit, LinesAnswered
from inferd.jobs import machine
from inferd.jobs.batch import Batch, Lease, Problem, Progress, Segment, StoredFile, Tokens, new_id
from inferd.jobs.earlier import Earlier, Found
from inferd.jobs.folder import Folder, Kind, Results, is_full
from inferd.jobs.lines import Line, Lines
from inferd.jobs.message_results import form_of
from inferd.jobs.pace import Load, Pace
from inferd.jobs.results import EARLY, Answer, request_id, tokens_of
from inferd.jobs.store import JobStore
from inferd.jobs.survey import Question, Reading, Survey, survey

T = TypeVar("T")

MAX_AHEAD: Final = 4096
MAX_HELD_BYTES: Final = 8 * 1024 * 1024
COMMIT_S: Final = 0.5
"""Longest time between an answer and its commit, unless an earlier line has no answer yet."""

COMMIT_BYTES: Final = 1024 * 1024
"""Bytes of lines and answers from which on a commit waits for ``MIN_COMMIT_S`` alone."""

MIN_COMMIT_S: Final = 0.1
TICK_S: Final = 0.05
LOOK_S: Final = 1.0
"""Time between two looks whether the batch was cancelled."""

PAUSE_S: Final = 5.0
"""Time between two attempts while the disk is full, or the tenant's bytes are used up."""

_NO_INPUT: Final = ("input_file_lost", "The content of the input file is not in jobs.folder any more.")
_GROUP: Final = 256
_GROUP_BYTES: Final = 256 * 1024
_GROUP_ANSWERED: Final = 16  # lines with the answers that they had before the batch was resumed

_log = logging.getLogger("inferd.jobs")


class Sender(Protocol):
    """Asks the requests of batches in the name of their keys."""

    def may_ask(self, batch: Batch) -> bool:
        """Whether the key that made the batch is still valid."""
        ...

    def load(self, model: str | None) -> Load:
        """What the model has to do now."""
        ...

    async def ask(self, batch: Batch, body: bytes, request_id: str, note: Callable[[str], None]) -> Answer:
        """The answer to a request. Waits while the server has no capacity or the quota is used up, and tells ``note``
        why; cancelling it ends the request."""
        ...


class _Held:
    """A line that is not committed."""

    __slots__ = ("end", "is_early", "is_failed", "is_repeated", "kind", "result", "size", "task", "tokens")

    def __init__(self, line: Line) -> None:
        self.end = line.end
        self.size = len(line.data or b"")
        self.result: bytes | None = None
        self.kind: Kind = "output"
        self.is_failed = False
        self.is_early = False  # failed, because the batch ended
        self.is_repeated = False  # answered before the batch was resumed
        self.tokens = Tokens()
        self.task: asyncio.Task[None] | None = None


class Run:
    """A batch that this process works on. Call ``go`` in a task, which may be cancelled at any time."""

    def __init__(
        self, batch: Batch, lease: Lease, store: JobStore, sender: Sender, tell: Emit, max_line_bytes: int
    ) -> None:
        self.batch = batch
        self.lease = lease
        self._store = store
        self._folder: Folder = store.folder
        self._config: JobsConfig = store.config
        self._sender = sender
        self._tell = tell
        self._max_line_bytes = max_line_bytes
        self._form = form_of(batch.endpoint)
        self._pace = Pace(self._config.max_in_flight)
        self._held: deque[_Held] = deque()  # in the order of the lines
        self._read_ahead: deque[tuple[Line, Found | None]] = deque()
        self._earlier: Earlier | None = None
        self._held_bytes = 0
        self._num_in_flight = 0
        self._changed = asyncio.Event()
        self._is_read = False  # to its end
        self._is_full = False  # the tenant's bytes are used up
        self._committing: asyncio.Task[None] | None = None
        self._committed_at = 0.0
        self._looked_at = 0.0
        self._note = ""

    async def go(self) -> None:
        """Work on the batch to its end. Raises LeaseLost."""
        found = await self._surveyed()
        if found is None:
            return
        results = self._folder.results(self.batch.id, self.lease.fence)
        try:
            file = await self._persistently(self._open_input)
            if file is None:
                return
            self._earlier = await self._persistently(lambda: asyncio.to_thread(self._open_earlier))
            with file:
                reading = Reading(self.batch.endpoint, self._max_line_bytes, found.model, found.repeated)
                lines = Lines(file, self.batch.place, self._max_line_bytes)
                while self.batch.num_answered < self.batch.total or self._committing is not None:
                    await self._step(lines, reading, results)
                    if self._is_read and not self._held and self.batch.num_answered < self.batch.total:
                        await self._lost("input_file_changed", "The input file has fewer lines than before.")
                        return
        finally:
            for held in self._held:
                if held.task is not None:
                    held.task.cancel()
            if self._committing is not None:
                self._committing.cancel()
                await asyncio.gather(self._committing, return_exceptions=True)
            results.close()
            if self._earlier is not None:
                self._earlier.close()
        await self._finish()

    # -- its beginning ----------------------------------------------------------------------

    async def _surveyed(self) -> Survey | None:
        """Read the input once. None: the batch has ended."""

        max_lines = self._config.max_lines if not self.batch.total else sys.maxsize  # it was allowed when it began

        def read() -> Survey:
            with self._folder.content(self.batch.input_file_id) as file:
                return survey(file, self.batch.endpoint, self._max_line_bytes, max_lines)

        async def surveying() -> Survey | None:
            try:
                return await asyncio.to_thread(read)
            except FileNotFoundError:
                return None

        found = await self._persistently(surveying)
        if found is None:
            await self._lost(*_NO_INPUT)
            return None
        await self._change(lambda batch: machine.surveyed(batch, found, clock.wall()))
        if self.batch.has_ended:
            self._ended()
            return None
        return found

    async def _open_input(self) -> BinaryIO | None:
        try:
            return await asyncio.to_thread(self._folder.content, self.batch.input_file_id)
        except FileNotFoundError:
            await self._lost(*_NO_INPUT)
            return None

    def _open_earlier(self) -> Earlier | None:
        """Its answers before it was resumed; those whose file was deleted meanwhile are asked again."""
        former = self.batch.former
        if former is None:
            return None
        files: list[tuple[Kind, BinaryIO]] = []
        kinds: tuple[tuple[Kind, str | None], ...] = (("output", former.output), ("errors", former.errors))
        for kind, name in kinds:
            if name is not None:
                with contextlib.suppress(FileNotFoundError):
                    files.append((kind, self._folder.content(name)))
        return Earlier(self.batch.id, files)

    async def _lost(self, code: str, message: str) -> None:
        problem = Problem(code, message)
        await self._change(lambda batch: machine.failed_at_once(batch, problem, clock.wall()))
        self._ended()

    # -- its lines --------------------------------------------------------------------------

    async def _step(self, lines: Lines, reading: Reading, results: Results) -> None:
        """Ask what there is room for, begin to commit what is answered, and wait for more.

        Requests are asked while a commit waits for the disk, so that the model is not idle meanwhile.
        """
        self._changed.clear()
        if self._committing is None:  # else the batch is being changed
            await self._look()
        await self._feed(lines, reading)
        if self._committing is None and self._is_due():
            self._committing = asyncio.get_running_loop().create_task(self._commit(results))
            self._committing.add_done_callback(lambda _: self._changed.set())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()
        if self._committing is not None and self._committing.done():
            committed, self._committing = self._committing, None
            committed.result()

    async def _look(self) -> None:
        """See from time to time whether it was cancelled, has expired, or its key has."""
        now = clock.now()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        held = await self._persistently(lambda: self._store.held(self.lease))
        wall = clock.wall()
        if machine.is_due(held, wall):
            held = await self._change(lambda batch: machine.stopped(batch, "expired", wall))
        elif held.status == "in_progress" and not self._sender.may_ask(held):
            problem = Problem("invalid_api_key", "The API key that made this batch is not valid any more.")
            held = await self._change(lambda batch: machine.stopped(batch, "failed", wall, problem))
        self.batch = held
        if held.ending:
            for one in self._held:
                if one.task is not None:
                    one.task.cancel()  # and is answered with the reason
        elif self._note != held.note and not self._is_full:
            note = self._note
            await self._change(lambda batch: machine.noted(batch, note))
        if self._is_full and (held.ending or await self._persistently(lambda: self._store.has_room(held.tenant))):
            self._is_full, self._note = False, ""

    async def _feed(self, lines: Lines, reading: Reading) -> None:
        """Read lines, and ask those that are requests."""
        load = self._sender.load(self.batch.model)
        room = self._pace.room(load, self._num_in_flight)
        while not self._is_read and not self._is_full:
            if len(self._held) >= MAX_AHEAD or (self._held and self._held_bytes >= MAX_HELD_BYTES):
                return
            if room <= 0 and not self.batch.ending:
                return
            if not self._read_ahead:
                self._read_ahead.extend(await self._read(lines))
                self._is_read = not self._read_ahead
                continue
            line, found_earlier = self._read_ahead.popleft()
            held = _Held(line)
            self._held.append(held)
            self._held_bytes += held.size
            if line.is_blank:
                held.result = b""
                continue
            if found_earlier is not None:
                held.is_failed, held.is_repeated = found_earlier.kind == "errors", True
                held.tokens = Tokens() if held.is_failed else tokens_of(found_earlier.body)
                self._answer(held, found_earlier.kind, found_earlier.result)
                continue
            name = request_id(self.batch.id, line.number)
            found = reading.read(line)
            if not isinstance(found, Question):
                self._refuse(held, self._form.refused(name, found.custom_id, found.problem))
            elif self.batch.ending:
                self._end_early(held, name, found)
            else:
                room -= 1
                self._num_in_flight += 1
                held.task = asyncio.get_running_loop().create_task(self._ask(held, name, found))

    async def _read(self, lines: Lines) -> list[tuple[Line, Found | None]]:
        """The next lines, with the answers that they had before the batch was resumed; none at the end."""
        earlier = self._earlier
        if earlier is None:
            group = await self._persistently(lambda: asyncio.to_thread(lines.several, _GROUP, _GROUP_BYTES))
            return [(line, None) for line in group]
        group = await self._persistently(lambda: asyncio.to_thread(lines.several, _GROUP_ANSWERED, _GROUP_BYTES))
        numbers = [line.number for line in group]
        answers = await self._persistently(lambda: asyncio.to_thread(earlier.answers, numbers))
        return list(zip(group, answers, strict=True))

    def _end_early(self, held: _Held, name: str, question: Question) -> None:
        code, message = EARLY[self.batch.ending]
        held.is_early = True
        problem = Problem(code, message, question.line.number)
        self._refuse(held, self._form.refused(name, question.custom_id, problem))

    async def _ask(self, held: _Held, name: str, question: Question) -> None:
        try:
            answer = await self._sender.ask(self.batch, question.body, name, self._told)
        except asyncio.CancelledError:
            if not self.batch.ending:
                raise
            self._end_early(held, name, question)
        else:
            line = self._form.answered(name, question.custom_id, answer)
            if answer.is_error:
                self._refuse(held, line)
            else:
                held.tokens = tokens_of(answer.body)
                self._answer(held, "output", line)
        finally:
            self._num_in_flight -= 1
            held.task = None
            self._pace.answered(self._sender.load(self.batch.model), self._num_in_flight)
            self._changed.set()

    def _told(self, note: str) -> None:
        """Why a request waits; empty: it does not."""
        self._note = note

    def _refuse(self, held: _Held, result: bytes) -> None:
        held.is_failed = True
        self._answer(held, self._form.errors, result)

    def _answer(self, held: _Held, kind: Kind, result: bytes) -> None:
        held.kind, held.result = kind, result
        self._held_bytes += len(result) - held.size
        held.size = len(result)

    # -- its answers ------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Whether the first lines are answered, and it is time to write them."""
        if not self._held or self._held[0].result is None:
            self._committed_at = self._committed_at if self._held else clock.now()
            return False
        since_s = clock.now() - self._committed_at
        if since_s >= COMMIT_S or (since_s >= MIN_COMMIT_S and self._held_bytes >= COMMIT_BYTES):
            return True
        return self._is_read and all(held.result is not None for held in self._held)

    async def _commit(self, results: Results) -> None:
        """Write the answers to the first lines, and let them count."""
        begin = end = self.batch.place
        texts: dict[Kind, list[bytes]] = {"output": [], "errors": []}
        tokens = Tokens()
        num_held = num_done = num_failed = num_early = repeated_done = repeated_failed = 0
        for held in self._held:
            if held.result is None:
                break
            num_held, end = num_held + 1, held.end
            if held.result:
                texts[held.kind].append(held.result)
                num_done += not held.is_failed
                num_failed += held.is_failed
                num_early += held.is_early
                repeated_done += held.is_repeated and not held.is_failed
                repeated_failed += held.is_repeated and held.is_failed
                tokens += held.tokens
        for kind, parts in texts.items():
            if parts:
                offset = self._own_bytes(kind)
                await self._persistently(partial(asyncio.to_thread, results.write, kind, b"".join(parts), offset))
        progress = Progress(
            begin=begin,
            end=end,
            num_done=num_done,
            num_failed=num_failed,
            num_early=num_early,
            output_bytes=sum(map(len, texts["output"])),
            error_bytes=sum(map(len, texts["errors"])),
            tokens=tokens,
        )
        await self._change(lambda batch: machine.advanced(batch, progress, self.lease.fence))
        self._tell(LinesAnswered(num_done=num_done - repeated_done, num_failed=num_failed - repeated_failed))
        if not self.batch.ending and not await self._persistently(lambda: self._store.has_room(self.lease.tenant)):
            self._is_full = True
            self._note = (
                f"Paused: the files of this tenant have the {bytes_text(self._config.max_bytes)} of jobs.max_bytes; "
                "delete some."
            )
            await self._change(lambda batch: machine.noted(batch, self._note))
        # Only now is there room for more lines, so that a tenant's bytes are looked at before these are asked.
        for _ in range(num_held):
            self._held_bytes -= self._held.popleft().size
        self._committed_at = clock.now()

    def _own_bytes(self, kind: Kind) -> int:
        """The bytes that count of what this lease has written."""
        segments = self.batch.output if kind == "output" else self.batch.errors
        return sum(segment.num_bytes for segment in segments if segment.fence == self.lease.fence)

    # -- its end ----------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Put the files of results together, and end."""
        names = new_id("file-"), new_id("file-")
        await self._change(lambda batch: machine.finalized(batch, *names, clock.wall()))
        batch, files = self.batch, []
        lasts_s = self._config.max_age_s if batch.results_last_s is None else batch.results_last_s
        kinds: tuple[tuple[Kind, str | None], ...] = (("output", batch.output_file_id), ("errors", batch.error_file_id))
        for kind, name in kinds:
            if name is None:
                continue
            segments = batch.output if kind == "output" else batch.errors
            joining = partial(asyncio.to_thread, self._joined, kind, segments, name)
            num_bytes = await self._persistently(joining)
            if num_bytes is None:
                await self._lost("results_lost", "Results of this batch are not in jobs.folder any more.")
                return
            now = clock.wall()
            files.append(
                StoredFile(
                    id=name,
                    tenant=batch.tenant,
                    created_at=now,
                    expires_at=now + lasts_s,
                    purpose="batch_output",
                    filename=f"{batch.id}_{kind}.jsonl",
                    num_bytes=num_bytes,
                    folder=self._folder.id,
                )
            )
        self.batch = await self._persistently(
            lambda: self._store.finish(self.lease, lambda batch: machine.ended(batch, clock.wall()), files)
        )
        with contextlib.suppress(OSError):  # the sweep removes them
            await asyncio.to_thread(self._folder.remove_results, batch.id)
            if batch.former is not None:
                await asyncio.to_thread(self._folder.delete, batch.former.ids)
        self._ended()

    def _joined(self, kind: Kind, segments: tuple[Segment, ...], name: str) -> int | None:
        try:
            return self._folder.join(self.batch.id, kind, segments, name)
        except FileNotFoundError:
            return None

    def _ended(self) -> None:
        _log.info(
            "the batch %s is %s: %d answered, %d errors",
            *(self.batch.id, self.batch.status, self.batch.num_done, self.batch.num_failed),
        )
        self._tell(BatchEnded(status=self.batch.status))

    # -- waiting for the disk and the database ----------------------------------------------

    async def _change(self, step: Callable[[Batch], Batch]) -> Batch:
        self.batch = await self._persistently(lambda: self._store.change(self.lease, step))
        return self.batch

    async def _persistently(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, which is repeated while the disk or the database fails."""
        has_told = False
        while True:
            try:
                result = await work()
            except StateUnavailable:
                await asyncio.sleep(LOOK_S)
                continue
            except OSError as error:
                reason = "is full" if is_full(error) else f"failed ({error.strerror or error})"
                note = f"Paused: the disk of jobs.folder {reason}; the batch goes on when it can write."
                if not has_told:
                    has_told = True
                    _log.error("the batch %s is paused: the disk of jobs.folder %s", self.batch.id, reason)
                with contextlib.suppress(StateUnavailable):
                    self.batch = await self._store.change(self.lease, partial(machine.noted, note=note))
                await asyncio.sleep(PAUSE_S)
            else:
                if has_told:
                    _log.warning("the batch %s goes on", self.batch.id)
                return result
