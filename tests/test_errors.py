"""Errors between processes: each comes back as what it was."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from inferd import errors
from inferd.errors import InferdError, InternalError, from_failure, printable, type_remedy
from inferd.types import Failure


def kinds(cls: type[InferdError] = InferdError) -> Iterator[type[InferdError]]:
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            yield sub
            yield from kinds(sub)


@pytest.mark.parametrize("cls", kinds(), ids=lambda cls: cls.__name__)
def test_an_error_comes_back_as_what_it_was(cls: type[InferdError]) -> None:
    plain = from_failure(cls("said").to_failure())
    assert type(plain) is cls
    assert str(plain) == plain.message == "said"
    assert (plain.param, plain.code, plain.retry_after_s) == (None, cls.default_code, None)
    sent = cls("said", param="field", code="own_code", retry_after_s=2.5)
    back = from_failure(sent.to_failure())
    assert type(back) is cls
    assert (back.message, back.param, back.code, back.retry_after_s) == ("said", "field", "own_code", 2.5)


def test_no_two_errors_have_one_kind() -> None:
    names = [cls.kind for cls in kinds()]
    assert len(names) == len(set(names)) > 10


def test_an_unknown_kind_is_an_internal_error() -> None:
    error = from_failure(Failure("of a newer version", "said", "field", "code", None))
    assert type(error) is InternalError
    assert (error.message, error.param, error.code) == ("said", "field", "code")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain \u00e9 \U0001f600", "plain \u00e9 \U0001f600"),
        ("a\r\nb\x1b[31m\u2028c\x00", "a  b [31m c "),
        ("x" * 64, "x" * 64),
        ("x" * 65, "x" * 64 + "..."),
        ("\x1b" + "x" * 64, " " + "x" * 63 + "..."),
        ("x" * 64 + "\x1b", "x" * 64 + "..."),
    ],
)
def test_a_text_is_shown_without_control_characters_and_cut(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_text_is_cut_where_its_place_says() -> None:
    assert printable("abc", 2) == "ab..."
    assert printable("abc", 3) == "abc"


@pytest.mark.parametrize(
    ("hint", "value", "remedy"),
    [(int, None, "Correct it."), (int | None, "x", "Correct it or leave the field out."), (str, 5, "Correct it.")],
)
def test_only_a_field_that_may_be_null_is_said_to_be_left_out(hint: object, value: object, remedy: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(value, hint)
    assert type_remedy(str(refused.value)) == remedy
