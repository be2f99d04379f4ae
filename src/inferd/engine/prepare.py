"""From a request to token ids and resolved parameters, before any step is computed.

Runs on the worker's I/O thread, beside the step loop, and uses only immutable or locked objects. Every error that a
client can make about this model is found here, before it costs computing time.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import msgspec

from inferd import clock
from inferd.answer_form import AnswerForm
from inferd.backend import FOR_EVER, Wait
from inferd.checkpoints.answers.notation import Parsing
from inferd.checkpoints.generation_config import GenerationDefaults
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.checkpoints.text.tokenizer import NO_OWNER, Owner, Tokenizer
from inferd.engine.adapters import Adapters
from inferd.engine.answer_trie import AnswerTrie, Tokenized
from inferd.engine.forms import Forms
from inferd.engine.watermark import Watermark
from inferd.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, WorkerDied
from inferd.native.low_rank import LoadedAdapter
from inferd.structured.guide import CompiledGrammar
from inferd.structured.vocabulary import Vocabulary
from inferd.types import JSON, Chat, Continuation, GenerateRequest, Prompt, SamplingParams, TextPrompt, TokenPrompt

_TAIL_TOKENS = 64  # of a prompt, which show whether it has opened the reasoning
_PLAIN = {"role", "content"}  # the fields of a message that has text alone
_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the scheduler."""

    request: GenerateRequest
    prompt_ids: list[int]
    sampling: SamplingParams  # max_tokens is set
    seed: int
    eos_ids: frozenset[int]  # end the sequence, unless ignore_eos
    stop_ids: frozenset[int]  # eos and stop_token_ids: banned until min_tokens
    bad_words: tuple[tuple[int, ...], ...]
    grammar: CompiledGrammar | None  # of the whole answer; None: any text
    salt: bytes
    adapter: LoadedAdapter | None  # held to the end of the request; None: the base alone
    begun_s: float  # seconds after its arrival at which its tokenizing began,
    tokenized_s: float  # and ended
    parsing: Parsing | None = None  # None: an answer is plain text
    answers: AnswerTrie | None = None  # that are scored; None: an answer is generated
    unenforced: tuple[str, ...] = ()  # fields with schemas of tools that do not bind the answer
    watermark: Watermark | None = None  # of the answer

    @property
    def num_prompt(self) -> int:
        """The tokens that are read."""
        return len(self.prompt_ids) if self.answers is None else self.answers.num_tokens

    @property
    def may_skip_logits(self) -> bool:
        """Whether a token that nothing else may stand for needs no logits: its log-probability is not requested, and no
        other field can ban it."""
        sampling = self.sampling
        return (
            sampling.logprobs is None
            and sampling.width == sampling.n
            and sampling.allowed_token_ids is None
            and not self.bad_words
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model can hold."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int


class Preparer:
    """Renders, tokenizes and validates for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: GenerationDefaults,
        eos_ids: frozenset[int],
        limits: Limits,
        seed: int | None,
        forms: Forms,
        adapters: Adapters | None = None,
        watermark: Watermark | None = None,
        is_always_marked: bool = False,
    ) -> None:
        """``adapters``: of the model; None: it can have none. ``watermark``: likewise; of every answer, or of those
        whose request asks for it."""
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults
        self.eos_ids = eos_ids
        self.limits = limits
        self._forms = forms
        self.adapters = adapters
        self._watermark = watermark
        self._is_always_marked = is_always_marked
        self._random = random.Random(seed)
        self.tokenize_s = 0.0

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that masks are of."""
        return self._forms.compiler.vocabulary

    def close(self) -> None:
        self._forms.compiler.close()

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
        """Raises InvalidRequest, naming the field, the value and the remedy; TakesLong and WaitEndedError as
        ``PreparingBackend`` says."""
        began = clock.now()
        adapter = self._adapter(request)
        if request.answer_sets:
            return self._prepare_answers(request, adapter, began)
        keep = request.truncate_prompt_tokens
        if isinstance(request.prompt, TextPrompt) and keep is None:
            self._refuse_far_too_long(request.prompt.text)
        owner = Owner(request.tenant, request.cache_salt)
        prompt_ids = self.tokenize(request.prompt, owner)
        if keep is not None:
            # -1 is vLLM's word for "whatever fits".
            prompt_ids = prompt_ids[-(keep if keep > 0 else self.limits.max_model_len - 1) :]
        check_ranges(request.sampling)
        sampling = self._resolve(request, len(prompt_ids))
        self._check_ids(sampling)
        self._check_width(sampling, len(prompt_ids))
        seed = sampling.seed
        if request.resumes is not None:
            self._check_resumes(request.resumes, sampling, len(prompt_ids))
            seed = request.resumes.seed
        parsing, grammar, unenforced = self._forms.resolve(request, prompt_ids, wait=wait)
        if request.form is not None and request.form.fit:
            _check_fit(request.form, sampling, grammar)
        # A constrained answer ends where its form ends, so ignore_eos only delays the end there.
        eos_ids = frozenset() if sampling.ignore_eos and grammar is None else self.eos_ids
        done = clock.now()
        self.tokenize_s += done - began
        return Prepared(
            request=request,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=seed if seed is not None else self._random.getrandbits(63),
            eos_ids=eos_ids,
            stop_ids=self.eos_ids | frozenset(sampling.stop_token_ids),
            bad_words=self._bad_words(sampling, owner),
            grammar=grammar,
            salt=_salt(request, adapter),
            adapter=adapter,
            begun_s=began - request.arrived_at,
            tokenized_s=done - request.arrived_at,
            parsing=parsing,
            unenforced=unenforced,
            watermark=self._watermark_of(sampling),
        )

    def tokenize(self, prompt: Prompt, owner: Owner = NO_OWNER) -> list[int]:
        """Token ids of any kind of prompt. Raises InvalidRequest."""
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                bad = next((t for t in token_ids if not 0 <= t < self.limits.vocab_size), None)
                if bad is not None:
                    raise InvalidRequest(
                        f"prompt contains token id {bad}, but this model's ids are 0 to {self.limits.vocab_size - 1}.",
                        param="prompt",
                    )
                return list(token_ids)
            case TextPrompt(text=text, add_special_tokens=special):
                return self.tokenizer.encode(text, special, owner)
            case Chat():
                return self.tokenizer.encode(self._render(prompt), prompt.add_special_tokens, owner)

    def _render(self, prompt: Chat) -> str:
        if self.template is None:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or set chat_template in the model's "
                "configuration.",
                param=prompt.at,
            )
        return self.template.render(prompt)

    def _adapter(self, request: GenerateRequest) -> LoadedAdapter | None:
        """Raises ModelNotFound; WorkerDied for an answer that was begun with other files of the adapter."""
        if not request.adapter:
            return None
        if self.adapters is None:
            raise ModelNotFound(f"This model has no adapter {request.adapter!r}.", param="model")
        adapter = self.adapters.find(request.adapter)
        if request.adapter_identity not in ("", adapter.identity.hex()):
            raise WorkerDied(
                f"The adapter {request.adapter!r} was replaced after output had been sent. The answer is incomplete; "
                "send the request again."
            )
        return adapter

    def _prepare_answers(self, request: GenerateRequest, adapter: LoadedAdapter | None, began: float) -> Prepared:
        """A request that scores answers: its prompt is what all of them share."""
        trie = self._tokenize_answers(request)
        if not trie.root.tokens:
            raise InvalidRequest(
                "The chat template of this model gives prompts that share no token, so no answer can be scored. Set "
                "another chat_template.",
                param=request.prompt.at if isinstance(request.prompt, Chat) else "prompt",
            )
        done = clock.now()
        self.tokenize_s += done - began
        return Prepared(
            request=request,
            prompt_ids=trie.root.tokens,
            sampling=SamplingParams(max_tokens=0),
            seed=0,
            eos_ids=self.eos_ids,
            stop_ids=self.eos_ids,
            bad_words=(),
            grammar=None,
            salt=_salt(request, adapter),
            adapter=adapter,
            begun_s=began - request.arrived_at,
            tokenized_s=done - request.arrived_at,
            answers=trie,
        )

    def _tokenize_answers(self, request: GenerateRequest) -> AnswerTrie:
        """The tokens of each answer are those of the conversation with the answer, so they are the ones that the
        tokenizer gives at this place."""
        prompt = request.prompt
        if not isinstance(prompt, Chat):
            raise InvalidRequest("Answers of a prompt that is no conversation cannot be scored.", param="prompt")
        chats = [
            msgspec.structs.replace(prompt, messages=[*prompt.messages, *one.messages]) for one in request.answer_sets
        ]
        texts = self._render_alike(chats)
        branches = self.tokenizer.encode_branches(texts, Owner(request.tenant, request.cache_salt))
        sets: list[Tokenized] = []
        for one, text, ids in zip(request.answer_sets, branches.tails, branches.tail_ids, strict=True):
            opened = text + self._forms.opening([*branches.shared_ids[-_TAIL_TOKENS:], *ids])
            own = self.tokenizer.encode_branches([opened, *(opened + answer for answer in one.answers)])
            sets.append(Tokenized(own.shared_ids, own.tail_ids[0], own.tail_ids[1:]))
            before = len(branches.shared_ids) + len(own.shared_ids)
            self._check_answers(one.at, before, own.tail_ids[1:])
        return AnswerTrie(branches.shared_ids, sets)

    def _render_alike(self, chats: list[Chat]) -> list[str]:
        """The texts of conversations that begin alike. Where the template refuses messages of one role that follow one
        another, they are one message."""
        try:
            return [self._render(chat) for chat in chats]
        except InvalidRequest:
            joined = [msgspec.structs.replace(chat, messages=_joined(chat.messages)) for chat in chats]
            if all(len(one.messages) == len(other.messages) for one, other in zip(joined, chats, strict=True)):
                raise
            return [self._render(chat) for chat in joined]

    def _check_answers(self, at: tuple[str, ...], num_before: int, answers: list[list[int]]) -> None:
        longest, seen = self.limits.max_model_len, dict[tuple[int, ...], str]()
        for name, ids in zip(at, answers, strict=True):
            if num_before + len(ids) > longest:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {longest} tokens, but the prompt with {name} has "
                    f"{num_before + len(ids)}. Shorten the prompt.",
                    param=name,
                )
            other = seen.setdefault(tuple(ids), name)
            if other != name:
                raise InvalidRequest(
                    f"{name} has the same tokens as {other}, so this model cannot tell them apart. Change one of them.",
                    param=name,
                )

    def _refuse_far_too_long(self, text: str) -> None:
        """Megabytes of text take seconds to tokenize, and every other request would wait."""
        fewest, longest = self.tokenizer.min_tokens(text), self.limits.max_model_len
        if fewest > longest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, but prompt has at least {fewest}. "
                "Shorten it.",
                param="prompt",
            )

    def _resolve(self, request: GenerateRequest, num_prompt: int) -> SamplingParams:
        """The client's fields, then the checkpoint's generation defaults, then the server's."""
        sampling = request.sampling
        changes: dict[str, object] = {}
        for name in _DEFAULTABLE:
            value = getattr(self.defaults, name)
            if value is not None and name not in request.explicit:
                changes[name] = value
        field = request.prompt.at if isinstance(request.prompt, Chat) else "prompt"
        longest = self.limits.max_model_len
        if num_prompt == 0:
            raise InvalidRequest(f"{field} has no tokens. Give at least one.", param=field)
        scoring_only = sampling.max_tokens == 0
        if num_prompt + (not scoring_only) > longest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, but {field} has {num_prompt}. Shorten it.",
                param=field,
            )
        asked = sampling.max_tokens
        if asked is None:
            changes["max_tokens"] = min(longest - num_prompt, self.defaults.max_new_tokens or longest)
        elif num_prompt + asked > longest and request.lowers_max_tokens:
            changes["max_tokens"] = longest - num_prompt
        elif num_prompt + asked > longest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, but {num_prompt + asked} were asked for "
                f"({num_prompt} in {field}, {asked} to generate). Shorten {field}, "
                f"or set max_tokens to {longest - num_prompt} or less.",
                param="max_tokens",
            )
        if sampling.min_tokens > (asked if asked is not None else longest - num_prompt):
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, more than the "
                f"{asked if asked is not None else longest - num_prompt} tokens that may be generated.",
                param="min_tokens",
            )
        return msgspec.structs.replace(sampling, **changes) if changes else sampling

    def _check_resumes(self, resumes: Continuation, sampling: SamplingParams, num_prompt: int) -> None:
        """Only an answer with one choice, given by this same model, can be continued."""
        if sampling.width != 1 or sampling.use_beam_search:
            raise InvalidRequest(
                f"An answer of {sampling.width} choices cannot be continued. Send the request again.", param="resumes"
            )
        size, length = self.limits.vocab_size, num_prompt + len(resumes.token_ids)
        bad = next((t for t in resumes.token_ids if not 0 <= t < size), None)
        if bad is not None or length > self.limits.max_model_len:
            raise InvalidRequest(
                f"The answer to be continued has token id {bad}, which this model does not have. "
                "Send the request again."
                if bad is not None
                else f"The answer to be continued has {length} tokens with its prompt, but this model holds "
                f"{self.limits.max_model_len}. Send the request again.",
                param="resumes",
            )

    def _watermark_of(self, sampling: SamplingParams) -> Watermark | None:
        """The watermark of an answer. Raises InvalidRequest where it is asked for, or must be there, and cannot be."""
        if self._watermark is None and sampling.watermark:
            raise InvalidRequest(
                "This model has no watermark. Leave watermark out, or set the model's watermark in its configuration.",
                param="watermark",
            )
        if self._watermark is None or not (sampling.watermark or self._is_always_marked):
            return None
        if sampling.use_beam_search:
            raise InvalidRequest(
                "Beam search cannot have a watermark, which is part of this answer. Leave use_beam_search out.",
                param="use_beam_search",
            )
        return self._watermark

    def _check_ids(self, sampling: SamplingParams) -> None:
        size = self.limits.vocab_size
        for name, ids in (
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            bad = next((t for t in ids if not 0 <= t < size), None)
            if bad is not None:
                raise InvalidRequest(
                    f"{name} contains token id {bad}, but this model's ids are 0 to {size - 1}.", param=name
                )
        if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty: no token could be generated. Leave it out to allow all.",
                param="allowed_token_ids",
            )
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if count is not None and count > size:
                raise InvalidRequest(f"{name} is {count}, but this model has only {size} tokens.", param=name)

    def _check_width(self, sampling: SamplingParams, num_prompt: int) -> None:
        if not sampling.use_beam_search:
            return
        limits, width = self.limits, sampling.width
        param = "best_of" if sampling.best_of is not None else "n"
        if width > limits.max_num_seqs:
            raise InvalidRequest(
                f"{param} is {width} beams, but this model runs at most {limits.max_num_seqs} sequences together.",
                param=param,
            )
        if width * (len(self.eos_ids) + 1) > limits.vocab_size:
            raise InvalidRequest(
                f"{param} is {width} beams, too many for a model of {limits.vocab_size} tokens.", param=param
            )
        per_beam = -(-(num_prompt + (sampling.max_tokens or 0)) // limits.block_size) + 1
        if width * per_beam > limits.num_blocks:
            raise InvalidRequest(
                f"{width} beams of up to {num_prompt + (sampling.max_tokens or 0)} tokens need {width * per_beam} KV "
                "blocks, "
                f"but this model has {limits.num_blocks}. Lower {param} or max_tokens.",
                param=param,
            )

    def _bad_words(self, sampling: SamplingParams, owner: Owner) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a text and after a space (as vLLM does)."""
        found: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, False, owner))
                if ids:
                    found[ids] = None
        return tuple(found)


# Field -> least and greatest value. The OpenAI and vLLM APIs' own limits are the gateway's and narrower.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "length_penalty": (-100.0, 100.0),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "n": (1, 1024),
    "best_of": (1, 1024),
    "logprobs": (0, 2**31 - 1),
    "prompt_logprobs": (0, 2**31 - 1),
}


def check_ranges(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for a value that no model supports."""
    for name, (least, greatest) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not least <= value <= greatest:  # also false for NaN
            raise InvalidRequest(f"{name} is {value}, but must be from {least:g} to {greatest:g}.", param=name)
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        raise InvalidRequest(
            f"best_of is {sampling.best_of}, fewer than n = {sampling.n}. Raise best_of or lower n.", param="best_of"
        )
    bad = next((b for b in sampling.logit_bias.values() if not abs(b) <= 1e6), None)
    if bad is not None:
        raise InvalidRequest(
            f"logit_bias has a bias of {bad}, but each must be from -1000000 to 1000000.", param="logit_bias"
        )
    if any(not text for text in sampling.stop):
        raise InvalidRequest(
            "stop contains an empty string, which would end every answer at once. Leave it out.", param="stop"
        )


def _check_fit(form: AnswerForm, sampling: SamplingParams, grammar: CompiledGrammar | None) -> None:
    """Raises InvalidRequest where no answer fits into its tokens."""
    if grammar is None or form.may_be_any_text:
        raise InvalidRequest(
            "fit is true, but the answer may be any text. Send response_format or another field that says its form, a "
            "tool_choice that forces a call, or leave fit out.",
            param="fit",
        )
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"fit cannot be combined with {name}, which may ban the end of an answer. Leave one of them out.",
                param="fit",
            )
    if grammar.plan is None:
        raise InvalidRequest(
            f"fit is not available for {grammar.at}: no end of an answer was found within the limits of the search. "
            "Send a simpler constraint, or leave fit out.",
            param="fit",
            code="unsupported_parameter",
        )
    if len(grammar.plan) > (sampling.max_tokens or 0):
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens}, but the shortest answer found for {grammar.at} has "
            f"{len(grammar.plan)} tokens. Set max_tokens to {len(grammar.plan)} or more, or leave fit out.",
            param="max_tokens",
        )


def _joined(messages: list[JSON]) -> list[JSON]:
    """Messages of one role that follow one another and have text alone, as one."""
    found: list[JSON] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and last["role"] == message["role"] and last.keys() == message.keys() == _PLAIN:
            found[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    return found


def _salt(request: GenerateRequest, adapter: LoadedAdapter | None) -> bytes:
    """The salt that separates the cached prefixes of tenants and of adapters; empty for anonymous requests of the
    base."""
    if not request.tenant and not request.cache_salt and adapter is None:
        return b""
    text = f"{len(request.tenant)}:{request.tenant}{request.cache_salt}"
    # The identity has one length, so no text can stand for one.
    key = b"" if adapter is None else adapter.identity
    return hashlib.blake2b(text.encode(), digest_size=32, key=key).digest()
