"""The index of prefixes knows which replica has seen which prefix of which tenant, within its bound."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferd.router.choosing.affinity import (
    CHUNK_BYTES,
    ENDS,
    MAX_BYTES,
    PrefixIndex,
    continuation_of,
    prefixes,
    text_of,
)
from inferd.types import JSON, Chat, GenerateRequest, Prompt, Relay, Request, TextPrompt, TokenPrompt

PLENTY = 100_000


def text(*letters: str) -> bytes:
    """One chunk for each letter."""
    return b"".join(letter.encode() * CHUNK_BYTES for letter in letters)


def test_the_longest_common_prefix_counts_in_whole_chunks() -> None:
    index = PrefixIndex(PLENTY)
    index.note(prefixes("t", text("a", "b", "c")), 0)
    index.note(prefixes("t", text("a", "x")), 1)
    assert index.best(prefixes("t", text("a", "b", "y"))) == {0: 2 * CHUNK_BYTES, 1: CHUNK_BYTES}
    assert index.best(prefixes("t", text("z"))) == {}
    assert index.best(prefixes("t", text("a")[:-1])) == {}


def test_tenants_see_nothing_of_each_other() -> None:
    index = PrefixIndex(PLENTY)
    index.note(prefixes("one", text("a")), 0)
    assert index.best(prefixes("other", text("a"))) == {}


def test_a_replica_that_is_forgotten_has_seen_nothing_even_under_its_old_index() -> None:
    index = PrefixIndex(PLENTY)
    index.note(prefixes("t", text("a", "b")), 0)
    index.note(prefixes("t", text("a")), 1)
    index.forget(0)
    assert index.best(prefixes("t", text("a", "b"))) == {1: CHUNK_BYTES}
    index.note(prefixes("t", text("q")), 0)
    assert index.best(prefixes("t", text("a", "b"))) == {1: CHUNK_BYTES}
    assert index.best(prefixes("t", text("q"))) == {0: CHUNK_BYTES}


def test_what_a_replica_received_elsewhere_is_told_where_it_was_not_known_of_it() -> None:
    index = PrefixIndex(PLENTY)
    one, other, third = prefixes("t", text("a", "b", "c"))
    assert index.learn([one, other], 0) == [one, other]
    assert index.learn([one, other, third], 0) == [third]
    assert index.learn([one], 1) == [one], "another replica has it"
    assert index.learn([one, third], 1) == [third]
    assert index.best([one, other, third]) == {0: 3 * CHUNK_BYTES, 1: 3 * CHUNK_BYTES}


def test_the_least_recently_used_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    index = PrefixIndex(4)
    index.note(prefixes("t", text("a", "b")), 0)
    index.note(prefixes("t", text("c", "d")), 0)
    assert index.best(prefixes("t", text("a", "b"))) == {0: 2 * CHUNK_BYTES}
    index.note(prefixes("t", text("e")), 0)
    assert index.best(prefixes("t", text("c", "d"))) == {0: CHUNK_BYTES}
    assert index.best(prefixes("t", text("a", "b"))) == {0: 2 * CHUNK_BYTES}


def test_a_prompt_that_is_asked_for_stays_its_beginning_the_longest() -> None:
    index = PrefixIndex(3)
    index.note(prefixes("t", text("a", "b")), 0)
    index.note(prefixes("t", text("c")), 0)
    index.best(prefixes("t", text("a", "b")))
    index.note(prefixes("t", text("d", "e")), 0)
    assert index.best(prefixes("t", text("a", "b"))) == {0: CHUNK_BYTES}


def test_what_more_replicas_have_seen_than_are_remembered_is_known_of_those_that_went_on() -> None:
    index = PrefixIndex(PLENTY)
    index.note(prefixes("t", text("a", "b")), 0)
    for replica in range(1, 20):
        index.note(prefixes("t", text("a")), replica)
    seen = index.best(prefixes("t", text("a", "b")))
    assert seen.pop(0) == 2 * CHUNK_BYTES
    assert set(seen.values()) == {CHUNK_BYTES}


def test_a_prompt_without_end_costs_the_beginning_only() -> None:
    index = PrefixIndex(PLENTY)
    index.note(prefixes("t", b"x" * 10_000_000), 0)
    assert len(index) == len(ENDS)


def test_keys_are_equal_in_every_process_and_of_every_tenant_others() -> None:
    assert prefixes("t", text("a", "b")) == [6290534052342643227, 12524574460749517382]
    assert not set(prefixes("t", text("a", "b"))) & set(prefixes("u", text("a", "b")))


@given(one=st.binary(max_size=20_000), common=st.integers(0, 20_000), other=st.binary(max_size=9000))
def test_texts_have_equal_keys_as_far_as_they_are_equal(one: bytes, common: int, other: bytes) -> None:
    second = one[:common] + other
    length = next((i for i, (a, b) in enumerate(zip(one, second, strict=False)) if a != b), min(len(one), len(second)))
    keys, others = prefixes("t", one), prefixes("t", second)
    assert [key for key, again in zip(keys, others, strict=False) if key == again] == prefixes("t", one[:length])
    assert len(keys) == sum(end <= len(one) for end in ENDS)


def test_a_continuation_is_the_first_prefix_beyond_what_was_seen() -> None:
    keys = prefixes("t", b"x" * 6 * 1024)
    assert continuation_of(keys, 0) == keys[0]
    assert continuation_of(keys, CHUNK_BYTES) == keys[1]
    assert continuation_of(keys, 4096) == keys[16]
    assert continuation_of(keys, 6 * 1024) == keys[-1]


class IndexMachine(RuleBasedStateMachine):
    """Against a list of everything that was said."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(PLENTY)
        self.small = PrefixIndex(5)
        self.said: list[tuple[str, bytes, int]] = []

    tenants = st.sampled_from(("", "a"))
    texts = st.lists(st.sampled_from("xyz"), max_size=4).map(lambda letters: text(*letters))

    @rule(tenant=tenants, said=texts, replica=st.integers(0, 3))
    def note(self, tenant: str, said: bytes, replica: int) -> None:
        self.index.note(prefixes(tenant, said), replica)
        self.small.note(prefixes(tenant, said), replica)
        self.said.append((tenant, said, replica))

    @rule(replica=st.integers(0, 3))
    def forget(self, replica: int) -> None:
        self.index.forget(replica)
        self.small.forget(replica)
        self.said = [each for each in self.said if each[2] != replica]

    @rule(tenant=tenants, asked=texts)
    def ask(self, tenant: str, asked: bytes) -> None:
        expected: dict[int, int] = {}
        for owner, said, replica in self.said:
            common = len(said) if owner == tenant else 0
            while not asked.startswith(said[:common]):
                common -= CHUNK_BYTES
            if common:
                expected[replica] = max(expected.get(replica, 0), common)
        assert self.index.best(prefixes(tenant, asked)) == expected
        for replica, seen in self.small.best(prefixes(tenant, asked)).items():
            assert seen <= expected[replica]

    @invariant()
    def the_bound_holds(self) -> None:
        assert len(self.small) <= 5


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def ask(prompt: Prompt, *, cache_salt: str = "", truncate: int | None = None) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", prompt=prompt, cache_salt=cache_salt, truncate_prompt_tokens=truncate)


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("system", "user")), "content": st.text(max_size=40)}), min_size=1
)


@given(conversation=messages, more=messages)
def test_a_conversation_that_goes_on_keeps_its_prefix(conversation: list[JSON], more: list[JSON]) -> None:
    before = text_of(ask(Chat(messages=conversation)))
    after = text_of(ask(Chat(messages=conversation + more)))
    assert after.startswith(before)
    assert after != before


@given(one=messages, other=messages)
def test_different_conversations_are_different_texts(one: list[JSON], other: list[JSON]) -> None:
    assert (text_of(ask(Chat(messages=one))) == text_of(ask(Chat(messages=other)))) == (one == other)


def test_tools_and_salt_come_before_the_messages() -> None:
    said: list[JSON] = [{"role": "user", "content": "hello"}]
    plain = text_of(ask(Chat(messages=said)))
    with_tools = text_of(ask(Chat(messages=said, tools=[{"type": "function"}])))
    assert with_tools.endswith(plain)
    assert with_tools != plain
    assert text_of(ask(Chat(messages=said), cache_salt="s")) == b"s\0" + plain


def test_parts_that_are_no_text_count_as_well() -> None:
    def picture(url: str) -> bytes:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return text_of(ask(Chat(messages=[{"role": "user", "content": content}])))

    assert picture("a") != picture("b")


def test_text_and_tokens_are_prefixes_of_themselves() -> None:
    assert text_of(ask(TextPrompt(text="hello"))) == b"hello"
    one = text_of(ask(TokenPrompt(token_ids=[1, 2, 3])))
    assert text_of(ask(TokenPrompt(token_ids=[1, 2, 3, 4]))).startswith(one[:-1])
    assert text_of(ask(TokenPrompt(token_ids=[-1, 2**70])))


def test_nothing_is_longer_than_the_bound() -> None:
    long = "\N{SNOWMAN}" * 1_000_000
    for prompt in (
        TextPrompt(text=long),
        Chat(messages=[{"role": "user", "content": long}] * 3),
        TokenPrompt(token_ids=[7] * 100_000),
    ):
        assert MAX_BYTES // 2 < len(text_of(ask(prompt))) <= MAX_BYTES


def test_a_prompt_of_which_only_the_end_is_kept_has_no_prefix() -> None:
    assert text_of(ask(TextPrompt(text="hello"), truncate=5)) == b""


def test_of_a_relayed_request_the_prompt_counts_and_not_what_stands_before_it() -> None:
    request = Request(id="r", model="m")

    def relayed(body: JSON) -> bytes:
        return text_of(request, Relay(path="/chat/completions", body=msgspec.json.encode(body)))

    said = [{"role": "user", "content": "x" * 600}]
    one = relayed({"model": "m", "temperature": 0.5, "messages": said})
    other = relayed({"model": "m", "temperature": 0.25, "messages": [*said, {"role": "user", "content": "more"}]})
    assert one[:600] == other[:600]
    assert relayed({"model": "m", "prompt": "hello"}).startswith(b'"prompt"')
    assert relayed({"model": "m"}) == b""
    assert text_of(request) == b""
