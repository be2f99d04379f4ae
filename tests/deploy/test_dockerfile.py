"""The Dockerfile, read as text: what it copies is there, and the image is as the chart's pod expects it.

Building it needs a Docker daemon, which the tests have not: what they cannot show is said in docs/kubernetes.md.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from typing import NamedTuple

from tests.deploy.chart import ROOT, default_values, render

TEXT = (ROOT / "Dockerfile").read_text()


class Instruction(NamedTuple):
    stage: int
    name: str
    text: str


def instructions() -> list[Instruction]:
    """The instructions with their lines joined; comments are left out."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found, stage = [], -1
    for line in joined.splitlines():
        if line.strip():
            name, _, text = line.partition(" ")
            stage += name == "FROM"
            found.append(Instruction(stage, name, text.strip()))
    return found


ALL = instructions()
LAST = max(one.stage for one in ALL)


def of(name: str, stage: int | None = None) -> list[str]:
    return [one.text for one in ALL if one.name == name and stage in (None, one.stage)]


def test_every_instruction_is_one_and_every_stage_has_a_pinned_base() -> None:
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {one.name for one in ALL} <= known, "ADD fetches, MAINTAINER is gone, and the rest is not needed"
    for text in of("FROM"):
        image = text.split()[0]
        assert re.fullmatch(r"python:\$\{PYTHON\}-slim-[a-z]+", image), image
    assert of("ARG")[0] == "PYTHON=3.11"
    assert len(of("FROM")) == LAST + 1 == 3


def test_packages_of_the_system_leave_nothing_behind_and_the_last_stage_has_no_compiler() -> None:
    for text in of("RUN"):
        if "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert (
                text.index("apt-get update") < text.index("apt-get install") < text.index("rm -rf /var/lib/apt/lists")
            )
        if "pip install" in text or "pip wheel" in text:
            assert text.count("--no-cache-dir") == text.count("pip install") + text.count("pip wheel")
    last = " ".join(of("RUN", LAST))
    assert "g++" not in last
    assert "pip" not in last
    assert "libgomp1" in last, "the kernels and torch share OpenMP"


def test_what_is_copied_is_there_and_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    for text in of("COPY"):
        if text.startswith("--from"):
            continue
        *sources, _ = text.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, name) for name in allowed), f"{source} is not in the context"
    built = set(" ".join(of("COPY", 0)).split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], project["project"]["license"]["file"], "CMakeLists.txt", "src"}
    needed |= set(re.findall(r"add_subdirectory\((\w+)\)", (ROOT / "CMakeLists.txt").read_text()))
    assert needed <= built


def test_extras_and_flags_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extras,) = [text.partition("=")[2] for text in of("ARG") if text.startswith("EXTRAS=")]
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert {"llm", "postgres"} <= set(extras.split(",")), "several gateways need the database"
    assert "INFERD_COMPILE=ON" in " ".join(of("RUN", 0)), "without a compiler the build fails"
    (index,) = [text.partition("=")[2] for text in of("ARG") if text.startswith("TORCH_INDEX=")]
    assert index.endswith("/cpu")
    assert '"${TORCH_INDEX}" torch' in " ".join(of("RUN", 1))


def test_the_image_runs_as_the_charts_pod_runs_it() -> None:
    (user,) = of("USER", LAST)
    (deployment,) = [one for one in render(default_values()) if one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    security = spec["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert f"--uid {security['runAsUser']}" in " ".join(of("RUN", LAST))
    assert of("ENTRYPOINT", LAST) == ['["inferd"]'], "a shell would keep SIGTERM for itself"
    (args,) = [container["args"] for container in spec["containers"]]
    assert of("CMD", LAST) == [str(args).replace("'", '"')]
    environment = dict(pair.split("=", 1) for pair in " ".join(of("ENV", LAST)).split())
    for variable in spec["containers"][0]["env"]:
        assert environment[variable["name"]] == variable["value"]
    written = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")]
    assert any(environment["HOME"].startswith(path) for path in written)
    server = default_values()["config"]["server"]
    assert of("EXPOSE", LAST) == [f"{server['port']} {server['grpc_port']}"]
