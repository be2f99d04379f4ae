"""The check of expressions finds what it is for."""

from __future__ import annotations

import pytest
from tests.observe.promql import Selector, problems, read


def test_an_expression_is_read() -> None:
    text = 'sum by (model, le) (rate(a_bucket{model=~"$m|x",le!="1"}[5m] offset 5m)) / on (model) group_left () b > 1e3'
    found = read(text)
    assert found.selectors == [Selector("a_bucket", (("model", "=~", "$m|x"), ("le", "!=", "1"))), Selector("b")]
    assert found.groupings == ["model", "le", "model"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate(inferd_request_total[5m])", "no metric inferd_request_total"),
        ("inferd_request_latency_seconds", "no metric"),
        ('inferd_queue_waiting{replica="0"}', "no label replica"),
        ('inferd_breaker_state{state="ready"}', "never state=ready"),
        ('inferd_refused_total{reason=~"queue_full|full"}', "never reason=full"),
        ("sum by (outcome) (inferd_queue_waiting)", "groups by outcome"),
        ("1 + 1", "names no metric"),
    ],
)
def test_what_the_page_does_not_have_is_found(text: str, said: str) -> None:
    assert said in " ".join(problems(text))


@pytest.mark.parametrize(
    "text",
    [
        'histogram_quantile(0.95, sum by (le) (rate(inferd_request_latency_seconds_bucket{model="$model"}[5m])))',
        'inferd_latency_seconds{quantile="0.95",stage="total"}',
        'inferd_refused_total{reason=~"quota_.*"} > process_open_fds',
        "sum by (instance) (up)",
    ],
)
def test_what_the_page_has_is_no_problem(text: str) -> None:
    assert list(problems(text)) == []
