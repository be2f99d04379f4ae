"""``inferd serve demo``: the chat model always, the classifiers where their packages are, flags for the chat model alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.parse import urlsplit

import click
import httpx
import pytest

from inferd.cli.demo import demo_models
from inferd.cli.main import main
from inferd.cli.serve import serve_config

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "getting-started.md"
find_spec = importlib.util.find_spec


def without(*missing: str) -> Callable[[str], ModuleSpec | None]:
    return lambda name: None if name in missing else find_spec(name)


def test_the_demo_chats_and_tells_digits_and_intents() -> None:
    config = serve_config("demo", None, {"port": 9000})
    assert list(config.models) == ["demo", "digits", "intents"]
    assert config.server.port == 9000
    assert config.models["demo"].source == "demo"


def test_name_and_flags_are_for_the_chat_model() -> None:
    config = serve_config("demo", "chat", {"max_model_len": 512, "replicas": 2})
    assert list(config.models) == ["chat", "digits", "intents"]
    assert (config.models["chat"].max_model_len, config.models["chat"].replicas) == (512, 2)
    assert config.models["digits"].replicas == 1
    with pytest.raises(click.UsageError, match="another bundled model"):
        serve_config("demo", "digits", {})


@pytest.mark.parametrize(
    ("missing", "served", "said"),
    [
        (
            ("onnxruntime",),
            ["demo"],
            "digits and intents are left out, as packages are missing: pip install 'inferd[onnx]'",
        ),
        (("PIL",), ["demo", "intents"], "digits is left out, as packages are missing: pip install 'inferd[vision]'"),
        (("onnxruntime", "PIL"), ["demo"], "pip install 'inferd[onnx,vision]'"),
    ],
)
def test_without_its_packages_a_classifier_is_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], served: list[str], said: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", without(*missing))
    found, (sentence,) = demo_models()
    assert list(found) == served
    assert said in sentence


def test_the_lines_of_readme_and_guide_are_answered_as_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a stranger does it: one command, then the pages' lines. ``inferd serve`` alone is the demo."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "inferd", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    try:
        assert process.stdout is not None
        head = next(line for line in process.stdout if "is ready" in line)
        found = re.search(r"http://\S+", head)
        assert found is not None
        assert "(demo, digits, intents)" in head
        with httpx.Client(base_url=found[0], timeout=60) as client:
            for path, body, said in told_by_the_guide():
                answer = client.post(path, json=body).json()
                assert rounded(answer) == rounded(said)
        run_as_written(README, found[0])
        assert main(["predict", "digits", "--input", str(ROOT / "examples" / "seven.png"), "--url", found[0]]) == 0
        shown, page = capsys.readouterr().out, GUIDE.read_text(encoding="utf-8")
        for line in shown.splitlines()[1:8]:
            assert re.sub(r"\d\.\d+", "", line.rstrip()) in re.sub(r"\d\.\d+", "", page)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def run_as_written(page: Path, address: str) -> None:
    """The page's lines of curl, and its blocks of Python as one program, which prints what their comments say."""
    text = page.read_text(encoding="utf-8").replace("http://127.0.0.1:8000", address)
    curls = [block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if block.startswith("curl ")]
    for block in curls:
        answer = subprocess.run(["bash", "-c", block], capture_output=True, text=True, timeout=60, check=True).stdout
        assert "inferd" in json.loads(answer)["choices"][0]["message"]["content"]
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    said = re.findall(r"^print\(.*\)  # (.+)$", program, re.MULTILINE)
    answer, *_ = ran.stdout.splitlines()
    assert "inferd" in answer
    assert ran.stdout.endswith("\n".join([*said, ""]))
    assert (len(curls), len(said)) == (1, 3)


def told_by_the_guide() -> list[tuple[str, object, object]]:
    """Path, body and answer of each curl line that is followed by its answer and is for a bundled classifier."""
    blocks = re.findall(r"```bash\n(curl [^\n]+)\n```\n\n```json\n([^\n]+)\n```", GUIDE.read_text(encoding="utf-8"))
    found: list[tuple[str, object, object]] = []
    for line, said in blocks:
        words = shlex.split(line)
        found.append((urlsplit(words[1]).path, json.loads(words[words.index("-d") + 1]), json.loads(said)))
    assert [path for path, _, _ in found] == ["/v2/models/digits/infer", "/predict"]
    return found


def rounded(answer: object) -> str:
    """Numbers to two places: other processors round otherwise."""
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.2f}", json.dumps(answer))
