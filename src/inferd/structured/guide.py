"""A compiled grammar, and the state of one answer that it constrains: which tokens may follow, whether it is complete,
and whether it is valid.

An answer ends by a token that ends answers (EOS), which is allowed where the text so far satisfies the constraint, or
at once where nothing else may follow.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from inferd.errors import InferdError, InternalError, InvalidRequest
from inferd.structured.check import TaggedValidator, Validator
from inferd.structured.closing import Closing, Plan, Position
from inferd.structured.names import Place
from inferd.structured.place_behind import place_behind
from inferd.structured.vocabulary import Tokens, Vocabulary
from inferd.types import CallDelta

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LIMITS = (
    "max is",
    "too big",
    "too large",
    "too many",
    "limit",
    "fuel",
    "TooComplex",
)  # words of errors that are no defects

_log = logging.getLogger("inferd.engine")


INVALID_ANSWER: Final = "invalid_answer"
"""The code of an error: the masks let an answer through that does not satisfy its schema."""


class CompiledGrammar:
    """The grammar of one form of answers. ``digest`` names it in logs; its text never goes there."""

    __slots__ = (
        "_base",
        "_lock",
        "at",
        "call_validators",
        "closing",
        "digest",
        "has_rules_for_names",
        "is_spent",
        "loose_validators",
        "may_lead_nowhere",
        "place",
        "plan",
        "quotes",
        "validator",
        "vocabulary",
    )

    def __init__(
        self,
        base: LLMatcher,
        vocabulary: Vocabulary,
        at: str,
        digest: str,
        validator: Validator | TaggedValidator | None,
        call_validators: dict[str, Validator] | None = None,
        place: Place | None = None,
        *,
        has_rules_for_names: bool = False,
        closing: Closing | None = None,
        loose_validators: dict[str, Validator] | None = None,
        may_lead_nowhere: bool = False,
    ) -> None:
        self._base = base
        self._lock = threading.Lock()
        self.vocabulary = vocabulary
        self.quotes = vocabulary.quotes
        self.at = at
        self.digest = digest
        self.validator = validator  # of the whole text, where the constraint has schemas
        self.call_validators = call_validators or {}  # of the arguments of a call, by the tool's name
        self.loose_validators = loose_validators or {}  # the same, of tools whose schemas are not enforced
        self.place = place  # before an answer that has JSON texts
        self.has_rules_for_names = has_rules_for_names  # a name may have no other end than that of another one
        self.may_lead_nowhere = may_lead_nowhere  # the client's own grammar may have a part that no text is of
        # The states that answers need are kept for all answers and have one limit. Once it is reached, each new state
        # is an error, and the form must be compiled again.
        self.is_spent = False
        self.closing = closing  # None: answers need not fit into their tokens
        # The end of an answer that has not begun. None: none is found, or none is needed.
        self.plan = None if closing is None else closing.first(Position(base.deep_copy(), place))[0]

    def guide(self, num_endless: float = 0, end_ids: Collection[int] = ()) -> Guide:
        """The state of a new answer. Safe to call from several threads.

        Before ``num_endless`` tokens the answer ends (by one of ``end_ids``) only where nothing else may follow.
        """
        with self._lock:
            return Guide(self._base.deep_copy(), self, num_endless, end_ids)


class Guide:
    """Belongs to the step loop, except while a mask is computed (``matcher``)."""

    __slots__ = (
        "_calls",
        "_certain",
        "_end_ids",
        "_grammar",
        "_in_text",
        "_knows_certain",
        "_num_endless",
        "_num_tokens",
        "_plan",
        "_texts",
        "is_over",
        "matcher",
        "must_fit",
        "num_unmatched",
        "place",
        "takes_whole_masks",
    )

    def __init__(
        self, matcher: LLMatcher, grammar: CompiledGrammar, num_endless: float = 0, end_ids: Collection[int] = ()
    ) -> None:
        self.matcher = matcher
        self._grammar = grammar
        self._num_endless = num_endless
        self._end_ids = end_ids
        self._num_tokens = 0
        self.is_over = False  # no token but the end may follow, or the matcher failed
        self.must_fit = grammar.closing is not None  # the answer must be complete within its tokens
        self._texts: list[str] = []
        # For names that a JSON text must not repeat; None: the answer has no JSON text, or had no choice.
        self.place = grammar.place
        self._in_text = False  # the place is in a text that is no name, so that few tokens change it
        self.takes_whole_masks = False  # the grammar knows all that may follow (see ``narrow``)
        self._certain: int | None = None  # see ``certain``
        self._knows_certain = False  # it is that of the present state
        self._calls: list[tuple[str, list[str]]] = []  # name and parts of the arguments
        self._plan: Plan = grammar.plan or ()
        self.num_unmatched = 0  # calls of the whole answer that do not match a schema that is not enforced

    def push(self, token_id: int) -> bool:
        """The answer goes on with this token. Whether the answer is complete: no other token may follow."""
        self._num_tokens += 1
        if not self._in_text or not self._grammar.quotes.is_unmarked[token_id]:
            self.place = place = self._behind(self.place, token_id)
            self._in_text = _is_in_text(place)
        self.takes_whole_masks = self._num_tokens >= self._num_endless and (
            self.place is None or (self._in_text and not self._grammar.quotes.may_repeat_in_text)
        )
        self._knows_certain = False
        is_taken = self.matcher.consume_token(token_id)
        self.is_over = self.matcher.is_stopped()
        return is_taken and self.is_over

    def fit(self, token_id: int, num_left: int) -> int:
        """The token, if the answer can be complete within ``num_left`` tokens with it; else the next one of the plan.

        The answer must go on with the token that is returned. Where answers need not fit (``must_fit``), it is the
        same.
        """
        closing, plan = self._grammar.closing, self._plan
        if closing is None:
            return token_id
        if plan and token_id == plan[0]:
            self._plan = plan[1:]
            return token_id
        following = closing.next(Position(self.matcher, self.place), token_id, plan, num_left - 1)
        if following is None:
            token_id, following = plan[0], plan[1:]
        self._plan = following
        return token_id

    def _behind(self, place: Place | None, token_id: int, tokens: Sequence[int] = ()) -> Place | None:
        """The place behind a token of the answer, which follows ``tokens``."""
        return place_behind(place, token_id, self._grammar.vocabulary, self.matcher, tokens)

    def goes_on(self, tokens: Sequence[int]) -> list[bool]:
        """Whether the answer is inside of a text of its JSON, so that it cannot end: now, and behind each of these
        tokens."""
        place, in_text = self.place, self._in_text
        found = [in_text]
        for number, token_id in enumerate(tokens):
            if not in_text or not self._grammar.quotes.is_unmarked[token_id]:
                place = self._behind(place, token_id, tokens[:number])
                in_text = _is_in_text(place)
            found.append(in_text)
        return found

    def vouches_for(self, token_id: int) -> bool:
        """Whether the token certainly may follow. False: only the mask tells."""
        if not self.takes_whole_masks:
            return False
        certain = self.certain()  # a mask has no other spelling of it
        return self.matcher.validate_tokens([token_id]) == 1 if certain is None else certain == token_id

    def ends_too_early(self, token_id: int) -> bool:
        """Whether the token ends the answer before its text satisfies the constraint."""
        return token_id in self._grammar.vocabulary.eos_ids and not self.matcher.validate_tokens([token_id])

    def narrow(self, words: np.ndarray) -> None:
        """Take out of a mask [W] int32 what the grammar knows nothing of: tokens that repeat a name of an object, and
        early ends."""
        place, quotes = self.place, self._grammar.quotes
        if place is not None and (not self._in_text or quotes.may_repeat_in_text):
            quotes.ban(words, place, self._mask_behind if self._grammar.has_rules_for_names else None)
        if self._num_tokens < self._num_endless:
            rest = without(words, self._end_ids)
            if rest.any():  # else only these tokens may follow
                words[:] = rest

    def _mask_behind(self, tokens: Sequence[int]) -> np.ndarray:
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(list(tokens))
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)

    def certain(self) -> int | None:
        """The only token that may follow now, in the tokenizer's usual spelling; None: there is a choice, or none is
        known without a mask."""
        if self.is_over:
            return None
        if not self._knows_certain:
            forced = self.matcher.compute_ff_tokens()
            self._certain = forced[0] if forced and forced[0] not in self._grammar.vocabulary.eos_ids else None
            self._knows_certain = True
        return self._certain

    def num_possible(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may follow one another now."""
        return self.matcher.validate_tokens(list(tokens))

    def hear(self, text: str) -> None:
        """Text of the answer, as it will be sent."""
        self._texts.append(text)

    def hear_call(self, part: CallDelta) -> None:
        """A part of a call, as it will be sent."""
        if part.name is not None:
            self._calls.append((part.name, []))
        self._calls[-1][1].append(part.arguments)

    def check(self) -> InferdError | None:
        """The answer is whole: read its text and its calls by other code than the masks'. None: they are valid."""
        validator, problem = self._grammar.validator, None
        self.num_unmatched = 0
        if validator is not None and not self._calls:
            problem = validator.errors("".join(self._texts))
        for name, parts in self._calls:
            arguments = _last_named("".join(parts))
            of_tool, loose = self._grammar.call_validators.get(name), self._grammar.loose_validators.get(name)
            problem = problem or (None if of_tool is None else of_tool.errors(arguments))
            self.num_unmatched += loose is not None and loose.errors(arguments) is not None
        if problem is None:
            return None
        if self._grammar.place is not None and self.place is None:  # no other name was left, see ``narrow``
            at = self._grammar.at
            return InvalidRequest(
                f"{at}: an object of the answer needed another property, and had used every name that its rules allow. Ask "
                "for fewer properties, or allow more names.",
                param=at,
                code="unsupported_schema",
            )
        _log.error("an answer does not satisfy the schema %s: %s", self._grammar.digest, problem)
        return InternalError(
            f"The answer does not satisfy {self._grammar.at}. This is a defect of the server; its log has the details.",
            code=INVALID_ANSWER,
        )

    def failure(self) -> InferdError | None:
        """Why the answer cannot go on; None: it can."""
        if not self.matcher.is_error():
            return None
        at = self._grammar.at
        error = self.matcher.get_error()
        if any(word in error for word in _LIMITS):
            self._grammar.is_spent = True
            return InvalidRequest(
                f"{at} takes more work than one token of an answer may take. Send a simpler constraint.",
                param=at,
                code="constraint_too_complex",
            )
        refusal = unwritable(at, self._grammar.vocabulary, error)
        if refusal is not None:
            return refusal
        if self._grammar.may_lead_nowhere and error.startswith("NoExt"):
            return InvalidRequest(
                f"{at}: no text may follow the first {self._num_tokens} tokens, because a part of the grammar that they "
                "begin has no text. Leave this part out, or give it a text.",
                param=at,
                code="invalid_grammar",
            )
        _log.error("the masks of the constraint %s failed: %s", self._grammar.digest, error)
        return InternalError(
            f"The masks of {at} failed after {self._num_tokens} tokens. This is a defect of the server."
        )


def _is_in_text(place: Place | None) -> bool:
    return place is not None and place.is_free_text and not place.is_escaped


def without(words: np.ndarray, token_ids: Iterable[int]) -> np.ndarray:
    """A copy of a mask [W] int32 that forbids these tokens too."""
    rest = words.copy()
    for token in token_ids:
        rest.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFF_FFFF)
    return rest


def unwritable(at: str, vocabulary: Tokens, problem: str) -> InvalidRequest | None:
    """The refusal of a constraint that the tokens of a model cannot satisfy; None: ``problem`` is another one."""
    if not vocabulary.missing or not (problem.startswith("NoExt") or "forced bytes" in problem):
        return None
    return InvalidRequest(
        f"{at}: no text that the tokenizer of this model can write satisfies it, because no token stands for the "
        f"characters {vocabulary.missing[:16]!r} alone. Send a constraint without them, or use another model.",
        param=at,
        code="unsupported_schema",
    )


def _last_named(arguments: str) -> str:
    """Arguments in which of members of one name only the last is left, as clients read them."""
    try:
        return json.dumps(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments
