"""The bodies of the Message Batches API, as structs.

Source: the types of Anthropic's client for Python (``anthropic.types.messages``).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

_Limit = Annotated[int, Meta(ge=1, le=1000)]


class BatchedMessage(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: Raw  # a body of POST /v1/messages, without stream


class BatchedModel(msgspec.Struct, frozen=True):
    """What is read of ``params`` before the request is asked."""

    model: str | None = None


class MessageBatchRequest(msgspec.Struct, frozen=True):
    """POST /v1/messages/batches"""

    requests: list[BatchedMessage]


class BatchFrame(msgspec.Struct, frozen=True):
    """Such a body without its requests, which are read as they arrive."""

    requests: list[Raw]


class MessageBatchCounts(msgspec.Struct, frozen=True):
    """The requests of a batch, by their results."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, frozen=True, tag="message_batch", tag_field="type"):
    """A batch of messages. Times are RFC 3339."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None  # a path at this server, once the batch has ended


class MessageBatchPage(msgspec.Struct, frozen=True):
    """A page of the list of batches, the newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, frozen=True, tag="message_batch_deleted", tag_field="type"):
    """DELETE /v1/messages/batches/{id}"""

    id: str


class MessageBatchesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of batches."""

    limit: _Limit = 20
    after_id: str | None = None  # the last batch of the page before
    before_id: str | None = None  # the first batch of the page behind


frame_decoder: Final = msgspec.json.Decoder(BatchFrame)
request_decoder: Final = msgspec.json.Decoder(BatchedMessage)
model_decoder: Final = msgspec.json.Decoder(BatchedModel)
