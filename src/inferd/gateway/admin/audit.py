"""Records admin actions: a line before an action, without which the action is refused, and a line with its outcome.

Every route with the scope admin that changes something is recorded, also one that this file has no word for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from inferd.errors import Forbidden, InferdError, StateUnavailable, Unavailable
from inferd.gateway.admin.auditor import Auditor
from inferd.gateway.body.query import read_query
from inferd.gateway.call import Answer, Call, Pieces, Response, Switched
from inferd.gateway.context import Context
from inferd.gateway.control import ReloadReport
from inferd.gateway.generation.writer import encode
from inferd.gateway.route import Route
from inferd.lifecycle.actions import Changed
from inferd.rollout.rollouts import RolloutReport
from inferd.state.audit import AuditEntry
from inferd.tenancy.principal import OPERATOR

T = TypeVar("T")

MAX_ENTRIES: Final = 1000

ACTIONS: Final = {
    ("POST", "/admin/drain"): "drain",
    ("POST", "/admin/reload"): "reload",
    ("POST", "/admin/models/{model}/load"): "load",
    ("POST", "/admin/models/{model}/unload"): "unload",
    ("POST", "/admin/models/{model}/restart"): "restart",
    ("POST", "/v2/repository/models/{model}/load"): "load",
    ("POST", "/v2/repository/models/{model}/unload"): "unload",
    ("POST", "/admin/rollouts/{model}/start"): "rollout_start",
    ("POST", "/admin/rollouts/{model}/pause"): "rollout_pause",
    ("POST", "/admin/rollouts/{model}/resume"): "rollout_resume",
    ("POST", "/admin/rollouts/{model}/promote"): "rollout_promote",
    ("POST", "/admin/rollouts/{model}/abort"): "rollout_abort",
    ("POST", "/admin/rollouts/{model}/undo"): "rollout_undo",
    ("POST", "/admin/rollouts/{model}/bad"): "rollout_report",
    **{
        ("POST", f"/admin/registry/{{model}}/versions/{{version}}/{action}"): f"registry_{action}"
        for action in ("validate", "approve", "canary", "withdraw", "promote", "archive", "reject")
    },
    ("POST", "/admin/registry/{model}/versions"): "registry_register",
    ("POST", "/admin/registry/{model}/versions/{version}/verify"): "registry_verify",
    ("POST", "/admin/registry/{model}/versions/{version}/evidence"): "registry_attach",
    ("POST", "/admin/registry/{model}/aliases/{alias}"): "registry_alias",
    ("DELETE", "/admin/registry/{model}/aliases/{alias}"): "registry_unalias",
    ("POST", "/admin/drift/{model}/reset"): "drift_reset",
    ("POST", "/v1/load_lora_adapter"): "load_adapter",
    ("POST", "/v1/unload_lora_adapter"): "unload_adapter",
    ("POST", "/admin/keys"): "create_key",
    ("DELETE", "/admin/keys/{id}"): "revoke_key",
    ("POST", "/admin/keys/{id}/rotate"): "rotate_key",
}
"""The words of actions; another action is named by its method and pattern."""


class AuditList(msgspec.Struct, frozen=True):
    """GET /admin/audit"""

    data: list[AuditEntry]  # the newest first


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of GET /admin/audit."""

    before: Annotated[int, Meta(ge=0, lt=2**53)] | None = None  # entries with lower numbers alone
    limit: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] = 100


class _KeyId(msgspec.Struct, frozen=True):
    id: str


class _Created(msgspec.Struct, frozen=True):
    """The part of an answer with a new key that is recorded: its id."""

    info: _KeyId


_ROLLOUT_COMMANDS: Final = frozenset(
    word for word in ACTIONS.values() if word.startswith("rollout_") and word != "rollout_report"
)
_reload_decoder: Final = msgspec.json.Decoder(ReloadReport)
_rollout_decoder: Final = msgspec.json.Decoder(RolloutReport)
_changed_decoder: Final = msgspec.json.Decoder(Changed)
_created_decoder: Final = msgspec.json.Decoder(_Created)


def is_recorded(route: Route) -> bool:
    """Whether a route changes something."""
    return route.method != "GET"


async def recorded(context: Context, call: Call, route: Route, rest: str) -> Answer | Pieces | Switched:
    """The answer of an admin route, carried out between the action's two lines. Raises as ``carry_out``."""
    action = ACTIONS.get((route.method, route.pattern), f"{route.method} {route.pattern}")

    def outcome(answer: Answer | Pieces | Switched) -> tuple[str, str]:
        if not isinstance(answer, Response):
            return "done", ""
        detail = ""
        if action in ("create_key", "rotate_key"):
            detail = f"new key {_created_decoder.decode(answer.body).info.id}"
        elif action == "reload":
            detail = " ".join(_reload_decoder.decode(answer.body).details)
        elif action.startswith("registry_"):
            changed = _changed_decoder.decode(answer.body)
            detail = f"registry line {changed.line}:{changed.hash}"
        elif action in _ROLLOUT_COMMANDS:
            progress = _rollout_decoder.decode(answer.body).progress
            detail = f"{progress.state.replace('_', ' ')}, {100 * progress.share:g} %: {progress.reason}"
        return "done" if answer.status < 400 else "refused", detail

    return await carry_out(context, call, action, rest, lambda: route.endpoint(context, call, rest), outcome)


async def carry_out(
    context: Context,
    call: Call,
    action: str,
    target: str,
    work: Callable[[], Awaitable[T]],
    outcome: Callable[[T], tuple[str, str]] = lambda result: ("done", ""),
) -> T:
    """Carry out an admin action between its two lines.

    Raises StateUnavailable, with nothing done, where the first line cannot be written, and what ``work`` raises.
    """
    record = _Recording(context.audit, call, action, target)
    await record.begin()
    try:
        result = await work()
    except InferdError as error:
        await record.end("refused", error.code or error.kind)
        raise
    except BaseException:  # the client left, or a defect: what was done is not known
        await record.end("failed", "")
        raise
    await record.end(*outcome(result))
    return result


class _Recording:
    """The two lines of one action."""

    def __init__(self, auditor: Auditor | None, call: Call, action: str, target: str) -> None:
        self._auditor = auditor
        self._call = call
        self._action = action
        self._target = target
        self._of = 0

    async def begin(self) -> None:
        """Raises StateUnavailable."""
        self._of = await self._record("begun", "")

    async def end(self, outcome: str, detail: str) -> None:
        """Raises StateUnavailable, whose message says that the action was carried out."""
        try:
            await self._record(outcome, detail)
        except StateUnavailable:
            raise StateUnavailable(
                f"The action was begun, with the outcome {outcome!r}, and the audit log cannot be written any more; "
                "see the state of the server before you repeat it.",
                code="audit_unavailable",
            ) from None

    async def _record(self, outcome: str, detail: str) -> int:
        if self._auditor is None:
            return 0
        call = self._call
        return await self._auditor.record(
            actor=actor_of(call),
            tenant=call.principal.tenant,
            action=self._action,
            target=self._target,
            outcome=outcome,
            request_id=call.request_id,
            detail=detail,
            of=self._of,
        )


def actor_of(call: Call) -> str:
    """The key of a call, or the user of the machine at the control socket."""
    if call.principal is OPERATOR:
        uid = call.peer_uid
        return "control-socket" if uid is None else f"control-socket:{uid}"
    return f"key:{call.principal.key_id}" if call.principal.key_id else "no-key"


def note_refused(context: Context, call: Call, action: str, error: InferdError) -> None:
    """Have a refused sign-in, or a refused request for administration, counted for the audit log."""
    if context.audit is not None:
        key_id = call.principal.key_id
        context.audit.note_refused(
            actor=f"key:{key_id}" if key_id else f"address:{call.peer or 'unknown'}",
            tenant=call.principal.tenant if key_id else "",
            action=action,
            address=call.peer if key_id else "",
            code=error.code or error.kind,
            target=call.route,
            request_id=call.request_id,
        )


async def list_entries(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/audit: the newest entries, for the operator. Raises Forbidden, InvalidRequest, StateUnavailable."""
    if call.principal.tenant:
        raise Forbidden("The audit log is for the operator alone; ask at the control socket: inferd audit.")
    if context.audit is None:
        raise Unavailable("This server keeps no audit log; start it with inferd serve.", code="no_audit")
    query = read_query(call.head.query, AuditQuery)
    entries = await context.audit.entries(before=query.before, limit=query.limit)
    return Response(200, encode(AuditList(list(entries))))
