"""The documentation is held to the code: links lead somewhere, examples run, names and flags exist."""

from __future__ import annotations

import ast
import doctest
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import numpy
import pytest
import skops.io
import yaml
from sklearn.linear_model import LogisticRegression

from inferd.cli.main import cli, main
from inferd.cli.ready import curl_line, python_lines
from inferd.config import load_config
from inferd.events import Event
from inferd.gateway.limits import RANGES
from inferd.gateway.openai.wire import IGNORED, REFUSED
from inferd.gateway.routes import ROUTES
from inferd.observe import metrics
from inferd.observe.alerts.burn_rates import BURN_RATES
from inferd.observe.alerts.general import GENERAL
from inferd.observe.aliases import ALIASES
from inferd.observe.page import as_page
from inferd.predict.pipelines.wiring import check_steps

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: Path, *languages: str) -> Iterator[str]:
    for language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def anchors(page: Path) -> set[str]:
    """The fragments that headings make, as GitHub does."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name} links to {link}, which is not there"
        assert not fragment or fragment in anchors(found), f"{page.name} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_in_the_pages_compiles_and_json_and_yaml_parse(page: Path) -> None:
    for text in fences(page, "python"):
        ast.parse(text)
    for text in fences(page, "json"):
        json.loads(text)
    for text in fences(page, "yaml"):
        yaml.safe_load(text)


def test_imports_in_the_pages_exist() -> None:
    for page in PAGES:
        for text in fences(page, "python"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "inferd":
                    module = __import__(node.module, fromlist=["*"])
                    assert all(hasattr(module, name.name) for name in node.names), f"{page.name}: {ast.unparse(node)}"


def test_the_kv_caches_examples_print_what_they_say() -> None:
    result = doctest.testfile(str(ROOT / "docs" / "kv-cache.md"), module_relative=False)
    assert result.attempted >= 40
    assert result.failed == 0


def test_the_configuration_file_in_the_guide_is_valid(tmp_path: Path) -> None:
    (example,) = fences(ROOT / "docs" / "getting-started.md", "yaml")
    path = tmp_path / "inferd.yaml"
    path.write_text(example)
    config = load_config(path, {}, {})
    assert set(config.models) == {"chat", "demo"}


def test_the_readmes_file_and_commands_bring_up_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked here, not served: ``tests/test_reload.py`` has status, reload and drain with a server."""
    readme = ROOT / "README.md"
    (example,) = fences(readme, "yaml")
    (tmp_path / "inferd.yaml").write_text(example)
    rows = numpy.arange(12.0).reshape(6, 2)
    skops.io.dump(LogisticRegression().fit(rows, [0, 1] * 3), tmp_path / "churn.skops")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "data"))
    lines = [words for page, words in commands() if page == "README.md"]
    named = [words[0] for words in lines if words[0] not in ("serve", "predict")]
    assert named == ["check", "keys", "status", "why", "reload", "drain"]
    (keys,) = [words for words in lines if words[0] == "keys"]
    assert main(["check", "inferd.yaml"]) == 0
    assert "API keys are needed as soon as one exists" in capsys.readouterr().out
    assert main(keys) == 0
    assert capsys.readouterr().out.startswith("sk-inf-")
    config = load_config(tmp_path / "inferd.yaml", {}, {})
    assert config.tenants[keys[keys.index("--tenant") + 1]].rpm == 600
    assert keys[keys.index("--models") + 1] in config.models
    assert list(config.models) == ["chat", "churn", "intents"]
    check_steps("intents", config.models["intents"])


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``inferd ...`` line of the pages' shell examples, with the page's name."""
    for page in PAGES:
        for text in fences(page, "bash", "console"):
            for line in text.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ")
                if command.startswith("inferd "):
                    yield page.name, shlex.split(command, comments=True)[1:]


def test_documented_commands_and_their_flags_exist() -> None:
    found = list(commands())
    assert found
    with click.Context(cli) as context:
        for page, words in found:
            command = cli.get_command(context, words[0])
            assert command is not None, f"{page}: there is no command inferd {words[0]}"
            while isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
                words = words[1:]
                command = command.get_command(context, words[0])
                assert command is not None, f"{page}: there is no command {words[0]} in its group"
            flags = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            for word in words[1:]:
                assert not word.startswith("--") or word.partition("=")[0] in flags, f"{page}: no flag {word}"


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for named in re.findall(r"(?:`|^\$ |^)make ([a-z-]+)", text, re.MULTILINE):
            assert named in targets, f"{page.name} speaks of make {named}"


def test_every_metric_that_the_pages_name_exists() -> None:
    names = {metric.name for metric in metrics.TABLE} | {alias.name for alias in ALIASES}
    for page in PAGES:
        for named in re.findall(r"\b((?:inferd_|vllm:)\w+)", page.read_text(encoding="utf-8")):
            if re.search(r"_(seconds|total|tokens|ratio|waiting|blocks|state|bytes)$", named) or named.startswith(
                "vllm:"
            ):
                assert named in names, f"{page.name} names {named}, which is no metric"


def test_the_labels_that_the_pages_choose_exist() -> None:
    words = {*metrics.OUTCOMES, *metrics.REFUSALS, *metrics.STATES, *metrics.FINISHED_REASONS, *metrics.BLOCK_STATES}
    words |= {*metrics.BREAKER_STATES, *metrics.UNLOADS}
    for page in PAGES:
        for label, value in re.findall(r"\{(\w+)=\"(\w+)\"\}", page.read_text(encoding="utf-8")):
            if label in ("outcome", "reason", "state", "fault", "finished_reason"):
                assert value in words, f'{page.name} names {label}="{value}"'


def test_the_alerts_that_the_pages_name_exist() -> None:
    names = {alert.name for alert in GENERAL} | {rate.alert for rate in BURN_RATES}
    for page in PAGES:
        for named in re.findall(r"\bInferd[A-Z]\w+", _FENCE.sub("", page.read_text(encoding="utf-8"))):
            assert named in names, f"{page.name} names {named}, which is no alert"


def test_every_route_and_field_of_the_api_is_on_its_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    text = (ROOT / "docs" / "openai-api.md").read_text(encoding="utf-8")
    missing = [route.pattern for route in ROUTES if f"{route.pattern}`" not in pages]
    fields = {name for table in (IGNORED, REFUSED) for names in table.values() for name in names}
    missing += [name for name in sorted(fields | RANGES.keys() - {"token id"}) if f"`{name}`" not in text]
    assert missing == []


def test_the_events_that_the_table_of_metrics_names_exist() -> None:
    known = {event.__name__ for event in Event.__args__} | {
        "start",
        "log writer",
        "sink",
        "driver",
        "system",
        "exporter",
        "/proc",
    }
    for metric in metrics.TABLE:
        assert set(metric.event.split(", ")) <= known, metric.name


def test_the_page_of_metrics_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == as_page(), "run make docs"


def test_every_generated_page_is_current() -> None:
    """The same command as ``make check``, for all pages at once."""
    found = subprocess.run(
        [sys.executable, ".ci/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    indices = {
        folder: (ROOT / "docs" / folder / "index.md").read_text(encoding="utf-8")
        for folder in ("decisions", "runbooks")
    }
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        own = indices.get(page.parent.name) if page.name != "index.md" else None
        is_linked = f"({page.name})" in own if own is not None else f"({name})" in index
        assert name == "index.md" or is_linked, f"no index links docs/{name}"


def test_every_page_has_a_place_in_the_sites_navigation() -> None:
    """`make docs-site` refuses a page that the navigation does not name, where MkDocs is installed."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (?:[^:]+: )?(\S+\.md)$", text, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(name for name in named if not name.startswith("project/")) == sorted(pages)


GENERATED = {"architectures.md", "configuration.md", "experiments.md", "metrics.md", "model-card.md"}
_NO_PROSE = re.compile(r"^(\||#|>|<!--|    |\[\^|!\[|- buckets:)|https?://")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_the_subjects_of_a_page_are_things(page: Path) -> None:
    """Requests, sockets and tensors are no people: the subject of a sentence is a noun that names the thing."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    found = re.findall(r"[^.\n]*\b(?:nobody|whoever|somebody|anybody|everybody)\b[^.\n]*", prose, re.IGNORECASE)
    assert found == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_prose_has_lines_of_at_most_120_characters(page: Path) -> None:
    """Tables, links to elsewhere and blocks of code may be longer, and so may pages that a program writes."""
    lines = _FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert page.name in GENERATED or [line for line in lines if len(line) > 120 and not _NO_PROSE.search(line)] == []


def test_readme_and_architecture_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_files_and_folders_that_the_pages_name_in_backticks_exist() -> None:
    """A page may leave leading folders out: `batcher.py`, `engine/`."""
    ours = ("src", "kernels", "tests", "bench", "docs", "examples", "training", ".ci")
    found = [*ROOT.glob("*"), *(path for folder in ours for path in (ROOT / folder).rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in found]
    tails = {"/".join(part[at:]) for part in parts for at in range(len(part))}
    ours_alone = r"`((?:src/inferd|tests|docs|bench|kernels|engine|gateway|http|router|worker|observe|registry|cli)/[\w./-]*|[\w/-]+\.(?:h|cpp|proto))`"
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for named in re.findall(ours_alone, text):
            assert named.rstrip("/") in tails, f"{page.name} names {named}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    assert len(named) > 260 or page.name != "requirements.md"
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{path} has no {name}"
        )


def test_every_extra_that_a_page_or_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for path in (*PAGES, *(ROOT / "src" / "inferd").rglob("*.py")):
        for named in re.findall(r"inferd\[([a-z][a-z,]*)\]", path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras.keys(), f"{path.name} names inferd[{named}]"


def test_every_requirement_has_a_test_or_says_that_it_is_open() -> None:
    rows = re.findall(
        r"^\| ([A-O]\d\d) \| (.*) \| (.*) \| (.*) \|$",
        (ROOT / "docs" / "dev" / "requirements.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 117
    assert [code for code, _, tests, see in rows if not tests.strip() and not see.strip()] == []


def test_the_readmes_lines_to_paste_are_those_the_terminal_shows() -> None:
    address, name = "http://127.0.0.1:8000", "demo"
    readme = ROOT / "README.md"
    pythons = {ast.unparse(ast.parse(text)) for text in fences(readme, "python")}
    assert ast.unparse(ast.parse(python_lines(address, name))) in pythons
    curls = [shlex.split(text.replace("\\\n", " ")) for text in fences(readme, "bash")]
    assert shlex.split(curl_line(address, name)) in curls
