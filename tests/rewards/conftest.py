"""Groups and pipelines for the reward tests: small, fast, with short time limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swift.types import Completion, Prompt, RolloutGroup, TrainerProgress

PROGRESS = TrainerProgress(global_step=3, max_steps=10, epoch=0.5)


def make_group(texts, *, group_id="g0", prompt_id="p0", **columns):
    """A group whose completions are `texts`; token ids count the words."""
    completions = [
        Completion(
            request_id=f"{group_id}-{index}",
            token_ids=list(range(len(text.split()))),
            logprobs=[-1.0] * len(text.split()),
            finish_reason="stop",
            text=text,
        )
        for index, text in enumerate(texts)
    ]
    prompt = Prompt(prompt_id, [{"role": "user", "content": "question"}], [1, 2, 3], dict(columns))
    return RolloutGroup(group_id, 0, 0, prompt, completions)


def make_args(**values):
    defaults = {
        "reward_funcs": [],
        "reward_model": [],
        "reward_weights": [],
        "external_plugins": [],
        "reward_timeout": 5.0,
        "reward_workers": 2,
        "soft_cache_length": None,
        "gold_column": None,
        "tokenizer": None,
        "completions": None,
        "min_gold": 0.0,
        "json": False,
        "seed": 42,
        "max_completion_length": 512,
    }
    return SimpleNamespace(**{**defaults, **values})


@pytest.fixture
def group():
    return make_group


@pytest.fixture
def arguments():
    return make_args


@pytest.fixture
def progress():
    return PROGRESS


@pytest.fixture
def plugin(tmp_path):
    """Writes a plugin file and returns its path."""

    def write(source, name="plugin.py"):
        path = tmp_path / name
        path.write_text("from swift.plugin import ORM, AsyncORM, orms\n" + source)
        return str(path)

    return write


@pytest.fixture
def pipeline(tmp_path, plugin):
    """Builds pipelines from the source of a plugin; closes them at the end."""
    from swift.rewards.pipeline import RewardPipeline

    built = []

    def build(names, source="", *, plugins=(), seed=7, max_completion_length=100, num_workers=2, decode=None, **values):
        files = [*plugins, *([plugin(source)] if source else [])]
        args = make_args(reward_funcs=list(names), external_plugins=files, reward_workers=num_workers, **values)
        made = RewardPipeline(args, seed=seed, max_completion_length=max_completion_length, decode=decode)
        made.log_to(tmp_path / "workers.log")
        built.append(made)
        return made

    yield build
    for made in built:
        made.close()
