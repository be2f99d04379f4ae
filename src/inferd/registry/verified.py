"""Verification of a model's files before anything of them is used: settings become ones that load what was verified.

With ``verify.mode: enforce`` the source of the returned settings is a copy that only the server's user can change, and
that was compared with the digest or the signature (``artefacts/store.py``). So neither a file that is replaced between
the check and the load, nor one that is changed after the load, reaches the model. What cannot be verified as a whole is
refused: a module on Python's path, a model of one file with weights in other files.

Runs in the worker, before its files are recognised. Knows sources and settings; what verifying is, is not known here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from inferd.artefacts.policy import Policy, verify
from inferd.artefacts.signature import default_bundle
from inferd.artefacts.store import checked_copy, store_folder
from inferd.artefacts.tree import not_verified
from inferd.artefacts.trust import Trust
from inferd.config import ModelConfig, VerifyConfig
from inferd.errors import ModelLoadError
from inferd.registry.artifact import artifact_of
from inferd.registry.onnx_file import read_onnx
from inferd.registry.source import Progress, check_code, is_code, is_remote, resolve, silent

_log = logging.getLogger("inferd.registry")

FAILED: Final = "FAILED: "
"""What the words about a model begin with that was loaded although it did not verify."""


def verified_models(name: str, config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """The model and the models in its pipeline, with their places in the configuration, of which files are verified."""
    if config.verify is not None and config.verify.mode != "off" and not config.is_pipeline and not config.is_remote:
        yield name, config
    for part, below in _parts(config).items():
        yield from verified_models(f"{name}.pipeline.models.{part}", below)


def verified(name: str, config: ModelConfig, progress: Progress = silent) -> tuple[ModelConfig, str]:
    """Settings that load what was verified, and words about it for people: the evidence, or ``FAILED: `` and why.

    The words are empty where nothing is to be verified. Raises ModelLoadError, of which ``param`` is the setting.
    """
    parts, words = {}, []
    for part, below in _parts(config).items():
        parts[part], word = verified(f"{name}/{part}", below, progress)
        words += [f"{part}: {word}"] if word else []
    if parts:
        config = msgspec.structs.replace(config, pipeline=msgspec.structs.replace(config.pipeline, models=parts))
    settings = config.verify
    if settings is None or settings.mode == "off" or config.is_pipeline:
        return config, "; ".join(words)
    if settings.mode == "warn":
        try:
            word = verify_source(config, progress)
        except ModelLoadError as error:
            _log.warning("%s is loaded although it does not verify: %s", name, error.message)
            word = FAILED + error.message
        return config, "; ".join([*words, word])
    path, links_into = artefact_of(config, progress)
    found = checked_copy(
        path, policy_of(settings, path, config), store_folder(), links_into=links_into, progress=progress
    )
    _refuse_files_elsewhere(found.path, config)
    # The copy is what its manifest says as long as nothing is written beside its files.
    sys.dont_write_bytecode = True
    class_name = f":{config.source.rpartition(':')[2]}" if is_code(config.source) else ""
    return msgspec.structs.replace(config, source=f"{found.path}{class_name}"), "; ".join([*words, found.evidence])


def verify_source(config: ModelConfig, progress: Progress = silent) -> str:
    """Compare a model's files with its settings and return the evidence. Raises ModelLoadError."""
    assert config.verify is not None, "there is something to verify"
    path, links_into = artefact_of(config, progress)
    found = verify(path, policy_of(config.verify, path, config), links_into=links_into, progress=progress)
    _refuse_files_elsewhere(path, config)
    return found.evidence


def refuse_early(config: ModelConfig) -> None:
    """Raises the ModelLoadError that loading would raise, as far as it can be known without loading: of files that do
    not verify, and of files that are not recognised."""
    for _, part in verified_models("", config):
        if part.verify is not None and part.verify.mode == "enforce":
            verify_source(part)
    artifact_of(config)


def artefact_of(config: ModelConfig, progress: Progress = silent) -> tuple[Path, Path | None]:
    """The file or folder that is verified, downloaded first from a hub; and where links in it may lead.

    Raises ModelLoadError for a source of which not all files are known.
    """
    if is_code(config.source):
        check_code(config.source)
        place = config.source.rpartition(":")[0]
        if not place.endswith(".py"):
            raise not_verified(
                f"{config.source} names a module on Python's path, of which not all files are known, so it cannot be "
                "verified; give its file (path/file.py:Class) or its folder.",
                param="source",
            )
        return Path(place).expanduser(), None
    path = resolve(config.source, progress)
    if is_remote(config.source):
        # The hub's cache holds links to files that are named by their content.
        return path, path.parent.parent / "blobs"
    return path, None


def policy_of(settings: VerifyConfig, path: Path, config: ModelConfig) -> Policy:
    """What the settings ask of the files. Raises ModelLoadError."""
    signature = settings.signature
    if signature is None:
        return Policy(digest=settings.digest)
    if is_remote(config.source):
        raise not_verified(
            f"The signature of {config.source} covers files that are not downloaded to serve it; download the whole "
            "repository (hf download --local-dir) and give the folder, or pin verify.digest.",
            param="verify.signature",
        )
    bundle = default_bundle(path)
    if signature.bundle is not None:
        bundle = (path if path.is_dir() else path.parent) / Path(signature.bundle).expanduser()
    trust = Trust(
        public_key=_file(signature.public_key_file),
        roots=_file(signature.certificate_chain_file),
        identity=signature.identity,
    )
    return Policy(digest=settings.digest, bundle=bundle, trust=trust, ignore_unsigned=settings.ignore_unsigned_files)


def _parts(config: ModelConfig) -> dict[str, ModelConfig]:
    return {
        name: below if isinstance(below, ModelConfig) else msgspec.convert(below, ModelConfig)
        for name, below in config.pipeline.models.items()
    }


def _file(place: str | None) -> Path | None:
    return None if place is None else Path(place).expanduser()


def _refuse_files_elsewhere(path: Path, config: ModelConfig) -> None:
    """Raises ModelLoadError for an ONNX file that keeps weights in other files, which were not verified."""
    if path.is_dir() or path.suffix.lower() != ".onnx":
        return
    others = sorted({one.location for one in read_onnx(path).external})
    if others:
        raise not_verified(
            f"{config.source} keeps weights in {others[0]}, which is not verified with it; give the folder that holds "
            "both as the source.",
            param="source",
        )
