"""Models of an MLflow server: which sources there are, what of a version is served, and what is refused and why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.app.test_registry_served import adding
from tests.registry.mlflow_stand_in import TWO, StandIn, logged, mlmodel, standing_in

from inferd.artefacts.manifest import manifest_of
from inferd.config import Config, ModelConfig, load_config, model_name
from inferd.errors import ConfigError, InferdError, ModelLoadError
from inferd.registry.artifact import artifact_of
from inferd.registry.mlflow import fetching
from inferd.registry.mlflow.fetching import fetch, judge
from inferd.registry.mlflow.located import locate
from inferd.registry.mlflow.mlmodel import Served, choose, read_mlmodel
from inferd.registry.mlflow.server import AWAY, server_of
from inferd.registry.mlflow.signature import check_against, declared_inputs
from inferd.registry.mlflow.uris import read_uri
from inferd.registry.signature import Signature
from inferd.registry.verified import verified
from inferd.types import TensorSpec

RUN = "eaaee166daa24fccb8f45594fb49d904"
SECRET = "hunter2-of-mlflow"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with standing_in() as found:
        yield found


@pytest.fixture
def onnx(tmp_path: Path) -> bytes:
    return adding(tmp_path / "made" / "model.onnx", 1.0).read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("URI", "TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{variable}", raising=False)
    return tmp_path / "cache" / "inferd"


def configured(server: StandIn, source: str, mlflow: dict[str, Any] | None = None, **settings: Any) -> Config:
    model = {"source": source, **settings}
    found = {"models": {"m": model}, "mlflow": {"url": server.url, "timeout_s": 5, **(mlflow or {})}}
    return msgspec.convert(found, Config)


def got(server: StandIn, source: str, mlflow: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    config = configured(server, source, mlflow, **settings)
    asked = server_of(config.mlflow, os.environ)
    return fetch(asked, locate(asked, read_uri(source)), config.models["m"], config.mlflow)


def refused(server: StandIn, source: str, mlflow: dict[str, Any] | None = None, **settings: Any) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as error:
        got(server, source, mlflow, **settings)
    assert SECRET not in error.value.message
    return error.value


# -- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "kind", "name", "ref"),
    [
        ("mlflow:models:/churn@champion", "alias", "churn", "champion"),
        ("mlflow:models:/churn model/12", "version", "churn model", "12"),
        ("mlflow:models:/churn/latest", "latest", "churn", "latest"),
        (f"mlflow:models:/m-{7:032x}", "logged", f"m-{7:032x}", ""),
        (f"mlflow:runs:/{RUN}/model/a", "run", RUN, "model/a"),
    ],
)
def test_a_source_names_a_model_of_mlflow(source: str, kind: str, name: str, ref: str) -> None:
    found = read_uri(source)
    assert (found.kind, found.name, found.ref, found.shown) == (kind, name, ref, source)


@pytest.mark.parametrize(
    "path",
    [
        *("", "churn", "churn/0", "churn/3/4", "churn@", "@a", "churn/Production", "churn@a b", "a'b/3", "x/../3"),
        *("runs:/abc/model", f"runs:/{RUN}", f"runs:/{RUN}/../x", "models://host/churn/3", "churn/99999999999"),
    ],
)
def test_what_names_no_model_is_refused_with_the_forms_that_do(path: str) -> None:
    source = "mlflow:" + (path if ":/" in path else f"models:/{path}")
    with pytest.raises(ModelLoadError, match=r"write mlflow:models:/NAME@ALIAS"):
        read_uri(source)


@given(st.text(max_size=60))
def test_no_text_is_read_as_a_model_with_a_path_or_a_quote(text: str) -> None:
    try:
        found = read_uri("mlflow:models:/" + text)
    except InferdError:
        return
    assert not any(letter in found.name for letter in "/:@'\"%`")


def test_a_model_without_a_name_gets_that_of_its_source() -> None:
    names = ("mlflow:models:/churn@champion", "mlflow:models:/churn/3", f"mlflow:runs:/{RUN}/a/model")
    assert [model_name(one) for one in names] == ["churn", "churn", "model"]


# -- what is served -----------------------------------------------------------------------------


def chosen(text: bytes, *paths: str, allow_pickle: bool = False) -> Served:
    return choose(read_mlmodel(text, "churn version 3"), paths, "churn version 3", allow_pickle=allow_pickle)


def test_each_flavour_is_served_from_its_own_files() -> None:
    own = ("MLmodel", "conda.yaml", "requirements.txt", "input_example.json")
    found = chosen(mlmodel("onnx", data="model.onnx"), "model.onnx", *own)
    assert found == Served("onnx", {"model.onnx": "model.onnx"})
    found = chosen(mlmodel("onnx", data="model.onnx"), "model.onnx", "model.onnx.data", *own)
    assert found.is_folder
    assert sorted(found.files) == ["model.onnx", "model.onnx.data"]
    found = chosen(mlmodel("sklearn", pickled_model="model.skops", serialization_format="skops"), "model.skops")
    assert found.files == {"model.skops": "model.skops"}
    assert chosen(mlmodel("xgboost", data="model.ubj"), "model.ubj").flavour == "xgboost"
    assert chosen(mlmodel("lightgbm", data="model.lgb"), "model.lgb").flavour == "lightgbm"
    found = chosen(mlmodel("pytorch", model_data="data"), "data/model.pt2", "data/extra")
    assert found == Served("pytorch", {"data/model.pt2": "model.pt2"})
    found = chosen(
        mlmodel("transformers", model_binary="model", task="text-generation"),
        *("model/config.json", "model/model.safetensors", "components/tokenizer/tokenizer.json", "LICENSE.txt"),
    )
    assert found.is_folder
    assert sorted(found.files.values()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("form", ["cloudpickle", "pickle"])
def test_a_pickle_is_served_with_the_operators_permission_alone(form: str) -> None:
    text = mlmodel("sklearn", pickled_model="model.pkl", serialization_format=form)
    with pytest.raises(ModelLoadError, match=f"saved by {form}.*serialization_format='skops'.*allow_pickle: true"):
        chosen(text, "model.pkl")
    assert chosen(text, "model.pkl", allow_pickle=True).files == {"model.pkl": "model.pkl"}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (mlmodel("spam", data="x"), "Python code .python_function.*mlflow.onnx"),
        (mlmodel("catboost", data="model.cb"), "a CatBoost model; convert the model to ONNX"),
        (mlmodel("lightgbm", data="model.pkl"), "model.booster_"),
        (mlmodel("pytorch", model_data="data"), "neither model.pt2 nor model.pth"),
        (mlmodel("transformers", source_model_name="org/name"), "give org/name as the source"),
        (mlmodel("onnx", data="../../etc/passwd"), "not relative to its folder"),
        (mlmodel("onnx", data="gone.onnx"), "lacks the file 'gone.onnx'"),
        (mlmodel("onnx"), "does not say its data"),
    ],
)
def test_what_is_not_served_is_refused_with_the_remedy(text: bytes, remedy: str) -> None:
    with pytest.raises(ModelLoadError, match=remedy) as error:
        chosen(text, "model.cb", "x")
    assert "churn version 3" in error.value.message


@pytest.mark.parametrize(
    "text",
    [
        b"flavors: [onnx]",
        b"{",
        b"- a",
        b"!!python/object/apply:os.system ['true']",
        b"a: 2026-99-99",
        b"\xff",
        b"[" * 5000,
        b"flavors: {}\n" * 200_000,
    ],
)
def test_a_broken_mlmodel_is_refused_and_runs_nothing(text: bytes) -> None:
    with pytest.raises(ModelLoadError, match="MLmodel of churn"):
        read_mlmodel(text, "churn")


# -- signatures ---------------------------------------------------------------------------------


def columns(count: int, kind: str = "double") -> dict[str, str]:
    return {"inputs": json.dumps([{"type": kind, "name": f"c{place}", "required": True} for place in range(count)])}


def tensors(*specs: tuple[str, str, list[int]]) -> dict[str, str]:
    found = [
        {"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}, **({"name": name} if name else {})}
        for name, dtype, shape in specs
    ]
    return {"inputs": json.dumps(found)}


def model(*specs: tuple[str, str, tuple[int, ...]]) -> Signature:
    return Signature(inputs=tuple(TensorSpec(*one) for one in specs))


@pytest.mark.parametrize(
    ("signature", "has", "problem"),
    [
        (columns(4), model(("input-0", "FP32", (-1, 4))), ""),
        (columns(5), model(("input-0", "FP32", (-1, 4))), "it has 5 columns, and the model takes 4"),
        (columns(5, "string"), model(("input-0", "FP32", (-1, 4))), ""),  # encoded before the model
        (tensors(("x", "float32", [-1, 2])), model(("x", "FP32", (-1, 2))), ""),
        (tensors(("", "float64", [-1, 2])), model(("x", "FP32", (-1, -1))), ""),  # MLflow converts widths
        (tensors(("y", "float32", [-1, 2])), model(("x", "FP32", (-1, 2))), "names the input 'y'"),
        (tensors(("x", "int64", [-1, 2])), model(("x", "FP32", (-1, 2))), "x is INT64"),
        (tensors(("x", "float32", [-1, 3])), model(("x", "FP32", (-1, 2))), r"the shape \[-1, 3\]"),
        (tensors(("x", "float32", [-1])), model(("x", "FP32", (-1, 2))), r"the shape \[-1\]"),
        (
            tensors(("", "float32", [-1, 2]), ("", "float32", [-1, 2])),
            model(("x", "FP32", (-1, 2))),
            "it has 2 inputs, and the model takes x",
        ),
        ({}, model(("x", "FP32", (-1, 2))), ""),
    ],
)
def test_a_signature_is_compared_with_the_model(signature: dict[str, str], has: Signature, problem: str) -> None:
    declared = declared_inputs(signature, "churn")
    if not problem:
        return check_against(declared, has, "churn")
    with pytest.raises(ModelLoadError, match=problem):
        check_against(declared, has, "churn")
    return None


@pytest.mark.parametrize("text", ["{", "[1]", '[{"tensor-spec": {"dtype": "float32"}}]', 7, tensors(("", "f9", [1]))])
def test_a_broken_signature_is_refused(text: Any) -> None:
    found = text if isinstance(text, dict) else {"inputs": text}
    with pytest.raises(ModelLoadError, match="signature in the MLmodel of churn"):
        declared_inputs(found, "churn")


# -- from the server to the store ---------------------------------------------------------------


def test_a_version_is_downloaded_once_and_loaded_by_its_digest(server: StandIn, onnx: bytes, cache: Path) -> None:
    server.add("adding", 3, logged("onnx", {"model.onnx": onnx}, data="model.onnx"))
    server.aliases["adding", "champion"] = "3"
    found = got(server, "mlflow:models:/adding@champion")
    path = Path(found.source)
    assert (path.read_bytes(), path.name, path.is_relative_to(cache / "artefacts")) == (onnx, "model.onnx", True)
    assert found.verify is not None
    assert (found.verify.mode, found.verify.digest) == ("enforce", manifest_of(path).tree_digest)
    assert path.parent.name == manifest_of(path).tree_digest.removeprefix("tree-sha256:")
    loaded, words = verified("m", found)  # as the worker does it
    assert (loaded.source, "digest tree-sha256" in words) == (found.source, True)
    assert artifact_of(loaded).runtime == "onnx"
    files = server.count("/artifacts/")
    assert got(server, "mlflow:models:/adding/3") == found
    assert got(server, "mlflow:models:/adding/latest").source == found.source
    assert server.count("/artifacts/") == files, "nothing is downloaded twice"
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    assert Path(got(server, "mlflow:models:/adding/3").source).read_bytes() == onnx, "a damaged copy is replaced"


def test_folders_keep_weights_beside_the_model(server: StandIn, tmp_path: Path) -> None:
    files = {
        "model/config.json": b"{}",
        "model/model.safetensors": b"w" * 9,
        "components/tokenizer/tokenizer.json": b"{}",
    }
    server.add("chat", 1, logged("transformers", files, model_binary="model"))
    found = Path(got(server, "mlflow:models:/chat/1").source)
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_download_goes_on_where_it_was_cut_off(server: StandIn, onnx: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_THREADS", 1)
    server.add("adding", 1, logged("onnx", {"model.onnx": onnx, "conda.yaml": b""}, data="model.onnx"))
    server.cuts = [40]
    found = got(server, "mlflow:models:/adding/1")
    assert (Path(found.source).read_bytes(), server.ranges) == (onnx, ["bytes=40-"])


def test_bytes_that_differ_from_the_announced_are_refused(server: StandIn, onnx: bytes, cache: Path) -> None:
    files = logged("onnx", {"model.onnx": onnx}, data="model.onnx")
    server.add("adding", 1, files)
    server.announced["model.onnx"] = len(onnx) + 1
    assert "model.onnx has" in refused(server, "mlflow:models:/adding/1").message
    server.announced.clear()
    before = got(server, "mlflow:models:/adding/1")
    # The same version with other files, with and without another length.
    for changed in (onnx + b"\0", b"x" * len(onnx)):
        server.add("adding", 1, {**files, "model.onnx": changed})
        shutil.rmtree(cache / "artefacts" / Path(before.source).parent.name, ignore_errors=True)
        message = refused(server, "mlflow:models:/adding/1").message
        assert "adding version 1 is not what it was" in message
        assert "Register the new files as a new version" in message
    server.add("adding", 1, files)
    assert got(server, "mlflow:models:/adding/1") == before


def test_a_version_can_be_pinned_by_its_tag_or_the_settings(server: StandIn, onnx: bytes, tmp_path: Path) -> None:
    files = logged("onnx", {"model.onnx": onnx}, data="model.onnx")
    for name, data in files.items():
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(data)
    digest = manifest_of(tmp_path / "folder").tree_digest  # that 'inferd registry digest' prints for the version
    server.add("adding", 1, files, inferd__digest=digest)
    assert got(server, "mlflow:models:/adding/1", verify={"digest": digest}).source
    other = "tree-sha256:" + 64 * "0"
    assert "verify.digest is" in refused(server, "mlflow:models:/adding/1", verify={"digest": other}).message
    assert got(server, "mlflow:models:/adding/1", verify={"digest": other, "mode": "warn"}).source
    server.add("adding", 2, {**files, "model.onnx": b"x" * len(onnx)}, inferd__digest=digest)
    assert "its tag inferd.digest says" in refused(server, "mlflow:models:/adding/2").message
    server.add("adding", 2, files, inferd__digest=digest)
    assert got(server, "mlflow:models:/adding/2").source, "nothing of the refused files is left"
    server.add("adding", 3, files, inferd__digest="sha1:0")
    assert "is no digest" in refused(server, "mlflow:models:/adding/3").message


def test_files_that_mean_two_things_are_refused(server: StandIn, onnx: bytes) -> None:
    for name in ("Model.onnx", "a\\b", "a\nb"):
        server.add("adding", 1, logged("onnx", {"model.onnx": onnx, name: b"x"}, data="model.onnx"))
        message = refused(server, "mlflow:models:/adding/1").message
        assert "twice" in message or "backslash or a control character" in message
    server.add("adding", 2, {"x": b"1"})
    assert "no file MLmodel" in refused(server, "mlflow:models:/adding/2").message
    server.add("adding", 3, {})
    assert "lists no file" in refused(server, "mlflow:models:/adding/3").message


def test_a_signature_that_does_not_fit_the_file_is_refused(server: StandIn, onnx: bytes) -> None:
    inputs = tensors(("x", "float32", [-1, 7]))["inputs"]
    server.add("adding", 1, logged("onnx", {"model.onnx": onnx}, inputs, data="model.onnx"))
    assert "does not fit its model" in refused(server, "mlflow:models:/adding/1").message


def test_artifacts_elsewhere_are_read_from_allowed_folders_alone(server: StandIn, onnx: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "1"
    folder.mkdir(parents=True)
    for name, data in logged("onnx", {"model.onnx": onnx}, data="model.onnx").items():
        (folder / name).write_bytes(data)
    server.add("adding", 1, {})
    key, source = ("adding", "1"), "mlflow:models:/adding/1"
    server.roots[key] = folder.as_uri()
    assert "in none of mlflow.artifact_roots" in refused(server, source).message
    allowed = {"artifact_roots": [str(tmp_path / "artifacts")]}
    assert Path(got(server, source, allowed).source).read_bytes() == onnx
    outside = {"artifact_roots": [str(tmp_path / "artifacts" / "1" / "..")]}
    server.roots[key] = f"{folder.parent.as_uri()}/../made"
    assert "in none of" in refused(server, source, outside).message
    for uri, why in (
        ("s3://bucket/model", "at s3:, which inferd does not read; start mlflow server with --serve-artifacts"),
        ("mlflow-artifacts://elsewhere:80/1/models", "on another server than"),
        ("http://169.254.169.254/latest", "at http:"),
    ):
        server.roots[key] = uri
        assert why in refused(server, source, allowed).message


@pytest.mark.parametrize(
    ("inputs", "own", "tags", "why"),
    [
        (TWO, {}, {}, ""),
        (TWO, {}, {"inferd__digest": "sha1:0"}, "is no digest"),
        (TWO, {"MLmodel": b"["}, {}, "MLmodel of adding"),
        ("{", {}, {}, "signature in the MLmodel of adding"),
    ],
    ids=["good", "digest", "MLmodel", "signature"],
)
def test_a_version_is_judged_before_its_model_is_read(
    server: StandIn, inputs: str, own: dict[str, bytes], tags: dict[str, str], why: str
) -> None:
    files = {**logged("onnx", {"model.onnx": b"x" * 900}, inputs, data="model.onnx"), **own}
    server.add("adding", 1, files, **tags)
    source = "mlflow:models:/adding/1"
    config = configured(server, source)
    asked = server_of(config.mlflow, os.environ)
    found = locate(asked, read_uri(source))
    if why:
        with pytest.raises(ModelLoadError, match=why):
            judge(asked, found, config.models["m"], config.mlflow)
    else:
        assert judge(asked, found, config.models["m"], config.mlflow) == sum(map(len, files.values()))
    assert server.count("model.onnx") == 0


# -- the server ---------------------------------------------------------------------------------


def test_what_the_server_refuses_is_said_in_its_words(server: StandIn, onnx: bytes) -> None:
    server.add("adding", 1, logged("onnx", {"model.onnx": onnx}, data="model.onnx"))
    assert "alias champion not found" in refused(server, "mlflow:models:/adding@champion").message
    assert "answered 404: Registered Model" in refused(server, "mlflow:models:/adding/2").message
    server.statuses["adding", "1"] = "PENDING_REGISTRATION"
    assert "is PENDING_REGISTRATION" in refused(server, "mlflow:models:/adding/1").message
    server.redirect = "http://127.0.0.1:1/elsewhere"
    assert "redirects to another address" in refused(server, "mlflow:models:/adding/1").message
    server.redirect, server.body = "", b'{"model_version": {"name": 1}}'
    assert "does not answer as an MLflow server does" in refused(server, "mlflow:models:/adding/1").message


def test_a_server_that_is_gone_broken_or_something_else_is_away(server: StandIn) -> None:
    source = "mlflow:models:/adding/1"
    for status in (500, 503, 429):
        server.status = status
        error = refused(server, source)
        assert (error.code, "The store is broken" in error.message) == (AWAY, True)
    server.status = 0
    for body in (b"<html>", b"[]", b"\xff", b"[" * 100_000):
        server.body = body
        assert refused(server, source).code == AWAY
    error = refused(server, source, {"url": "http://127.0.0.1:9"})
    assert (error.code, "http://127.0.0.1:9 did not answer" in error.message) == (AWAY, True)


@pytest.mark.timeout(60)
def test_a_slow_server_is_away_after_its_time(server: StandIn) -> None:
    source, quick = "mlflow:models:/adding/1", {"timeout_s": 0.3}
    server.trickles = True
    for status, said in ((200, "the answer did not end in time"), (500, "500"), (503, "503")):
        server.status = status
        error = refused(server, source, quick)
        assert error.code == AWAY
        assert "did not answer /api/2.0/mlflow/model-versions/get within 0.3 s" in error.message
        assert said in error.message
    server.status = 404
    assert "answered 404: Not Found" in refused(server, source, quick).message, "which is said without its message"
    server.silence.clear()
    error = refused(server, source, quick)
    server.silence.set()
    assert (error.code, "timed out" in error.message) == (AWAY, True)


@pytest.mark.parametrize(
    ("settings", "env", "wanted"),
    [
        ({"token_env": "A_TOKEN"}, {"A_TOKEN": SECRET, "MLFLOW_TRACKING_TOKEN": "other"}, f"Bearer {SECRET}"),
        ({}, {"MLFLOW_TRACKING_TOKEN": SECRET}, f"Bearer {SECRET}"),
        ({"username": "ann", "password_env": "P"}, {"P": "p"}, "Basic YW5uOnA="),
        ({}, {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "p"}, "Basic YW5uOnA="),
    ],
)
def test_credentials_are_sent_and_never_shown(
    server: StandIn,
    onnx: bytes,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    env: dict[str, str],
    wanted: str,
) -> None:
    server.wanted = wanted
    server.add("adding", 1, logged("onnx", {"model.onnx": onnx}, data="model.onnx"))
    assert "refuses the credentials (401)" in refused(server, "mlflow:models:/adding/1").message
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    server.given.clear()
    assert got(server, "mlflow:models:/adding/1", settings).source
    assert set(server.given) == {wanted}


def test_settings_that_name_no_server_or_no_secret_are_refused(tmp_path: Path) -> None:
    def refusal(env: dict[str, str], **mlflow: Any) -> str:
        with pytest.raises(ModelLoadError) as error:
            server_of(msgspec.convert({"mlflow": mlflow}, Config).mlflow, env)
        assert SECRET not in error.value.message
        return error.value.message

    assert "MLFLOW_TRACKING_URI" in refusal({})
    for url in ("sqlite:///m.db", "databricks", f"http://ann:{SECRET}@host", "file:///x"):
        assert "read over HTTP" in refusal({"MLFLOW_TRACKING_URI": url})
    assert "holds no secret" in refusal({"T": f"{SECRET}\n{SECRET}"}, url="http://h", token_env="T")
    assert "holds no secret" in refusal({}, url="http://h", token_file=str(tmp_path / "none"))
    file = tmp_path / "i.yaml"
    file.write_text(
        json.dumps(
            {
                "models": {"m": {"source": "demo"}},
                "mlflow": {
                    "url": f"http://ann:{SECRET}@host",
                    "token_env": SECRET,
                    "webhook_secret_env": "NOT_SET_ANYWHERE",
                    "artifact_roots": ["/nowhere/at/all"],
                },
            }
        )
    )
    with pytest.raises(ConfigError) as error:
        load_config(file, {}, {})
    for part in ("mlflow.url", "mlflow.token_env", "webhook_secret_env", "artifact_roots"):
        assert part in error.value.message
    assert SECRET not in error.value.message
