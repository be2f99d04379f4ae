"""One JSON line per HTTP request, change of a replica and decision; never a prompt's or an answer's text.

Every text that a client or a model chose is cut and escaped: each line is one line of ASCII, whatever the text holds.
``worker/line_writer.py`` writes the lines.
"""

from __future__ import annotations

from math import floor
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from inferd.events import (
    AdminActed,
    BreakerChanged,
    DriftRead,
    HandedOver,
    HttpServed,
    ModelUnloaded,
    NodeChanged,
    ReplicaChanged,
    RequestRefused,
    Retried,
    RolloutChanged,
    Scaled,
    WebhookCame,
)
from inferd.observe.log_fields import HttpLine, SpeedLine, TimingsLine, UsageLine
from inferd.types import JSON, Timings, Usage
from inferd.worker.log_lines import MAX_MESSAGE_CHARACTERS, encoded
from inferd.worker.timestamp import timestamp

MAX_CHARACTERS: Final = 256
"""Of a text field that a client chose; the rest is cut off."""

_encode = msgspec.json.Encoder().encode
_LEVELS: dict[str, str] = {"hung": "error", "died": "error", "failed": "error"}

_LONG_S: Final = 1e6
"""Microseconds of a shorter time are far within the digits of a float."""

SEVERITY: Final = {"debug": 0, "info": 1, "warning": 2, "error": 3}
"""Levels of lines, and of the setting ``server.log_level``."""


def http_line(event: HttpServed, wall_s: float, *, with_speed: bool = False) -> str:
    """A line of the access log. ASCII only: any id of a client results in one line of plain JSON.

    ``with_speed``: with tokens per second, time to first token and time per output token."""
    usage, timings = event.usage, event.timings
    line = HttpLine(
        timestamp(wall_s),
        http_level(event.status),
        "http",
        event.request_id[:MAX_CHARACTERS],
        event.tenant[:MAX_CHARACTERS],
        event.key_id[:MAX_CHARACTERS],
        None if event.model is None else event.model[:MAX_CHARACTERS],
        event.route,
        event.method[:MAX_CHARACTERS],
        event.status,
        event.outcome,
        event.finish_reasons,
        None if event.error_code is None else event.error_code[:MAX_CHARACTERS],
        event.error_text[:MAX_CHARACTERS] or UNSET,
        event.path[:MAX_CHARACTERS] or UNSET,
        event.stream,
        _to_micros(event.duration_s),
        event.request_bytes,
        event.response_bytes,
        UNSET if usage is None else UsageLine(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        UNSET if timings is None else _timings(timings),
        UNSET if not with_speed or usage is None or timings is None else _speed(usage, timings),
        event.rescued_from or UNSET,
    )
    try:
        text = _encode(line).decode()
    except UnicodeEncodeError:
        text = ""
    if text and text.isascii() and "\x7f" not in text:
        return text
    # Characters other than printable ASCII are escaped, which is slower and rare.
    return encoded(msgspec.to_builtins(line))


def _timings(timings: Timings) -> TimingsLine:
    dispatched, tokenized, scheduled = timings.dispatched, timings.tokenized, timings.scheduled
    first_token, finished = timings.first_token, timings.finished
    return TimingsLine(
        UNSET if dispatched is None else _to_micros(dispatched),
        UNSET if tokenized is None else _to_micros(tokenized),
        UNSET if scheduled is None else _to_micros(scheduled),
        UNSET if first_token is None else _to_micros(first_token),
        UNSET if finished is None else _to_micros(finished),
    )


def _to_micros(seconds: float) -> float:
    """Rounded to microseconds. ``round`` finds the decimal digits of a number, which takes twenty times as long."""
    return floor(seconds * 1e6 + 0.5) / 1e6 if -_LONG_S < seconds < _LONG_S else round(seconds, 6)


def _speed(usage: Usage, timings: Timings) -> SpeedLine | UnsetType:
    """The speed of an answer. Unset for requests that generated nothing."""
    first, finished, tokens = timings.first_token, timings.finished, usage.completion_tokens
    if first is None or finished is None or not tokens:
        return UNSET
    decode_s = finished - first
    return SpeedLine(
        round(first, 6),
        round(decode_s / (tokens - 1), 6) if tokens > 1 else UNSET,
        round(tokens / finished, 3) if finished > 0.0 else UNSET,
    )


def http_level(status: int) -> str:
    """503 is no defect: a full queue refuses requests, and probes arrive before a model is ready."""
    return "info" if status < 400 else "warning" if status < 500 or status == 503 else "error"


def replica_level(state: str) -> str:
    return _LEVELS.get(state, "info")


def replica_line(event: ReplicaChanged, wall_s: float) -> str:
    line: JSON = {
        "ts": timestamp(wall_s),
        "level": replica_level(event.state),
        "event": "replica",
        "model": event.model,
        "replica": event.replica,
        "state": event.state,
        "reason": event.reason[:MAX_MESSAGE_CHARACTERS],
        "restarts": event.restarts,
    }
    if event.load_s:
        line["load_s"] = {phase: round(seconds, 3) for phase, seconds in event.load_s.items()}
    return encoded(line)


Decision = RequestRefused | BreakerChanged | Retried | HandedOver | ModelUnloaded
"""Events of decisions that have a line. Reloads and outages of the database have a record of Python's logging."""


def decision_fields(event: Decision) -> tuple[str, str, JSON]:
    """The name of a decision's line, its level and its fields."""
    match event:
        case RequestRefused():
            return (
                "refused",
                "warning",
                {"model": _cut(event.model), "reason": event.reason, "tenant": _cut(event.tenant)},
            )
        case BreakerChanged():
            level = "info" if event.state in ("closed", "half_open") else "warning"
            fields: JSON = {"model": event.model, "replica": event.replica, "state": event.state}
            return "breaker", level, {**fields, "reason": _cut(event.reason)}
        case Retried():
            level = "info" if event.granted else "warning"
            return "retry", level, {"model": event.model, "kind": event.kind, "granted": event.granted}
        case HandedOver():
            fields = {"model": event.model, "replica": event.replica, "blocks": event.num_blocks}
            return "hand_over", "warning", {**fields, "failure": _cut(event.failure)}
        case ModelUnloaded():
            return "unload", "info", {"model": event.model, "reason": event.reason, "freed_bytes": event.freed_bytes}


def audit_line(event: AdminActed, wall_s: float) -> str:
    """The line of an admin action. A collector of the log keeps with it the end of the audit log's chain."""
    texts = {name: _cut(getattr(event, name)) for name in ("actor", "tenant", "action", "target", "outcome")}
    line: JSON = {"ts": timestamp(wall_s), "level": "info", "event": "audit", "seq": event.seq, **texts}
    return encoded({**line, "request_id": _cut(event.request_id), "hash": event.hash})


def rollout_level(state: str) -> str:
    return "warning" if state == "rolled_back" else "info"


def rollout_line(event: RolloutChanged, wall_s: float) -> str:
    """The line of a rollout's change, with the numbers of its guards."""
    line: JSON = {"ts": timestamp(wall_s), "level": rollout_level(event.state), "event": "rollout"}
    line |= {"model": event.model, "stable": event.stable, "new": event.new, "state": event.state}
    line |= {"share": event.share, "paused": event.is_paused, "reason": event.reason}
    return encoded({**line, "guards": [guard.text for guard in event.guards]})


def drift_level(event: DriftRead) -> str:
    return "warning" if event.is_drifting else "info"


def drift_line(event: DriftRead, wall_s: float) -> str:
    """The line of a stream that has begun, or ceased, to differ from its reference."""
    line: JSON = {"ts": timestamp(wall_s), "level": drift_level(event), "event": "drift", "model": event.model}
    line |= {"stream": event.stream, "drifting": event.is_drifting, "size": event.size}
    line |= {event.measure: round(event.distance, 4)}
    return encoded({**line, "sentence": event.sentence if event.is_drifting else ""})


def webhook_level(result: str) -> str:
    return "info" if result == "accepted" else "warning"


def webhook_line(event: WebhookCame, wall_s: float) -> str:
    """The line of a webhook that came."""
    line: JSON = {"ts": timestamp(wall_s), "level": webhook_level(event.result), "event": "webhook"}
    return encoded({**line, "result": event.result, "delivery": _cut(event.delivery)})


def scale_line(event: Scaled, wall_s: float) -> str:
    """The line of a decision about a model's number of replicas, with all its numbers."""
    line: JSON = {"ts": timestamp(wall_s), "level": "info", "event": "scale", "model": event.model}
    line |= {"replicas": event.before, "desired": event.desired, "rule": event.rule, "reason": event.reason}
    line |= {"ready": event.ready, "starting": event.starting, "leaving": event.leaving, "needs": event.needs}
    line |= {"waiting": event.waiting, "in_flight": event.in_flight, "requests_per_s": event.requests_per_s}
    return encoded({**line, "served_per_s": event.served_per_s, "ready_s": event.ready_s})


_NODE_LEVELS: Final = {"late": "warning", "gone": "error", "refused": "warning"}


def node_level(state: str) -> str:
    return _NODE_LEVELS.get(state, "info")


def node_line(event: NodeChanged, wall_s: float) -> str:
    """The line of a machine that joined, left, is gone or was refused."""
    line: JSON = {"ts": timestamp(wall_s), "level": node_level(event.state), "event": "node", "node": _cut(event.node)}
    return encoded({**line, "state": event.state, "reason": event.reason[:MAX_MESSAGE_CHARACTERS]})


def _cut(text: str) -> str:
    return text[:MAX_CHARACTERS]
