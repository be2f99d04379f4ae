"""Short texts of a schema: those of its values, and of what must still follow in an object or a list."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.structured.outline import Outline


def texts(schema: dict[str, Any], spelled: str | None = None) -> tuple[str, ...]:
    return Outline(schema, lambda node: spelled).texts


def integers(**keywords: object) -> dict[str, object]:
    return {"type": "integer", **keywords}


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        ({"type": "null"}, "null"),
        ({"type": "boolean"}, "true"),
        ({"const": {"a": [1, None]}}, '{"a":[1,null]}'),
        ({"enum": ["long", "\u00e9", "no"]}, '"\u00e9"'),
        ({"type": "string"}, '""'),
        ({"type": "string", "minLength": 2, "maxLength": 5}, '"aa"'),
        ({"type": "string", "minLength": 4094}, f'"{"a" * 4094}"'),
        ({"type": "string", "minLength": 4095}, None),
        ({"anyOf": [{"type": "boolean"}, {"const": 7}, {"const": 8}]}, "7"),
        ({"anyOf": []}, None),
        (integers(), "0"),
        (integers(minimum=0), "0"),
        (integers(maximum=0), "0"),
        (integers(minimum=-4, maximum=3), "0"),
        (integers(minimum=5), "5"),
        (integers(maximum=-5, minimum=-9), "-5"),
        (integers(minimum=5, multipleOf=3), "6"),
        (integers(maximum=-5, multipleOf=3, minimum=-9), "-6"),
        ({"type": "number", "minimum": 0.3, "multipleOf": 0.25}, "0.5"),
        ({"type": "number", "minimum": 0.3}, "1"),
        ({"type": "array"}, "[]"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, "[null,null]"),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 3}, "[1,2,2]"),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 3}], "items": {"const": 2}, "minItems": 1}, "[1]"),
        ({"type": "array", "items": False, "minItems": 1}, None),
        ({"type": "array", "items": True, "minItems": 4097}, None),
        ({"type": "array", "items": True, "minItems": 2000}, f"[{','.join('0' * 2000)}]"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "properties": {"a": integers(), "b": True}, "required": ["b"]}, '{"b":0}'),
        ({"type": "object", "properties": {"a": integers(), "b": True}, "required": ["b", "a"]}, '{"a":0,"b":0}'),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, None),
        ({"type": "object", "minProperties": 2}, '{"0":0,"1":0}'),
        ({"type": "object", "properties": {"0": True}, "minProperties": 2}, '{"0":0,"1":0}'),
        (
            {"type": "object", "properties": {"a": {"const": "long"}, "b": {"const": 1}}, "minProperties": 1},
            '{"b":1}',
        ),
        ({"type": "object", "properties": {"a": False, "b": {"const": 1}}, "minProperties": 1}, '{"b":1}'),
        ({"type": "object", "additionalProperties": False, "minProperties": 1}, None),
        ({"type": "object", "additionalProperties": {"const": 2}, "minProperties": 1}, '{"0":2}'),
    ],
)
def test_the_first_text_is_the_shortest_of_a_value(schema: dict[str, Any], shortest: str | None) -> None:
    found = texts(schema)
    if shortest is None:
        assert not any(text.startswith(("{", "[", ":{", ":[")) for text in found)
        assert schema.get("type") == "object" or not found
    else:
        assert found[0] == shortest
        assert found[1] == f":{shortest}"


@pytest.mark.parametrize("spelled", ['"2026-11-30"', None])
def test_texts_with_a_pattern_are_those_that_are_spelled_and_each_is_spelled_once(spelled: str | None) -> None:
    asked: list[object] = []

    def spell(node: object) -> str | None:
        asked.append(node)
        return spelled

    day = {"type": "string", "pattern": "^2"}
    found = Outline({"type": "array", "items": day, "minItems": 2, "prefixItems": [dict(day)]}, spell).texts
    assert asked == [day]
    assert (found[:1] == (f"[{spelled},{spelled}]",)) == (spelled is not None)


def test_a_definition_has_its_shortest_text_also_where_it_refers_to_itself() -> None:
    tree: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "required": ["next"]}
    tree["additionalProperties"] = False
    either = {"anyOf": [tree, {"const": "end"}]}
    found = texts({"$ref": "#/$defs/tree", "$defs": {"tree": either}})
    assert found[0] == '"end"'
    assert '"next":"end"' in found
    assert texts({"$ref": "#/$defs/tree", "$defs": {"tree": tree}}) == (), "no value ends"
    chain = {"b": {"$ref": "#/$defs/a"}, "a": {"type": "null"}}
    assert texts({"$ref": "#/$defs/b", "$defs": chain})[0] == "null"


def test_members_and_what_must_follow_them_have_texts() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "required": ["a", "c"],
        "additionalProperties": {"type": "null"},
    }
    found = texts(schema)
    assert found[0] == '{"a":1,"c":3}'
    assert {'"a":1', '"b":2', '"c":3', '"0":null', '"1":null', '"2":null'} <= set(found)
    assert '"3":null' not in found
    assert {',"a":1,"c":3}', '"a":1,"c":3}', ',"c":3}', '"c":3}'} <= set(found)
    assert ',"b":2}' not in found, "nothing asks for it"
    assert {"1", "2", "3", ":1", ":3", "null"} <= set(found)


def test_items_that_must_follow_have_texts() -> None:
    found = texts({"type": "array", "items": {"const": 5}, "prefixItems": [{"const": 4}], "minItems": 2})
    assert {"[4,5]", ",4,5]", "4,5]", ",5]", "5]", "5", ":5", "4"} <= set(found)


def test_schemas_below_unions_and_patterns_are_seen_and_the_number_of_texts_is_bounded() -> None:
    patterned = {"type": "object", "patternProperties": {"^x": {"const": "seen"}}}
    assert '"seen"' in texts({"anyOf": [patterned, {"type": "null"}]})
    many = {"type": "object", "properties": {f"p{number}": {"const": number} for number in range(600)}}
    assert len(texts(many)) == 512
