"""The form of an answer: what it says that the answer must be."""

from __future__ import annotations

import pytest

from inferd.answer_form import AnswerForm, Regex, ToolUse


@pytest.mark.parametrize(
    ("form", "is_any"),
    [
        (AnswerForm(), True),
        (AnswerForm(fit=True, reasoning_budget=3), True),
        (AnswerForm(tools=ToolUse(), fit=True), True),
        (AnswerForm(tools=ToolUse(mode="required")), False),
        (AnswerForm(constraint=Regex(pattern="a", at="regex")), False),
        (AnswerForm(constraint=Regex(pattern="a", at="regex"), tools=ToolUse()), False),
    ],
)
def test_an_answer_may_be_any_text_where_nothing_constrains_it_and_no_call_is_required(
    form: AnswerForm, is_any: bool
) -> None:
    assert form.may_be_any_text is is_any
