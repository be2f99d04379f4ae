"""The configuration's section ``tracing`` and OpenTelemetry's variables above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.config import TracingConfig, load_config
from inferd.errors import ConfigError
from inferd.observe.traces.settings import Settings, settings_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
UNIQUE = "0123456789abcdef01234567"


def settings(env: dict[str, str], config: TracingConfig = TracingConfig()) -> Settings:
    found = settings_of(config, env)
    assert found.settings is not None
    assert found.warnings == ()
    return found.settings


def warned(env: dict[str, str]) -> tuple[Settings, str]:
    found = settings_of(TracingConfig(), ENDPOINT | env)
    assert found.settings is not None
    (warning,) = found.warnings
    return found.settings, warning


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert settings_of(TracingConfig(), {}) == (None, ())
    assert settings_of(TracingConfig(), {"OTEL_TRACES_SAMPLER": "always_on"}) == (None, ())


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_environment_turns_traces_off(off: dict[str, str]) -> None:
    assert settings_of(TracingConfig(endpoint="http://there"), ENDPOINT | off) == (None, ())


def test_the_path_of_traces_is_added_to_the_base_and_not_to_the_endpoint_of_traces() -> None:
    assert settings(ENDPOINT).url == "http://collector:4318/v1/traces"
    assert settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c/base/"}).url == "http://c/base/v1/traces"
    both = ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/in"}
    assert settings(both).url == "https://c/in"
    assert settings({"OTEL_TRACES_EXPORTER": "otlp"}).url == "http://localhost:4318/v1/traces"


def test_the_environment_wins_over_the_file() -> None:
    config = TracingConfig(endpoint="http://file:1", timeout_s=3, compression="none", service_name="file")
    assert settings({}, config)[:1] == ("http://file:1/v1/traces",)
    own = settings({}, config)
    assert (own.timeout_s, own.is_compressed, dict(own.resource)["service.name"]) == (3.0, False, "file")
    env = ENDPOINT | {
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "env",
    }
    found = settings(env, config)
    assert (found.url, found.timeout_s, found.is_compressed) == ("http://collector:4318/v1/traces", 2.5, True)
    assert dict(found.resource)["service.name"] == "env"


def test_headers_and_resource_attributes_are_decoded() -> None:
    found = settings(
        ENDPOINT
        | {
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, x-team = blue ,",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod,service.name=other",
        }
    )
    assert found.headers == (("api-key", "a b"), ("x-team", "blue"))
    resource = dict(found.resource)
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("other", "prod")
    traces = {"OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "b=2"}
    assert settings(ENDPOINT | traces).headers == (("b", "2"),)


def test_headers_come_from_a_variable_or_a_file_and_are_not_repeated_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("authorization=Bearer%20secret\n")
    here = "http://c"
    expected = (("authorization", "Bearer secret"),)
    assert settings({}, TracingConfig(endpoint=here, headers_file=str(file))).headers == expected
    config = TracingConfig(endpoint=here, headers_env="TRACE_HEADERS")
    assert settings({"TRACE_HEADERS": "authorization=Bearer%20secret"}, config).headers == expected
    with pytest.raises(ConfigError, match="TRACE_HEADERS is not set"):
        settings_of(config, {})
    with pytest.raises(ConfigError, match="name=value") as refused:
        settings_of(config, {"TRACE_HEADERS": "sk-secret"})
    assert "sk-secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        settings_of(TracingConfig(endpoint=here, headers_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_another_protocol_is_named_with_its_remedy_and_sends_nothing(protocol: str) -> None:
    found = settings_of(TracingConfig(), ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert found.settings is None
    assert protocol in found.warnings[0]
    assert "http/protobuf" in found.warnings[0]
    of_traces = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    settings(ENDPOINT | of_traces)


@pytest.mark.parametrize(
    ("env", "in_no_parent", "in_unsampled_parent"),
    [
        ({}, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, True, True),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, False, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"}, True, True),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, True, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, False, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False, False),
    ],
)
def test_samplers(env: dict[str, str], in_no_parent: bool, in_unsampled_parent: bool) -> None:
    from inferd.observe.traces.context import Parent, is_sampled

    sampler = settings(ENDPOINT | env).sampler
    assert is_sampled(sampler.trace(None, UNIQUE)) == in_no_parent
    assert is_sampled(sampler.trace(Parent("a" * 32, "b" * 16, 0), UNIQUE)) == in_unsampled_parent


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_SDK_DISABLED", "yes"),
        ("OTEL_RESOURCE_ATTRIBUTES", "rubbish"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_an_invalid_variable_is_reported_and_ignored(variable: str, value: str) -> None:
    found, warning = warned({variable: value})
    assert variable in warning
    assert found.url == "http://collector:4318/v1/traces"


def test_the_bounds_of_the_queue_are_obeyed() -> None:
    found = settings(
        ENDPOINT
        | {
            "OTEL_BSP_MAX_QUEUE_SIZE": "10",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100",
            "OTEL_BSP_SCHEDULE_DELAY": "250",
            "OTEL_BSP_EXPORT_TIMEOUT": "7000",
        }
    )
    assert (found.max_queue, found.max_batch, found.delay_s, found.give_up_s) == (10, 10, 0.25, 7.0)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"endpoint": "collector:4317"}, "tracing.endpoint"),
        ({"endpoint": "http://user:secret@c"}, "no credentials"),
        ({"endpoint": "http://c", "sample_ratio": 1.5}, "tracing.sample_ratio"),
        ({"headers_env": "A", "headers_file": "b"}, "keep one of them"),
    ],
)
def test_an_invalid_setting_of_the_file_stops_the_start(section: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        load_config(None, {}, {"tracing": section, "models": {"chat": {"source": "demo"}}})
    assert "secret" not in str(refused.value)


def test_a_certificate_that_is_missing_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        settings_of(TracingConfig(), ENDPOINT | {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere/ca.pem"})
