"""The version and the fingerprint of the model that answered a call, for its record. Knows the router's status."""

from __future__ import annotations

from collections.abc import Callable

from inferd.config import ModelConfig
from inferd.observe.payloads.content import UNKNOWN, AnsweredBy
from inferd.registry.fingerprint import fingerprint_of
from inferd.types import ModelInfo


class AnsweringVersions:
    """Computes a fingerprint once for each loaded version. Used from the event loop."""

    def __init__(
        self, info_of: Callable[[str], ModelInfo | None], config_of: Callable[[str], ModelConfig | None]
    ) -> None:
        """``info_of``, ``config_of``: by the name of a model or version in the configuration."""
        self._info_of = info_of
        self._config_of = config_of
        self._known: dict[str, tuple[ModelInfo, ModelConfig, AnsweredBy]] = {}

    def __call__(self, name: str) -> AnsweredBy:
        info, config = self._info_of(name), self._config_of(name)
        if info is None or config is None:
            return UNKNOWN
        known = self._known.get(name)
        if known is None or known[0] is not info or known[1] is not config:
            known = self._known[name] = (info, config, AnsweredBy(info.version, fingerprint_of(info, config)))
        return known[2]
