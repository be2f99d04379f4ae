"""What must not come through the door: every knob at every hostile value, broken JSON, floods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.fakes import Running, post, running
from tests.stopwatch import Stopwatch

from inferd.config import ServerConfig
from inferd.errors import InvalidRequest
from inferd.gateway.body.decode import decode
from inferd.gateway.body.document import is_certain
from inferd.gateway.openai.wire import ChatRequest, CompletionRequest, chat_decoder, completion_decoder

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(config=ServerConfig(port=0, grace_s=1, max_body_bytes=4 * 1024 * 1024)) as started:
        yield started


NUMBERS = [
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
    "n",
    "best_of",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "priority",
    "timeout",
]
LISTS = ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"]
SWITCHES = [
    "stream",
    "include_stop_str_in_output",
    "ignore_eos",
    "use_beam_search",
    "skip_special_tokens",
    "watermark",
    "return_token_ids",
]
HOSTILE = [
    "-1", "0", str(2**31), str(2**63), str(2**64), "1e308", "-1e308", "1e400", "NaN", "Infinity", "true", "null", '"x"',
    "9" * 400, "9" * 5000, "[]", "{}", "[[]]", "[-1]", "[null]", '[""]', "[9223372036854775808]", '{"x": 1}', '{"-1": 1}',
    '{"5": 1e308}', '"\\u0000"', "1.5",
]  # fmt: skip
CHAT = ("/v1/chat/completions", {"messages": HI}, [*NUMBERS, "max_completion_tokens", "top_logprobs"])
TEXT = ("/v1/completions", {"prompt": "hi"}, [*NUMBERS, "logprobs"])


@pytest.mark.parametrize(("path", "base", "numbers"), [CHAT, TEXT], ids=["chat", "completions"])
def test_every_knob_at_every_hostile_value_is_refused_or_handled_quickly(
    server: Running, path: str, base: dict[str, Any], numbers: list[str]
) -> None:
    slow: list[tuple[str, str, float]] = []
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}) as client:
        for name in [*numbers, *LISTS, *SWITCHES, "logit_bias", "stop_token_ids", "cache_salt", "request_id", "model"]:
            for value in HOSTILE:
                body = json.dumps(base)[:-1] + f', "{name}": {value}}}'
                watch = Stopwatch()
                reply = client.post(path, content=body.encode())
                took = watch.seconds
                assert reply.status_code in (200, 400, 404), (name, value, reply.text)
                if reply.status_code != 200:
                    error = reply.json()["error"]
                    assert len(reply.content) < 1500, (name, value[:40])
                    if value not in ("NaN", "Infinity"):
                        assert error["param"].startswith(name), (name, value[:40], error)
                        assert name in error["message"]
                if took > 0.05:
                    slow.append((name, value[:20], took))
        assert client.post(path, json=base).status_code == 200
    assert len(slow) <= 2, slow  # the machine may hiccup; the server may not


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 129), ("n", 0), ("best_of", 129), ("temperature", 2.1), ("temperature", -0.1), ("top_p", 1.01), ("min_p", -0.1),
        ("repetition_penalty", 0), ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("top_k", -2), ("logprobs", 21),
        ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("stop", ["x"] * 17), ("stop", ""), ("bad_words", [""]),
        ("logit_bias", {str(i): 1 for i in range(1025)}), ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 1}),
        ("allowed_token_ids", []), ("stop_token_ids", [-1]), ("max_tokens", -1), ("max_tokens", 0), ("min_tokens", 17),
        ("truncate_prompt_tokens", 0), ("truncation_side", "right"), ("cache_salt", ""), ("cache_salt", "x" * 1025),
        ("request_id", "a b"), ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 1]), ("prompt", [1, [2]]),
        ("prompt", [-1]), ("prompt", [2**31]), ("prompt", [2**63]), ("prompt", ["x"] * 257), ("prompt", {}), ("prompt", None),
        ("stream_options", {"include_usage": True}), ("response_format", {"type": "json"}), ("suffix", "x"),
        ("guided_json", "{"), ("structured_outputs", {"regex": "a", "json_object": True}), ("prompt_embeds", "AAAA"),
        ("guided_choice", []), ("guided_regex", ""), ("structured_outputs", {"disable_additional_properties": True}),
        ("structural_tag", {"triggers": ["x"]}), ("structural_tag", "["), ("grammar", ""), ("structured_outputs", {"choice": [""]}),
    ],
)  # fmt: skip
def test_a_value_outside_its_limits_is_named(server: Running, field: str, value: object) -> None:
    reply = post(server, "/v1/completions", {"prompt": "hi", field: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ("messages", [*HI, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0].text"),
        ("messages", [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        ("audio", {"voice": "alloy"}, "audio"),
        ("modalities", ["text", "audio"], "modalities"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
        ("response_format", {"type": "structural_tag", "format": {"type": "x"}}, "response_format.format"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("functions", [{"name": "f"}], "functions"),
        ("function_call", {"name": "f"}, "function_call"),
        ("web_search_options", {"a": 1}, "web_search_options"),
        ("tools", [{"type": "custom"}], "tools[0].type"),
        ("tools", [{"type": "function"}], "tools[0].function.name"),
        ("chat_template", "{{ 1 }}", "chat_template"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("top_logprobs", 5, "top_logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("stream_options", {"include_usag": True}, "stream_options"),
    ],
)  # fmt: skip
def test_what_chat_cannot_do_is_named(server: Running, field: str, value: object, param: str) -> None:
    body = {"messages": HI, field: value}
    if field == "stream_options":
        body["stream"] = True
    reply = post(server, "/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)


def test_an_unknown_argument_is_named_with_the_nearest_known_one(server: Running) -> None:
    error = post(server, "/v1/chat/completions", {"messages": HI, "temprature": 1}).json()["error"]
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"{} {}", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"\xef\xbb\xbf{}", b"\x00",
        b'{"prompt": "a", "user": "\xff"}', b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}',
        b'{"prompt": "a", "metadata": {"x": 1, "x": 2}}', b'{"prompt": ' + b"[" * 100_000, b'{"user": ' + b"[" * 100_000,
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", b'{"a":' * 100_000,
        '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": NaN}', b"{'prompt': 'a'}", b'{"prompt": "a",}', b"[" * 1_000_000,
    ],
)  # fmt: skip
def test_what_is_no_proper_json_object_is_refused_and_the_server_lives_on(server: Running, body: bytes) -> None:
    reply = post(server, "/v1/completions", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert post(server, "/v1/completions", {"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    "body", [b'{"model":"\xff","prompt":"a"}', b'{"\xff":1}', b'{"parameters":{"a":"\xff"},"text_input":"\xff"}']
)
@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/messages",
            "/v1/embeddings",
            "/v1/rerank",
            "/rerank",
            "/embed",
        ),
        *("/score", "/classify", "/pooling", "/tokenize", "/detokenize", "/v2/repository/index", "/v2/embed"),
        *("/v2/models/tiny/generate", "/v2/models/tiny/infer", "/v2/models/tiny/generate_stream", "/invocations"),
    ],
)
def test_bytes_that_are_no_utf8_are_the_clients_mistake_everywhere(server: Running, path: str, body: bytes) -> None:
    assert 400 <= post(server, path, body).status_code < 500


def nested(levels: int, inner: str = "1") -> str:
    return '{"a":[' * (levels // 2) + inner + "]}" * (levels // 2)


BEYOND = [
    '"metadata":{"x":1e999}', '"metadata":{"x":[-1e400]}', '"metadata":{"\\u003a":-1e400}', f'"metadata":{nested(300)}',
    f'"metadata":{nested(300)},"\\u003a":1', '"metadata":' + "9" * 5000, '"metadata":' + "[" * 970 + "]" * 970,
]  # fmt: skip


@pytest.mark.parametrize("field", BEYOND, ids=range(len(BEYOND)))
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/decisions", "/tokenize"]
)
def test_an_ignored_field_that_no_later_reader_could_decode_is_refused(server: Running, path: str, field: str) -> None:
    base = {
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/v1/responses": {"input": [{"role": "user", "content": "x"}]},
        "/v1/messages": {"messages": HI, "max_tokens": 5},
        "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "x"}]},
    }.get(path, {"messages": HI})
    reply = post(server, path, f"{json.dumps(base)[:-1]},{field}}}".encode())
    assert reply.status_code == 400, reply.text
    item, _, rest = json.dumps(base).partition('"role"')
    if rest:
        within = item + field.replace('"metadata"', '"unknown"', 1) + ',"role"' + rest
        assert post(server, path, within.encode()).status_code == 400


def test_a_wrong_field_is_named_although_another_one_cannot_be_decoded(server: Running) -> None:
    body = b'{"input":"a","metadata":{"a":5},"unknown":1e999}'
    error = post(server, "/v1/responses", body).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "metadata[...]")
    error = post(server, "/v1/responses", {"input": "a", "metadata": {"a": "x", "b": 5}}).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "metadata.b")


def test_schemas_may_be_as_deep_as_the_worker_reads_them(server: Running) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    body = {"prompt": "a", "guided_json": schema}
    assert post(server, "/v1/completions", body).status_code == 200
    assert post(server, "/v1/completions", {**body, "guided_json": json.dumps(schema)}).status_code == 200
    deep = post(server, "/v1/completions", {**body, "guided_json": nested(300)})
    assert (deep.status_code, deep.json()["error"]["param"]) == (400, "guided_json")


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(body: bytes) -> None:
    for decoder in (chat_decoder, completion_decoder):
        try:
            decoded = decode(body, decoder)  # type: ignore[misc]
        except InvalidRequest:
            continue
        assert isinstance(decoded, ChatRequest | CompletionRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(sorted(ChatRequest.__struct_fields__)), json_values, max_size=4),
    st.dictionaries(st.sampled_from(sorted(CompletionRequest.__struct_fields__)), json_values, max_size=4),
)
def test_no_json_in_any_field_makes_the_server_fail(
    server: Running, chat: dict[str, Any], text: dict[str, Any]
) -> None:
    assert post(server, "/v1/chat/completions", {"messages": HI, **chat}).status_code in (200, 400, 404)
    assert post(server, "/v1/completions", {"prompt": "a", **text}).status_code in (200, 400, 404)


@given(st.text())
def test_any_text_comes_back_as_it_went_in(server: Running, text: str) -> None:
    usable = text.encode("utf-8", "ignore").decode()
    if usable:
        reply = post(server, "/v1/completions", {"prompt": usable, "echo": True}).json()
        assert reply["choices"][0]["text"] == usable + "Hello world!"


keys = st.sampled_from(["a", "b", "a:", ":", '"', '":', "\\", "\\u003a", "ü"])
texts = st.recursive(
    st.sampled_from(
        ["1", "null", '"x"', '":"', '"\\\\":', "-1.5e3", '"\\u003a"', '"\\u003A:"', '"\\\\u003a"', '"::"', "[]", "{}"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + " , ".join(items) + "]")
        | st.lists(st.tuples(keys, st.sampled_from([":", " :", "\t: "]), inner), max_size=4).map(
            lambda pairs: "{" + ",".join(json.dumps(key) + colon + value for key, colon, value in pairs) + "}"
        )
    ),
    max_leaves=12,
)


def repeats_keys(text: str) -> bool | None:
    """The plain twin; None: this is no JSON."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found |= len({key for key, _ in pairs}) != len(pairs)
        return dict(pairs)

    try:
        json.loads(text, object_pairs_hook=look)
    except ValueError:
        return None
    return found


@settings(max_examples=400)
@given(texts)
def test_no_repeated_key_passes_the_quick_look(text: str) -> None:
    expected = repeats_keys(text)
    if expected is not False:
        assert not is_certain(text.encode())
    elif "\\u003" not in text:
        assert is_certain(text.encode())  # or it would not be quick


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_other_content_types_are_refused(server: Running, content_type: str) -> None:
    reply = post(server, "/v1/completions", b'{"prompt": "a"}', **{"content-type": content_type})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
def test_json_by_any_of_its_names_is_taken(server: Running, content_type: str) -> None:
    assert post(server, "/v1/completions", b'{"prompt": "a"}', **{"content-type": content_type}).status_code == 200
    assert server.http.post(server.url + "/v1/completions", content=b'{"prompt": "a"}').status_code == 200


def test_compressed_bodies_are_refused(server: Running) -> None:
    reply = post(server, "/v1/completions", b"\x1f\x8b", **{"content-encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x", "1e9"])
def test_a_deadline_that_is_none_is_refused(server: Running, seconds: str) -> None:
    reply = post(server, "/v1/completions", {"prompt": "a"}, **{"x-inferd-timeout": seconds})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-inferd-timeout")


@pytest.mark.parametrize(
    ("path", "at"),
    [
        ("/v1/nothing", ("error", "message")),
        ("/api/create", ("error",)),
        ("/v2/nothing", ("error",)),
        ("/v1/messages/nothing", ("error", "message")),
    ],
)
def test_an_unknown_path_is_refused_in_the_form_of_its_dialect(server: Running, path: str, at: tuple[str, ...]) -> None:
    reply = post(server, path, {})
    assert reply.status_code == 404
    said = reply.json()
    assert said.get("type") == ("error" if "messages" in path else None)
    for name in at:
        said = said[name]
    assert said == f"There is nothing at '{path}'; /docs lists what there is."


def test_errors_say_nothing_of_the_inside(server: Running) -> None:
    server.router.statuses[0].state = "failed"
    try:
        for path, body in [
            ("/v1/completions", {"prompt": "a", "n": -1}),
            ("/v1/completions", {"model": "../../etc", "prompt": "a"}),
        ]:
            text = post(server, path, body).text
            assert "Traceback" not in text
            assert "/secret" not in text
        assert "/secret" not in server.http.get(server.url + "/v1/models").text
    finally:
        server.router.statuses[0].state = "ready"


def test_a_defect_ends_one_request_with_an_error_that_says_nothing(server: Running) -> None:
    def broken(request: object) -> list[Any]:
        raise KeyError("secret detail")

    script, server.router.script = server.router.script, broken
    try:
        reply = post(server, "/v1/completions", {"prompt": "a"})
    finally:
        server.router.script = script
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in reply.text
    assert post(server, "/v1/completions", {"prompt": "a"}).status_code == 200


def test_control_characters_do_not_come_back_in_errors(server: Running) -> None:
    reply = post(server, "/v1/completions", {"prompt": "a", "model": "a\r\nx: y\x1b[31m\u2028"})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message.isprintable()
    assert post(server, "/v1/completions", {"prompt": "a", "x\r\n\x1b": 1}).json()["error"]["message"].isprintable()
