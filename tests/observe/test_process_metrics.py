"""The process's metrics are those of prometheus-client's ProcessCollector."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inferd.observe.process import process_metrics
from inferd.observe.series import Store

COUNTS = st.integers(0, 1 << 62)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=15)


Described = dict[tuple[str, str, str], float]
"""The value of each metric, by its name, its text and its type."""


def read(page: bytes) -> Described:
    return {
        (family.name, family.documentation, family.type): family.samples[0].value
        for family in text_string_to_metric_families(page.decode())
        if family.samples
    }


def theirs(proc: Path) -> Described:
    registry = CollectorRegistry()
    ProcessCollector(proc=str(proc), registry=registry)
    return read(generate_latest(registry))


def ours(proc: Path = Path("/proc")) -> Described:
    found = process_metrics(proc)
    store = Store(found)
    for metric, value in found.items():
        store.value(metric).set(value)
    return read(store.render())


def folder(proc: Path, name: str, numbers: list[int], booted: int, num_open: int) -> Path:
    """A /proc that shows one process of so many numbers."""
    shutil.rmtree(proc, ignore_errors=True)
    (proc / "self" / "fd").mkdir(parents=True)
    for at in range(num_open):
        (proc / "self" / "fd" / str(at)).touch()
    (proc / "stat").write_text(f"cpu  1 2 3\nintr 5 6\nctxt 7\nbtime {booted}\nprocesses 8\n")
    (proc / "self" / "stat").write_bytes(b"7 (%s) S " % name.encode() + " ".join(map(str, numbers)).encode() + b"\n")
    (proc / "self" / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max processes             7                    8                    processes \n"
        f"Max open files            {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:<20} 999999               files     \n"
    )
    return proc


@pytest.fixture(scope="module")
def proc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine") / "proc"


@given(
    name=NAMES,
    numbers=st.lists(COUNTS, min_size=22, max_size=50),
    booted=st.integers(1, 1 << 40),
    num_open=st.integers(0, 20),
)
def test_the_metrics_are_those_of_prometheus_client(
    proc: Path, name: str, numbers: list[int], booted: int, num_open: int
) -> None:
    folder(proc, name, numbers, booted, num_open)
    assert ours(proc) == theirs(proc)


@pytest.mark.parametrize("gone", [["self/stat"], ["self/fd"], ["self/stat", "self/fd"]])
def test_a_file_that_cannot_be_read_takes_only_its_own_metrics(proc: Path, gone: list[str]) -> None:
    folder(proc, "inferd", [1] * 30, 7, 3)
    assert len(ours(proc)) == 6
    for name in gone:
        (proc / name).rename(proc / name.replace("/", "-"))
    assert ours(proc) == theirs(proc)
    assert len(ours(proc)) == 6 - 4 * ("self/stat" in gone) - 2 * ("self/fd" in gone)


def test_a_system_without_proc_has_none(tmp_path: Path) -> None:
    assert ours(tmp_path / "none") == theirs(tmp_path / "none") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_is_described_as_prometheus_client_describes_it() -> None:
    before, found, after = theirs(Path("/proc")), ours(), theirs(Path("/proc"))
    assert list(found) == list(before) == list(after)
    for (name, _, _), low, value, high in zip(found, before.values(), found.values(), after.values(), strict=True):
        if name in ("process_start_time_seconds", "process_max_fds", "process_open_fds", "process_cpu_seconds"):
            assert low <= value <= high, name
        else:
            assert 0.5 * low <= value <= 2 * high, name
