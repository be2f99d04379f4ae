"""The route of the Decisions API."""

from __future__ import annotations

from typing import Final

from inferd.gateway.decisions.create import create_decision
from inferd.gateway.decisions.wire import Decision, DecisionRequest
from inferd.gateway.operations import DECIDE
from inferd.gateway.route import Route
from inferd.observe.payloads.texts import JsonTexts

_STATUSES: Final = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503)

ROUTES: Final = (
    Route(
        *("POST", "/v1/decisions", "infer", create_decision, "Answer questions about an input with probabilities."),
        request=DecisionRequest,
        response=Decision,
        operation=DECIDE,
        texts=JsonTexts(),
        statuses=_STATUSES,
    ),
)
