"""langchain's own tests of a chat model, for its clients of the Chat Completions, Responses and Messages APIs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

_REASON = "langchain-tests and langchain-anthropic are not installed; make test-clients installs them"
suite: Any = pytest.importorskip("langchain_tests.integration_tests", reason=_REASON)
openai = pytest.importorskip("langchain_openai", reason=_REASON)
anthropic = pytest.importorskip("langchain_anthropic", reason=_REASON)

JOKE = '{"setup": "Why do cats sit?", "punchline": "They can."}'
RULES = [
    Rule(r"value of magic_function\(3\)", call("magic_function", '{"input": 3}')),
    Rule(r"value of magic_function_no_args\(\)", call("magic_function_no_args", "{}")),
    Rule("Hello!", call("get_weather", '{"location": "Paris"}'), times=1, given='"get_weather"'),
    Rule("Hello!", call("magic_function", '{"input": 3}'), given='"magic_function"'),
    Rule("Pirate greeting", call("greeting_generator", '{"answer_style": "pirate"}')),
    Rule(r"What is 3 \+ 4", call("my_adder_tool", '{"a": 3, "b": 4}')),
    Rule("San Francisco", call("get_weather", '{"location": "San Francisco, CA"}')),
    Rule("你好啊集团", call("unicode_customer", '{"customer_name": "你好啊集团", "description": "technology"}')),
    Rule("こんにちは", call("unicode_customer", '{"customer_name": "こんにちは株式会社", "description": "a company"}')),
    Rule("no punchline", '{"setup": "Why do cats sit?", "punchline": null}', given='"constraint": {'),
    Rule("no punchline", call("Joke", '{"setup": "Why do cats sit?", "punchline": null}')),
    Rule("joke about cats", JOKE, given='"constraint": {'),
    Rule("joke about cats", call("JokeDict", JOKE), given='"name": "JokeDict"'),
    Rule("joke about cats", call("Joke", JOKE), given='"name": "Joke"'),
    Rule("", "Thank you, and how are you?"),
]


@pytest.fixture(scope="module")
def scripted(serve: Serve) -> ScriptedServer:
    return serve(RULES)


class _Tests(suite.ChatModelIntegrationTests):  # type: ignore[misc]
    server: ScriptedServer

    @pytest.fixture(autouse=True)
    def _served(self, scripted: ScriptedServer) -> None:
        type(self).server = scripted

    @property
    def model_override_value(self) -> str:
        return "scripted"

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatCompletions(_Tests):
    @property
    def chat_model_class(self) -> Any:
        return openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "scripted",
            "base_url": self.server.api,
            "api_key": "none",
            "max_retries": 0,
            "stream_usage": True,  # the client asks no other server than OpenAI by itself
        }


class TestMessages(_Tests):
    @property
    def chat_model_class(self) -> Any:
        return anthropic.ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "base_url": self.server.url, "api_key": "none", "max_retries": 0}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return False  # the client has none


class TestResponses(TestChatCompletions):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
