"""The device that computed, in the span of a call."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from tests.observe.devices.test_device_series import GPU, write
from tests.observe.traces.collector import attributes
from tests.worker.watching import until_now

from inferd.config import Config, DevicesConfig, ModelConfig
from inferd.events import HttpServed
from inferd.gateway.operations import TEXT_COMPLETION
from inferd.observe.devices import Devices, Reading
from inferd.observe.devices.span_attributes import device_attributes
from inferd.observe.traces.conventions import TABLE
from inferd.observe.traces.spans import spans_of


def test_a_gpu_has_the_names_of_the_conventions_for_what_it_tells() -> None:
    gpu = Reading(device="gpu0", kind="gpu", at=0.0, name="H100", uuid="GPU-1", duty=0.5, power_w=0.0, energy_j=7.0)
    told = device_attributes(gpu)
    assert told == {"hw.id": "GPU-1", "hw.type": "gpu", "hw.name": "H100", "hw.gpu.utilization": 0.5, "hw.power": 0.0}
    assert told.keys() <= {row.key for row in TABLE}


def test_a_processor_has_no_attributes_of_gpus_and_no_device_has_none() -> None:
    cpu = Reading(device="package-0", kind="cpu", at=0.0, duty=0.5, memory_used_bytes=3, temperature_c=40)
    assert device_attributes(cpu) == {"hw.id": "package-0", "hw.type": "cpu", "hw.temperature": 40}
    assert device_attributes(None) == {}


def test_the_span_of_a_call_names_the_device_of_its_model(tmp_path: Path) -> None:
    file = write(tmp_path / "devices.json", devices=[GPU])
    config = Config(
        devices=DevicesConfig(simulated=str(file), interval_s=0.05),
        models={"here": ModelConfig(source="tiny", device="cpu"), "far": ModelConfig(source="tiny", device="cuda:7")},
    )
    devices = Devices(config.devices)
    devices.configure(config)
    devices.start()
    try:
        until_now(lambda: devices.of_model("here") is not None, "it was read", 10)
        found = {}
        for model in ("here", "far"):
            event = HttpServed(
                request_id="r",
                method="POST",
                route="/v1/completions",
                operation=TEXT_COMPLETION,
                status=200,
                duration_s=0.1,
                model=model,
                trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            )
            fields = spans_of(event, 0.0, lambda name: device_attributes(devices.of_model(name)))
            (span,) = ScopeSpans.FromString(b"".join(fields)).spans
            found[model] = {key: value for key, value in attributes(span).items() if key.startswith("hw.")}
    finally:
        devices.stop()
    assert found["far"] == {}
    assert found["here"] == {
        "hw.id": "SIM-gpu0",
        "hw.type": "gpu",
        "hw.name": "simulated",
        "hw.gpu.utilization": 0.8,
        "hw.gpu.memory.usage": 60_000_000_000,
        "hw.temperature": 61.0,
        "hw.power": 200.0,
    }
