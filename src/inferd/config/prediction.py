"""How a predictive model is computed: batches, states of sequences, and declared inputs and outputs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section


class BatchingConfig(Section, frozen=True, kw_only=True):
    """How predictions that arrive together are computed together (predictive models)."""

    mode: Annotated[
        Literal["dynamic", "static", "off"],
        Meta(
            description=(
                "dynamic: the requests that have arrived, waiting at most max_delay_ms while waiting pays; static: "
                "always max_batch_size, without a limit of time (a baseline for measurements); off: one request at a "
                "time, in one piece."
            )
        ),
    ] = "dynamic"
    max_batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(
            description=(
                "Rows computed together; 2 or more declares that rows are independent. Unset: the limit of artifact "
                "and memory, probed at load, if there is a reason to compute rows together."
            )
        ),
    ] = None
    max_delay_ms: Annotated[
        float, Meta(description="No request waits longer than this for others to be computed with.", ge=0, le=60_000)
    ] = 2.0
    preferred_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(description="Batch sizes that the model computes best: a batch that reaches one goes at once."),
    ] = ()
    latency_budget_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "Batches are kept so small that the model's own time takes half of this budget; no request is held "
                "back when it does."
            )
        ),
    ] = None
    max_batch_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Tokens computed together by models that read text; unset: chosen for the machine."),
    ] = None
    pad: Annotated[
        bool,
        Meta(description="Pad inputs of different lengths to one shape (with a mask where the model takes one)."),
    ] = False
    audit: Annotated[
        float,
        Meta(
            description=(
                "Share of the batched requests of which a row is computed again alone while the model is idle; if it "
                "differs by more than rounding, requests are computed one by one from then on, with an alarm."
            ),
            ge=0,
            le=1,
        ),
    ] = 0.0
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(description="Lengths to which variable dimensions are padded; unset: the longest of the batch."),
    ] = ()


class SequenceConfig(Section, frozen=True, kw_only=True):
    """State that is kept between requests of one sequence (stateful models)."""

    max_sequences: Annotated[
        int, Meta(description="Sequences with a state at the same time in each replica.", ge=1)
    ] = 1024
    idle_s: Annotated[float, Meta(description="Seconds without a request after which a state is dropped.", gt=0)] = 60.0
    states: Annotated[
        dict[str, str],
        Meta(description="State outputs to the inputs they become at the next request: stateN: state."),
    ] = {}
    controls: Annotated[
        dict[str, Literal["start", "ready", "end", "id"]],
        Meta(
            description="Inputs that the server fills: whether a sequence starts, goes on (1 or 0) or ends, or its id."
        ),
    ] = {}


class TensorConfig(Section, frozen=True, kw_only=True):
    """One input or output as clients see it, when the artifact does not declare it, or not completely."""

    name: Annotated[
        str, Meta(description="The artifact's name, or one that ends in __ and its position: INPUT__0.", min_length=1)
    ]
    datatype: Annotated[str, Meta(description="KServe v2's datatype: FP32, INT64, BYTES, ...")]
    shape: Annotated[
        tuple[Annotated[int, Meta(ge=-1)], ...],
        Meta(description="Including the batch dimension, if there is one; -1 is any size."),
    ]
    reshape: Annotated[
        tuple[Annotated[int, Meta(ge=-1)], ...] | None,
        Meta(description="The artifact's shape, if it differs."),
    ] = None
    optional: Annotated[bool, Meta(description="A request may leave the input out.")] = False
    labels_file: Annotated[
        str | None, Meta(description="Names of the positions of the last dimension, one per line: classes.")
    ] = None
