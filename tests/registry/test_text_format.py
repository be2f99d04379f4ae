"""Texts in protobuf's format become the structs that Triton's own messages become; mistakes are told with line and field."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.registry.repositories import repository
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

from inferd.registry.text_format import TextFormatError, parse
from inferd.registry.triton_config import Control, DynamicBatching, EnsembleStep, Input, TritonModel

EVERYTHING = r"""
# a comment
name: "sim" 'ple' ; platform: 'onnxruntime_onnx',
max_batch_size: 0x10
input [
  { name: "a\tb\x41\101\u00e9\"" data_type: TYPE_FP32 dims: [ -1, 3 ] reshape { shape: [] } },
  < name: "INPUT1"; data_type: TYPE_STRING; dims: 1; dims: 017; optional: t >
]
output: { name: "out" label_filename: "labels.txt" }
version_policy: { specific { versions: [1, 3] } }
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
  priority_queue_policy { key: 1 value { max_queue_size: 7 } } }
instance_group [ { kind: KIND_CPU count: 2 } ]
parameters { key: "x" value: { string_value: "y" } }
sequence_batching { direct { minimum_slot_utilization: 5e-1f } control_input [ { name: "S" control [
  { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1.0 ] bool_false_true: [false, True] } ] } ] }
"""


def folded(text: str) -> tuple[TritonModel, list[str]]:
    unknown: list[str] = []
    return parse(text, TritonModel, unknown), unknown


def test_everything_people_write_is_read_as_protobuf_reads_it() -> None:
    ours, unknown = folded(EVERYTHING)
    theirs = text_format.Merge(EVERYTHING, model_config_pb2.ModelConfig())
    assert unknown == []
    assert ours.name == theirs.name == "simple"
    assert ours.max_batch_size == theirs.max_batch_size == 16
    assert [one.name for one in ours.input] == [one.name for one in theirs.input]
    assert [list(one.dims) for one in ours.input] == [list(one.dims) for one in theirs.input] == [[-1, 3], [1, 15]]
    assert ours.input[0].reshape is not None
    assert ours.input[0].reshape.shape == ()
    assert ours.input[1].reshape is None
    assert [one.optional for one in ours.input] == [one.optional for one in theirs.input] == [False, True]
    assert ours.version_policy is not None
    assert ours.version_policy.specific is not None
    assert ours.version_policy.specific.versions == (1, 3)
    assert ours.dynamic_batching is not None
    assert ours.dynamic_batching.preferred_batch_size == (4, 8)
    assert ours.dynamic_batching.priority_queue_policy[1].max_queue_size == 7
    assert ours.instance_group[0].kind == "KIND_CPU"
    assert ours.parameters["x"].string_value == "y"
    assert ours.sequence_batching is not None
    assert ours.sequence_batching.direct is not None
    assert ours.sequence_batching.direct.minimum_slot_utilization == 0.5
    assert ours.sequence_batching.control_input[0].control[0].fp32_false_true == (0.0, 1.0)
    assert ours.sequence_batching.control_input[0].control[0].bool_false_true == (False, True)


def test_the_fields_have_the_names_of_tritons_own_messages() -> None:
    descriptor = model_config_pb2.ModelConfig.DESCRIPTOR
    nested = {
        TritonModel: descriptor,
        DynamicBatching: descriptor.fields_by_name["dynamic_batching"].message_type,
        EnsembleStep: descriptor.fields_by_name["ensemble_scheduling"].message_type.fields_by_name["step"].message_type,
        Control: descriptor.fields_by_name["sequence_batching"]
        .message_type.fields_by_name["control_input"]
        .message_type.fields_by_name["control"]
        .message_type,
    }
    for struct, message in nested.items():
        assert set(
            msgspec.structs.asdict(struct()) if struct is not TritonModel else TritonModel.__struct_fields__
        ) <= set(message.fields_by_name), struct


@settings(max_examples=80, deadline=None)
@given(
    st.text(max_size=20),
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(st.text(max_size=8), st.lists(st.integers(-1, 2**40), max_size=4), st.booleans()), max_size=3),
    st.dictionaries(st.text(max_size=6), st.text(max_size=12), max_size=3),
    st.floats(width=32, allow_nan=False),
)
def test_what_protobuf_writes_we_read(
    name: str, size: int, inputs: list[tuple[str, list[int], bool]], parameters: dict[str, str], slots: float
) -> None:
    message = model_config_pb2.ModelConfig(name=name, max_batch_size=size)
    for one, dims, optional in inputs:
        message.input.add(name=one, dims=dims, optional=optional)
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    message.sequence_batching.direct.minimum_slot_utilization = slots
    for text in (text_format.MessageToString(message), text_format.MessageToString(message, as_one_line=True)):
        ours, unknown = folded(text)
        assert unknown == []
        assert (ours.name, ours.max_batch_size) == (name, size)
        assert [(one.name, list(one.dims), one.optional) for one in ours.input] == inputs
        assert {key: value.string_value for key, value in ours.parameters.items()} == parameters
        assert ours.sequence_batching is not None
        assert ours.sequence_batching.direct is not None
        assert ours.sequence_batching.direct.minimum_slot_utilization == pytest.approx(slots, rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(alphabet="{}[]<>:,;\"'\\#-.0x1ea \nnamedims", max_size=40),
        st.tuples(st.integers(0, len(EVERYTHING)), st.text(alphabet="{}[]<>:\"'\\#x1 \n", max_size=3)).map(
            lambda cut: EVERYTHING[: cut[0]] + cut[1] + EVERYTHING[cut[0] + 1 :]
        ),
    )
)
def test_a_text_is_read_or_refused_and_fields_are_unknown_where_protobuf_says_so(text: str) -> None:
    try:
        _, unknown = folded(text)
    except TextFormatError:
        return
    if unknown:
        with pytest.raises(text_format.ParseError) as caught:
            text_format.Merge(text, model_config_pb2.ModelConfig())
        said = re.search(r'has no field named "(.*)"|does not have extensions', str(caught.value))
        assert said is not None
        assert unknown[0].endswith(said[1] or "")
    else:
        text_format.Merge(text, model_config_pb2.ModelConfig())


_WORDS = [value.name for value in model_config_pb2.DataType.DESCRIPTOR.values]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name", 'line 1: name: Expected ":"'),
        ('\nname: "a', "line 2: name: String missing ending quote: '\"a'"),
        ("name: 5", "line 1: name: Expected string but found: '5'"),
        ("name: simple", "line 1: name: Expected string but found: 'simple'"),
        (
            '\n\ninput { data_type: "TYPE_FP32" }',
            'line 3: input.data_type: Enum type "Input.DataType" has no value named',
        ),
        ("input { data_type: TYPE_FP33 }", f"has no value named TYPE_FP33; expected one of {', '.join(_WORDS)}"),
        ("max_batch_size: 8.5", "line 1: max_batch_size: Couldn't parse integer: 8.5"),
        ("max_batch_size: 1\nmax_batch_size: 2", "line 2: max_batch_size: "),
        ("max_batch_size: [ 8 ]", "line 1: max_batch_size: Couldn't parse integer: ["),
        ("input: 3", 'line 1: input: Expected "{"'),
        ("input { name: 'a'", 'line 1: input.name: Expected "}"'),
        ("input { optional: maybe }", 'line 1: input.optional: Expected "true" or "false"'),
        (r'name: "\xff"', "line 1: name: Couldn't parse string"),
        ("a {" * 80, "a does not end; expected '}'"),
        ("other [ {", "other does not end; expected '}'"),
        ("other { name: 'a' ]", "other does not end; expected '}'"),
        ("name: -x", "line 1: name: Expected string"),
        ("input [ {} {} ]", 'line 1: input: Expected ","'),
        ("max_batch_size: 99999999999999999999", "line 1: max_batch_size: Value out of range"),
        ("[a.b]: 1", "line 1: "),
        ("#" * ((1 << 20) + 1), "expected at most"),
        (
            "dynamic_batching { priority_queue_policy { key: x1 } }",
            "line 1: dynamic_batching.priority_queue_policy.key: Couldn't parse integer: x1",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_and_its_field(text: str, said: str) -> None:
    with pytest.raises(TextFormatError) as caught:
        folded(text)
    assert said in str(caught.value)


def test_unknown_fields_are_named_once() -> None:
    found, unknown = folded(
        'zzz: 1 input { name: "a" yyy { b: 1 } } input [ { yyy { } }, < name: "b" > ] zzz: [2, x, {a: 1}] 5: name\n'
        "dynamic_batching { priority_queue_policy { key: 1 more: 'x: 1' value { max_queue_size: 2 } } }"
    )
    assert unknown == ["zzz", "input.yyy", "5", "dynamic_batching.priority_queue_policy.more"]
    assert [one.name for one in found.input] == ["a", "", "b"]


def test_numbers_of_enums_are_tritons() -> None:
    for number, word in enumerate(_WORDS):
        found, _ = folded(f"input {{ data_type: {number} }}")
        assert found.input == (Input(data_type=word),)


def test_a_missing_package_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    """Only where a config.pbtxt is read: numbered folders alone need no package."""
    repository(tmp_path)
    program = (
        "import sys; sys.modules['google.protobuf'] = None\n"
        "from inferd.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "check", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert (
        "needs the package protobuf, which is not installed: pip install 'inferd[triton]'"
        in found.stdout + found.stderr
    )
    for config in tmp_path.rglob("config.pbtxt"):
        config.unlink()
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "protobuf" not in found.stdout + found.stderr
