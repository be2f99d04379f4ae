"""The format of the metrics page follows the header Accept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.observe.accept import wants_openmetrics


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=1.0.0",
        "application/openmetrics-text",
        'Application/OpenMetrics-Text;version="1.0.0";charset=utf-8, text/plain;q=0.5',
        # Prometheus 2.42 and 3.5
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    ],
)
def test_openmetrics_is_preferred(accept: str) -> None:
    assert wants_openmetrics(accept)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/html, text/plain;q=0.9",
        "application/openmetrics-text;version=2.0.0",
        "application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=0.3, text/plain;q=0.4",
        "application/openmetrics-text;q=nan",
        "application/openmetrics-text;q=9",
        "application/openmetrics-text, */*",
    ],
)
def test_the_text_format_is_taken(accept: str) -> None:
    assert not wants_openmetrics(accept)


@given(st.text(alphabet='aop/n-penmetrics*; ,=q.01"\0é', max_size=80))
def test_any_header_is_understood_somehow(accept: str) -> None:
    assert wants_openmetrics(accept) in (True, False)
