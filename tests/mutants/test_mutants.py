"""The runner of wrong changes: what it changes, that processes run it, and that the changes by hand are still to be had."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.mutants import __main__ as main_module
from tests.mutants.__main__ import traced
from tests.mutants.equivalent import EQUIVALENT, reason_for
from tests.mutants.hook import write_hook
from tests.mutants.known import KNOWN, Known
from tests.mutants.operators import Change, applied, changes
from tests.mutants.run import Fate, Limits, Outcome, failed_tests
from tests.mutants.selection import Nearness, likely_tests, rank, sample
from tests.mutants.sources import PACKAGE, ROOT, Source, bodies, imported, module_name, room_of
from tests.mutants.trace import MAPPED, Seen, Trace, kept, marked
from tests.tiers import THOROUGH

SOURCE = '''"""Text that no change touches: 1 < 2."""

LIMIT = 3


def first(items: list[int] | None, flag: bool) -> int:
    """Nor this: 1 < 2."""
    if items is not None and not flag:
        _log.info("1 < 2")
        items.sort()
        return min(items) + 1
    raise ValueError(f"{flag} < 2")


class Thing:
    size: int = 4

    def grow(self, timeout_s: float) -> None:
        while self.size < 8:
            self.size += 1
            if self.wait(timeout_s=0.5):
                continue

    def check(self, now: float) -> bool:
        return now - self.since > limit(now) and any(zip(self.a, self.b, strict=True))
'''


def written(source: str) -> set[tuple[str, str]]:
    return {(source[change.start : change.end], change.text) for change in changes("a.py", source)}


def test_each_change_is_one_mistake_that_still_compiles() -> None:
    assert written(SOURCE) == {
        ("items is not None and not flag", "((items is not None) or (not flag))"),
        ("items is not None and not flag", "(not (items is not None and not flag))"),
        ("items is not None", "items is None"),
        ("not flag", "flag"),
        ("items.sort()", "pass"),
        ("min(items) + 1", "(min(items) - 1)"),
        ("min", "max"),
        ("1", "2"),
        ("self.size < 8", "(not (self.size < 8))"),
        ("self.size < 8", "self.size <= 8"),
        ("8", "9"),
        ("self.size += 1", "pass"),
        ("self.wait(timeout_s=0.5)", "(not (self.wait(timeout_s=0.5)))"),
        ("continue", "break"),
        (
            "now - self.since > limit(now) and any(zip(self.a, self.b, strict=True))",
            "((now - self.since > limit(now)) or any(zip(self.a, self.b, strict=True)))",
        ),
        ("now - self.since", "(now + self.since)"),
        ("any", "all"),
    }
    for change in changes("a.py", SOURCE):
        ast.parse(applied(change, SOURCE))


def test_a_block_keeps_its_name_when_lines_move() -> None:
    names = [name for name, _ in bodies(ast.parse(SOURCE), "a.py")]
    assert names == [
        "a.py:first:0",
        "a.py:first:1",
        "a.py:Thing.grow:0",
        "a.py:Thing.grow:1",
        "a.py:Thing.grow:2",
        "a.py:Thing.check:0",
    ]

    moved = "import sys\n\n\n" + SOURCE.replace("class Thing", "def other() -> None: ...\n\n\nclass Thing")
    assert set(names) < {name for name, _ in bodies(ast.parse(moved), "a.py")}


def test_every_block_of_a_module_is_marked_once() -> None:
    file = "router/choosing/breaker.py"
    names: list[str] = []
    text = marked(file, names)
    assert text.count("__inferd_blocks__[") == len(names) == len(set(names))
    assert ast.get_docstring(ast.parse(text)) is not None


def test_a_sample_is_the_same_for_the_same_seed_and_has_some_of_every_room() -> None:
    rooms = ("state", "cache", "window")
    drawn = sample(20, 3, rooms)
    assert drawn == sample(20, 3, rooms)
    assert drawn != sample(20, 4, rooms)
    assert {room_of(change.file) for change in drawn} == set(rooms)


def test_the_tests_of_every_room_are_asked() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))} - {"models"}
    assert {f"tests/{room}" for room in rooms} <= set(traced())
    assert "tests/test_ends.py" in traced()
    assert "tests/bench" not in traced()


def test_a_change_keeps_its_place_in_the_sample_when_its_file_moves_or_grows() -> None:
    for change in changes("router/waiting/queue.py", SOURCE):
        elsewhere = change._replace(
            file="http/queue.py", block=change.block.replace("router", "http"), line=99, start=9
        )
        assert rank(elsewhere, 1) == rank(change, 1) != rank(change, 2)


def test_a_rooms_own_tests_are_asked_first_and_others_when_they_notice_nothing() -> None:
    change = next(change for change in changes("router/waiting/queue.py", SOURCE))._replace(
        block="router/waiting/queue.py:push:0"
    )
    seconds = {
        "tests/gateway/test_x.py::test_quick": 0.01,
        "tests/router/test_pool_laws.py::test_of_the_folder": 0.2,
        "tests/router/waiting/test_queue.py::test_slow_of_its_own": 1.0,
        "tests/router/waiting/test_queue.py::test_that_does_not_run_it": 0.1,
        "tests/test_app.py::test_of_a_whole_server": 9.0,
    }
    hits = np.array([[True], [True], [True], [False], [True]])
    columns = {change.block: 0}
    tests = [*seconds]
    seen = {
        file: Seen([tests[row] for row in rows], columns, hits[rows])
        for file in {test.partition("::")[0] for test in tests}
        for rows in [[row for row, test in enumerate(tests) if test.startswith(f"{file}::")]]
    }
    first, second = likely_tests(change, Trace(seen, seconds), [*seen])
    assert first == [
        "tests/router/waiting/test_queue.py::test_slow_of_its_own",
        "tests/router/test_pool_laws.py::test_of_the_folder",
        "tests/gateway/test_x.py::test_quick",
    ]
    assert second == ["tests/test_app.py::test_of_a_whole_server"]


def test_a_test_that_fails_once_with_a_change_has_not_noticed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    fails = {"unsteady": [True, False], "steady": [True, True]}

    def trying(name: str, file: str, text: str, tests: list[str], limits: Limits) -> Outcome:
        asked.append([*tests])
        for test in tests:
            if test in fails and fails[test].pop(0):
                return Outcome("killed", test, 1.0, len(tests))
        return Outcome("survived", "", 1.0, len(tests))

    monkeypatch.setattr(main_module, "try_change", trying)
    limits = Limits(1.0, 1.0)
    assert main_module._noticed("0", "a.py", "", ["quiet", "unsteady", "steady"], limits).by == "steady"
    assert asked == [["quiet", "unsteady", "steady"], ["unsteady"], ["quiet", "steady"], ["steady"]]
    fails["unsteady"] = [True, False]
    assert main_module._noticed("0", "a.py", "", ["unsteady"], limits).fate == "survived"


@pytest.mark.parametrize(
    ("fates", "by", "is_noticed"),
    [
        (["killed", "survived", "killed"], "tests/test_window.py::test_a[1]", True),
        (["timed out", "survived", "timed out"], "tests/test_window.py::test_a[1]", True),
        (["killed", "survived", "survived"], "tests/test_window.py::test_a[1]", False),  # it failed by chance
        (["killed", "killed"], "tests/test_window.py::test_a[1]", False),  # it fails without the change as well
        (["survived"], "", False),
        (["timed out"], "no end", False),  # it is not known how long the files take
    ],
)
def test_the_nearest_tests_notice_a_change_where_they_fail_with_it_alone(
    monkeypatch: pytest.MonkeyPatch, fates: list[Fate], by: str, is_noticed: bool
) -> None:
    file = "window.py"
    source = (PACKAGE / file).read_text("utf-8")
    change = next(iter(changes(file, source)))
    wrong, name = applied(change, source), "tests/test_window.py::test_a"
    asked: list[tuple[str, list[str]]] = []

    def trying(number: str, of: str, text: str, tests: list[str], limits: Limits) -> Outcome:
        asked.append((text, tests))
        return Outcome(fates[len(asked) - 1], by, 1.0, 1)

    monkeypatch.setattr(main_module, "try_change", trying)
    tried = main_module._try_nearest(0, change, ["tests/test_window.py"])
    assert (tried.is_noticed, tried.num_files) == (is_noticed, fates == ["survived"])
    assert asked == [(wrong, ["tests/test_window.py"]), (source, [name]), (wrong, [name])][: len(fates)]


def test_files_that_passed_to_their_end_with_a_change_are_not_traced_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "window.py"
    noticed, passed, cut = list(changes(file, (PACKAGE / file).read_text("utf-8")))[:3]
    near = [f"tests/test_{number}.py" for number in range(30)]
    nearest = {
        noticed: main_module.Tried(noticed, Outcome("killed", near[0], 1.0, 3), None),
        passed: main_module.Tried(passed, None, None, 3),
        cut: main_module.Tried(cut, None, None),
    }
    asked: dict[Change, list[str]] = {passed: [], cut: []}

    def trying(number: int, change: Change, trace: object, files: list[str]) -> main_module.Tried:
        asked[change] += files
        return main_module.Tried(change, None, None)

    monkeypatch.setattr(main_module, "Nearness", lambda *_: SimpleNamespace(files=lambda change: near))
    monkeypatch.setattr(main_module, "sources_of_tests", lambda files: {})
    monkeypatch.setattr(main_module, "sources", dict)
    monkeypatch.setattr(main_module, "_trace", lambda jobs, files, is_kept: None)
    monkeypatch.setattr(main_module, "_try_nearest", lambda number, change, files: nearest[change])
    monkeypatch.setattr(main_module, "_try", trying)
    tried = main_module._try_all([noticed, passed, cut], 1, is_kept=False)
    assert [one.is_noticed for one in tried] == [True, False, False]
    assert asked == {passed: near[3:24], cut: near[:24]}


def test_the_name_of_a_failed_test_may_have_spaces() -> None:
    said = [
        "E   FAILED tests are listed below",
        "FAILED tests/a/test_b.py::test_c[past the deadline] - AssertionError: no - not this",
        "ERROR tests/a/test_d.py",
    ]
    assert failed_tests(said) == ["tests/a/test_b.py::test_c[past the deadline]", "tests/a/test_d.py"]


def test_processes_import_the_changed_module_and_the_working_tree_stays_as_it_is(tmp_path: Path) -> None:
    file = "window.py"
    source = (PACKAGE / file).read_text("utf-8")
    env = write_hook(tmp_path, {file: source + "\nWRONG = True\n"})
    program = "import inferd.window as w, subprocess, sys; print(w.WRONG, w.__file__)"
    twice = f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {program!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", twice], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(PACKAGE / file)]
    assert (PACKAGE / file).read_text("utf-8") == source


def test_a_changes_own_tests_are_nearest_and_then_those_that_share_rare_features_with_it() -> None:
    change = next(change for change in changes("router/waiting/queue.py", SOURCE))._replace(
        block="router/waiting/queue.py:Queue.push:0", original="length > limit"
    )
    every = frozenset({"inferd.types"})
    tested = {
        "tests/app/test_root.py": Source("", every),
        "tests/drift/test_mean.py": Source("", every),
        "tests/gateway/test_limits.py": Source("self.limit", every),
        "tests/gateway/test_through_a_server.py": Source("", every | {"inferd.router.waiting.queue"}),
        "tests/remote/test_of_a_user.py": Source("", every | {"inferd.remote.sending"}),
        "tests/router/test_pool.py": Source("", every),
        "tests/router/waiting/test_queue.py": Source("", frozenset()),
        "tests/router/waiting/test_order.py": Source("of the queue", every),
        "tests/worker/test_names.py": Source("queue.push()", every),
    }
    queue = frozenset({"inferd.router.waiting.queue"})
    modules = {
        "remote/sending.py": Source("queue.push(1)", queue),
        "worker/loop.py": Source("queue.pull()", queue),  # not what was changed
    }
    ranked = Nearness(tested, modules).files(change)
    assert ranked[0] == "tests/router/waiting/test_queue.py"
    assert {*ranked[1:7]} == {*tested} - {ranked[0], *ranked[7:]}
    assert ranked[7:] == ["tests/app/test_root.py", "tests/drift/test_mean.py"]


def test_tests_of_modules_outside_of_rooms_are_their_own() -> None:
    change = next(change for change in changes("errors.py", SOURCE))._replace(block="errors.py:kinds:0")
    tested = {name: Source("", frozenset()) for name in ("tests/app/test_errors.py", "tests/test_errors.py")}
    assert Nearness(tested, {}).files(change) == ["tests/test_errors.py", "tests/app/test_errors.py"]


def test_what_is_imported_from_a_package_is_its_module_or_else_the_package() -> None:
    text = "import inferd.types\nfrom inferd import LLM, clock\nfrom inferd.errors import Unavailable\n"
    package = {"inferd", "inferd.clock", "inferd.errors", "inferd.llm", "inferd.types"}
    assert {*imported(text, package)} == {"inferd.types", "inferd", "inferd.clock", "inferd.errors"}


@THOROUGH
def test_a_run_that_is_interrupted_keeps_what_its_complete_files_ran(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(
        "import builtins\n\n"
        "def test_one():\n    builtins.__inferd_blocks__[3] = 1\n\n"
        "def test_failing():\n    builtins.__inferd_blocks__[4] = 1\n    assert False\n"
    )
    (tmp_path / "test_second.py").write_text(
        "def test_before():\n    pass\n\ndef test_interrupted():\n    raise KeyboardInterrupt\n"
    )
    marks = tmp_path / "marks"
    marks.write_bytes(bytes(8))
    env = write_hook(tmp_path / "hook", {}, MAPPED.format(path=str(marks)))
    env |= {
        "INFERD_MUTANTS_SEEN": str(tmp_path),
        "INFERD_MUTANTS_NAMES": "some.names",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.recording", "test_first.py", "test_second.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    seen = tmp_path / kept("test_first.py").name
    told = json.loads(seen.read_text())
    assert (told["file"], told["names"], [*told["tests"]]) == (
        "test_first.py",
        "some.names",
        ["test_first.py::test_one"],
    )
    assert seen.with_suffix(".hits").read_bytes() == bytes([0b00010000])
    assert not (tmp_path / kept("test_second.py").name).exists()


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.what)
def test_a_change_by_hand_is_still_to_be_had(known: Known) -> None:
    source = (PACKAGE / known.file).read_text("utf-8")
    assert source.count(known.text) == 1, f"{known.file} has changed: make the same mistake where it can be made now"
    compile(source.replace(known.text, known.replacement), known.file, "exec")
    for test in known.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text("utf-8")


@THOROUGH
def test_what_is_said_to_be_equivalent_is_still_one_of_the_changes_and_says_why() -> None:
    for known in EQUIVALENT:
        source = (PACKAGE / known.file).read_text("utf-8")
        assert known.reason in {reason_for(change, source) for change in changes(known.file, source)}, known
        assert known.reason.endswith(".")


def test_modules_are_named_as_they_are_imported() -> None:
    assert module_name("__init__.py") == "inferd"
    assert module_name("engine/__init__.py") == "inferd.engine"
    assert module_name("engine/stop.py") == "inferd.engine.stop"
