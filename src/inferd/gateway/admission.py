"""Who may come in, and on what terms: credentials, scopes, visible models, priority, deadline, quotas.

Decided from the matched route and the request's headers before its body is read; what needs the body
comes after it, and before any cost. Knows the door and the principal, not how keys are kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from inferd.config.versions import entry_named, names_of_entries
from inferd.errors import Forbidden, InvalidRequest, ModelNotFound, Unauthenticated
from inferd.gateway.call import SDK_TIMEOUT_HEADERS, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.openai.sampling import check_range
from inferd.gateway.upstream import ModelStatus
from inferd.tenancy.principal import Door, Principal, Scope
from inferd.types import RANKS, ModelInfo, Priority

MAX_TOKEN_CHARS: Final = 512  # no key of ours is as long, so a longer one is wrong without looking
MAX_SESSION_CHARS: Final = 256
MAX_TIMEOUT_S: Final = 86_400.0
SDK_GRACE_S: Final = 0.5
UNSET_MAX_TOKENS: Final = 4096  # an answer's reserve where neither request nor model names a limit
EXPECTED_TOKENS: Final = 256  # an answer's likely length where the request names none
BYTES_PER_TOKEN: Final = 4
BEARER: Final = b"bearer."  # of a key among the names of subprotocols

_TIMEOUT_HEADERS: Final = (b"x-inferd-timeout", b"x-request-timeout")
_SESSION_HEADERS: Final = (b"x-session-id", b"x-inferd-session")


# -- before the body -----------------------------------------------------------------------------


def authenticate(door: Door, call: Call, scope: Scope) -> Principal:
    """Who asks. Raises Unauthenticated, and Forbidden where the key is good and does not do."""
    principal = door.authenticate(token_of(call))
    call.principal = principal
    if not principal.may(scope):
        raise Forbidden(
            f"This needs the scope {scope!r}, which "
            f"{'your API key does' if principal.key_id else 'requests without an API key do'} not have; "
            f"use a key that has it."
        )
    return principal


def token_of(call: Call) -> str | None:
    """The credential of a request: a bearer token, or ``x-api-key``. None: it brought none.

    Raises Unauthenticated where it is not clear which one is meant.
    """
    given = call.header(b"authorization")
    if given is None:
        key = call.header(b"x-api-key")
        if key is None:
            return _token_of_page(call)
        if call.count(b"x-api-key") > 1:
            raise ambiguous_key_error()
        return _text(key)
    if call.count(b"authorization") > 1:
        raise ambiguous_key_error()
    kind, _, token = given.partition(b" ")
    if kind.lower() == b"bearer":
        return _text(token)
    key = call.header(b"x-api-key")
    return _text(key) if key is not None else ""


def _token_of_page(call: Call) -> str | None:
    """Web pages cannot send headers with a WebSocket, but names of subprotocols: a key is one, behind ``bearer.``."""
    if call.offer is None:
        return None
    offered = [value for name, value in call.headers if name == b"sec-websocket-protocol"]
    words = [word.strip() for value in offered for word in value.split(b",")]
    tokens = [word[len(BEARER) :] for word in words if word.startswith(BEARER)]
    if len(tokens) > 1:
        raise ambiguous_key_error()
    return _text(tokens[0]) if tokens else None


def ambiguous_key_error() -> Unauthenticated:
    return Unauthenticated("The request brings more than one API key; send one.")


def _text(token: bytes) -> str:
    token = token.strip()
    return token.decode("latin-1") if len(token) <= MAX_TOKEN_CHARS else ""


# -- after the body ------------------------------------------------------------------------------


def may_use(context: Context, principal: Principal, entry: str) -> bool:
    """Whether a principal may use an entry: by its own name, or by any other name that stands for it. This is the one
    law of what is listed, what is found and what is computed."""
    if principal.may_use(entry):
        return True
    return any(principal.may_use(name) for name in names_of_entries(context.config.models).get(entry, ()))


def visible_models(context: Context, principal: Principal) -> Sequence[ModelStatus]:
    """The models a principal may use; to it there are no others."""
    served = context.router.models()
    if not principal.models:
        return served
    names = names_of_entries(context.config.models)
    return [status for status in served if any(map(principal.may_use, names.get(status.name, (status.name,))))]


def find_model(context: Context, call: Call, name: str | None) -> ModelStatus:
    """The model a request means, or its version (``model@stable``, ``model@3``); without a name, the only one there is
    for this client.

    A model that the key may not use is not found, exactly like one that does not exist. Raises
    ModelNotFound, InvalidRequest.
    """
    if name is not None:
        entry = entry_named(context.config.models, name) if "@" in name else None
        status = context.router.model(name if entry is None else entry)
        if status is not None and may_use(context, call.principal, status.name):
            return status
    seen = visible_models(context, call.principal)
    if name is not None:
        raise ModelNotFound(f"The model {shown(name)} does not exist; this server has: {_names(seen)}.", param="model")
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


class Terms(NamedTuple):
    """On what terms a request is served: the part of a Request that does not depend on what it asks."""

    priority: Priority
    deadline_s: float | None
    first_byte_s: float | None
    tenant: str
    weight: float
    session: str
    region: str


def terms_of(call: Call, *, priority: int | None, timeout: float | None) -> Terms:
    """From headers, the body's ``priority`` and ``timeout``, and what the key allows. Raises InvalidRequest."""
    principal = call.principal
    deadline_s, first_byte_s = timeouts_of(_deadline(call, timeout), sdk_timeout(call.header), stream=call.stream)
    return Terms(
        _priority(call, priority),
        deadline_s,
        first_byte_s,
        principal.tenant,
        principal.weight,
        session_of(call),
        principal.region,
    )


def _priority(call: Call, in_body: int | None) -> Priority:
    """The class asked for, but none better than the key's best."""
    best = call.principal.priority
    header = call.header(b"x-inferd-priority")
    if header is not None:
        word = header.decode("latin-1").strip().lower()
        if word not in RANKS:
            raise invalid(
                "x-inferd-priority",
                f"The header x-inferd-priority must be one of {', '.join(RANKS)}, not {printable(word)!r}.",
            )
        return max(RANKS[word], best)
    if in_body is not None:
        check_range("priority", in_body)
        return max(in_body, best)
    return max(call.principal.default_priority, best)


def _deadline(call: Call, in_body: float | None) -> float | None:
    """Seconds the answer may take: the least of the body's ``timeout`` and the headers'."""
    found: list[float] = []
    if in_body is not None:
        if not 0 < in_body <= MAX_TIMEOUT_S:
            raise invalid("timeout", f"timeout must be seconds above 0 and at most 86400, not {shown(in_body)}.")
        found.append(in_body)
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
    """When OpenAI's client has stopped waiting for the first byte of the answer, in seconds; None: it does not say, or
    nothing that can be meant. Its user did not write the header, so a strange value is no reason to refuse the request.

    ``SDK_GRACE_S`` later than the client's own timeout: the client raises its timeout error, as its users expect, and
    not the status of an answer that came just before.
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


def timeouts_of(
    deadline_s: float | None, sdk_timeout_s: float | None, *, stream: bool
) -> tuple[float | None, float | None]:
    """``deadline_s`` and ``first_byte_s`` of a request. The first byte of an answer that is no stream comes with its
    last."""
    if stream or sdk_timeout_s is None:
        return deadline_s, sdk_timeout_s
    return sdk_timeout_s if deadline_s is None else min(deadline_s, sdk_timeout_s), None


def session_of(call: Call) -> str:
    """What the client calls its session; empty: nothing. Raises InvalidRequest."""
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


class Cost(NamedTuple):
    """What a request may cost at most, which its quota must have, and what it will likely cost, which
    its place in the queue is measured by. Tokens."""

    max_prompt: int
    max_answer: int
    expected: int


class HasModelInfo(Protocol):
    @property
    def info(self) -> ModelInfo | None: ...


def cost_of(
    model: HasModelInfo, *, prompt_bytes: int, prompt_tokens: int, num_prompts: int, width: int, max_tokens: int | None
) -> Cost:
    """Bounds of a request's tokens before anything is tokenized.

    No tokenizer makes more tokens than bytes. ``prompt_tokens`` are those of prompts that came as token
    ids; ``width`` is the number of sequences computed per prompt.
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


def reserve(context: Context, call: Call, model: str, *, prompt_tokens: int = 0, max_tokens: int = 0) -> None:
    """Take the call from its quotas; it is settled when the call is over. Raises QuotaExceeded."""
    call.permit = context.door.admit(
        call.principal, call.request_id, model, prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )
