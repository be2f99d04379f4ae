"""The types in the console's comments, checked by TypeScript. TypeScript and the types of the libraries come from npm."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.console.npm import fetch

pytestmark = [pytest.mark.soak, pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")]

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src" / "inferd" / "console" / "assets"
TYPESCRIPT = (
    "typescript@5.9.3",
    "sha512-jl1vZzPDinLr9eUt3J/t7V6FgNEw9QjvBPdysz9KfQDD41fQrC2Y4vKQdiaUpFT4bXlb1RHhLpp8wtm6M5TgSw==",
)
OPTIONS = "--noEmit --allowJs --checkJs --skipLibCheck --target es2023 --module esnext --moduleResolution bundler"

spec = importlib.util.spec_from_file_location("vendor", ROOT / ".ci" / "vendor.py")
assert spec is not None
assert spec.loader is not None
vendor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vendor)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """TypeScript, and a copy of the modules with the types of the libraries beside them."""
    folder = tmp_path_factory.mktemp("npm")
    compiler = fetch(*TYPESCRIPT, folder / "typescript") / "bin" / "tsc"
    shutil.copytree(ASSETS, folder / "assets")
    packages, _ = vendor.tables((ASSETS / "vendor" / "README.md").read_text(encoding="utf-8"))
    sources = {f"{one.name}@{one.version}": one.integrity for one in packages}
    for name, integrity in sources.items():
        package = fetch(name, integrity, folder / name.split("@")[0])
        if name.startswith("preact@"):
            for file in ("dom", "jsx"):
                shutil.copy(package / "src" / f"{file}.d.ts", folder / "assets" / "vendor")
            shutil.copy(package / "src" / "index.d.ts", folder / "assets" / "vendor" / "preact.d.mts")
        elif name.startswith("htm@"):
            shutil.copy(package / "dist" / "htm.d.ts", folder / "assets" / "vendor" / "htm.d.mts")
    return compiler, folder / "assets"


def check(compiler: Path, assets: Path) -> str:
    """What TypeScript says of the modules."""
    libraries = "es2023,dom,dom.iterable,dom.asynciterable"
    files = [str(assets / name) for name in ("app.js", "docs.js")]
    command = ["node", str(compiler), *OPTIONS.split(), "--lib", libraries, *files]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=110).stdout


def test_the_modules_agree_with_their_types(copy: tuple[Path, Path]) -> None:
    assert check(*copy) == ""


def test_a_wrong_type_would_be_found(copy: tuple[Path, Path]) -> None:
    compiler, assets = copy
    module = assets / "app.js"
    text = module.read_text(encoding="utf-8")
    module.write_text(text + "\nsetTheme(5);\n", encoding="utf-8")
    try:
        assert "not assignable to parameter of type 'string'" in check(compiler, assets)
    finally:
        module.write_text(text, encoding="utf-8")
