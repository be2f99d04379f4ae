"""``inferd generate``: one answer on stdout, for shells and pipes."""

from __future__ import annotations

import sys

import click

from inferd.types import SamplingParams


@click.command("generate")
@click.argument("prompt")
@click.option(
    "--model", "source", default="demo", show_default=True, help="A folder, a Hugging Face Hub id, or 'demo'."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer, in tokens."
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=None, help="0 is greedy.  [default: the model's own]"
)
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Makes a sampled answer repeatable.")
@click.option("--system", default=None, help="System message that precedes the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
def command(
    prompt: str,
    source: str,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    system: str | None,
    raw: bool,
) -> int:
    """Answer PROMPT with a model loaded into this process; '-' reads the prompt from stdin.

    \b
    Examples:
      inferd generate "What is inferd?"
      inferd generate --model ./my-model --raw "Once upon a time" --max-tokens 100
      cat question.txt | inferd generate -
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise click.UsageError("The prompt is empty; give a text, or '-' and a text on stdin.")
    from inferd.llm import LLM

    with LLM(source) as llm:
        room = llm.info.max_model_len
        sampling = SamplingParams(
            max_tokens=min(max_tokens, room - 1), seed=seed, temperature=1.0 if temperature is None else temperature
        )
        set_by_user = ("max_tokens", "seed", *(() if temperature is None else ("temperature",)))
        messages = [{"role": "system", "content": system}] if system else []
        conversation = [*messages, {"role": "user", "content": prompt}]
        is_chat = llm.info.has_chat_template and not raw
        if system and not is_chat:
            raise click.UsageError("--system needs a model with a chat template, and no --raw.")
        for piece in llm.stream(conversation if is_chat else prompt, sampling, explicit=set_by_user):
            click.echo(piece, nl=False)
            sys.stdout.flush()
    click.echo()
    return 0
