"""Which changes are tried, and which tests are asked about each."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from tests.mutants.operators import Change, changes
from tests.mutants.sources import PACKAGE, Source, module_name, modules, room_of
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


class Nearness:
    """Ranks files of tests by how likely they are to notice a change.

    A file of tests and a change have features in common: the folder, an import, a name. Each counts by its inverse
    document frequency (Spärck Jones 1972): what few files of tests have tells most. The tests that are named as the
    changed module come first whatever else they have.
    """

    def __init__(self, tests: dict[str, Source], sources: dict[str, Source]) -> None:
        """``tests``: by file. ``sources``: the modules of the package, by their path in it."""
        self._tests = tests
        self._sources = sources
        self._words = {test: _words(told.text) for test, told in tests.items()}
        self._users: dict[str, list[str]] = {}
        for file, told in sources.items():
            for name in told.modules:
                self._users.setdefault(name, []).append(file)

    def files(self, change: Change) -> list[str]:
        """The files of tests, the likeliest first."""
        found = dict.fromkeys(self._tests, 0.0)
        for those in self._features(change):
            if those:
                weight = math.log(len(self._tests) / len(those))
                for test in those:
                    found[test] += weight
        return sorted(found, key=lambda test: (_distance(change.file, test) > 0, -found[test], test))

    def _features(self, change: Change) -> Iterator[list[str]]:
        """For each feature of the change the files of tests that have it."""
        file = change.file
        module = module_name(file)
        yield [test for test in self._tests if _distance(file, test) <= 1]
        yield [test for test in self._tests if _distance(file, test) <= 2]
        yield self._importing({file})
        for name in {*_names(change), *module.rpartition(".")[2].split("_")}:
            yield self._saying(name)
        said = [self._saying(word) for word in _words(change.original)]
        yield min(filter(None, said), key=len, default=[])  # the rarest word of the changed text
        users = self._users_of(change)
        yield self._importing(users)
        yield [test for test in self._tests if any(_distance(user, test) <= 1 for user in users)]

    def _users_of(self, change: Change) -> set[str]:
        """The modules that import the changed one, and say the changed function's or class's name if it is public."""
        users = self._users.get(module_name(change.file), [])
        names = [name for name in _names(change) if not name.startswith("_")]
        naming = {user for user in users if any(name in self._sources[user].text for name in names)}
        return naming or {*users}

    def _saying(self, word: str) -> list[str]:
        return [test for test, words in self._words.items() if word in words]

    def _importing(self, files: set[str]) -> list[str]:
        modules = {module_name(file) for file in files}
        return [test for test, told in self._tests.items() if not modules.isdisjoint(told.modules)]


def _words(text: str) -> frozenset[str]:
    """Names, and the words that they consist of."""
    names = frozenset(re.findall(r"\w+", text))
    return names.union(*(name.split("_") for name in names))


def _names(change: Change) -> list[str]:
    """The function that is changed, and the classes and functions that it is in."""
    return change.block.split(":")[1].split(".")


def likely_tests(change: Change, trace: Trace, files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of these files. Those of the change's own room first, quick ones before slow ones; then others, a few of every file."""
    known = trace.tests_of(change.block, files)
    ranked = sorted(
        known, key=lambda test: (_distance(change.file, test.partition("::")[0]), trace.seconds[test], test)
    )
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
    module, tested = PurePath(file), PurePath(test.removeprefix("tests/"))
    if module.parent.parts[:1] != tested.parent.parts[:1]:
        return 3
    if tested.stem.removeprefix("test_").split("_")[0] == module.stem.split("_")[0]:
        return 0
    return 1 if tested.parent == module.parent else 2
