"""GET /v1/models: what is served, with the fields vLLM adds."""

from __future__ import annotations

from inferd.gateway.generation import find_model
from inferd.gateway.http import Response
from inferd.gateway.openai_wire import ModelCard, ModelList, ModelPermission
from inferd.gateway.sse import encode
from inferd.gateway.upstream import ModelStatus, Upstream


def list_models(router: Upstream) -> Response:
    return Response(200, encode(ModelList(data=[_card(status) for status in router.models()])))


def get_model(router: Upstream, name: str) -> Response:
    """Raises ModelNotFound."""
    return Response(200, encode(_card(find_model(router, name))))


def _card(status: ModelStatus) -> ModelCard:
    created = int(status.created)
    return ModelCard(
        id=status.name,
        created=created,
        root=status.name,
        max_model_len=status.info.max_model_len if status.info is not None else None,
        permission=[ModelPermission(id=f"modelperm-{status.name}", created=created)],
    )
