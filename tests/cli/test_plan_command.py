"""``inferd plan`` from outside: what it prints, what it takes, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import yaml

from inferd import models
from inferd.cli.main import main
from inferd.planning.sizing import Sizing
from inferd.planning.tables import bundled_devices

DEMO = models.path("demo")
Said = Callable[[], tuple[str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """What was printed and what was complained about since the last call, with every blank as one."""
    monkeypatch.setenv("COLUMNS", "80")

    def read() -> tuple[str, str]:
        out, err = capsys.readouterr()
        return " ".join(out.split()), " ".join(err.split())

    return read


def test_a_plan_says_what_to_take_and_that_parallel_is_not_served(said: Said) -> None:
    assert main(["plan", "70b"]) == 0
    out, _ = said()
    assert "Llama 3 70B: 70.55 billion parameters; 327,680 bytes of KV cache a token." in out
    assert "fp16 141.1 21.5 0.67 0.28 42.3 204.9" in out
    assert "Take: 1 x h200 in fp8" in out
    assert "inferd divides a replica among processes on CPUs, and on GPUs not yet" in out
    assert "NVIDIA A100 SXM 80 GB has no FP8 units" in out
    assert "What if: twice the tokens: 1 x" in out
    assert "(2026-09-25)" in out
    assert "Speeds are estimates" in out
    assert main(["plan", str(DEMO)]) == 0
    assert "million parameters" in said()[0]


def test_no_line_of_the_tables_is_wider_than_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "405b", "--format", "fp16,fp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rules = [line for line in lines if "─" in line]
    assert len(rules) == 2
    assert max(map(len, rules)) <= 80, "a table is as wide as its rule"


def test_json_is_the_whole_plan_and_comes_back(said: Said) -> None:
    assert main(["plan", "13B", "--devices", "h100x8,l40s", "--requests", "32", "--tokens", "2048", "--json"]) == 0
    found = msgspec.json.decode(said()[0].encode(), type=Sizing)
    assert {one.device for one in found.choices} == {"h100", "l40s"}
    assert found.formats[0].need.kv_bytes == 53_687_091_200
    assert found.demand.load.answer == 512


def test_a_page_has_pictures_and_loads_nothing(tmp_path: Path, said: Said) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "8b", "--html", str(page)]) == 0
    text = page.read_text()
    assert f"The page is in {page}" in said()[0].replace("\n", "")
    assert not re.search(r"(src|href)=|@import|url\(", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 5, "the memory of four formats, and speeds"
    for picture in pictures:
        bars = ElementTree.fromstring(picture).findall(".//{http://www.w3.org/2000/svg}rect")
        assert len(bars) >= 6
        assert all(float(bar.get("x", "0")) + float(bar.get("width", "0")) <= 860 for bar in bars)


def test_nothing_holds_it_is_an_exit_code_and_a_remedy(said: Said) -> None:
    assert main(["plan", "405b", "--devices", "l4x8"]) == 1
    out, err = said()
    assert "Take fewer bits (--format)" in err
    assert "l4 in fp16: needs 1,089 GB, which 8 devices of 24 GB do not hold" in out


def test_a_folder_a_config_and_the_bundled_model_are_planned(tmp_path: Path, said: Said) -> None:
    assert main(["plan", str(DEMO), "--requests", "2", "--tokens", "64"]) == 0
    assert "Take: 1 x l4 in fp16" in said()[0]
    assert main(["plan", "demo", "--json"]) == 0
    demo = msgspec.json.decode(said()[0].encode(), type=Sizing)
    assert "headers of its weights" in demo.source
    config = tmp_path / "inferd.yaml"
    config.write_text("models:\n  chat: {source: demo}\n")
    assert main(["plan", "chat", "--config", str(config), "--json"]) == 0
    chat = msgspec.json.decode(said()[0].encode(), type=Sizing)
    assert (chat.model, chat.formats) == ("chat", demo.formats)
    assert main(["plan", "other", "--config", str(config)]) == 1
    assert "has no model 'other'; it has chat." in said()[1]


def test_a_config_alone_is_planned_without_weights(tmp_path: Path, said: Said) -> None:
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    words = ["--requests", "2", "--tokens", "64", "--json"]
    assert main(["plan", str(tmp_path), *words]) == 0
    alone = msgspec.json.decode(said()[0].encode(), type=Sizing)
    assert main(["plan", str(DEMO), *words]) == 0
    whole = msgspec.json.decode(said()[0].encode(), type=Sizing)
    assert alone.formats == whole.formats
    assert alone.num_parameters == whole.num_parameters


def test_a_trace_gives_lengths_and_a_rate(tmp_path: Path, said: Said) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * at, "input_length": 800, "output_length": 200} for at in range(101)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert main(["plan", "8b", "--trace", str(trace), "--devices", "l40s", "--format", "fp8", "--json"]) == 0
    found = msgspec.json.decode(said()[0].encode(), type=Sizing)
    assert found.trace is not None
    assert (found.demand.load.tokens, found.demand.load.answer) == (1000, 200)
    assert found.demand.per_second == pytest.approx(10.1)
    assert found.choices[0].replicas > 1
    assert main(["plan", "8b", "--trace", str(trace)]) == 0
    assert "Trace: 101 requests, 10.1 a second; prompts of 800 and answers of 200 tokens" in said()[0]


def test_own_devices_and_prices_win(tmp_path: Path, said: Said) -> None:
    devices, prices = tmp_path / "devices.yaml", tmp_path / "prices.yaml"
    own = {
        "title": "Ours", "vendor": "other", "memory_gb": 1000, "bandwidth_gb_s": 1000, "tflops": {"fp16": 100},
        "source": "us",
    }  # fmt: skip
    devices.write_text(yaml.safe_dump({"devices": {"ours": own}}))
    prices.write_text(
        yaml.safe_dump({"date": "2026-11-01", "source": "our contract", "currency": "EUR", "per_hour": {"ours": 2}})
    )
    words = ["--devices-file", str(devices), "--prices", str(prices), "--devices", "ours"]
    assert main(["plan", "70b", *words]) == 0
    out, _ = said()
    assert "2.00 EUR an hour, 1,460 a month" in out
    assert "our contract (2026-11-01)" in out
    assert "inferd was never run on this device" in out


def write(path: Path, document: object) -> str:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return str(path)


H100 = msgspec.to_builtins(bundled_devices()["h100"])
PRICES = {"date": "2026-11-01", "source": "us", "per_hour": {"h100": 2.0}}


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["70b", "--devices", "h900"], 1, "The device 'h900' is not known; known are l4, l40s, a100,"),
        (["70b", "--devices", "h100x0"], 1, "'h100x0' asks for 0 devices; take 1 to 4096."),
        (["70b", "--devices", "h100,h100x2"], 1, "is named twice; write h100x8 for eight."),
        (["70b", "--devices", " , "], 2, "--devices names none"),
        (["70b", "--requests", "0"], 2, "0 is not in the range"),
        (["70b", "--answer", "2048"], 2, "--answer 2048 leaves no prompt of --tokens 2048"),
        (["70b", "--rate", "nan"], 2, "'nan' is not a number."),
        (["70b", "--busy", "1e-320"], 2, "is not in the range 0.01<=x<=1"),
        (["70b", "--trace", "a.jsonl", "--answer", "9"], 2, "--answer is given, and --trace has the lengths"),
        (["70b", "--trace", "a.jsonl", "--tokens", "9"], 2, "--tokens is given, and --trace has the lengths"),
        (["70b", "--format", "fp12"], 2, "--format 'fp12' is none of fp32, fp16, fp8, int8, int4."),
        (["9b"], 1, "'9b' is no model: take a shape (7b, 8b, 13b, 70b, 405b), a folder,"),
        (["./nowhere"], 1, "There is no file or folder ./nowhere"),
        (["70b", "--trace", "none.jsonl"], 1, "The trace none.jsonl cannot be read: No such file or directory."),
        (["8b", "--html", "/nowhere/plan.html"], 1, "/nowhere/plan.html cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_remedy(words: list[str], code: int, complaint: str, said: Said) -> None:
    assert main(["plan", *words]) == code
    out, err = said()
    assert complaint in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("flag", "document", "complaint"),
    [
        ("--prices", {**PRICES, "per_hour": {"h100": -1}}, "per_hour.h100: -1 is not a number from 0 to 1,000,000."),
        ("--prices", {**PRICES, "per_hour": {"h100": "x"}}, "per_hour.h100: 'x' is not a number from 0"),
        ("--prices", {"source": "us", "per_hour": {}}, "date: missing; give a value."),
        ("--prices", {**PRICES, "discount": 1}, "discount: no such field; allowed: date, source"),
        ("--prices", {**PRICES, "per_hour": {"h100": math.nan}}, "per_hour.h100: nan is not a number from 0"),
        ("--prices", "per_hour: [", "is not valid YAML"),
        ("--prices", "- 1", "holds no sections; it starts with 'date:'."),
        (
            "--devices-file",
            {"devices": {"x": {**H100, "memory_gb": 0}}},
            "devices.x.memory_gb: 0 is not a number, above 0",
        ),
        ("--devices-file", {"devices": {"x": {**H100, "tflops": {}}}}, "x.tflops is empty; give at least fp16"),
        ("--devices-file", {"devices": {"X Y": H100}}, "'X Y' is no name of a device"),
        ("--devices-file", {"devices": {"x": {**H100, "vram": 1}}}, "devices.x.vram: no such field; allowed: title"),
        (
            "--devices-file",
            {"devices": {"x": {**H100, "overlaps": {"fp16": 2}}}},
            "devices.x.overlaps.fp16: 2 is not a number from 0 to 1.",
        ),
        ("--devices-file", {"devices": {"x": {**H100, "tflops": {"fp61": 1}}}}, "fp61: no such field; did you mean"),
        ("--trace", '{"timestamp": 1, "input_length": 1e300, "output_length": 3}', "a request has 1e+300 tokens"),
        ("--trace", '{"timestamp": 1, "output_length": 3}', "a request has no 'input_length'"),
        ("--trace", '{"timestamp": 1, "input_length": -3}', "'input_length' is '-3', not a number of 0 or more"),
        ("--trace", "", "The trace has no request"),
    ],
)
def test_a_bad_file_is_told_by_its_field(
    flag: str, document: object, complaint: str, tmp_path: Path, said: Said
) -> None:
    assert main(["plan", "8b", flag, write(tmp_path / "file.yaml", document)]) == 1
    assert complaint in said()[1]


def test_a_date_needs_no_quotes(tmp_path: Path, said: Said) -> None:
    prices = write(tmp_path / "prices.yaml", "date: 2026-11-01\nsource: us\nper_hour: {h100: 2}\n")
    assert main(["plan", "8b", "--devices", "h100", "--prices", prices]) == 0
    assert "Prices: us (2026-11-01)" in said()[0]


def test_a_folder_that_is_no_model_is_told(tmp_path: Path, said: Said) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    assert "config.json does not exist. Give the folder of a Hugging Face checkpoint." in said()[1]
    config = json.loads((DEMO / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path)]) == 1
    assert "but has none, and their layout is in the headers" in said()[1]


def test_this_machine_is_measured_when_it_is_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferd.native import roofline

    monkeypatch.setattr(roofline, "_BYTES", 1)  # one matrix: the speed does not matter here
    monkeypatch.setattr(roofline, "_MANY_ROWS", 2)
    monkeypatch.setattr(roofline, "_REPEATS", 1)
    words = ["--devices", "this", "--requests", "2", "--tokens", "64"]
    assert main(["plan", str(DEMO), *words, "--json"]) == 0
    out, err = said()
    assert "Measuring this machine" in err
    found = msgspec.json.decode(out.encode(), type=Sizing)
    fitting = {one.form: one for one in found.choices if one.layout is not None}
    assert set(fitting) == {"fp16", "int8", "int4"}, "a processor has no FP8"
    assert all(one.speed is not None and one.speed.tokens_per_s > 0 for one in fitting.values())
    assert fitting["int4"].notes == ()
