"""The interface of a codec, which decodes the bodies of one dialect and encodes its answers.

Runs in the worker. Never sees a socket or a status code: it raises ``inferd.errors``, which the gateway puts into the
dialect's form.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from inferd.predict.contract import Contract, Tensors
from inferd.predict.runtime import Parameters, Result
from inferd.types import ModelInfo, Prediction, PredictRequest


class DecodedRequest(msgspec.Struct, kw_only=True, eq=False):
    """A request as its body describes it, before it is checked against the model's contract."""

    inputs: Tensors  # named arrays as the client wrote them: datatypes are checked, shapes are not
    datatypes: dict[str, str] | None = (
        None  # by the client, in the protocol's names; None: not given, so values are cast
    )
    wanted: tuple[str, ...] = ()  # names of outputs; empty: all
    parameters: Parameters = {}
    wants_times: bool = False  # the times of a pipeline's steps go into the answer's parameters
    is_json_answer: bool = False  # each value of the wanted outputs is written as JSON
    form: object = None  # what the codec needs again to encode the answer


class Codec(Protocol):
    """Stateless; one instance serves every model of a worker."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        """Raises InvalidRequest with the field, what was expected and what was given, before memory is allocated for a
        false shape."""
        ...

    def encode(
        self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo
    ) -> Prediction: ...
