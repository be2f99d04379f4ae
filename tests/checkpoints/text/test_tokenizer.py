"""Ids are the reference's, folders are read as it reads them, and the cache changes nothing."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inferd.checkpoints.text.tokenizer import NO_OWNER, Owner, Tokenizer, forget_words
from inferd.errors import InvalidRequest, ModelLoadError

TEXTS = [
    "",
    "Hello, world!",
    " a leading space",
    "The quick brown fox\n\n  jumps\tover",
    "你好，世界 😀 👩‍👩‍👧 e\u0301 é",
    "<s>not the start</s> <|im_start|>user\nhi<tool>",
    "It's 12,345.678 <0x41> ▁ under",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_those_of_transformers(tokenizer_folder: Path, text: str, special: bool) -> None:
    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert Tokenizer.load(tokenizer_folder).encode(text, special) == reference.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_the_file_decides_which_tokens_are_added_at_the_ends(
    tokenizer_folders: dict[str, Path], tmp_path: Path, kind: str, bos: bool, eos: bool
) -> None:
    folder = _changed(tokenizer_folders[kind], tmp_path, add_bos_token=bos, add_eos_token=eos)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("The fox") == reference.encode("The fox")
    assert (tokenizer.encode("The fox")[0] == tokenizer.bos_token_id) is (kind == "llama")


def test_tokens_named_only_beside_the_file_are_added_as_transformers_adds_them(
    tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = _changed(
        tokenizer_folders["byte_level"],
        tmp_path,
        eos_token={"content": "<|end|>", "lstrip": False, "rstrip": True, "normalized": False, "__type": "AddedToken"},
        pad_token="<|pad|>",
        additional_special_tokens=["<|extra|>"],
        added_tokens_decoder={
            "425": {"content": "<|end|>", "special": True, "rstrip": True},
            "426": {"content": "<call>", "special": False},
        },
    )
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    text = "x<|end|> y<call>z<|pad|><|extra|>"
    assert tokenizer.encode(text) == reference.encode(text)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (reference.eos_token_id, reference.pad_token_id)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
        reference.encode(text), skip_special_tokens=True
    )
    assert tokenizer.special_tokens["eos_token"] == "<|end|>"


def test_the_special_tokens_map_is_read_where_the_settings_are_silent(
    tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(tokenizer_folders["llama"] / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)


def test_a_text_round_trips(tokenizer_folders: dict[str, Path]) -> None:
    for kind in ("byte_level", "llama", "gemma"):
        tokenizer = Tokenizer.load(tokenizer_folders[kind])
        for text in ("Größe  😀\n\n", " two", "x\x00\x7f", "ﷺ"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer_folders: dict[str, Path]) -> None:
    text = "The fox 😀 你好 é!"
    for kind, prefix in (("byte_level", b""), ("gemma", b""), ("llama", b" ")):
        tokenizer = Tokenizer.load(tokenizer_folders[kind])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == prefix + text.encode()
    wordpiece = Tokenizer.load(tokenizer_folders["wordpiece"])
    ids = wordpiece.encode("quickest", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(wordpiece.token_bytes, ids)) == b" quickest"


def test_a_token_that_is_a_part_of_a_character_reads_as_the_replacement_character(
    tokenizer_folders: dict[str, Path],
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["llama"])
    ids = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert {tokenizer.token_string(i) for i in ids} == {"\ufffd"}


def test_truncation_and_padding_written_in_the_file_are_not_applied(
    tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    spec = json.loads((tokenizer_folders["byte_level"] / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    plain = Tokenizer.load(tokenizer_folders["byte_level"])
    assert Tokenizer.load(tmp_path).encode("The quick brown fox") == plain.encode("The quick brown fox")


# -- the cache --------------------------------------------------------------------------------


def test_a_repeated_text_comes_from_the_cache_unchanged(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["llama"])
    first = tokenizer.encode("The fox")
    first.append(-1)  # the caller owns its list
    second = tokenizer.encode("The fox")
    second.append(-1)
    assert tokenizer.encode("The fox") == first[:-1]
    assert tokenizer.encode("The fox", add_special_tokens=False) == first[1:-1]
    assert (tokenizer.cache_queries, tokenizer.cache_hits) == (4, 2)


def test_the_cache_is_bounded_by_the_length_of_its_texts(
    tokenizer_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.checkpoints.text.tokenizer._CACHE_CHARS", 8 * 110)
    tokenizer = Tokenizer.load(tokenizer_folders["byte_level"])
    texts = [f"text no {i:02}" for i in range(20)]
    for text in texts:
        tokenizer.encode(text)
    assert tokenizer._cached_chars == 8 * 110
    tokenizer.encode(texts[0])
    assert tokenizer.cache_hits == 0
    tokenizer.encode(texts[-1])
    assert tokenizer.cache_hits == 1
    tokenizer.encode("x" * 200)
    tokenizer.encode("x" * 200)
    assert tokenizer.cache_hits == 1, "one that long is not kept"


def test_a_text_of_one_tenant_is_found_by_no_other(tokenizer_folders: dict[str, Path]) -> None:
    """Neither by another tenant nor with another salt, however the letters are cut."""
    tokenizer = Tokenizer.load(tokenizer_folders["llama"])
    owners = [Owner("a"), Owner("b"), Owner("a", "s"), Owner("as"), Owner("", "as"), NO_OWNER]
    for owner in owners:
        tokenizer.encode("The fox", True, owner)
    assert (tokenizer.cache_queries, tokenizer.cache_hits) == (6, 0)
    for owner in owners:
        tokenizer.encode("The fox", True, owner)
    assert tokenizer.cache_hits == 6


def test_a_tenant_that_floods_the_cache_pushes_no_other_out(
    tokenizer_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.checkpoints.text.tokenizer._CACHE_CHARS", 2000)
    tokenizer = Tokenizer.load(tokenizer_folders["byte_level"])
    for i in range(4):
        tokenizer.encode(f"mine {i}", True, Owner("small"))
    for i in range(200):
        tokenizer.encode(f"another text no {i}", True, Owner("large", str(i % 50)))
        assert tokenizer._cached_chars <= 2000
    assert tokenizer.cache_hits == 0
    for i in range(4):
        tokenizer.encode(f"mine {i}", True, Owner("small"))
    assert tokenizer.cache_hits == 4
    assert tokenizer._cached_chars == sum(share.num_chars for share in tokenizer._shares.values())


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_the_library_keeps_no_words(tokenizer_folders: dict[str, Path], kind: str) -> None:
    """Its cache of words knows no tenants."""
    asked: list[int] = []

    class Model:
        def _resize_cache(self, size: int) -> None:
            asked.append(size)

    class Backend:
        model = Model()

    forget_words(Backend())  # type: ignore[arg-type]
    assert asked == [0]
    assert hasattr(Tokenizer.load(tokenizer_folders[kind]).backend.model, "_resize_cache"), "the library still has it"


def test_threads_agree(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["llama"])
    texts = [f"The fox {i % 7}" for i in range(200)]
    expected = [Tokenizer.load(tokenizer_folders["llama"]).encode(text) for text in texts[:7]]
    wrong: list[str] = []

    def work() -> None:
        for i, text in enumerate(texts):
            if tokenizer.encode(text) != expected[i % 7]:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tokenizer.cache_queries == 800
    assert [len(share.entries) for share in tokenizer._shares.values()] == [7]


def test_a_long_text_does_not_stop_the_other_threads(tokenizer_folder: Path) -> None:
    """The heartbeat is one of them: a worker that is silent for long is killed."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    encoder = threading.Thread(target=tokenizer.encode, args=("Once upon a time " * 60_000,))
    encoder.start()
    ticks = 0
    while encoder.is_alive():
        encoder.join(0.01)
        ticks += 1
    assert ticks > 3, "this thread had no turn while the other encoded"


def test_no_text_has_fewer_tokens_than_it_is_said_to_have_at_least(tokenizer_folders: dict[str, Path]) -> None:
    for folder in tokenizer_folders.values():
        tokenizer = Tokenizer.load(folder)
        for text in (
            *TEXTS,
            "The quick brown fox " * 500,
            "<|im_start|>" * 300,
            "e\u0301" * 2000,
            " " * 5000,
            "世" * 900,
        ):
            assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), (
                folder,
                text[:9],
            )
    assert Tokenizer.load(tokenizer_folders["byte_level"]).min_tokens("x" * 1_000_000) > 1000


# -- bad input --------------------------------------------------------------------------------


def test_a_lone_surrogate_is_refused(tokenizer_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        Tokenizer.load(tokenizer_folder).encode("a\ud83db")


def test_a_folder_without_a_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist\. Copy"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_folder_names_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ModelLoadError, match=r"only tokenizer\.model, .*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "Nope"}}', b"\xff\xfe"])
def test_a_corrupt_tokenizer_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("wordpiece", {"unk_token": "[NO]"}),  # fails only when a word is not in the vocabulary
        ("byte_level", {"merges": [["no", "such"]]}),
        ("byte_level", {"vocab": {"a": -1}}),
        ("unigram", {"unk_id": 10**9}),
    ],
)
def test_a_tokenizer_that_would_fail_in_use_is_refused_at_load(
    tokenizer_folders: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    spec = json.loads((tokenizer_folders[kind] / "tokenizer.json").read_text())
    spec["model"] |= changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_a_corrupt_companion_names_its_file(
    tokenizer_folders: dict[str, Path], tmp_path: Path, name: str, content: bytes
) -> None:
    shutil.copy(tokenizer_folders["llama"] / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"bos_token": 5}, {"eos_token": {}}, {"added_tokens_decoder": []}, {"additional_special_tokens": 3}]
)
def test_odd_settings_are_read_as_absent(
    tokenizer_folders: dict[str, Path], tmp_path: Path, settings: dict[str, object]
) -> None:
    folder = _changed(tokenizer_folders["llama"], tmp_path, **settings)
    assert Tokenizer.load(folder).encode("The fox") == Tokenizer.load(tokenizer_folders["llama"]).encode("The fox")


def _changed(folder: Path, to: Path, **settings: object) -> Path:
    shutil.copy(folder / "tokenizer.json", to)
    known = json.loads((folder / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps(known | settings))
    return to


# -- real tokenizers --------------------------------------------------------------------------

_GOLDEN = {"gpt2-hf": "ggml-vocab-gpt-2", "llama2-hf": "ggml-vocab-llama-spm", "gpt-neox-20b-hf": "ggml-vocab-mpt"}
_FOLDERS = [
    "tokenizers/llama2-hf",
    "tokenizers/mistral-chatml-hf",
    "tokenizers/gpt2-hf",
    "tokenizers/gpt-neox-20b-hf",
    "llm-stories260k",
    "llm-stories3m",
    "llm-tinystories-656k",
    "llm-babyllama-char105",
    "llm-tinychat-neo3m",
]


@pytest.mark.shared
@pytest.mark.parametrize("name", _GOLDEN)
def test_golden_ids_of_real_tokenizers(shared_data: Path, name: str) -> None:
    tokenizer = Tokenizer.load(shared_data / "tokenizers" / name)
    golden = shared_data / "tokenizers" / "llama-cpp-vocab" / _GOLDEN[name]
    cases = golden.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in golden.with_suffix(".gguf.out").read_text().splitlines()]
    checked = 0
    for case, ids in zip(cases, expected, strict=False):
        assert tokenizer.encode(case, add_special_tokens=False) == ids, case
        checked += 1
    assert checked >= 46


@pytest.mark.shared
@pytest.mark.parametrize("name", _FOLDERS)
def test_real_tokenizers_equal_transformers(shared_data: Path, name: str) -> None:
    folder = shared_data / name
    # The class that reads the file as it is; see the tokenizer's module for where others differ.
    tokenizer, reference = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    decoding = AutoTokenizer.from_pretrained(folder)
    text = (shared_data / "tokenizers" / "llama-cpp-vocab" / "ggml-vocab-gpt-2.gguf.inp").read_text(encoding="utf-8")
    for case in [*text.split("\n__ggml_vocab_test__\n"), *TEXTS]:
        for special in (True, False):
            assert tokenizer.encode(case, special) == reference.encode(case, add_special_tokens=special), case
        ids = tokenizer.encode(case)
        stream = tokenizer.stream(skip_special_tokens=True, spaces_between_special_tokens=True, prompt_ids=[])
        told = "".join(map(stream.push, ids)) + stream.flush()
        assert told == tokenizer.decode(ids) == decoding.decode(ids, skip_special_tokens=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert tokenizer.vocab_size == max(reference.get_vocab().values()) + 1
