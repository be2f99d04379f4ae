"""What every test may use."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, settings
from tests.heap import freeze_heap

from inferd.cli.version import is_gateway_compiled

# Servers that the tests start and stop inherit what is ignored: a run behind nohup tests the same as any other.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# One compute thread per test process: the suite runs in parallel, and results repeat.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels are run by its interpreter, on the CPU; `make gpu-check` says 0. It has to be said before Triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# httpx reads the authorities of the web for every client, 20 ms each time; they are read once.
mock.patch("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context)).start()

# Tests see neither the keys and usage of the user that runs them nor those of other test processes.
_DATA = tempfile.mkdtemp(prefix="inferd-tests-")
atexit.register(shutil.rmtree, _DATA, ignore_errors=True)
os.environ["INFERD_STATE__DATA_DIR"] = _DATA
os.environ["XDG_DATA_HOME"] = _DATA  # for configurations that are made without reading the environment
os.environ.pop("INFERD_STATE__URL", None)

settings.register_profile("everyday", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: a change is judged by what it changes, and not by what a new draw finds elsewhere.
settings.register_profile("gate", settings.get_profile("everyday"), max_examples=50, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models, tokenizers and texts that lie beside some checkouts; skips where they do not."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder ../shared/data is not beside this checkout")
    return SHARED_DATA


def _postgres() -> tuple[str | None, str]:
    """A PostgreSQL to test with, and what to tell of it."""
    named = os.environ.get("INFERD_TEST_POSTGRES_URL")
    url = named or "postgresql:///postgres"
    try:
        import psycopg

        psycopg.connect(url, connect_timeout=2).close()
    except ImportError:
        return None, "psycopg is not installed"
    except psycopg.Error as error:
        said = (str(error).strip().splitlines() or ["no reason given"])[0]
        return None, f"not reachable at {url} ({said}); .ci/services make test starts one"
    return url, f"reachable at {url}"


def _redis() -> str:
    named = os.environ.get("INFERD_TEST_REDIS_URL")
    if not named:
        return "not named (INFERD_TEST_REDIS_URL); .ci/services make test starts one"
    address = urlsplit(named)
    try:
        socket.create_connection((address.hostname or "127.0.0.1", address.port or 6379), timeout=2).close()
    except OSError as error:
        return f"not reachable at {named} ({error})"
    return f"reachable at {named}"


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"postgresql: {_postgres()[1]}", f"redis: {_redis()}"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compiled-apart",
        action="append",
        default=[],
        metavar="FOLDER",
        help="leave out the tests of a folder that make test-compiled runs: all but those marked interpreted",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folders = [config.rootpath / folder for folder in config.getoption("--compiled-apart")]
    apart = [item for item in items if any(folder in item.path.parents for folder in folders)]
    left_out = {item for item in apart if item.get_closest_marker("interpreted") is None}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    freeze_heap()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("interpreted")
    if marker is not None and is_gateway_compiled():
        pytest.skip(f"the gateway is compiled, and the test {marker.args[0]}")


@contextlib.contextmanager
def postgres_schema() -> Iterator[str]:
    """The URL of an empty schema, which is dropped afterwards; skips where there is no PostgreSQL."""
    url, said = _postgres()
    if url is None:
        pytest.skip(f"PostgreSQL is {said}")
    import psycopg

    schema = f"inferd_test_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        yield f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{schema}"
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A database of the test's own."""
    with postgres_schema() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def state_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same law on both databases."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/state.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(scope="session")
def families() -> ModuleType:
    """Tiny checkpoints of every model family; imported when needed, as transformers comes with it."""
    from tests import families

    return families


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a chat template, 64 KB, float32."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def write_tiny_model(folder: Path, *, seed: int = 0, max_positions: int = 256, num_more: int = 0) -> Path:
    """``num_more``: rows of the embedding that belong to no token; negative: tokens that have none."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, "<|user|>": 1, "<|assistant|>": 2}
    vocabulary |= {letter: i + 3 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>", "<|assistant|>"])
    make_fast: Any = PreTrainedTokenizerFast
    fast = make_fast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(folder)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary) + num_more,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=max_positions,
            tie_word_embeddings=True,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    model.generation_config.eos_token_id = 0
    model.float().save_pretrained(folder)
    return folder
