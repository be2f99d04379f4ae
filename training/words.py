"""The word lists that the generator draws from."""

# ruff: noqa: SIM905  (word lists read better as words)

from __future__ import annotations

from random import Random

NAMES = (
    "Ana Ben Carla David Elena Farid Grace Hugo Iris Jonas Kira Liam Mia Noah Olga Pablo Quinn Rosa Sam Tara Uma Viktor "
    "Wendy Xavier Yara Zoe Alice Bob Chloe Daniel Emma Felix Gina Hannah Ivan Julia Karl Laura Marco Nina Oscar Paula "
    "Ravi Sofia Tom Ursula Vera Will Yusuf Zara Adam Bella Cyrus Dora Erik Fiona George Helen Igor Jack Kate Leo Maria "
    "Nick Omar Peter Rachel Steve Tina Victor Walter Yuki Aisha Bruno Clara Dmitri Eva Frank Greta Hans Ines James Kenji "
    "Lucy Mark Nora Otto Priya Robert Sarah Theo Anna John Mary Paul Jane Max Lena Ali Mei Chen Kofi Lars Ada Alan"
).split()

CITIES = (
    "Paris London Berlin Madrid Rome Tokyo Oslo Vienna Lisbon Dublin Prague Athens Cairo Delhi Mumbai Sydney Toronto "
    "Boston Chicago Seattle Denver Dallas Miami Lima Bogota Santiago Quito Havana Nairobi Lagos Accra Tunis Istanbul "
    "Ankara Moscow Kyiv Warsaw Budapest Zurich Geneva Milan Naples Munich Hamburg Lyon Nice Porto Seville Beijing "
    "Shanghai Seoul Osaka Bangkok Hanoi Jakarta Manila Singapore Perth Auckland Helsinki Stockholm Copenhagen Brussels "
    "Amsterdam New_York San_Francisco Los_Angeles Buenos_Aires Hong_Kong Cape_Town Mexico_City"
).split()
CITIES = [name.replace("_", " ") for name in CITIES]

NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

TOPICS: dict[str, list[str]] = {
    "fruits": "apple banana cherry grape lemon mango orange peach pear plum".split(),
    "vegetables": "carrot potato tomato onion spinach broccoli cabbage pea bean pumpkin".split(),
    "animals": "cat dog horse cow sheep lion tiger elephant monkey rabbit".split(),
    "birds": "eagle owl robin sparrow crow parrot swan duck penguin pigeon".split(),
    "colors": "red blue green yellow orange purple black white pink brown".split(),
    "countries": "France Germany Spain Italy Japan China India Brazil Canada Egypt".split(),
    "cities": "Paris London Berlin Madrid Rome Tokyo Cairo Delhi Sydney Lima".split(),
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "days of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "months": "January February March April May June July August September October November December".split(),
    "sports": "football tennis basketball swimming cycling rowing hockey golf boxing skiing".split(),
    "musical instruments": "piano guitar violin drum flute trumpet cello harp clarinet saxophone".split(),
    "programming languages": "Python Java C Rust Go Ruby Swift Kotlin Haskell JavaScript".split(),
    "languages": "English French German Spanish Italian Japanese Chinese Arabic Hindi Russian".split(),
    "flowers": "rose tulip lily daisy orchid sunflower violet poppy iris lavender".split(),
    "trees": "oak pine maple birch willow cedar elm ash beech palm".split(),
    "drinks": "water milk tea coffee juice lemonade cocoa cider soda wine".split(),
    "metals": "iron gold silver copper tin lead zinc nickel aluminium titanium".split(),
    "insects": "ant bee butterfly beetle fly mosquito moth wasp cricket ladybug".split(),
    "tools": "hammer saw screwdriver drill wrench pliers chisel ruler file axe".split(),
    "clothes": "shirt trousers jacket hat scarf sock shoe glove coat dress".split(),
    "foods": "bread cheese rice pasta soup salad egg pizza cake fish".split(),
    "furniture": "table chair bed sofa desk shelf lamp wardrobe bench stool".split(),
    "shapes": "circle square triangle rectangle pentagon hexagon octagon oval star rhombus".split(),
    "seasons": "spring summer autumn winter".split(),
}
IN_ORDER = {"planets", "days of the week", "months", "seasons"}
TOPIC_ALIASES = {
    "colors": ["colors", "colours"],
    "days of the week": ["days of the week", "weekdays", "days"],
    "months": ["months", "months of the year"],
    "musical instruments": ["musical instruments", "instruments"],
    "foods": ["foods", "things to eat", "dishes"],
    "drinks": ["drinks", "beverages"],
    "planets": ["planets", "planets of the solar system"],
}

THINGS = (
    "apple book pen cup hat ball box coin stone shell button pencil flower cookie marble stamp egg candle card spoon "
    "bottle ticket sticker toy"
).split()
JOBS = "doctor teacher engineer baker farmer nurse pilot painter writer singer lawyer chef driver student".split()

HEROES = (
    "dragon cat dog robot princess knight wizard mouse fox bear rabbit owl pirate farmer frog turtle whale lion elephant "
    "monkey unicorn fairy ghost giant king queen boy girl penguin horse bee spider snail hedgehog squirrel wolf goat duck "
    "cloud star tree river computer server train boat kite teapot lighthouse astronaut baker painter gardener sailor "
    "witch tiger crow donkey pig sheep cow butterfly fish dolphin parrot snowman moon mountain clock"
).split()

_STARTS = "b br d dr f fl g gr h j k l m n p pr r s sh st t tr v w z th".split()
_VOWELS = "a e i o u ai ea ee o a".split()
_ENDS = "n l r s m k t x nd rt la na ra lo mi".split() + 2 * [""]


def invented(rng: Random, syllables: int = 2) -> str:
    """Return a pronounceable word that is probably in no dictionary, so that copying it must be learnt."""
    parts = [rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return "".join(parts) + rng.choice(_ENDS)


def person(rng: Random) -> str:
    """Return a first name, a third of the time an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.65 else invented(rng, rng.choice((1, 2, 2))).capitalize()


def city(rng: Random) -> str:
    """Return a city, a fifth of the time an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.8 else invented(rng).capitalize()


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" and noun != "unicorn" else "a ") + noun
