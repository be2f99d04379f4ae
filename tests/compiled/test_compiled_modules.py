"""What a wheel compiles of the gateway: mypyc takes every listed module, and drops nothing of it without a word."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from inferd.cli import version

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    """A script of the folder ``compiled``."""
    spec = importlib.util.spec_from_file_location(f"compiled_{name}", ROOT / "compiled" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load("check")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class Body(msgspec.Struct):\n    n: int = 0\n", "Body is a struct"),
        ("class Entry:\n    def __lt__(self, other): return True\n", "Entry is compared and has no hash"),
        (
            "class Head:\n    @property\n    def first(self) -> Callable[[bytes], bytes]: ...\n",
            "Head.first is a property that returns a callable",
        ),
        (
            "class Late(Exception): ...\ndef f():\n    try: g()\n    except Late as error: h(error)\n    except Lost as error: i(error)\n",
            "f names exceptions of Late and of Lost 'error'",
        ),
        ("def f(n, all): return n / sum(all)\n", "n / sum(all) calculates with a sum that has no start"),
        ("WAITS_S: Final = (0.5, 2.0)\n", "WAITS_S is a Final tuple that begins with a float"),
        (
            "async def f():\n    try: g()\n    except Late:\n        await h()\n        raise\n",
            "line 3 waits while an exception",
        ),
        ("async def f():\n    try: g()\n    finally: await h()\n", "line 2 waits while an exception"),
        ("async def f(all):\n    async with aclosing(all): g()\n", "line 2 ends aclosing(all) while an exception"),
        ("class Log(logging.Handler):\n    level = 1\n", "Log is compiled and its base Handler is not"),
        (
            "def f(all):\n    for one in all: g(one)\nasync def h(all): await asyncio.to_thread(f, all)\n",
            "f runs on another thread",
        ),
        ("def f(rest): rest = rest[write(rest):]\n", "line 1 calls in a slice, [write(rest):]"),
        ("from lib import Server\nclass Own(Server): ...\n", "Own is compiled and its base Server is not"),
        ("from inferd.errors import InferdError\nclass Late(InferdError): ...\n", "Late is compiled and its base"),
    ],
)
def test_sources_that_would_behave_differently_are_named(text: str, problem: str) -> None:
    (found,) = check.problems({"inferd.hot": text}, {})
    assert problem in found


def test_an_interpreted_class_with_a_compiled_base_is_named() -> None:
    other = "from inferd.hot import Base\nclass Derived(Base):\n    pass\n"
    (found,) = check.problems({"inferd.hot": "class Base:\n    pass\n"}, {"inferd.cold": other})
    assert "Derived is interpreted and cannot inherit from a compiled Base" in found
    for base in ("class Base(Protocol):", "@mypyc_attr(allow_interpreted_subclasses=True)\nclass Base:"):
        assert list(check.problems({"inferd.hot": f"{base}\n    pass\n"}, {"inferd.cold": other})) == []


def test_a_compiled_class_with_an_interpreted_base_is_named() -> None:
    text = "from inferd.cold import Base\nclass Derived(Base):\n    __slots__ = ()\n"
    (found,) = check.problems({"inferd.hot": text}, {"inferd.cold": "class Base:\n    pass\n"})
    assert "Derived is compiled and its base Base is not" in found


def test_sources_that_mypyc_compiles_as_they_are_written_are_not_named() -> None:
    text = """
STATUSES: Final = (204, 304)
class Entry:
    __slots__ = ("number",)
    def share(self, all):
        try: return self.number / sum(all, 0.0)
        except ValueError as error: f(error)
        except KeyError as error: f(error)
    def __eq__(self, other): return True
    def __lt__(self, other): return True
class Waits(NamedTuple):
    first_s: float = 1.0
class Late(ValueError): ...
class Later(Late): ...
class Connection(asyncio.Protocol, ABC): ...
async def f(all):
    error = None
    try:
        async with asyncio.timeout(1.0): await g(all)
        async with self._lock: await g(all)
    except Late as late: error = late
    finally: del all
    await h()
    if error is not None: raise error
"""
    assert list(check.problems({"inferd.hot": text}, {})) == []
    assert list(check.dropped_defaults({"inferd.hot": text}, [])) == []


def test_a_default_that_no_instance_gets_is_named() -> None:
    text = "class A:\n    kept: int = 1\n    dropped: int | str | None = None\n    SHARED: ClassVar[int] = 3\n"
    operations = [
        "def A.__mypyc_defaults_setup(__mypyc_self__):",
        "    __mypyc_self__ :: inferd.hot.A",
        "    __mypyc_self__.kept = 2",
        "def A.other(self):",
        "    __mypyc_self__.dropped = r0",
    ]
    (found,) = check.dropped_defaults({"inferd.hot": text}, operations)
    assert "the default of A.dropped is dropped" in found


@pytest.mark.soak  # `make test-compiled` compiles every one of them
@pytest.mark.timeout(600)
def test_mypyc_generates_code_for_every_listed_module(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "compiled" / "generate.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    targets = (tmp_path / "targets.cmake").read_text()
    lines = (ROOT / "compiled" / "modules.txt").read_text().splitlines()
    listed = [line.partition("#") for line in lines if line and not line.startswith("#")]
    assert len(listed) > 30
    for module, _, reason in listed:
        assert f'"{module.strip()}"' in targets
        assert reason.strip(), f"{module} has no reason"
    assert f"set(COMPILED_LIBRARY {version.COMPILED.rpartition('.')[2]})" in targets
