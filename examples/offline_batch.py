"""Many prompts without a server: the model runs in this process."""

from __future__ import annotations

from inferd import LLM, SamplingParams

questions = ["What is inferd?", "What is 2 plus 3?", "How do I start the server?"]
with LLM("demo") as llm:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    for question, completion in zip(
        questions, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64)), strict=True
    ):
        print(f"{question}\n  {completion.text}\n")
