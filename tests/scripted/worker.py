"""A worker process whose generating model answers from the script beside its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.scripted import Script

from inferd.answer_form import Choices
from inferd.backend import FOR_EVER, Wait
from inferd.config import ModelConfig
from inferd.engine.engine import Engine
from inferd.engine.forms import Resolved
from inferd.engine.load import Progress, create_backend
from inferd.errors import InvalidRequest
from inferd.machine.weight_memory import WeightMemory
from inferd.structured.guide import CompiledGrammar
from inferd.types import GenerateRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher


def create(
    name: str,
    config: ModelConfig,
    progress: Progress,
    weight_memory: WeightMemory | None = None,
    far: str = "",
    leaving: object = None,
) -> Engine:
    engine = create_backend(name, config, progress, weight_memory)
    script, forms = Script.load(Path(config.source)), engine._preparer._forms
    tokenizer = engine._preparer.tokenizer
    resolve = forms.resolve

    def scripted(request: GenerateRequest, prompt_ids: Sequence[int], *, wait: Wait | None = FOR_EVER) -> Resolved:
        # First, because a request that would take long here is refused and resolved again elsewhere: it counts once.
        resolved = resolve(request, prompt_ids, wait=wait)
        answer = script.answer_to(request)
        grammar = resolved.grammar
        if answer is None:
            return resolved
        forced = forms.compiler.compile(Choices(texts=(answer,), at="script"))
        if grammar is None:
            return resolved._replace(grammar=forced)
        matcher = grammar.guide().matcher
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        allowed = matcher.try_consume_tokens(tokens)
        if allowed < len(tokens) or not may_end(grammar, matcher):
            so_far = tokenizer.decode(tokens[:allowed], skip_special_tokens=False)
            raise InvalidRequest(
                f"{grammar.at} does not allow the script's answer {answer!r}: it allows {so_far!r}", param=grammar.at
            )
        # The whole answer is checked as without a script.
        forced = CompiledGrammar(
            forced._base,
            forced.vocabulary,
            grammar.at,
            grammar.digest,
            grammar.validator,
            grammar.call_validators,
            loose_validators=grammar.loose_validators,
        )
        return resolved._replace(grammar=forced)

    forms.resolve = scripted  # type: ignore[method-assign]
    return engine


def may_end(grammar: CompiledGrammar, matcher: LLMatcher) -> bool:
    """Whether the answer may end in this state."""
    return matcher.is_stopped() or any(matcher.validate_tokens([i]) for i in grammar.vocabulary.eos_ids)


if __name__ == "__main__":
    from inferd.worker.main import main

    main(create=create)
