"""Rules between settings: each mistake is one sentence at its place, and secrets are never repeated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.config import load_config
from inferd.errors import ConfigError

SECRET = "sk-do-not-print-me"


def refusal(tree: dict[str, object], env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, env or {}, tree)
    return caught.value.message


def model(**fields: object) -> dict[str, object]:
    return {"models": {"m": {"source": "demo", **fields}}}


REMOTE = {"source": "openai:https://host/v1"}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (model(source=" "), "models.m.source: the source is empty"),
        (model(source="openai:host/v1"), "models.m.source: 'host/v1' is not the base URL"),
        (model(source="openai:ftp://host"), "models.m.source: 'ftp://host' is not the base URL"),
        (model(source="openai:http://host:99999/v1"), "a port from 1 to 65535"),
        (model(source="openai:http://a..b/v1"), "models.m.source: this is not a URL"),
        (model(source=f"openai:https://me:{SECRET}@host/v1"), "models.m.source: a URL holds no credentials"),
        (model(source=f"openai:https://host/v1?key={SECRET}"), "has more than a path"),
        (model(**REMOTE, load="on_demand"), "models.m.load: it is for local replicas"),
        (model(**REMOTE, idle_after_s=5), "models.m.idle_after_s: it is for local replicas"),
        (model(**REMOTE, memory_bytes="1GiB"), "models.m.memory_bytes: it is for local replicas"),
        (model(**REMOTE, remote={"fallback": True}), "models.m: every replica of it is a fallback"),
        (model(remote={"weight": 2}), "models.m.remote: it belongs to a source such as openai:"),
        (model(remotes=[{"url": "https://u@h/v1"}]), "models.m.remotes[0].url: a URL holds no credentials"),
        (model(**REMOTE, remote={"api_key_env": "KEY"}), "variable KEY is not set"),
        (model(**REMOTE, remote={"api_key_env": SECRET}), "never the key itself"),
        (
            model(remotes=[{"url": "https://h/v1", "api_key_file": "/none"}]),
            "models.m.remotes[0].api_key_file: the file",
        ),
        (model(remotes=[{"url": "https://h/v1", "ca_file": "/none"}]), "models.m.remotes[0].ca_file: the file"),
        (model(**REMOTE, remote={"api_key_env": "KEY", "api_key_file": "/none"}), "keep one of them"),
        (
            model(speculation={"method": "draft"}),
            "models.m.speculation.method: it is 'draft', and no draft model is named",
        ),
        (model(chat_template="/none.jinja"), "models.m.chat_template: there is no file"),
        ({"state": {"url": f"mysql://me:{SECRET}@db/x"}}, "state.url: its scheme 'mysql' is not one of sqlite://"),
        ({"state": {"url": SECRET}}, "state.url: a text without :// is not one of"),
        ({"cache": {"url": "memcached://h"}}, "cache.url: its scheme 'memcached' is not one of redis://"),
        ({"server": {"cors_origins": ["https://a/", "*"]}}, "server.cors_origins[0]: 'https://a/' is not a web origin"),
        ({"server": {"allowed_hosts": ["http://a"]}}, "server.allowed_hosts[0]: 'http://a' is not a host name"),
        ({**model(), "tenants": {"t": {"region": "eu"}}}, "tenants.t.region: no replica of any model"),
        ({"tenants": {" t": {}}}, "is not a tenant name"),
        (
            {**model(memory_bytes="2GiB", replicas=3), "server": {"memory_bytes": "5GiB"}},
            "models.m.memory_bytes: 3 times 2.00 GiB is more than server.memory_bytes = 5.00 GiB",
        ),
        (
            {
                "models": {name: {"source": "demo", "memory_bytes": "2GiB"} for name in "abc"},
                "server": {"memory_bytes": "5GiB"},
            },
            "server.memory_bytes: 5.00 GiB is less than the 6.00 GiB",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_told(tree: dict[str, object], said: str) -> None:
    message = refusal(tree)
    assert said in message
    assert SECRET not in message


def test_rules_and_types_are_told_together() -> None:
    message = refusal(
        {
            "server": {"port": -1},
            "models": {"a": {"source": "openai:nowhere"}, "b": {"source": "demo", "dtype": "int3"}},
            "cache": {"url": "ftp://x"},
        }
    )
    assert message.startswith("4 problems")


def test_a_data_dir_that_cannot_be_written_is_told_and_one_that_can_be_made_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refusal({"state": {"data_dir": str(tmp_path / "file" / "below")}})
    load_config(None, {}, {"state": {"data_dir": str(tmp_path / "new" / "below")}})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_data_dir_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written to" in refusal({"state": {"data_dir": str(tmp_path / "new")}})


def test_a_region_is_that_of_a_local_model_or_of_a_remote_server() -> None:
    local: dict[str, object] = {"source": "demo", "region": "eu"}
    remote: dict[str, object] = {**REMOTE, "remote": {"region": "us"}}
    for models, region, is_there in (
        ({"m": local}, "eu", True),
        ({"m": local}, "us", False),
        ({"m": remote}, "us", True),
        ({"m": local, "n": remote}, "eu", True),
        ({"m": local, "n": remote}, "us", True),
    ):
        tree: dict[str, object] = {"models": models, "tenants": {"t": {"region": region}}}
        if is_there:
            assert load_config(None, {}, tree).tenants["t"].region == region
        else:
            assert "regions are: eu." in refusal(tree)


def test_the_two_ports_of_a_server_differ() -> None:
    ports = {"port": 9000, "grpc_port": 9001}
    assert load_config(None, {}, {**model(), "server": ports}).server.grpc_port == 9001
    assert "9000 is server.port already" in refusal({**model(), "server": {**ports, "grpc_port": 9000}})


def test_a_remote_model_that_is_well_described_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k\n")
    tree = {
        "models": {
            "m": {
                "source": "openai:http://[::1]:8001/v1",
                "remote": {"api_key_env": "KEY", "region": "eu"},
                "remotes": [{"url": "https://h/v1", "api_key_file": str(tmp_path / "key"), "fallback": True}],
            }
        },
        "tenants": {"t": {"region": "eu"}},
        "server": {"cors_origins": ["https://app.example.com:8443", "*"], "auth": "off", "host": "0.0.0.0"},
        "cache": {"url": "redis://h:6379/0"},
        "state": {"url": "postgresql://h/db"},
    }
    config = load_config(None, {"KEY": "secret"}, tree)
    assert [upstream.url for upstream in config.models["m"].upstreams] == ["http://[::1]:8001/v1", "https://h/v1"]


def test_a_key_file_without_a_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    said = refusal(model(**REMOTE, remote={"api_key_file": str(tmp_path / "key")}))
    assert "is empty; write the API key into it" in said


def test_a_fraction_of_the_servers_memory_becomes_bytes() -> None:
    models = {
        "chat": {"source": "demo", "memory_fraction": 0.5},
        "search": {"source": "demo", "memory_fraction": 0.125, "replicas": 2},
        "rest": {"source": "demo", "memory_bytes": "256MiB"},
    }
    config = load_config(None, {}, {"server": {"memory_bytes": "4GiB"}, "models": models})
    assert [model.memory_bytes for model in config.models.values()] == [2 << 30, 512 << 20, 256 << 20]


@pytest.mark.parametrize(
    ("server", "model", "says"),
    [
        ({}, {"memory_fraction": 0.5}, "0.5 is a part of server.memory_bytes, which is not set; set it"),
        (
            {"memory_bytes": "4GiB"},
            {"memory_fraction": 0.5, "memory_bytes": "1GiB"},
            "memory_bytes is set as well; keep one of the two",
        ),
        (
            {"memory_bytes": "4GiB"},
            {"memory_fraction": 0.6, "replicas": 2},
            "is more than server.memory_bytes = 4.00 GiB",
        ),
        ({"memory_bytes": "4GiB"}, {"memory_fraction": 1.5}, "memory_fraction"),
        ({"memory_bytes": "4GiB"}, {"memory_fraction": 0}, "memory_fraction"),
    ],
)
def test_a_fraction_that_cannot_be_is_refused(server: dict[str, object], model: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {}, {"server": server, "models": {"chat": {"source": "demo", **model}}})
    assert says in error.value.message


def test_a_name_of_an_adapter_stands_for_nothing_else() -> None:
    said = refusal(
        {
            "models": {
                "a": {"source": "demo", "adapters": {"x": "f", "b": "f", "y@2": "f", " z": "f", "w": " "}},
                "b": {"source": "demo", "adapters": {"x": "g"}},
            }
        }
    )
    assert said.startswith("5 problems")
    assert "models.a.adapters.b: 'b' is the name of the model b already" in said
    assert "models.b.adapters.x: 'x' is the name of an adapter of a already" in said
    assert "'@' is for versions of models" in said
    assert "is empty, too long, or has blanks around it" in said
    assert "models.a.adapters.w: its source is empty" in said
