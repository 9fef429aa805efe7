"""The work that both trainers are given: model, prompts, reward and batch, from a seed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

PLUGIN = '''"""A reward that costs next to nothing: the share of characters with an even code."""

from swift.plugin import ORM, orms


class EvenShare(ORM):
    def __call__(self, completions, **kwargs):
        return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]


orms["even_share"] = EvenShare
'''


def even_share(completions: list, **kwargs: object) -> list[float]:
    """The same reward for TRL, which hands over plain texts or messages."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One training step's worth of work; the defaults are the reference work of the README.

    folder: where model, prompts and plugin lie. forced: every completion has `completion_tokens` tokens, because
    the end token is none that the model can sample; otherwise completions end where the model ends them.
    """

    folder: str
    size: str = "tiny"
    num_completions: int = 64
    num_generations: int = 8
    per_device: int = 16
    completion_tokens: int = 64
    prompt_chars: int = 16
    beta: float = 0.0
    forced: bool = True
    seed: int = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.num_completions // self.per_device

    @property
    def model(self) -> str:
        """The model's folder."""
        return str(Path(self.folder) / f"model-{self.size}-{'forced' if self.forced else 'natural'}")

    @property
    def dataset(self) -> str:
        """The prompts, one JSON row with `messages` each."""
        return str(Path(self.folder) / "prompts.jsonl")

    @property
    def plugin(self) -> str:
        """The reward as swift takes it."""
        return str(Path(self.folder) / "even_share.py")

    @property
    def name(self) -> str:
        """Short, for tables."""
        lengths = f"{'all' if self.forced else 'up to'} {self.completion_tokens} tokens"
        return f"{self.size}, {self.num_completions} x {lengths}, beta {self.beta:g}"

    def to_json(self) -> str:
        """For a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


def prepare(work: Work) -> None:
    """Write model, prompts and plugin, unless they are there."""
    folder = Path(work.folder)
    folder.mkdir(parents=True, exist_ok=True)
    Path(work.plugin).write_text(PLUGIN, encoding="utf-8")
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts(work)]
    Path(work.dataset).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if not (Path(work.model) / "config.json").exists():
        build_model(work)


def prompts(work: Work) -> list[str]:
    """64 different prompts of about `prompt_chars` characters, which are as many tokens."""
    texts = [f"What is {i} + {i * 7 % 50}? " for i in range(64)]
    return [(text * (work.prompt_chars // len(text) + 1))[: max(work.prompt_chars, len(text))] for text in texts]


def build_model(work: Work) -> None:
    """A tiny model; for forced lengths its end token lies outside of what its head can produce."""
    from swift.models.tiny import build_tiny

    build_tiny(work.model, size=work.size, seed=work.seed)
    if work.forced:
        _end_out_of_reach(Path(work.model))


def _end_out_of_reach(folder: Path) -> None:
    """Give the tokenizer an end token behind the vocabulary of the model."""
    from transformers import AutoTokenizer

    from swift.models.templates import TEMPLATES

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    tokenizer.chat_template = TEMPLATES["plain"]  # ends an answer with the tokenizer's end token
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        settings = json.loads(path.read_text(encoding="utf-8"))
        assert tokenizer.eos_token_id >= json.loads((folder / "config.json").read_text())["vocab_size"]
        path.write_text(json.dumps({**settings, "eos_token_id": tokenizer.eos_token_id}), encoding="utf-8")
