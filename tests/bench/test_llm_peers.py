"""The comparison's arithmetic: what a run says of an engine, of the goals and of the machine's limits."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.chart import HEIGHT, WIDTH
from bench.llm_peers.inprocess import Job, command_of, figures_of, jobs
from bench.llm_peers.servers import Places, start_of
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


def test_figures_of_waves_are_rates() -> None:
    asked = [(Job(128, 64, 8, 2), 4.0), (Job(128, 64, 8, 2), 8.0), (Job(128, 64, 1, 1), 2.0), (Job(128, 1, 1, 1), 0.5)]
    found = figures_of(3.0, [*asked, (Job(512, 1, 1, 1), 2.0)])
    assert found["8 clients: tokens/s"] == 8 * 64 / 6.0
    assert found["1 clients: tokens/s"] == 32.0
    assert found["decode, tokens/s"] == 63 / 1.5
    assert found["prefill 512, tokens/s"] == 256.0
    assert "decode at 4096, tokens/s" not in found


def test_a_goal_is_judged_by_the_median_and_the_best_peer() -> None:
    runs = [Run("http", "inferd", "bf16", {"8 clients: tokens/s": value}) for value in (100.0, 130.0, 120.0)]
    runs += [Run("http", "slow", "bf16", {"8 clients: tokens/s": 10.0})]
    runs += [Run("http", "fast", "bf16", {"8 clients: tokens/s": value}) for value in (96.0, 90.0, 100.0)]
    assert verdicts(gathered(runs), [], SHAPE) == [["http, bf16, 8 clients", ">= 1.25", "1.25", "yes"]]
    runs[2] = Run("http", "inferd", "bf16", {"8 clients: tokens/s": 110.0})
    assert verdicts(gathered(runs), [], SHAPE)[0][3] == "NO"


def test_efficiency_is_the_share_of_limits_measured_in_the_same_run() -> None:
    figures = {"decode, tokens/s": 4000.0, "prefill 512, tokens/s": 50_000.0, "decode at 4096, tokens/s": 2000.0}
    rows = verdicts(gathered([Run("in process", "inferd", "bf16", figures)]), LIMITS, SHAPE)
    assert [row[2] for row in rows] == ["79%", "73%", "121%"]
    assert [row[3] for row in rows] == ["NO", "NO", "yes"]


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
    plan = jobs(long=True)
    command = command_of("inferd", "bf16", Places(model=Path("/m")), plan)
    assert not isinstance(command, str)
    waves = json.loads(command[4])
    assert len(waves) == sum(job.waves for job in plan)
    assert {(wave["prompt"], wave["answer"]) for wave in waves} >= {(4032, 32), (128, 64)}
