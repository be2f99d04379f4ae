"""The environment variables of a worker: those that computing needs, and those that its model's settings name.

The gateway's own environment holds keys of remote servers, passwords of databases and other secrets of its start. A
worker needs none of them, and its libraries, its model's code and their crash reports would see them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

import inferd
from inferd.config import ModelConfig
from inferd.registry.source import is_remote

_NAMES: Final = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CC", "CXX"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("GLIBC_TUNABLES", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        # The hub's cache folder and its offline mode, by huggingface_hub's older names.
        *(
            "HUGGINGFACE_HUB_CACHE",
            "HUGGINGFACE_ASSETS_CACHE",
            "TRANSFORMERS_OFFLINE",
            "DISABLE_TELEMETRY",
            "DO_NOT_TRACK",
        ),
    )
)
_PREFIXES: Final = (
    *("LC_", "PYTHON", "MALLOC_", "COVERAGE_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "NUMEXPR_", "RAYON_", "TOKENIZERS_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "ORT_"),
    *("ASAN_", "LSAN_", "TSAN_", "UBSAN_", "HF_"),
)
_OF_DOWNLOADS: Final = frozenset(
    (
        *("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    )
)
"""What may hold a secret and is needed to ask a hub for a model's files."""

_SPIN_COUNT: Final = "2000"


def environment_for(config: ModelConfig, own: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker for such a model, of the server's ``own``."""
    models = tuple(_with_models_within(config))
    named = {name for model in models for name in model.environment}
    if any(is_remote(source) for model in models for source in (model.source, model.speculation.draft or "")):
        named |= _OF_DOWNLOADS
    found = {name: value for name, value in own.items() if name in named or _is_for_all(name)}
    # Compute threads that wait for each other spin; by libgomp's default long enough to take the core
    # from the gateway and the clients, while all requests wait. Read when the library is loaded.
    found.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    # The way to this package: a worker does not look into the current folder.
    root = Path(inferd.__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), found.get("PYTHONPATH"))))
    return found


def _is_for_all(name: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and name not in _OF_DOWNLOADS


def _with_models_within(config: ModelConfig) -> Iterator[ModelConfig]:
    """The model, and those that its pipeline consists of, which are computed in the same worker."""
    yield config
    for section in config.pipeline.models.values():
        yield from _with_models_within(msgspec.convert(section, ModelConfig))
