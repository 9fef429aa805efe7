"""Writes short stories as plain text, one per line: `python make_stories.py stories.jsonl --rows 2000 --seed 0`.

Names, animals and food come again within a story, so that a model of neighbouring letters cannot foresee them.
"""

import argparse
import json
import random
from pathlib import Path

NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jun")
ANIMALS = ("cat", "dog", "fox", "goat", "hen", "owl", "pig", "seal")
FOODS = ("apples", "bread", "corn", "fish", "grapes", "honey", "nuts", "rice")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def story(draw: random.Random) -> str:
    """A story of one to three friends."""
    told = []
    for name in draw.sample(NAMES, draw.randint(1, 3)):
        animal, food, day = draw.choice(ANIMALS), draw.choice(FOODS), draw.choice(DAYS)
        told.append(f"{name} is a {animal}. {name} the {animal} likes {food}. On {day} {name} eats {food}.")
    return " ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with args.path.open("w", encoding="utf-8") as lines:
        for _ in range(args.rows):
            lines.write(json.dumps({"text": story(draw)}) + "\n")


if __name__ == "__main__":
    main()
