"""The common parts of the codecs for texts: texts and token ids as tensors, vectors as JSON, pairs and their scores.

A model of vectors ranks and scores too, by the cosine of the two texts' vectors.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.text_wire import IGNORED, TextFields, TextUsage
from inferd.predict.contract import Array, Contract, Tensors, object_array
from inferd.predict.runtime import Result
from inferd.types import Prediction, PredictRequest

IGNORED_HEADER: Final = "x-inferd-ignored-params"

encode: Final = msgspec.json.Encoder().encode


def texts_of(values: Sequence[str], param: str, contract: Contract) -> Array:
    """[n] BYTES. Raises InvalidRequest for none or too many."""
    if not values:
        raise InvalidRequest(f"{param} is empty; send at least one text.", param=param)
    _check_count(len(values), param, contract)
    try:
        return object_array([value.encode() for value in values])
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{param} contains a lone UTF-16 surrogate, which is no character. Remove it.", param=param
        ) from None


def inputs_of(value: str | list[str | int | list[int]], param: str, contract: Contract) -> Tensors:
    """OpenAI's ``input``: the model's ``text``, or its ``token_ids``. Raises InvalidRequest."""
    if isinstance(value, str):
        return {"text": texts_of([_filled(value, param)], param, contract)}
    if not value:
        raise InvalidRequest(f"{param} is an empty list; send text, token ids, or a list of either.", param=param)
    kind = type(value[0])
    if kind is not int:
        _check_count(len(value), param, contract)
    for position, entry in enumerate(value):
        if type(entry) is not kind:
            raise InvalidRequest(
                f"{param}[{position}] differs in kind from {param}[0]; send all texts, all token ids or all lists of "
                "ids.",
                param=f"{param}[{position}]",
            )
    if kind is str:
        return {
            "text": texts_of([_filled(str(text), f"{param}[{i}]") for i, text in enumerate(value)], param, contract),
        }
    lists = (
        [[one for one in value if isinstance(one, int)]]
        if kind is int
        else [ids for ids in value if isinstance(ids, list)]
    )
    return {"token_ids": object_array([_packed(ids, param) for ids in lists])}


def _check_count(count: int, param: str, contract: Contract) -> None:
    if count > contract.max_rows:
        raise InvalidRequest(
            f"{param} may have at most {contract.max_rows} entries, not {count} (the model's setting max_rows); send "
            "several requests.",
            param=param,
        )


def _filled(text: str, at: str) -> str:
    if not text:
        raise InvalidRequest(f"{at} is empty; send at least one character.", param=at)
    return text


def _packed(ids: list[int], param: str) -> bytes:
    try:
        return np.array(ids, dtype="<i4").tobytes()
    except OverflowError:
        raise InvalidRequest(f"{param} holds a token id beyond 32 bits; no model has it.", param=param) from None


def parameters_of(wire: TextFields, **more: object) -> dict[str, object]:
    """The model's parameters that a request names; those it leaves out are the model's choice."""
    found = {
        "truncate_prompt_tokens": wire.truncate_prompt_tokens,
        "truncation_side": wire.truncation_side,
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


def side_of(direction: str | None) -> str | None:
    """The side at which texts are cut, in inferd's spelling; text-embeddings-inference capitalises it."""
    return None if direction is None else direction.lower()


def ignored(wire: msgspec.Struct) -> tuple[tuple[str, str], ...]:
    """The header that lists the fields that were sent and have no effect."""
    names = [name for name in IGNORED if getattr(wire, name, msgspec.UNSET) is not msgspec.UNSET]
    return ((IGNORED_HEADER, ", ".join(names)),) if names else ()


def usage_of(result: Result) -> TextUsage:
    return TextUsage(result.num_tokens, result.num_tokens)


def answer_id(request: PredictRequest, prefix: str) -> str:
    """The request's id with the dialect's beginning."""
    return f"{prefix}-{request.id.partition('-')[2]}"


def created_now() -> int:
    """Seconds since 1970, for the answers with a time of creation."""
    return int(time.time())


def vectors_of(array: Array, encoding: str | None) -> list[list[float] | str]:
    """[n, d] as lists of numbers, or as little-endian float32 in base64."""
    if encoding == "base64":
        return list(base64_of(array))
    found: list[list[float] | str] = array.tolist()
    return found


def base64_of(array: Array) -> list[str]:
    return [base64.b64encode(row.tobytes()).decode("ascii") for row in np.ascontiguousarray(array, dtype="<f4")]


def check_task(contract: Contract, *tasks: str) -> None:
    """Raises InvalidRequest where the model supports none of the tasks. The gateway checks this too, except while the
    model loads."""
    if not any(task in contract.tasks for task in tasks):
        raise InvalidRequest(
            f"This model cannot {tasks[0].replace('_', ' ')}; it can {', '.join(contract.tasks)}.",
            param="model",
            code="unsupported_task",
        )


def prediction(body: object, wire: msgspec.Struct) -> Prediction:
    return Prediction(encode(body), headers=ignored(wire))


# -- pairs ---------------------------------------------------------------------------------------


class Pairs(msgspec.Struct, frozen=True):
    """The properties of the request that encoding the answer needs: its body, and the number of texts of each side."""

    wire: msgspec.Struct
    first: int
    second: int


def pairs_question(
    contract: Contract,
    wire: msgspec.Struct,
    first: Sequence[str],
    second: Sequence[str],
    params: tuple[str, str],
    parameters: dict[str, object],
) -> DecodedRequest:
    """One text against several, or pair by pair. Raises InvalidRequest for sides that do not fit together."""
    check_task(contract, "score")
    left, right = texts_of(first, params[0], contract), texts_of(second, params[1], contract)
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"{params[0]} has {len(left)} texts and {params[1]} {len(right)}; send one against several, or as many on "
            "each side.",
            param=params[0],
        )
    form = Pairs(wire, len(left), len(right))
    if any(spec.name == "query" for spec in contract.inputs):
        queries = left if len(left) == len(right) else np.repeat(left, len(right))
        return DecodedRequest(inputs={"query": queries, "text": right}, parameters=parameters, form=form)
    parameters.pop("raw_scores", None)
    return DecodedRequest(
        inputs={"text": np.concatenate([left, right])}, parameters={**parameters, "normalize": True}, form=form
    )


def scores_of(decoded: DecodedRequest, result: Result) -> list[float]:
    """The scores: one for each text of the second side."""
    form = decoded.form
    assert isinstance(form, Pairs)
    if "score" in result.outputs:
        found: list[float] = result.outputs["score"].tolist()
        return found
    vectors = result.outputs["embedding"].astype(np.float32)
    left, right = vectors[: form.first], vectors[form.first :]
    cosines: list[float] = (left * right).sum(axis=1).tolist()
    return cosines
