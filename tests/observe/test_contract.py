"""The published contract of the metrics: the tables keep it, and every change that breaks it is found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from inferd.observe.aliases import ALIASES
from inferd.observe.contract import REMEDY, Contract, Entry, broken, contract_of, read
from inferd.observe.metrics import CONTRACT_VERSION, TABLE

PUBLISHED = Path(__file__).resolve().parent.parent.parent / "deploy" / "metrics-contract.json"
NOW = contract_of(TABLE, ALIASES, CONTRACT_VERSION)


def test_the_tables_keep_the_published_contract() -> None:
    assert list(broken(read(PUBLISHED), NOW)) == [], REMEDY


def test_the_published_contract_names_every_metric() -> None:
    assert read(PUBLISHED) == NOW, "deploy/metrics-contract.json is out of date: run `make docs`"


HISTOGRAM = next(entry for entry in NOW.metrics if entry.name == "inferd_time_to_first_token_seconds")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "inferd_ttft_seconds"}, "inferd_time_to_first_token_seconds was removed or renamed."),
        ({"type": "summary"}, "type was 'histogram' and is 'summary'."),
        ({"unit": ""}, "unit was 'seconds' and is ''."),
        ({"labels": ("model",)}, "labels was ('model', 'replica') and is ('model',)."),
        ({"buckets": (1.0, 2.0)}, "buckets was "),
        ({"stability": "development"}, "stability was 'stable' and is 'development'."),
    ],
)
def test_a_change_of_a_promise_is_found_unless_the_version_is_another(changes: dict[str, object], said: str) -> None:
    changed = tuple(
        msgspec.structs.replace(entry, **changes) if entry.name == HISTOGRAM.name else entry for entry in NOW.metrics
    )
    (sentence,) = broken(NOW, Contract(NOW.version, changed))
    assert said in sentence
    assert sentence.startswith(HISTOGRAM.name)
    assert list(broken(NOW, Contract(NOW.version + 1, changed))) == []


def test_a_new_metric_and_one_in_development_break_nothing() -> None:
    more = (*NOW.metrics, Entry("inferd_new", "gauge", stability="development"))
    assert list(broken(NOW, Contract(NOW.version, more))) == []
    assert list(broken(Contract(NOW.version, more), NOW)) == []


def test_a_version_does_not_go_back() -> None:
    (sentence,) = broken(Contract(NOW.version + 1, NOW.metrics), NOW)
    assert "versions only rise" in sentence
