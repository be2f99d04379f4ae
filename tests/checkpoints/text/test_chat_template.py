"""Conversations render as transformers renders them, and no template takes the machine."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tests.heap import thread_seconds
from tests.tiers import sample
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from inferd.checkpoints.text import template_sandbox
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.types import JSON, Chat

_reference: Any = chat_template_utils.render_jinja_template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK: list[JSON] = [
    {"role": "user", "content": "Wie groß ist 'π' & <τ>? 😀"},
    {"role": "assistant", "content": " About 3. "},
    {"role": "user", "content": "Thanks"},
]
SYSTEM: JSON = {"role": "system", "content": "You are brief."}
TOOLS: list[JSON] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a “city”",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "days": {"type": "integer", "enum": [1, 2]},
                },
                "required": ["city"],
            },
        },
    }
]
CALLED: list[JSON] = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I need the tool.",
        "tool_calls": [
            {"id": "call_0000a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_0000a", "name": "weather", "content": '{"c": 7}'},
    {"role": "user", "content": "And tomorrow?"},
]


def made(source: str, **more: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **more}, {"bos_token": "<s>", "eos_token": "</s>"}, "chat_template.jinja")


def render(source: str, messages: list[JSON] | None = None, **fields: Any) -> str:
    return made(source).render(Chat(messages=TALK if messages is None else messages, **fields))


# -- as transformers does ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages[0] | tojson(sort_keys=true) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{{ m.role }}{% break %}{% endfor %}",
        "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n{% generation %}{{ m.content }}{% endgeneration %}\n  {% endif %}\n{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
        "{% macro say(m) %}[{{ m.role }}: {{ m.content }}]{% endmacro %}{% for m in messages[::-1] %}{{ say(m) }}{% endfor %}",
        "{{ dict(a=1, b=[2]) }}{{ {'a': messages | length} }}{{ [messages[0].role, 1] }}{{ (1, messages[0].role) }}",
        "{{ 'a' ~ 1 ~ none ~ messages[0].role }}{{ 'x' * 3 }}{{ '%s-%s' % ('a', 2) }}{{ 'a{}'.format(3) }}{{ 2 ** 3 }}",
        "{% set text %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ text | upper | replace('E', '3') | indent(2) }}",
        "{{ messages | map(attribute='role') | unique | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | first }}{{ range(3) | sum }}{{ missing }}",
        "{{ messages[0].content.split(' ') }}{{ messages[1].content.strip().startswith('A') }}{{ ' a '.join(['x', 'y']) }}",
        "{% for k, v in messages[0].items() if k != 'role' %}{{ k }}={{ v }}{% endfor %}{{ messages | batch(2) | list | length }}",
        "{{ documents }}{{ tools is none }}{{ add_generation_prompt }}{{ enable_thinking }}{{ strftime_now('%Y') }}",
        "{% if messages[-1].role is defined and messages[-1].name is not defined %}ok{% endif %}{{ messages[0] is mapping }}",
        "{%- for m in messages -%} {{- m.content.rstrip('\\n') -}} {%- else -%} none {%- endfor -%}{# a comment #}",
        "{% macro say() %}<{{ caller(1) }}>{% endmacro %}{% filter upper %}{{ messages[0].role }}{% endfilter %}{% call(x) say() %}{{ x }}{% endcall %}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    for prompt in (True, False):
        for tools in (None, TOOLS):
            theirs, _ = _reference(
                [TALK],
                tools=tools,
                chat_template=source,
                add_generation_prompt=prompt,
                bos_token="<s>",
                eos_token="</s>",
                enable_thinking=False,
            )
            ours = render(source, tools=tools, add_generation_prompt=prompt, template_kwargs={"enable_thinking": False})
            assert ours == theirs[0]


def test_absent_values_are_missing_and_reasoning_has_its_names() -> None:
    message: JSON = {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": None}
    source = "{{ messages[0].content is defined }} {{ messages[0].reasoning_content }} {{ messages[0].thinking }} {{ 'tool_calls' in messages[0] }}"
    assert render(source, [message]) == "False hm hm False"


@pytest.mark.parametrize(
    "content",
    ["The answer is", "The answer is ", " ", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]],
)
@pytest.mark.parametrize(
    "source",
    [
        CHATML.replace("m.content", "(m.content if m.content is string else m.content | map(attribute='text') | join)"),
        "{% for m in messages %}{{ m.role }}:{{ m.content | trim if m.content is string else m.content[-1].text }}</s>{% endfor %}",
        "{{ (messages[-1].content if messages[-1].content is string else messages[-1].content[-1].text) | trim }}",
    ],
)
def test_the_final_message_is_continued_as_in_transformers(source: str, content: Any) -> None:
    messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": content}]
    theirs, _ = _reference([messages], chat_template=source, continue_final_message=True, add_generation_prompt=False)
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == theirs[0]
    assert messages[-1]["content"] == content  # the request's own message is untouched


# -- which template ---------------------------------------------------------------------------


@pytest.fixture
def folder(tokenizer_folders: dict[str, Path], tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folders["byte_level"] / name, tmp_path)
    return tmp_path


def configure(folder: Path, template: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def loaded(folder: Path, override: Path | None = None) -> ChatTemplate | None:
    return ChatTemplate.load(folder, Tokenizer.load(folder), override)


def rendered(folder: Path, override: Path | None = None, tools: list[JSON] | None = None) -> str:
    template = loaded(folder, override)
    assert template is not None
    return template.render(Chat(messages=TALK, tools=tools))


def test_each_place_a_template_may_lie_gives_way_to_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(folder) is None
    configure(folder, "config {{ bos_token }}")
    assert rendered(folder) == "config <s>"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered(folder) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert rendered(folder) == "jinja"
    override = folder / "mine.txt"
    override.write_text("mine")
    assert rendered(folder, override) == "mine"
    monkeypatch.setenv("HOME", str(folder))
    assert rendered(folder, Path("~/mine.txt")) == "mine"


def test_named_templates_are_chosen_by_the_presence_of_tools(folder: Path) -> None:
    configure(folder, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert (rendered(folder), rendered(folder, tools=TOOLS)) == ("plain", "tools")
    (folder / "chat_template.jinja").write_text("jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert (rendered(folder), rendered(folder, tools=TOOLS)) == ("jinja", "more")


def test_several_templates_without_a_default_are_named() -> None:
    template = ChatTemplate({"rag": "a", "math": "b"}, {}, "x")
    with pytest.raises(InvalidRequest, match="math, rag"):
        template.render(Chat(messages=TALK))


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x",
        "{% endfor %}",
        "{% unknown %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ a | nope }}",
    ],
)
def test_a_template_that_does_not_compile_names_its_file(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        loaded(folder)


def test_a_template_has_a_mebibyte_of_characters_at_most(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x" * 2**20)
    assert rendered(folder) == "x" * 2**20
    (folder / "chat_template.jinja").write_text("x" * (2**20 + 1))
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja has 1048577 characters, more than 1048576"):
        loaded(folder)


@pytest.mark.parametrize("entry", [5, [{"name": "x"}], ["x"], {"a": "b"}])
def test_an_odd_template_entry_names_its_file(folder: Path, entry: object) -> None:
    configure(folder, entry)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        loaded(folder)


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"missing\.jinja, but that file does not exist"):
        loaded(folder, folder / "missing.jinja")
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"chat_template\.json is not a JSON object"):
        loaded(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read"):
        loaded(folder)


# -- requests at fault ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False, "messages": [{"role": "user"}]}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "continue_final_message"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
    ],
)  # fmt: skip
def test_a_request_at_fault_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(CHATML).render(Chat(**{"messages": TALK, **fields}))
    assert caught.value.param == param


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render("{{ messages[0].content }}", continue_final_message=True, add_generation_prompt=False)


def test_what_a_template_raises_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match=r"^Roles must alternate$") as caught:
        render("{{ raise_exception('Roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.y.z }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ [1][5].x }}",
        "{{ 'a'.index('b') }}",
        "{{ namespace(_a=1) }}",
    ],
)
def test_a_template_that_fails_is_a_refused_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        render(source)
    assert caught.value.param == "messages"


# -- hostile templates ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ ('{0.__class__}').format(1) }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    try:
        shown = render(source)
    except InvalidRequest:
        return
    assert shown == ""  # jinja shows a forbidden attribute as nothing, and refuses to do anything with it


_GROW = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}"


def grow(start: str, step: str, end: str = "") -> str:
    return _GROW.replace("START", start).replace("STEP", step) + end


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops that keep nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n > 0 %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "text in loops": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "captured text": "{% set z %}{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}{% endset %}",
    "many statements": "{% set a = range(99999) | map('string') | sort | list %}" * 200,
    "many tests": "{{ range(99999) | select('odd') | list | length }}" * 500,
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{{ ([0] * 10**10) | length }}",
    "power": "{{ 7 ** (10 ** 9) }}",
    "doubling by ~": grow("'ab'", "ns.s ~ ns.s"),
    "doubling by +": grow("'ab'", "ns.s + ns.s"),
    "doubling by block": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "squaring": grow("3", "ns.s * ns.s"),
    "nested lists": grow("[1]", "[ns.s, ns.s]", "{{ ns.s }}"),
    "nested dicts": grow("[1]", "{'a': ns.s, 'b': ns.s}", "{{ ns.s | tojson }}"),
    "nested tuples": grow("(1,)", "(ns.s, ns.s)", "{{ {ns.s: 1} }}"),
    "nested calls of dict": grow("[1]", "dict(a=ns.s, b=ns.s)", "{{ ns.s == ns.s }}"),
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ '1'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\\t' * 100000).expandtabs(1000000) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format by argument": "{{ '{:{}}'.format(1, 10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent by argument": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace filter": "{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}",
    "replace method": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "join filter": "{% set a = 'a' * 1000000 %}{{ range(99999) | join(a) }}",
    "join method": "{% set a = 'a' * 1000000 %}{{ a.join(range(99999) | map('string')) }}",
    "join of one text": "{% set a = 'a' * 1000000 %}{{ ([a] * 10000) | join }}",
    "map that grows": "{% set a = 'a' * 1000000 %}{{ range(99999) | map('replace', '1', a) | join }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "indent": "{{ ('a\\n' * 1000000) | indent(999) }}",
    "tojson": "{{ [1] | tojson(indent=1000000000) }}",
    "replace by keyword": "{% set a = 'a' * 1000000 %}{{ a | replace(new=a, old='a') }}",
    "join by keyword": "{% set a = 'a' * 1000000 %}{{ range(99999) | join(attribute='x', d=a) }}",
    "indent by text": "{{ ('a\\n' * 1000000) | indent('x' * 999) }}",
    "tojson by text": "{{ range(50000) | list | tojson(indent='x' * 100000) }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "text at random": "{{ lipsum(n=50000) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fifth of the real limit, to be quick; what one operation may take on top is the same.
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    template = made(BOMBS[name])
    with thread_seconds() as taken_s:
        with pytest.raises(InvalidRequest) as caught:
            template.render(Chat(messages=TALK))
        assert taken_s() < 1.2
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% set a = 'a' * 20000 %}{{ a | replace(new=a, old='a') }}",
        "{% set a = 'a' * 20000 %}{{ range(20000) | join(attribute='x', d=a) }}",
        "{{ range(20000) | list | tojson(indent='x' * 20000) }}",
        "{% set a = 'a' * 20000 %}{{ a.replace('a', a) }}",
        "{{ ('\\n' * 400000) | indent(999, blank=true) }}",
    ],
)
def test_what_an_operation_would_make_is_refused_before_it_takes_the_memory(source: str) -> None:
    template = made(source)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="was stopped"):
            template.render(Chat(messages=TALK))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 50_000_000, "each of them would make 400 million characters"


# Of limits that are small: the largest value that fits, and the next.
BOUNDS = {
    "repeated text": ("{{ 'a' * N }}", 2000),
    "text by a factor": ("{{ N * 'a' }}", 2000),
    "repeated list": ("{{ ([0] * N) | length }}", 15),
    "lists of equal lengths": ("{% set a = [0] * N %}{{ (a + a) | length }}", 14),
    "a sum of texts": ("{% set a = 'a' * 1000 %}{{ (a + 'b' * N) | length }}", 1000),
    "texts beside each other": ("{% set a = 'a' * 1000 %}{{ a }}{{ 'b' * N }}", 1000),
    "texts joined by ~": ("{% set a = 'a' * 900 %}{{ (a ~ 'b' * N) | length }}", 900 + 200 - 64 * 3),
    "a power": ("{{ 2 ** N }}", 32),
    "a power below 1": ("{{ 2 ** -N }}", 32),
    "a product": ("{% set a = 2 ** 32 %}{{ a * (2 ** 25) * N }}", 127),
    "a width of a format": ("{{ ('%Nd' % 1) | length }}", 999),
    "a width of braces": ("{{ '{:Nd}'.format(1) | length }}", 999),
    "a width of the filter format": ("{{ '%Nd' | format(1) | length }}", 999),
    "fields of a format": ("{{ ('%s' * N) | format('a') | length }}", 1),
    "an argument of a format": ("{{ ('%s' % ('a' * N)) | length }}", 744),
    "a padded text": ("{{ 'a' | center(N) | length }}", 20),
    "a text padded to the left": ("{{ 'a'.rjust(N) | length }}", 20),
    "a tab": ("{{ 'a\\tb'.expandtabs(N) | length }}", 20),
    "padded lines": ("{{ ('a\\n' * N) | indent(20) | length }}", 90),
    "tabs": ("{{ ('a\\t' * N).expandtabs(20) | length }}", 90),
    "a width in text": ("{{ 'a\\nb' | indent('x' * N) | length }}", 20),
    "an indented list": ("{{ ([0] * 11 + [0] * N) | tojson(indent=20) | length }}", 11),
    "batches": ("{{ [1] | batch(N, 'x') | list | length }}", 20),
    "slices": ("{{ [1] | slice(N) | list | length }}", 20),
    "replaced text": ("{{ ('a' * 4).replace('a', 'b' * N) | length }}", 499),
    "replaced nothing": ("{{ ('a' * 4) | replace('', 'b' * N) | length }}", 399),
    "separators": ("{{ (['a'] * 10) | join('x' * N) | length }}", 128),
    "separators of the method": ("{{ ('x' * N).join(['a'] * 10) | length }}", 128),
    "translated text": ("{{ ('a' * 4).translate({97: 'b' * N}) | length }}", 500),
    "collected values": ("{{ range(N) | map('string') | list | length }}", 31),
    "a list that is written": ("{{ [[0] * 14, 'a' * N] | length }}", 2000 - 64 * 17),
    "a dict that is made": ("{{ {'k' * 100: 'a' * N} | length }}", 2000 - 64 * 3 - 100),
    "a dict that is called": ("{{ dict(k='a' * N) | length }}", 2000 - 64 * 3 - 1),
    "a captured list": ("{% set z %}{{ ['\\x01' * N] }}{% endset %}", 499),  # 4 characters for each of the text
    "captured text": ("{% for i in range(N) %}{% set z %}{{ 'a' * 1000 }}{% endset %}{% endfor %}", 5),
    "plain text of a loop": ("{% for i in range(N) %}{% set z %}xxxxxxxxxx{% endset %}{% endfor %}", 500),
    "plain text of a macro": (
        "{% macro m() %}xxxxxxxxxx{% endmacro %}{% for i in range(N) %}{% set z = m() %}{% endfor %}", 500
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_within_a_limit_is_rendered_and_the_next_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"MAX_SIZE": 2000, "_MAX_WRITTEN": 5000, "_MAX_FILL": 20, "_MAX_BITS": 64}
    for limit, value in small.items():
        monkeypatch.setattr(template_sandbox, limit, value)
    source, most = BOUNDS[name]
    made(source.replace("N", str(most))).render(Chat(messages=TALK))
    with pytest.raises(InvalidRequest, match="was stopped"):
        made(source.replace("N", str(most + 1))).render(Chat(messages=TALK))


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ 'a' * -5 }}", ""),
        ("{{ 2.0 ** 100 > 1 }}", "True"),
        ("{{ [1, 2.5] | sum }}", "3.5"),
        ("{{ 'abc' | replace('b', 'x', 1) }}", "axc"),
        ("{{ '%s-%d' % ('a', 5) }}", "a-5"),
        ("{{ '{}-{}'.format(1, 'b') }}", "1-b"),
        ("{{ ', '.join(['a', 'b']) }}", "a, b"),
        ("{{ ['a', 'b'] | join(', ') }}", "a, b"),
        ("{{ 'ab'.translate({97: 'x'}) }}", "xb"),
        ("{% for a in range(9) if a is odd %}{{ a }}{% endfor %}", "1357"),
        ("{{ ['b', 'a'] | sort | join }}", "ab"),
        ("{{ range(3) | list }}", "[0, 1, 2]"),
    ],
)
def test_what_is_metered_gives_what_it_gives_in_jinja(source: str, shown: str) -> None:
    assert render(source) == shown


@pytest.mark.parametrize("source", ["{{ 'a' ** 2 }}", "{{ [[1], [2]] | sum(start=[]) }}", "{{ [1, 'a'] | sum }}"])
def test_operations_that_take_numbers_take_nothing_else(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"was stopped.* takes numbers"):
        render(source)


def test_a_render_has_a_second_and_the_next_one_is_not_charged_for_it() -> None:
    both = made("{% if messages[0].role == 'bomb' %}" + BOMBS["nested loops"] + "{% endif %}fine")
    with thread_seconds() as taken_s:
        with pytest.raises(InvalidRequest, match="longer than 1 s"):
            both.render(Chat(messages=[{"role": "bomb"}]))
        assert 1.0 <= taken_s() < 1.5
    assert both.render(Chat(messages=TALK)) == "fine"


def test_a_long_conversation_renders() -> None:
    messages = [{"role": "user", "content": "word " * 200} for _ in range(1000)]
    text = render(CHATML, messages)
    assert len(text) > 1_000_000


# -- real templates ---------------------------------------------------------------------------

_CHATS: dict[str, Chat] = {
    "talk": Chat(messages=TALK),
    "no prompt": Chat(messages=TALK, add_generation_prompt=False),
    "system": Chat(messages=[SYSTEM, *TALK]),
    "tools": Chat(messages=TALK, tools=TOOLS),
    "called": Chat(messages=CALLED, tools=TOOLS),
    "documents": Chat(messages=TALK, documents=[{"title": "A", "text": "b"}]),
    "continued": Chat(messages=TALK[:2], add_generation_prompt=False, continue_final_message=True),
    "thinking": Chat(messages=TALK, template_kwargs={"enable_thinking": False}),
}


@pytest.mark.shared
@pytest.mark.parametrize("kind", sample(_CHATS, "system", "called"))
def test_real_templates_render_as_in_transformers(
    shared_data: Path, tokenizer_folders: dict[str, Path], kind: str
) -> None:
    chat = _CHATS[kind]
    reference: Any = AutoTokenizer.from_pretrained(tokenizer_folders["byte_level"])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered, refused = 0, []
    for path in sorted((shared_data / "chat-templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        try:
            expected = reference.apply_chat_template(
                chat.messages,
                tools=chat.tools,
                documents=chat.documents,
                chat_template=source,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **chat.template_kwargs,
            )
        except Exception as error:  # whatever the template says of this conversation
            expected = None
            refused.append((path.name, error))
        template = ChatTemplate({"default": source}, special, str(path))
        if expected is None:
            with pytest.raises(InvalidRequest):
                template.render(chat)
        else:
            assert template.render(chat) == expected, path.name
            rendered += 1
    assert rendered > len(refused), refused
