"""A server that is killed (SIGKILL) at a write of a move: the stages, the rollout and both logs agree when it is back,
and the move, asked for again, ends as it would have."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
from tests.app.test_registry_served import adding, answer, done
from tests.conftest import postgres_schema
from tests.experiments.books import Tally
from tests.experiments.client import Client
from tests.predict.live import Address, serving
from tests.tiers import THOROUGH
from tests.worker.watching import is_running, until_now

from inferd.lifecycle import registry
from inferd.rollout import ledger
from inferd.rollout.machine import ACTIVE, Progress
from inferd.state.audit import AuditEntry, AuditLog
from inferd.state.database import Database
from inferd.state.open import open_database

MORTAL_SERVER: Final = str(Path(__file__).with_name("mortal_server.py"))
NAME: Final = "m:1:2"
MODELS: Final[dict[str, dict[str, Any]]] = {
    "m": {
        "source": "registry:adding@1",
        "version": "1",
        "rollout": {"stable": 1, "new": 2, "steps": [{"weight": 0, "for_s": 3600}, {"weight": 100}]},
    },
    "m@2": {"source": "registry:adding@2", "version": "2"},
}


class Move(NamedTuple):
    """What an operator asks for, and what is true when it is done: the stages of both versions, and the state."""

    word: str
    stages: tuple[str, str]
    state: str

    @property
    def path(self) -> str:
        if self.word in ("approve", "reject"):
            return f"/admin/registry/adding/versions/2/{self.word}"
        return f"/admin/rollouts/m/{self.word}"


APPROVE = Move("approve", ("production", "approved"), "pending")
START = Move("start", ("production", "canary"), "running")
ABORT = Move("abort", ("production", "approved"), "aborted")
PROMOTE = Move("promote", ("archived", "production"), "promoted")
UNDO = Move("undo", ("production", "archived"), "aborted")
REJECT = Move("reject", ("production", "rejected"), "rolled_back")
JOURNEY: Final = (APPROVE, START, ABORT, START, PROMOTE, UNDO, START, REJECT)


class Site:
    """One state folder and one database, and the server on it, which is started again after each of its deaths."""

    def __init__(self, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.url = folder, url
        self.arm, self.points = folder / "arm", folder / "points"
        self.killed_at: list[str] = []
        self._running = contextlib.ExitStack()
        self.server: Address | None = None
        monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(folder / "state"))
        monkeypatch.setenv("INFERD_STATE__URL", url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for number in (1, 2):
            done("register", "adding", str(adding(folder / str(number) / "model.onnx", float(number))))
            done("validate", f"adding@{number}")
        for action in ("approve", "promote"):
            done(action, "adding@1")

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        database = open_database(self.url, self.folder / "state")
        try:
            yield database
        finally:
            database.close()

    # -- the server ---------------------------------------------------------------------------

    def start(self) -> None:
        self.stop()
        script = (MORTAL_SERVER, str(self.arm), str(self.points))
        self.server = self._running.enter_context(serving(self.folder, MODELS, inferd=script))

    def stop(self) -> None:
        self._running.close()

    def is_alive(self) -> bool:
        assert self.server is not None
        return is_running(self.server.pid)

    def ask(self, move: Move) -> int:
        """The status of the answer; 0: the server died before it."""
        assert self.server is not None
        port = self.server.url.rpartition(":")[2]
        operator = Client(str(self.folder / "state" / "run" / f"{port}.sock"), 0, Tally())
        body = {"reason": "so", **({"full": True} if move is PROMOTE else {})}
        try:
            return operator.post(move.path, body).status
        except (OSError, HTTPException):
            until_now(lambda: not self.is_alive(), "the server is dead", 60)
            return 0

    def carry_out(self, move: Move, die_at: str = "0 nothing", *, after_s: float | None = None) -> None:
        """Have the server die at a point of the move, if it has that one, or some time after it was asked for, and come
        back; then ask again."""
        before = self.progress()
        self.points.unlink(missing_ok=True)
        self.arm.write_text(die_at)
        if after_s is not None:
            assert self.server is not None
            threading.Timer(after_s, os.kill, (self.server.pid, signal.SIGKILL)).start()
        status = self.ask(move)
        until_now(lambda: not self.is_alive() or self.is_settled(), "the move has ended, or the server", 60)
        self.arm.unlink()
        if after_s is None and self.is_alive():
            assert status == 200
            self.killed_at.append("")
        else:
            until_now(lambda: not self.is_alive(), "the server is dead", 60)
            points = self.points.read_text().splitlines() if self.points.exists() else []
            self.killed_at.append(points[-1] if points else "before the first point")
            self.start()
            until_now(self.is_settled, "all that was decided is carried out", 60)
            self.check()
            is_done = self.stages() == move.stages and self.progress().state == move.state
            assert is_done or self.progress() == before, "the state is that before or after the move"
            again = self.ask(move)
            assert again == 200 if not is_done else again in (200, 400, 409), (move, again)
            until_now(self.is_settled, "the move has ended", 60)
        assert (self.stages(), self.progress().state) == (move.stages, move.state), move
        self.check()

    # -- what is true ---------------------------------------------------------------------------

    def is_settled(self) -> bool:
        state, stages = self.progress().state, self.stages()
        # Read last: a change that is seen above is no longer waiting when this does not show it.
        with self.database() as database, database.reading() as transaction:
            waits = transaction.rows("SELECT 1 FROM rollout_unrecorded")
        return not waits and state != "preparing" and not (stages[1] == "rejected" and state in ACTIVE)

    def progress(self) -> Progress:
        with self.database() as database:
            changes = ledger.changes_of(database, NAME)
        return changes[0].progress if changes else Progress()

    def stages(self) -> tuple[str, str]:
        with self.database() as database:
            one, two = registry.versions(database, "adding")
        return one.record.stage, two.record.stage

    def check(self) -> None:
        """Stages, rollout, history, audit log and what is served agree."""
        audit = AuditLog(self.folder / "state")
        assert audit.verify().problem == ""
        done("verify-log")  # also that the history has the lines that the audit log names
        state, stages = self.progress().state, self.stages()
        assert stages in {move.stages for move in JOURNEY if move.state == state} or state == "pending"
        entries = audit.entries(limit=100_000)
        begun = [one for one in entries if one.outcome == "begun"]
        with self.database() as database:
            history = registry.history(database, "adding", limit=1000)
            changes = ledger.changes_of(database, NAME)
        self._check_causes(begun, history)
        own = [entry for entry in entries if entry.action == "rollout"]
        for change in changes:
            if change.actor == "server":
                word = change.progress.state.replace("_", " ")
                assert any(entry.target == NAME and entry.detail.startswith(word) for entry in own), word
        decided = Counter(one.progress.state.replace("_", " ") for one in changes if one.actor == "server")
        told = Counter(entry.detail.partition(",")[0] for entry in own)
        assert all(decided[word] <= told[word] for word in decided), (decided, told)
        assert (told - decided).total() <= len([name for name in self.killed_at if name]), (
            "told twice after a kill alone"
        )
        assert self.server is not None
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            assert answer(client) == ([3.0, 4.0] if state == "promoted" else [2.0, 3.0])

    def _check_causes(self, begun: list[AuditEntry], history: list[registry.Entry]) -> None:
        """Each move by the operator was begun in the audit log before it was made."""
        asked = Counter(entry.action.removeprefix("registry_") for entry in begun)
        made = Counter(one.action for one in history if one.version == 2 and one.actor.startswith("control-socket"))
        for word in ("approve", "reject"):
            assert made[word] <= asked[word], word


@contextlib.contextmanager
def running(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site on an empty database of this kind, with its server."""
    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            url = stack.enter_context(postgres_schema())
        else:
            url = f"sqlite://{folder}/state/state.db"
        made = Site(folder, url, monkeypatch)
        stack.callback(made.stop)
        made.start()
        yield made


ON_BOTH: Final = pytest.mark.parametrize("kind", ["sqlite", "postgresql"])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with running("sqlite", tmp_path, monkeypatch) as made:
        yield made


@THOROUGH  # test_rollouts_served.py: a killed server goes on with its rollout and promotes it by itself
def test_a_server_that_is_killed_in_a_move_leaves_stage_rollout_and_logs_in_agreement(site: Site) -> None:
    site.carry_out(APPROVE, "0 before COMMIT")  # nothing was changed
    site.carry_out(START)
    site.carry_out(PROMOTE, "0 after COMMIT")  # all was changed, and the client and the audit log do not know it
    site.carry_out(UNDO)
    site.carry_out(START)
    site.carry_out(REJECT, "1 after COMMIT")  # the server's own decision, whose line in the audit log is missing
    assert site.killed_at == ["before COMMIT", "", "after COMMIT", "", "", "after COMMIT"]


def test_a_server_that_is_killed_in_a_promotion_on_postgresql_leaves_stage_rollout_and_logs_in_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("postgresql", tmp_path, monkeypatch) as site:
        site.carry_out(APPROVE)
        site.carry_out(START)
        site.carry_out(PROMOTE, "0 after COMMIT")
        assert site.killed_at == ["", "", "after COMMIT"]


@ON_BOTH
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_server_that_is_killed_at_every_write_of_every_move_leaves_them_in_agreement(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for number in itertools.count():
        with running(kind, tmp_path / str(number), monkeypatch) as site:
            for move in JOURNEY:
                site.carry_out(move, f"{number} ")
                seen[move.word, site.killed_at[-1]] += 1
        if not any(site.killed_at):
            break
    print(*[f"{count:3} {move:8} {where or 'not killed'}" for (move, where), count in sorted(seen.items())], sep="\n")
    kills = sum(count for (_, where), count in seen.items() if where)
    assert kills > 100, "the moves have many writes"


@ON_BOTH
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_server_that_is_killed_at_any_time_of_a_move_leaves_them_in_agreement(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(16)
    for number in range(12):
        with running(kind, tmp_path / str(number), monkeypatch) as site:
            for move in JOURNEY:
                site.carry_out(move, after_s=chance.expovariate(1 / 0.02))
