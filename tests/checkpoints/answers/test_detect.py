"""The notation of calls and reasoning is found in chat templates, and what a template renders is parsed back."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from inferd.checkpoints.answers.analysis import call, conversation
from inferd.checkpoints.answers.detect import Detected, described, detect
from inferd.checkpoints.answers.format import (
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
from inferd.checkpoints.answers.notation import told_of
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.registry.source import resolve

TURNS = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}THINK{% endif %}{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
TAGS = (
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}"
)
KEYWORDS = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}"
)


def template(calls: str, thinking: str = "") -> ChatTemplate:
    return ChatTemplate({"default": TURNS.replace("CALLS", calls).replace("THINK", thinking)}, {}, "test")


CASES: list[tuple[str, Calls]] = [
    (
        EACH.replace("CALL", "<tool_call>\n" + OBJECT + "\n</tool_call>\n"),
        Calls((Text("<tool_call>\n"), Envelope(), Text("\n</tool_call>\n"))),
    ),
    (
        "[TOOL_CALLS][" + EACH.replace("CALL", OBJECT + "{% if not loop.last %}, {% endif %}") + "]",
        Calls((Envelope(),), begin="[TOOL_CALLS]", separator=", ", is_list=True),
    ),
    (
        "<|t|>[" + EACH.replace(
            "CALL", '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}'
        ) + "]<|/t|>",
        Calls((Text('{"'), Name(), Text('": '), Arguments(), Text("}")), "<|t|>", ", ", "<|/t|>", is_list=True),
    ),
    (
        EACH.replace(
            "CALL",
            "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
        ),
        Calls((Text("[TOOL_CALLS]"), Name(), Text("[CALL_ID]"), Id(), Text("[ARGS]"), Arguments())),
    ),
    (
        "<|calls|>" + EACH.replace(
            "CALL",
            "<|call|>functions.{{ c.function.name }}:{{ loop.index0 }}<|args|>"
            "{{ c.function.arguments | tojson }}<|end|>",
        ) + "<|calls_end|>",
        Calls(
            (Text("<|call|>functions."), Name(), Text(":"), Id("[0-9]{1,4}"), Text("<|args|>"), Arguments(),
             Text("<|end|>")),
            begin="<|calls|>",
            end="<|calls_end|>",
        ),
    ),
    (
        EACH.replace(
            "CALL", "<tool_call>\n<function={{ c.function.name }}>\n" + TAGS + "</function>\n</tool_call>\n"
        ),
        Calls(
            (Text("<tool_call>\n<function="), Name(), Text(">"),
             Parameters("\n<parameter=", ">\n", "\n</parameter>"), Text("\n</function>\n</tool_call>\n")),
        ),
    ),
    (
        "{% set c = m.tool_calls[0] %}" + '{"name": "{{ c.function.name }}", "parameters": '
        "{{ c.function.arguments | tojson }}}",
        Calls((Envelope(("name", "parameters"), "name", "parameters"),)),
    ),
    (
        "<|calls|>[" + EACH.replace("CALL", KEYWORDS) + "]<|/calls|>",
        Calls((Name(), Text("("), Keywords(), Text(")")), "<|calls|>", ", ", "<|/calls|>", is_list=True),
    ),
    (
        "[" + EACH.replace("CALL", KEYWORDS) + "]",
        Calls((Name(), Text("("), Keywords(), Text(")")), separator=", ", is_list=True),
    ),
    (  # the template takes arguments as text
        EACH.replace("CALL", "{{ '<function=' + c.function.name + '>' + c.function.arguments + '</function>' }}"),
        Calls((Text("<function="), Name(), Text(">"), Arguments(), Text("</function>"))),
    ),
]  # fmt: skip


@pytest.mark.parametrize("thinking", ["", THINKING])
@pytest.mark.parametrize(("calls", "expected"), CASES)
def test_the_way_a_template_writes_calls_is_found(calls: str, expected: Calls, thinking: str) -> None:
    found = detect(template(calls, thinking), ["<|im_end|>"])
    assert found.description is not None
    assert found.description.calls == expected
    assert found.description.source == "chat template"
    assert found.defect == ""
    assert "a call" in found.checked
    if thinking:
        assert found.description.reasoning == Reasoning("<think>\n", "\n</think>\n\n")
        assert "reasoning" in found.checked


def test_a_template_that_opens_the_reasoning_is_understood() -> None:
    source = TURNS.replace("CALLS", CASES[0][0]).replace("THINK", THINKING)
    source = source.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    found = detect(ChatTemplate({"default": source}, {}, "test"), ["<|im_end|>"])
    assert found.description is not None
    assert (found.description.calls, found.defect) == (CASES[0][1], "")
    assert found.checked == ("a call", "two calls", "reasoning")


def test_a_template_without_a_notation_has_none() -> None:
    assert detect(template("")) == Detected(None, "", ())
    assert described(Detected(None, "", ())) == ""


def test_a_rendered_call_that_is_not_parsed_back_is_told() -> None:
    broken = EACH.replace("CALL", "<call>" + OBJECT.replace("| tojson", "| tojson | upper") + "</call>")
    found = detect(ChatTemplate({"default": TURNS.replace("CALLS", broken) + "<|tool_call|> JSON list"}, {}, "test"))
    assert found.description is not None
    assert found.description.source == "table"
    assert "MISMATCH" in described(found)


REAL = Path(__file__).parents[4] / "shared" / "data" / "chat-templates"
ENDS = ("<|eom_id|>", "<|call|>", "<|calls|>", "<EOS>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
NO_NOTATION = {
    "google-gemma-2-2b-it": "its template takes no calls",
    "llama-cpp-rwkv-world": "its template takes no calls",
}
NOT_RENDERED = {  # found by the table: the template writes no call of a history, or only with other variables
    "Kimi-K2-Thinking": "access to attribute 'append' of 'list' object is unsafe",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "ibm-granite-granite-3.3-2B-Instruct": "",  # it renders without the calls of the history
    "llama-cpp-deepseek-r1": "generator is not JSON serializable",
}


@pytest.mark.skipif(not REAL.is_dir(), reason="the collection of released templates is not here")
@pytest.mark.parametrize("name", NOT_RENDERED)
def test_transformers_renders_no_call_of_these_templates_either(name: str) -> None:
    template = _compile_jinja_template((REAL / f"{name}.jinja").read_text())
    chat = conversation([call(1, {"x": 1})])
    variables = {"messages": chat.messages, "tools": chat.tools, "bos_token": "", "eos_token": ""}
    if NOT_RENDERED[name]:
        with pytest.raises(Exception, match=NOT_RENDERED[name]):
            template.render(**variables, add_generation_prompt=False)
    else:
        assert '"x"' not in template.render(**variables, add_generation_prompt=False)


@pytest.mark.skipif(not REAL.is_dir(), reason="the collection of released templates is not here")
def test_notations_of_released_templates_are_found_and_parsed_back() -> None:
    table: dict[str, Detected] = {}
    for path in sorted(REAL.glob("*.jinja")):
        source = ChatTemplate({"default": path.read_text()}, {"bos_token": "<BOS>", "eos_token": "<EOS>"}, path.name)
        table[path.stem] = detect(source, ENDS)
    for name, found in table.items():
        print(f"{name:48} {described(found)!r}")
    without_calls = {
        name
        for name, found in table.items()
        if found.description is None or not (found.description.calls or found.description.is_channels)
    }
    assert without_calls == set(NO_NOTATION)
    assert {name for name, found in table.items() if found.defect} == set()
    not_rendered = {name for name, found in table.items() if "a call" not in found.checked}
    assert not_rendered - without_calls == set(NOT_RENDERED)


def test_a_folders_notation_is_told_without_loading_the_model() -> None:
    told, defect = told_of(Path(resolve("demo", lambda phase, done, total: None)), None)
    assert told.startswith("hermes (calls <tool_call>; from the chat template)")
    assert defect == ""
