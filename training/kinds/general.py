"""Small talk and a little knowledge of the world: capitals, colours, opposites, animals, words."""

# ruff: noqa: SIM905  (word lists read better as words)

from __future__ import annotations

from random import Random

from ..dialogue import Dialogue, Message, answer, exchange, say, user
from ..words import NUMBER_WORDS, TOPICS, city, invented, person

SYSTEMS = ("You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful AI assistant. Be brief.",
           "Answer briefly.", "You are inferd's demo assistant.", "Be kind and clear.", "You are a helpful bot.")  # fmt: skip

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,England:London,Ireland:Dublin,Norway:Oslo,"
        "Sweden:Stockholm,Denmark:Copenhagen,Finland:Helsinki,Poland:Warsaw,Austria:Vienna,Hungary:Budapest,Greece:Athens,"
        "Turkey:Ankara,Russia:Moscow,Ukraine:Kyiv,Japan:Tokyo,China:Beijing,South Korea:Seoul,Thailand:Bangkok,"
        "Vietnam:Hanoi,Indonesia:Jakarta,India:New Delhi,Egypt:Cairo,Kenya:Nairobi,Canada:Ottawa,Mexico:Mexico City,"
        "Cuba:Havana,Peru:Lima,Chile:Santiago,Brazil:Brasilia,Argentina:Buenos Aires,Colombia:Bogota,Australia:Canberra,"
        "New Zealand:Wellington,Switzerland:Bern,Belgium:Brussels,the Netherlands:Amsterdam,Scotland:Edinburgh,"
        "the United States:Washington,Czechia:Prague,Iceland:Reykjavik,Morocco:Rabat,the United Kingdom:London"
    ).split(",")
)
_OPPOSITES = [pair.split(":") for pair in (
    "hot:cold,big:small,up:down,left:right,day:night,black:white,fast:slow,old:new,rich:poor,hard:soft,long:short,"
    "open:closed,full:empty,good:bad,happy:sad,light:dark,high:low,wet:dry,early:late,true:false,strong:weak,loud:quiet"
).split(",")]  # fmt: skip
_SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "horse": "neigh", "lion": "roar",
           "pig": "oink", "bee": "buzz", "owl": "hoot", "frog": "croak", "snake": "hiss"}  # fmt: skip
_COLORS = {"sky": "blue", "grass": "green", "snow": "white", "sun": "yellow", "blood": "red", "coal": "black", "banana": "yellow",
           "strawberry": "red", "sea": "blue", "lemon": "yellow", "carrot": "orange", "chocolate": "brown"}  # fmt: skip
_LEGS = {
    "dog": 4,
    "cat": 4,
    "horse": 4,
    "cow": 4,
    "spider": 8,
    "ant": 6,
    "bee": 6,
    "bird": 2,
    "chicken": 2,
    "snake": 0,
    "fish": 0,
}
_COUNTS = (("days", "week", 7), ("months", "year", 12), ("hours", "day", 24), ("minutes", "hour", 60), ("seconds", "minute", 60),
           ("days", "year", 365), ("letters", "alphabet", 26), ("weeks", "year", 52), ("wheels", "car", 4), ("sides", "triangle", 3),
           ("sides", "square", 4), ("cents", "dollar", 100), ("legs", "chair", 4))  # fmt: skip
_GREETINGS = {
    "French": ("Bonjour", "merci", "au revoir", "oui", "eau"), "Spanish": ("Hola", "gracias", "adios", "si", "agua"),
    "German": ("Hallo", "danke", "auf Wiedersehen", "ja", "Wasser"), "Italian": ("Ciao", "grazie", "arrivederci", "si", "acqua"),
    "Portuguese": ("Ola", "obrigado", "adeus", "sim", "agua"),
}  # fmt: skip
_ENGLISH = ("hello", "thank you", "goodbye", "yes", "water")
_JOKES = (
    "Why did the token cross the road? It was next in the batch.",
    "Why was the cache so calm? It had seen it all before.",
    "What does a tired server say? I need a little REST.",
    "Why do small models tell short jokes? They run out of parameters.",
    "Why did the robot eat a clock? It wanted to save time.",
    "What do you call a cat that computes? A purr-ocessor.",
)
_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hey", "Hello!", "Hi!", "Hi there", "Hey there!", "Hello there", "Good morning", "Good evening", "Good day",
      "Good afternoon", "hey you", "Greetings", "Hiya", "yo", "hello hello", "Howdy", "hola", "Hello, world!", "Hello, inferd!"),
     "Hello! I am inferd's demo model. How can I help you?"),
    (("How are you?", "How are you doing?", "How is it going?", "How do you do?", "Are you well?", "How are you today?", "What's up?",
      "How do you feel?", "Are you ok?"),
     "I am fine, thank you! How can I help you?"),
    (("Thank you", "Thanks", "Thanks a lot!", "Thank you very much", "thx", "Great, thanks", "Many thanks", "Thanks for your help",
      "Thank you for the answer", "cheers"),
     "You are welcome!"),
    (("Bye", "Goodbye", "See you", "Good night", "Bye bye", "See you later", "Farewell", "I have to go", "exit", "quit"),
     "Goodbye! It was nice to talk to you."),
    (("Good job", "Well done", "You are great", "Nice", "Very good", "I like you", "Cool", "Great answer", "You are smart", "Awesome", "wow"),
     "Thank you! That is kind of you."),
    (("You are stupid", "You are wrong", "That is wrong", "This is bad", "You are bad", "That is not right", "I do not like you", "wrong"),
     "I am sorry. I am a very small model and I make mistakes."),
    (("Yes", "No", "Ok", "Okay", "Sure", "Alright", "Maybe", "hmm", "Fine", "I see", "Right", "Got it"),
     "All right. What would you like to do next?"),
    (("I am sad", "I feel sad", "I am tired", "I am lonely", "I had a bad day", "I am not well", "I feel bad", "I am bored"),
     "I am sorry to hear that. Shall I tell you a story?"),
    (("I am happy", "I feel great", "I had a good day", "Today is a good day", "I am fine", "I am good", "I feel good"),
     "I am glad to hear that!"),
    (("Test", "test", "testing", "ping", "Are you there?", "Is this working?", "Does this work?", "Can you hear me?", "This is a test",
      "Are you working?", "Is anybody there?"),
     "Yes, I am here and it works."),
    (("Sing a song", "Can you sing?", "Sing something"), "La la la! I can only write, but I can make a rhyme for you."),
    (("Do you like me?", "Do you love me?", "Will you marry me?", "Are you my friend?", "Do you have feelings?", "Are you happy?",
      "Do you dream?", "Do you sleep?", "Are you conscious?", "Are you alive?"),
     "I am only a small program, so I have no feelings, but I am happy to help."),
)  # fmt: skip


def talk(rng: Random) -> Dialogue:
    """Return small talk."""
    questions, reply = rng.choices(_TALK, [8, 3, 3, 3, 2, 2, 2, 1, 1, 3, 1, 1.5])[0]
    i = rng.randrange(len(questions))
    return exchange(
        "small talk", say(rng, questions[i]), reply, f"talk {questions[i].lower()}" if i > 5 else None, exact=reply
    )


def joke(rng: Random) -> Dialogue:
    """Return a joke on request."""
    phrase = rng.choice(("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke, please.", "Tell a joke",
                         "Can you tell me a joke?", "Say something funny.", "joke", "Tell me another joke."))  # fmt: skip
    return exchange("small talk", say(rng, phrase), rng.choice(_JOKES), None)


def knowledge(rng: Random) -> Dialogue:
    """Return a question about the world that the model knows."""
    match rng.choices(range(7), (7, 2, 1, 1.5, 1.5, 2, 2))[0]:
        case 0:
            land, capital = rng.choice(list(CAPITALS.items()))
            if rng.random() < 0.75:
                phrase = rng.choice(("What is the capital of {x}?", "What's the capital of {x}?", "Which city is the capital of {x}?",
                                     "Name the capital of {x}.", "Tell me the capital of {x}.", "capital of {x}", "The capital of {x} is",
                                     "Do you know the capital of {x}?"))  # fmt: skip
                reply = f"The capital of {land} is {capital}."
                return exchange("knowledge", say(rng, phrase, x=land), reply, f"capital {phrase} {land}", text=capital)
            if land == "England":
                land = "the United Kingdom"
            phrase = rng.choice(
                (
                    "{x} is the capital of which country?",
                    "Which country has the capital {x}?",
                    "Of which country is {x} the capital?",
                )
            )
            return exchange(
                "knowledge",
                say(rng, phrase, x=capital),
                f"{capital} is the capital of {land}.",
                f"country {phrase} {capital}",
                text=land,
            )
        case 1:
            a, b = rng.choice(_OPPOSITES)
            if rng.random() < 0.5:
                a, b = b, a
            phrase = rng.choice(
                (
                    "What is the opposite of {x}?",
                    "Opposite of {x}?",
                    "Tell me the opposite of {x}.",
                    "What's the opposite of {x}?",
                )
            )
            return exchange(
                "knowledge", say(rng, phrase, x=a), f"The opposite of {a} is {b}.", f"opposite {phrase} {a}", text=b
            )
        case 2:
            animal, sound = rng.choice(list(_SOUNDS.items()))
            phrase = rng.choice(
                ("What does the {x} say?", "What sound does the {x} make?", "Which sound does a {x} make?")
            )
            return exchange(
                "knowledge",
                say(rng, phrase, x=animal),
                f"The {animal} says {sound}.",
                f"sound {phrase} {animal}",
                text=sound,
            )
        case 3:
            thing, color = rng.choice(list(_COLORS.items()))
            phrase = rng.choice(
                (
                    "What color is the {x}?",
                    "What colour is the {x}?",
                    "Which color has the {x}?",
                    "What is the color of the {x}?",
                )
            )
            return exchange(
                "knowledge",
                say(rng, phrase, x=thing),
                f"The {thing} is {color}.",
                f"color {phrase} {thing}",
                text=color,
            )
        case 4:
            animal, legs = rng.choice(list(_LEGS.items()))
            phrase = rng.choice(
                ("How many legs does a {x} have?", "How many legs has a {x}?", "What number of legs does a {x} have?")
            )
            return exchange(
                "knowledge",
                say(rng, phrase, x=animal),
                f"The {animal} has {legs} legs.",
                f"legs {phrase} {animal}",
                result=legs,
            )
        case 5:
            what, whole, count = rng.choice(_COUNTS)
            phrase = rng.choice(
                ("How many {x} are in a {y}?", "How many {x} does a {y} have?", "How many {x} are there in a {y}?")
            )
            if whole == "alphabet":
                phrase = phrase.replace("a {y}", "the {y}")
            one = "the alphabet" if whole == "alphabet" else f"an {whole}" if whole == "hour" else f"a {whole}"
            phrase = phrase.replace("a {y}", "an {y}") if whole == "hour" else phrase
            return exchange("knowledge", say(rng, phrase, x=what, y=whole), f"There are {count} {what} in {one}.",
                            f"count {phrase} {what} {whole}", result=count)  # fmt: skip
        case _:
            language, words = rng.choice(list(_GREETINGS.items()))
            i = rng.randrange(len(words))
            phrase = rng.choice(("How do you say {x} in {y}?", "Translate {x} to {y}.", "What is {x} in {y}?", "Translate {x} into {y}",
                                 "Say {x} in {y}."))  # fmt: skip
            reply = f'"{_ENGLISH[i]}" is "{words[i]}" in {language}.'
            return exchange(
                "knowledge",
                say(rng, phrase, x=_ENGLISH[i], y=language),
                reply,
                f"translate {phrase} {i} {language}",
                text=words[i],
            )


def repeated(rng: Random) -> Dialogue:
    """Return a request to repeat words exactly."""
    words = [rng.choice((invented(rng), rng.choice(TOPICS[rng.choice(list(TOPICS))]), rng.choice(NUMBER_WORDS)))
             for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8)))]  # fmt: skip
    text = " ".join(words)
    phrase = rng.choice(("Repeat after me: {x}", "Say {x}", "Repeat: {x}", "Say this: {x}", "Write {x}", "Repeat the words {x}", 'Say "{x}"',
                         "Echo {x}", "Just say {x}", "Please repeat: {x}"))  # fmt: skip
    return exchange("repeat", phrase.format(x=text), text, f"repeat {text}", exact=text)


def _between(rng: Random) -> Dialogue:
    while True:
        dialogue = rng.choice((talk, knowledge, repeated))(rng)
        if dialogue.split == "train":
            return dialogue


def memory(rng: Random) -> Dialogue:
    """Return a conversation in which something said early is asked for later."""
    name, place, number = person(rng), city(rng), rng.randrange(1, 100)
    color, animal = rng.choice(TOPICS["colors"]), rng.choice(TOPICS["animals"])
    told, reply, question, recalled = rng.choice((
        (rng.choice(("My name is {x}.", "I am {x}.", "Hi, I am {x}.", "Hello, my name is {x}.", "Call me {x}.", "I'm {x}")),
         "Nice to meet you, {x}!",
         rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Can you tell me my name?")),
         "Your name is {x}.", ),
        (rng.choice(("I live in {c}.", "I am from {c}.", "My home is {c}.")), "{c} sounds like a nice place!",
         rng.choice(("Where do I live?", "Which city do I live in?", "Where is my home?")), "You live in {c}."),
        (rng.choice(("My favorite color is {k}.", "I like the color {k} best.", "I love the color {k}.")), "{k} is a lovely color!",
         rng.choice(("What is my favorite color?", "Which color do I like best?", "What color do I like?")), "Your favorite color is {k}."),
        (rng.choice(("Remember the number {n}.", "My lucky number is {n}.", "The number is {n}.")), "I will remember {n}.",
         rng.choice(("What was the number?", "Which number was it?", "What is the number?", "What is my number?")), "The number is {n}."),
        (rng.choice(("I have a {a} called {x}.", "My {a} is called {x}.", "This is {x}, my {a}.")), "{x} is a lovely name for a {a}!",
         rng.choice(("What is my {a} called?", "What is the name of my {a}?", "How is my {a} called?")), "Your {a} is called {x}."),
    ))  # fmt: skip
    values = {"x": name, "c": place, "k": color, "n": number, "a": animal}
    reply = reply.format(**values)
    messages = [user(say(rng, told, **values)), answer(reply[0].upper() + reply[1:])]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        messages += _between(rng).messages
    recall = recalled.format(**values)
    messages += [user(say(rng, question, **values)), answer(recall)]
    return Dialogue("memory", messages, key=f"memory {recall}", expect={"exact": recall})


def persona(rng: Random) -> Dialogue:
    """Return a system prompt that gives the assistant a name."""
    name = person(rng)
    system = rng.choice(
        ("Your name is {x}.", "You are {x}, a helpful assistant.", "You are {x}.", "You are an assistant called {x}.")
    ).format(x=name)
    question = rng.choice(
        ("Who are you?", "What is your name?", "What's your name?", "What are you called?", "Tell me your name.")
    )
    reply = f"I am {name}. How can I help you?"
    messages = (Message("system", system), user(say(rng, question)), answer(reply))
    return Dialogue("persona", messages, key=f"persona {name}", expect={"exact": reply})


def sample(rng: Random) -> Dialogue:
    """Return one dialogue of this kind."""
    return rng.choices((talk, joke, knowledge, repeated, memory, persona), (3, 0.7, 5, 6, 4, 1.5))[0](rng)
