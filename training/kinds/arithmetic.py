"""Sums, differences, products and quotients of small numbers, bare and in words."""

from __future__ import annotations

from random import Random

from ..dialogue import Dialogue, exchange, say
from ..words import NUMBER_WORDS, THINGS, person

TOO_BIG = "I am a very small model; I only work with numbers below 100."

_BARE = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a} plus {b}", "What is {a} + {b}?", "What is {a} plus {b}?",
          "Add {a} and {b}.", "What is the sum of {a} and {b}?", "How much is {a} + {b}?", "Calculate {a} + {b}.",
          "What's {a}+{b}?", "Compute {a} + {b}.", "Can you add {a} and {b}?", "what is {a}+{b}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a} minus {b}", "What is {a} - {b}?", "What is {a} minus {b}?",
          "Subtract {b} from {a}.", "How much is {a} - {b}?", "Calculate {a} - {b}.", "What's {a}-{b}?",
          "Take {b} away from {a}.", "Compute {a} - {b}."),
    "*": ("{a} * {b}", "{a} x {b}", "{a} times {b}", "What is {a} * {b}?", "What is {a} times {b}?", "{a}*{b}",
          "Multiply {a} by {b}.", "What is the product of {a} and {b}?", "Calculate {a} x {b}.", "How much is {a} * {b}?"),
    "/": ("{a} / {b}", "{a} divided by {b}", "What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.",
          "{a}/{b}", "Calculate {a} / {b}."),
}  # fmt: skip

_MORE = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
    "{name} has {a} {things} and buys {b} more. How many are there now?",
    "There are {a} {things} on the table and {b} in the bag. How many {things} are there in total?",
)
_LESS = (
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "{name} had {a} {things} and lost {b}. How many {things} does {name} have now?",
    "There were {a} {things}. {name} took {b}. How many remain?",
)


def _numbers(rng: Random, operator: str) -> tuple[int, int]:
    if operator == "*":
        return rng.randrange(13), rng.randrange(13)
    if operator == "/":
        divisor = rng.randrange(1, 11)
        return divisor * rng.randrange(1, 11), divisor
    top = 10 if rng.random() < 0.2 else 100
    a, b = rng.randrange(top), rng.randrange(top)
    if rng.random() < 0.25:
        b = rng.randrange(10)
    return (max(a, b), min(a, b)) if operator == "-" else (a, b)


def _result(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]


def _has_steps(a: int, operator: str, b: int) -> bool:
    return operator in "+-" and min(a, b) >= 10 and b % 10 != 0


def _worked(a: int, operator: str, b: int) -> str:
    """Return the calculation, in two steps where both numbers have tens and ones."""
    result = _result(a, operator, b)
    if _has_steps(a, operator, b):
        tens, ones = b // 10 * 10, b % 10
        between = _result(a, operator, tens)
        return f"{a} {operator} {b} = {a} {operator} {tens} {operator} {ones} = {between} {operator} {ones} = {result}"
    return f"{a} {operator} {b} = {result}"


def _key(operator: str, a: int, b: int, phrase: str) -> str | None:
    if operator in "+-":
        # Sums with one digit or full tens are steps of the others: all of them are for training.
        return f"arithmetic {a}{operator}{b}" if _has_steps(a, operator, b) else None
    return f"arithmetic {a}{operator}{b} {phrase}"


def bare(rng: Random) -> Dialogue:
    """Return one calculation."""
    operator = rng.choices("+-*/", (6, 5, 3, 1.5))[0]
    a, b = _numbers(rng, operator)
    phrase = rng.choice(_BARE[operator])
    result = _result(a, operator, b)
    shown: tuple[object, object] = (a, b)
    if max(a, b) <= 12 and rng.random() < 0.1:
        shown = (NUMBER_WORDS[a], NUMBER_WORDS[b])
    question = say(rng, phrase, a=shown[0], b=shown[1])
    return exchange("arithmetic", question, _worked(a, operator, b), _key(operator, a, b, phrase), result=result)


def in_words(rng: Random) -> Dialogue:
    """Return a one-step word problem."""
    operator = rng.choice("+-")
    a, b = rng.randrange(1, 30), rng.randrange(1, 20)
    if operator == "-":
        a, b = max(a, b) + 1, min(a, b)
    phrase = rng.choice(_MORE if operator == "+" else _LESS)
    result = _result(a, operator, b)
    things, name = rng.choice(THINGS) + "s", person(rng)
    things = things.replace("boxs", "boxes")
    question = phrase.format(name=name, a=a, b=b, things=things)
    reply = f"{_worked(a, operator, b)}, so the answer is {result} {things}."
    return exchange("word problem", question, reply, _key(operator, a, b, phrase), result=result)


def compared(rng: Random) -> Dialogue:
    """Return a question about the size, order or parity of numbers."""
    a, b = rng.sample(range(100), 2)
    match rng.randrange(5):
        case 0:
            phrase = rng.choice(("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?"))
            return exchange(
                "numbers", say(rng, phrase, a=a, b=b), f"{max(a, b)} is larger.", f"compare {a} {b}", result=max(a, b)
            )
        case 1:
            phrase = rng.choice(("Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?"))
            return exchange(
                "numbers", say(rng, phrase, a=a, b=b), f"{min(a, b)} is smaller.", f"compare {a} {b}", result=min(a, b)
            )
        case 2:
            parity = "odd" if a % 2 else "even"
            return exchange(
                "numbers", say(rng, "Is {a} even or odd?", a=a), f"{a} is {parity}.", f"parity {a}", text=parity
            )
        case 3:
            phrase = rng.choice(
                ("What comes after {a}?", "What number comes after {a}?", "What is the next number after {a}?")
            )
            return exchange("numbers", say(rng, phrase, a=a), f"{a + 1} comes after {a}.", f"after {a}", result=a + 1)
        case _:
            a = rng.randrange(1, 50)
            if rng.random() < 0.5:
                return exchange(
                    "numbers", say(rng, "What is double {a}?", a=a), f"2 * {a} = {2 * a}", f"double {a}", result=2 * a
                )
            return exchange(
                "numbers", say(rng, "What is half of {a}?", a=2 * a), f"{2 * a} / 2 = {a}", f"half {a}", result=a
            )


def too_big(rng: Random) -> Dialogue:
    """Return a calculation beyond the model, which it must turn down."""
    operator = rng.choice("+-*/")
    phrase = rng.choice(_BARE[operator])
    a = rng.choice((rng.randrange(100, 1000), rng.randrange(1000, 100000)))
    b = rng.choice((rng.randrange(100, 1000), rng.randrange(10, 100000), rng.randrange(2, 100)))
    if rng.random() < 0.3:
        a, b = b, a
    if operator == "*" and rng.random() < 0.3:
        a, b = rng.randrange(13, 100), rng.randrange(13, 100)
    return exchange("too big", say(rng, phrase, a=a, b=b), TOO_BIG, f"too big {a}{operator}{b}", text="below 100")


def sample(rng: Random) -> Dialogue:
    """Return one dialogue of this kind."""
    maker = rng.choices((bare, in_words, compared, too_big), (10, 3, 2, 1.2))[0]
    return maker(rng)
