"""Conjunctions of schemas and formulas mean what they say, whatever holds of a value."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from inferd.structured.schema import formulas
from inferd.structured.schema.formulas import ANYTHING, NOTHING, Conjunction, Formula, Holds, both, negation, opposite

NODES = ("a", "b", "c")
VALUES = [dict(zip(NODES, each, strict=True)) for each in product((True, False), repeat=len(NODES))]
literals = st.tuples(st.sampled_from(NODES), st.booleans())
conjunctions = st.sampled_from([ANYTHING, NOTHING]) | st.lists(literals, max_size=3, unique_by=lambda one: one[0]).map(
    lambda found: cast(Conjunction, tuple(found))
)
written: Any = st.recursive(
    st.booleans() | st.builds(Holds, st.sampled_from(NODES), st.booleans()),
    lambda parts: st.tuples(st.sampled_from([formulas.all_of, formulas.any_of]), st.lists(parts, max_size=3)).map(
        lambda made: made[0](*made[1])
    ),
    max_leaves=8,
)


def meets(value: dict[str, bool], conjunction: Conjunction) -> bool:
    return all(node is not None and value[cast(str, node)] is holds for node, holds in conjunction)


def satisfies(value: dict[str, bool], formula: Formula) -> bool:
    match formula:
        case formulas.All(parts):
            return all(satisfies(value, part) for part in parts)
        case formulas.Any(parts):
            return any(satisfies(value, part) for part in parts)
        case Holds(node, is_true):
            return value[cast(str, node)] is is_true
    assert isinstance(formula, bool)
    return formula


@given(conjunctions, conjunctions)
def test_a_value_meets_both_where_it_meets_each_and_what_none_meets_is_nothing(
    first: Conjunction, second: Conjunction
) -> None:
    joined = both(first, second)
    assert [meets(value, joined) for value in VALUES] == [meets(v, first) and meets(v, second) for v in VALUES]
    assert (joined == NOTHING) == (not any(meets(value, joined) for value in VALUES))
    assert len(set(joined)) == len(joined)


@given(st.sampled_from([ANYTHING, NOTHING]) | literals.map(lambda one: cast(Conjunction, (one,))))
def test_a_value_meets_the_opposite_where_it_does_not_meet_the_schema(conjunction: Conjunction) -> None:
    assert [meets(value, opposite(conjunction)) for value in VALUES] == [not meets(v, conjunction) for v in VALUES]


@given(written)
def test_a_value_satisfies_the_negation_where_it_does_not_satisfy_the_formula(formula: Formula) -> None:
    assert [satisfies(value, negation(formula)) for value in VALUES] == [not satisfies(v, formula) for v in VALUES]


@given(st.lists(written, max_size=3))
def test_all_and_any_are_those_of_their_parts_also_where_they_are_made_shorter(parts: list[Formula]) -> None:
    for value in VALUES:
        found = [satisfies(value, part) for part in parts]
        assert satisfies(value, formulas.all_of(*parts)) == all(found)
        assert satisfies(value, formulas.any_of(*parts)) == any(found)
