"""What a worker inherits: the variables that computing takes, those its model names, its channel, and no core dumps."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server_process import running

from inferd.config import ModelConfig
from inferd.config.pipelines import PipelineConfig
from inferd.worker.dumps import LIMIT_BYTES
from inferd.worker.environment import environment_for

SECRETS = {
    "OPENAI_API_KEY": "sk-1",
    "PGPASSWORD": "p",
    "INFERD_STATE__URL": "postgresql://u:p@h/d",
    "INFERD_API_KEY": "k",
    "AWS_SECRET_ACCESS_KEY": "a",
    "REMOTE_KEY": "r",
}
OF_A_HUB = {"HF_TOKEN": "hf_1", "https_proxy": "http://user:password@proxy"}
USEFUL = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "1",
    "LD_LIBRARY_PATH": "/lib",
    "HF_HOME": "/models",
    "XDG_CACHE_HOME": "/cache",
}


def names(config: ModelConfig) -> set[str]:
    return set(environment_for(config, SECRETS | OF_A_HUB | USEFUL))


def test_a_worker_gets_what_computing_takes_and_no_secret() -> None:
    assert names(ModelConfig(source="demo")) - {"GOMP_SPINCOUNT", "PYTHONPATH"} == set(USEFUL)


@given(st.dictionaries(st.text(string.ascii_uppercase + "_", min_size=1), st.text(max_size=3)))
def test_every_value_is_the_servers_own_and_a_name_that_is_not_known_is_left_out(own: dict[str, str]) -> None:
    found = environment_for(ModelConfig(source="demo"), {f"MY_{name}": value for name, value in own.items()} | USEFUL)
    assert found.items() >= USEFUL.items()
    assert not any(name.startswith("MY_") for name in found)


def test_a_worker_gets_the_variables_that_its_model_names() -> None:
    found = names(ModelConfig(source="demo", environment=("REMOTE_KEY", "NOT_SET")))
    assert "REMOTE_KEY" in found
    assert not found & {"OPENAI_API_KEY", "NOT_SET"}


@pytest.mark.parametrize(
    ("config", "downloads"),
    [
        (ModelConfig(source="someone/model"), True),
        (ModelConfig(source="demo"), False),
        (ModelConfig(source="models.py:Class"), False),
        (ModelConfig(source="pipeline", pipeline=PipelineConfig(models={"a": {"source": "someone/model"}})), True),
        (ModelConfig(source="pipeline", pipeline=PipelineConfig(models={"a": {"source": "demo"}})), False),
    ],
)
def test_a_hubs_token_and_proxies_go_where_files_are_asked_for(config: ModelConfig, downloads: bool) -> None:
    assert names(config) & set(OF_A_HUB) == (set(OF_A_HUB) if downloads else set())


def test_a_worker_looks_for_a_hubs_files_where_the_server_does_and_stays_off_the_net_like_it(tmp_path: Path) -> None:
    own = {
        "HUGGINGFACE_HUB_CACHE": str(tmp_path / "hub"),
        "HUGGINGFACE_ASSETS_CACHE": str(tmp_path / "assets"),
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    program = (
        "from huggingface_hub import constants as c;"
        "print(c.HF_HUB_CACHE, c.HF_ASSETS_CACHE, c.HF_HUB_OFFLINE, c.HF_HUB_DISABLE_TELEMETRY)"
    )
    environment = environment_for(ModelConfig(source="someone/model"), own)
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(tmp_path / "hub"), str(tmp_path / "assets"), "True", "True"]


def test_a_pipelines_worker_gets_what_the_models_within_it_name() -> None:
    within = {"a": {"source": "demo", "environment": ["REMOTE_KEY"]}}
    assert "REMOTE_KEY" in names(ModelConfig(source="pipeline", pipeline=PipelineConfig(models=within)))


def test_a_running_worker_has_inherited_no_secret_no_descriptor_and_writes_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SECRETS | OF_A_HUB).items():
        if not name.startswith("INFERD_"):
            monkeypatch.setenv(name, value)
    with running(data_dir=tmp_path) as server:
        (worker,) = server.workers
        environment = Path(f"/proc/{worker}/environ").read_bytes()
        opened = {os.readlink(entry) for entry in Path(f"/proc/{worker}/fd").iterdir()}
        limits = [Path(f"/proc/{process}/limits").read_text() for process in (server.process.pid, worker)]
    inherited = dict(entry.partition("=")[::2] for entry in environment.decode().split("\0") if entry)
    assert "PATH" in inherited
    assert not inherited.keys() & (SECRETS | OF_A_HUB).keys()
    assert not any(value in environment.decode() for value in ("sk-1", "hf_1", "password"))
    assert {name.partition(":")[0] for name in opened} <= {"/dev/null", "pipe", "socket", "anon_inode"}
    for told in limits:
        (line,) = [line for line in told.splitlines() if line.startswith("Max core file size")]
        assert line.split()[4] == str(LIMIT_BYTES)


def test_a_process_that_aborts_leaves_no_core(tmp_path: Path) -> None:
    code = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)\n"
        "from inferd.worker.dumps import forbid_dumps\n"
        "forbid_dumps()\n"
        "os.abort()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    _, status = os.waitpid(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert os.WIFSIGNALED(status)
    assert not os.WCOREDUMP(status)
    assert not list(tmp_path.iterdir())
