"""instructor: typed answers in each of its modes for servers that speak OpenAI's or Anthropic's protocol."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

instructor = pytest.importorskip("instructor", reason="instructor is not installed; make test-clients installs it")
import anthropic  # noqa: E402
import openai  # noqa: E402

CITY = '{"name": "Oslo", "population": 700000}'
RULES = [
    Rule("which city", call("PartialCity", CITY), given='"name": "PartialCity"'),
    Rule("which city", call("City", CITY), given='"name": "City"'),
    Rule("which city.*markdown|markdown.*which city", f"```json\n{CITY}\n```"),
    Rule("which city", CITY),
    Rule("two cities", call("City", CITY) + "\n" + call("City", '{"name": "Rome", "population": 2800000}')),
    Rule("small city", call("City", CITY), times=1),
    Rule('"role": "tool"|"tool_result"', call("City", '{"name": "Moss", "population": 50000}')),
]
OSLO = ("Oslo", 700_000)


class City(pydantic.BaseModel):
    name: str
    population: int


@pytest.fixture(scope="module")
def server(serve: Serve) -> ScriptedServer:
    return serve(RULES)


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def of_openai(server: ScriptedServer, mode: str) -> Any:
    client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


MODES = ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_O1", "MD_JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_has_its_type(server: ScriptedServer, mode: str) -> None:
    city = of_openai(server, mode).create(
        model="scripted", response_model=City, messages=ask("which city?"), max_retries=0
    )
    assert (city.name, city.population) == OSLO


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "JSON_O1"])
def test_an_answer_comes_in_parts(server: ScriptedServer, mode: str) -> None:
    parts = of_openai(server, mode).create_partial(model="scripted", response_model=City, messages=ask("which city?"))
    city = list(parts)[-1]
    assert (city.name, city.population) == OSLO


def test_several_calls_are_several_values(server: ScriptedServer) -> None:
    from collections.abc import Iterable

    client = of_openai(server, "PARALLEL_TOOLS")
    cities = list(client.create(model="scripted", response_model=Iterable[City], messages=ask("two cities")))
    assert [city.name for city in cities] == ["Oslo", "Rome"]


def test_a_refused_value_is_asked_for_again(server: ScriptedServer) -> None:
    class Small(City):
        @pydantic.field_validator("population")
        @classmethod
        def _is_small(cls, population: int) -> int:
            if population > 100_000:
                raise ValueError("not a small city")
            return population

    Small.__name__ = "City"
    city = of_openai(server, "TOOLS").create(
        model="scripted", response_model=Small, messages=ask("small city"), max_retries=2
    )
    assert city.name == "Moss"


@pytest.mark.parametrize("mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_JSON"])
def test_a_message_has_its_type(server: ScriptedServer, mode: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    made = instructor.from_anthropic(client, mode=instructor.Mode[mode])
    city = made.create(
        model="scripted", response_model=City, messages=ask("which city?"), max_tokens=200, max_retries=0
    )
    assert (city.name, city.population) == OSLO
