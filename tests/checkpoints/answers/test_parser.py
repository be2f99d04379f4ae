"""Answers are parsed alike however their text is cut, and text that is no call stays text."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.checkpoints.answers.format import (
    WHITE_SPACE,
    AnswerFormat,
    Arguments,
    Calls,
    Envelope,
    Id,
    Keywords,
    Name,
    Parameters,
    Reasoning,
    Text,
)
from inferd.checkpoints.answers.parser import AnswerParser, Parts

TOOLS = {
    "f": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "x": {}},
    },
    "get_weather": {"type": "object"},
}


def made(calls: Calls, reasoning: Reasoning | None = None) -> AnswerFormat:
    return AnswerFormat("test", "table", reasoning, calls)


HERMES = made(
    Calls((Text("<tool_call>\n"), Envelope(), Text("\n</tool_call>")), separator="\n"),
    Reasoning("<think>\n", "\n</think>\n\n"),
)
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "PARIS", "days": 3}}\n</tool_call>'
NOTATIONS: dict[str, tuple[AnswerFormat, str, str]] = {  # with the text of one call, and of a second after it
    "hermes": (HERMES, HERMES_CALL, "\n" + HERMES_CALL),
    "list": (
        made(Calls((Envelope(),), begin="[TOOL_CALLS]", separator=", ", is_list=True)),
        '[TOOL_CALLS][{"name": "f", "arguments": {"city": "PARIS", "days": 3}}',
        ', {"id": "c", "name": "f", "arguments": {"city": "PARIS", "days": 3}}]',
    ),
    "named": (
        made(Calls((Text("[TOOL_CALLS]"), Name(), Text("[CALL_ID]"), Id(), Text("[ARGS]"), Arguments()))),
        '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"city": "PARIS", "days": 3}',
        '[TOOL_CALLS]f[CALL_ID]abd[ARGS]{"city": "PARIS", "days": 3}',
    ),
    "section": (
        made(
            Calls(
                (Text("<|call|>functions."), Name(), Text(":"), Id(), Text("<|args|>"), Arguments(), Text("<|end|>")),
                begin="<|calls|>",
                end="<|calls_end|>",
            ),
            Reasoning("<|think|>", "<|/think|>"),
        ),
        '<|calls|><|call|>functions.f:0<|args|>{"city": "PARIS", "days": 3}<|end|>',
        '<|call|>functions.f:1<|args|>{"city": "PARIS", "days": 3}<|end|><|calls_end|>',
    ),
    "tagged": (
        made(
            Calls(
                (
                    Text("<tool_call>\n<function="),
                    Name(),
                    Text(">\n"),
                    Parameters("<parameter=", ">\n", "\n</parameter>\n"),
                    Text("</function>\n</tool_call>"),
                ),
                separator="\n",
            )
        ),
        "<tool_call>\n<function=f>\n<parameter=city>\nPARIS\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "\n<tool_call>\n<function=f>\n<parameter=city>\nPARIS\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "keyed": (
        made(
            Calls(
                (
                    Text("<tool_call>"),
                    Name(),
                    Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
                    Text("</tool_call>"),
                )
            )
        ),
        "<tool_call>f<arg_key>city</arg_key><arg_value>PARIS</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        "<tool_call>f<arg_key>city</arg_key><arg_value>PARIS</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
    ),
    "typed": (
        made(
            Calls(
                (
                    Text('<invoke name="'),
                    Name(),
                    Text('">\n'),
                    Parameters('<parameter name="', '" string="true">', "</parameter>\n", '" string="false">'),
                    Text("</invoke>\n"),
                ),
                begin="<calls>\n",
                end="</calls>",
            )
        ),
        '<calls>\n<invoke name="f">\n<parameter name="city" string="true">PARIS</parameter>\n'
        '<parameter name="days" string="false">3</parameter>\n</invoke>\n',
        '<invoke name="f">\n<parameter name="city" string="true">PARIS</parameter>\n'
        '<parameter name="days" string="false">3</parameter>\n</invoke>\n</calls>',
    ),
    "member": (
        made(Calls((Text('{"'), Name(), Text('": '), Arguments(), Text("}")), begin="<|tools|>", separator=", ",
                   end="<|end|>", is_list=True)),
        '<|tools|>[{"f": {"city": "PARIS", "days": 3}}',
        ', {"f": {"city": "PARIS", "days": 3}}]<|end|>',
    ),
    "recipient": (
        made(Calls((Name(), Text("\n"), Arguments()), separator=">>>", content="all\n")),
        'f\n{"city": "PARIS", "days": 3}',
        '>>>f\n{"city": "PARIS", "days": 3}',
    ),
    "channels": (
        AnswerFormat("harmony", "table", is_channels=True),
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "PARIS", "days": 3}<|call|>',
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"city": "PARIS", "days": 3}',
    ),
    "pythonic": (
        made(Calls((Name(), Text("("), Keywords(), Text(")")), separator=", ", is_list=True)),
        '[f(city="PARIS", days=3)',
        ", f(city='PARIS', days=3)]",
    ),
    "tagged pythonic": (
        made(Calls((Name(), Text("("), Keywords(), Text(")")), "<|calls|>", ", ", "<|/calls|>", is_list=True)),
        '<|calls|>[f(city="PARIS", days=3)',
        ", f(city='PARIS', days=3)]<|/calls|>",
    ),
    "bare": (
        made(Calls((Envelope(("name", "parameters"), "name", "parameters"),))),
        '{"name": "f", "parameters": {"city": "PARIS", "days": 3}}',
        "",
    ),
}  # fmt: skip
ARGUMENTS = {"city": "PARIS", "days": 3}


class Whole(NamedTuple):
    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # name and arguments


def parse(notation: AnswerFormat, pieces: list[str], **options: bool) -> Whole:
    """The joined parts of an answer that comes in pieces."""
    parser = AnswerParser(notation, tools=TOOLS, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish()])


def joined(parts: list[Parts]) -> Whole:
    calls: list[tuple[str, str]] = []
    for part in (call for each in parts for call in each.calls):
        if part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, ""))
        name, before = calls[part.index]
        calls[part.index] = (name, before + part.arguments)
    return Whole("".join(p.text for p in parts), "".join(p.reasoning for p in parts), tuple(calls))


def in_order(notation: AnswerFormat, pieces: list[str], **options: bool) -> list[list[str]]:
    """The parts of an answer that comes in pieces, joined where they are of one kind and follow one another."""
    parser = AnswerParser(notation, tools=TOOLS, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    found: list[list[str]] = []
    for part in [*parts, *parser.finish()]:
        assert [bool(part.text), bool(part.reasoning), bool(part.calls)].count(True) == 1
        for call in part.calls:
            if call.name is not None:
                found.append(["call", call.name, ""])
            assert found[-1][0] == "call"
            found[-1][2] += call.arguments
        kind, text = ("text", part.text) if part.text else ("reasoning", part.reasoning)
        if text and (not found or found[-1][0] != kind):
            found.append([kind, ""])
        found[-1][1] += text
    return found


def markers(notation: AnswerFormat) -> list[str]:
    found = {text for marker in notation.markers for text in (marker, marker.strip(), marker[: len(marker) // 2])}
    return sorted(found)


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerFormat, str]:
    """A notation and a text made of its markers, of calls and of other text, whole and cut off."""
    notation, one, two = NOTATIONS[draw(st.sampled_from(sorted(NOTATIONS)))]
    pieces = [
        one, two, one[: len(one) // 2], one[len(one) // 2 :], two[:-1], *markers(notation), "{", "}", "[", "]", '"',
        "\\", " ", "\n", "text", "<", "é💡", ",", ":", "f", "oh no", '{"name": "f", "parameters": {"x": no', '{"name": "f", "arguments": {"x": ["', '"name": ', "null",
        '{"arguments": {"a": 1}, "name": "f"}', '{"name": "f"}', '{"name": "f", "arguments": "{\\"a\\": 1}"}', "1.5",
    ]  # fmt: skip
    return notation, "".join(draw(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=14)))


@given(st.data(), answers(), st.booleans(), st.booleans())
def test_every_way_of_cutting_gives_the_same_parts_after_every_piece(
    data: st.DataObject, answer: tuple[AnswerFormat, str], only_one: bool, in_reasoning: bool
) -> None:
    notation, text = answer
    options = {"only_one": only_one, "in_reasoning": in_reasoning and notation.reasoning is not None}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_order(notation, pieces, **options) == in_order(notation, [text], **options)
    # What was returned before a cut does not depend on the pieces either, so an answer can be continued elsewhere.
    whole, single = (AnswerParser(notation, tools=TOOLS, **options) for _ in range(2))
    before = [part for character in text[: cuts[0] if cuts else 0] for part in single.feed(character)]
    assert joined(before) == joined(whole.feed(text[: cuts[0] if cuts else 0]))


def is_marked(notation: AnswerFormat) -> bool:
    """Whether plain text has no marks of its own."""
    return notation.calls is not None and not notation.calls.content


@given(answers())
def test_text_without_calls_is_returned_unchanged(answer: tuple[AnswerFormat, str]) -> None:
    notation, text = answer
    found = parse(notation, [text])
    if not found.calls and not found.reasoning and notation.reasoning is None and is_marked(notation):
        assert found.text == text
    if is_marked(notation):
        assert parse(notation, ["Hello, \n" + text]).text.startswith("Hello,")


@given(answers())
def test_shown_text_is_a_part_of_what_was_generated(answer: tuple[AnswerFormat, str]) -> None:
    notation, text = answer
    position = 0
    for character in parse(notation, [text]).text:
        position = text.index(character, position) + 1


@pytest.mark.parametrize("name", NOTATIONS)
def test_calls_of_a_notation_are_found(name: str) -> None:
    notation, one, two = NOTATIONS[name]
    found = parse(notation, list(one + two))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("f", ARGUMENTS)] * (1 + bool(two))
    assert found.text == ""
    only = parse(notation, list(one + two), only_one=True)
    assert len(only.calls) == 1
    if notation.calls is not None and notation.calls.trigger:
        found = parse(notation, ["Let me see.\n", one, two, "\n"])
        assert (found.text, len(found.calls)) == ("Let me see.", 2)


@pytest.mark.parametrize("name", NOTATIONS)
def test_an_answer_may_end_anywhere_behind_a_call(name: str) -> None:
    """As at ``max_tokens``: the answer that ends behind a comma between calls raised an error."""
    notation, one, two = NOTATIONS[name]
    separator = notation.calls.separator.strip() if notation.calls is not None else ""
    for text in (one + two)[len(one) :], separator, separator + " ":
        for end in range(len(text) + 1):
            found = parse(notation, [one + text[:end]])
            assert (found.calls[0][0], json.loads(found.calls[0][1])) == ("f", ARGUMENTS)


@pytest.mark.parametrize("name", NOTATIONS)
def test_arguments_are_returned_as_they_are_generated(name: str) -> None:
    notation, one, _ = NOTATIONS[name]
    parser = AnswerParser(notation, tools=TOOLS)
    half = one.index("PARIS") + 3
    before = joined(parser.feed(one[:half]))
    assert [name for name, _ in before.calls] == ["f"]
    assert before.calls[0][1].replace(" ", "") == '{"city":"PAR'


@pytest.mark.parametrize("name", NOTATIONS)
def test_without_tools_calls_stay_text(name: str) -> None:
    notation, one, two = NOTATIONS[name]
    if notation.is_channels:
        return  # there the body of the message is the text
    parser = AnswerParser(notation)
    assert "".join(part.text for part in [*parser.feed(one + two), *parser.finish()]) == one + two


def test_a_text_streams_until_it_may_be_a_call() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS)
    assert parser.feed("Hello ") == [Parts("Hello")]
    assert parser.feed("there<tool") == [Parts(" there")]
    assert parser.feed("box>") == [Parts("<toolbox>")]
    assert parser.feed("\n<tool_call>") == []
    assert parser.feed('{"name": "f", "arguments": {"x": [1, "</tool_call"]}}')[0].calls[0].name == "f"
    assert parser.feed("</tool_call>\n") == []
    assert parser.finish() == []


def test_what_is_no_call_stays_text() -> None:
    for body in (
        "",
        "x",
        "[]",
        '{"arguments": {}}',
        '{"name": ""}',
        '{"name": 5}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 1}',
        '{"name": "f", "argum',
        "\ud800",
    ):
        text = f"<tool_call>{body}</tool_call>"
        assert parse(HERMES, [text]) == Whole(text, "", ())
    nested = '<tool_call> <tool_call>{"name": "f"}</tool_call>'
    assert parse(HERMES, [nested]) == Whole("<tool_call>", "", (("f", "{}"),))


def test_a_call_that_is_cut_off_keeps_its_arguments() -> None:
    assert parse(HERMES, [HERMES_CALL[:-12]]).calls == (("f", '{"city": "PARIS", "days": 3}'),)
    assert parse(HERMES, [HERMES_CALL[:-15]]).calls == (("f", '{"city": "PARIS", "days": 3'),)


def test_arguments_that_are_no_json_are_returned_as_they_are() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": oh no}}</tool_call> and on'
    assert parse(HERMES, [text]) == Whole("and on", "", (("f", '{"a": oh no}}'),))


def test_reasoning_is_a_part_of_its_own() -> None:
    text = "<think>\nHm,  so.\n\n</think>\n\n Yes.\n<think>no</think>"
    assert parse(HERMES, [text]) == Whole(" Yes.\n<think>no</think>", "Hm,  so.", ())
    assert parse(HERMES, ["Hm.</think>\n\nYes"], in_reasoning=True) == Whole("Yes", "Hm.", ())
    assert parse(HERMES, ["<think>Hm"]) == Whole("", "Hm", ())
    assert parse(HERMES, [text], splits_reasoning=False).text == text
    assert parse(HERMES, ["<thin"]).text == "<thin"


def test_messages_in_channels_are_reasoning_text_and_calls() -> None:
    notation = NOTATIONS["channels"][0]
    text = (
        "<|channel|>analysis<|message|>Hm < so.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    )
    assert parse(notation, list(text)) == Whole("Wait.Yes", "Hm < so.", ())
    assert parse(notation, ["plain text"]) == Whole("plain text", "", ())


def test_text_of_a_recipient_has_no_mark_left() -> None:
    notation = NOTATIONS["recipient"][0]
    assert parse(notation, ["all\nHello."]).text == "Hello."
    assert parse(notation, ['all\nHello.>>>f\n{"x": 1}']) == Whole("Hello.", "", (("f", '{"x": 1}'),))


def test_values_without_quotes_follow_the_schema() -> None:
    notation = NOTATIONS["keyed"][0]
    pairs = {"city": "5", "days": "5", "x": "[1]", "other": "no JSON", "more": "True"}
    body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs.items())
    (_, arguments) = parse(notation, [f"<tool_call>f{body}</tool_call>"]).calls[0]
    assert json.loads(arguments) == {"city": "5", "days": 5, "x": [1], "other": "no JSON", "more": True}


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["x", "other", "_more"]), literals, max_size=3), st.data())
def test_keyword_arguments_mean_what_python_and_json_say(arguments: dict[str, Any], data: st.DataObject) -> None:
    write = [data.draw(st.sampled_from([repr, ascii, json.dumps])) for _ in arguments]
    written = ", ".join(f"{key}={how(value)}" for how, (key, value) in zip(write, arguments.items(), strict=True))
    ((name, found),) = parse(NOTATIONS["pythonic"][0], list(f"[f({written})]")).calls
    assert (name, json.loads(found)) == ("f", arguments)


def test_escapes_of_python_are_read() -> None:
    written = "[f(x='\\U0001f600 \\u00e9 \\xe9 \\' \\\\ \\d', other=\"a\\tb\")]"
    ((_, found),) = parse(NOTATIONS["pythonic"][0], [written]).calls
    assert json.loads(found) == {"x": "\U0001f600 é é ' \\ \\d", "other": "a\tb"}


def test_a_list_that_calls_nothing_is_text() -> None:
    for text in ("[f]", "[f('positional')]", "[unknown(x=1)]", "[link](f(x=1))", "a, [f(x=1)]", "[]", "[f(x"):
        assert parse(NOTATIONS["pythonic"][0], [text]) == Whole(text, "", ())


def test_a_tool_without_arguments_can_be_called() -> None:
    assert parse(NOTATIONS["keyed"][0], ["<tool_call>f</tool_call>"]).calls == (("f", "{}"),)
    assert parse(NOTATIONS["tagged"][0], ["<tool_call>\n<function=f>\n</function>\n</tool_call>"]).calls == (
        ("f", "{}"),
    )


def test_json_of_an_unknown_tool_is_no_call_where_nothing_else_marks_one() -> None:
    text = '{"name": "unknown_tool", "parameters": {}}'
    assert parse(NOTATIONS["bare"][0], [text]) == Whole(text, "", ())


def test_many_beginnings_of_calls_take_bounded_time() -> None:
    text = '<tool_call>{"arguments": {"a": "' * 400
    assert parse(HERMES, [text]).text == text


def test_text_between_and_behind_calls_keeps_its_place() -> None:
    text = f"One.{HERMES_CALL}Two.{HERMES_CALL}Three."
    call = ["call", "f", '{"city": "PARIS", "days": 3}']
    for pieces in ([text], list(text)):
        assert in_order(HERMES, pieces) == [["text", "One."], call, ["text", "Two."], call, ["text", "Three."]]


def test_white_space_is_what_python_strips() -> None:
    assert set(WHITE_SPACE) == {character for code in range(0x1_0000) if (character := chr(code)).isspace()}
