"""Reading the configuration: file < environment < flags, and every mistake told at once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import msgspec
import msgspec.inspect
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.heap import thread_seconds

from inferd.cli.reference import config_schema
from inferd.config import (
    Config,
    ModelConfig,
    ServerConfig,
    load_config,
    model_name,
    single_model_config,
    stray_variables,
)
from inferd.config.patterns import IN_WORDS
from inferd.config.tree import Text, branches
from inferd.config.units import NotAllowedError, count, size, size_text
from inferd.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    path = folder / "inferd.yaml"
    path.write_text(text)
    return path


def refusal(path: Path | None, env: dict[str, str] | None = None, flags: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, env or {}, flags or {})
    return caught.value.message


def test_without_anything_the_defaults_hold() -> None:
    assert load_config(None, {}, {}) == Config()


@given(st.permutations(["file", "environment", "flag"]), st.integers(1, 7))
def test_a_flag_beats_the_environment_beats_the_file(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], which: int
) -> None:
    present = {name for bit, name in enumerate(["file", "environment", "flag"]) if which >> bit & 1}
    ports = {name: 1000 + i for i, name in enumerate(order)}
    path = (
        written(tmp_path_factory.mktemp("config"), f"server: {{port: {ports['file']}}}") if "file" in present else None
    )
    env = {"INFERD_SERVER__PORT": str(ports["environment"])} if "environment" in present else {}
    flags: dict[str, object] = {"server": {"port": ports["flag"]}} if "flag" in present else {}
    winner = next(name for name in ("flag", "environment", "file") if name in present)
    assert load_config(path, env, flags).server.port == ports[winner]


def test_every_problem_is_listed_with_its_path_value_and_remedy(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "server: {port: 99999, prot: 3, max_body_bytes: 4MiX}\nmodels:\n  chat:\n    dtype: bf16\n    scheduler: 3\n",
    )
    said = refusal(path, {"INFERD_MODELS__CHAT__THREADS": "few"}, {"server": {"grace_s": -1}})
    assert said.startswith("8 problems")
    for line in (
        "server.port: 99999 is not an integer from 0 to 65535.",
        "server.prot: no such field; did you mean port?",
        "server.max_body_bytes: '4MiX' is not a size such as 4GiB",
        "server.grace_s: -1 is not a number, at least 0.",
        "models.chat.source: missing; give a folder",
        "models.chat.dtype: 'bf16' is not one of auto, bfloat16, float16, float32; did you mean bfloat16?",
        "models.chat.scheduler: 3 is not a section with the fields max_num_seqs",
    ):
        assert line in said
    assert "models.chat.threads (from INFERD_MODELS__CHAT__THREADS): 'few' is not an integer, at least 1." in said


def test_no_name_in_a_file_reaches_a_terminal_as_a_command(tmp_path: Path) -> None:
    text = 'models: {"a\\e[2J\\r\\nb\\x9b1m": {source: tiny, oops: 1}}\n'
    said = refusal(written(tmp_path, text))
    assert all(line.isprintable() for line in said.splitlines()), ascii(said)
    assert r'models."a\x1b[2J\r\nb\x9b1m".oops: no such field' in said


def test_a_key_given_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    said = refusal(written(tmp_path, "server:\n  port: 1\n  port: 2\n"))
    assert "line 3" in said
    assert "'port' is already given on line 2" in said


@pytest.mark.parametrize("text", ["- a\n- b\n", "server: [1", "hello", "!!python/object/apply:os.system [true]"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    assert str(tmp_path / "inferd.yaml") in refusal(written(tmp_path, text))


@pytest.mark.parametrize("text", ["[" * 20_000, "{a: " * 20_000])
def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    assert "nested too deeply" in refusal(written(tmp_path, text))


def test_a_few_bytes_that_stand_for_gigabytes_are_refused_in_a_moment(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 12)]
    text = "\n".join(levels) + "\nserver: {cors_origins: *a11, port: *a11, host: *a11}\n"
    with thread_seconds() as taken_s:
        said = refusal(written(tmp_path, text))
        assert taken_s() < 2
    assert len(said) < 10_000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.yaml")


def test_a_folder_in_a_files_place_is_told_without_numbers_of_errors(tmp_path: Path) -> None:
    assert "cannot be read (Is a directory); check the path" in refusal(tmp_path)


def test_the_environment_finds_models_by_name_whatever_their_case_and_punctuation() -> None:
    env = {
        "INFERD_MODELS__QWEN_QWEN3_0_6B__DTYPE": "bfloat16",
        "INFERD_MODELS__QWEN_QWEN3_0_6B__KV_CACHE__MEMORY_BYTES": "4GiB",
    }
    config = single_model_config("Qwen/Qwen3-0.6B", env=env)
    assert config.models["Qwen/Qwen3-0.6B"].dtype == "bfloat16"
    assert config.models["Qwen/Qwen3-0.6B"].kv_cache.memory_bytes == 4 * 1024**3


def test_other_variables_are_left_alone() -> None:
    env = {"INFERD_DEBUG": "1", "INFERD_PORT": "tcp://10.0.0.1:80", "PATH": "/bin", "OTHER__PORT": "1"}
    assert load_config(None, env, {}) == Config()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("INFERD_SERVER_PORT", "INFERD_SERVER__PORT"),
        ("INFERD_HOST", "INFERD_SERVER__HOST"),
        ("INFERD_PORT", "INFERD_SERVER__PORT"),
        ("INFERD_STATE_URL", "INFERD_STATE__URL"),
        ("INFERD_NODES_LISTEN", "INFERD_NODES__LISTEN"),
        ("INFERD_MODEL", "two underscores"),
    ],
)
def test_a_variable_that_looks_like_a_setting_is_told_with_the_one_that_was_meant(variable: str, meant: str) -> None:
    (sentence,) = stray_variables({variable: "9000", "PATH": "/bin", "INFERD_SERVER__HOST": "::1"})
    assert sentence.startswith(f"{variable} is no setting")
    assert meant in sentence


def test_what_kubernetes_sets_for_a_service_of_this_name_is_no_mistake() -> None:
    env = {
        "INFERD_PORT": "tcp://10.0.0.1:80",
        "INFERD_SERVICE_HOST": "10.0.0.1",
        "INFERD_SERVICE_PORT": "80",
        "INFERD_PORT_80_TCP_ADDR": "10.0.0.1",
        "INFERD_DEBUG": "1",
        "INFERD_API_KEY": "sk-inf-1",
        "INFERD_NODE_TOKEN": "inferd1",
    }
    assert stray_variables(env) == []


def test_lists_of_sections_are_checked_with_full_paths(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
models:
  chat:
    source: demo
    remotes:
      - {url: https://a/v1, weight: heavy}
      - {weigth: 2}
      - https://c/v1
  other: {source: demo, remotes: {url: https://d/v1}}
server: {cors_origins: https://e, allowed_hosts: [f, 3]}
""",
    )
    said = refusal(path)
    assert said.startswith("7 problems")
    for line in (
        "models.chat.remotes[0].weight: 'heavy' is not a number, above 0.",
        "models.chat.remotes[1].weigth: no such field; did you mean weight?",
        "models.chat.remotes[1].url: missing; give base URL",
        "models.chat.remotes[2]: 'https://c/v1' is not a section with the fields",
        "models.other.remotes: {'url': 'https://d/v1'} is not a list of sections, each beginning with '- '.",
        "server.cors_origins: 'https://e' is not a list.",
        "server.allowed_hosts[1]: 3 is not text.",
    ):
        assert line in said


def test_the_environment_reaches_into_lists_and_names_itself_when_wrong(tmp_path: Path) -> None:
    path = written(tmp_path, "models: {chat: {source: demo, remotes: [{url: https://a/v1}, {url: https://b/v1}]}}\n")
    env = {"INFERD_MODELS__CHAT__REMOTES__1__WEIGHT": "2.5", "INFERD_MODELS__CHAT__REMOTES__2__URL": "http://c/v1"}
    remotes = load_config(path, env, {}).models["chat"].remotes
    assert [(remote.url, remote.weight) for remote in remotes] == [
        ("https://a/v1", 1.0),
        ("https://b/v1", 2.5),
        ("http://c/v1", 1.0),
    ]
    said = refusal(path, {"INFERD_MODELS__CHAT__REMOTES__1__WEIGHT": "much"})
    assert "models.chat.remotes[1].weight (from INFERD_MODELS__CHAT__REMOTES__1__WEIGHT): 'much' is not" in said
    assert "number them from 0" in refusal(path, {"INFERD_MODELS__CHAT__REMOTES__7__URL": "http://c/v1"})


def test_a_section_that_the_environment_alone_sets_names_the_variable_when_wrong(tmp_path: Path) -> None:
    path = written(tmp_path, "models: {chat: {source: demo, sead: 1}}\nsevrer: {port: 1}\n")
    env = dict.fromkeys(("INFERD_SERVR__PORT", "INFERD_SEVRER__HOST", "INFERD_MODELS__CHT__REPLICAS"), "2")
    said = refusal(path, env)
    assert "servr (from INFERD_SERVR__PORT): no such field; did you mean server?" in said
    assert "models.cht.source (from INFERD_MODELS__CHT__REPLICAS): missing;" in said
    assert "sevrer: no such field" in said, "the file has it too"
    assert "models.chat.sead: no such field" in said


def test_options_in_the_environment_are_json_or_texts() -> None:
    given = {"STD": "false", "QUANTILES": "[0.1, 0.9]", "FOLDER": "/data", "SEED": " 3 "}
    env = {f"INFERD_MODELS__M__OPTIONS__{name}": value for name, value in given.items()}
    options = load_config(None, {**env, "INFERD_MODELS__M__SOURCE": "m.skops"}, {}).models["m"].options
    assert options == {"std": False, "quantiles": [0.1, 0.9], "folder": "/data", "seed": 3}


def test_the_environment_finds_tenants_by_name_and_new_sections() -> None:
    env = {
        "INFERD_TENANTS__TEAM_A__TPM": "2k",
        "INFERD_CACHE__MAX_BYTES": "1MiB",
        "INFERD_SERVER__CORS_ORIGINS": "https://a, https://b",
    }
    config = load_config(None, env, {"tenants": {"team-a": {"rpm": 5}}})
    assert (config.tenants["team-a"].rpm, config.tenants["team-a"].tpm) == (5, 2000)
    assert config.cache.max_bytes == 2**20
    assert config.server.cors_origins == ("https://a", "https://b")


@pytest.mark.parametrize(("text", "number"), [("200k", 200_000), ("1.5M", 1_500_000), ("600", 600), ("2 G", 2 * 10**9)])
def test_counts_are_written_as_people_do(text: str, number: int) -> None:
    assert count(text) == number
    assert load_config(None, {}, {"tenants": {"a": {"tpm": text}}}).tenants["a"].tpm == number


@pytest.mark.parametrize("text", ["k", "1.0005k", "-1", "2Ki", "1e3", "12 apples", "0"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    assert "200k" in refusal(None, {}, {"tenants": {"a": {"tpm": text}}})


def test_unset_is_written_as_nothing_and_truths_in_words() -> None:
    env = {"INFERD_SERVER__ACCESS_LOG": "no", "INFERD_MODELS__M__THREADS": ""}
    config = load_config(None, env, {"models": {"m": {"source": "demo", "threads": 3}}})
    assert config.server.access_log is False
    assert config.models["m"].threads == 3
    assert load_config(None, {**env, "INFERD_MODELS__M__SOURCE": "demo"}, {}).models["m"].threads is None


def test_a_long_value_is_shown_cut_to_eighty_characters() -> None:
    for length, shown in ((78, "'" + "x" * 78 + "'"), (79, "'" + "x" * 76 + "...")):
        said = refusal(None, {}, {"server": {"port": "x" * length}})
        assert said.startswith(f"server.port: {shown} is not")


def test_a_section_may_be_merged_into_another(tmp_path: Path) -> None:
    text = "models:\n  a: &a {source: demo, replicas: 2, queue: {max_requests: 7}}\n  b: {<<: *a, replicas: 3}\n"
    models = load_config(written(tmp_path, text), {}, {}).models
    assert [(model.source, model.replicas) for model in models.values()] == [("demo", 2), ("demo", 3)]
    assert models["b"].queue == models["a"].queue
    assert "'replicas' is already given" in refusal(written(tmp_path, text.replace("3}", "3, replicas: 4}")))


@pytest.mark.parametrize("truth", [True, False])
def test_a_truth_is_written_in_words(truth: bool) -> None:
    for word in ("true", "Yes", "on", "1") if truth else ("false", "No", "OFF", "0"):
        assert load_config(None, {"INFERD_SERVER__ACCESS_LOG": word}, {}).server.access_log is truth
    assert "'maybe'" in refusal(None, {"INFERD_SERVER__ACCESS_LOG": "maybe"})


def test_a_yaml_text_is_not_a_number(tmp_path: Path) -> None:
    assert "server.port: '9000' is not an integer" in refusal(written(tmp_path, "server: {port: '9000'}"))
    assert "server.access_log: 1 is not true or false" in refusal(written(tmp_path, "server: {access_log: 1}"))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu "])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    said = refusal(None, {}, {"models": {"m": {"source": "demo", "device": device}}})
    assert f"device: {device!r} is not auto, cpu, cuda or cuda:N." in said


def test_every_pattern_of_a_text_is_told_in_words() -> None:
    types = [leaf.type for branch in branches(Config) for leaf in branch.leaves]
    patterns = {one.pattern for one in types if isinstance(one, msgspec.inspect.StrType)}
    assert len(patterns) > 5
    assert patterns - {None} <= set(IN_WORDS)


@given(st.integers(1, 2**70))
def test_a_size_reads_back_as_it_was_written(num_bytes: int) -> None:
    assert size(size_text(num_bytes)) == num_bytes
    assert size(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 * 2**30), ("512 MB", 512_000_000), ("1.5k", 1500), ("2Gi", 2**31), (f"1{400 * '0'}", 10**400)],
)
def test_sizes_are_written_as_people_do(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 GiBs", "-1", "1e9", "4,5GB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(NotAllowedError):
        size(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text().map(Text),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["server", "models", "port", "source", "m", "queue"]) | st.text(), inner)
        ),
    )
)
def test_any_document_is_a_configuration_or_one_config_error(document: object) -> None:
    with contextlib.suppress(ConfigError):  # whatever else it raises is a defect
        made = load_config(None, {}, document if isinstance(document, dict) else {"models": document})
        assert isinstance(made, Config)


def test_a_configuration_survives_being_shown_and_read_again(tmp_path: Path) -> None:
    config = Config(server=ServerConfig(port=1), models={"a b": ModelConfig(source="demo", dtype="float16", seed=3)})
    text = yaml.safe_dump(msgspec.to_builtins(config))
    assert load_config(written(tmp_path, text), {}, {}) == config


def test_the_schema_agrees_with_the_reader(tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(config_schema())))
    good = {
        "server": {"max_body_bytes": "4MiB"},
        "models": {"m": {"source": "demo", "kv_cache": {"memory_bytes": "1.5GiB"}}},
    }
    short: dict[str, object] = {
        "nodes": {"ray": "auto"},
        "models": {"m": {"source": "demo", "placement": "ray"}},
    }
    for right in (good, short):
        validator.validate(right)
        load_config(None, {}, right)
    wrong: tuple[dict[str, object], ...] = (
        {"server": {"prot": 1}},
        {"models": {"m": {}}},
        {"server": {"max_body_bytes": "many"}},
        {"server": {"port": 70000}},
        {"models": {"m": {"source": "demo", "placement": "rays"}}},
        {"models": {"m": {"source": "demo", "scaling": "ray"}}},
    )
    for bad in wrong:
        assert not validator.is_valid(bad)
        refusal(None, {}, bad)


def test_every_section_is_listed_once_and_before_those_inside_it() -> None:
    paths = [branch.path for branch in branches(Config)]
    assert len(paths) == len(set(paths))
    for number, path in enumerate(paths):
        if path:
            around = path[:-1] if path[-1] not in ("*", "[]") else path[:-2]
            assert around in paths[:number]
    for path in [
        ("server", "tls"),
        ("models", "*"),
        ("models", "*", "batching"),
        ("models", "*", "remotes", "[]"),
        ("models", "*", "pipeline", "steps", "[]"),
        ("tenants", "*"),
    ]:
        assert path in paths
    assert [branch.path for branch in branches(ServerConfig, ("server",))] == [
        path for path in paths if path[:1] == ("server",)
    ]


def test_a_model_is_named_after_its_source(tmp_path: Path) -> None:
    assert model_name("demo") == "demo"
    assert model_name("Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B"
    assert model_name("package.module:Model") == "Model"
    assert model_name("./folder/model.py:Model") == "Model"
    for name in ("digits.onnx", "digits.pkl", "digits.joblib.onnx"):
        (tmp_path / name).touch()
        assert model_name(str(tmp_path / name)) == "digits"
    assert model_name(str(tmp_path / "my-model") + "/") == "my-model"


@pytest.mark.parametrize(("length", "shown"), [(78, "x" * 78 + "'"), (79, "x" * 76 + "..."), (500, "x" * 76 + "...")])
def test_a_long_value_is_shown_by_its_beginning(length: int, shown: str) -> None:
    said = refusal(None, {}, {"server": {"port": "x" * length}})
    assert f"server.port: '{shown} is not an integer" in said
