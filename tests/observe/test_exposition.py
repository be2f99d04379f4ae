"""What /metrics says is clean by Prometheus's own rules, under both names."""

from __future__ import annotations

import io
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import utils
from prometheus_client.parser import text_string_to_metric_families

from inferd.events import HttpServed, ReplicaChanged, RequestEnded, StepDone
from inferd.observe import Observer
from inferd.observe import metrics as m
from inferd.observe.page import as_page
from inferd.observe.series import number
from inferd.types import StepStats, Timings, Usage

EXPECTED_OF_VLLM = re.findall(
    r"\w+",
    """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info
prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_cached_total admission_rejections_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n
request_params_max_tokens iteration_tokens_total request_num_preemptions request_prefill_kv_computed_tokens
""",
)


@pytest.fixture
def page() -> str:
    """A page with every metric in use."""
    observer = Observer(models={"tiny": 2}, stream=io.StringIO())
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
            stats=StepStats(step_sequences=1, step_tokens=3, step_s=0.1, blocks_total=9, blocks_used=3),
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
    return observer.render_metrics().decode()


def test_every_name_that_vllms_dashboards_ask_for_is_there(page: str) -> None:
    names = {
        family.name + ("_total" if family.type == "counter" else "") for family in text_string_to_metric_families(page)
    }
    assert {f"vllm:{name}" for name in EXPECTED_OF_VLLM} <= names
    assert {"http_requests_total", "http_request_duration_seconds", "http_request_size_bytes"} <= names
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "inferd_build_info"} <= names


def test_every_row_of_the_table_is_on_the_page_under_each_of_its_names(page: str) -> None:
    declared = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    for metric in m.TABLE:
        assert {name.name for name in metric.names} <= declared


def test_all_names_of_a_row_show_the_same_values(page: str) -> None:
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    for metric in m.TABLE:
        for alias in metric.names[1:]:
            for suffix in ("", "_sum", "_count", "_bucket"):
                # repr, as a quantile without data is not equal to itself
                assert repr(found.get(alias.name + suffix)) == repr(found.get(metric.name + suffix)), alias.name


def test_names_are_unique() -> None:
    names = [name for metric in m.TABLE for name, _ in metric.names]
    assert len(names) == len(set(names))


def test_the_page_keeps_the_rules_of_naming(page: str) -> None:
    """promtool's rules that concern us, so that they hold where promtool is not installed."""
    assert complaints(page) == []


def test_promtool_has_nothing_to_say_but_of_vllms_own_names(page: str) -> None:
    """vLLM's names have a colon, which Prometheus keeps for recording rules, and one histogram of vLLM's
    ends in _total. Renaming them would take them from the dashboards they exist for."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; the test above holds the rules that concern us")
    found = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    said = (found.stdout + found.stderr).splitlines()
    colon = re.compile(r"vllm:\w+ metric names should not contain ':'")
    total = 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    assert [line for line in said if line and not colon.fullmatch(line) and line != total] == []
    assert any(colon.fullmatch(line) for line in said)  # it did read the page


def complaints(page: str) -> list[str]:
    found = []
    for family in text_string_to_metric_families(page):
        name, is_vllm = family.name, family.name.startswith("vllm:")
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


def test_the_page_of_the_table_names_every_metric() -> None:
    text = as_page()
    for metric in m.TABLE:
        assert f"## {metric.name}\n" in text
        assert all(f"`{alias.name}`" in text for alias in metric.names[1:])


@given(st.floats() | st.integers(-(2**60), 2**60).map(float) | st.sampled_from([0.0, 1e6, 999999.0, 1e16, 1e-7]))
def test_numbers_are_written_as_prometheus_own_client_writes_them(value: float) -> None:
    assert number(value) == utils.floatToGoString(value)  # type: ignore[no-untyped-call]
