"""Rollouts of versions of the registry: their stages follow, in the same transaction, on every gateway and once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.app.test_replaced_files import inferd
from tests.app.test_rollouts_served import rollout_of
from tests.app.test_shadowed_rollouts import two_digits
from tests.predict.live import serving
from tests.rollout.test_rollouts import Gateway, World, config, gateways, looked, of_new
from tests.worker.watching import until_now

from inferd.app.stages import RegistryStages
from inferd.config import Config, load_config
from inferd.config.versioning import RegistryConfig
from inferd.errors import ConfigError, InvalidRequest
from inferd.lifecycle import registry
from inferd.lifecycle.contract_diff import Contract
from inferd.lifecycle.registry import Finding, NewVersion
from inferd.lifecycle.stages import Action
from inferd.rollout.judge import Verdict
from inferd.rollout.machine import Progress
from inferd.rollout.plan import Plan
from inferd.state.database import Database, Transaction
from inferd.state.open import open_database
from inferd.types import TensorSpec

REGISTERED = {"m": "churn@1", "m@2": "churn@2"}
ONE = Contract(inputs=(), outputs=(TensorSpec("y", "FP32", (-1,)),))
OTHER = Contract(inputs=(), outputs=(TensorSpec("z", "FP32", (-1,)),))


@pytest.fixture
def world(state_url: str, tmp_path: Path) -> World:
    return World(state_url, tmp_path)


def opened(world: World) -> Database:
    return open_database(world.url, world.folder)


def move(world: World, version: int, *actions: Action, **more: Any) -> None:
    database = opened(world)
    for action in actions:
        registry.move(database, "churn", version, action, actor="user:1", now=1.0, reason="so", **more)
    database.close()


def register(world: World, contract: Contract = ONE) -> None:
    """Version 1 is in production, and version 2 is validated."""
    database = opened(world)
    for number, described in ((1, ONE), (2, contract)):
        new = NewVersion(name="churn", source=f"/m/{number}", digest=f"tree-sha256:{number:064x}", contract=described)
        registry.register(database, new, actor="user:1", now=1.0)
        found = Finding(kind="digest", passed=True, summary="", report={})
        registry.verify(database, "churn", number, [found], actor="user:1", now=1.0)
        actions: tuple[Action, ...] = ("validate", "approve", "promote") if number == 1 else ("validate",)
        for action in actions:
            override = "all know" if number == 2 and contract is OTHER else ""
            registry.move(database, "churn", number, action, actor="user:1", now=1.0, override=override)
    database.close()


def stages(world: World) -> tuple[str, str]:
    database = opened(world)
    found = registry.versions(database, "churn")
    assert registry.verify_log(database).problem == ""
    database.close()
    return found[0].record.stage, found[1].record.stage


def lines(world: World, action: str, version: int = 2) -> list[registry.Entry]:
    database = opened(world)
    found = registry.history(database, "churn")
    database.close()
    return [one for one in found if (one.action, one.version) == (action, version)]


def follow(world: World, *made: Gateway, **settings: Any) -> None:
    """Have the gateways' rollouts know that their versions are the registry's."""
    for gateway in made:
        gateway.stages = RegistryStages(lambda: RegistryConfig(**settings), lambda: world.now)
        gateway.rollouts.configure(gateway.config, {}, REGISTERED)


Test = Callable[[Gateway, Gateway], Any]


def with_two(world: World, test: Test, **rollout: Any) -> None:
    async def run() -> None:
        async with gateways(world, 2, config(**rollout)) as (one, two):
            follow(world, one, two, require_approval=True)
            await test(one, two)

    asyncio.run(run())


def test_a_canary_whose_rollout_left_the_configuration_while_no_server_ran_is_none(world: World) -> None:
    register(world)
    move(world, 2, "approve")

    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            follow(world, one)
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
            assert stages(world) == ("production", "canary")
        world.alive.clear()
        models = {"m": {"source": "x", "version": "1"}}  # not even the version is there any more
        async with gateways(world, 1, msgspec.convert({"models": models}, Config)) as (two,):
            two.stages = RegistryStages(RegistryConfig, lambda: world.now)
            await looked(two)
            assert stages(world) == ("production", "approved")

    asyncio.run(run())


def test_the_stages_go_with_a_rollout_to_its_promotion_and_back(world: World) -> None:
    register(world)
    move(world, 2, "approve")

    async def test(one: Gateway, two: Gateway) -> None:
        await one.rollouts.command("m", "start", "key:a", "start by key:a")
        assert stages(world) == ("production", "canary")
        await looked(one, two)
        await two.rollouts.command("m", "promote_full", "key:b", "promote by key:b: good")
        assert stages(world) == ("archived", "production")
        await looked(one, two)
        await one.rollouts.command("m", "undo", "key:a", "undo by key:a: labels")
        assert stages(world) == ("production", "archived")
        assert [one.actor for one in lines(world, "promote")] == ["key:b"]
        assert lines(world, "promote")[0].reason == "rollout m:1:2 promoted: promote by key:b: good"
        assert lines(world, "promote", 1)[0].reason == "rollout m:1:2 aborted: undo by key:a: labels"
        await one.rollouts.command("m", "start", "key:a", "start by key:a")
        assert stages(world) == ("production", "canary"), "once more"
        await two.rollouts.command("m", "abort", "key:a", "abort by key:a")
        assert stages(world) == ("production", "approved")

    with_two(world, test)


def test_a_rollback_takes_the_canary_back_once_with_its_numbers(world: World) -> None:
    register(world)
    move(world, 2, "approve")

    async def test(one: Gateway, two: Gateway) -> None:
        await one.rollouts.command("m", "start", "key:a", "start by key:a")
        await looked(one, two)
        for index in range(400):
            (one, two)[index % 2].ask(f"user {index}", of_new)
        await looked(one, two)
        assert two.rollouts.reports()[0].progress.state == "rolled_back"
        assert stages(world) == ("production", "approved")
        (line,) = lines(world, "withdraw")
        assert line.actor == "server"
        assert line.reason.startswith("rollout m:1:2 rolled back: errors: ")
        assert " units with the new version" in line.detail

    with_two(world, test)


def test_a_version_that_was_not_approved_does_not_start_where_that_is_asked(world: World) -> None:
    register(world)

    async def test(one: Gateway, two: Gateway) -> None:
        with pytest.raises(InvalidRequest, match="churn@2 is validated in the registry, so no rollout"):
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
        assert (await one.rollouts.report("m")).progress == Progress()
        assert stages(world) == ("production", "validated")
        follow(world, one, two)  # without require_approval
        await one.rollouts.command("m", "start", "key:a", "start by key:a")
        await looked(one, two)
        await one.rollouts.command("m", "promote_full", "key:a", "promote by key:a")
        assert stages(world) == ("production", "validated"), "the stages of what was not approved stay"

    with_two(world, test)


def test_a_rollout_that_starts_itself_waits_for_the_approval(world: World) -> None:
    register(world)

    async def test(one: Gateway, two: Gateway) -> None:
        await looked(one, two)
        progress = one.rollouts.reports()[0].progress
        assert (progress.state, progress.is_paused) == ("pending", True)
        assert progress.reason.startswith("the registry refuses it: churn@2 is validated")
        assert len((await one.rollouts.report("m")).changes) == 1, "it is told once"
        move(world, 2, "approve")
        await two.rollouts.command("m", "start", "key:a", "start by key:a")
        assert stages(world) == ("production", "canary")

    with_two(world, test, start="auto")


def test_a_version_that_is_rejected_on_its_way_is_taken_back_everywhere(world: World) -> None:
    register(world)
    move(world, 2, "approve")

    async def test(one: Gateway, two: Gateway) -> None:
        await one.rollouts.command("m", "start", "key:a", "start by key:a")
        await looked(one, two)
        assert (one.share, two.share) == (0.05, 0.05)
        move(world, 2, "reject")
        await looked(two, one)
        assert (one.share, two.share) == (0.0, 0.0)
        progress = one.rollouts.reports()[0].progress
        assert progress.state == "rolled_back"
        assert progress.reason == "churn@2 was rejected in the registry: so"
        assert stages(world) == ("production", "rejected")

    with_two(world, test)


def test_a_contract_that_no_override_accepts_starts_no_rollout_and_an_undo_needs_none(world: World) -> None:
    register(world, OTHER)
    move(world, 2, "approve")

    async def test(one: Gateway, two: Gateway) -> None:
        await one.rollouts.command("m", "start", "key:a", "start by key:a")  # validate has accepted the change
        await looked(one, two)
        await one.rollouts.command("m", "promote_full", "key:a", "promote by key:a")
        await one.rollouts.command("m", "undo", "key:a", "undo by key:a")
        assert stages(world) == ("production", "archived")
        assert lines(world, "promote", 1)[0].override == "rollout m:1:2 aborted: undo by key:a"

    with_two(world, test)


def test_an_undo_is_never_refused_whatever_the_evidence_of_the_stable_version(world: World) -> None:
    register(world)
    move(world, 2, "approve")

    async def test(one: Gateway, two: Gateway) -> None:
        await one.rollouts.command("m", "start", "key:a", "start by key:a")
        await looked(one, two)
        await one.rollouts.command("m", "promote_full", "key:a", "promote by key:a")
        database = opened(world)
        registry.attach_evidence(database, "churn", 1, "golden", {}, passed=False, actor="user:1", now=1.0)
        database.close()
        await one.rollouts.command("m", "undo", "key:a", "undo by key:a")
        assert (await one.rollouts.report("m")).progress.state == "aborted"
        assert stages(world) == ("archived", "archived")
        assert "churn@1 is not promoted again: The newest golden report" in lines(world, "archive")[0].reason

    with_two(world, test)


class Killed(BaseException):
    """The process dies before its transaction is committed."""


class Dying(RegistryStages):
    def follow(
        self, transaction: Transaction, plan: Plan, before: Progress, after: Progress, verdict: Verdict, actor: str
    ) -> None:
        super().follow(transaction, plan, before, after, verdict, actor)
        raise Killed


@pytest.mark.parametrize("command", ["start", "promote_full", "undo"])
def test_a_server_that_dies_in_a_change_has_changed_neither_the_rollout_nor_the_stages(
    world: World, command: Any
) -> None:
    register(world)
    move(world, 2, "approve")

    async def test(one: Gateway, two: Gateway) -> None:
        for before in ("start", "promote_full", "undo"):
            if before == command:
                break
            await one.rollouts.command("m", before, "key:a", f"{before} by key:a")
            await looked(one, two)
        known, there = (await one.rollouts.report("m")).progress, stages(world)
        two.stages = Dying(RegistryConfig, lambda: world.now)
        with pytest.raises(Killed):
            await two.rollouts.command("m", command, "key:a", "it dies")
        await one.rollouts.look()
        assert ((await one.rollouts.report("m")).progress, stages(world)) == (known, there)
        await one.rollouts.command("m", command, "key:a", "again")
        assert stages(world) != there

    with_two(world, test)


def test_a_served_rollout_of_registered_versions_moves_their_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    two_digits(tmp_path / "digits")
    (tmp_path / "digits" / "2" / "notes.md").write_text("trained again")

    def done(*words: str) -> str:
        code, shown = inferd(*words)
        assert code == 0, shown
        return shown

    def stage(number: int) -> str:
        return str(json.loads(done("registry", "show", f"digits@{number}", "--json"))["record"]["stage"])

    for number in (1, 2):
        done("registry", "register", "digits", str(tmp_path / "digits" / str(number)))
        done("registry", "validate", f"digits@{number}")
        done("registry", "approve", f"digits@{number}")
        if number == 1:
            done("registry", "promote", "digits@1")
    entries: dict[str, dict[str, Any]] = {
        "digits": {"source": "registry:digits@1", "version": "1", "rollout": {"stable": 1, "new": 2}},
        "digits@2": {"source": "registry:digits@2", "version": "2"},
    }
    with serving(tmp_path, entries):
        done("rollout", "start", "digits")
        assert (stage(1), stage(2)) == ("production", "canary")
        until_now(lambda: rollout_of("digits")["progress"]["state"] == "running", "the rollout is running")
        done("rollout", "promote", "digits", "--full", "--reason", "ticket 9")
        assert (stage(1), stage(2)) == ("archived", "production")
        done("rollout", "undo", "digits")
        assert (stage(1), stage(2)) == ("production", "archived")
    shown = done("registry", "history", "digits", "--json")
    assert "rollout digits:1:2 promoted: promote by control-socket" in shown
    assert "ticket 9" in shown
    assert "whole" in done("registry", "verify-log")


def test_a_rollout_of_a_reference_without_a_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "inferd.yaml"
    file.write_text(
        "models:\n"
        "  m: {source: registry:m@production, version: '1', rollout: {stable: 1, new: 2}}\n"
        "  m@2: {source: registry:m@2, version: '2'}\n"
    )
    with pytest.raises(ConfigError, match=r"models\.m\.source: registry:m@production may lead to another version"):
        load_config(file, {}, {})
