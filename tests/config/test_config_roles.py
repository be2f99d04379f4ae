"""Roles of replicas: what a configuration may say, and what each problem says to do."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inferd.config import ModelConfig, load_config
from inferd.config.generation import RolesConfig
from inferd.errors import ConfigError
from inferd.router.hand_overs import is_same_kind
from inferd.router.replicas.links import Links, missing_role, wanted_roles
from inferd.router.replicas.machines import HERE, Machine, allows
from inferd.router.replicas.replica import LocalReplica


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"replicas": 3}, "models.chat.replicas: roles gives the number, 3; leave replicas out"),
        ({"scaling": {"max": 2}}, "models.chat.scaling: roles gives a fixed number"),
        ({"remotes": [{"url": "https://h/v1"}]}, "models.chat.remotes: a remote server takes part in no hand-over"),
        ({"placement": {"nodes": "remote"}}, "models.chat.placement"),
        ({"placement": {"labels": {"a": "b"}}}, "models.chat.placement: blocks are handed over on this machine"),
        (
            {"parallel": {"pipeline": 2, "machines": 2}},
            "models.chat.parallel.machines: 2, but blocks are handed over on this machine alone; leave machines out",
        ),
        ({"scheduler": {"prefix_caching": False}}, "models.chat.scheduler.prefix_caching: false leaves no place"),
        ({"roles": {"prefill": 0}}, "models.chat.roles.prefill"),
        ({"roles": {"both": 1}}, "both"),
        ({"source": "openai:https://h/v1"}, "models.chat.roles"),
    ],
)
def test_what_does_not_go_with_roles_is_told(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {"models": {"chat": {"source": "demo", "roles": {"decode": 2}, **settings}}})
    assert problem in str(caught.value)


def test_roles_give_the_number_of_replicas() -> None:
    model = load_config(None, {}, {"models": {"chat": {"source": "demo", "roles": {"decode": 2}}}}).models["chat"]
    assert model.num_local == model.num_at_start == 3
    assert wanted_roles(model) == Counter({"prefill": 1, "decode": 2})
    assert wanted_roles(ModelConfig(source="demo", replicas=4)) == Counter({"both": 4})


def test_a_missing_role_is_filled_with_answers_first() -> None:
    model = ModelConfig(source="demo", roles=RolesConfig(prefill=1, decode=2))
    assert missing_role(model, []) == "decode"
    assert missing_role(model, ["decode", "decode"]) == "prefill"
    assert missing_role(model, ["decode", "prefill"]) == "decode"
    assert missing_role(ModelConfig(source="demo"), []) == "both"


def test_replicas_with_roles_stay_on_this_machine() -> None:
    node = Machine(name="other", num_cores=2, free_bytes=None)
    here = Machine(name=HERE, num_cores=2, free_bytes=None)
    with_roles, without = ModelConfig(source="demo", roles=RolesConfig()), ModelConfig(source="demo")
    assert (allows(without, node), allows(with_roles, node), allows(with_roles, here)) == (True, False, True)


def replica(node: str = "", **fields: Any) -> LocalReplica:
    """One whose model was loaded with such facts."""
    info = SimpleNamespace(**{"fingerprint": "fp", "block_size": 16, "layout": "2 ranks", **fields})
    return cast(LocalReplica, SimpleNamespace(node=node, info=info))


@pytest.mark.interpreted("stands in for replicas")
def test_only_replicas_with_the_same_blocks_are_paired() -> None:
    assert is_same_kind(replica(), replica())
    for other in (replica("far"), replica(fingerprint="x"), replica(block_size=8), replica(layout="")):
        assert not is_same_kind(replica(), other)
    assert not is_same_kind(replica(), cast(LocalReplica, SimpleNamespace(node="", info=None)))


def test_addresses_are_the_users_alone_and_gone_at_the_end() -> None:
    links = Links()
    one, other = links.add("decode"), links.add("prefill")
    assert (one.role, other.role) == ("decode", "prefill")
    assert one.address != other.address
    assert one.key == other.key
    folder = links.folder
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    links.close()
    assert not folder.exists()
    links.close()
