"""What /metrics says is clean by Prometheus's own rules, under all names."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inferd.config import AliasDialect
from inferd.events import HttpServed, ReplicaChanged, RequestEnded, StepDone
from inferd.observe import Observer
from inferd.observe import metrics as m
from inferd.observe.aliases import ALIASES
from inferd.observe.page import as_page
from inferd.types import AdapterUse, StepStats, Timings, Usage

EXPECTED_OF_VLLM = re.findall(
    r"\w+",
    """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info
lora_requests_info
prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_cached_total admission_rejections_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n
request_params_max_tokens iteration_tokens_total request_num_preemptions request_prefill_kv_computed_tokens
""",
)


def a_busy_observer(aliases: Sequence[AliasDialect] = ()) -> Observer:
    """Every metric is in use."""
    observer = Observer(models={"tiny": 2}, aliases=aliases, stream=io.StringIO())
    observer.emit(
        ReplicaChanged(
            model="tiny",
            replica=0,
            state="ready",
            load_s={"weights": 1.0},
            kv_blocks=100,
            block_size=16,
            rss_bytes=1,
            max_model_len=64,
        )
    )
    observer.emit(
        StepDone(
            model="tiny",
            replica=0,
            stats=StepStats(
                step_sequences=1,
                step_tokens=3,
                step_s=0.1,
                blocks_total=9,
                blocks_used=3,
                adapters=AdapterUse(2, ("one",), ("two",)),
            ),
        )
    )
    timings = Timings(0.1, 0.2, 0.3, 0.4, 0.9)
    observer.emit(
        RequestEnded(
            model="tiny",
            replica=0,
            request_id="r",
            tenant="",
            outcome="done",
            usage=Usage(9, 5),
            timings=timings,
            inter_token_s=(0.1,),
        )
    )
    observer.emit(HttpServed(request_id="r", method="GET", route="/metrics", status=200, duration_s=0.1))
    observer.close()
    return observer


@pytest.fixture
def page() -> str:
    """A page with all names."""
    return a_busy_observer(get_args(AliasDialect)).render_metrics().decode()


def test_every_name_that_vllms_dashboards_ask_for_is_there(page: str) -> None:
    names = {
        family.name + ("_total" if family.type == "counter" else "") for family in text_string_to_metric_families(page)
    }
    assert {f"vllm:{name}" for name in EXPECTED_OF_VLLM} <= names
    assert {"http_requests_total", "http_request_duration_seconds", "http_request_size_bytes"} <= names
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "inferd_build_info"} <= names


def test_every_row_of_both_tables_is_on_the_page_with_its_type_and_labels(page: str) -> None:
    declared = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    labels: dict[str, set[frozenset[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).add(frozenset(sample.labels) - {"le", "quantile"})
    for row in (*m.TABLE, *ALIASES):
        assert declared[row.name] == row.kind
        for suffix in ("", "_count"):
            assert labels.get(row.name + suffix, set()) <= {frozenset(row.labels)}, row.name


def test_no_name_of_another_server_is_there_unless_it_is_asked_for() -> None:
    own = {row.name for row in m.TABLE}
    for chosen in ((), ("vllm",), ("triton", "fastapi")):
        observer = a_busy_observer(chosen)
        text = observer.render_metrics().decode()
        declared = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
        assert declared == own | {alias.name for alias in ALIASES if alias.dialect in chosen}


def test_names_are_unique_and_are_described_once(page: str) -> None:
    own = [metric.name for metric in m.TABLE]
    assert len(own) == len(set(own))
    assert not set(own) & {alias.name for alias in ALIASES}
    declared = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    assert len(declared) == len(set(declared))


def test_the_page_keeps_the_rules_of_naming(page: str) -> None:
    """promtool's rules that concern us, so that they hold where promtool is not installed."""
    assert complaints(page) == []


def test_promtool_has_nothing_to_say_but_of_other_servers_names(page: str) -> None:
    """vLLM's names have a colon, which Prometheus keeps for recording rules, and one histogram of vLLM's
    ends in _total. Triton's are in microseconds, its counters do not end in _total, and it calls a gauge a count.
    Renaming them would take them from the dashboards they exist for."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; the test above holds the rules that concern us")
    found = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    said = (found.stdout + found.stderr).splitlines()
    colon = re.compile(r"vllm:\w+ metric names should not contain ':'")
    total = 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    ours = [line for line in said if line and not colon.fullmatch(line) and line != total and line[:3] != "nv_"]
    assert ours == []
    assert any(colon.fullmatch(line) for line in said)  # it did read the page


def complaints(page: str) -> list[str]:
    found = []
    for family in text_string_to_metric_families(page):
        name, is_vllm = family.name, family.name.startswith("vllm:")
        if name.startswith("nv_"):
            continue
        if not family.documentation:
            found.append(f"{name} has no help")
        if family.type == "unknown":
            found.append(f"{name} has no type")
        if family.type != "counter" and name.endswith("_total") and name != "vllm:iteration_tokens_total":
            found.append(f"{name} ends in _total and is no counter")
        if family.type == "counter" and any(not sample.name.endswith("_total") for sample in family.samples):
            found.append(f"{name} is a counter and does not end in _total")
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name.removeprefix("vllm:") if is_vllm else name):
            found.append(f"{name} is not in small letters and underscores")
        if re.search(r"_(milliseconds|microseconds|minutes|hours|kilobytes|megabytes|percent|ms|us)(_|$)", name):
            found.append(f"{name} is not in base units")
        if family.type not in ("histogram", "summary") and re.search(r"_(count|sum|bucket)$", name):
            found.append(f"{name} ends like a part of a histogram")
        found += [
            f"{sample.name} has label {label}"
            for sample in family.samples
            for label in sample.labels
            if label in ("job", "instance")
        ]
    return found


def test_the_rules_do_find_what_breaks_them() -> None:
    page = "# TYPE wait_ms gauge\nwait_ms 1\n# HELP things_total Things.\n# TYPE things_total gauge\nthings_total 1\n"
    assert complaints(page) == [
        "wait_ms has no help",
        "wait_ms is not in base units",
        "things_total ends in _total and is no counter",
    ]


def test_the_page_of_the_tables_names_every_metric() -> None:
    text = as_page()
    assert all(f"### {metric.name}\n" in text for metric in m.TABLE)
    assert all(f"| `{alias.name}` | {alias.kind} |" in text for alias in ALIASES)
