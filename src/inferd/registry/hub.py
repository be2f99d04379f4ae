"""Downloading a checkpoint from the Hugging Face Hub, or any server that speaks its protocol.

Downloads the files that a server needs, and never pickles. Knows the hub's client library and its failures. Imported
only when a hub id is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inferd.config.units import bytes_text
from inferd.errors import ModelLoadError

ALLOWED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
    # sentence-transformers: how texts become vectors, in folders such as 1_Pooling
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
)
# Copies of the same weights in other layouts, which some repositories carry beside their own.
IGNORED = ("[!0-9]*/*", "consolidated*.safetensors")


def download(
    repo: str,
    revision: str | None,
    progress: Callable[[str, int, int], None],
    files: Sequence[str] = ALLOWED,
    into: Path | None = None,
) -> Path:
    """The local snapshot of ``repo`` at ``revision`` (default: its main branch), from the cache when it is complete.
    ``progress`` is called with ('download', bytes done, bytes in total). ``files``: patterns of those that are needed.
    ``into``: a folder for them instead of the cache, which has whole models.

    Raises ModelLoadError with the remedy when the hub, the repository, the revision or the disk
    does not allow it.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ModelLoadError(
            f"Downloading {repo} needs the package huggingface-hub; install it with pip install 'inferd[llm]', "
            "or give the path of a local folder.",
            param="source",
        ) from None
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    spelled = f"{repo}@{revision}" if revision else repo
    try:
        found = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(files),
            local_dir=into,
            ignore_patterns=list(IGNORED),
            tqdm_class=_bar_class(progress),
        )
    except errors.GatedRepoError:
        raise _refusal(
            f"The model {repo} is gated: accept its conditions at {endpoint}/{repo}, "
            "then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise _refusal(
            f"There is no model {repo} at {endpoint}, or it is private; check the spelling, "
            "or set HF_TOKEN to a token that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise _refusal(
            f"The model {repo} has no revision {revision!r}; name a branch, a tag or a commit that it has"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            raise _refusal(
                f"The model {spelled} is not in the cache and HF_HUB_OFFLINE forbids downloading it; unset it"
            ) from None
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _refusal(_answered(error.__cause__.response.status_code, endpoint, spelled)) from None
        raise _refusal(
            f"The model {spelled} is not in the cache and {endpoint} could not be reached or did not answer; "
            "check the connection, set HF_ENDPOINT to a mirror"
        ) from None
    except errors.HFValidationError as error:
        raise _refusal(f"{repo!r} is not a hub id: {error}") from None
    except errors.HfHubHTTPError as error:
        raise _refusal(_answered(error.response.status_code, endpoint, spelled)) from None
    except OSError as error:
        raise _refusal(_disk_or_network(error, spelled)) from error
    except errors.FileMetadataError as error:
        raise _refusal(
            f"The server at {endpoint} does not answer like a model hub ({error}); check HF_ENDPOINT"
        ) from None
    return Path(found)


def cached(repo: str, revision: str | None) -> Path | None:
    """The snapshot that earlier downloads left, by the documented layout of the cache. No request goes to the hub, and
    its library, whose import takes a third of a second, is not needed."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home) / "hub"
    folder = Path(hub).expanduser() / f"models--{repo.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        commit = (folder / "refs" / commit).read_text().strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def _refusal(sentence: str) -> ModelLoadError:
    return ModelLoadError(f"{sentence}, or give the path of a local folder.", param="source")


def _answered(status: int, endpoint: str, spelled: str) -> str:
    remedy = "set HF_TOKEN to a valid token" if status in (401, 403) else "try again later, set HF_ENDPOINT to a mirror"
    return f"The hub at {endpoint} answered {status} for {spelled}; {remedy}"


def _disk_or_network(error: OSError, spelled: str) -> str:
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    if error.errno in (28, 122):  # ENOSPC, EDQUOT
        free = shutil.disk_usage(Path(cache).anchor if not Path(cache).exists() else cache).free
        return (
            f"There is no space left for {spelled} in {cache} ({bytes_text(free)} free); "
            "free some, set HF_HOME to a larger disk"
        )
    if isinstance(error, PermissionError):
        return f"The cache {cache} cannot be written ({error.strerror}); set HF_HOME to a folder that can be"
    return f"Downloading {spelled} failed ({error}); run the command again to go on where it stopped"


def _bar_class(progress: Callable[[str, int, int], None]) -> type[Any]:
    """A tqdm that draws nothing and calls ``progress`` with bytes.

    The client library opens one bar for files and one or two for bytes (received and written). The furthest bar of
    bytes counts.
    """
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    bars: dict[int, Quiet] = {}

    class Quiet(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            is_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self.n = kwargs.get("initial", 0)
            if is_bytes:
                bars[id(self)] = self

        def update(self, n: float | None = 1) -> bool | None:
            with lock:
                self.n += n or 0
                report()
            return None

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            with lock:
                report()

    def report() -> None:
        total = max((int(bar.total or 0) for bar in bars.values()), default=0)
        done = max((int(bar.n) for bar in bars.values()), default=0)
        if total:
            progress("download", min(done, total), total)

    return Quiet
