"""The streamed text is the decoded text, whatever the tokenizer and wherever it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.checkpoints.text.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! It's 5 o'clock.",
    "  leading and  double  spaces \n\n\ttabs ",
    "你好，世界 こんにちは 안녕하세요 Привет",
    "😀😃 family: 👩‍👩‍👧‍👦 flag: 🇩🇪 skin: 👍🏽",
    "combining: e\u0301 a\u0308\u0323 क्षि zero\u200bwidth",
    "<|im_start|>user\nhi</s><tool> x</tool>",
]


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def streamed(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], *, skip: bool = True, spaces: bool = True
) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip, spaces_between_special_tokens=spaces, prompt_ids=prompt)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_pushing_every_token_of_a_text_gives_its_decoding(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids, [], skip=skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_no_push_shows_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not any("\ufffd" in part for part in streamed(tokenizer, ids, []))


@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
@settings(max_examples=300)
def test_any_ids_cut_anywhere_into_prompt_and_output_read_as_decoded_whole(
    tokenizer_folders: dict[str, Path], data: st.DataObject, skip: bool, spaces: bool
) -> None:
    kind = data.draw(st.sampled_from(sorted(tokenizer_folders)))
    tokenizer = _loaded(tokenizer_folders[kind])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    whole = "".join(streamed(tokenizer, ids, [], skip=skip, spaces=spaces))
    assert whole == tokenizer.decode(ids, skip, spaces)
    before = tokenizer.stream(skip_special_tokens=skip, spaces_between_special_tokens=spaces, prompt_ids=[])
    certain = "".join(before.push(i) for i in ids[:cut])  # without a character the prompt left unfinished
    assert whole == certain + "".join(streamed(tokenizer, ids[cut:], ids[:cut], skip=skip, spaces=spaces))


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
def test_well_formed_text_is_exactly_what_the_library_decodes(
    tokenizer_folders: dict[str, Path], data: st.DataObject, skip: bool
) -> None:
    kind = data.draw(st.sampled_from(sorted(tokenizer_folders)))
    tokenizer = _loaded(tokenizer_folders[kind])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    # Only runs of byte tokens that are no UTF-8 may differ; the byte-level ones are equal even then.
    if "\ufffd" not in expected or kind == "byte_level":
        assert tokenizer.decode(ids, skip) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_good_characters_of_a_broken_run_of_byte_tokens_are_kept(
    tokenizer_folders: dict[str, Path], kind: str
) -> None:
    tokenizer = _loaded(tokenizer_folders[kind])
    ids = [_byte(tokenizer, b) for b in "é".encode() + b"\xff\xe4\xbd"]
    parts = streamed(tokenizer, ids, [_byte(tokenizer, ord("x"))])
    assert parts == ["", "é", "\ufffd", "", "", "\ufffd\ufffd"]


def test_an_unfinished_character_of_the_prompt_is_finished_by_the_output(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = _loaded(tokenizer_folders["llama"])
    ids = [_byte(tokenizer, b) for b in "😀".encode()]
    assert streamed(tokenizer, ids[2:], ids[:2]) == ["", "😀", ""]


def test_only_the_first_space_of_the_whole_text_is_dropped(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = _loaded(tokenizer_folders["llama"])
    the = tokenizer.encode("The", add_special_tokens=False)
    start = tokenizer.bos_token_id
    assert start is not None
    assert "".join(streamed(tokenizer, the, [start])) == "The"
    assert "".join(streamed(tokenizer, the, [start, *the])) == " The"
    assert "".join(streamed(tokenizer, the, [start], skip=False)) == " The"


def test_special_tokens_that_follow_one_another_lose_their_spaces_when_asked(
    tokenizer_folders: dict[str, Path],
) -> None:
    tokenizer = _loaded(tokenizer_folders["words"])
    ids = [1, 2, *tokenizer.encode("The quick", add_special_tokens=False), 2, 2]
    assert tokenizer.decode(ids, False, True) == "<s> </s> The quick </s> </s>"
    assert tokenizer.decode(ids, False, False) == "<s></s> The quick </s></s>"
    assert tokenizer.decode(ids, True, False) == "The quick"


def test_ids_the_tokenizer_does_not_have_are_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick", add_special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 5]) == tokenizer.decode(ids)
    assert "".join(streamed(tokenizer, [tokenizer.vocab_size + 5], ids)) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def _byte(tokenizer: Tokenizer, byte: int) -> int:
    found = tokenizer._backend.token_to_id(f"<0x{byte:02X}>")
    assert found is not None
    return found


_known: dict[Path, Tokenizer] = {}


def _loaded(folder: Path) -> Tokenizer:
    if folder not in _known:
        _known[folder] = Tokenizer.load(folder)
    return _known[folder]
