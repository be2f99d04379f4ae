"""The one table of span attributes: every key, its type, its meaning, and the convention that it comes from.

Only this file names keys. The GenAI conventions change often, so their version is pinned by its schema URL.
``python -m inferd.observe.traces.conventions`` prints the table of docs/traces.md.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
PROVIDER: Final = "inferd"  # the conventions have no value for a server of one's own

Type = Literal["string", "int", "double", "boolean", "string[]"]
Source = Literal["GenAI", "core", "vLLM, SGLang", "inferd"]


class Attribute(NamedTuple):
    """A row. ``key``: the attribute's name on a span."""

    key: str
    type: Type
    source: Source
    text: str


OPERATION: Final = Attribute("gen_ai.operation.name", "string", "GenAI", "What was asked for: `chat`, `embeddings`.")
PROVIDER_NAME: Final = Attribute("gen_ai.provider.name", "string", "GenAI", "Always `inferd`.")
REQUEST_MODEL: Final = Attribute("gen_ai.request.model", "string", "GenAI", "The model's name.")
RESPONSE_MODEL: Final = Attribute("gen_ai.response.model", "string", "GenAI", "The model that answered.")
INPUT_TOKENS: Final = Attribute("gen_ai.usage.input_tokens", "int", "GenAI", "Tokens of the prompt.")
OUTPUT_TOKENS: Final = Attribute("gen_ai.usage.output_tokens", "int", "GenAI", "Tokens of the answer.")
CACHED_TOKENS: Final = Attribute(
    "gen_ai.usage.cache_read.input_tokens", "int", "GenAI", "Tokens of the prompt found in the prefix cache."
)
FINISH_REASONS: Final = Attribute(
    "gen_ai.response.finish_reasons", "string[]", "GenAI", "Why each choice of the answer ended."
)

METHOD: Final = Attribute("http.request.method", "string", "core", "The method of HTTP.")
ROUTE: Final = Attribute("http.route", "string", "core", "The route's pattern, or the method of gRPC.")
STATUS: Final = Attribute("http.response.status_code", "int", "core", "The status; 499: the client left.")
REQUEST_BYTES: Final = Attribute("http.request.body.size", "int", "core", "Bytes of the request's body.")
RESPONSE_BYTES: Final = Attribute("http.response.body.size", "int", "core", "Bytes of the answer's body.")
ERROR_TYPE: Final = Attribute("error.type", "string", "core", "The code of the error, of a span that failed.")

HW_ID: Final = Attribute("hw.id", "string", "core", "The device that the model computes on.")
HW_TYPE: Final = Attribute("hw.type", "string", "core", "Its kind: `gpu`, `cpu`.")
HW_NAME: Final = Attribute("hw.name", "string", "core", "The name of its model.")
HW_UTILIZATION: Final = Attribute("hw.gpu.utilization", "double", "core", "Its duty cycle when the call ended, 0 to 1.")
HW_MEMORY_USAGE: Final = Attribute("hw.gpu.memory.usage", "int", "core", "Bytes of its memory in use then.")
HW_TEMPERATURE: Final = Attribute("hw.temperature", "double", "core", "Its temperature then, in degrees Celsius.")
HW_POWER: Final = Attribute("hw.power", "double", "core", "The power that it drew then, in watts.")

REQUEST_ID: Final = Attribute("gen_ai.request.id", "string", "vLLM, SGLang", "The request's id, as in the log.")
PROMPT_TOKENS: Final = Attribute("gen_ai.usage.prompt_tokens", "int", "vLLM, SGLang", "As `input_tokens`.")
COMPLETION_TOKENS: Final = Attribute("gen_ai.usage.completion_tokens", "int", "vLLM, SGLang", "As `output_tokens`.")
QUEUE_S: Final = Attribute(
    "gen_ai.latency.time_in_queue", "double", "vLLM, SGLang", "Seconds from arrival to the first step."
)
FIRST_TOKEN_S: Final = Attribute(
    "gen_ai.latency.time_to_first_token", "double", "vLLM, SGLang", "Seconds from arrival to the first token."
)
TOTAL_S: Final = Attribute("gen_ai.latency.e2e", "double", "vLLM, SGLang", "Seconds from arrival to the last token.")
PREFILL_S: Final = Attribute(
    "gen_ai.latency.time_in_model_prefill", "double", "vLLM, SGLang", "Seconds from the first step to the first token."
)
DECODE_S: Final = Attribute(
    "gen_ai.latency.time_in_model_decode", "double", "vLLM, SGLang", "Seconds from the first token to the last."
)
INFERENCE_S: Final = Attribute(
    "gen_ai.latency.time_in_model_inference", "double", "vLLM, SGLang", "Seconds from the first step to the last token."
)

TENANT: Final = Attribute("inferd.tenant", "string", "inferd", "The tenant that pays.")
KEY_ID: Final = Attribute("inferd.key_id", "string", "inferd", "The id of the API key, not its text.")
CLASS: Final = Attribute("inferd.class", "string", "inferd", "The priority class.")
STREAM: Final = Attribute("inferd.stream", "boolean", "inferd", "Whether the answer was streamed.")
OUTCOME: Final = Attribute(
    "inferd.outcome", "string", "inferd", "`done`, `failed`, `cancelled` or `refused`; of a load its last state."
)
REPLICA: Final = Attribute("inferd.replica", "int", "inferd", "The index of the replica of the last attempt.")
IS_REMOTE: Final = Attribute("inferd.is_remote", "boolean", "inferd", "Whether that replica is another server.")
ATTEMPTS: Final = Attribute("inferd.attempts", "int", "inferd", "Dispatches to a replica, hedges included.")
WORKER_DEATHS: Final = Attribute("inferd.worker_deaths", "int", "inferd", "Workers that died while they computed it.")
WAS_HEDGED: Final = Attribute("inferd.was_hedged", "boolean", "inferd", "Whether a second copy was sent elsewhere.")
PREEMPTIONS: Final = Attribute("inferd.num_preemptions", "int", "inferd", "How often it was taken out of the batch.")
STEPS: Final = Attribute("inferd.num_steps", "int", "inferd", "Engine steps that computed a part of it.")
BLOCKED_S: Final = Attribute("inferd.blocked_s", "double", "inferd", "Seconds of waiting for a slow client.")
AHEAD: Final = Attribute("inferd.queue.ahead", "int", "inferd", "Requests in the queue when it entered.")
AHEAD_OF_CLASS: Final = Attribute(
    "inferd.queue.ahead_of_class", "int", "inferd", "Of them, those of its class or a better one."
)
AHEAD_TENANT: Final = Attribute("inferd.queue.ahead_tenant", "string", "inferd", "The tenant with most of them.")
AHEAD_OF_TENANT: Final = Attribute("inferd.queue.ahead_of_tenant", "int", "inferd", "Of them, those of that tenant.")
LOST_S: Final = Attribute("inferd.lost_s", "double", "inferd", "Seconds of attempts that failed.")
RESTART_S: Final = Attribute("inferd.restart_s", "double", "inferd", "Seconds of waiting for workers that restart.")

_PARTS: Final = {
    "prefill": "Computing its own prompt.",
    "prefill_shared": "Other requests' tokens in the steps of its prompt.",
    "decode": "Computing its own answer.",
    "crowding": "Other requests' answers in the same steps.",
    "others_prefill": "Other requests' prompts in the same steps.",
    "preempted": "Out of the batch.",
    "recomputed": "Computing again what a preemption dropped.",
    "masks": "Masks of structured output.",
    "speculation": "Negative: what accepted guesses saved.",
    "slowed": "Steps that took longer than their tokens explain.",
}
PARTS: Final = {
    part: Attribute(f"inferd.part.{part}_s", "double", "inferd", f"Seconds of the span. {text}")
    for part, text in _PARTS.items()
}
"""What the time of a span was spent on, by the name of the part in ``types.EngineTimes``."""

MODEL: Final = Attribute("inferd.model", "string", "inferd", "The model, of a span of a load.")
CAUSE: Final = Attribute(
    "inferd.load.cause", "string", "inferd", "`restart` if the worker before it had ended, else `load`."
)
RESTARTS: Final = Attribute("inferd.restarts", "int", "inferd", "How often the replica had been restarted.")

TABLE: Final[tuple[Attribute, ...]] = (
    OPERATION,
    PROVIDER_NAME,
    REQUEST_MODEL,
    RESPONSE_MODEL,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    CACHED_TOKENS,
    FINISH_REASONS,
    METHOD,
    ROUTE,
    STATUS,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    ERROR_TYPE,
    HW_ID,
    HW_TYPE,
    HW_NAME,
    HW_UTILIZATION,
    HW_MEMORY_USAGE,
    HW_TEMPERATURE,
    HW_POWER,
    REQUEST_ID,
    PROMPT_TOKENS,
    COMPLETION_TOKENS,
    QUEUE_S,
    FIRST_TOKEN_S,
    TOTAL_S,
    PREFILL_S,
    DECODE_S,
    INFERENCE_S,
    TENANT,
    KEY_ID,
    CLASS,
    STREAM,
    OUTCOME,
    REPLICA,
    IS_REMOTE,
    ATTEMPTS,
    WORKER_DEATHS,
    WAS_HEDGED,
    PREEMPTIONS,
    STEPS,
    BLOCKED_S,
    AHEAD,
    AHEAD_OF_CLASS,
    AHEAD_TENANT,
    AHEAD_OF_TENANT,
    LOST_S,
    RESTART_S,
    *PARTS.values(),
    MODEL,
    CAUSE,
    RESTARTS,
)


def table() -> str:
    """The table of docs/traces.md."""
    rows = [f"| `{row.key}` | {row.type} | {row.source} | {row.text} |" for row in TABLE]
    return "\n".join(["| attribute | type | of | meaning |", "| --- | --- | --- | --- |", *rows])


if __name__ == "__main__":
    print(table())
