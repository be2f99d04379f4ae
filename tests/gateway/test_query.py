"""The query of a target: read like urllib does, within bounds, and refused by the parameter's name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

import inferd
from inferd.errors import InvalidRequest
from inferd.gateway.body.query import MAX_PARAMETERS, last_values, query_pairs, read_query

PAIRS = st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=MAX_PARAMETERS)


class Form(msgspec.Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


@given(PAIRS)
def test_what_is_written_is_read(pairs: list[tuple[str, str]]) -> None:
    assert query_pairs(urlencode(pairs)) == pairs
    assert last_values(urlencode(pairs)) == dict(pairs)


@pytest.mark.parametrize("query", ["a=&" * 20_000, "a&" * (MAX_PARAMETERS + 1), "a=%ff"])
def test_more_parameters_than_are_read_and_no_utf8_are_refused(query: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"at most {MAX_PARAMETERS} parameters in UTF-8"):
        query_pairs(query)


def test_a_form_has_defaults_and_leaves_other_names_out() -> None:
    assert read_query("", Form) == Form()
    assert read_query("limit=7&other=1&after=x", Form) == Form(7, "x")


@pytest.mark.parametrize("value", ["0", "101", "many", "1.5", ""])
def test_a_wrong_value_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^limit=\S+ is not valid: .*Parameters are limit, after\.") as refused:
        read_query(f"limit={value}", Form)
    assert refused.value.param == "limit"


def test_a_parameter_that_comes_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match='"limit" came twice') as refused:
        read_query("limit=1&limit=1", Form)
    assert refused.value.param == "limit"


def test_no_other_module_of_the_gateway_reads_a_query() -> None:
    """A list of files once decoded all of 20,000 parameters, which blocked the event loop for 50 ms."""
    modules = Path(inferd.__file__).parent.joinpath("gateway").rglob("*.py")
    found = [path.name for path in modules if "parse_qs" in path.read_text()]
    assert found == ["query.py"]
