"""Small tales, told by a grammar: a text for train_chars.py that is the same on every machine.

    python examples/tales.py 3    # tells three of them

A tale names its people and things once and comes back to them later, so that a model has to look
back to tell it right: who lost what, where it was, and who helped.
"""

from __future__ import annotations

import argparse
import random

PEOPLE = {
    "he": ["Anselm", "Bruno", "Corin", "Dorn", "Edwin", "Falk", "Gorm", "Hugo"],
    "she": ["Alba", "Berta", "Clara", "Dora", "Edith", "Flora", "Greta", "Hilda"],
}
TRADES = ["baker", "cobbler", "fisher", "gardener", "miller", "potter", "smith", "tailor", "weaver"]
TOWNS = ["Ashford", "Birkdale", "Coldwater", "Eastmere", "Marlow", "Oakham", "Thornby", "Wexley"]
COLOURS = ["black", "blue", "brass", "copper", "golden", "green", "grey", "red", "silver", "white"]
THINGS = [
    "bell",
    "book",
    "button",
    "coin",
    "cup",
    "hammer",
    "key",
    "lamp",
    "needle",
    "ring",
    "spoon",
]
ANIMALS = ["badger", "crow", "fox", "goat", "hare", "heron", "mole", "otter", "owl", "toad"]
PLACES = ["bridge", "gate", "great oak", "market", "mill", "pond", "stone wall", "tower", "well"]
WHERE = ["behind", "beside", "near", "under"]
TIMES = [
    "At dawn",
    "In autumn",
    "On a cold morning",
    "One evening",
    "One summer day",
    "Last winter",
]
THANKS = ["a loaf of bread", "a pot of honey", "a song", "a warm blanket", "an apple", "three nuts"]
NUMBERS = ["two", "three", "four", "five", "six", "seven"]


def tale(rng: random.Random) -> str:
    """One tale, some 400 characters."""
    pronoun = rng.choice(list(PEOPLE))
    possessive = {"he": "his", "she": "her"}[pronoun]
    name = rng.choice(PEOPLE[pronoun])
    trade, town = rng.choice(TRADES), rng.choice(TOWNS)
    thing = f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
    animals = rng.sample(ANIMALS, rng.choice([1, 2, 2, 3]))
    places = rng.sample(PLACES, len(animals) + 1)
    where = f"{rng.choice(WHERE)} the {places[-1]}"
    lines = [
        f"{name} was a {trade} in {town}. {rng.choice(TIMES)} {pronoun} lost {possessive} {thing}."
    ]
    for animal, place in zip(animals, places, strict=False):
        lines.append(f'{name} asked the {animal} by the {place}: "Have you seen my {thing}?"')
        if animal is animals[-1]:
            lines.append(f'"It lies {where}," said the {animal}.')
        else:
            lines.append(
                rng.choice(['"I have not," said the {}.', '"No," said the {}.']).format(animal)
            )
    days = rng.choice(NUMBERS)
    lines.append(
        f"So {name} walked for {days} days, and {where} {pronoun} found the {thing}. "
        f"{pronoun.capitalize()} thanked the {animals[-1]} with {rng.choice(THANKS)}, and went "
        f"home to {town}."
    )
    return "\n".join(lines)


def tales(count: int, seed: int = 0) -> str:
    """So many tales, an empty line after each."""
    rng = random.Random(seed)
    return "".join(tale(rng) + "\n\n" for _ in range(count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many tales (default: 1)")
    print(tales(parser.parse_args().count, seed=1), end="")
