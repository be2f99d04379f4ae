"""Lists of things, counting, sorting and orders that everybody knows."""

from __future__ import annotations

from random import Random

from ..dialogue import Dialogue, exchange, say
from ..words import IN_ORDER, NUMBER_WORDS, TOPIC_ALIASES, TOPICS

_ASK = (
    "Name {n} {topic}.", "List {n} {topic}.", "Give me {n} {topic}.", "Give me a list of {n} {topic}.",
    "Tell me {n} {topic}.", "Can you name {n} {topic}?", "Write down {n} {topic}.", "I need {n} {topic}.",
    "What are {n} {topic}?", "Make a list of {n} {topic}.", "Show me {n} {topic}.", "Could you list {n} {topic}?",
    "{n} {topic}", "Think of {n} {topic}.", "List of {n} {topic}",
)  # fmt: skip
_ASK_LINE = (
    "Name {n} {topic}, separated by commas.", "List {n} {topic} on one line.", "Give me {n} {topic}, comma separated.",
    "Name {n} {topic} in one line.",
)  # fmt: skip
_ASK_ALL = (
    "What are the {topic}?",
    "List the {topic}.",
    "Name all {topic}.",
    "Name the {topic}.",
    "Which {topic} are there?",
)


def _some(rng: Random, topic: str, count: int) -> list[str]:
    items = TOPICS[topic]
    start = 0 if topic in IN_ORDER else rng.randrange(len(items))
    return [items[(start + i) % len(items)] for i in range(count)]


def _numbered(items: list[str]) -> str:
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def named(rng: Random) -> Dialogue:
    """Return a request for some things of a sort."""
    topic = rng.choice(list(TOPICS))
    shown = rng.choice(TOPIC_ALIASES.get(topic, [topic]))
    if topic in IN_ORDER and rng.random() < 0.3:
        phrase = rng.choice(_ASK_ALL)
        items = _some(rng, topic, len(TOPICS[topic]))
        return exchange("list", say(rng, phrase, topic=shown), _numbered(items), f"list all {phrase} {shown}",
                        topic=topic, count=len(items))  # fmt: skip
    count = min(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 6, 7, 8, 9, 10)), len(TOPICS[topic]))
    if count == 1:
        shown = {"days of the week": "day of the week", "months of the year": "month of the year",
                 "planets of the solar system": "planet of the solar system", "foods": "food", "dishes": "dish",
                 "things to eat": "thing to eat", "countries": "country", "cities": "city",
                 "furniture": "piece of furniture", "clothes": "piece of clothing"}.get(shown, shown.rstrip("s"))  # fmt: skip
    line = count > 1 and rng.random() < 0.15
    phrase = rng.choice(_ASK_LINE if line else _ASK)
    number = NUMBER_WORDS[count] if rng.random() < 0.6 else str(count)
    items = _some(rng, topic, count)
    reply = ", ".join(items) if line else items[0] if count == 1 else _numbered(items)
    return exchange("list", say(rng, phrase, n=number, topic=shown), reply, f"list {count} {phrase} {topic}",
                    topic=topic, count=count)  # fmt: skip


def counted(rng: Random) -> Dialogue:
    """Return a request to count."""
    first = rng.choice((1, 1, 1, rng.randrange(60)))
    last = first + rng.randrange(2, 15)
    if rng.random() < 0.2:
        phrase = rng.choice(("Count down from {b} to {a}.", "Count backwards from {b} to {a}."))
        numbers = list(range(last, first - 1, -1))
    else:
        phrase = rng.choice(("Count from {a} to {b}.", "Can you count from {a} to {b}?", "List the numbers from {a} to {b}.",
                             "Count to {b} starting at {a}."))  # fmt: skip
        if first == 1 and rng.random() < 0.4:
            phrase = rng.choice(("Count to {b}.", "Can you count to {b}?"))
        numbers = list(range(first, last + 1))
    reply = ", ".join(map(str, numbers))
    return exchange("counting", say(rng, phrase, a=first, b=last), reply, f"count {first} {last}", exact=reply)


def ordered(rng: Random) -> Dialogue:
    """Return a question about an order: the next day, sorted numbers."""
    if rng.random() < 0.4:
        topic = rng.choice(("days of the week", "months"))
        items = TOPICS[topic]
        i = rng.randrange(len(items))
        after = rng.random() < 0.6
        noun = "day" if topic != "months" else "month"
        phrase = rng.choice(
            (
                "What comes after {x}?",
                "Which {noun} comes after {x}?",
                "What {noun} is after {x}?",
                "Which {noun} follows {x}?",
            )
            if after
            else ("What comes before {x}?", "Which {noun} comes before {x}?", "What {noun} is before {x}?")
        )
        other = items[(i + (1 if after else -1)) % len(items)]
        reply = f"{other} comes {'after' if after else 'before'} {items[i]}."
        return exchange(
            "order", say(rng, phrase, x=items[i], noun=noun), reply, f"order {phrase} {items[i]}", text=other
        )
    numbers = rng.sample(range(rng.choice((10, 100))), rng.randrange(3, 5))
    reply = ", ".join(map(str, sorted(numbers)))
    phrase = rng.choice(
        ("Sort these numbers: {x}", "Sort {x}", "Put these numbers in order: {x}", "Order these numbers: {x}")
    )
    shown = rng.choice((", ", " ")).join(map(str, numbers))
    return exchange("sorting", say(rng, phrase, x=shown), reply, f"sort {sorted(numbers)}", exact=reply)


def sample(rng: Random) -> Dialogue:
    """Return one dialogue of this kind."""
    return rng.choices((named, counted, ordered), (8, 1.5, 2))[0](rng)
