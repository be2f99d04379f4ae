"""Adapters of a running server: from its configuration, by the routes of vLLM, at every server, and over restarts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.adapters import write_adapter
from tests.predict.live import Address, serving
from tests.worker.watching import is_running, until_now

from inferd.cli.main import main
from inferd.engine.watermark import Watermark

KEY: list[str] = []
WATERMARK_KEY = 15485863
PROMPT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def root(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(root / name, tiny_model, seed=seed, rank=8 << seed)
    (root / "broken").mkdir()
    (root / "watermark.key").write_text(f"{WATERMARK_KEY}\n")
    (root / "elsewhere").symlink_to("/etc")
    return root


def settings(root: Path, base: Path) -> dict[str, Any]:
    return {
        "base": {
            "source": str(base),
            "threads": 1,
            "replicas": 2,
            "max_model_len": 128,
            "adapters": {"one": str(root / "one"), "lost": str(root / "broken")},
            "adapter_roots": [str(root)],
            "watermark": {"key_file": str(root / "watermark.key"), "apply": "requested", "bias": 6.0},
        }
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module", autouse=True)
def admin(folder: Path) -> Iterator[None]:
    """A key with the scope admin, which ``post`` sends."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERD_STATE__DATA_DIR", str(folder / "state"))
        with contextlib.redirect_stdout(shown):
            assert main(["keys", "create", "--tenant", "ops", "--scopes", "admin,infer,models,metrics"]) == 0
        KEY.append(next(word for word in shown.getvalue().split() if word.startswith("sk-inf-")))
        yield


@pytest.fixture(scope="module")
def server(root: Path, tiny_model: Path, folder: Path) -> Iterator[Address]:
    with serving(folder, settings(root, tiny_model)) as server:
        yield server


def completion(server: Address, model: str, max_tokens: int = 12) -> dict[str, Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY[0], max_retries=0) as client:
        found: dict[str, Any] = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
        ).to_dict()
        return found


def answer(server: Address, model: str, max_tokens: int = 12) -> str:
    return str(completion(server, model, max_tokens)["choices"][0]["text"])


def headers() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY[0]}"}


def cards(server: Address) -> dict[str, Any]:
    return {card["id"]: card for card in httpx.get(f"{server.url}/v1/models", headers=headers()).json()["data"]}


def post(server: Address, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers(), timeout=60)


def load(server: Address, name: str, path: object, **body: object) -> httpx.Response:
    return post(server, "load_lora_adapter", lora_name=name, lora_path=str(path), **body)


def unload(server: Address, name: str) -> httpx.Response:
    return post(server, "unload_lora_adapter", lora_name=name)


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def test_an_adapter_of_the_configuration_is_a_model_of_its_own(server: Address) -> None:
    listed = cards(server)
    assert {name: card["parent"] for name, card in listed.items()} == {"base": None, "one": "base", "lost": "base"}
    assert [listed[name]["ready"] for name in ("base", "one", "lost")] == [True, True, False]
    assert answer(server, "one") != answer(server, "base")
    with pytest.raises(openai.InternalServerError, match="'lost' could not be loaded"):
        answer(server, "lost")
    assert completion(server, "base")["system_fingerprint"] != completion(server, "one")["system_fingerprint"]
    assert 'model="one"' in httpx.get(f"{server.url}/metrics", headers=headers()).text


@pytest.mark.parametrize("model", ["base", "one"])
def test_a_watermark_is_asked_for_over_http_and_found_in_the_tokens(
    server: Address, tiny_model: Path, model: str
) -> None:
    vocab_size = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    mark = Watermark(WATERMARK_KEY, vocab_size, 0.25, 6.0)
    asked: dict[str, Any] = {"model": model, "max_tokens": 80, "ignore_eos": True, "seed": 3, "return_token_ids": True}
    bodies: dict[str, Any] = {
        "completions": {"prompt": PROMPT},
        "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in bodies.items():
        marked = post(server, path, **asked, **body, watermark=True)
        assert marked.headers.get("x-inferd-watermark") == "kgw", marked.text
        assert mark.score(marked.json()["choices"][0]["token_ids"]).z > 6
        plain = post(server, path, **asked, **body)
        assert "x-inferd-watermark" not in plain.headers
        assert mark.score(plain.json()["choices"][0]["token_ids"]).z < 4


def test_adapters_come_and_go_while_the_server_runs(server: Address, root: Path, tiny_model: Path) -> None:
    reply = load(server, "two", root / "two")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    first = answer(server, "two")
    assert len({first, answer(server, "base"), answer(server, "one")}) == 3
    assert "is loaded already" in refused(load(server, "two", root / "three"))
    assert load(server, "two", root / "three", load_inplace=True).status_code == 200
    second = answer(server, "two")
    assert second != first
    assert load(server, "two", root / "two", load_inplace=True).status_code == 200
    assert answer(server, "two") == first
    write_adapter(root / "changing", tiny_model, seed=11)
    assert load(server, "changing", root / "changing").status_code == 200
    before = answer(server, "changing")
    write_adapter(root / "changing", tiny_model, seed=12)
    assert load(server, "changing", root / "changing", load_inplace=True).status_code == 200
    assert answer(server, "changing") != before, "the same name and folder with other files"

    expected = answer(server, "changing", max_tokens=60)
    body = {
        "model": "changing",
        "prompt": PROMPT,
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers(), timeout=60) as stream:
        lines = stream.iter_lines()
        first_line = next(lines)
        assert unload(server, "changing").text == "Success: LoRA adapter 'changing' removed successfully."
        events = [first_line, *(line for line in lines if line)]
    chunks = [json.loads(line.removeprefix("data: ")) for line in events if line and line != "data: [DONE]"]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == expected, "a request that was accepted ends as it would have"
    with pytest.raises(openai.NotFoundError, match='"changing" does not exist'):
        answer(server, "changing")
    assert "No adapter 'changing' is loaded" in refused(unload(server, "changing"), 404)
    assert unload(server, "two").status_code == 200


def test_what_cannot_be_loaded_is_refused_by_name_and_changes_nothing(server: Address, root: Path) -> None:
    before = cards(server)
    assert "is no folder inside of adapter_roots" in refused(load(server, "x", "/etc"))
    assert "is no folder inside of adapter_roots" in refused(load(server, "x", root / ".." / "server"))
    assert "is no folder inside of adapter_roots" in refused(load(server, "x", root / "elsewhere" / "ssl"))
    assert "is no folder inside of adapter_roots" in refused(load(server, "x", "registry:x@production"))
    assert "so it is not an adapter" in refused(load(server, "x", root / "broken"))
    assert "is the name of a model already" in refused(load(server, "base", root / "two"))
    assert "belongs to the configuration" in refused(load(server, "one", root / "two", load_inplace=True))
    assert "belongs to the configuration" in refused(unload(server, "one"))
    assert "does not exist" in refused(load(server, "x", root / "two", base_model="other"), 404)
    assert "is no model that generates text" in refused(load(server, "x", root / "two", base_model="one"))
    assert "is empty, too long, or has blanks" in refused(load(server, " x", root / "two"))
    assert "lora_path" in refused(load(server, "x", ""))
    assert load(server, "one", root / "one", load_inplace=True).status_code == 200, "its files are read again"
    assert cards(server) == before


def test_a_loaded_adapter_survives_its_workers_and_is_reported(server: Address, root: Path) -> None:
    assert load(server, "three", root / "three").status_code == 200
    expected = answer(server, "three")
    (model,) = httpx.get(f"{server.url}/admin/status", headers=headers()).json()["models"]
    assert {one["name"]: one["is_loaded"] for one in model["adapters"]} == {"one": True, "lost": False, "three": True}
    killed = [replica["pid"] for replica in model["replicas"]]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    # A request that meets two dying workers is taken for their cause, and refused.
    until_now(lambda: not any(is_running(pid) for pid in killed), "the workers are gone")
    assert [answer(server, "three") for _ in range(4)] == [expected] * 4
    assert unload(server, "three").status_code == 200


@pytest.mark.soak
def test_loaded_adapters_reach_servers_of_the_same_database(
    server: Address, root: Path, tiny_model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(server, "three", root / "three").status_code == 200
    monkeypatch.setenv("INFERD_STATE__URL", f"sqlite://{folder / 'state' / 'state.db'}")
    with serving(tmp_path, settings(root, tiny_model)) as other:
        assert answer(other, "three") == answer(server, "three"), "it was loaded before this server started"
        assert load(server, "late", root / "two").status_code == 200
        until_now(lambda: "late" in cards(other), "the other server has it")
        assert answer(other, "late") == answer(server, "late")
        assert unload(other, "late").status_code == 200
        until_now(lambda: "late" not in cards(server), "the first server has heard it")
    assert unload(server, "three").status_code == 200
