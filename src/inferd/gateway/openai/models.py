"""GET /v1/models: the served models, with vLLM's additional fields."""

from __future__ import annotations

from inferd.gateway.admission import find_model, listed_models
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.gateway.openai.wire import ModelCard, ModelList, ModelPermission
from inferd.gateway.upstream import ModelStatus


def list_models(context: Context, call: Call) -> Response:
    """The models that the client may use."""
    return Response(200, encode(ModelList(data=model_cards(context, call))))


def model_cards(context: Context, call: Call) -> list[ModelCard]:
    return [_card(status) for status in listed_models(context, call.principal)]


def get_model(context: Context, call: Call, name: str) -> Response:
    """One model that the client may use. Raises ModelNotFound."""
    return Response(200, encode(_card(find_model(context, call, name))))


def _card(status: ModelStatus) -> ModelCard:
    created = int(status.created)
    return ModelCard(
        id=status.name,
        created=created,
        root=status.name,
        parent=status.parent or None,
        max_model_len=(status.info.max_model_len or None) if status.info is not None else None,
        ready=status.replicas_ready >= 1,
        tasks=status.info.tasks if status.info is not None else None,
        permission=[ModelPermission(id=f"modelperm-{status.name}", created=created)],
    )
