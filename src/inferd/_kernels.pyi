# The compiled module (kernels/module.cpp). Tensors are addresses; strides and sizes are in elements.

from collections.abc import Callable

PANEL: int
INTS_LAYOUT: int

def levels() -> list[str]: ...
def level() -> str: ...
def use_level(name: str) -> None: ...
def prefer_large_pages(address: int, bytes: int) -> None: ...
def touch_pages(address: int, bytes: int) -> bool: ...
def pack(
    dtype: int, weight: int, stride: int, out: int, size: int, first_row: int, packed: int, threads: int, /
) -> None: ...
def pack_ints(
    bits: int,
    values: int,
    scale: int,
    zero: int,
    out: int,
    size: int,
    group: int,
    packed: int,
    threads: int,
    /,
) -> None: ...
def round_weights(
    dtype: int,
    bits: int,
    weight: int,
    stride: int,
    out: int,
    size: int,
    group: int,
    values: int,
    scale: int,
    zero: int,
    threads: int,
    /,
) -> None: ...
def unpack_rows(weights: Weights, ids: int, count: int, out_dtype: int, out: int, threads: int, /) -> None: ...

class Weights:
    """Of a linear layer: addresses of memory that its maker keeps alive. ``format``: f32, bf16, int8, int4."""

    def __init__(
        self,
        format: int,
        packed: int,
        scale: int,
        total: int,
        group: int,
        has_zero: bool,
        bias: int,
        size: int,
        out: int,
        /,
    ) -> None: ...
    def take_in(self, order: int, /) -> None: ...

def linear(
    weights: Weights,
    x_dtype: int,
    x: int,
    x_stride: int,
    out_dtype: int,
    out: int,
    out_stride: int,
    rows: int,
    activation: int,
    threads: int,
    /,
) -> None: ...
def attention(
    dtype: int,
    keys: int,
    values: int,
    q: int,
    k: int,
    v: int,
    out: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    query_start: int,
    seq_len: int,
    block_table: int,
    slots: int,
    table_stride: int,
    sequences: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    window: int,
    softcap: float,
    key_scales: int,
    value_scales: int,
    key_groups: int,
    threads: int,
    /,
) -> None: ...
def layer_norm(
    x: int,
    residual: int,
    weight: int,
    bias: int,
    out: int,
    narrow: int,
    rows: int,
    size: int,
    eps: float,
    threads: int,
    /,
) -> None: ...
def sample(
    logits: int,
    stride: int,
    rows: int,
    vocab: int,
    temperature: int,
    floors: int,
    top_k: int,
    top_p: int,
    draws: int,
    best: int,
    tokens: int,
    threads: int,
    masks: int = 0,
    mask_of: list[int] = ...,
    mask_words: int = 0,
    /,
) -> None: ...
def text_attention(
    out_dtype: int,
    qkv: int,
    out: int,
    starts: int,
    bias: int,
    texts: int,
    heads: int,
    head_dim: int,
    window: int,
    bias_reach: int,
    scale: float,
    threads: int,
    /,
) -> None: ...
def rms_norm(
    dtype: int,
    x: int,
    x_stride: int,
    residual: int,
    sum: int,
    weight: int,
    weight_dtype: int,
    out: int,
    out_stride: int,
    rows: int,
    groups: int,
    size: int,
    eps: float,
    threads: int,
    /,
) -> None: ...
def gate_and_mul(
    dtype: int, activation: int, gate_up: int, stride: int, out: int, rows: int, size: int, threads: int, /
) -> None: ...

class Adapter:
    """The low-rank products of one adapter, by layer and product: addresses of memory that its maker keeps alive."""

    def __init__(self, layers: int, /) -> None: ...
    def add(
        self,
        *,
        layer: int,
        product: int,
        a: int,
        b: int,
        rank: int,
        size: int,
        first: int,
        count: int,
        scale: float,
    ) -> None: ...

def low_rank(
    dtype: int,
    x: int,
    x_stride: int,
    y_dtype: int,
    y: int,
    y_stride: int,
    rows: int,
    adapters: list[Adapter],
    adapter_of: int,
    layer: int,
    product: int,
    threads: int,
    /,
) -> None: ...

class Decoder:
    """A Llama-like decoder's plan: addresses of memory that its maker keeps alive (kernels/decoder.h)."""

    def __init__(
        self,
        *,
        dtype: int,
        norm_dtype: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        wide: int,
        eps: float,
        embedding_scale: float,
        residual_multiplier: float,
        gate: int,
        whole_norms: bool,
        embedding: Weights | None,
        norm: int,
        continues: bool = False,
        sum: Callable[[int], None] | None = None,
        meeting: Meeting | None = None,
    ) -> None: ...
    def reserve(self, rows: int, /) -> None: ...
    def borrow(self, lender: Decoder) -> None: ...
    def divide_by_outputs(
        self, ranks: int, concat: Callable[[int, int], None] | None, meeting: Meeting | None
    ) -> None: ...
    def add(
        self,
        *,
        attention_norm: int,
        attention_out_norm: int,
        feed_forward_norm: int,
        feed_forward_out_norm: int,
        q_norm: int,
        k_norm: int,
        cos: int,
        sin: int,
        half: int,
        qkv: Weights,
        out: Weights,
        gate_up: Weights,
        down: Weights,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        key_groups: int,
        block_size: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> None: ...
    def forward(
        self,
        token_ids: int,
        positions: int,
        slots: int,
        query_start: int,
        seq_len: int,
        block_table: int,
        table_stride: int,
        sequences: int,
        rows: int,
        wanted: int,
        num_wanted: int,
        entering: int,
        out: int,
        threads: int,
        adapters: list[Adapter] = ...,
        adapter_of: int = 0,
        partial: int = 0,
        whole: int = 0,
    ) -> None: ...

class Meeting:
    """Memory through which the ranks of a stage add their parts (kernels/meeting.h). Raises RuntimeError where another
    rank does not come in time, or comes with another size. Without the GIL."""

    def __init__(self, *, file: int, offset: int, ranks: int, place: int, spin_s: float, timeout_s: float) -> None: ...
    @staticmethod
    def bytes(ranks: int, /) -> int: ...
    def sum(self, part: int, count: int, total_dtype: int, total: int, threads: int, /) -> None: ...
    def gather(self, part: int, bytes: int, parts: int, /) -> None: ...
    def concat(self, part: int, rows: int, row_bytes: int, whole: int, /) -> None: ...
    @property
    def waits_in(self) -> int: ...

class Drafter:
    """Guesses with a decoder that it keeps alive; the head it copies (kernels/drafting.h)."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        head: Weights,
        dtype: int,
        hidden: int,
        vocab: int,
        block_size: int,
        divisor: float,
        softcap: float,
    ) -> None: ...
    def guess(
        self,
        pending: list[list[int]],
        blocks: list[list[int]],
        start: list[int],
        most: list[int],
        bounds: tuple[float, ...],
        chances: tuple[float, ...],
        next_chance: float,
        tokens: float,
        seconds: float,
        row_s: float,
        pass_s: float,
        least: float,
        least_per_s: float,
        threads: int,
        /,
    ) -> tuple[list[list[int]], list[list[float]], int]: ...

class Lookup:
    """The text of one sequence, and where it has occurred before (kernels/lookup.h)."""

    def __init__(
        self, *, returned: int, resumed: int, longest: int, kept: int, window: int, held: int, most_looked_at: int
    ) -> None: ...
    def find(self, more: list[int], count: int, /) -> tuple[int, list[int], list[int]]: ...

def rotary(
    dtype: int,
    x: int,
    stride: int,
    rows: int,
    heads: int,
    head_dim: int,
    positions: int,
    cos: int,
    sin: int,
    half: int,
    threads: int,
    /,
) -> None: ...
