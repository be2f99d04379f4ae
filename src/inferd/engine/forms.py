"""What the form of a request means for one checkpoint: the parser of its answers, and the grammar that binds them.

A call that may occur in an answer is constrained from its first tag on. Where the schema of a tool cannot be enforced,
a request that insists on it is refused: by ``strict``, or by a ``tool_choice`` that forces a call. Another request gets
arguments that are a JSON object, as far as the notation writes JSON, and is told which schemas are not enforced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inferd.answer_form import AnswerForm
from inferd.backend import FOR_EVER, Wait
from inferd.checkpoints.answers.grammar import AnswerGrammar, NotExpressible, Tool, answer_grammar
from inferd.checkpoints.answers.notation import Notation, Parsing, callable_tools
from inferd.errors import InvalidRequest
from inferd.structured.compiled import Compiler
from inferd.structured.guide import CompiledGrammar
from inferd.types import Chat, GenerateRequest


class Resolved(NamedTuple):
    """How the answers of a request are parsed, and what binds them."""

    parsing: Parsing | None = None  # None: an answer is plain text
    grammar: CompiledGrammar | None = None  # None: it is any text
    unenforced: tuple[str, ...] = ()  # fields of the request with schemas of tools that do not bind the answer


class Forms:
    """Resolves forms for one checkpoint. ``notation``: None where its templates show none."""

    def __init__(self, compiler: Compiler, notation: Notation | None) -> None:
        self.compiler = compiler
        self._notation = notation

    def resolve(self, request: GenerateRequest, prompt_ids: Sequence[int], *, wait: Wait | None = FOR_EVER) -> Resolved:
        """Raises InvalidRequest, naming the field that cannot be met; TakesLong and WaitEndedError as ``Compiler``."""
        form = request.form
        if form is None:
            return Resolved()
        tools = request.prompt.tools if isinstance(request.prompt, Chat) else None
        parsing = None if self._notation is None else self._notation.parsing(form, tools, prompt_ids)
        must_call = form.tools is not None and form.tools.mode == "required"
        if must_call and (parsing is None or parsing.tools is None):
            raise InvalidRequest(
                "tool_choice forces a call, but the chat template of this model shows no notation of calls. Send "
                "'auto' or 'none', or set the model's chat_template to one that writes tool_calls.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        wanted: list[Tool] = []
        if parsing is not None and parsing.tools is not None and form.tools is not None:
            called = callable_tools(tools or (), form.tools)
            wanted = self._enforceable(called, request.tenant, wait)
        if request.sampling.use_beam_search:
            strict = next((tool.at for tool in wanted if tool.is_bound), None)
            if form.constraint is not None or strict is not None:
                at = "tool_choice" if must_call else f"the strict schema {strict}"
                at = at if form.constraint is None else form.constraint.at
                raise InvalidRequest(
                    f"use_beam_search cannot be combined with {at}. Leave one of them out.", param="use_beam_search"
                )
            return Resolved(parsing, None, tuple(tool.at for tool in wanted))
        return self._bound(request, form, parsing, wanted, wait)

    def _bound(
        self,
        request: GenerateRequest,
        form: AnswerForm,
        parsing: Parsing | None,
        wanted: list[Tool],
        wait: Wait | None,
    ) -> Resolved:
        """The grammar with the schemas of as many tools as it can enforce."""
        has_relaxed = False
        while True:
            try:
                frame = None if parsing is None else self._frame(form, parsing, wanted)
                grammar = None
                if form.constraint is not None or frame is not None:
                    grammar = self.compiler.compile(form.constraint, request.tenant, frame, fits=form.fit, wait=wait)
            except NotExpressible as error:
                refused, refusal = error.at, _not_expressible(error)
                if form.constraint is None and all(tool.schema is None for tool in wanted):
                    return Resolved(parsing, None, tuple(tool.at for tool in wanted))  # not even any arguments
            except InvalidRequest as error:
                refused, refusal = error.param or "", error
            else:
                return Resolved(parsing, grammar, tuple(tool.at for tool in wanted if tool.wished is not None))
            relaxed = [_without(tool, refused, is_whole=has_relaxed or refused == "tools") for tool in wanted]
            if relaxed == wanted:
                raise refusal
            wanted, has_relaxed = relaxed, True

    def opening(self, prompt_ids: Sequence[int]) -> str:
        """The text that precedes the text of an answer without reasoning."""
        return "" if self._notation is None else self._notation.opening(prompt_ids)

    def _enforceable(self, tools: Sequence[Tool], tenant: str, wait: Wait | None) -> list[Tool]:
        """The tools with schemas that the masks enforce. Raises InvalidRequest where the request insists on its own."""
        schemas = [(True if tool.schema is None else tool.schema, tool.at) for tool in tools]
        refusals = self.compiler.refusals(schemas, tenant, wait=wait)
        for tool, refusal in zip(tools, refusals, strict=True):
            if refusal is not None and tool.is_bound:
                raise InvalidRequest(refusal.message, param=refusal.param, code=refusal.code)
        return [tool if refusal is None else tool.relaxed() for tool, refusal in zip(tools, refusals, strict=True)]

    def _frame(self, form: AnswerForm, parsing: Parsing, wanted: Sequence[Tool]) -> AnswerGrammar | None:
        """The grammar of the whole answer; None: there is only the constraint, from the first token on.

        Raises NotExpressible.
        """
        assert self._notation is not None
        if not wanted and (form.constraint is None or not parsing.splits_reasoning):
            return None
        use = form.tools
        return answer_grammar(
            parsing.notation,
            special_ids=self._notation.special_ids,
            tools=wanted,
            is_required=use is not None and use.mode == "required",
            only_one=use is not None and not use.is_parallel,
            has_constraint=form.constraint is not None,
            splits_reasoning=parsing.splits_reasoning and parsing.may_reason,
            in_reasoning=parsing.in_reasoning,
        )


def _without(tool: Tool, refused: str, *, is_whole: bool) -> Tool:
    """The tool without its schema, where this is refused, or all are together, and the request does not insist."""
    if tool.is_bound or tool.schema is None or not (is_whole or refused.startswith(tool.at)):
        return tool
    return tool.relaxed()


def _not_expressible(error: NotExpressible) -> InvalidRequest:
    return InvalidRequest(
        f"{error.at} cannot be enforced: {error.reason}. Send a simpler schema, or leave out strict and the "
        "tool_choice that forces a call.",
        param=error.at,
        code="unsupported_schema",
    )
