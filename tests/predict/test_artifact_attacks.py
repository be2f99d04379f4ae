"""Files that bring code, lie or are broken: nothing of them runs, each is refused with a reason, and others serve on."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from tests.predict.live import serving
from tests.predict.runtimes.loading import loaded
from tests.predict.small_onnx import identity

from inferd.cli.serve import checked, ready_to_load
from inferd.cli.terminal import loading
from inferd.config import Config, ModelConfig
from inferd.errors import InferdError, ModelLoadError
from inferd.predict.load import load_runtime
from inferd.registry.artifact import Artifact
from inferd.registry.source import silent


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def in_zip(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def in_npz(canary: Canary) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.array([canary], dtype=object))
    return buffer.getvalue()


def in_skops(canary: Canary) -> bytes:
    """A schema that names a function of this machine as the type of an object."""
    schema = {
        "__class__": "mkdir",
        "__module__": "os",
        "__loader__": "TypeNode",
        "content": str(canary.path),
        "protocol": 2,
        "_skops_version": "0.13",
    }
    return in_zip("schema.json", json.dumps(schema).encode())


WRAPPED: dict[str, Callable[[Canary], bytes]] = {
    "plain": pickle.dumps,
    "text": lambda canary: pickle.dumps(canary, protocol=0),
    "zlib": lambda canary: zlib.compress(pickle.dumps(canary)),
    "gzip": lambda canary: gzip.compress(pickle.dumps(canary)),
    "zip": lambda canary: in_zip("m/data.pkl", pickle.dumps(canary)),
    "npz": in_npz,
    "skops": in_skops,
    "behind_a_magic": lambda canary: b"\x93NUMPY" + pickle.dumps(canary),
}
SUFFIXES = ("pkl", "joblib", "onnx", "json", "ubj", "txt", "model", "skops", "pt", "pt2", "npz", "safetensors", "bin")


@pytest.mark.parametrize("wrapping", list(WRAPPED))
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_pickle_is_opened_whatever_it_is_called_and_wrapped_in(tmp_path: Path, wrapping: str, suffix: str) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(WRAPPED[wrapping](Canary(canary)))
    with pytest.raises(ModelLoadError):
        loaded(path)
    with pytest.raises(ModelLoadError):
        loaded(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize("wrapping", ["plain", "zlib", "zip", "npz", "skops"])
@pytest.mark.parametrize("runtime", ["onnx", "torch", "sklearn", "xgboost", "lightgbm"])
def test_no_loader_falls_back_to_opening_a_pickle(
    tmp_path: Path, wrapping: str, runtime: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even where the check of sources is gone around."""
    canary = tmp_path / "canary"
    path = tmp_path / "model"
    path.write_bytes(WRAPPED[wrapping](Canary(canary)))
    with pytest.raises(ModelLoadError):
        load_runtime(
            "m", Artifact(runtime, path, "p", "predict"), ModelConfig(source=str(path), runtime=runtime), silent
        )
    assert not canary.exists()


def test_the_canary_sings_where_the_operator_allows_pickles(tmp_path: Path) -> None:
    """So it is the refusal that keeps it away."""
    canary = tmp_path / "canary"
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ModelLoadError):
        loaded(path, allow_pickle=True)
    assert canary.exists()


def test_permission_for_pickles_is_not_permission_for_disguises(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in ("model.onnx", "model.json", "model.skops", "model.pt2"):
        (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
        with pytest.raises(ModelLoadError, match="whatever its name says"):
            loaded(tmp_path / name, allow_pickle=True, allow_code=True)
    assert not canary.exists()


def test_code_beside_a_checkpoint_is_never_imported(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    for architecture in ("EvilModel", "BertModel", "EvilForSequenceClassification"):
        document = {
            "architectures": [architecture],
            "model_type": "evil",
            "auto_map": {"AutoConfig": "modeling_evil.Config", "AutoModel": "modeling_evil.Model"},
        }
        (tmp_path / "config.json").write_text(json.dumps(document))
        (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        create = importlib.import_module("inferd.worker.main").create_backend
        with pytest.raises(InferdError):
            create("m", ModelConfig(source=str(tmp_path)), silent)
    assert not canary.exists()


# -- others serve on -----------------------------------------------------------------------------


def asked(url: str, name: str) -> httpx.Response:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]}]}
    return httpx.post(f"{url}/v2/models/{name}/infer", json=body, timeout=30)


def test_a_server_with_bad_files_serves_the_good_ones(tmp_path: Path) -> None:
    good = identity(tmp_path / "good.onnx")
    whole = good.read_bytes()
    canary = tmp_path / "canary"
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.full(2, 1e6, np.float32).tobytes())
    inside = tmp_path / "inside"
    inside.mkdir()
    bad = {
        "cut": whole[:-7],
        "lying": whole.replace(b"\x08\x02\x10\x01", b"\x08\x7f\x10\x01", 1),
        "pickled": pickle.dumps(Canary(canary)),
        "zipped": WRAPPED["zip"](Canary(canary)),
    }
    models = {"good": {"source": str(good)}}
    for name, data in bad.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
        models[name] = {"source": str(tmp_path / f"{name}.onnx")}
    models["thief"] = {"source": str(identity(inside / "thief.onnx", secret="../secret.bin"))}
    with serving(tmp_path, models) as (url, _, _):
        for name in models:
            answer = asked(url, name)
            assert answer.status_code == (200 if name == "good" else 503), (name, answer.text)
            assert "1000000" not in answer.text
            assert str(tmp_path) not in answer.text
        assert asked(url, "good").json()["outputs"][0]["data"] == [1.5, -2.0]
        for name in ("..%2Fgood", "%2e%2e%2fsecret.bin", "good%00", "good/../../secret", "good.onnx", str(secret)):
            assert asked(url, name).status_code in (400, 404), name
    assert not canary.exists()
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "outside its folder" in log


def test_a_bad_file_replaces_no_model_that_serves(tmp_path: Path) -> None:
    """What a reload adopts has been looked at: the old configuration stays."""
    good = identity(tmp_path / "good.onnx")
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    (tmp_path / "cut.onnx").write_bytes(good.read_bytes()[:-5])
    (tmp_path / "thief.onnx").write_bytes(identity(tmp_path / "t.onnx", secret="/etc/hostname").read_bytes())
    for name, said in (("bad.pkl", "allow_pickle"), ("cut.onnx", "no complete ModelProto"), ("thief.onnx", "outside")):
        config = Config(models={"a": ModelConfig(source=str(good)), "b": ModelConfig(source=str(tmp_path / name))})
        with pytest.raises(ModelLoadError, match=said):
            checked(ready_to_load(config, loading))
    assert not (tmp_path / "canary").exists()


def test_a_weight_that_claims_more_than_there_is_ends_the_load_alone(tmp_path: Path) -> None:
    proto = onnx.load(identity(tmp_path / "m.onnx"))
    for dims in ([1 << 62], [-1], [1 << 40, 1 << 40]):
        proto.graph.initializer[0].dims[:] = dims
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(ModelLoadError):
            loaded(tmp_path / "m.onnx")
