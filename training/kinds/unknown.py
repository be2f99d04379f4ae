"""Questions that a very small model cannot answer, and must say so."""

from __future__ import annotations

from random import Random

from ..dialogue import Dialogue, exchange, say
from ..words import JOBS, TOPICS, city, invented, person

REPLY = "I am a very small model; I do not know that."
NO_TOOL = "I am a very small model and I cannot look that up. Give me a tool for it and I will call it."

_FIELDS = ("physics", "biology", "chemistry", "history", "politics", "economics", "philosophy", "geology", "medicine", "law", "music theory",
           "calculus", "algebra", "genetics", "astronomy", "psychology", "black holes", "evolution", "photosynthesis", "gravity", "relativity",
           "quantum mechanics", "inflation", "democracy", "blockchain", "DNA", "electricity", "climate change", "the French Revolution",
           "World War II", "the Roman Empire", "the Bible", "Buddhism", "Shakespeare", "Einstein", "Napoleon", "Mozart", "Picasso")  # fmt: skip
_ASKS = (
    "Explain {f}.", "What is {f}?", "How does {f} work?", "Tell me about {f}.", "Write an essay about {f}.", "What do you know about {f}?",
    "Give me a summary of {f}.", "Why is {f} important?", "Who invented {f}?", "Who was {p} {q}?", "Who is {p} {q}?", "When was {p} {q} born?",
    "What did {p} {q} write?", "Who won the world cup in {y}?", "Who was president in {y}?", "What happened in {y}?",
    "Who won the election in {y}?", "What is the population of {c}?", "How many people live in {c}?", "How far is {c} from {d}?",
    "What is the best restaurant in {c}?", "Who is the mayor of {c}?", "What is a {w}?", "What does {w} mean?", "Explain {w} to me.",
    "Write a program that sorts a list.", "Write a Python function for {f}.", "Write code to parse a file.", "Fix my code.", "Debug this program.",
    "Write a function that adds two numbers.", "Write a hello world program.", "How do I write a loop in {l}?", "Write a {l} program.",
    "How do I fix my car?", "How do I cook {o}?", "Give me a recipe for {o}.", "How do I become a {j}?", "How much does a {j} earn?",
    "What should I wear to a wedding?", "Which phone should I buy?", "How do I lose weight?", "Is {o} healthy?", "How tall is Mount Everest?",
    "How deep is the ocean?", "How fast is light?", "How old is the universe?", "What is the meaning of life?", "Is there a god?",
    "What is the boiling point of water?", "What is the square root of 2?", "What is pi?", "Solve x + 3 = 7.", "Prove it.",
    "Translate this text into {g}.", "How do you say {o} in {g}?", "Translate {w} to {g}.", "Summarize this article.", "Who wrote Hamlet?",
    "Who painted the Mona Lisa?", "What is the largest country?", "What is the tallest building?", "What is the longest river?",
    "What is the capital of {W}?", "What is the fastest animal?", "Why is the sky blue?", "Why do cats purr?", "Why is the sea salty?",
    "Who is the richest person?", "What is the speed of sound?", "What year did {p} {q} die?", "What is my age?", "Where did I grow up?",
    "What am I thinking?", "What did I eat yesterday?", "What will happen tomorrow?", "Predict the future.", "Give me lottery numbers.",
    "Plan a trip to {c}.", "What is the plot of {W}?", "Who sang {W}?", "What is the company {W} known for?", "{w} {v} {u}", "{w} {v}?", "{w}",
    "Who are {p} and {q}?", "Can you drive a car?", "Show me a picture.", "Draw a cat.", "Open the door.", "What is love?", "What is art?",
    "Should I quit my job?", "Review my essay.", "Explain how a {o} is made.", "What is the history of {c}?", "What is the GDP of {W}?",
)  # fmt: skip
_LIVE = (
    "What is the weather in {c}?", "What is the weather today?", "How is the weather in {c}?", "What's the weather like?", "Will it rain tomorrow?",
    "What time is it?", "What time is it in {c}?", "What is the date today?", "What day is it today?", "What is the price of {W}?",
    "What is the news?", "What are the latest news?", "What is the bitcoin price?", "Search the web for {w}.", "Send an email to {p}.",
    "Set a timer for {n} minutes.", "What's the temperature in {c}?", "Is it raining in {c}?", "What is the stock price of {W}?",
    "Play some music.", "Book a flight to {c}.", "Call {p}.",
)  # fmt: skip


def sample(rng: Random) -> Dialogue:
    """Return one question without an answer."""
    live = rng.random() < 0.25
    phrase = rng.choice(_LIVE if live else _ASKS)
    values: dict[str, object] = {
        "f": rng.choice(_FIELDS), "p": person(rng), "q": invented(rng).capitalize(), "y": rng.randrange(1800, 2030), "c": city(rng),
        "d": city(rng), "w": invented(rng), "v": invented(rng), "u": invented(rng), "W": invented(rng).capitalize(),
        "l": rng.choice(TOPICS["programming languages"]), "o": rng.choice(TOPICS["foods"]), "j": rng.choice(JOBS),
        "g": rng.choice(("Japanese", "Klingon", "Latin", "Chinese", "Arabic", "Russian")), "n": rng.randrange(1, 60),
    }  # fmt: skip
    reply = NO_TOOL if live else REPLY
    used = "".join(str(value) for name, value in values.items() if f"{{{name}}}" in phrase)
    return exchange(
        "unknown",
        say(rng, phrase, **values),
        reply,
        f"unknown {phrase} {used}" if used else f"unknown {phrase}",
        text="I am a very small model",
    )
