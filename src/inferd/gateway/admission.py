"""The checks before a request costs anything: key, scope, visible models, priority, deadline and quotas.

Keys and scopes are checked with the matched route and the headers, before the body is read. The other checks need the
body and come before any computation. Knows the door and the principal. Does not know how keys are stored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from inferd.config.versions import entry_named, names_of_entries
from inferd.errors import Forbidden, InvalidRequest, ModelNotFound, Unauthenticated
from inferd.gateway.call import SDK_TIMEOUT_HEADERS, Call
from inferd.gateway.console.sessions import session_id_of
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.limits import check_range
from inferd.gateway.terms import Cost, HeadTerms, Terms
from inferd.gateway.upstream import ModelStatus
from inferd.tenancy.principal import Principal, Scope
from inferd.types import RANKS, ModelInfo, Priority

MAX_TOKEN_CHARS: Final = 512  # inferd's keys are shorter, so a longer text is refused without a look-up
MAX_SESSION_CHARS: Final = 256
MAX_TIMEOUT_S: Final = 86_400.0
SDK_GRACE_S: Final = 0.5
UNSET_MAX_TOKENS: Final = 4096  # tokens reserved for an answer when neither the request nor the model has a limit
EXPECTED_TOKENS: Final = 256  # the likely length of an answer when the request has no max_tokens
BYTES_PER_TOKEN: Final = 4
BEARER: Final = b"bearer."  # the prefix of a key among a WebSocket's subprotocols

_TIMEOUT_HEADERS: Final = (b"x-inferd-timeout", b"x-request-timeout")
_SESSION_HEADERS: Final = (b"x-session-id", b"x-inferd-session")


# -- before the body -----------------------------------------------------------------------------


def authenticate(context: Context, call: Call, scope: Scope) -> Principal:
    """The principal of a call. Raises Unauthenticated, and Forbidden where a valid key does not have the scope."""
    call.principal = principal_of(context, call)
    return allowed(call.principal, scope)


class Credentials(NamedTuple):
    """What a request's head says of its sender. Both are looked up for every request."""

    token: str | None
    session_id: str | None  # of the console; None where there is a token


def credentials_of(call: Call) -> Credentials:
    """Raises Unauthenticated when the request has more than one key."""
    token = token_of(call)
    return Credentials(token, session_id_of(call) if token is None else None)


def principal_of(context: Context, call: Call) -> Principal:
    """The principal of a call. Raises Unauthenticated."""
    return principal_with(context, credentials_of(call))


def principal_with(context: Context, credentials: Credentials) -> Principal:
    """The principal of a key or, without one, of a session of the console. Raises Unauthenticated."""
    if credentials.session_id is not None:
        return context.console.sessions.principal(credentials.session_id, context.door)
    return context.door.authenticate(credentials.token)


def allowed(principal: Principal, scope: Scope) -> Principal:
    """Check that the principal has the scope. Raises Forbidden."""
    if not principal.may(scope):
        subject = "your API key does" if principal.key_id else "requests without an API key do"
        raise Forbidden(f"This needs the scope {scope!r}, which {subject} not have; use a key that has it.")
    return principal


def token_of(call: Call) -> str | None:
    """The key of a request, from ``authorization`` (Bearer) or ``x-api-key``. None: the request has neither header.

    Raises Unauthenticated when the request has more than one key.
    """
    given = call.header(b"authorization")
    if given is None:
        key = call.header(b"x-api-key")
        if key is None:
            return _token_of_page(call)
        if call.head.count(b"x-api-key") > 1:
            raise ambiguous_key_error()
        return _text(key)
    if call.head.count(b"authorization") > 1:
        raise ambiguous_key_error()
    kind, _, token = given.partition(b" ")
    if kind.lower() == b"bearer":
        return _text(token)
    key = call.header(b"x-api-key")
    return _text(key) if key is not None else ""


def _token_of_page(call: Call) -> str | None:
    """The key of a WebSocket's handshake from its subprotocols, as ``bearer.KEY``. A web page can set no other header
    there. None: there is no such subprotocol."""
    if call.offer is None:
        return None
    offered = [value for name, value in call.headers if name == b"sec-websocket-protocol"]
    words = [word.strip() for value in offered for word in value.split(b",")]
    tokens = [word[len(BEARER) :] for word in words if word.startswith(BEARER)]
    if len(tokens) > 1:
        raise ambiguous_key_error()
    return _text(tokens[0]) if tokens else None


def ambiguous_key_error() -> Unauthenticated:
    """The error for a request with more than one API key."""
    return Unauthenticated("The request brings more than one API key; send one.")


def _text(token: bytes) -> str:
    token = token.strip()
    return token.decode("latin-1") if len(token) <= MAX_TOKEN_CHARS else ""


# -- after the body ------------------------------------------------------------------------------


def may_use(context: Context, principal: Principal, entry: str) -> bool:
    """Whether a principal may use an entry, by its own name or by another name of it.

    Listing, finding and computing models all use this rule.
    """
    if principal.may_use(entry):
        return True
    return any(principal.may_use(name) for name in names_of_entries(context.config.models).get(entry, ()))


def visible_models(context: Context, principal: Principal) -> Sequence[ModelStatus]:
    """The models that a principal may use, without adapters. For this principal all others do not exist."""
    served = context.router.models()
    if not principal.models:
        return served
    names = names_of_entries(context.config.models)
    return [status for status in served if any(map(principal.may_use, names.get(status.name, (status.name,))))]


def listed_models(context: Context, principal: Principal) -> Sequence[ModelStatus]:
    """The models and adapters that a principal may use, each by its own name."""
    adapters = [status for status in context.router.adapters() if may_use(context, principal, status.name)]
    return [*visible_models(context, principal), *adapters]


def find_model(context: Context, call: Call, name: str | None) -> ModelStatus:
    """The model, or the version of it (``model@stable``, ``model@3``), that ``name`` stands for. None: the only model
    that the key may use.

    A model that the key may not use is reported like one that does not exist. Raises ModelNotFound, and InvalidRequest
    when there is no name and more than one model.
    """
    if name is not None:
        entry = entry_named(context.config.models, name) if "@" in name else None
        status = context.router.model(name if entry is None else entry)
        if status is not None and may_use(context, call.principal, status.name):
            return status
    if name is not None:
        there = _names(listed_models(context, call.principal))
        raise ModelNotFound(f"The model {shown(name)} does not exist; this server has: {there}.", param="model")
    seen = visible_models(context, call.principal)
    if len(seen) == 1:
        return seen[0]
    raise InvalidRequest(
        f"The field 'model' is missing; name one of: {_names(seen)}.",
        param="model",
        code="missing_required_parameter",
    )


def _names(served: Sequence[ModelStatus]) -> str:
    names = [printable(status.name) for status in served[:20]]
    return ", ".join(names) + (", ..." if len(served) > 20 else "") if names else "no model"


def terms_of(call: Call, *, priority: int | None, timeout: float | None) -> Terms:
    """The terms from the headers, the body's ``priority`` and ``timeout`` (seconds), and the key. Raises
    InvalidRequest."""
    asked: HeadTerms | None = call.facts.terms
    if asked is None:
        asked = HeadTerms(_priority(call), _deadline(call), sdk_timeout(call.header), session_of(call))
        call.facts.terms = asked
    principal = call.principal
    deadline_s = asked.deadline_s
    if timeout is not None:
        if not 0 < timeout <= MAX_TIMEOUT_S:
            raise invalid("timeout", f"timeout must be seconds above 0 and at most 86400, not {shown(timeout)}.")
        deadline_s = timeout if deadline_s is None else min(deadline_s, timeout)
    first_byte_s = asked.sdk_timeout_s
    if first_byte_s is not None and not call.stream:  # an answer that is not streamed has no first byte before its end
        deadline_s, first_byte_s = first_byte_s if deadline_s is None else min(deadline_s, first_byte_s), None
    wanted = asked.priority
    if wanted is None and priority is not None:
        check_range("priority", priority)
        wanted = priority
    call.priority = max(principal.default_priority if wanted is None else wanted, principal.priority)
    return Terms(
        call.priority,
        deadline_s,
        first_byte_s,
        principal.tenant,
        principal.weight,
        asked.session,
        principal.region,
    )


def _priority(call: Call) -> Priority | None:
    """The priority class in the headers."""
    header = call.header(b"x-inferd-priority")
    if header is None:
        return None
    word = header.decode("latin-1").strip().lower()
    if word not in RANKS:
        raise invalid(
            "x-inferd-priority",
            f"The header x-inferd-priority must be one of {', '.join(RANKS)}, not {printable(word)!r}.",
        )
    return RANKS[word]


def _deadline(call: Call) -> float | None:
    """The shortest time limit in the headers, in seconds."""
    found: list[float] = []
    for name in _TIMEOUT_HEADERS:
        header = call.header(name)
        if header is None:
            continue
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            text, word = printable(header.decode("latin-1")), name.decode("ascii")
            raise invalid(word, f"The header {word} must be seconds above 0 and at most 86400, not {text!r}.")
        found.append(seconds)
    return min(found) if found else None


def sdk_timeout(header: Callable[[bytes], bytes | None]) -> float | None:
    """Seconds after which OpenAI's client has stopped waiting for the first byte of the answer. None: the client sent
    no valid timeout. An invalid value does not refuse the request, because the SDK and not its user wrote the header.

    The result is ``SDK_GRACE_S`` above the client's own timeout. So the client raises its own timeout error, which its
    users expect, before it could receive an error status.
    """
    found: list[float] = []
    for name in SDK_TIMEOUT_HEADERS:
        text = header(name)
        if text is None:
            continue
        with contextlib.suppress(ValueError):
            found.append(float(text))
    told_s = min((seconds for seconds in found if 0 < seconds <= MAX_TIMEOUT_S), default=None)
    return None if told_s is None else told_s + SDK_GRACE_S


def session_of(call: Call) -> str:
    """The session that the request's headers name; empty: none. Raises InvalidRequest."""
    for name in _SESSION_HEADERS:
        header = call.header(name)
        if header is not None:
            if len(header) > MAX_SESSION_CHARS:
                word = name.decode("ascii")
                raise invalid(
                    word, f"The header {word} may have at most {MAX_SESSION_CHARS} characters, not {len(header)}."
                )
            return header.decode("latin-1")
    return ""


# -- quotas --------------------------------------------------------------------------------------


class HasModelInfo(Protocol):
    """A model's status, or a stand-in for it, as ``cost_of`` needs it."""

    @property
    def info(self) -> ModelInfo | None: ...


def cost_of(
    model: HasModelInfo, *, prompt_bytes: int, prompt_tokens: int, num_prompts: int, width: int, max_tokens: int | None
) -> Cost:
    """Bounds of a request's tokens before its prompts are tokenized.

    A text has at most as many tokens as bytes. ``prompt_tokens``: tokens of the prompts that were sent as token ids.
    ``width``: number of sequences computed per prompt.
    """
    context = model.info.max_model_len if model.info is not None else None
    max_prompt = prompt_bytes + prompt_tokens
    if context is not None:
        max_prompt = min(max_prompt, num_prompts * context)
    each = max_tokens if max_tokens is not None else context if context is not None else UNSET_MAX_TOKENS
    likely = max_tokens if max_tokens is not None else EXPECTED_TOKENS
    if context is not None:
        each, likely = min(each, context), min(likely, context)
    sequences = num_prompts * width
    expected = min(prompt_bytes // BYTES_PER_TOKEN + prompt_tokens + num_prompts, max_prompt) + sequences * likely
    return Cost(max_prompt, sequences * each, expected)


def cost_elsewhere(prompt_bytes: int, num_prompts: int, width: int, max_tokens: int | None) -> Cost:
    """As ``cost_of``, for a model with remote replicas alone, whose context length is not known."""
    sequences = num_prompts * width
    return Cost(
        prompt_bytes,
        sequences * (UNSET_MAX_TOKENS if max_tokens is None else max_tokens),
        min(prompt_bytes // BYTES_PER_TOKEN + num_prompts, prompt_bytes)
        + sequences * (EXPECTED_TOKENS if max_tokens is None else max_tokens),
    )


def reserve(context: Context, call: Call, model: str, *, prompt_tokens: int = 0, max_tokens: int = 0) -> None:
    """Reserve the call's requests and tokens in its quotas until the call ends. Raises QuotaExceeded."""
    call.permit = context.door.admit(
        call.principal, call.request_id, model, prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )
