"""What control groups allow, by folders such as the kernel shows."""

from __future__ import annotations

from pathlib import Path

from inferd.machine.cgroup import cores_allowed, groups_around, memory_left, memory_limit


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text + "\n")
    return folder


def test_groups_are_those_around_the_process_and_no_others(tmp_path: Path) -> None:
    root = group(tmp_path / "cgroup")
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/system.slice/inferd.service\n")
    assert groups_around(root, own) == [root / "system.slice" / "inferd.service", root / "system.slice", root]
    own.write_text("0::/\n")
    assert groups_around(root, own) == [root]
    assert groups_around(root, tmp_path / "none") == [root]


def test_the_least_memory_limit_counts_and_cached_files_are_no_use_of_it(tmp_path: Path) -> None:
    stat = "anon 100\nfile 650\ninactive_file 400\nactive_file 200\nshmem 50"
    inner = group(tmp_path / "a" / "b", memory_max="max", memory_current="850")
    middle = group(tmp_path / "a", memory_max="1000", memory_current="850", memory_stat=stat)
    outer = group(tmp_path, memory_max="9000", memory_current="5000", memory_stat="inactive_file 1000")
    assert memory_left([inner, middle, outer]) == 1000 - 250
    assert memory_left([outer]) == 9000 - 4000
    assert memory_left([inner]) is None
    assert memory_left([tmp_path / "none"]) is None
    without = group(tmp_path / "without", memory_max="1000", memory_current="900")
    assert memory_left([without]) == 100
    full = group(tmp_path / "full", memory_max="1000", memory_current="1200")
    assert memory_left([full]) == 0


def test_the_limit_of_the_memory_is_the_least_around_the_process(tmp_path: Path) -> None:
    inner = group(tmp_path / "a" / "b", memory_max="max")
    middle = group(tmp_path / "a", memory_max="1000")
    outer = group(tmp_path, memory_max="9000")
    assert memory_limit([inner, middle, outer]) == 1000
    assert memory_limit([inner, outer]) == 9000
    assert memory_limit([inner, tmp_path / "none"]) is None


def test_the_least_cpu_limit_counts(tmp_path: Path) -> None:
    inner = group(tmp_path / "a", cpu_max="350000 100000")
    outer = group(tmp_path, cpu_max="200000 50000")
    free = group(tmp_path / "b", cpu_max="max 100000")
    assert cores_allowed([inner, outer, free]) == 3.5
    assert cores_allowed([free, outer]) == 4.0
    assert cores_allowed([free, tmp_path / "none"]) is None
