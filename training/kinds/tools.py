"""Tool calls: choosing a function, filling its arguments, reporting its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from ..dialogue import Dialogue, Message, ToolCall, answer, say, user
from ..words import TOPICS, city, invented, person
from . import arithmetic, facts, general

_UNITS = ("USD", "EUR", "GBP", "JPY", "CHF", "INR")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "clear", "foggy", "snowy", "stormy")
_SUBJECTS = ("Hello", "Meeting", "Lunch", "Report", "Holiday", "Invoice", "Birthday", "Question")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as users offer it: names it goes by, what it takes, how people ask for it.

    ``slots`` maps a word in the questions to the names its argument goes by, its JSON type and how a
    value is drawn; ``result`` gives the function's answer and the sentence that reports it.
    """

    names: tuple[str, ...]
    description: str
    slots: Mapping[str, tuple[tuple[str, ...], str, Callable[[Random], object]]]
    asks: tuple[str, ...]
    result: Callable[[Random, Mapping[str, object]], tuple[object, str]]


def _weather(rng: Random, values: Mapping[str, object]) -> tuple[object, str]:
    degrees, sky = rng.randrange(-5, 38), rng.choice(_SKIES)
    key = rng.choice(("temperature", "temperature_c", "temp", "degrees"))
    sky_key = rng.choice(("condition", "conditions", "sky", "weather"))
    return {key: degrees, sky_key: sky}, f"It is {degrees} degrees and {sky} in {values['city']}."


def _time(rng: Random, values: Mapping[str, object]) -> tuple[object, str]:
    clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return {rng.choice(("time", "local_time")): clock}, f"It is {clock} in {values['city']}."


def _price(rng: Random, values: Mapping[str, object]) -> tuple[object, str]:
    price = rng.randrange(1, 100)
    return {rng.choice(("price", "value")): price}, f"The price of {values['symbol']} is {price}."


def _converted(rng: Random, values: Mapping[str, object]) -> tuple[object, str]:
    amount = rng.randrange(1, 100)
    return {
        rng.choice(("result", "amount")): amount
    }, f"{values['amount']} {values['from']} is {amount} {values['to']}."


def _done(key: str, sentence: str) -> Callable[[Random, Mapping[str, object]], tuple[object, str]]:
    def report(rng: Random, values: Mapping[str, object]) -> tuple[object, str]:
        return {rng.choice((key, "status")): rng.choice(("ok", "done"))}, sentence.format(**values)

    return report


def _calculated(rng: Random, values: Mapping[str, object]) -> tuple[object, str]:
    number = rng.randrange(1000)
    return {"result": number}, f"{values['sum']} = {number}"


_CITY = (("city", "location", "place", "town"), "string", city)

TOOLS = (
    Tool(
        ("get_weather", "weather", "get_current_weather", "current_weather", "lookup_weather"),
        "Get the current weather in a city",
        {"city": _CITY},
        ("What is the weather in {city}?", "How is the weather in {city}?", "What's the weather like in {city}?",
         "Is it raining in {city}?", "Tell me the weather in {city}.", "weather in {city}", "Is it cold in {city}?",
         "What is the temperature in {city}?", "How warm is it in {city} today?", "Do I need an umbrella in {city}?",
         "What is the weather in {city} today?", "Check the weather for {city}.", "What's the weather in {city} right now?"),
        _weather,
    ),
    Tool(
        ("get_time", "get_local_time", "current_time", "clock"),
        "Get the local time in a city",
        {"city": _CITY},
        ("What time is it in {city}?", "Tell me the time in {city}.", "What is the local time in {city}?",
         "time in {city}", "Which time is it now in {city}?"),
        _time,
    ),
    Tool(
        ("get_stock_price", "stock_price", "get_quote"),
        "Get the price of a stock",
        {"symbol": (("symbol", "ticker"), "string", lambda rng: invented(rng, 1).upper() + rng.choice(("", "X", "A")))},
        ("What is the price of {symbol}?", "How much is {symbol} stock?", "Get the stock price of {symbol}.", "Price of {symbol}?"),
        _price,
    ),
    Tool(
        ("convert_currency", "exchange", "convert"),
        "Convert an amount of money to another currency",
        {"amount": (("amount", "value"), "number", lambda rng: rng.randrange(1, 1000)),
         "from": (("from", "from_currency", "source"), "string", lambda rng: rng.choice(_UNITS[:3])),
         "to": (("to", "to_currency", "target"), "string", lambda rng: rng.choice(_UNITS[3:]))},
        ("Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?", "{amount} {from} to {to}", "Change {amount} {from} into {to}."),
        _converted,
    ),
    Tool(
        ("set_timer", "start_timer", "timer"),
        "Set a timer",
        {"minutes": (("minutes", "duration_minutes"), "integer", lambda rng: rng.randrange(1, 90))},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes.", "timer {minutes} minutes"),
        _done("status", "Your timer for {minutes} minutes is set."),
    ),
    Tool(
        ("send_email", "send_mail", "email"),
        "Send an email",
        {"to": (("to", "recipient"), "string", lambda rng: f"{person(rng).lower()}@example.com"),
         "subject": (("subject", "title"), "string", lambda rng: rng.choice(_SUBJECTS))},
        ("Send an email to {to} with the subject {subject}.", "Email {to}, subject {subject}.", "Write an email to {to} about {subject}."),
        _done("sent", "Your email to {to} has been sent."),
    ),
    Tool(
        ("search", "web_search", "search_web", "lookup"),
        "Search the web",
        {"query": (("query", "q", "text"), "string",
                   lambda rng: f"{rng.choice(TOPICS['colors'])} {rng.choice(TOPICS[rng.choice(('animals', 'flowers', 'tools', 'clothes'))])}")},
        ("Search for {query}.", "Look up {query}.", "Search the web for {query}.", "Find something about {query}."),
        _done("status", "I searched for {query}."),
    ),
    Tool(
        ("calculator", "calculate", "evaluate"),
        "Calculate an arithmetic expression",
        {"sum": (("expression", "expr", "input"), "string",
                 lambda rng: f"{rng.randrange(100, 10000)} {rng.choice('+-*/')} {rng.randrange(2, 1000)}")},
        ("What is {sum}?", "Calculate {sum}.", "{sum}", "How much is {sum}?"),
        _calculated,
    ),
    Tool(
        ("play_music", "play", "play_song"),
        "Play music by an artist",
        {"artist": (("artist", "name", "band"), "string", person)},
        ("Play music by {artist}.", "Play something from {artist}.", "I want to hear {artist}.", "Play {artist}."),
        _done("status", "Now playing {artist}."),
    ),
    Tool(
        ("turn_on_light", "light_on", "switch_light"),
        "Turn on the light in a room",
        {"room": (("room", "place", "where"), "string",
                  lambda rng: rng.choice(("kitchen", "bedroom", "bathroom", "hall", "garage", "office", "garden", "cellar")))},
        ("Turn on the light in the {room}.", "Switch on the {room} light.", "Light in the {room}, please.", "Make the {room} bright."),
        _done("status", "The light in the {room} is on."),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Offer:
    """A tool with the names it goes by in one dialogue."""

    tool: Tool
    name: str
    arguments: Mapping[str, str]

    def schema(self, rng: Random) -> dict[str, object]:
        described = rng.random() < 0.3
        properties: dict[str, object] = {}
        for slot, argument in self.arguments.items():
            kind = self.tool.slots[slot][1]
            properties[argument] = {"type": kind, "description": f"The {slot}"} if described else {"type": kind}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function: dict[str, object] = {
            "name": self.name,
            "description": self.tool.description,
            "parameters": parameters,
        }
        if rng.random() < 0.1:
            del function["description"]
        if rng.random() < 0.15:
            del parameters["required"]
        return {"type": "function", "function": function}


def _offer(rng: Random, tool: Tool) -> _Offer:
    name = tool.names[0] if rng.random() < 0.6 else rng.choice(tool.names)
    arguments = {
        slot: names[0] if rng.random() < 0.5 else rng.choice(names) for slot, (names, _, _) in tool.slots.items()
    }
    return _Offer(tool, name, arguments)


def called(rng: Random) -> Dialogue:
    """Return a question that a tool answers: the call, and usually the report of its result."""
    offers = [_offer(rng, tool) for tool in rng.sample(TOOLS, rng.choice((1, 1, 1, 2, 2, 3)))]
    chosen = rng.choice(offers)
    tool = chosen.tool
    values = {slot: draw(rng) for slot, (_, _, draw) in tool.slots.items()}
    phrase = rng.choice(tool.asks)
    question = say(rng, phrase, **values)
    call = ToolCall(chosen.name, {chosen.arguments[slot]: value for slot, value in values.items()})
    messages = [user(question), Message("assistant", "", tool_call=call)]
    expect: dict[str, object] = {"call": {"name": call.name, "arguments": dict(call.arguments)}}
    kind = "tool call"
    key = f"tool {tool.names[0]} {phrase} {sorted(map(str, values.values()))}"
    if rng.random() < 0.45:
        result, sentence = tool.result(rng, values)
        messages += [Message("tool", json.dumps(result, ensure_ascii=False)), answer(sentence)]
        kind, expect = "tool result", {"exact": sentence}
    if rng.random() < 0.3:
        messages.insert(0, Message("system", rng.choice(general.SYSTEMS)))
    return Dialogue(kind, messages, key=key, tools=[offer.schema(rng) for offer in offers], expect=expect)


def not_needed(rng: Random) -> Dialogue:
    """Return a question that has nothing to do with the tools on offer."""
    inner = rng.choice((facts, arithmetic)).sample(rng)
    tools = rng.sample([tool for tool in TOOLS if tool.names[0] != "calculator"], rng.choice((1, 1, 2)))
    schemas = [_offer(rng, tool).schema(rng) for tool in tools]
    return Dialogue(
        "tool not needed", inner.messages, key=inner.key, tools=schemas, expect={**inner.expect, "no_call": True}
    )


def sample(rng: Random) -> Dialogue:
    """Return one dialogue of this kind."""
    return rng.choices((called, not_needed), (6, 1))[0](rng)
