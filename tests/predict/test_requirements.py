"""What a model of Python says it requires, against ``packaging``, which pip decides by."""

from __future__ import annotations

from importlib import metadata

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from inferd.errors import ModelLoadError
from inferd.predict.runtimes.python_requires import check_requirements

releases = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
compared = st.builds(str.__add__, st.sampled_from(["==", "!=", ">=", "<=", ">", "<"]), releases)
compatible = st.lists(st.integers(0, 3), min_size=2, max_size=4).map(lambda parts: "~=" + ".".join(map(str, parts)))
prefixes = st.builds(lambda operator, release: f"{operator}{release}.*", st.sampled_from(["==", "!="]), releases)


def is_met(monkeypatch: pytest.MonkeyPatch, version: str, clauses: str) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: version)
        try:
            check_requirements("m", [f"thing{clauses}"])
        except ModelLoadError:
            return False
        return True


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(version=releases, clauses=st.lists(compared | compatible | prefixes, min_size=1, max_size=2))
@example(version="1.2", clauses=["~=1.2.0"])
@example(version="2.0", clauses=["~=1.2"])
@example(version="1.1.9", clauses=["~=1.2"])
@example(version="1.10", clauses=["==1.1.*"])
@example(version="1", clauses=["==1.0"])
@example(version="1.0", clauses=["==1.0.0.*"])
def test_versions_are_compared_as_pip_compares_them(
    monkeypatch: pytest.MonkeyPatch, version: str, clauses: list[str]
) -> None:
    text = ",".join(clauses)
    assert is_met(monkeypatch, version, text) == SpecifierSet(text).contains(version)


@pytest.mark.parametrize(
    ("version", "clauses", "expected"),
    [
        ("2.1+cpu", ">=2.1", True),
        ("2.1+cpu", "===2.1", False),
        ("2.1", "===2.1", True),
        ("v2.1", "==2.1", True),
        ("1!2.1", "==2.1", True),
        ("2.1", "", True),
        ("2.1", " >=2 , <3 ", True),
        ("2.1", ">=2,<2.1", False),
    ],
)
def test_versions_with_more_than_numbers_count_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, version: str, clauses: str, expected: bool
) -> None:
    assert is_met(monkeypatch, version, clauses) is expected


def test_everything_that_is_missing_is_told_with_one_line_that_installs_it() -> None:
    with pytest.raises(ModelLoadError) as caught:
        check_requirements("m", ["pytest>=1", "absent-of-all", "pytest>=1000,<2000"])
    assert "absent-of-all is not installed" in caught.value.message
    assert "pip install 'absent-of-all' 'pytest>=1000,<2000'" in caught.value.message


@pytest.mark.parametrize("requires", ["pillow", 3, [3], ["a b"], ["pillow @ https://example.com/x"], [">=3"]])
def test_what_is_no_list_of_requirements_is_refused(requires: object) -> None:
    with pytest.raises(ModelLoadError, match="expected a"):
        check_requirements("m", requires)
