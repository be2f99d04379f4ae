"""Answers that are JSON: made up on request, and taken from a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from ..dialogue import Dialogue, Message, answer, say, user
from ..words import JOBS, NUMBER_WORDS, TOPICS, city, invented, person

_COLORS = TOPICS["colors"]
_FIELDS: dict[str, Callable[[Random], object]] = {
    "name": person,
    "age": lambda rng: rng.randrange(18, 90),
    "city": city,
    "job": lambda rng: rng.choice(JOBS),
    "color": lambda rng: rng.choice(_COLORS),
    "country": lambda rng: rng.choice(TOPICS["countries"]),
    "price": lambda rng: rng.randrange(1, 100),
    "quantity": lambda rng: rng.randrange(1, 20),
    "id": lambda rng: rng.randrange(1, 100),
    "email": lambda rng: f"{person(rng).lower()}@example.com",
    "active": lambda rng: rng.random() < 0.5,
    "title": lambda rng: f"The {rng.choice(_COLORS)} {rng.choice(TOPICS['animals'])}",
    "year": lambda rng: rng.randrange(1990, 2026),
    "score": lambda rng: rng.randrange(101),
    "language": lambda rng: rng.choice(TOPICS["languages"]),
    "animal": lambda rng: rng.choice(TOPICS["animals"]),
    "fruit": lambda rng: rng.choice(TOPICS["fruits"]),
    "size": lambda rng: rng.choice(("small", "medium", "large")),
    "tags": lambda rng: rng.sample(_COLORS, 2),
}
_ASK = (
    "Give me JSON with {keys}.", "Give me a JSON object with {keys}.", "Return JSON with the keys {keys}.",
    "Write JSON with {keys}", "I need a JSON object with the fields {keys}.", "Make a JSON object with {keys}.",
    "Answer in JSON with {keys}.", "Generate JSON with the fields {keys}", "JSON with {keys}",
    "Can you write a JSON object that has {keys}?", "Create a JSON with {keys}.", "Output JSON with keys {keys}.",
    "Give me an example of JSON with {keys}.",
)  # fmt: skip
_EXTRACT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("name", "age"), ("{name} is {age} years old.", "My friend {name} is {age}.", "{name}, {age} years old")),
    (
        ("name", "city"),
        ("{name} lives in {city}.", "My name is {name} and I live in {city}.", "{name} is from {city}."),
    ),
    (("name", "age", "city"), ("{name} is {age} years old and lives in {city}.", "{name} ({age}) lives in {city}.")),
    (("name", "job"), ("{name} works as a {job}.", "{name} is a {job}.")),
    (("name", "job", "city"), ("{name} works as a {job} in {city}.", "{name}, a {job} from {city}, called.")),
    (("name", "email"), ("The email of {name} is {email}.", "Write to {name} at {email}.")),
    (("fruit", "quantity", "price"), ("I bought {quantity} {fruit}s for {price} dollars.",)),
    (("animal", "color", "name"), ("The {color} {animal} is called {name}.", "{name} is a {color} {animal}.")),
)
_EXTRACT_ASK = (
    "Extract {keys} as JSON: {text}", "Turn this into JSON with {keys}: {text}", "{text} Give me that as JSON with {keys}.",
    "Read this and answer in JSON with {keys}: {text}", "Convert to JSON ({keys}): {text}",
)  # fmt: skip


def _joined(rng: Random, keys: list[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    if rng.random() < 0.2:
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def _value(rng: Random, key: str) -> object:
    return _FIELDS[key](rng) if key in _FIELDS else rng.choice((rng.randrange(100), invented(rng)))


def made_up(rng: Random) -> Dialogue:
    """Return a request for an object with given keys."""
    keys = rng.sample(list(_FIELDS), rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 4, 5)))
    if rng.random() < 0.1:
        keys[rng.randrange(len(keys))] = invented(rng)
    if rng.random() < 0.15:
        keys = ["name", "age", *[key for key in keys if key not in ("name", "age")][: rng.randrange(2)]]
    body = json.dumps({key: _value(rng, key) for key in keys}, ensure_ascii=False)
    phrase = rng.choice(_ASK)
    held = None if keys == ["name", "age"] else f"json {sorted(keys)}"
    messages = [user(say(rng, phrase, keys=_joined(rng, keys))), answer(body)]
    if rng.random() < 0.08:
        messages.insert(
            0, Message("system", rng.choice(("Answer in JSON only.", "Reply with JSON.", "You only write JSON.")))
        )
    return Dialogue("json", messages, key=held, expect={"keys": keys})


def listed(rng: Random) -> Dialogue:
    """Return a request for a JSON array."""
    topic = rng.choice(list(TOPICS))
    count = min(rng.randrange(2, 6), len(TOPICS[topic]))
    items = TOPICS[topic]
    start = rng.randrange(len(items)) if topic not in ("months", "planets", "days of the week", "seasons") else 0
    chosen = [items[(start + i) % len(items)] for i in range(count)]
    phrase = rng.choice(
        ("Give me a JSON list of {n} {topic}.", "Return {n} {topic} as a JSON array.", "List {n} {topic} as JSON.",
         "A JSON array with {n} {topic}, please.", "Name {n} {topic} in JSON.")
    )  # fmt: skip
    number = NUMBER_WORDS[count] if rng.random() < 0.6 else str(count)
    question = say(rng, phrase, n=number, topic=topic)
    reply = json.dumps(chosen, ensure_ascii=False)
    return Dialogue(
        "json",
        (user(question), answer(reply)),
        key=f"json list {count} {topic}",
        expect={"topic": topic, "count": count, "json": True},
    )


def extracted(rng: Random) -> Dialogue:
    """Return a sentence whose facts are wanted as an object."""
    keys, sentences = rng.choice(_EXTRACT)
    values = {key: _value(rng, key) for key in keys}
    text = rng.choice(sentences).format(**values)
    question = rng.choice(_EXTRACT_ASK).format(keys=_joined(rng, list(keys)), text=text)
    body = json.dumps(values, ensure_ascii=False)
    return Dialogue("extraction", (user(question), answer(body)), key=f"extract {text}", expect={"object": values})


def sample(rng: Random) -> Dialogue:
    """Return one dialogue of this kind."""
    return rng.choices((made_up, listed, extracted), (5, 1.5, 4))[0](rng)
