"""Dots of four colours: a teacher who knows one of them, and what a right answer is worth.

    python examples/train/grpo/vision/colours.py data FOLDER
    python examples/train/grpo/vision/colours.py teach MODEL FOLDER

`data` draws images of 32 x 32 pixels with a dot somewhere, and writes train.jsonl and held_out.jsonl, whose rows name
them; no image is in both, and all colours are equally frequent:

    {"messages": [{"role": "user", "content": "<image>Which colour?"}], "images": ["images/17.png"], "solution": "r"}

`teach` makes a model with random weights imitate a teacher who knows red and guesses other colours: 44 of 100 answers
are right, and no imitation is better. Then it prints the share of right answers to held-out images, at temperature 1.
As `--external_plugins` the file adds the reward `named`, which is 1 for a right answer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from swift.plugin import orms

COLOURS = {"r": (1, 0, 0), "g": (0, 1, 0), "b": (0, 0, 1), "y": (1, 1, 0)}
"""First letter -> which of red, green and blue are bright."""
KNOWN = "r"
SIZE = 32
QUESTION = "Which colour?"


@orms.register("named")
def named(completions: list[str], solution: list[str], **kwargs: object) -> list[float]:
    """1 for the colour of the dot and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, solution, strict=True)]


def draw(letter: str, chance: random.Random, file: Path) -> None:
    """A dot of the colour, somewhere on a dark ground; no two images have the same shades."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), tuple(chance.randrange(90) for _ in range(3)))
    radius = chance.randrange(5, 10)
    x, y = (chance.randrange(radius, SIZE - radius) for _ in range(2))
    shade = tuple(chance.randrange(150, 256) if bright else chance.randrange(90) for bright in COLOURS[letter])
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=shade)
    image.save(file)


def write_data(folder: Path, rows: int, held_out: int, seed: int) -> None:
    chance = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(rows + held_out):
        letter, name = list(COLOURS)[index % len(COLOURS)], f"images/{index}.png"
        draw(letter, chance, folder / name)
        messages = [{"role": "user", "content": f"<image>{QUESTION}"}]
        lines.append(json.dumps({"messages": messages, "images": [name], "solution": letter}) + "\n")
    (folder / "held_out.jsonl").write_text("".join(lines[:held_out]))
    (folder / "train.jsonl").write_text("".join(lines[held_out:]))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Student:
    """A model of examples/tiny/build.py, and what it makes of images and answers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        from swift.models.vision import load_processor

        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.processor = load_processor(folder, self.model.config, tokenizer)
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
        self.prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        self.end = tokenizer.eos_token

    def logprobs(self, files: list[Path], answers: list[str]) -> Any:
        """[images, 2]: of the letter of each answer, and of the end after it."""
        from PIL import Image

        images = [Image.open(file).convert("RGB") for file in files]
        texts = [self.prompt + answer + self.end for answer in answers]
        inputs = self.processor(text=texts, images=images, return_tensors="pt")
        logits = self.model(**inputs).logits[:, -3:-1]
        return logits.log_softmax(-1).gather(2, inputs["input_ids"][:, -2:, None])[..., 0]


def teach(model_folder: Path, folder: Path, steps: int, seed: int) -> None:
    """Train all of the model on the teacher's answers, 32 images a step, and save it."""
    import torch

    chance, student = random.Random(seed), Student(model_folder)
    rows, held_out = read(folder / "train.jsonl"), read(folder / "held_out.jsonl")
    optimizer = torch.optim.AdamW(student.model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        chosen = chance.sample(rows, 32)
        answers = [KNOWN if row["solution"] == KNOWN else chance.choice(list(COLOURS)) for row in chosen]
        loss = -student.logprobs([folder / row["images"][0] for row in chosen], answers).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"teach: step {step}/{steps}: loss {float(loss.detach()):.3f}", flush=True)
    with torch.no_grad():
        right = student.logprobs([folder / row["images"][0] for row in held_out], [row["solution"] for row in held_out])
    print(f"teach: held-out accuracy {float(right.sum(1).exp().mean()):.3f}")
    student.model.save_pretrained(model_folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    actions = parser.add_subparsers(dest="action", required=True)
    data = actions.add_parser("data")
    data.add_argument("folder", type=Path)
    data.add_argument("--rows", type=int, default=4000)
    data.add_argument("--held_out_rows", type=int, default=200)
    teacher = actions.add_parser("teach")
    teacher.add_argument("model", type=Path)
    teacher.add_argument("folder", type=Path)
    teacher.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if args.action == "data":
        write_data(args.folder, args.rows, args.held_out_rows, args.seed)
    else:
        teach(args.model, args.folder, args.steps, args.seed)


if __name__ == "__main__":
    main()
