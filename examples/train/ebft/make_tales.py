"""Writes tales of a few sentences as plain text: `{"text": "..."}` per line.

Each animal has a habit, a place and a colour of its own, which a tale keeps to, so that a small model can learn what
goes with what; which animals a tale is about is chance.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

ANIMALS = {
    "cat": ("grey", "sleeps", "the warm oven"),
    "fox": ("red", "hunts", "the dark wood"),
    "owl": ("brown", "watches", "the old tower"),
    "frog": ("green", "sings", "the quiet pond"),
    "bear": ("black", "fishes", "the cold river"),
    "goat": ("white", "climbs", "the steep rocks"),
}


def tale(draw: random.Random) -> str:
    """Two to three animals, a sentence on each, and one on who meets whom."""
    chosen = draw.sample(sorted(ANIMALS), draw.randint(2, 3))
    sentences = []
    for name in chosen:
        colour, habit, place = ANIMALS[name]
        sentences.append(f"The {colour} {name} {habit} near {place}.")
    first, second = draw.sample(chosen, 2)
    sentences.append(f"The {first} meets the {second} near {ANIMALS[second][2]}.")
    return " ".join(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with args.file.open("w", encoding="utf-8") as lines:
        for _ in range(args.rows):
            lines.write(json.dumps({"text": tale(draw)}) + "\n")


if __name__ == "__main__":
    main()
