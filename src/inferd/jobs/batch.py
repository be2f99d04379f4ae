"""A batch and a file as they are stored, and what is found out about a batch's input."""

from __future__ import annotations

import os
from typing import Final, Literal, NamedTuple

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["", "completed", "failed", "expired", "cancelled"]
"""How a batch is to end. Empty: it goes on."""

TERMINAL: Final = ("failed", "completed", "expired", "cancelled")

WINDOW_S: Final = 86_400.0
"""The only completion window, 24h: what is not answered by then is answered with an error."""

MESSAGES: Final = "/v1/messages"
"""The endpoint of Anthropic's message batches: their requests may ask several models, and all results are one file."""

BATCH_PREFIX: Final = "batch_"
"""Of the ids of other batches."""

MESSAGES_PREFIX: Final = "msgbatch_"
"""Of their ids."""

MAX_PROBLEMS: Final = 100
"""Problems of lines that a batch lists. All of them are in its file of errors."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """Something that is wrong with the input, or the reason of a failure. ``line``: from 1; None: the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of all answers."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A part of a file of results: what the holder of one lease has written of it. Only that holder writes to it, so
    one that has lost its lease without knowing changes nothing that counts."""

    fence: int  # of the lease
    num_bytes: int  # that count; a file may be longer after a crash


class Former(msgspec.Struct, frozen=True, array_like=True):
    """The files of results that a batch had when it was resumed, by their ids. They are deleted when it has ended again."""

    output: str | None = None
    errors: str | None = None

    @property
    def ids(self) -> list[str]:
        return [name for name in (self.output, self.errors) if name is not None]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """How far the lines of the input are answered."""

    line: int = 0  # lines that were read, blank ones included
    offset: int = 0  # bytes


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to the next lines of a batch, which are in its files of results already."""

    begin: Place
    end: Place
    num_done: int
    num_failed: int
    num_early: int = 0
    output_bytes: int
    error_bytes: int
    tokens: Tokens = Tokens()


class Batch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch. Times are seconds since the epoch."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    created_at: float
    expires_at: float
    metadata: dict[str, str] | None = None
    results_last_s: float | None = None  # after which its files of results are deleted; None: as any file
    status: Status = "validating"
    ending: Ending = ""
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    model: str | None = None
    total: int = 0  # requests
    num_done: int = 0
    num_failed: int = 0
    num_early: int = 0  # of the failed ones, those that were not answered because the batch ended
    tokens: Tokens = Tokens()
    problems: tuple[Problem, ...] = ()
    place: Place = Place()
    output: tuple[Segment, ...] = ()
    errors: tuple[Segment, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    former: Former | None = None  # it was resumed: its answers before
    note: str = ""  # why it does not go on at the moment

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def num_answered(self) -> int:
        return self.num_done + self.num_failed

    @property
    def num_bytes(self) -> int:
        """Of its results."""
        return sum(segment.num_bytes for segment in (*self.output, *self.errors))


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant. Its content is in a folder, under its id."""

    id: str
    tenant: str
    created_at: float
    expires_at: float
    purpose: Literal["batch", "batch_output"]
    filename: str
    num_bytes: int
    folder: str  # the id of the folder that has the content


class Lease(NamedTuple):
    """The right to work on a batch, until another server takes it over."""

    tenant: str
    id: str
    fence: int  # grows with every lease of the batch


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}{os.urandom(16).hex()}"
