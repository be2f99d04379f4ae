"""What the repository promises about itself: the house rules that a machine can hold."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import inferd.config

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "inferd").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

# Where a broad except is right, and why: each is a border at which one failure must stay one.
BROAD_EXCEPT = {
    "worker/": "the worker's loop and its requests",
    "gateway/": "requests of clients",
    "http/": "connections of clients",
    "observe/sink.py": "the sink",
    "observe/requests.py": "the sink",
    "observe/payloads/log.py": "the loop of a thread: a defect loses one record",
    "observe/devices/feed.py": "the loop of a thread: what a driver raises is counted",
    "observe/traces/exporter.py": "the loop of a thread: a defect loses the spans of one request",
    "app/audit.py": "the loop of a thread that answers for others",
    "app/reload.py": "the loop that follows the configuration's file",
    "autoscale/controller.py": "the loop that looks at the load",
    "engine/ranks/lead.py": "the loop of a thread: a defect ends the group",
    "lifecycle/adapters.py": "the loop that looks at other servers' adapters",
    "rollout/rollouts.py": "the loop that looks at rollouts",
    "remote/connection.py": "a callback of the event loop: what it raises ends the exchange that it served",
    "remote/pool.py": "a task that connects for a request: what it raises ends that request",
    "router/replicas/loading.py": "a task that loads for others",
    "router/pool.py": "one request of a frame that answers many",
    "router/replicas/replica.py": "one request of a frame that answers many",
    "state/thread.py": "the loop of a thread, and a task that answers for others",
    "structured/trial/__main__.py": "the whole life of a forked process: a defect ends one trial",
    "predict/backend.py": "what an operator's model raises",
    "predict/pipelines/execution.py": "what an operator's model raises",
    "predict/runtimes/trial.py": "what an operator's model raises",
    "predict/probe.py": "what an operator's model raises",
    "predict/audit.py": "what an operator's model raises",
    "predict/sequences.py": "what an operator's model raises",
}


MOST_FILES = 24  # side by side in one folder


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if not path.read_text("utf-8").startswith('"""') and _has_code(path) and ast.get_docstring(_tree(path)) is None
    ]
    assert silent == []


def test_every_module_postpones_annotations() -> None:
    line = "from __future__ import annotations"
    missing = [
        str(path.relative_to(ROOT))
        for path in [*SOURCES, *TESTS]
        if line not in path.read_text("utf-8") and _has_code(path)
    ]
    assert missing == []


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _has_code(path: Path) -> bool:
    """More than a docstring and the import of annotations."""
    return any(
        not isinstance(node, ast.Expr) and ast.unparse(node) != "from __future__ import annotations"
        for node in _tree(path).body
    )


def test_no_module_is_named_after_nothing() -> None:
    refused = re.compile(r"(^|_)(utils?|common|helpers?|misc|managers?|handlers?|processors?|services?)(_|$)")
    assert [str(path.relative_to(ROOT)) for path in SOURCES if refused.search(path.stem)] == []


def test_broad_excepts_stand_only_at_borders_loops_and_the_sink() -> None:
    may_be_broad = re.compile(r"except\s*:|except\b[^:]*\b(Base)?Exception\b")
    found = []
    for path in SOURCES:
        place = path.relative_to(ROOT / "src" / "inferd").as_posix()
        if place.startswith(tuple(BROAD_EXCEPT)) or not may_be_broad.search(path.read_text("utf-8")):
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _raises_again(node):
                found.append(f"{place}:{node.lineno}")
    assert found == []


def _is_broad(node: ast.ExceptHandler) -> bool:
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in caught
    )


def _raises_again(node: ast.ExceptHandler) -> bool:
    """``except BaseException: undo(); raise`` swallows nothing."""
    return isinstance(node.body[-1], ast.Raise)


def test_only_the_clock_asks_what_time_it_is_in_the_rooms_that_decide() -> None:
    """Elsewhere ``now`` is an argument, or comes from inferd.clock, so that tests can turn it."""
    asking = re.compile(r"\btime\.(time|monotonic|perf_counter)(_ns)?\(")
    rooms = ("gateway/", "http/", "observe/", "router/", "engine/scheduling/", "window")
    found = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.relative_to(ROOT / "src" / "inferd").as_posix().startswith(rooms)
        and asking.search(path.read_text("utf-8"))
    ]
    assert found == []


def test_everything_that_the_configuration_offers_is_taken() -> None:
    exported = re.compile(r"^\s*from inferd\.config import (\([^)]*\)|.*)$", re.MULTILINE)
    files = [path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text("utf-8") for path in files]
    taken = {name for text in texts for names in exported.findall(text) for name in re.findall(r"\w+", names)}
    assert sorted(taken) == sorted(inferd.config.__all__)


def test_no_modules_import_each_other_imports_for_types_counted() -> None:
    assert _cycles(grimp.build_graph("inferd", exclude_type_checking_imports=False, cache_dir=None)) == []


def _cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules of which each reaches all the others, without the package's name."""
    reached = {name: graph.find_downstream_modules(name) for name in graph.modules}
    groups = {frozenset({a} | {b for b in reached[a] if a in reached[b]}) for a in graph.modules}
    return sorted(sorted(name.removeprefix("inferd.") for name in group) for group in groups if len(group) > 1)


def test_a_folder_has_at_most_24_modules() -> None:
    counts: dict[str, int] = {}
    for path in SOURCES:
        place = path.parent.relative_to(ROOT / "src" / "inferd").as_posix()
        counts[place] = counts.get(place, 0) + 1
    assert {place: count for place, count in counts.items() if count > MOST_FILES} == {}


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in TESTS]
    assert sorted(names) == sorted(set(names))


def test_pickles_are_read_in_one_place_and_checked_in_another() -> None:
    """Where the operator allows them, and to make sure that torch's example inputs are tensors alone."""
    reading = re.compile(
        r"^\s*(import|from) (pickle|dill|cloudpickle|shelve|marshal)\b|torch\.load\(|(joblib|pickle|dill)\.loads?\("
        r"|allow_pickle=True|trust_remote_code=True",
        re.MULTILINE,
    )
    runtimes = "src/inferd/predict/runtimes"
    found = [str(path.relative_to(ROOT)) for path in SOURCES if reading.search(path.read_text("utf-8"))]
    assert sorted(found) == [f"{runtimes}/pt2_check.py", f"{runtimes}/sklearn.py"]
    opened = (ROOT / runtimes / "sklearn.py").read_text("utf-8")
    assert opened.index("if not config.allow_pickle:") < opened.index("joblib.load(")
    checked = (ROOT / runtimes / "pt2_check.py").read_text("utf-8")
    assert re.findall(r"torch\.load\(.*", checked) == ["torch.load(io.BytesIO(raw), weights_only=True)"]


def test_every_dependency_has_its_reason_in_a_decision_record() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    reasons = (ROOT / "docs" / "decisions" / "0040-dependencies.md").read_text("utf-8")
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0] for requirement in wanted}
    assert sorted(name for name in names if f"`{name}`" not in reasons and not name.startswith("types-")) == []


RECORDS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@functools.cache
def ends_of_paths() -> set[str]:
    """What a page may call a file or folder of the repository: its path, or the end of it."""
    ours = [
        ROOT / folder
        for folder in ("src", "kernels", "compiled", "tests", "bench", "docs", "examples", "training", ".ci")
    ]
    paths = [*ROOT.glob("*"), *(path for folder in ours for path in folder.rglob("*"))]
    found = {path.relative_to(ROOT).as_posix() for path in paths}
    return {"/".join(parts[at:]) for path in found for parts in [path.split("/")] for at in range(len(parts))}


@pytest.mark.parametrize(
    "page", [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *RECORDS], ids=lambda page: page.stem
)
def test_files_that_the_architecture_names_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    named = set(re.findall(r"`([\w./-]+\.(?:py|h|cpp|md|proto)|[\w./-]+/)`", text))
    assert sorted(name for name in named if name.rstrip("/") not in ends_of_paths()) == []


def test_the_gateways_process_imports_no_torch_and_no_protobuf() -> None:
    """What the import contract says of the source, said again by a process that does it."""
    rooms = ["inferd.gateway.server", "inferd.observe", "inferd.config", "inferd.events", "inferd.worker.messages"]
    rooms += [
        f"inferd.{name}"
        for name in ("app", "router.router", "worker.supervisor")
        if (ROOT / "src" / "inferd" / f"{name.replace('.', '/')}.py").exists()
    ]
    program = f"import sys, importlib\nfor name in {rooms!r}: importlib.import_module(name)\nprint(sorted({{'torch', 'transformers', 'tokenizers', 'scipy', 'google.protobuf'}} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_bare_make_prints_the_manual() -> None:
    """Every target that is meant for people is in it, with a sentence."""
    found = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("setup", "demo", "test", "check", "bench", "soak", "docs", "clean"):
        assert re.search(rf"^  make {target} +\S", found.stdout, re.MULTILINE), target


def test_the_map_names_files_where_they_are() -> None:
    """In the tables of a room's parts; elsewhere a page may leave folders out."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("### Inside `predict/`")[2]
    predict, _, engine = text.partition("## Where a change goes")[0].partition("### Inside `engine/`")
    for part, rooms in ((predict, ("predict",)), (engine, ("engine", "checkpoints", "native", "machine"))):
        there = [ROOT / "src" / "inferd" / room for room in rooms]
        named = re.findall(r"`([\w/]+\.py|\w+/)`", "\n".join(row for row in part.splitlines() if row.startswith("|")))
        assert len(named) > 15
        missing = [name for name in named if not any((room / name).exists() for room in there)]
        assert [name for name in missing if name.rstrip("/") not in (*rooms, "kernels")] == []


def test_decision_records_are_numbered_and_say_how_they_are_held() -> None:
    assert [path.name[:4] for path in RECORDS] == [f"{number:04}" for number in range(1, len(RECORDS) + 1)]
    for path in RECORDS:
        headings = re.findall(r"^## (.+)$", path.read_text("utf-8"), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "Held by"], path.name


@pytest.mark.parametrize("script", [".ci/run", ".ci/setup"])
def test_scripts_are_executable_and_stop_at_the_first_failure(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text("utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_no_package_index_is_named() -> None:
    """Where packages come from is the user's choice."""
    for name in ("Makefile", ".ci/setup", ".ci/run", "constraints.txt", "pyproject.toml"):
        lines = [line for line in (ROOT / name).read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
        assert not re.search(r"index-url|find-links|https?://", "\n".join(lines)), name


def test_the_licence_is_apaches() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert len(text.splitlines()) > 190
