"""The work that all trainers are given: model, prompts, lengths, reward and batch, from a seed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Lengths = Literal["forced", "natural", "tail"]

PLUGIN = '''"""A reward that costs next to nothing: the share of characters with an even code."""

from swift.plugin import ORM, orms


class EvenShare(ORM):
    def __call__(self, completions, **kwargs):
        return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]


orms["even_share"] = EvenShare
'''

MS_SWIFT_PLUGIN = PLUGIN.replace(
    "from swift.plugin import ORM, orms",
    """try:
    from swift.rewards import ORM, orms  # 4.x
except ImportError:
    from swift.plugin import ORM, orms  # 3.x""",
)

TAIL_MEAN = 0.625
"""Mean of the exponential behind long-tailed lengths, as a share of the longest."""


def even_share(completions: list, **kwargs: object) -> list[float]:
    """The same reward for TRL, which hands over plain texts or messages."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One training step's worth of work; the defaults are the reference work.

    folder: where model, prompts and plugin lie. lengths: "forced" gives every completion `completion_tokens` tokens and
    "tail" those of `Work.limits`, because the end token is none that the model can sample; with "natural" completions
    end where the model ends them. vocab_size: None is the tokenizer's. device, dtype: where weights lie, and as what.
    recompute: gradient checkpointing.
    """

    folder: str
    size: str = "tiny"
    vocab_size: int | None = None
    num_completions: int = 64
    num_generations: int = 8
    per_device: int = 16
    completion_tokens: int = 64
    prompt_tokens: int = 16
    beta: float = 0.0
    lengths: Lengths = "forced"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: bool = False
    seed: int = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.num_completions // self.per_device

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return self.num_completions // self.num_generations

    @property
    def model(self) -> str:
        """The model's folder."""
        ends = "natural" if self.lengths == "natural" else "forced"
        return str(Path(self.folder) / f"model-{self.size}-{self.vocab_size or 'bytes'}-{ends}")

    @property
    def dataset(self) -> str:
        """The prompts, one JSON row with `messages` each."""
        return str(Path(self.folder) / f"prompts-{self.prompt_tokens}.jsonl")

    @property
    def plugin(self) -> str:
        """The reward as swift takes it."""
        return str(Path(self.folder) / "even_share.py")

    @property
    def plugin_of_ms_swift(self) -> str:
        """The reward as ms-swift takes it."""
        return str(Path(self.folder) / "even_share_ms_swift.py")

    @property
    def name(self) -> str:
        """Short, for tables."""
        words = {"forced": "all", "natural": "up to", "tail": "long-tailed to"}[self.lengths]
        vocabulary = f", vocabulary {self.vocab_size}" if self.vocab_size else ""
        place = "" if (self.device, self.dtype) == ("cpu", "float32") else f", {self.dtype} on {self.device}"
        return (
            f"{self.size}{vocabulary}, prompts {self.prompt_tokens}, {self.num_completions} x {words} "
            f"{self.completion_tokens} tokens, G {self.num_generations}, beta {self.beta:g}{place}"
            f"{', recomputed' if self.recompute else ''}"
        )

    @property
    def limits(self) -> list[int]:
        """Tokens of each completion of a step, by its place in the batch (group, then sample).

        Long-tailed: the quantiles of an exponential with mean 0.625 of the longest, cut there; a fifth of them are cut.
        They are spread over the groups by a stride, so that each group has short and long ones.
        """
        longest, count = self.completion_tokens, self.num_completions
        if self.lengths != "tail":
            return [longest] * count
        mean = TAIL_MEAN * longest
        sorted_ = [max(1, min(longest, round(-mean * math.log(1 - (i + 0.5) / count)))) for i in range(count)]
        sorted_[-1] = longest
        stride = next(s for s in range(int(count * 0.618) or 1, 2 * count + 1) if math.gcd(s, count) == 1)
        return [sorted_[i * stride % count] for i in range(count)]

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
    Path(work.plugin_of_ms_swift).write_text(MS_SWIFT_PLUGIN, encoding="utf-8")
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts(work)]
    Path(work.dataset).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if not (Path(work.model) / "config.json").exists():
        build_model(work)


def prompts(work: Work) -> list[str]:
    """64 different prompts of about `prompt_tokens` characters, which are as many tokens."""
    texts = [f"What is {i} + {i * 7 % 50}? " for i in range(64)]
    return [(text * (work.prompt_tokens // len(text) + 1))[: max(work.prompt_tokens, len(text))] for text in texts]


def build_model(work: Work) -> None:
    """A tiny model; unless lengths are natural its end token lies outside of what its head can produce."""
    from swift.models.tiny import build_tiny

    build_tiny(work.model, size=work.size, seed=work.seed)
    if work.vocab_size is not None:
        _widen(Path(work.model), work.vocab_size, work.seed)
    if work.lengths != "natural":
        _end_out_of_reach(Path(work.model))


def _widen(folder: Path, vocab_size: int, seed: int) -> None:
    """The same model with more tokens than the tokenizer has."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from swift.models.policy import quiet_loading

    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = vocab_size
    with torch.random.fork_rng(devices=[]), quiet_loading():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _name_all_tokens(folder / "tokenizer.json", vocab_size)


def _name_all_tokens(file: Path, vocab_size: int) -> None:
    """Give the tokenizer a token for each number that the model can sample, so that what is added lies behind them."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab: dict[str, int] = content["model"]["vocab"]
    first = 1 + max(*vocab.values(), *(token["id"] for token in content["added_tokens"]))
    vocab |= {f"filler{number}": number for number in range(first, vocab_size)}
    file.write_text(json.dumps(content), encoding="utf-8")


def _end_out_of_reach(folder: Path) -> None:
    """Give the tokenizer an end token behind the vocabulary of the model."""
    from transformers import AutoTokenizer

    from swift.models.templates import TEMPLATES

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    tokenizer.chat_template = TEMPLATES["plain"]  # ends an answer with the tokenizer's end token
    tokenizer.save_pretrained(folder)
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    never = max(tokenizer.eos_token_id, vocab_size)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**settings, "eos_token_id": never}), encoding="utf-8")
