"""KEDA's external scaler: its client in its order, what is refused, and what is answered where nothing is known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import grpc
import pytest
from grpc import StatusCode
from tests.autoscale.test_autoscaler import Bench
from tests.gateway.fakes import FakeControl, FakeDoor
from tests.gateway.grpc.keda import Keda, generated
from tests.gateway.grpc.messages import pool
from tests.gateway.grpc.running import GrpcRunning, PredictingRouter, running
from tests.gateway.grpc.test_grpc_protocol import compare

from inferd.autoscale.controller import NeedReport, ScalingReport
from inferd.config import Config, ModelConfig, ScalingConfig, ServerConfig
from inferd.config.routing import ScalingTargetConfig
from inferd.gateway.grpc.scaler import MAX_AGE_S, value_of
from inferd.tenancy.principal import Principal, Scope

METRICS: frozenset[Scope] = frozenset(("metrics",))
KEYS = {
    "k-metrics": Principal(key_id="a", scopes=METRICS),
    "k-other": Principal(key_id="b", scopes=METRICS, models=("other",)),
    "k-infer": Principal(key_id="c", scopes=frozenset(("infer", "models"))),
}
SCALING = ScalingConfig(min=1, max=2, target=ScalingTargetConfig(in_flight=4.0))
BUSY = {"waiting": 3, "in_flight": 5, "busy": 1, "accepted": 8}


class Site:
    """A listener whose autoscaler has looked at ``chat`` for as long as the test says."""

    def __init__(self, server: GrpcRunning, bench: Bench) -> None:
        self.server = server
        self.bench = bench

    def look(self, seconds: float, **demand: object) -> None:
        asyncio.run(self.bench.look(seconds, **demand))


class Control(FakeControl):
    """With the real controller, which looks when the test says."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.scaling = bench.scaler  # type: ignore[assignment]


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[GrpcRunning, Control]]:
    models = {"chat": ModelConfig(source="demo", scaling=SCALING), "other": ModelConfig(source="demo")}
    config = Config(server=ServerConfig(port=0, grpc_port=0, grace_s=1), models=models)
    control = Control(Bench(SCALING))
    with running(PredictingRouter("chat", "other"), config, control=control, door=FakeDoor(KEYS)) as server:
        yield server, control


@pytest.fixture
def site(listening: tuple[GrpcRunning, Control]) -> Site:
    server, control = listening
    server.router.draining = False
    bench = Bench(SCALING)
    control.scaling = bench.scaler  # type: ignore[assignment]
    return Site(server, bench)


@pytest.fixture
def channel(site: Site) -> Iterator[grpc.Channel]:
    with site.server.channel() as opened:
        yield opened


def trigger(channel: grpc.Channel, **metadata: str) -> Keda:
    return Keda(channel, **{"model": "chat", "keyFromEnv": "k-metrics", **metadata})


def refusal(ask: object, code: StatusCode) -> str:
    assert callable(ask)
    with pytest.raises(grpc.RpcError) as failed:
        ask()
    assert failed.value.code() == code, failed.value.details()
    return str(failed.value.details())


def test_the_protocol_is_kedas_but_for_the_optional_method() -> None:
    messages, _ = generated()
    ours = pool().FindFileByName("externalscaler.proto")
    theirs = messages.DESCRIPTOR
    assert set(ours.message_types_by_name) == set(theirs.message_types_by_name)
    for name, message in ours.message_types_by_name.items():
        compare(message, theirs.message_types_by_name[name])
    (service,), (known,) = ours.services_by_name.values(), theirs.services_by_name.values()
    assert service.full_name == known.full_name
    optional = {method.name for method in known.methods} - {method.name for method in service.methods}
    assert optional == {"StreamMetricSpec"}


def test_kedas_order_gets_the_load_of_a_minute_and_the_target_of_a_pod(site: Site, channel: grpc.Channel) -> None:
    site.look(20.0, **BUSY)
    answers = trigger(channel).ask()
    assert (answers.metric, answers.is_active) == ("inferd-load", True)
    assert answers.target == 8.0, "four requests of each replica, and two replicas in a pod"
    assert answers.value == pytest.approx(8.0)
    assert trigger(channel, target="2.5").ask().target == 2.5
    assert trigger(channel, metric="waiting", target="1").ask()[::2] == ("inferd-waiting", 3.0)
    replicas = trigger(channel, metric="replicas").ask()
    assert (replicas.metric, replicas.target, replicas.value) == ("inferd-replicas", 1.0, 2.0)


def test_a_quiet_model_is_active_until_keda_has_asked_once_more(site: Site, channel: grpc.Channel) -> None:
    site.look(20.0, idle_s=12.0)
    assert trigger(channel).ask() == ("inferd-load", 8.0, 0.0, True)
    site.look(1.0, idle_s=31.0)
    assert trigger(channel).ask() == ("inferd-load", 8.0, 0.0, False)


def test_what_was_not_observed_is_an_error_and_never_0(site: Site, channel: grpc.Channel) -> None:
    keda = trigger(channel)
    assert keda.spec().targetSizeFloat == 8.0, "the target needs no observation"
    for ask in (lambda: keda.value_call("inferd-load"), keda.is_active):
        assert "not been observed for long enough" in refusal(ask, StatusCode.UNAVAILABLE)
    site.look(2.0, **BUSY)
    assert "ask again in 10 s" in refusal(lambda: keda.value_call("inferd-load"), StatusCode.UNAVAILABLE)
    assert keda.is_active(), "requests are here, whatever their mean is"


def test_the_last_known_value_is_answered_with_its_age_and_refused_when_it_is_old(
    site: Site, channel: grpc.Channel
) -> None:
    site.look(20.0, **BUSY)
    keda = trigger(channel)
    fresh, trailers = keda.value_call("inferd-load")
    assert (fresh.metricValueFloat, trailers["x-inferd-age"]) == (pytest.approx(8.0), "0.0")
    site.bench.now += 60.0  # the controller does not look
    old, trailers = keda.value_call("inferd-load")
    assert (old.metricValueFloat, trailers["x-inferd-age"]) == (pytest.approx(8.0), "60.0")
    site.look(2.0, waiting=0, in_flight=0, busy=0)  # it looks again, and has no mean of a minute yet
    old, trailers = keda.value_call("inferd-load")
    assert old.metricValueFloat == pytest.approx(8.0)
    assert float(trailers["x-inferd-age"]) == pytest.approx(62.0)
    site.bench.now += MAX_AGE_S
    assert "ago; ask another server" in refusal(lambda: keda.value_call("inferd-load"), StatusCode.UNAVAILABLE)


def test_a_server_that_leaves_does_not_answer_with_its_falling_load(site: Site, channel: grpc.Channel) -> None:
    site.look(20.0, **BUSY)
    site.server.router.draining = True
    assert "ask another one" in refusal(trigger(channel).spec, StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({"model": "no-such"}, StatusCode.NOT_FOUND, '"no-such" does not exist; this server has: chat, other'),
        ({"model": ""}, StatusCode.INVALID_ARGUMENT, "metadata.model is missing"),
        ({"model": "other"}, StatusCode.INVALID_ARGUMENT, "write models.other.scaling"),
        ({"metric": "cpu"}, StatusCode.INVALID_ARGUMENT, 'metadata.metric is "cpu"; it is one of load, waiting'),
        ({"metric": "waiting"}, StatusCode.INVALID_ARGUMENT, "metadata.target is missing"),
        ({"target": "0"}, StatusCode.INVALID_ARGUMENT, 'metadata.target is "0"; it is a number above 0'),
        ({"target": "inf"}, StatusCode.INVALID_ARGUMENT, "a number above 0"),
        ({"target": "1e19"}, StatusCode.INVALID_ARGUMENT, "a number above 0, and 1,000,000,000 at most"),
        ({"target": "many"}, StatusCode.INVALID_ARGUMENT, 'metadata.target is "many"'),
        ({"keyFromEnv": ""}, StatusCode.UNAUTHENTICATED, "API key is needed"),
        ({"keyFromEnv": "k" * 600}, StatusCode.UNAUTHENTICATED, "API key is needed"),
        ({"keyFromEnv": "k-infer"}, StatusCode.PERMISSION_DENIED, "scope 'metrics'"),
        ({"keyFromEnv": "k-other"}, StatusCode.NOT_FOUND, "this server has: other"),
    ],
)
def test_a_trigger_that_does_not_fit_is_refused_by_name(
    site: Site, channel: grpc.Channel, metadata: dict[str, str], code: StatusCode, words: str
) -> None:
    site.look(20.0, **BUSY)
    keda = trigger(channel, **metadata)
    for ask in (keda.spec, lambda: keda.value_call("inferd-load"), keda.is_active):
        assert words in refusal(ask, code)
    assert words in refusal(lambda: next(keda.calls.StreamIsActive(keda.reference, timeout=20)), code)


def test_the_key_may_be_in_the_calls_metadata_as_for_all_calls(site: Site, channel: grpc.Channel) -> None:
    site.look(20.0, **BUSY)
    keda = trigger(channel, keyFromEnv="")
    for header in (("authorization", "Bearer k-metrics"), ("x-api-key", "k-metrics")):
        assert keda.calls.IsActive(keda.reference, timeout=20, metadata=(header,)).result
    assert trigger(channel, keyFromEnv="", key="k-metrics").is_active()


def test_other_metrics_and_messages_are_refused(site: Site, channel: grpc.Channel) -> None:
    site.look(20.0, **BUSY)
    keda = trigger(channel)
    assert "what GetMetricSpec names" in refusal(lambda: keda.value_call("inferd-waiting"), StatusCode.INVALID_ARGUMENT)
    empty = keda.messages.GetMetricsRequest(metricName="inferd-load")
    assert "scaledObjectRef" in refusal(lambda: keda.calls.GetMetrics(empty, timeout=20), StatusCode.INVALID_ARGUMENT)
    stream = keda.calls.StreamMetricSpec(keda.reference, timeout=20)
    refusal(lambda: next(stream), StatusCode.UNIMPLEMENTED)
    raw = channel.unary_unary("/externalscaler.ExternalScaler/IsActive", bytes, bytes)
    told = refusal(lambda: raw(b"\xff\xff", timeout=20), StatusCode.INVALID_ARGUMENT)
    assert "externalscaler.ScaledObjectRef" in told


def test_a_stream_says_the_activity_at_once_and_each_change(site: Site, channel: grpc.Channel) -> None:
    site.look(20.0, idle_s=40.0)
    keda = trigger(channel)
    stream = keda.calls.StreamIsActive(keda.reference, timeout=60)
    assert next(stream).result is False
    site.look(0.25, waiting=1, idle_s=0.0)
    assert next(stream).result is True
    site.look(120.0, waiting=0, idle_s=40.0)
    assert next(stream).result is False
    stream.cancel()


def test_streams_end_when_the_server_stops() -> None:
    bench = Bench(SCALING)
    asyncio.run(bench.look(20.0))
    config = Config(server=ServerConfig(port=0, grpc_port=0), models={"chat": ModelConfig(source="demo")})
    with running(PredictingRouter("chat"), config, control=Control(bench)) as server, server.channel() as channel:
        keda = Keda(channel, model="chat", target="1")
        stream = keda.calls.StreamIsActive(keda.reference, timeout=60)
        next(stream)
        server.begin_stop()
        assert "shutting down" in refusal(lambda: next(stream), StatusCode.UNAVAILABLE)
        server.ended(30)


def test_replicas_are_what_is_needed_and_not_what_fits_here() -> None:
    needs = [NeedReport(name="backlog", replicas=7, text=""), NeedReport(name="duty", replicas=2, text="")]
    report = ScalingReport(model="chat", min=1, max=5, desired=2, age_s=0.5, needs=needs)
    assert value_of(report, "replicas").value == 5.0, "the limit of memory is not one of machines; scaling.max is"
    assert value_of(ScalingReport(model="chat", min=0, max=5, age_s=0.5), "replicas").value == 0.0
    assert not math.isnan(value_of(report, "waiting").value)
