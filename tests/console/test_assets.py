"""The console's files: their hashes, their size, what a strict Content-Security-Policy forbids, and their own tests."""

from __future__ import annotations

import gzip
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src" / "inferd" / "console" / "assets"
VENDOR = ASSETS / "vendor"
OWN = sorted(path for path in ASSETS.rglob("*") if path.is_file() and VENDOR not in path.parents)
SERVED = [path for path in sorted(ASSETS.rglob("*")) if path.suffix in (".html", ".js", ".mjs", ".css", ".svg")]
MODULES = [path for path in OWN if path.suffix == ".js"]
MAX_COMPRESSED = 100_000

spec = importlib.util.spec_from_file_location("vendor", ROOT / ".ci" / "vendor.py")
assert spec is not None
assert spec.loader is not None
vendor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vendor)


def name(path: Path) -> str:
    return path.relative_to(ASSETS).as_posix()


def test_each_library_is_the_file_that_its_readme_names() -> None:
    packages, files = vendor.tables((VENDOR / "README.md").read_text(encoding="utf-8"))
    assert {file.name for file in files} == {path.name for path in VENDOR.iterdir()} - {"README.md"}
    assert {package.name for package in packages} == {file.package for file in files}
    assert {f"LICENSE-{package.name}" for package in packages} <= {file.name for file in files}
    for file in files:
        assert vendor.integrity((VENDOR / file.name).read_bytes()) == file.integrity, file.name


def test_a_changed_library_would_have_another_hash() -> None:
    _, files = vendor.tables((VENDOR / "README.md").read_text(encoding="utf-8"))
    assert vendor.integrity((VENDOR / files[0].name).read_bytes() + b" ") != files[0].integrity


def test_the_whole_console_is_small() -> None:
    sizes = {name(path): len(gzip.compress(path.read_bytes(), 9)) for path in SERVED}
    assert sum(sizes.values()) <= MAX_COMPRESSED, sizes


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix in (".html", ".js", ".css")], ids=name)
def test_no_file_names_another_server_or_the_root(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"https?://[\w.]+", text) == []
    assert re.findall(r"(?:src|href|action)=\"/|url\(/|(?:import|from) \"(?!\.)|import\(\"(?!\.)", text) == []


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix in (".html", ".js")], ids=name)
def test_no_file_makes_code_or_markup_from_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|DOMParser|createContextual"
        r"|\beval\(|new Function|setAttribute\(\"(?:on|style)|style=\"|setTimeout\(\"|srcdoc|trustedTypes"
    )
    assert re.findall(forbidden, text) == []
    if path.suffix == ".html":
        assert re.findall(r"<style|\son\w+=|<script(?![^>]*\ssrc=)|<meta http-equiv", text) == []


def test_no_secret_is_kept_in_the_browser() -> None:
    stores = [
        name(path) for path in MODULES if re.search(r"Storage|indexedDB|document\.cookie", path.read_text("utf-8"))
    ]
    assert stores == ["settings.js"]


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix in (".html", ".js")], ids=name)
def test_each_file_that_is_imported_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        found = re.findall(r"(?:from|import\() ?\"(\.[^\"]+)\"", text)
        missing = [target for target in found if not (path.parent / target).resolve().is_file()]
    else:
        found = re.findall(r"(?:src|href)=\"(?:console/)?(assets/[^\"]+)\"", text)
        missing = [target for target in found if not (ASSETS.parent / target).is_file()]
    assert missing == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_each_module_is_valid() -> None:
    check = (
        'const vm = require("vm"), fs = require("fs");'
        'for (const path of process.argv.slice(1)) new vm.SourceTextModule(fs.readFileSync(path, "utf8"), {identifier: path})'
    )
    command = ["node", "--no-warnings", "--experimental-vm-modules", "-e", check, "--", *map(str, MODULES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_modules_pass_their_own_tests() -> None:
    tests = Path(__file__).with_name("modules.test.mjs")
    done = subprocess.run(["node", "--test", str(tests)], check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
