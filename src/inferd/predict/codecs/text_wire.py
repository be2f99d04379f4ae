"""The bodies of the dialects for texts: embeddings, rerank, score, classify, and text-embeddings-inference's.

Structs alone, for the codecs that read and write them and for the OpenAPI document. Sources: OpenAI's and Cohere's API
references, Jina's rerank, vLLM's and text-embeddings-inference's OpenAPI documents, ollama-python 0.6.3 (August to
November 2026).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

_ignored = Meta(description="Accepted and ignored; listed in the x-inferd-ignored-params header.")
Ignored = Annotated[Raw | UnsetType, _ignored]
_texts = Meta(description="A text, texts, the token ids of a text, or those of several.")
TextOrTokens = Annotated[str | list[str | int | list[int]], _texts]
_Positive = Annotated[int, Meta(ge=1)]
_Cut = Annotated[int, Meta(ge=-1, description="Cut texts to so many tokens; -1: to what the model reads.")]
Side = Literal["left", "right"]


class TextFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What requests about texts have in common. None: absent or null."""

    model: str | None = None
    truncate_prompt_tokens: _Cut | None = None
    truncation_side: Side | None = None
    priority: int | None = None
    timeout: float | None = None
    user: Ignored = UNSET
    request_id: Ignored = UNSET


IGNORED: Final = (
    "user",
    "request_id",
    "service_tier",
    "max_tokens_per_doc",
    "rank_fields",
    "label",
    "add_special_tokens",
    "options",
    "keep_alive",
)


class EmbeddingRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/embeddings"""

    input: TextOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Positive | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    service_tier: Ignored = UNSET


class OllamaEmbedRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=True):
    """POST /api/embed"""

    input: str | list[str]
    truncate: bool | None = None  # null and absent mean true
    dimensions: _Positive | None = None
    options: Ignored = UNSET
    keep_alive: Ignored = UNSET


class OllamaEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaEmbeddingsRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=True):
    """POST /api/embeddings"""

    prompt: str
    options: Ignored = UNSET
    keep_alive: Ignored = UNSET


class OllamaEmbeddingsResponse(msgspec.Struct, frozen=True):
    embedding: list[float]


class TextUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TextUsage


class PoolingRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /pooling"""

    input: TextOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Positive | None = None
    use_activation: bool | None = None


class Pooled(msgspec.Struct, frozen=True):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: TextUsage


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /rerank: ``documents`` as Jina, Cohere and vLLM ask, or ``texts`` as text-embeddings-inference does."""

    query: str
    documents: list[str | Document] | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    truncation: bool | None = None
    max_tokens_per_doc: Ignored = UNSET
    rank_fields: Ignored = UNSET
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class Ranked(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage


class CohereVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True, omit_defaults=True):
    input_tokens: int | UnsetType = UNSET
    search_units: int | UnsetType = UNSET


class CohereMeta(msgspec.Struct, frozen=True):
    billed_units: BilledUnits
    api_version: CohereVersion = CohereVersion()


class CohereRerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v2/rerank"""

    id: str
    results: list[Ranked]
    meta: CohereMeta


class CohereEmbedRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v2/embed"""

    texts: list[str]
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: _Positive | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: _Positive | None = None


class CohereEmbeddings(msgspec.Struct, frozen=True, omit_defaults=True):
    floats: list[list[float]] | UnsetType = msgspec.field(name="float", default=UNSET)
    base64: list[str] | UnsetType = UNSET


class CohereEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class ScoreRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /score: one text against several, or pairs. Each side has three names."""

    text_1: str | list[str] | None = None
    queries: str | list[str] | None = None
    data_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_2: str | list[str] | None = None
    use_activation: bool | None = None


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


class ClassifyRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /classify"""

    input: str | list[str]
    use_activation: bool | None = None
    aggregation_strategy: Literal["none", "simple"] | None = None


class EntityBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a text and its class, where tokens are classified."""

    score: float
    word: str
    start: int
    end: int
    entity: str | UnsetType = UNSET
    entity_group: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Classified(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    label: str | UnsetType = UNSET
    probs: list[float] | UnsetType = UNSET
    num_classes: int | UnsetType = UNSET
    entities: list[EntityBody] | UnsetType = UNSET


class ClassifyResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: TextUsage


class TeiFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What text-embeddings-inference's requests have in common; ``model`` is ours, for servers of several."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class TeiEmbedRequest(TeiFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /embed"""

    inputs: TextOrTokens
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: _Positive | None = None


class TeiPredictRequest(TeiFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /predict: a text, a pair of texts, or a list of lists of one or two texts."""

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None


class TeiPrediction(msgspec.Struct, frozen=True):
    score: float
    label: str


class TeiRank(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    score: float
    text: str | UnsetType = UNSET
