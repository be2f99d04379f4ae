"""The served models as Anthropic's clients list them, and the model that a request names."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from inferd.gateway.admission import find_model, listed_models
from inferd.gateway.anthropic.errors import ANTHROPIC_ERRORS
from inferd.gateway.anthropic.wire import ModelEntry, ModelPage
from inferd.gateway.body.query import read_query
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation import stand_in
from inferd.gateway.generation.writer import encode
from inferd.gateway.upstream import ModelStatus

_FOREIGN: Final = re.compile("claude-")  # the names that Anthropic's agents ask for where no other is set


def requested_model(context: Context, call: Call, name: str | None, user: str) -> tuple[ModelStatus, list[str]]:
    """The model that a request names, or that stands for one of Anthropic's; and the names of the fields that had no
    effect. Raises ModelNotFound, InvalidRequest."""
    return stand_in.requested_model(context, call, name, user, _FOREIGN)


def is_asked(call: Call) -> bool:
    """Whether a request for the served models comes from a client of Anthropic's API."""
    return call.header(b"anthropic-version") is not None


def list_models(context: Context, call: Call) -> Response:
    """The models that the client may use, in pages. Raises InvalidRequest."""
    call.errors = ANTHROPIC_ERRORS
    query = read_query(call.head.query, _Query)
    entries = [_entry(status) for status in listed_models(context, call.principal)]
    ids = [entry.id for entry in entries]
    start, end = 0, len(entries)
    if query.after_id is not None:
        start = _place(ids, "after_id", query.after_id) + 1
    if query.before_id is not None:
        end = _place(ids, "before_id", query.before_id)
        start = max(start, end - query.limit)
    page = entries[start : min(end, start + query.limit)]
    has_more = start > 0 if query.before_id is not None else start + len(page) < end
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Response(200, encode(ModelPage(page, first, last, has_more)))


def get_model(context: Context, call: Call, name: str) -> Response:
    """One model that the client may use. Raises ModelNotFound."""
    call.errors = ANTHROPIC_ERRORS
    return Response(200, encode(_entry(find_model(context, call, name))))


class _Query(msgspec.Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


def _place(ids: list[str], name: str, value: str) -> int:
    if value not in ids:
        raise invalid(name, f"{name} is {shown(value)}, which is the id of no model here; leave it out.")
    return ids.index(value)


def _entry(status: ModelStatus) -> ModelEntry:
    longest = (status.info.max_model_len or None) if status.info is not None else None
    created = datetime.fromtimestamp(int(status.created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelEntry(
        id=status.name,
        display_name=status.name,
        created_at=created,
        max_input_tokens=longest,
        max_tokens=longest,
    )
