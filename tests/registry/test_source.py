"""Sources become folders: what is missing is named; a hub is a real server on a real socket."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from inferd import models
from inferd.errors import ModelLoadError
from inferd.registry.hub import ALLOWED, IGNORED, _bar_class, cached
from inferd.registry.source import check_folder, is_remote, resolve

SHA = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"w" * 300_000,
    "consolidated.00.safetensors": b"the same weights in another layout",
    "pytorch_model.bin": b"a pickle",
    "run_me.py": b"raise SystemExit",
}


def test_the_bundled_model_has_a_folder() -> None:
    assert resolve("demo") == models.path("demo")


def test_a_folder_is_itself(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert not is_remote(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, r"no \*.safetensors"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "pytorch_model.bin, a pickle"),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}'},
            "1.safetensors",
        ),
        ({"config.json": "{}", "model.safetensors.index.json": "[]"}, "not a weight index"),
        ({"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "../x"}}'}, "outside its folder"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=said):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("./nowhere", "no file or folder"),
        ("demmo", "Did you mean 'demo'"),
        ("gpt two", "no model source"),
        ("http://10.0.0.5:8000/v1", "openai:http://10.0.0.5:8000/v1 names a server there"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "write Qwen/Qwen3-0.6B for the model"),
        ("http://hf.co/Qwen/Qwen3-0.6B/tree/main", "write Qwen/Qwen3-0.6B for the model"),
        ("https://huggingface.co/", "write organisation/name of a model"),
        ("https://example.com/iris.ONNX?download=1", "download the file, and write its path"),
        ("http://[", "check its spelling"),
    ],
)
def test_what_is_no_source_is_refused_with_the_remedy(source: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        resolve(source)


@pytest.mark.parametrize(
    ("source", "is_hub_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("here/model", False),
        ("here/model@main", True),
        ("there/model.onnx", False),
        ("there/MODEL.SKOPS", False),
        ("there/weights.gguf", False),
        ("./there/model", False),
        ("there/Qwen2.5-7B-Instruct", True),
    ],
)
def test_what_is_written_or_placed_like_a_path_is_no_hub_id(
    source: str, is_hub_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert is_remote(source) is is_hub_id
    if not is_hub_id:
        with pytest.raises(ModelLoadError, match="There is no file or folder"):
            resolve(source)


def test_the_hubs_model_beside_a_folder_of_its_owners_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    with pytest.raises(ModelLoadError, match=r"the hub's model of that name is Qwen/Qwen3-0\.6B@main"):
        resolve("Qwen/Qwen3-0.6B")


class Hub(BaseHTTPRequestHandler):
    """The few endpoints that a snapshot download asks for. org/gone is unknown, org/gated gated,
    org/forbidden not for this token, and for org/busy it has no time."""

    asked: list[str] = []

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        type(self).asked.append(f"{self.command} {path}")
        if "/org/gone" in path or path.startswith("/org/gone"):
            self.reply(404, b'{"error":"Repository not found"}', with_body, {"X-Error-Code": "RepoNotFound"})
        elif "org/gated" in path:
            self.reply(403, b'{"error":"gated"}', with_body, {"X-Error-Code": "GatedRepo"})
        elif "org/forbidden" in path:
            self.reply(403, b'{"error":"forbidden"}', with_body, {})
        elif "org/busy" in path:
            self.reply(503, b"{}", with_body, {})
        elif "/revision/none" in path:
            self.reply(404, b'{"error":"no"}', with_body, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/tiny/tree/"):
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.reply(200, json.dumps(listing).encode(), with_body, {"Content-Type": "application/json"})
        elif path.startswith("/api/models/org/tiny"):
            info = {"id": "org/tiny", "sha": SHA, "siblings": [{"rfilename": name} for name in FILES]}
            self.reply(200, json.dumps(info).encode(), with_body, {"Content-Type": "application/json"})
        elif path.startswith(f"/org/tiny/resolve/{SHA}/") and (name := path.rpartition("/")[2]) in FILES:
            headers = {"ETag": f'"{hashlib.sha1(FILES[name]).hexdigest()}"', "X-Repo-Commit": SHA}
            self.reply(200, FILES[name], with_body, headers)
        else:
            self.reply(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})

    def reply(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import json, sys
from inferd.errors import ModelLoadError
from inferd.registry.source import resolve
told = []
try:
    print(json.dumps({"folder": str(resolve(sys.argv[1], lambda *seen: told.append(seen))), "told": told}))
except ModelLoadError as error:
    print(json.dumps({"error": error.message}))
"""


def asked(endpoint: str, source: str, cache: Path, **env: str) -> dict[str, object]:
    """Resolve in a process of its own: the client reads its environment once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, source],
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert run.stderr == "", "bars are drawn by those that are told the progress"
    found: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_a_hub_id_is_downloaded_once_without_pickles_or_code(hub: str, tmp_path: Path) -> None:
    found = asked(hub, "org/tiny", tmp_path)
    folder, told = Path(str(found["folder"])), found["told"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert isinstance(told, list)
    total = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert told[-1] == ["download", total, total]
    done = [one[1] for one in told]
    assert done == sorted(done)
    assert {one[0] for one in told} == {"download"}
    assert all(0 <= one[1] <= one[2] <= total for one in told)
    assert not any("pytorch_model" in line or "run_me" in line for line in Hub.asked)

    # From the cache when the hub does not answer.
    again = asked("http://127.0.0.1:1", "org/tiny", tmp_path)
    assert again["folder"] == str(folder)


def test_the_progress_of_a_download_is_the_bytes_that_are_there_and_never_more_than_all() -> None:
    """As the client library counts: files, the bytes that came, and the bytes that were written."""
    told: list[tuple[str, int, int]] = []
    bar = _bar_class(lambda *seen: told.append(seen))
    files = bar(total=3, unit="it")
    files.update(2)
    received = bar(total=0, unit="B", initial=40)  # an earlier download left them
    received.update(0)
    assert told == [], "how many bytes there are is not known yet"
    received.total = 100
    received.refresh()
    received.update(30)
    bar(total=80, unit="B", name="written").update(20)
    received.update(31)
    assert told == [("download", done, 100) for done in (40, 70, 70, 100)]


def test_of_a_sentence_encoder_the_folders_that_say_how_it_pools_are_downloaded_too() -> None:
    from huggingface_hub.utils._paths import filter_repo_objects

    wanted = [
        "config.json",
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    ]
    others = ["onnx/config.json", "openvino/model.safetensors", "2_Dense/pytorch_model.bin", "1_Pooling/run_me.py"]
    found = filter_repo_objects(wanted + others, allow_patterns=list(ALLOWED), ignore_patterns=list(IGNORED))
    assert list(found) == wanted


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/gone", "There is no model org/gone"),
        ("org/gated", "accept its conditions at"),
        ("org/forbidden", "answered 403 for org/forbidden; set HF_TOKEN to a valid token"),
        ("org/busy", "answered 503 for org/busy; try again later"),
        ("org/tiny@none", "no revision 'none'"),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_remedy(hub: str, tmp_path: Path, source: str, said: str) -> None:
    message = str(asked(hub, source, tmp_path)["error"])
    assert said in message
    assert "local folder" in message


def test_a_hub_out_of_reach_is_said_with_the_remedy(tmp_path: Path) -> None:
    assert "HF_ENDPOINT" in str(asked("http://127.0.0.1:1", "org/tiny", tmp_path)["error"])
    assert "HF_HUB_OFFLINE" in str(asked("http://127.0.0.1:1", "org/tiny", tmp_path, HF_HUB_OFFLINE="1")["error"])


def test_in_the_cache_is_a_snapshot_that_has_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--tiny"
    snapshot = folder / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(SHA)
    assert cached("org/tiny", None) is None, "its download was interrupted"
    (snapshot / "config.json").write_text("{}")
    assert cached("org/tiny", None) == cached("org/tiny", "main") == cached("org/tiny", SHA) == snapshot
    assert cached("org/tiny", "other") is None
    assert cached("org/other", None) is None
