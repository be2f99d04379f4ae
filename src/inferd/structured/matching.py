"""From grammars to llguidance's state before an answer, within limits on memory and work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferd.answer_form import Grammar, Regex
from inferd.structured.grammar_text import Form, Tries, grammars_of, parts_of, text_of
from inferd.structured.guide import unwritable
from inferd.structured.refused import refusal_of
from inferd.structured.vocabulary import Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_STATES = 50_000  # of a grammar's lexer, 1 to 2 kB each
_MOST_SYMBOLS: Final = 100_000
_MOST_ITEMS: Final = 10_000  # of a row of the parser: about four for each property of an object that may come next
_PROBED = 2  # tokens of an answer that are tried when its form is compiled


def grammar_of(form: Form, vocabulary: Tokens) -> str:
    """The text of the form's grammar. Raises InvalidRequest."""
    parts = grammars_of(form, _tries(vocabulary))
    if form.frame is not None and isinstance(form.constraint, Grammar | Regex):
        _check_has_text(form, form.constraint, vocabulary)
    return text_of(parts)


def _check_has_text(form: Form, constraint: Grammar | Regex, vocabulary: Tokens) -> None:
    """Refuse a constraint that no text satisfies: the mask engine does not notice it behind reasoning, which then has no
    end. Schemas are read before. Raises InvalidRequest."""
    alone = plain_matcher(text_of(parts_of(constraint)), vocabulary)
    has_next = any(alone.compute_bitmask())
    problem = alone.get_error() if alone.is_error() else "" if has_next else "NoExtension"
    if problem.startswith("NoExt"):
        raise unwritable(form.at, vocabulary, problem) or refusal_of(form, problem, _tries(vocabulary))


def matcher_of(form: Form, grammar: str, vocabulary: Tokens) -> LLMatcher:
    """The state before an answer of the form, whose grammar has this text. Raises InvalidRequest."""
    base = plain_matcher(grammar, vocabulary)
    problem = _problem(base, vocabulary)
    if problem is not None:
        raise unwritable(form.at, vocabulary, problem) or refusal_of(form, problem, _tries(vocabulary))
    return base


def _tries(vocabulary: Tokens) -> Tries:
    return lambda parts: _problem(plain_matcher(text_of(parts), vocabulary), vocabulary)


def plain_matcher(grammar: str, vocabulary: Tokens) -> LLMatcher:
    """The state before a text of a grammar. It may hold an error."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=_MOST_STATES,
        max_grammar_size=_MOST_SYMBOLS,
        max_items_in_row=_MOST_ITEMS,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits)


def _problem(base: LLMatcher, vocabulary: Tokens) -> str | None:
    """Try the first tokens. It finds what is too large, and computes what all answers need first.

    Returns the mask engine's message about what it refuses.
    """
    tried = base.deep_copy()
    for _ in range(1 + _PROBED):
        if tried.is_error():
            return tried.get_error()
        mask = int.from_bytes(tried.compute_bitmask(), "little")
        if not mask and not tried.is_error():
            return "NoExtension"
        if tried.is_stopped() or not mask:
            continue
        token = (mask & -mask).bit_length() - 1
        if token in vocabulary.eos_ids:
            return None
        tried.consume_token(token)
    return None
