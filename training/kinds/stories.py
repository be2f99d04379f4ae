"""Short stories and rhymes, grown from templates; asked for in a chat or continued from a first line."""

from __future__ import annotations

from random import Random

from ..dialogue import Dialogue, Message, exchange, say
from ..words import HEROES, NAMES, article, invented

_ASK = (
    "Tell me a story about {x}.", "Tell me a short story about {x}.", "Write a story about {x}.", "Write a short story about {x}.",
    "Can you tell me a story about {x}?", "I want a story about {x}.", "A story about {x}, please.", "Make up a story about {x}.",
    "story about {x}", "Give me a short story about {x}.", "Please write a little story about {x}.", "Invent a story about {x}.",
    "Could you write a story about {x}?", "Tell me a bedtime story about {x}.",
)  # fmt: skip
_ASK_ANY = ("Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell me a story?", "I want to hear a story.",
            "Write me a short story.", "Another story, please.", "Tell me another story.")  # fmt: skip
_ASK_POEM = ("Write a poem about {x}.", "Write a short poem about {x}.", "Tell me a poem about {x}.", "Make a rhyme about {x}.",
             "Can you write a poem about {x}?", "A poem about {x}, please.")  # fmt: skip

_TRAITS = ("small", "brave", "kind", "curious", "shy", "clever", "young", "old", "quiet", "cheerful")
_PLACES = ("in a deep forest", "by the sea", "on a high hill", "in a quiet village", "near a blue lake", "in a big old house",
           "at the edge of the desert", "on a green island", "in a busy town", "under a tall bridge")  # fmt: skip
# A wish, what stood in the way, and how it ended; {hero} is the short name.
_PLOTS = (
    ("wanted to see the sea", "the road was long and dark", "followed the stars all night", "At dawn the sea lay there, shining like silver"),
    ("wanted to find a friend", "everyone was busy", "helped an old owl carry wood", "The owl smiled and said that they were friends now"),
    ("lost a golden key", "the grass was too high", "asked the ants for help", "The ants found the key under a leaf"),
    ("heard a strange sound at night", "nobody else was awake", "took a lamp and went to look", "It was only the wind playing with a bell"),
    ("wanted to learn to sing", "every song came out wrong", "practised each morning with the birds", "In spring the whole valley came to listen"),
    ("found a map of a hidden garden", "a wide river blocked the way", "built a little boat from a basket", "In the garden grew the sweetest apples in the world"),
    ("was afraid of the dark", "the lamp had gone out", "counted the stars one by one", "After a hundred stars the dark felt like a warm blanket"),
    ("wanted to bake a cake", "there was no sugar left", "went from door to door and asked", "Everyone brought a little, and everyone got a slice"),
    ("found a tiny lost bird", "the nest was high up in a tree", "climbed slowly from branch to branch", "The bird's mother sang a song of thanks"),
    ("wanted to win the big race", "the others were much faster", "never stopped, not even once", "The others fell asleep, and the prize was won"),
    ("met a sad giant", "the giant would not speak", "sat down and waited", "At last the giant laughed and shared his soup"),
    ("wanted to touch the moon", "the moon was far too high", "looked into the still water of a pond", "There was the moon, close enough to touch"),
)  # fmt: skip
_ENDS = ("From that day on, {hero} was never lonely again.", "And {hero} slept very well that night.", "{Hero} never forgot that day.",
         "And that is how {hero} became happy.", "Since then, {hero} always helps others.", "And everyone lived happily ever after.")  # fmt: skip
_RHYMES = (
    "{X}, so bright, so free,\nsings a song for you and me.\nWhen the day has gone to bed,\nit dreams of skies all gold and red.",
    "I saw {x} beside the door,\nit danced across the wooden floor.\nIt spun around and said to me:\ncome and dance, one, two and three.",
    "{X} looked up into the night\nand saw a small and silver light.\nIt made a wish, it closed its eyes,\nand flew away through quiet skies.",
    "Soft is the wind and blue is the sea,\n{x} is sitting under a tree.\nSlow is the river, warm is the sun,\nthe day is long and the work is done.",
)  # fmt: skip


def _subject(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.15 else rng.choice(HEROES)


def _told(rng: Random, hero: str) -> str:
    named = rng.random() < 0.5
    name = rng.choice(NAMES)
    short = name if named else f"the {hero}"
    upper = short[0].upper() + short[1:]
    wish, obstacle, deed, outcome = rng.choice(_PLOTS)
    trait = rng.choice(_TRAITS)
    lines = [
        f"Once upon a time, {article(trait + ' ' + hero)} {'named ' + name + ' ' if named else ''}lived {rng.choice(_PLACES)}."
    ]
    lines.append(
        f"One day, {short} {wish}." if wish.startswith(("lost", "heard", "found", "met")) else f"{upper} {wish}."
    )
    lines.append(f"But {obstacle}. So {short} {deed}.")
    lines.append(f"{outcome}.")
    lines.append(rng.choice(_ENDS).format(hero=short, Hero=upper))
    return " ".join(lines)


def asked(rng: Random) -> Dialogue:
    """Return a story on request."""
    if rng.random() < 0.15:
        phrase = rng.choice(_ASK_ANY)
        return exchange("story", say(rng, phrase), _told(rng, rng.choice(HEROES)), None, subject="")
    hero = _subject(rng)
    phrase = rng.choice(_ASK)
    reply = _told(rng, hero)
    return exchange("story", say(rng, phrase, x=article(hero)), reply, f"story {hero} {phrase}", subject=hero)


def poem(rng: Random) -> Dialogue:
    """Return a rhyme on request."""
    hero = _subject(rng)
    phrase = rng.choice(_ASK_POEM)
    subject = f"the {hero}"
    reply = rng.choice(_RHYMES).format(x=subject, X="T" + subject[1:])
    return exchange("poem", say(rng, phrase, x=article(hero)), reply, f"poem {hero} {phrase}", subject=hero)


def untold(rng: Random) -> Dialogue:
    """Return a story without a request, as a plain completion continues it."""
    return Dialogue("completion", (Message("assistant", _told(rng, _subject(rng))),), raw=True)


def sample(rng: Random) -> Dialogue:
    """Return one dialogue of this kind."""
    return rng.choices((asked, poem, untold), (6, 1.2, 1))[0](rng)
