"""From a constraint to a compiled grammar, with limits on time and memory.

A compiled grammar is shared by all answers that it constrains; each has a ``Guide`` of its own. Compiled grammars and
refusals are kept, the least recently used are dropped first. What is certainly cheap is compiled at once. Anything else
is tried in a process of its own first (``trial``), and compiled here when it has passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec

from inferd.answer_form import JSON, Choices, Constraint, Grammar, JsonSchema, TaggedText
from inferd.backend import FOR_EVER, TakesLong, Wait
from inferd.checkpoints.answers.grammar import AnswerGrammar
from inferd.errors import InvalidRequest
from inferd.machine.slices import shorten_slices
from inferd.structured.check import TaggedValidator, Validator, readable
from inferd.structured.closing import LEAF_FUEL, Closing, Position
from inferd.structured.grammar_text import Form, text_of, written_part
from inferd.structured.guide import CompiledGrammar
from inferd.structured.matching import grammar_of, matcher_of, plain_matcher
from inferd.structured.names import Place, first_place
from inferd.structured.outline import Outline
from inferd.structured.refused import refusal
from inferd.structured.schema import normalise
from inferd.structured.trial.client import LimitReached, Trials
from inferd.structured.trial.task import Result, Task
from inferd.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_BYTES: Final = 1_048_576  # of a constraint, written as JSON
_MOST_KEPT = 64
_MOST_CHECKED = 1024
_CHEAP_BYTES: Final = 4096  # of a form that may be compiled without a trial
_COSTLY: Final = re.compile(  # keywords that combine schemas or write expressions, and numbers that repeat something
    rb'"(?:allOf|oneOf|not|if|then|else|pattern\w*|propertyNames|contains|uniqueItems|multipleOf|depend\w+|unevaluated\w+'
    rb'|\$dynamic\w+|\$recursive\w+)"|[:,\[]-?(?:\d{4}|[\d.]+[eE])'
)
_BRANCHING: Final = re.compile(rb'"(?:anyOf|\$ref)"')
_MOST_BRANCHES: Final = 8
_SHORT_S: Final = 0.01  # of compiling; what takes longer leaves contended cores to the steps
_NICE: Final = 10


class Compiler:
    """Compiles constraints for one vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.trials = Trials(vocabulary)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], CompiledGrammar | InvalidRequest] = OrderedDict()
        self._checked: OrderedDict[tuple[str, bytes], InvalidRequest | None] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def compile(
        self,
        constraint: Constraint | None,
        tenant: str = "",
        frame: AnswerGrammar | None = None,
        *,
        fits: bool = False,
        wait: Wait | None = FOR_EVER,
    ) -> CompiledGrammar:
        """A grammar kept for one tenant serves no other. Raises InvalidRequest, which names the constraint's field;
        TakesLong where a trial is needed and there is no ``wait``; and WaitEndedError where this was ended, which ends
        the trial.

        ``frame``: the grammar of the whole answer, in which the constraint's grammar has a place. ``fits``: the grammar
        knows how its answers end, so that they can be made to fit into their tokens.
        """
        form = Form(constraint, frame)
        written = msgspec.json.encode(form)
        if len(written) > MOST_BYTES:
            raise InvalidRequest(
                f"{form.at} has {len(written)} bytes, but a constraint may have at most {MOST_BYTES}. "
                "Send a smaller one.",
                param=form.at,
            )
        key = tenant, hashlib.blake2b(written, digest_size=16, person=b"fits" if fits else b"").digest()
        with self._lock:
            known = self._kept.get(key)
            if isinstance(known, CompiledGrammar) and known.is_spent:
                known = None
            if known is not None:
                self._kept.move_to_end(key)
        if known is None:
            known = self._compile(form, written, key, wait, fits=fits)
            with self._lock:
                self._kept[key] = known
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(known, InvalidRequest):
            raise InvalidRequest(known.message, param=known.param, code=known.code)
        return known

    def refusals(
        self, schemas: Sequence[tuple[JSON | bool, str]], tenant: str = "", *, wait: Wait | None = FOR_EVER
    ) -> list[InvalidRequest | None]:
        """Why each of the schemas cannot be enforced; ``None``: it can. Each comes with the field that holds it. Raises
        TakesLong and WaitEndedError as ``compile`` does."""
        keys = [(tenant, _digest(schema, at)) for schema, at in schemas]
        with self._lock:
            found = {key: self._checked[key] for key in keys if key in self._checked}
        new = {key: schema for key, schema in zip(keys, schemas, strict=True) if key not in found}
        costly = {key: given for key, given in new.items() if not _is_cheap(msgspec.json.encode(given))}
        if costly:
            if wait is None:
                raise TakesLong
            found.update(zip(costly, self._try_schemas(list(costly.values()), tenant, wait), strict=True))
        found.update((key, _refusal_of(*given)) for key, given in new.items() if key not in costly)
        with self._lock:
            for key in keys:
                self._checked[key] = found[key]
                self._checked.move_to_end(key)
            while len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)
        return [found[key] for key in keys]

    def close(self) -> None:
        """End the thread and the process that compile. Idempotent."""
        self.trials.close()
        with self._lock:
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)
                self._thread = None

    def _try_schemas(
        self, schemas: list[tuple[JSON | bool, str]], tenant: str, wait: Wait
    ) -> list[InvalidRequest | None]:
        try:
            refusals = self.trials.run(Task(schemas=tuple(schemas)), tenant, wait).refusals
        except LimitReached as error:
            return [InvalidRequest(f"{at}: {error.limit}. Send a simpler one.", param=at) for _, at in schemas]
        return [None if one is None else one.error() for one in refusals]

    def _compile(
        self, form: Form, written: bytes, key: tuple[str, bytes], wait: Wait | None, *, fits: bool
    ) -> CompiledGrammar | InvalidRequest:
        """The grammar, or why there is none."""
        tenant, digest = key[0], key[1].hex()
        try:
            if not fits and _is_cheap(written) and _has_no_expression(form.constraint):
                return self._compiled(form, grammar_of(form, self.vocabulary), digest)
            if wait is None:
                raise TakesLong
            result = self._tried(form, tenant, wait)
            if not fits and result.compile_s < _SHORT_S:
                return self._compiled(form, result.grammar, digest)
            with self._lock:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "inferd-compile", _lower_share)
                future = self._thread.submit(self._compiled, form, result.grammar, digest, fits=fits)
            is_known = threading.Event()
            future.add_done_callback(lambda _: is_known.set())
            with wait.stopped_by(is_known.set), wait.stopped_by(future.cancel):
                is_known.wait()
            return future.result()
        except InvalidRequest as error:
            return error

    def _tried(self, form: Form, tenant: str, wait: Wait) -> Result:
        """What became of a trial of the form. Raises InvalidRequest."""
        try:
            result = self.trials.run(Task(form=form), tenant, wait)
        except LimitReached as error:
            raise refusal(form, error.limit) from None
        for one in result.refusals:
            if one is not None:
                raise one.error()
        return result

    def _compiled(self, form: Form, grammar: str, digest: str, *, fits: bool = False) -> CompiledGrammar:
        constraint, frame = form
        loose = ((name, readable(schema)) for name, schema in (() if frame is None else frame.relaxed))
        base: LLMatcher = matcher_of(form, grammar, self.vocabulary)
        return CompiledGrammar(
            base,
            self.vocabulary,
            form.at,
            digest,
            _validator_of(constraint),
            None if frame is None else {name: Validator(schema) for name, schema in frame.tools},
            _first_place(constraint, frame),
            has_rules_for_names='"patternProperties"' in grammar,
            closing=_closing_of(grammar, frame, self.vocabulary) if fits else None,
            loose_validators={name: validator for name, validator in loose if validator is not None},
            may_lead_nowhere=isinstance(constraint, Grammar),
        )


def _is_cheap(written: bytes) -> bool:
    """Whether a form that is written so is certain to be compiled in some milliseconds."""
    return (
        len(written) <= _CHEAP_BYTES
        and _COSTLY.search(written) is None
        and len(_BRANCHING.findall(written)) <= _MOST_BRANCHES
    )


def _has_no_expression(constraint: Constraint | None) -> bool:
    """Whether it has no regular expression and no grammar of the request's own."""
    if isinstance(constraint, JsonSchema):
        return not constraint.whitespace
    return constraint is None or isinstance(constraint, Choices)


def _digest(schema: JSON | bool, at: str) -> bytes:
    return hashlib.blake2b(msgspec.json.encode((schema, at)), digest_size=16).digest()


def _refusal_of(schema: JSON | bool, at: str) -> InvalidRequest | None:
    try:
        normalise(schema, at)
    except InvalidRequest as error:
        return error
    return None


def _closing_of(grammar: str, frame: AnswerGrammar | None, vocabulary: Vocabulary) -> Closing:
    """The search for ends of the answers of a grammar."""
    plain, fuel = Closing(vocabulary), LEAF_FUEL

    def spell(schema: JSON) -> str | None:
        nonlocal fuel
        base = plain_matcher(text_of([written_part("value", schema, "")]), vocabulary)
        plan, fuel = plain.first(Position(base, first_place((), is_begun=True)), fuel)
        return None if plan is None else vocabulary.text(plan)

    schemas = [part["json_schema"] for part in json.loads(grammar)["grammars"] if "json_schema" in part]
    hints = [text for schema in schemas for text in Outline(schema, spell).texts]
    return Closing(vocabulary, hints, frame.ends if frame is not None else ())


def _lower_share() -> None:
    """Give the calling thread a small share of contended cores, where the system has a share for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        shorten_slices()


def _validator_of(constraint: Constraint | None) -> Validator | TaggedValidator | None:
    match constraint:
        case JsonSchema(schema=schema):
            return Validator(schema)
        case TaggedText():
            return TaggedValidator(constraint)
    return None


def _first_place(constraint: Constraint | None, frame: AnswerGrammar | None) -> Place | None:
    """The place before an answer, for the names of its JSON texts."""
    match constraint:
        case JsonSchema() if frame is None:
            return first_place((), is_begun=True)
        case JsonSchema() if frame is not None:
            return first_place((*frame.before_arguments, *frame.before_answer), is_begun=frame.may_begin_with_answer)
        case TaggedText(structures=structures):
            begins = [structure.begin for structure in structures]
            return first_place((*begins, *(frame.before_arguments if frame is not None else ())), is_begun=False)
    return first_place(frame.before_arguments if frame is not None else (), is_begun=False)
