"""A rollout function around a scripted engine."""

from __future__ import annotations

from types import SimpleNamespace

from scripted_engine import VOCABULARY, ScriptedEngine

from swift.rollout.sources.function import FunctionSource

TOKENIZER = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))


def passing(prompts, rollout):
    """Passes on what the engine samples."""
    done = rollout.generate(rollout.repeated_prompt_ids)
    return {"completion_ids": [one.token_ids for one in done], "logprobs": [one.logprobs for one in done]}


def wrap(function=passing, *, engine=None, limit_s=30.0):
    return FunctionSource(
        engine or ScriptedEngine(), function, name="mine", args=SimpleNamespace(temperature=1.0),
        tokenizer=TOKENIZER, end_token_ids=(1,), vocab_size=VOCABULARY, limit_s=limit_s,
    )  # fmt: skip
