"""Rollouts in the admin API: how they are, and the operator's commands. Every route here needs the scope admin."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.gateway.admin.audit import actor_of
from inferd.gateway.admin.endpoints import MAX_BODY_BYTES, control_of
from inferd.gateway.admission import find_model, may_use
from inferd.gateway.body.decode import decode_body
from inferd.gateway.call import Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.writer import encode
from inferd.gateway.route import Endpoint
from inferd.rollout.machine import Command
from inferd.rollout.rollouts import RolloutReport

MAX_REASON_CHARS: Final = 200


class RolloutList(msgspec.Struct, frozen=True):
    """GET /admin/rollouts"""

    data: list[RolloutReport]


class RolloutCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a command, which may be left out."""

    reason: str = ""  # for the audit log and the rollout's changes; at most 200 characters
    full: bool = False  # of promote: to all units at once


class BadReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/rollouts/{model}/bad"""

    request_id: str  # the x-request-id of an answer


class BadNoted(msgspec.Struct, frozen=True):
    """The answer to a report of something bad."""

    noted: bool = True


_command_decoder: Final = msgspec.json.Decoder(RolloutCommand)
_bad_decoder: Final = msgspec.json.Decoder(BadReport)


async def list_rollouts(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/rollouts: the rollouts of the models that the key may use. Raises Unavailable."""
    reports = control_of(context).rollouts.reports()
    return Response(200, encode(RolloutList([one for one in reports if may_use(context, call.principal, one.model)])))


async def get_rollout(context: Context, call: Call, name: str) -> Response:
    """GET /admin/rollouts/{model}. Raises ModelNotFound, InvalidRequest, StateUnavailable, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(await control_of(context).rollouts.report(model.name)))


def commanding(command: Command) -> Endpoint:
    """The endpoint of POST /admin/rollouts/{model}/COMMAND."""

    async def endpoint(context: Context, call: Call, name: str) -> Response:
        """Raises ModelNotFound, InvalidRequest, StateUnavailable, Unavailable."""
        model = find_model(context, call, name)
        body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
        if body:
            require_json(call)
        given = await decode_body(body, _command_decoder) if body else RolloutCommand()
        _check_reason(given.reason)
        if given.full and command != "promote":
            raise invalid("full", "full is for promote alone; leave it out.")
        actor = actor_of(call)
        why = f"{command} by {actor}" + (f": {given.reason}" if given.reason else "")
        wanted: Command = "promote_full" if given.full else command
        return Response(200, encode(await control_of(context).rollouts.command(model.name, wanted, actor, why)))

    return endpoint


def _check_reason(reason: str) -> None:
    """Raises InvalidRequest, with the remedy."""
    if len(reason) > MAX_REASON_CHARS:
        raise invalid(
            "reason",
            f"reason has {len(reason):,} characters, and may have {MAX_REASON_CHARS}. Shorten it, for example to the "
            "number of a ticket with the whole text.",
        )
    if not reason.isprintable():
        raise invalid(
            "reason", f"reason is {shown(reason)}; write one line, without line breaks and control characters."
        )


async def note_bad(context: Context, call: Call, name: str) -> Response:
    """POST /admin/rollouts/{model}/bad: something bad about an answer. Raises ModelNotFound, InvalidRequest,
    Unavailable."""
    model = find_model(context, call, name)
    require_json(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    given = await decode_body(body, _bad_decoder)
    control_of(context).rollouts.note_bad(model.name, given.request_id)
    return Response(200, encode(BadNoted()))
