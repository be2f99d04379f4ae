"""The endpoints below /console: the page and its files, sign-in and sign-out, and the stream of live numbers."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd import __version__
from inferd.config.versions import names_of_entries
from inferd.errors import QuotaExceeded, Unauthenticated, Unavailable
from inferd.gateway.admin.audit import note_refused
from inferd.gateway.admission import allowed, principal_of
from inferd.gateway.body.decode import decode_body
from inferd.gateway.call import Answer, Call, EventStream, Response, read_body, require_json
from inferd.gateway.console.assets import PAGE
from inferd.gateway.console.live_stream import LiveStream, Sight
from inferd.gateway.console.sessions import prefix_of, session_id_of, set_cookie
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.observe.live.alerts import Firing
from inferd.tenancy.principal import GRANTABLE, OPERATOR, Principal

MAX_BODY_BYTES: Final = 4096
NO_STORE: Final = (b"cache-control", b"no-store")


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /console/session"""

    key: str


class SessionReport(msgspec.Struct, frozen=True):
    """GET /console/session: what the console may show and do."""

    auth: str  # required: nothing without a key; off: some of it
    signed_in: bool
    tenant: str
    scopes: list[str]
    version: str  # empty: nothing may be seen without a key
    prefix: str  # the path at which the browser sees this server


_sign_in_decoder: Final = msgspec.json.Decoder(SignIn)


async def page(context: Context, call: Call, rest: str) -> Answer:
    """GET /console/"""
    return await context.console.assets.answer(call, PAGE)


async def to_page(context: Context, call: Call, rest: str) -> Answer:
    """GET /console: the page's addresses are relative to /console/."""
    return Response(308, headers=((b"location", b"console/"),))


async def asset(context: Context, call: Call, rest: str) -> Answer:
    """GET /console/assets/{file}. Raises RouteNotFound."""
    return await context.console.assets.answer(call, rest)


# -- the session ---------------------------------------------------------------------------------


async def sign_in(context: Context, call: Call, rest: str) -> Answer:
    """POST /console/session: a cookie for a key. Raises Unauthenticated, and QuotaExceeded after many failures."""
    sessions, lasts_s = context.console.sessions, context.config.server.console_session_s
    try:
        sessions.check_failures(call.peer)
    except QuotaExceeded as error:
        note_refused(context, call, "sign_in", error)
        raise
    require_json(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    key = (await decode_body(body, _sign_in_decoder)).key
    try:
        principal = context.door.authenticate(key.strip())
        if not principal.key_id:  # no key is needed, and this is none
            raise Unauthenticated("The API key is not valid; give one that 'inferd keys list' shows as active.")
    except Unauthenticated as error:
        sessions.failed(call.peer)
        note_refused(context, call, "sign_in", error)
        raise
    call.principal = principal
    if context.audit is not None:
        key_id, tenant = principal.key_id, principal.tenant
        await context.audit.record(
            actor=f"key:{key_id}", tenant=tenant, action="sign_in", outcome="done", request_id=call.request_id
        )
    before = session_id_of(call)
    if before is not None:
        sessions.end(before)
    return Response(204, headers=(NO_STORE, set_cookie(call, sessions.begin(principal.key_id, lasts_s), lasts_s)))


async def sign_out(context: Context, call: Call, rest: str) -> Answer:
    """DELETE /console/session. Idempotent."""
    session_id = session_id_of(call)
    if session_id is not None:
        context.console.sessions.end(session_id)
    return Response(204, headers=(NO_STORE, set_cookie(call, "", 0)))


async def session(context: Context, call: Call, rest: str) -> Answer:
    """GET /console/session"""
    try:
        context.door.authenticate(None)
        auth = "off"
    except Unauthenticated:
        auth = "required"
    try:
        principal: Principal | None = _principal(context, call)
    except Unauthenticated:
        principal = None
    report = SessionReport(
        auth=auth,
        signed_in=principal is not None and bool(principal.key_id),
        tenant=principal.tenant if principal is not None else "",
        scopes=[scope for scope in GRANTABLE if principal is not None and principal.may(scope)],
        version=__version__ if principal is not None else "",
        prefix=prefix_of(call),
    )
    return Response(200, encode(report), headers=(NO_STORE,))


def _principal(context: Context, call: Call) -> Principal:
    """The principal as it is now. Raises Unauthenticated."""
    return OPERATOR if call.principal is OPERATOR else principal_of(context, call)


# -- the live numbers ----------------------------------------------------------------------------


async def live(context: Context, call: Call, rest: str) -> Answer:
    """GET /console/live: server-sent events. Raises Overloaded."""
    stream = _stream(context)

    def look() -> Sight:
        principal = allowed(_principal(context, call), "metrics")
        return sight_of(context, principal, stream.live.models)

    call.stream = True
    return EventStream(stream.open(look, context.config.server.console_viewers))


class AlertList(msgspec.Struct, frozen=True):
    """GET /console/alerts"""

    data: list[Firing]


async def alerts(context: Context, call: Call, rest: str) -> Answer:
    """GET /console/alerts: the alerts that fire, of those that need no other program."""
    stream = _stream(context)
    models = sight_of(context, call.principal, stream.live.models).models
    firing = [alert for alert in stream.live.alarms.firing if models is None or alert.model in models]
    return Response(200, encode(AlertList(firing)), headers=(NO_STORE,))


def _stream(context: Context) -> LiveStream:
    if context.console.stream is None:
        raise Unavailable("This gateway keeps no live numbers.")
    return context.console.stream


def sight_of(context: Context, principal: Principal, models: tuple[str, ...]) -> Sight:
    """What a principal may see of these models."""
    if not principal.models:
        return Sight(None, principal.may("admin"))
    names = names_of_entries(context.console.config.models)
    seen = [model for model in models if any(map(principal.may_use, names.get(model, (model,))))]
    return Sight(frozenset(seen), False)
