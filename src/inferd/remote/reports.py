"""What is read of a remote server's answer, as msgspec decodes it."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.types import Usage

_MAX_COUNT: Final = 2**40


class Delta(msgspec.Struct):
    """A part of one choice of a stream."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """One choice of an answer or an event."""

    index: int = 0
    finish_reason: str | None = None
    delta: Delta | None = None
    text: str | None = None


class Details(msgspec.Struct):
    """The details of the prompt's tokens."""

    cached_tokens: int | None = None


class UsageReport(msgspec.Struct):
    """The ``usage`` object of an answer or an event."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None

    def usage(self) -> Usage:
        """The usage, with every count limited to a plausible range, whatever the server reported."""
        details, prompt, completion = self.prompt_tokens_details, self.prompt_tokens or 0, self.completion_tokens or 0
        if details is None and 0 <= prompt <= _MAX_COUNT and 0 <= completion <= _MAX_COUNT:
            return Usage(prompt, completion)
        prompt = _count(prompt)
        cached = _count(details.cached_tokens) if details is not None else 0
        return Usage(prompt, _count(completion), min(cached, prompt))


def _count(number: int | None) -> int:
    return min(max(number, 0), _MAX_COUNT) if number else 0


class ErrorReport(msgspec.Struct):
    """The ``error`` object of an answer or an event."""

    message: str | None = None


class Event(msgspec.Struct):
    """The fields that are read of an answer or of an event."""

    choices: list[Choice] | None = None
    usage: UsageReport | None = None
    error: ErrorReport | str | None = None
