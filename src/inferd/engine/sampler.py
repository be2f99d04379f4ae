"""From logits to a token: penalties, bans, filters, and one exact draw per row.

Knows tensors of logits and a row's parameters; knows no text, no scheduler. The order is vLLM's:
log-probabilities are those of the untouched logits; then allowed tokens, bad words, min_tokens, logit bias, penalties,
the watermark, temperature, min-p, top-k, top-p, and the draw.

**A constrained answer is drawn without its mask first.** Only a forbidden token is drawn again, with a number of its
own: first from all tokens but those that end answers, where it ends the answer too early, and then from what the mask
allows. Inside of a text of JSON no answer ends, and the first draw is the one from all other tokens. Without min-p,
top-k and top-p a token has exactly the distribution of what the mask allows, because each draw replaces forbidden
tokens alone, by those of a set that holds all allowed ones. Each filter acts on what its draw is from (record 0059). A
greedy token is the one that the mask gives.

**The draw does not depend on the batch.** Each (seed, choice, position) has its own uniform number,
from a hash, and the token is found by inverting the cumulative distribution in vocabulary order. All
filters are thresholds on the logit, so tokens of equal logit at the border of top-k or top-p are
kept together (as transformers does for top-k).

Shapes: R rows, V logits each. V may be padded beyond the vocabulary; such ids are never chosen.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from inferd.engine.watermark import Watermark
from inferd.errors import InferdError, InternalError, InvalidRequest
from inferd.native.masks import RowMasks, ban
from inferd.native.sampling import sample, takes_logits
from inferd.types import SamplingParams

_TINY_TEMPERATURE = 1e-5  # below this a division may overflow; the draw is then greedy
Draw = Literal["first", "unended", "masked"]
"""Of all tokens; of all but those that end answers; of those that a mask allows."""

_PURPOSES: dict[Draw, bytes] = {"first": b"inferd-sample", "unended": b"inferd-unended", "masked": b"inferd-masked"}
_BLOCK = 128  # logits summed together before the cumulative sum
_NUCLEUS = 1024  # likeliest tokens looked at for top-p before the others are
_NUM_BANDS, _BANDS_PER_NAT = 4096, 128  # of the histogram over a flat distribution: 32 nats


@dataclass(slots=True)
class SampleRow:
    """Parameters of one row of logits. The lists are shared and must not be changed."""

    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    seed: int
    index: int  # which choice of its request
    stop_ids: frozenset[int] = frozenset()  # banned until min_tokens are generated
    bad_words: tuple[tuple[int, ...], ...] = ()
    watermark: Watermark | None = None


class Sampled(NamedTuple):
    """A token; where requested, its log-probability (natural), its rank (1 is likeliest) and the likeliest others."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


class Drawn:
    """The tokens that were drawn from a step's rows of logits. ``results``: by row; see ``Sampler.draw``."""

    __slots__ = ("_raw", "_raw_of", "_rows", "_sampler", "_x", "results")

    def __init__(
        self,
        sampler: Sampler,
        x: Tensor,
        rows: list[SampleRow],
        results: list[Sampled | InferdError],
        raw: Tensor | None,
        raw_of: dict[int, int],
    ) -> None:
        """x [R, V]: adjusted logits. ``raw`` [S, W]: those that nothing has changed, of the rows in ``raw_of``."""
        self._sampler = sampler
        self._x = x
        self._rows = rows
        self._raw = raw
        self._raw_of = raw_of
        self.results = results

    def token_id(self, row: int) -> int:
        """The token that was drawn; any token where the row has an error."""
        found = self.results[row]
        return found.token_id if isinstance(found, Sampled) else 0

    def apply(self, at: list[int], masks: RowMasks, draws: list[Draw]) -> None:
        """Replace the tokens of these rows that their masks forbid by others, drawn from what the masks allow.

        ``masks`` and ``draws``: by row of ``at``. A row with an error keeps it.
        """
        refused = [
            i
            for i, row in enumerate(at)
            if isinstance(found := self.results[row], Sampled) and not masks.allows(masks.of[i], found.token_id)
        ]
        if not refused:
            return
        places = [at[i] for i in refused]
        rows, of = [self._rows[row] for row in places], [masks.of[i] for i in refused]
        where = None if len(places) == len(self._rows) else places
        replaced = _results(rows, *_chosen(self._x, rows, [draws[i] for i in refused], masks._replace(of=of), where))
        for row, result in zip(places, replaced, strict=True):
            self.results[row] = result
        self.score([row for row in places if row in self._raw_of])

    def scored(self, row: int, token_id: int) -> Sampled:
        """Another token than the one that was drawn, with its log-probability where that is requested. Raises
        InternalError."""
        if row not in self._raw_of:
            return Sampled(token_id)
        (result,) = self._scores([row], [token_id])
        if isinstance(result, InferdError):
            raise result
        return result

    def score(self, rows: list[int]) -> None:
        """Add log-probabilities to the tokens of these rows, which request them. An error stays."""
        if not rows:
            return
        for row, result in zip(rows, self._scores(rows, [self.token_id(row) for row in rows]), strict=True):
            if isinstance(self.results[row], Sampled):
                self.results[row] = result

    def _scores(self, rows: list[int], tokens: list[int]) -> list[Sampled | InferdError]:
        assert self._raw is not None
        raw = self._raw if len(rows) == len(self._raw) else self._raw[[self._raw_of[row] for row in rows]]
        return self._sampler.score(raw, tokens, [self._rows[row].sampling.logprobs or 0 for row in rows])


class Sampler:
    """Chooses tokens for one model. Not thread-safe: belongs to the step loop."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen: dict[int, tuple[list[int], Tensor]] = {}

    def draw(self, logits: Tensor, rows: list[SampleRow], unended: RowMasks | None = None) -> Drawn:
        """One token for each row; logits [R, V] float32 are changed in place, until the last call of the result's
        ``apply``. ``unended``: the mask of the rows whose answers cannot end here, of all tokens that end no answer.

        A row that cannot be sampled gets an error in its place and does not affect others: InternalError for logits
        that are not finite numbers, InvalidRequest where every token is banned.
        """
        x = logits[:, : self._vocab_size]
        scored = [i for i, row in enumerate(rows) if row.sampling.wants_logprob]
        # Taken before anything changes them.
        raw = (logits[scored] if len(scored) < len(rows) else logits.clone()) if scored else None
        for i, row in enumerate(rows):
            if _is_adjusted(row):
                self._adjust(x[i], row)
        draws: list[Draw] = ["first"] * len(rows)
        if unended is not None:
            draws = ["first" if mask < 0 else "unended" for mask in unended.of]
        results = _results(rows, *_chosen(x, rows, draws, unended))
        drawn = Drawn(self, x, rows, results, raw, {row: at for at, row in enumerate(scored)})
        drawn.score(scored)
        return drawn

    def forget(self, prompt_ids: list[int]) -> None:
        """No more rows with this prompt will come. Idempotent."""
        self._seen.pop(id(prompt_ids), None)

    def prompt_logprobs(self, logits: Tensor, targets: list[int], num_top: int) -> list[Sampled]:
        """The log-probability of each row's target [R, V], and its ``num_top`` best. Raises InternalError."""
        found = []
        for result in self.score(logits, targets, [num_top] * len(targets)):
            if isinstance(result, InferdError):
                raise result
            found.append(result)
        return found

    def logprobs(self, logits: Tensor, targets: list[list[int]]) -> list[list[float] | InferdError]:
        """The log-probabilities of each row's targets [R, V]; InternalError for a row that has none.

        Each row is computed by itself and in float64, so its result does not depend on the other rows.
        """
        found: list[list[float] | InferdError] = []
        for row, ids in zip(logits, targets, strict=True):
            exact = row.double()
            at = torch.tensor(ids, device=row.device)
            logprobs: list[float] = (exact[at] - exact.logsumexp(-1)).tolist()
            found.append(_not_finite() if any(map(math.isnan, logprobs)) else logprobs)
        return found

    def score(self, logits: Tensor, targets: list[int], counts: list[int]) -> list[Sampled | InferdError]:
        """Log-probabilities over the whole row, padding included, as the model defines them."""
        total = logits.logsumexp(-1, keepdim=True)
        known = logits[:, : self._vocab_size]
        at = torch.tensor(targets, device=logits.device).unsqueeze(1)
        value = logits.gather(1, at)
        # Counting in float32 is exact to 16 million and much faster than in integers.
        ranks = (known > value).to(torch.float32).sum(-1).tolist()
        logprobs: list[float] = (value - total).squeeze(1).tolist()
        most = min(max(counts, default=0), self._vocab_size)
        if most:
            top_values, top_ids = known.topk(most, dim=-1)
            tops = [
                list(zip(i, v, strict=True))
                for i, v in zip(top_ids.tolist(), (top_values - total).tolist(), strict=True)
            ]
        else:
            tops = [[] for _ in targets]
        results: list[Sampled | InferdError] = []
        for token, logprob, rank, top, count in zip(targets, logprobs, ranks, tops, counts, strict=True):
            if math.isnan(logprob):
                results.append(_not_finite())
                continue
            top.sort(key=lambda pair: (-pair[1], pair[0]))
            results.append(Sampled(token, logprob, int(rank) + 1, tuple(top[:count])))
        return results

    # -- what changes the logits --------------------------------------------------------------

    def _adjust(self, x: Tensor, row: SampleRow) -> None:
        """Bans, biases and penalties on one row's logits [vocab_size], in place."""
        sampling = row.sampling
        if sampling.allowed_token_ids is not None:
            allowed = self._ids(sampling.allowed_token_ids, x)
            kept = x[allowed]
            x.fill_(-math.inf)
            x[allowed] = kept
        banned = {t for word in row.bad_words if (t := _completing(word, row.output_ids)) is not None}
        if len(row.output_ids) < sampling.min_tokens:
            banned |= row.stop_ids
        if banned:
            x[self._ids(banned, x)] = -math.inf
        if sampling.logit_bias:
            biases = {t: b for t, b in sampling.logit_bias.items() if 0 <= t < self._vocab_size}
            x[self._ids(biases, x)] += torch.tensor(list(biases.values()), dtype=x.dtype, device=x.device)
        if sampling.repetition_penalty != 1.0:
            # A token that occurs twice is computed twice from the same value and written the same.
            said = torch.cat((self._prompt_ids(row.prompt_ids, x), self._ids(row.output_ids, x)))
            y = x[said]
            x[said] = torch.where(y > 0, y / sampling.repetition_penalty, y * sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            times = {t: c for t, c in Counter(row.output_ids).items() if 0 <= t < self._vocab_size}
            counts = torch.tensor(list(times.values()), dtype=x.dtype, device=x.device)
            x[self._ids(times, x)] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        if row.watermark is not None:
            before = row.output_ids[-1] if row.output_ids else row.prompt_ids[-1]
            is_drawn = sampling.temperature >= _TINY_TEMPERATURE
            row.watermark.add(x, before, sampling.temperature if is_drawn else 0.0)

    def _ids(self, ids: Sequence[int] | set[int] | frozenset[int] | Mapping[int, float], like: Tensor) -> Tensor:
        return torch.tensor([t for t in ids if 0 <= t < self._vocab_size], dtype=torch.int64, device=like.device)

    def _prompt_ids(self, prompt_ids: list[int], like: Tensor) -> Tensor:
        """The prompt's distinct tokens, cached by the list's identity until ``forget``."""
        key = id(prompt_ids)
        known = self._seen.get(key)
        if known is None:
            # The list is kept too: while it lives its identity is not given to another.
            known = self._seen[key] = (prompt_ids, self._ids(set(prompt_ids), like))
        return known[1]


def _is_adjusted(row: SampleRow) -> bool:
    s = row.sampling
    return bool(
        s.allowed_token_ids is not None
        or row.bad_words
        or len(row.output_ids) < s.min_tokens
        or s.logit_bias
        or s.repetition_penalty != 1.0
        or s.presence_penalty
        or s.frequency_penalty
        or row.watermark is not None
    )


def _completing(word: tuple[int, ...], output_ids: list[int]) -> int | None:
    """The token that would complete the bad word now, if the output ends with its other tokens."""
    begin = list(word[:-1])
    if not word or (begin and output_ids[-len(begin) :] != begin):
        return None
    return word[-1]


def _unsampled(best: float, row: SampleRow) -> InferdError:
    """Why no token of a row was chosen. ``best``: the highest of its logits."""
    causes = [name for name, bans in _bans_of(row) if bans]
    if best == -math.inf and causes:
        return InvalidRequest(
            f"Every token is banned: {', '.join(causes)} and the form of the answer together leave nothing to "
            "generate. Loosen one of them.",
            param=causes[0],
        )
    return _not_finite()


def _bans_of(row: SampleRow) -> tuple[tuple[str, bool], ...]:
    """The fields that ban tokens, and whether they do so at this place of the answer."""
    sampling = row.sampling
    return (
        ("allowed_token_ids", sampling.allowed_token_ids is not None),
        ("bad_words", any(_completing(word, row.output_ids) is not None for word in row.bad_words)),
        ("min_tokens", len(row.output_ids) < sampling.min_tokens),
    )


def _not_finite() -> InternalError:
    return InternalError(
        "The model computed values that are not finite numbers for this request, so no token could be chosen."
    )


def _results(rows: list[SampleRow], values: list[float], tokens: list[int]) -> list[Sampled | InferdError]:
    return [
        Sampled(token) if math.isfinite(value) else _unsampled(value, row)
        for row, token, value in zip(rows, tokens, values, strict=True)
    ]


def _chosen(
    x: Tensor,
    rows: list[SampleRow],
    draws: list[Draw],
    masks: RowMasks | None = None,
    at: list[int] | None = None,
) -> tuple[list[float], list[int]]:
    """The largest of each row's logits x [R, v], and the drawn token (any where the largest is not finite). ``at``: the
    rows of x, where they are not all. What the masks ban may be banned in place."""
    if takes_logits(x):
        return _native_tokens(x, rows, draws, masks, at)
    return _tokens(x if at is None else x[at], rows, draws, masks)


def _tokens(
    x: Tensor, rows: list[SampleRow], draws: list[Draw], masks: RowMasks | None
) -> tuple[list[float], list[int]]:
    """``_chosen`` by torch."""
    if masks is not None:
        ban(x, masks)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature >= _TINY_TEMPERATURE]
    best, best_ids = _argmax(x)
    values, tokens = _on_host(best, best_ids)
    alive = [i for i in drawn if math.isfinite(values[i])]
    if alive:
        picked = x if len(alive) == len(rows) else x[alive]
        found: list[int] = _draw(picked, [rows[i] for i in alive], [draws[i] for i in alive]).tolist()
        for i, token in zip(alive, found, strict=True):
            tokens[i] = token
    return values, tokens


def _on_host(best: Tensor, ids: Tensor) -> tuple[list[float], list[int]]:
    """Both tensors on the host, by one copy from a device, because each copy waits for the device. float64 holds ids
    exactly."""
    if best.is_cpu:
        return best.tolist(), ids.tolist()
    values, tokens = torch.stack((best.double(), ids.double())).cpu()
    return values.tolist(), tokens.long().tolist()


def _native_tokens(
    x: Tensor, rows: list[SampleRow], draws: list[Draw], masks: RowMasks | None, at: list[int] | None
) -> tuple[list[float], list[int]]:
    """``_chosen`` by the kernel (kernels/sampling.h), which finds thresholds without sorting."""
    drawn = [row.sampling.temperature >= _TINY_TEMPERATURE for row in rows]
    params = [row.sampling for row in rows]
    return sample(
        x,
        [p.temperature if is_drawn else 0.0 for p, is_drawn in zip(params, drawn, strict=True)],
        [math.log(p.min_p) if p.min_p else -math.inf for p in params],
        [p.top_k if p.top_k > 0 else 0 for p in params],
        [p.top_p for p in params],
        [
            uniform(row.seed, row.index, len(row.output_ids), draw) if is_drawn else 0.0
            for row, draw, is_drawn in zip(rows, draws, drawn, strict=True)
        ],
        masks,
        at,
    )


def _argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row [R, V] and its lowest index; NaN counts as the largest.

    Computed by blocks: a maximum without its index is several times faster than one with it.
    """
    whole = x.shape[1] // _BLOCK * _BLOCK
    if not whole:
        best, at = x.max(-1)
        return best, at
    blocks = x[:, :whole].view(x.shape[0], -1, _BLOCK)
    best, block = blocks.amax(-1).max(-1)
    inside = blocks[torch.arange(x.shape[0], device=x.device), block].argmax(-1)
    at = block * _BLOCK + inside
    if whole < x.shape[1]:
        rest, rest_at = x[:, whole:].max(-1)
        later = (rest > best) | rest.isnan()
        best, at = torch.where(later, rest, best), torch.where(later, rest_at + whole, at)
    return best, at


# -- the draw ---------------------------------------------------------------------------------


def uniform(seed: int, index: int, position: int, draw: Draw = "first") -> float:
    """A number in [0, 1) for one choice at one output position: 53 bits of a keyed BLAKE2b hash. The numbers of the
    draws are independent."""
    words = (seed & 0xFFFF_FFFF_FFFF_FFFF, index, position)
    digest = hashlib.blake2b(struct.pack("<QQQ", *words), digest_size=8, person=_PURPOSES[draw]).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(x: Tensor, rows: list[SampleRow], draws: list[Draw]) -> Tensor:
    """A token for each row of logits x [r, v] with a finite maximum; x is not changed. Returns [r]."""
    device = x.device
    params = [row.sampling for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=x.dtype, device=device).unsqueeze(1)
    num_rows, num_tokens = x.shape
    num_blocks = -(-num_tokens // _BLOCK)
    # Weights exp((x - max) / t) in a buffer whose length is a multiple of the block's.
    weights = x.new_zeros(num_rows, num_blocks * _BLOCK)
    y = weights[:, :num_tokens]
    torch.sub(x, x.amax(-1, keepdim=True), out=y)
    y /= temperature
    floors = _thresholds(y, params)
    if floors is not None:
        # Keeps what is greater than the number just below the floor; much faster than a mask.
        below = torch.nextafter(floors, torch.full_like(floors, -math.inf)).tolist()
        for row, least in zip(y, below, strict=True):
            torch.threshold_(row, least, -math.inf)
    y.exp_()
    blocks = weights.view(num_rows, num_blocks, _BLOCK)
    numbers = [uniform(r.seed, r.index, len(r.output_ids), draw) for r, draw in zip(rows, draws, strict=True)]
    return _invert(blocks, torch.tensor(numbers, dtype=torch.float64, device=device))


def _invert(blocks: Tensor, draws: Tensor) -> Tensor:
    """The index where the cumulative sum of weights first exceeds draw * total.

    blocks [r, n, _BLOCK], draws [r] in [0, 1). Sums run over blocks first and then inside one, in
    float64, so the cost is one pass over the row.
    """
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1]
    # Rounding must not carry the target to the total: that would be past the last token.
    target = torch.minimum(draws * total, total * (1.0 - 2.0**-52)).unsqueeze(1)
    block = (ends <= target).sum(-1, keepdim=True)
    before = ends.gather(1, block) - sums.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    found = (inside.double().cumsum(-1) <= target - before).sum(-1)
    # The two sums of a block may differ in the last bit: stay on its last possible token.
    last = torch.where(inside > 0, torch.arange(_BLOCK, device=blocks.device), -1).amax(-1)
    return block.squeeze(1) * _BLOCK + torch.minimum(found, last)


def _thresholds(y: Tensor, params: list[SamplingParams]) -> Tensor | None:
    """The least logit of each row that min-p, top-k and top-p keep, after temperature and with a maximum of 0: [r]."""
    num_tokens = y.shape[1]
    ks = [p.top_k if 0 < p.top_k < num_tokens else 0 for p in params]
    nuclear = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if not nuclear and not any(ks) and not any(p.min_p for p in params):
        return None
    floors = torch.tensor([math.log(p.min_p) if p.min_p else -math.inf for p in params], dtype=y.dtype, device=y.device)
    limited = [i for i, k in enumerate(ks) if k]
    ordered = [i for i in range(len(params)) if ks[i] or params[i].top_p < 1.0]
    if not ordered:
        return floors
    # The number of candidates for top-p is the same in every batch, so the sums are too.
    nucleus = min(_NUCLEUS, num_tokens)
    num_best = max(nucleus if nuclear else 0, *ks, 1)
    best = y.new_full((len(params), num_best), -math.inf)
    best[ordered] = (y if len(ordered) == len(params) else y[ordered]).topk(num_best, dim=-1).values
    if limited:
        at = torch.tensor([ks[i] - 1 for i in limited], device=y.device).unsqueeze(1)
        floors[limited] = torch.maximum(floors[limited], best[limited].gather(1, at).squeeze(1))
    if nuclear:
        wanted = torch.tensor([params[i].top_p for i in nuclear], dtype=torch.float64, device=y.device)
        least = best[nuclear, :nucleus]
        # Do the candidates hold every token above the floor, so that their mass is all there is?
        complete = (least[:, -1] < floors[nuclear]).tolist()
        found = _reach(least, floors[nuclear], wanted)
        for n, i in enumerate(nuclear):
            if not complete[n] and nucleus < num_tokens:
                found[n] = _nucleus(y[i], least[n], floors[i], params[i].top_p)
        floors[nuclear] = torch.maximum(floors[nuclear], found)
    return floors


def _reach(ordered: Tensor, floors: Tensor, wanted: Tensor) -> Tensor:
    """The logit at which the mass of descending logits [r, k] reaches ``wanted`` [r] of their sum."""
    sums = ordered.double().exp_().masked_fill_(ordered < floors.unsqueeze(1), 0.0).cumsum(-1)
    short = (sums < wanted.unsqueeze(1) * sums[:, -1:]).sum(-1, keepdim=True)
    return ordered.gather(1, short.clamp_(max=ordered.shape[1] - 1)).squeeze(1)


def _nucleus(y: Tensor, best: Tensor, floor: Tensor, top_p: float) -> Tensor:
    """``_reach`` for one row [v] whose tokens above the floor are more than the ``best`` given.

    The nucleus usually ends among the best. Where it does not (a flat distribution), a histogram finds the narrow band
    of logits where it ends, and only that band is sorted.
    """
    weights = y.double().exp_()
    weights.masked_fill_(y < floor, 0.0)
    wanted = top_p * weights.sum()
    sums = best.double().exp_().cumsum(0)
    if bool(sums[-1] >= wanted):
        return best[(sums < wanted).sum()]
    band = (y * -_BANDS_PER_NAT).clamp_(0, _NUM_BANDS - 1).long()
    masses = torch.bincount(band, weights, minlength=_NUM_BANDS)
    ends = masses.cumsum(0)
    at = (ends < wanted).sum().clamp_(max=_NUM_BANDS - 1)
    inside = y[(band == at) & (y >= floor)].sort(descending=True).values
    if not inside.numel():  # the two ways of summing differ in the last bit, at the very end
        return floor
    sums = inside.double().exp_().cumsum(0) + (ends[at] - masses[at])
    return inside[(sums < wanted).sum().clamp_(max=inside.numel() - 1)]
