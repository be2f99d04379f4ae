"""Following a configuration file: every way people replace one, and what is done with a bad one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.worker.watching import until

from inferd.app import reload as reload_module
from inferd.app.change import changed_settings, needs_restart, refuse_restarts
from inferd.app.config_file import Version, is_being_written, version
from inferd.app.reload import Reloader
from inferd.app.source import ConfigSource
from inferd.config import Config, load_config
from inferd.errors import ConfigError
from inferd.events import ConfigReloaded, Event
from inferd.gateway.control import ReloadReport
from inferd.router.status import Applied

POLL_S = 0.01
DEFECT = 13
FAILING = 14


def text(port: int) -> str:
    return f"server: {{port: {port}}}\nmodels: {{m: {{source: demo}}}}\n"


class Followed:
    """A reloader of a file, and what was adopted so far."""

    def __init__(self, path: Path) -> None:
        self.adopted: list[Config] = []
        self.events: list[Event] = []
        self.outcomes: asyncio.Queue[ReloadReport] = asyncio.Queue()
        self.reads = 0
        self.path = path
        self.meanwhile: Callable[[], None] | None = None  # happens to the file while it is read
        self.at_read: Callable[[], None] | None = None
        self.reloader = Reloader(
            ConfigSource(path, self._read), self._adopt, self._note, poll_s=POLL_S, settle_s=POLL_S
        )

    def _read(self) -> Config:
        self.reads += 1
        if self.at_read is not None:
            self.at_read()
        try:
            return load_config(self.path, {}, {})
        finally:
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                meanwhile()

    async def _adopt(self, config: Config) -> Applied:
        if config.server.port == DEFECT:
            raise RuntimeError("a defect")
        assert self.reloader.since is not None
        self.adopted.append(config)
        failed = [f"the model of port {FAILING} does not load"] if config.server.port == FAILING else []
        return Applied(done=[f"the port is {config.server.port}"], failed=failed)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        assert self.reloader.last is not None
        assert self.reloader.since is None
        self.outcomes.put_nowait(self.reloader.last)

    async def outcome(self) -> ReloadReport:
        async with asyncio.timeout(5):
            return await self.outcomes.get()

    async def looks(self, count: int = 5) -> None:
        """Time for the reloader to look a few times."""
        await asyncio.sleep(POLL_S * count * 2)

    @property
    def ports(self) -> list[int]:
        return [config.server.port for config in self.adopted]


@asynccontextmanager
async def following(path: Path) -> AsyncIterator[Followed]:
    made = Followed(path)
    task = asyncio.create_task(made.reloader.follow())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait((task,))


def in_place(path: Path, new: str) -> None:
    path.write_text(new)


def by_rename(path: Path, new: str) -> None:
    """vim, sed -i, Ansible: a new file takes the old one's name."""
    (path.parent / "new").write_text(new)
    (path.parent / "new").replace(path)


def removed_first(path: Path, new: str) -> None:
    path.unlink()
    path.write_text(new)


@pytest.mark.parametrize("write", [in_place, by_rename, removed_first])
def test_a_change_is_adopted_once_however_it_is_written(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        async with following(path) as followed:
            write(path, text(2))
            assert (await followed.outcome()).details == ("the port is 2",)
            write(path, text(3))
            assert (await followed.outcome()).accepted
            await followed.looks()
            assert followed.ports == [2, 3]

    asyncio.run(scenario())


def test_a_configmaps_swapped_link_is_noticed(tmp_path: Path) -> None:
    """Kubernetes: inferd.yaml -> ..data/inferd.yaml, ..data -> ..2026_1, and ..data is swapped by a rename."""
    for number in (1, 2):
        (tmp_path / f"..2026_{number}").mkdir()
        (tmp_path / f"..2026_{number}" / "inferd.yaml").write_text(text(number))
    (tmp_path / "..data").symlink_to("..2026_1")
    path = tmp_path / "inferd.yaml"
    path.symlink_to("..data/inferd.yaml")

    async def scenario() -> None:
        async with following(path) as followed:
            (tmp_path / "..data_tmp").symlink_to("..2026_2")
            (tmp_path / "..data_tmp").replace(tmp_path / "..data")
            assert (await followed.outcome()).accepted
            assert followed.ports == [2]

    asyncio.run(scenario())


@pytest.mark.parametrize("port", [1, 2], ids=["the same", "another"])
def test_a_file_that_is_gone_is_told_once_and_read_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        async with following(path) as followed:
            path.rename(tmp_path / "aside")
            gone = await followed.outcome()
            assert not gone.accepted
            assert gone.details == (f"{path} is gone; put it back, as a restart would not find it.",)
            await followed.looks()
            assert (followed.reads, len(followed.events)) == (0, 1)
            if port != 1:
                (tmp_path / "aside").write_text(text(port))
            (tmp_path / "aside").rename(path)
            assert (await followed.outcome()).accepted
            assert followed.ports == [port]
            await followed.looks()
            assert followed.reads == 1

    asyncio.run(scenario())
    assert caplog.text.count("is gone") == 1


def test_what_was_read_while_the_file_changed_is_not_adopted(tmp_path: Path) -> None:
    """Its first half is a valid configuration, and nothing tells that there will be another."""
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        followed = Followed(path)
        path.write_text("server: {port: 2}\n")
        followed.meanwhile = lambda: in_place(path, text(2))
        assert (await followed.reloader.reload()).accepted
        assert [list(config.models) for config in followed.adopted] == [["m"]]
        path.write_text("server: {port: ")
        followed.meanwhile = lambda: in_place(path, text(3))
        assert (await followed.reloader.reload()).accepted
        assert (followed.ports, followed.reads) == ([2, 3], 4)

    asyncio.run(scenario())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="leases are Linux's")
def test_a_file_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    """Its first half is a valid configuration, which would take the models away."""
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))
    assert not is_being_written(path)

    async def scenario() -> None:
        async with following(path) as followed:
            with path.open("w") as half:
                half.write("server: {port: 2}\n")
                half.flush()
                assert is_being_written(path)
                await followed.looks()
                assert followed.reads == 0
                half.write("models: {m: {source: demo}, n: {source: demo}}\n")
            assert (await followed.outcome()).accepted
            assert [list(config.models) for config in followed.adopted] == [["m", "n"]]

    asyncio.run(scenario())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="leases are Linux's")
def test_a_requested_reload_waits_until_the_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        followed = Followed(path)
        with path.open("w") as half:
            half.write("server: {port: 2}\n")
            half.flush()
            reload = asyncio.create_task(followed.reloader.reload())
            await followed.looks()
            assert not reload.done()
            assert followed.reloader.since is not None
            half.write("models: {m: {source: demo}}\n")
        assert (await reload).accepted
        assert [list(config.models) for config in followed.adopted] == [["m"]]

    asyncio.run(scenario())


def test_a_bad_file_is_told_with_all_its_problems_once_and_a_good_one_after_it_is_adopted(tmp_path: Path) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        async with following(path) as followed:
            path.write_text("server: {port: many, prot: 1}\nmodels: {m: {}}\n")
            refused = await followed.outcome()
            assert not refused.accepted
            assert len(refused.details) == 3
            assert "server.port: 'many' is not an integer" in refused.details[1]
            assert followed.reloader.last == refused
            await followed.looks()
            assert followed.reads == 1
            path.write_text(text(2))
            assert (await followed.outcome()).accepted
            assert followed.ports == [2]
            told = [event.accepted for event in followed.events if isinstance(event, ConfigReloaded)]
            assert told == [False, True]

    asyncio.run(scenario())


def test_a_file_whose_model_does_not_load_is_in_use_and_told_as_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        async with following(path) as followed:
            for port in (FAILING, 2):
                path.write_text(text(port))
                outcome = await followed.outcome()
                assert outcome.accepted
                assert outcome.details == (f"the port is {port}",)
                assert outcome.is_whole == (not outcome.failed) == (port == 2)
            told = [(e.accepted, e.is_whole) for e in followed.events if isinstance(e, ConfigReloaded)]
            assert told == [(True, False), (True, True)]

    asyncio.run(scenario())


def test_a_change_during_a_reload_is_read_as_well_and_reloads_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        followed = Followed(path)
        both = await asyncio.gather(followed.reloader.reload(), followed.reloader.reload())
        assert [outcome.accepted for outcome in both] == [True, True]
        assert followed.ports == [1, 1]

    asyncio.run(scenario())


def test_a_defect_while_adopting_does_not_end_the_following(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(text(1))

    async def scenario() -> None:
        async with following(path) as followed:
            path.write_text(text(DEFECT))
            async with asyncio.timeout(5):
                while not caplog.records:
                    await asyncio.sleep(POLL_S)
            path.write_text(text(2))
            assert (await followed.outcome()).accepted
            assert followed.ports == [2]

    asyncio.run(scenario())
    assert "could not be read again" in caplog.text


def test_asking_for_the_version_of_nothing_is_none(tmp_path: Path) -> None:
    assert version(tmp_path / "none") is None
    assert not is_being_written(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    assert not is_being_written(tmp_path / "pipe")


def config(**server: object) -> Config:
    return load_config(None, {}, {"server": server, "models": {"m": {"source": "demo"}}})


def test_what_sockets_and_databases_were_opened_with_needs_a_restart() -> None:
    old = config()
    new = load_config(
        None,
        {},
        {
            "server": {"port": 1, "grace_s": 1},
            "state": {"url": "postgresql://me:secret@db/x"},
            "models": {"m": {"source": "demo"}},
        },
    )
    sentences = needs_restart(old, new)
    assert sentences == [
        "server.port: changing 8000 to 1 needs a restart.",
        "state.url: changing it needs a restart.",
    ]
    with pytest.raises(ConfigError, match="2 settings cannot change"):
        refuse_restarts(old, new)
    refuse_restarts(old, config(grace_s=1))


def test_changed_settings_are_told_by_name() -> None:
    old = load_config(None, {}, {"tenants": {"a": {"rpm": 1}, "b": {}}})
    new = load_config(None, {}, {"tenants": {"a": {"rpm": 2}, "c": {}}, "server": {"grace_s": 1}})
    assert changed_settings(old, new) == [
        "server.grace_s is now 1.0.",
        "tenant a changed: rpm = 2.",
        "tenant b was removed.",
        "tenant c was added.",
    ]
    assert changed_settings(old, old) == []


def test_a_file_is_read_when_two_looks_in_a_row_saw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks are scripted: what they see changes five times, and then rests."""
    looks: list[Version] = [(1, 1, size, 0) for size in (1, 2, 3, 4, 5, 5, 5, 5)]
    num_looks = 0
    read_at: list[int] = []

    def look(path: Path) -> Version | None:
        nonlocal num_looks
        num_looks += 1
        return looks[min(num_looks, len(looks)) - 1]

    async def scenario() -> None:
        path = tmp_path / "inferd.yaml"
        path.write_text(text(1))
        followed = Followed(path)
        monkeypatch.setattr(reload_module, "version", look)
        followed.at_read = lambda: read_at.append(num_looks)
        task = asyncio.create_task(followed.reloader.follow())
        await until(lambda: num_looks > len(looks), "every look was taken")
        task.cancel()
        await asyncio.wait((task,))

    asyncio.run(scenario())
    assert read_at
    assert all(looks[number - 1] == looks[number - 2] for number in read_at), read_at
