"""Generate the C of the compiled modules, and the CMake lists that build it. CMakeLists.txt of this folder runs it.

    python compiled/generate.py FOLDER

FOLDER gets one C file per module, one shim per module (the extension that is imported under the module's name), and
``targets.cmake``. Works from the repository's root, which paths in tracebacks are relative to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from check import dropped_defaults, problems
from mypyc.build import generate_c_extension_shim, include_dir, mypyc_build
from mypyc.common import RUNTIME_C_FILES, shared_lib_name
from mypyc.options import CompilerOptions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GROUP = "inferd._compiled"
"""The library with the code of all modules is the extension ``inferd._compiled__mypyc``."""


def listed_modules() -> list[str]:
    """The modules of ``modules.txt``."""
    lines = (HERE / "modules.txt").read_text().splitlines()
    return [name for name in (line.partition("#")[0].strip() for line in lines) if name]


def source_of(module: str) -> str:
    """The path of a module's source, relative to the repository."""
    return f"src/{module.replace('.', '/')}.py"


def texts() -> tuple[dict[str, str], dict[str, str]]:
    """The sources of the compiled modules and of all others, by names."""
    listed = listed_modules()
    paths = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path
        for path in (ROOT / "src" / "inferd").rglob("*.py")
    }
    return (
        {module: paths[module].read_text() for module in listed},
        {module: path.read_text() for module, path in paths.items() if module not in listed},
    )


def generate(folder: Path) -> None:
    """Write everything into ``folder``. Ends the process with mypyc's messages where a module cannot be compiled."""
    compiled, others = texts()
    _end_with(list(problems(compiled, others)))
    modules = list(compiled)
    sources = [source_of(module) for module in modules]
    options = CompilerOptions(
        multi_file=True,  # one C file per module, so that several are compiled at a time
        include_runtime_files=False,
        target_dir=str(folder),
        group_name=GROUP,
    )
    config = (HERE / "mypy.ini").relative_to(ROOT)
    _, [(c_files, _)], needed = mypyc_build([f"--config-file={config}", *sources], options, only_compile_paths=sources)
    with (folder / "ops.txt").open() as operations:
        _end_with(list(dropped_defaults(compiled, operations)))
    runtime = _copied_runtime(folder / "runtime")
    code = [*RUNTIME_C_FILES, *(file.path for file in needed)]
    includes = [".", *(directory for file in needed for directory in file.include_dirs)]
    lines = [
        f"set(COMPILED_LIBRARY {shared_lib_name(GROUP).rpartition('.')[2]})",
        _cmake_list("COMPILED_SOURCES", [*c_files, *(str(runtime / name) for name in code)]),
        _cmake_list(
            "COMPILED_INCLUDES", [str(folder), str(folder / "inferd"), *(str(runtime / name) for name in includes)]
        ),
        _cmake_list("COMPILED_MODULES", modules),
        _cmake_list(
            "COMPILED_SHIMS",
            [generate_c_extension_shim(name, name.rpartition(".")[2], str(folder), GROUP) for name in modules],
        ),
        _cmake_list("COMPILED_PYTHON", sources),
    ]
    (folder / "targets.cmake").write_text("\n".join(lines) + "\n")


def _end_with(found: list[str]) -> None:
    if found:
        sys.exit("\n".join(found))


def _copied_runtime(folder: Path) -> Path:
    """mypyc's own C, below the build folder: the path of an isolated build's environment is another one each time, and
    everything would be compiled again."""
    source = Path(include_dir())
    for file in (*source.rglob("*.c"), *source.rglob("*.h")):
        copy = folder / file.relative_to(source)
        text = file.read_bytes()
        if not copy.exists() or copy.read_bytes() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text)
    return folder


def _cmake_list(name: str, items: list[str]) -> str:
    return f"set({name}\n" + "".join(f'  "{item}"\n' for item in items) + ")"


if __name__ == "__main__":
    os.chdir(ROOT)
    generate(Path(sys.argv[1]))
