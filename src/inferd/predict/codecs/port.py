"""The shape of a codec: how one dialect's bodies are read and its answers written.

Runs in the worker. Never sees a socket or a status code: errors are ``inferd.errors`` and the gateway's to put
into the dialect's words.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from inferd.predict.contract import Contract, Tensors
from inferd.predict.runtime import Parameters, Result
from inferd.types import ModelInfo, Prediction, PredictRequest


class DecodedRequest(msgspec.Struct, kw_only=True, eq=False):
    """What a body asks for, before it is checked against the model's contract."""

    inputs: Tensors  # named arrays as the client wrote them: datatypes are checked, shapes are not
    datatypes: dict[str, str] | None = None  # the protocol's words, where the client said them; None: infer and cast
    wanted: tuple[str, ...] = ()  # names of outputs; empty: all
    parameters: Parameters = {}
    wants_times: bool = False  # a pipeline's steps in the answer's parameters
    is_told_in_json: bool = False  # the answer has each value of the wanted outputs as JSON
    form: object = None  # what the codec must know again to write the answer


class Codec(Protocol):
    """Stateless; one instance serves every model of a worker."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        """Raises InvalidRequest that names the field, what was expected and what came, before memory is taken
        for what a lying shape promises."""
        ...

    def encode(
        self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo
    ) -> Prediction: ...
