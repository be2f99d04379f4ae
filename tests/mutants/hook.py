"""Interpreters that import changed modules: a folder with a ``sitecustomize.py``, for PYTHONPATH.

Every process that a test starts inherits PYTHONPATH, so servers and workers run the changed module as well. No file of the
working tree is touched, so several changes can be tried at once; the bytecode of a changed module is kept nowhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from tests.mutants.sources import PACKAGE, ROOT, module_name

_FINDER: Final = '''"""Written by tests/mutants: modules of this process come from elsewhere."""
import importlib.machinery
import importlib.util
import os
import sys

CHANGED = {changed!r}
PACKAGE = {package!r}


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        if fullname not in CHANGED:
            return super().get_code(fullname)
        with open(CHANGED[fullname], encoding="utf-8") as file:
            return compile(file.read(), self.path, "exec", dont_inherit=True)


class Finder:
    """Every module of the package comes from this tree, whatever is installed; but for the compiled one."""

    def find_spec(self, name, path=None, target=None):
        room, _, rest = name.partition(".")
        if room != "inferd" or rest == "_kernels":
            return None
        place = "/".join([PACKAGE, *rest.split(".")]).rstrip("/")
        for file, folders in ((place + "/__init__.py", [place]), (place + ".py", None)):
            if os.path.isfile(file):
                loader = Loader(name, file)
                return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
        return None


sys.meta_path.insert(0, Finder())
'''


def write_hook(folder: Path, changed: dict[str, str], also: str = "") -> dict[str, str]:
    """The environment of processes that import these modules (paths within the package) from these texts.

    ``also``: Python that every such process runs first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, (file, text) in enumerate(changed.items()):
        place = folder / f"changed{number}.py"
        place.write_text(text, "utf-8")
        places[module_name(file)] = str(place)
    (folder / "sitecustomize.py").write_text(also + _FINDER.format(changed=places, package=str(PACKAGE)), "utf-8")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "HYPOTHESIS_PROFILE": "gate",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def pytest_command(*words: str) -> list[str]:
    """pytest in one process, the same every time: no cache, one seed, and the tests that are marked thorough too."""
    quiet = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header", "-o", "console_output_style=classic")
    return [sys.executable, "-m", "pytest", *quiet, "-m", "not soak", *words]
