"""Loading and unloading models with KServe v2's model repository extension, for REST and gRPC.

All versions of a model are loaded and unloaded together. A load may set another ``max_batch_size`` and queue delay,
which hold until the configuration is read again. Files in a request are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from inferd.config import BatchingConfig, ModelConfig
from inferd.errors import InferdError, InvalidRequest, ModelNotFound, from_failure
from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.kserve.served import versions_served
from inferd.gateway.kserve.wire import Value
from inferd.tenancy.principal import Principal

MAX_BATCH_SIZE: Final = 65_536
MAX_DELAY_US: Final = 60_000_000


class _Batching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_queue_delay_microseconds: int | str | None = None
    preferred_batch_size: tuple[int, ...] | None = None


class _Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of Triton's ModelConfig that a load may change. Triton writes 64-bit numbers as texts."""

    name: str | None = None
    max_batch_size: int | str | None = None
    dynamic_batching: _Batching | None = None


_override_decoder: Final = msgspec.json.Decoder(_Override)


async def load_model(context: Context, principal: Principal, name: str, parameters: Mapping[str, Value]) -> None:
    """Load every version of a model; returns when they are ready. Raises InferdError, whose message begins with
    "failed to load"."""
    try:
        _refuse_files(parameters)
        batching = _batching(parameters.get("config"))
        for served in versions_served(context, principal, name):
            entry = served.status.name
            if batching is not None:
                config = context.config.models.get(entry)
                if config is not None:
                    await control_of(context).override(entry, _changed(config, batching))
            await control_of(context).load(entry)
    except InferdError as error:
        raise _failed("load", name, error) from None


async def unload_model(context: Context, principal: Principal, name: str, parameters: Mapping[str, Value]) -> None:
    """Unload every version of a model. Raises InferdError, whose message begins with "failed to unload".

    ``unload_dependents`` has no effect: a pipeline has its own copies of its models, so no model depends on another.
    """
    try:
        dependents = parameters.get("unload_dependents")
        if dependents is not None and not isinstance(dependents, bool):
            raise invalid(
                "parameters.unload_dependents",
                f"parameters.unload_dependents must be true or false, not {shown(dependents)}.",
            )
        for served in versions_served(context, principal, name):
            await control_of(context).unload(served.status.name)
    except InferdError as error:
        raise _failed("unload", name, error) from None


def _failed(verb: str, name: str, error: InferdError) -> InferdError:
    """The same error with the message that Triton's clients expect."""
    failure = error.to_failure()
    message = f"failed to {verb} {shown(name)}: {failure.message}"
    if isinstance(error, ModelNotFound):
        return ModelNotFound(message, param="model")
    return from_failure(msgspec.structs.replace(failure, message=message))


def _refuse_files(parameters: Mapping[str, Value]) -> None:
    for key in parameters:
        if key.startswith("file:"):
            raise invalid(
                f"parameters.{key[:64]}",
                f"parameters.{shown(key)} brings a file; models' files are put into place by the operator, not over "
                "the API.",
            )
        if key != "config":
            raise invalid(f"parameters.{key[:64]}", f"parameters.{shown(key)} is not known here; remove it.")


def _batching(config: Value) -> _Override | None:
    if config is None:
        return None
    if not isinstance(config, str):
        raise invalid("parameters.config", f"parameters.config must be a JSON text, not {shown(config)}.")
    try:
        return _override_decoder.decode(config)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"parameters.config is no model configuration that can be changed here ({str(error)[:200]}); it may have "
            "max_batch_size and dynamic_batching.",
            param="parameters.config",
        ) from None


def _changed(config: ModelConfig, override: _Override) -> ModelConfig:
    """The configuration with the override's values. Raises InvalidRequest for numbers out of range."""
    changes: dict[str, Any] = {}
    if override.max_batch_size is not None:
        changes["max_batch_size"] = _number("max_batch_size", override.max_batch_size, 1, MAX_BATCH_SIZE)
    batching = override.dynamic_batching
    if batching is not None:
        if batching.max_queue_delay_microseconds is not None:
            name = "dynamic_batching.max_queue_delay_microseconds"
            delay = _number(name, batching.max_queue_delay_microseconds, 0, MAX_DELAY_US)
            changes["max_delay_ms"] = delay / 1000
        if batching.preferred_batch_size is not None:
            for size in batching.preferred_batch_size:
                _number("dynamic_batching.preferred_batch_size", size, 1, MAX_BATCH_SIZE)
            changes["preferred_sizes"] = batching.preferred_batch_size
    changed: BatchingConfig = msgspec.structs.replace(config.batching, **changes)
    return msgspec.structs.replace(config, batching=changed)


def _number(name: str, value: int | str, low: int, high: int) -> int:
    text = str(value) if isinstance(value, str) or value.bit_length() < 64 else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise invalid(
            f"parameters.config.{name}", f"parameters.config: {name} must be from {low} to {high}, not {shown(value)}."
        )
    return int(text)
