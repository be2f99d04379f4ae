"""What an expression of Prometheus names: metrics, the labels that it chooses, and the labels that it groups by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from inferd.observe import metrics as m

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_:$][\w:$]*|\d[\w.]*|[=!]~|!=|[<>=]=|\S')
_GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})

OF_THE_SCRAPE = frozenset({"instance", "job"})

CHOICES = {
    ("inferd_replica_state", "state"): m.STATES,
    ("inferd_breaker_state", "state"): m.BREAKER_STATES,
    ("inferd_breaker_changes_total", "state"): m.BREAKER_STATES,
    ("inferd_kv_blocks", "state"): m.BLOCK_STATES,
    ("inferd_refused_total", "reason"): m.REFUSALS,
    ("inferd_requests_total", "outcome"): m.OUTCOMES,
    ("inferd_retries_total", "result"): m.RETRY_RESULTS,
    ("inferd_retries_total", "kind"): m.RETRY_KINDS,
    ("inferd_response_cache_total", "result"): m.CACHE_RESULTS,
    ("inferd_replica_faults_total", "fault"): m.FAULTS,
    ("inferd_config_reloads_total", "result"): m.RELOADS,
    ("inferd_latency_seconds", "stage"): m.STAGES,
    ("inferd_latency_seconds", "quantile"): tuple(f"{q:g}" for q in m.QUANTILES),
    ("inferd_objective_requests_total", "objective"): m.OBJECTIVES,
    ("inferd_objective_good_total", "objective"): m.OBJECTIVES,
}
"""The values of labels that are closed sets."""


@dataclass(frozen=True)
class Selector:
    metric: str
    matchers: tuple[tuple[str, str, str], ...] = ()  # label, operator, value


@dataclass
class Expression:
    selectors: list[Selector] = field(default_factory=list)
    groupings: list[str] = field(default_factory=list)


def read(text: str) -> Expression:
    found = Expression()
    tokens = _TOKEN.findall(text)
    at = 0
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        at += 1
        if token == "[":
            at = tokens.index("]", at) + 1
        elif token in _GROUPING:
            end = tokens.index(")", at)
            found.groupings += [word for word in tokens[at + 1 : end] if word != ","]
            at = end + 1
        elif re.match(r"[A-Za-z_:]", token) and token not in _WORDS and following != "(" and following not in _GROUPING:
            end = tokens.index("}", at) if following == "{" else at
            inside = [word for word in tokens[at + 1 : end] if word != ","]
            triples = zip(inside[::3], inside[1::3], inside[2::3], strict=True)
            found.selectors.append(Selector(token, tuple((a, b, c.strip('"')) for a, b, c in triples)))
            at = end + 1 if following == "{" else at
    return found


def labels_of_every_series() -> dict[str, frozenset[str]]:
    """Each name of the table, with the labels of its samples. Names of other servers are not on every page."""
    known: dict[str, frozenset[str]] = {"up": frozenset()}
    for row in m.TABLE:
        name, own = row.name, frozenset(row.labels)
        if row.kind in ("histogram", "summary"):
            known |= {f"{name}_sum": own, f"{name}_count": own}
        known |= {
            "histogram": {f"{name}_bucket": own | {"le"}},
            "summary": {name: own | {"quantile"}},
        }.get(row.kind, {name: own})
    return known


def problems(text: str, recorded: dict[str, frozenset[str]] | None = None) -> Iterator[str]:
    """Everything that an expression names and the page does not have. ``recorded``: the names of recording rules."""
    known = labels_of_every_series() | (recorded or {})
    expression = read(text)
    if not expression.selectors:
        yield f"{text} names no metric"
    everywhere: set[str] = set(OF_THE_SCRAPE)
    for selector in expression.selectors:
        if selector.metric not in known:
            yield f"there is no metric {selector.metric}"
            continue
        labels = known[selector.metric] | OF_THE_SCRAPE
        everywhere |= labels
        for label, operator, value in selector.matchers:
            if label not in labels:
                yield f"{selector.metric} has no label {label}"
            choices = CHOICES.get((selector.metric, label))
            if choices is not None and not value.startswith("$"):
                words = value.split("|") if operator.endswith("~") else [re.escape(value)]
                yield from (
                    f"{selector.metric} is never {label}={word}"
                    for word in words
                    if not any(re.fullmatch(word, choice) for choice in choices)
                )
    yield from (f"{text} groups by {word}" for word in expression.groupings if word not in everywhere)
