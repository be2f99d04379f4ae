"""What people type to an assistant or a shop, written by us: ten intents, each with wordings and words to put into them.

A wording goes whole to the training or the held-out side, and so does a word (a city, a song, a time). What is held out
is so said in ways, and about things, that training has not seen. These are no records of anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Literal

Split = Literal["train", "held-out"]

WORDS: dict[str, str] = {
    "city": "Paris London Berlin Madrid Rome Tokyo Oslo Vienna Lisbon Dublin Prague Athens Cairo Delhi Sydney Toronto Boston Lima",
    "day": "today tomorrow tonight monday tuesday wednesday thursday friday saturday sunday",
    "clock": "six seven eight nine ten noon midnight 6:30 7:15 half_past_seven quarter_to_nine 5am 9pm 11_o'clock",
    "music": "jazz rock techno beethoven mozart the_beatles abba queen some_blues reggae my_playlist folk miles_davis radiohead",
    "thing": "parcel package order shoes laptop phone jacket book lamp headphones bicycle coffee_machine",
    "number": "4711 90210 12345 8812 773 55021 1009",
    "name": "Ana Ben Carla David Elena Farid Grace Hugo Iris Jonas",
    "place": "shop store branch office library museum pharmacy bakery",
    "why": "broken too_small the_wrong_colour not_what_i_ordered defective scratched missing_a_part too_late",
}

WORDINGS: dict[str, str] = {
    "greeting": """
        hello | hi there | hey | good morning | good evening | hello, my name is {name} | hi, {name} here | hey, how are you
        good afternoon everyone | greetings | hi, is anybody there | hello, can you help me | hey there, nice to meet you
        good day | hello again | hi {name}, how are you doing {day} | morning | howdy""",
    "goodbye": """
        goodbye | bye | bye bye | see you later | see you {day} | talk to you {day} | have a nice day, bye | good night
        that was all, goodbye | i have to go now, bye | until next time | see you soon | farewell | bye for now
        goodbye and have a good evening | ok, talk to you later | i am leaving now, see you""",
    "thanks": """
        thank you | thanks | thanks a lot | thank you very much | many thanks for your help | that helped, thank you
        great, thanks {name} | thanks so much | cheers, thank you for the {thing} | i appreciate your help
        perfect, thank you | thank you, that is all i needed | much appreciated | thanks, you are very kind
        i really appreciate it | thanks for the quick answer""",
    "weather": """
        what is the weather in {city} | how is the weather {day} | will it rain {day} | is it going to rain in {city} {day}
        do i need an umbrella {day} | what is the forecast for {city} | weather forecast for {day} | how warm is it in {city}
        is it sunny in {city} | how cold will it be {day} | what temperature is it in {city} | will it snow {day}
        tell me the weather for {city} {day} | is there a storm coming to {city} | how hot does it get in {city} {day}
        should i expect snow or sun {day} | does it look like rain in {city}""",
    "alarm": """
        wake me at {clock} | wake me up at {clock} {day} | set an alarm for {clock} | set the alarm to {clock} {day}
        i need an alarm at {clock} | please wake me {day} at {clock} | alarm at {clock} | can you set an alarm for {day} {clock}
        i have to get up at {clock} | make sure i am awake by {clock} {day} | cancel my alarm for {clock}
        turn the {clock} alarm off | change my alarm from {clock} to ten | ring me out of bed at {clock}
        i must not oversleep, set an alarm for {clock} | get me up {day} at {clock}""",
    "music": """
        play {music} | play some {music} please | i want to listen to {music} | put on {music} | can you play {music} for me
        play the next song | skip this song | turn the volume up | shuffle {music} | i would like to hear {music}
        play a song by {music} | stop the music | pause the song | add this song to {music} | what song is this
        let me hear some {music} | start playing {music} in the kitchen | turn the music down please | next track please""",
    "order_status": """
        where is my {thing} | where is my order {number} | when will my {thing} arrive | track my order {number}
        what is the status of order {number} | has my {thing} been shipped | my {thing} has not arrived yet
        i am still waiting for my {thing} | when do you deliver my {thing} | is my {thing} on its way
        can you track {number} for me | i ordered a {thing} last week, where is it | delivery status of {number}
        how long until my {thing} gets here | did you already ship order {number} | my delivery is late, where is it""",
    "refund": """
        i want a refund | i want my money back | the {thing} is {why}, i want a refund | can i return the {thing}
        how do i send the {thing} back | please refund order {number} | the {thing} i got is {why}
        i would like to return my {thing}, it is {why} | give me my money back for the {thing} | refund for {number} please
        can i exchange the {thing} | it arrived {why}, can i get a refund | i am not happy with the {thing}, take it back
        my {thing} came {why} and i want to return it | how can i get my money back | i want to give the {thing} back""",
    "opening_hours": """
        when do you open | when does the {place} open | what are your opening hours | are you open on {day}
        until when is the {place} open {day} | at what time do you close | is the {place} closed on {day}
        what time does the {place} close {day} | opening hours of the {place} in {city} | how late are you open {day}
        do you open before {clock} | is the {place} open now | can i still come to the {place} at {clock}
        from when to when is the {place} open | are you closed on holidays | which days is the {place} open""",
    "password": """
        i forgot my password | reset my password | i cannot log in | how do i change my password | my account is locked
        i need a new password | the login does not work | please send me a link to reset my password
        my password does not work any more | i lost access to my account | unlock my account please
        it says my password is wrong | help me sign in to my account | change the password of my account
        i can not remember my password | why can't i sign in | recover my account""",
}

LABELS = tuple(sorted(WORDINGS))
_OPENINGS = ("", "", "", "", "please ", "hi, ", "ok, ", "could you help me, ", "excuse me, ", "hey, ")
_CLOSINGS = ("", "", "", "", "?", "!", ".", " please", " now")
_EVERY = 4  # one wording and one word in four is held out
_BLANK = re.compile(r"\{(\w+)\}")


def _side(entries: list[str], split: Split) -> list[str]:
    return [entry for place, entry in enumerate(entries) if (place % _EVERY == _EVERY - 1) == (split == "held-out")]


def wordings(intent: str, split: Split) -> list[str]:
    return _side([text.strip() for text in re.split(r"[|\n]", WORDINGS[intent]) if text.strip()], split)


def words(slot: str, split: Split) -> list[str]:
    return [word.replace("_", " ") for word in _side(WORDS[slot].split(), split)]


def phrases(split: Split, per_wording: int, seed: int, *, of_words: Split | None = None) -> Iterator[tuple[str, str]]:
    """(text, intent), in lower case, ``per_wording`` of each wording (once where nothing can be put into it twice).

    ``of_words``: the side that the words are of, where it is another than the wordings'.
    """
    rng = Random(seed)
    for intent in LABELS:
        for wording in wordings(intent, split):
            seen = set()
            for _ in range(per_wording):
                text = _BLANK.sub(lambda blank: rng.choice(words(blank[1], of_words or split)), wording)
                seen.add((rng.choice(_OPENINGS) + text + rng.choice(_CLOSINGS)).lower())
            yield from ((text, intent) for text in sorted(seen))
