"""Which changes are tried, and which tests are asked about each."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from tests.mutants.operators import Change, changes
from tests.mutants.sources import PACKAGE, Tested, module_name, modules, room_of
from tests.mutants.trace import Trace

# What a GPU alone runs is `make gpu-check`'s; what needs a server of Redis or PostgreSQL is tried where one is named.
_SERVED: Final = {"INFERD_TEST_REDIS_URL": "cache/redis.py", "INFERD_TEST_POSTGRES_URL": "state/postgres.py"}
# A picture's coordinates are right when people say so.
UNTRIED: Final = (
    "engine/cuda/",
    "native/triton/",
    "autoscale/picture.py",
    "benchmark/report.py",
    *(file for name, file in _SERVED.items() if name not in os.environ),
)

FIRST_S: Final = 5.0  # of the tests that are asked first: they notice nearly everything
SECOND_S: Final = 30.0  # of those that are asked about what the first did not notice
MOST_TESTS: Final = 200  # whose names one command takes


def sample(number: int, seed: int, rooms: Sequence[str] = ()) -> list[Change]:
    """So many changes, drawn by a seed: of each room more the more can be changed in it, and some of every room.

    A change is drawn by the hash of what it says and of the function it is in. So a change to one function, or a file
    that moves, leaves the sample of the other functions as it was. ``rooms``: of these alone.
    """
    found: dict[str, list[Change]] = {}
    for file in modules():
        room = room_of(file)
        if not file.startswith(UNTRIED) and (not rooms or room in rooms):
            found.setdefault(room, []).extend(changes(file, (PACKAGE / file).read_text("utf-8")))
    weights = {room: math.sqrt(len(those)) for room, those in found.items() if those}
    whole = sum(weights.values())
    drawn: list[Change] = []
    for room, weight in weights.items():
        count = min(len(found[room]), max(1, round(number * weight / whole)))
        drawn += sorted(found[room], key=lambda change: rank(change, seed))[:count]
    return drawn


def rank(change: Change, seed: int) -> bytes:
    """The order in which a seed draws: of the same function, text and change always the same."""
    block = change.block.rpartition("/")[2]
    return hashlib.sha256(f"{seed}\0{block}\0{change.original}\0{change.text}".encode()).digest()


def near_files(file: str, tested: dict[str, Tested]) -> list[str]:
    """The files of tests, those first that are likely to notice a change to the module: those that are named as it is,
    import it, or say its name."""
    module = module_name(file)
    word = module.rpartition(".")[2].replace("_", " ")

    def distance(test: str) -> tuple[int, int, bool, int, str]:
        imported = tested[test].modules
        is_imported = module in imported or any(name.startswith(f"{module}.") for name in imported)
        near = _distance(file, test)
        is_named = word in tested[test].text.replace("_", " ")
        return 0 if near == 0 else 2 - is_imported, near, not is_named, len(imported), test

    return sorted(tested, key=distance)


def likely_tests(change: Change, trace: Trace, files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of these files. Those of the change's own room first, quick ones before slow ones; then others, a few of every file."""
    known = trace.tests_of(change.block, files)
    ranked = sorted(known, key=lambda test: (_distance(change.file, test), trace.seconds[test], test))
    first = _within(ranked, trace, FIRST_S)
    taken = set(first)
    seen: dict[str, int] = {}
    turns: dict[str, int] = {}
    for test in ranked:
        file = test.partition("::")[0]
        turns[test] = seen[file] = seen.get(file, 0) + 1
    others = sorted((test for test in ranked if test not in taken), key=lambda test: (turns[test], trace.seconds[test]))
    return first, _within(others, trace, SECOND_S)


def _within(tests: Sequence[str], trace: Trace, seconds: float) -> list[str]:
    found: list[str] = []
    for test in tests[:MOST_TESTS]:
        seconds -= trace.seconds[test]
        if seconds < 0 and found:
            break
        found.append(test)
    return found


def _distance(file: str, test: str) -> int:
    """0: the module's own tests, by name; 1: its folder's; 2: its room's; 3: others."""
    module, tested = PurePath(file), PurePath(test.partition("::")[0].removeprefix("tests/"))
    if tested.parts[:1] != module.parts[:1]:
        return 3
    if tested.stem.removeprefix("test_").split("_")[0] == module.stem.split("_")[0]:
        return 0
    return 1 if tested.parent == module.parent else 2
