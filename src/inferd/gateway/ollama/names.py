"""The names of models as Ollama's clients write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from inferd.errors import ModelNotFound
from inferd.gateway.upstream import ModelStatus

_LATEST: Final = ":latest"


def found_by(find: Callable[[str | None], ModelStatus], name: str | None) -> ModelStatus:
    """The model that ``find`` gives for a name, or for the name without ``:latest``, which clients add. Raises
    ModelNotFound, and what ``find`` raises."""
    try:
        return find(name)
    except ModelNotFound:
        if name is None or not name.endswith(_LATEST):
            raise
    return find(name.removesuffix(_LATEST))
