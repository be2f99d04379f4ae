"""What the operator is told is what the router knows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import msgspec
from tests.server_process import running
from tests.worker.watching import until_now

from inferd.app.actions import model_report
from inferd.config import Config, ModelConfig, VersionsConfig
from inferd.gateway.control import ModelReport, ReplicaReport
from inferd.observe.startup import LoadReport, Phase
from inferd.router.status import ModelStatus, ReplicaStatus
from inferd.types import MemoryPlan, ModelInfo

REPLICA = ReplicaStatus(
    index=1,
    kind="remote",
    name="https://far",
    state="unreachable",
    in_flight=2,
    outstanding=3,
    breaker="open",
    ejected=False,
    rss_bytes=4,
    weight=5.0,
    region="eu",
    role="decode",
    layout="2 ranks (tensor 2 x pipeline 1)",
    is_fallback=True,
    restarts=6,
    pid=7,
    artifact="0123456789ab",
    detail="It does not answer.",
    node="far",
    rank_nodes=("one", "two"),
)
INFO = ModelInfo(
    memory=MemoryPlan(weights_bytes=10, kv_bytes=5, activation_bytes=3, process_bytes=2),
    name="m",
    source="m",
    architecture="LlamaForCausalLM",
    dtype="float32",
    max_model_len=8,
    vocab_size=9,
    num_parameters=10,
    num_blocks=11,
    block_size=12,
    max_num_seqs=13,
    num_threads=2,
    cores=(0, 3),
    not_batched="its first dimension is fixed",
    answer_format="hermes, a call parsed back",
    verified="digest tree-sha256:0",
)
VERSIONS = VersionsConfig(aliases={"stable": 3, "old": 2}, weights={"3": 1.0, "2": 3.0})
CONFIG = Config(models={"m": ModelConfig(source="m", version="3", versions=VERSIONS)})
MODEL = ModelStatus(
    name="m",
    state="unavailable",
    info=INFO,
    replicas=1,
    replicas_ready=0,
    detail="replica 1 is unreachable",
    created=0.0,
    waiting=8,
    in_flight=9,
    waiting_tokens=10,
    load="on_demand",
    memory_bytes=11,
)

LOAD = LoadReport(
    model="m", replica=1, cause="load", restarts=0, begun_at=1.0, seconds=2.0, state="ready", phases=[Phase("a", 0, 2)]
)
LOADS = {("m", 1): LOAD}


def test_nothing_that_is_known_of_a_model_is_left_out() -> None:
    assert model_report(MODEL, (REPLICA,), CONFIG, LOADS, 3) == ModelReport(
        name="m",
        state="unavailable",
        load="on_demand",
        replicas_ready=0,
        replicas=[
            ReplicaReport(
                index=1,
                kind="remote",
                name="https://far",
                state="unreachable",
                in_flight=2,
                breaker="open",
                weight=5.0,
                region="eu",
                role="decode",
                layout="2 ranks (tensor 2 x pipeline 1)",
                is_fallback=True,
                restarts=6,
                memory_bytes=4,
                planned_bytes=20,
                pid=7,
                load=LOAD,
                artifact="0123456789ab",
                detail="It does not answer.",
                node="far",
                rank_nodes=("one", "two"),
            )
        ],
        waiting=8,
        in_flight=9,
        waiting_tokens=10,
        memory_bytes=11,
        version="3",
        aliases=["stable"],
        share=0.25,
        not_batched="its first dimension is fixed",
        detail="replica 1 is unreachable",
        answer_format="hermes, a call parsed back",
        verified="digest tree-sha256:0",
        desired=3,
        num_threads=2,
        cores=[0, 3],
    )


def test_every_field_of_the_reports_is_filled_in() -> None:
    """Else a report would document a field that always has its default."""
    made = model_report(MODEL, (REPLICA,), CONFIG, LOADS, 3)
    for report in (made, *made.replicas):
        for field in msgspec.structs.fields(report):
            assert getattr(report, field.name) != field.default, f"{type(report).__name__}.{field.name}"


def test_a_replica_that_was_set_aside_is_told_by_its_breaker() -> None:
    slow = msgspec.structs.replace(REPLICA, ejected=True, breaker="closed")
    (replica,) = model_report(MODEL, (slow,), CONFIG).replicas
    assert replica.breaker == "ejected"


def test_each_tenants_limits_and_what_it_used_are_told(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    config = {
        "server": {"port": 0},
        "state": {"data_dir": str(tmp_path)},
        "models": {"tiny": {"source": "tiny"}},
        "tenants": {"a": {"rpm": 6, "tpm": 100}, "b": {"rpm": 500}, "free": {}},
    }
    file = tmp_path / "inferd.yaml"
    file.write_text(json.dumps(config))
    with running(data_dir=tmp_path, file=file) as server:
        socket = tmp_path / "run" / f"{server.port}.sock"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://inferd") as admin:
            keys = {
                name: admin.post("/admin/keys", json={"name": name, "tenant": name}).json()["key"]
                for name in ("a", "b")
            }
            began = time.monotonic()
            for _ in range(2):
                headers = {"authorization": f"Bearer {keys['a']}"}
                answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=20)
                assert answer.status_code == 200
            told = {tenant["name"]: tenant for tenant in admin.get("/admin/status").json()["tenants"]}
            given_back = (time.monotonic() - began) * 6 / 60
    assert told["a"]["limits"] == {"requests": 6, "tokens": 100}
    assert told["b"]["limits"] == {"requests": 500}
    assert max(0.0, 2.0 - given_back) <= told["a"]["used"]["requests"] <= 2.0
    assert told["a"]["used"]["tokens"] <= 2 * 5
    assert told["b"]["used"] == {"requests": 0.0}
    assert "free" not in told


def test_what_each_tenant_has_stored_is_told_and_no_series_names_it(tmp_path: Path) -> None:
    config = {
        "server": {"port": 0, "public_metrics": True},
        "state": {"data_dir": str(tmp_path), "responses": {"max_bytes": 100_000}},
        "models": {"tiny": {"source": "tiny"}},
    }
    file = tmp_path / "inferd.yaml"
    file.write_text(json.dumps(config))
    with running(data_dir=tmp_path, file=file) as server:
        socket = tmp_path / "run" / f"{server.port}.sock"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://inferd") as admin:
            scopes = ["infer", "admin"]
            made = {name: {"name": name, "tenant": name, "scopes": scopes} for name in ("first-team", "second-team")}
            keys = {name: admin.post("/admin/keys", json=spec).json()["key"] for name, spec in made.items()}
            bearer = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
            for _ in range(3):
                body = {"items": [{"type": "message", "role": "user", "content": "x" * 5000}]}
                answer = httpx.post(f"{server.url}/v1/conversations", json=body, headers=bearer["first-team"])
                assert answer.status_code == 200, answer.text
            asked = {"model": "tiny", "input": "hello", "max_output_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/responses", json=asked, headers=bearer["second-team"], timeout=20)
            assert answer.status_code == 200, answer.text

            def shown() -> dict[str, float]:
                lines = [one for one in httpx.get(f"{server.url}/metrics").text.splitlines() if "_stored_" in one]
                assert not any("team" in line for line in lines)
                pairs = [line.rpartition(" ") for line in lines if line[0] != "#"]
                return {name.removeprefix("inferd_stored_"): float(value) for name, _, value in pairs}

            until_now(lambda: shown()["tenants"] == 2, "both tenants are counted", 20)
            page = shown()
            told = {tenant["name"]: tenant for tenant in admin.get("/admin/status").json()["tenants"]}
            own = httpx.get(f"{server.url}/admin/status", headers=bearer["second-team"]).json()["tenants"]
    first, second = told["first-team"], told["second-team"]
    assert first["limits"] == second["limits"] == {"stored_bytes": 100_000}
    assert (first["used"]["stored_conversations"], first["used"]["stored_responses"]) == (3, 0)
    assert (second["used"]["stored_conversations"], second["used"]["stored_responses"]) == (0, 1)
    assert first["used"]["stored_bytes"] > 15_000
    assert own == [second]
    assert page['entries{kind="conversation"}'] == 3
    assert page['entries{kind="response"}'] == 1
    assert page["bytes"] == first["used"]["stored_bytes"] + second["used"]["stored_bytes"]
    assert page["most_used_ratio"] == first["used"]["stored_bytes"] / 100_000
    assert page['dropped_total{reason="bytes"}'] == page['dropped_total{reason="age"}'] == 0
