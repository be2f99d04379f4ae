"""The comparison's arithmetic: what a run says of an engine, of the goals and of the machine's limits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil  # type: ignore[import-untyped]
import pytest
from bench.chart import HEIGHT, WIDTH
from bench.llm_peers import context, servers
from bench.llm_peers.__main__ import Item, Report, forecast, loads_of, planned
from bench.llm_peers.context import Turn
from bench.llm_peers.inprocess import LONG, Done, Job, command_of, figures_of, jobs
from bench.llm_peers.process import PeerFailed
from bench.llm_peers.servers import Places, Servers, Start, start_of
from bench.llm_peers.table import (
    FORMATS,
    Limits,
    Run,
    Shape,
    bandwidth_picture,
    gathered,
    roofline_picture,
    tables,
    verdicts,
)
from tests.ports import free_port

SHAPE = Shape(matrix_weights=1_000_000, head_weights=200_000, kv_bytes_per_token=1_000)
LIMITS = [Limits(10.0, 100.0, 400.0), Limits(12.0, 120.0, 440.0), Limits(11.0, 110.0, 420.0)]


def test_the_shape_of_a_checkpoint_counts_every_matrix_once() -> None:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    shape = Shape.of(config)
    layer = 8 * 4 * 4 + 2 * (8 * 2 * 4) + 4 * 4 * 8 + 3 * 8 * 16
    assert (shape.matrix_weights, shape.head_weights) == (2 * layer + 800, 800)
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 4 * 2
    with pytest.raises(AssertionError, match="vocab_size"):
        Shape.of({**config, "vocab_size": "many"})


def test_decode_reads_the_weights_and_the_cache_once_per_token() -> None:
    assert SHAPE.decode_gb_per_s("bf16", 1000.0, 500) == pytest.approx((2_000_000 + 500_000) * 1000 / 1e9)
    assert SHAPE.decode_gb_per_s("int4", 1000.0, 0) == pytest.approx(0.5)
    assert [SHAPE.own_weight_bytes(form) for form in FORMATS] == [2_000_000, 1_000_000, 437_500 + 200_000]


def test_figures_of_waves_are_rates() -> None:
    eight = Job(128, 64, 8, 2)
    alone = Job(128, 64, 1, 1)
    asked = [Done(eight, 4.0), Done(eight, 8.0), Done(alone, 2.0, (0.5, 0.75, 1.0, 2.0))]
    found = figures_of(3.0, [*asked, Done(Job(512, 1, 1, 1), 2.0)])
    assert found["8 clients: tokens/s"] == 8 * 64 / 6.0
    assert found["1 clients: tokens/s"] == 32.0
    assert found["decode, tokens/s"] == 4.0, "the median step, which one long pause does not move"
    assert found["prefill 512, tokens/s"] == 256.0
    assert "decode at 4096, tokens/s" not in found
    found = figures_of(3.0, [Done(Job(LONG, 32, 1, 1), 20.0, (16.0, 16.1, 16.2))])
    assert found[f"prefill {LONG}, tokens/s"] == LONG / 16.0
    assert found["decode at 4096, tokens/s"] == pytest.approx(10.0)


def test_a_turn_is_judged_by_what_memory_gave_in_it() -> None:
    keys_and_values_s = (LONG - 128) * 1_000 / 10e9
    good = Turn(short_s=0.01, long_s=0.01 + keys_and_values_s, read_gb_per_s=10.0)
    assert good.context_share(SHAPE) == pytest.approx(1.0)
    slower_memory = Turn(short_s=0.01, long_s=0.01 + 2 * keys_and_values_s, read_gb_per_s=5.0)
    assert slower_memory.context_share(SHAPE) == pytest.approx(1.0)
    wasteful = Turn(short_s=0.01, long_s=0.02, read_gb_per_s=10.0)
    assert wasteful.context_share(SHAPE) < 0.6
    assert good.bandwidth_share(SHAPE, "bf16") == pytest.approx((2e6 + 136e3) / 0.01 / 10e9)
    figures = context.figures_of([good, slower_memory, wasteful], SHAPE, "bf16")
    assert figures["decode at 4096, % of what KV bytes leave"] == pytest.approx(100.0)


def test_a_goal_is_judged_by_the_median_and_the_best_peer() -> None:
    runs = [Run("http", "inferd", "bf16", {"8 clients: tokens/s": value}) for value in (100.0, 130.0, 120.0)]
    runs += [Run("http", "slow", "bf16", {"8 clients: tokens/s": 10.0})]
    runs += [Run("http", "fast", "bf16", {"8 clients: tokens/s": value}) for value in (96.0, 90.0, 100.0)]
    assert verdicts(gathered(runs), [], SHAPE) == [["http, bf16, 8 clients", ">= 1.25", "1.25", "yes"]]
    runs[2] = Run("http", "inferd", "bf16", {"8 clients: tokens/s": 110.0})
    assert verdicts(gathered(runs), [], SHAPE)[0][3] == "NO"


def test_efficiency_is_the_share_of_limits_measured_in_the_same_run() -> None:
    share = "decode at 4096, % of what KV bytes leave"
    figures = {"decode, % of the read bandwidth": 79.0, "prefill 512, tokens/s": 50_000.0, share: 99.0}
    rows = verdicts(gathered([Run("in process", "inferd", "bf16", figures)]), LIMITS, SHAPE)
    assert [row[2] for row in rows] == ["79%", "73%", "99%"]
    assert [row[3] for row in rows] == ["NO", "NO", "yes"]
    runs = [Run("in process", "inferd", "bf16", {share: value}) for value in (80.0, 95.0, 93.0)]
    assert verdicts(gathered(runs), LIMITS, SHAPE)[0][2:] == ["93% (80%-95%)", "yes"]


def test_a_start_is_judged_by_the_second_one() -> None:
    runs = [Run("start", "inferd", form, {"first start, s": 9.0, "second start, s": 3.5}) for form in ("bf16", "int8")]
    rows = verdicts(gathered(runs), [], SHAPE)
    assert [(row[1], row[3]) for row in rows] == [("<= 3", "NO"), ("<= 4", "yes")]


def test_the_report_names_every_engine_and_leaves_gaps_where_nothing_was_measured() -> None:
    runs = [
        Run("in process", "inferd", "int8", {"decode, tokens/s": 50.0, "load, s": 2.0}),
        Run("in process", "llama.cpp", "int8", {"decode, tokens/s": 40.0}),
    ]
    text = tables(runs, LIMITS, SHAPE)
    assert "| decode, tokens/s | 50.0 | 40.0 | 1.25 |" in text
    assert "| load, s | 2.00 | - | - |" in text
    assert "memory read, GB/s | 11.0 (10.0-12.0)" in text


def test_the_pictures_hold_everything_within_their_frame() -> None:
    figures = {"decode, tokens/s": 40.0, "prefill 512, tokens/s": 400.0}
    runs = [Run("in process", engine, form, figures) for engine in ("inferd", "llama.cpp") for form in FORMATS]
    for picture in (roofline_picture, bandwidth_picture):
        root = ElementTree.fromstring(picture(gathered(runs), LIMITS, SHAPE))
        for node in root.iter():
            for name, most in (("x", WIDTH), ("cx", WIDTH), ("y", HEIGHT), ("cy", HEIGHT)):
                assert 0 <= float(node.attrib.get(name, 0)) <= most
        names = {node.text for node in root.iter()}
        assert names >= ({"inferd bf16", "peers int4", "int8 roof"} if picture is roofline_picture else {"llama.cpp"})


def test_what_cannot_be_measured_is_said_in_a_sentence() -> None:
    places = Places(model=Path("/m"))
    for reason in (
        start_of("vllm", "bf16", places, 1),
        start_of("vllm", "int8", Places(model=Path("/m"), vllm=Path("/v")), 1),
        start_of("llama-server", "int4", places, 1),
        command_of("openvino", "int8", places, []),
        command_of("transformers", "int8", places, []),
    ):
        assert isinstance(reason, str)
        assert reason.endswith(".") or reason.endswith("=DIR.")


def test_a_quantised_server_is_started_with_its_setting() -> None:
    start = start_of("inferd", "int4", Places(model=Path("/m"), inferd_args=("--threads", "2")), 9000)
    assert not isinstance(start, str)
    assert start.command[start.command.index("--quantization") + 1] == "int4"
    assert start.command[-2:] == ["--threads", "2"]


def test_waves_are_handed_over_one_by_one() -> None:
    plan = jobs("openvino", long=True)
    command = command_of("inferd", "bf16", Places(model=Path("/m")), plan)
    assert not isinstance(command, str)
    waves = json.loads(command[4])
    assert len(waves) == sum(job.waves for job in plan)
    assert {(wave["prompt"], wave["answer"]) for wave in waves} >= {(4032, 32), (128, 64)}


def test_a_round_has_every_peer_of_its_suite_after_inferd() -> None:
    plan = planned(["bf16", "int8"], ["http", "in-process", "start"], ["vllm", "openvino", "vllm-in-process"])
    assert [str(item) for item in plan if item.form == "int8"] == [
        "http, int8, inferd",
        "http, int8, vllm",
        "in process, int8, inferd",
        "in process, int8, openvino",
        "in process, int8, vllm",
        "start, int8, inferd",
    ]
    assert loads_of("1:4,32:64") == [(1, 4), (32, 64)]


def test_the_forecast_counts_what_is_left_of_this_round_and_the_next_ones() -> None:
    plan = planned(["bf16"], ["http"], ["vllm"])
    runs = [Run("http", "inferd", "bf16", {}, took_s=60.0), Run("http", "vllm", "bf16", {}, took_s=180.0)]
    assert "about 12 min left (http 12)" in forecast(plan, 0, 0, 3, runs)
    assert "round 2 of 3, about 7 min left (http 7)" in forecast(plan, 1, 1, 3, runs)


def test_a_report_is_there_after_every_measurement_and_is_gone_on_with(tmp_path: Path) -> None:
    report = Report(tmp_path, SHAPE)
    report.limits += LIMITS
    report.left_out["http, bf16, vllm"] = "It did not | start."
    report.add(Run("http", "inferd", "bf16", {"ready, s": 2.0}, took_s=7.0))
    assert "| http, bf16, vllm | It did not / start. |" in (tmp_path / "peers.md").read_text()
    again = Report(tmp_path, SHAPE)
    again.read()
    assert (again.limits, again.runs) == (LIMITS, report.runs)
    assert Item("http", "bf16", "inferd").of(again.runs) == report.runs


SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def started() -> list[psutil.Process]:
    """The servers of these tests that are there. Other tests of this process may have children as well."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if SERVER in child.cmdline()]


def test_a_server_that_is_slow_to_start_is_stopped_between_rounds_and_ended_with_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(server: str, form: str, places: Places, port: int) -> Start:
        return Start([sys.executable, "-c", SERVER, str(port)], {}, "/health")

    seen: list[tuple[int, str]] = []

    def load(url: str, clients: int, requests: int) -> dict[str, float]:
        (child,) = started()
        seen.append((child.pid, child.status()))
        return {"tokens/s": 5.0}

    monkeypatch.setattr(servers, "start_of", start)
    monkeypatch.setattr(servers, "STOPPED_FROM_S", 0.0)
    monkeypatch.setattr(servers, "SPARE_BYTES", 0.0)
    with Servers(Places(model=tmp_path), free_port(2), tmp_path, load, [(1, 1)]) as hosts:
        first = hosts.measure("slow", "bf16", is_last=False)
        assert isinstance(first, Run)
        (child,) = started()
        stopped = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)  # a signal takes a moment
        assert stopped is not None
        assert child.status() == psutil.STATUS_STOPPED
        second = hosts.measure("slow", "bf16", is_last=True)
        assert isinstance(second, Run)
        assert started() == []
    assert "ready, s" in first.figures
    assert "ready, s" not in second.figures, "it was started once"
    assert second.figures["1 clients: tokens/s"] == 5.0
    assert seen[0][0] == seen[1][0]
    assert all(status != psutil.STATUS_STOPPED for _, status in seen)


def test_a_server_that_does_not_survive_being_stopped_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    def start(server: str, form: str, places: Places, port: int) -> Start:
        return Start([sys.executable, "-c", SERVER, str(port)], {}, "/health")

    def load(url: str, clients: int, requests: int) -> dict[str, float]:
        seen.append(url)
        if len(seen) == 2:
            raise PeerFailed("no answer")
        return {"tokens/s": 5.0}

    monkeypatch.setattr(servers, "start_of", start)
    monkeypatch.setattr(servers, "STOPPED_FROM_S", 0.0)
    monkeypatch.setattr(servers, "SPARE_BYTES", 0.0)
    with Servers(Places(model=tmp_path), free_port(2), tmp_path, load, [(1, 1)]) as hosts:
        hosts.measure("slow", "bf16", is_last=False)
        again = hosts.measure("slow", "bf16", is_last=True)
    assert isinstance(again, Run)
    assert "ready, s" in again.figures
    assert seen[0] == seen[1] != seen[2]
    assert started() == []


def test_a_server_whose_load_failed_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(server: str, form: str, places: Places, port: int) -> Start:
        return Start([sys.executable, "-c", SERVER, str(port)], {}, "/health")

    def load(url: str, clients: int, requests: int) -> dict[str, float]:
        raise PeerFailed("no answer")

    monkeypatch.setattr(servers, "start_of", start)
    with Servers(Places(model=tmp_path), free_port(2), tmp_path, load, [(1, 1)]) as hosts:
        with pytest.raises(PeerFailed, match="no answer"):
            hosts.measure("slow", "bf16", is_last=False)
        assert started() == []


def test_transformers_begins_with_what_is_short() -> None:
    plan = jobs("transformers", long=True)
    assert [(job.prompt, job.clients, job.waves) for job in plan] == [
        (512, 1, 1),
        (128, 1, 1),
        (128, 8, 1),
        (128, 32, 1),
    ]
    command = command_of("transformers", "bf16", Places(model=Path("/m")), plan)
    assert not isinstance(command, str)
    assert command[command.index("--seconds") + 1] == "100.0"
