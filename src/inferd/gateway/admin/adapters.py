"""vLLM's routes that load and unload LoRA adapters while the server runs. Both need the scope admin.

Source: https://docs.vllm.ai/en/latest/features/lora.html (dynamically serving LoRA adapters).
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import ModelNotFound
from inferd.gateway.admin.endpoints import MAX_BODY_BYTES, control_of
from inferd.gateway.admission import find_model, may_use, visible_models
from inferd.gateway.body.decode import decode_body
from inferd.gateway.call import Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, printable
from inferd.gateway.upstream import ModelStatus

TEXT_TYPE: Final = b"text/plain; charset=utf-8"
MAX_PATH_CHARS: Final = 4096


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter"""

    lora_name: str  # that clients send as model
    lora_path: str  # a folder inside of the model's adapter_roots, or a Hugging Face Hub id
    load_inplace: bool = False  # replace the adapter of this name, if there is one
    base_model: str | None = None  # the model that it changes; it may be left out where only one generates text
    is_3d_lora_weight: bool = False  # of experts in one tensor, which are not served


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number, which has no meaning here


_load_decoder: Final = msgspec.json.Decoder(LoadAdapter)
_unload_decoder: Final = msgspec.json.Decoder(UnloadAdapter)


async def load_adapter(context: Context, call: Call, rest: str) -> Response:
    """Load an adapter. Raises InvalidRequest, ModelNotFound, StateUnavailable, Unavailable."""
    require_json(call)
    body = await decode_body(await read_body(call, MAX_BODY_BYTES, context.body_timeout_s), _load_decoder)
    if body.is_3d_lora_weight:
        raise invalid("is_3d_lora_weight", "Adapters of experts are not served; leave is_3d_lora_weight out.")
    if not body.lora_path or len(body.lora_path) > MAX_PATH_CHARS or "\0" in body.lora_path:
        raise invalid("lora_path", "lora_path must be a folder or a hub id of 1 to 4096 characters.")
    model = _base(context, call, body.base_model)
    await control_of(context).adapters.load(body.lora_name, body.lora_path, model, in_place=body.load_inplace)
    return _done(f"Success: LoRA adapter '{printable(body.lora_name)}' added successfully.")


async def unload_adapter(context: Context, call: Call, rest: str) -> Response:
    """Unload an adapter. Raises InvalidRequest, ModelNotFound, StateUnavailable, Unavailable."""
    require_json(call)
    body = await decode_body(await read_body(call, MAX_BODY_BYTES, context.body_timeout_s), _unload_decoder)
    status = context.router.model(body.lora_name)
    if status is not None and status.parent and not may_use(context, call.principal, status.parent):
        raise ModelNotFound(f"No adapter {printable(body.lora_name[:64])!r} is loaded.", param="lora_name")
    await control_of(context).adapters.unload(body.lora_name)
    return _done(f"Success: LoRA adapter '{printable(body.lora_name)}' removed successfully.")


def _base(context: Context, call: Call, name: str | None) -> str:
    """The model that an adapter changes. Raises ModelNotFound; InvalidRequest where it has to be named."""
    if name is None:
        able = [status for status in visible_models(context, call.principal) if _takes_adapters(status)]
        if len(able) != 1:
            names = ", ".join(printable(status.name) for status in able[:20]) or "no model that generates text here"
            raise invalid("base_model", f"base_model is missing; name one of: {names}.", "missing_required_parameter")
        return able[0].name
    status = find_model(context, call, name)
    if status.parent or not _takes_adapters(status):
        raise invalid("base_model", f"{printable(status.name)!r} is no model that generates text in this server.")
    return status.name


def _takes_adapters(status: ModelStatus) -> bool:
    return status.has_local and (status.info is None or status.info.kind == "generate")


def _done(text: str) -> Response:
    return Response(200, text.encode(), TEXT_TYPE)
