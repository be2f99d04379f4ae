"""Adapters while the server runs: the configuration's and those that operators load, as one desired state.

Connects the rows of the database with the router, and checks what an operator names before it costs anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from inferd.config import Config
from inferd.config.rules import adapter_name_problem
from inferd.errors import InvalidRequest, ModelNotFound
from inferd.lifecycle.adapters import AdapterRow, Rows, RuntimeAdapters
from inferd.registry.source import is_reference, is_remote
from inferd.router.router import Router


def with_adapters(config: Config, rows: Rows) -> Config:
    """The configuration with the adapters that operators loaded. Its own names come first."""
    taken = {*config.models, *(name for model in config.models.values() for name in model.adapters)}
    models = dict(config.models)
    for row in rows.values():
        model = models.get(row.model)
        if model is not None and row.name not in taken:
            models[row.model] = msgspec.structs.replace(model, adapters={**model.adapters, row.name: row.source})
    return msgspec.structs.replace(config, models=models)


class AdapterActions:
    """Implements ``gateway.control.AdapterActions``."""

    def __init__(self, runtime: RuntimeAdapters, router: Router, config: Callable[[], Config]) -> None:
        self._runtime, self._router, self._config = runtime, router, config

    async def load(self, name: str, source: str, model: str, *, in_place: bool) -> None:
        config = self._config()
        problem = adapter_name_problem(name)
        if problem:
            raise InvalidRequest(problem, param="lora_name")
        owner = self._owner(config, name)
        if name in config.models:
            raise InvalidRequest(f"{name!r} is the name of a model already; choose another one.", param="lora_name")
        if owner and not in_place:
            raise InvalidRequest(
                f"The adapter {name!r} is loaded already; send load_inplace: true to replace it, or choose another "
                "name.",
                param="lora_name",
                code="adapter_exists",
            )
        if owner and owner != model:
            raise InvalidRequest(f"{name!r} is an adapter of {owner!r}; choose another name.", param="lora_name")
        if owner and name in config.models[owner].adapters:
            if source != config.models[owner].adapters[name]:
                raise _configured(name)
            await self._router.set_adapters({owner: with_adapters(config, self._runtime.rows).models[owner].adapters})
            self._refuse_failure(name)
            return
        place = source if is_remote(source) and not is_reference(source) else self._inside(config, model, source)
        await self._runtime.put(AdapterRow(name, model, place), lambda: self._refuse_failure(name))

    async def unload(self, name: str) -> None:
        config = self._config()
        owner = self._owner(config, name)
        if not owner:
            raise ModelNotFound(f"No adapter {name[:64]!r} is loaded.", param="lora_name")
        if name in config.models[owner].adapters:
            raise _configured(name)
        await self._runtime.remove(name)

    def _owner(self, config: Config, name: str) -> str:
        """The model that has the adapter; empty: none has."""
        models = with_adapters(config, self._runtime.rows).models
        return next((model for model, settings in models.items() if name in settings.adapters), "")

    def _inside(self, config: Config, model: str, source: str) -> str:
        """The folder of an adapter, without links. Raises InvalidRequest where it is outside of the model's roots."""
        roots = [Path(root).expanduser().resolve() for root in config.models[model].adapter_roots]
        folder = Path(source).expanduser().resolve()
        if not any(folder.is_relative_to(root) for root in roots):
            raise InvalidRequest(
                f"{source[:200]!r} is no folder inside of adapter_roots of {model!r}, and no hub id. Put the adapter "
                "there, or add its folder to adapter_roots."
                if roots
                else f"The model {model!r} has no adapter_roots, so adapters come from the Hub alone. Add the folder "
                "of your adapters to adapter_roots.",
                param="lora_path",
            )
        return str(folder)

    def _refuse_failure(self, name: str) -> None:
        failure = self._router.adapter_failure(name)
        if failure:
            raise InvalidRequest(failure, param="lora_path", code="adapter_not_loaded")


def _configured(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The adapter {name!r} belongs to the configuration; change it there and reload.",
        param="lora_name",
        code="adapter_configured",
    )
