"""Passes of the reference run while rewards are computed, and change no bit by that."""

from __future__ import annotations

import threading

import pytest
import torch
from grpo_parts import LateScorer, Scorer, all_different, logs_of, make_trainer

from swift.arguments import parse
from swift.errors import ConfigError
from swift.models import load_chat
from swift.models.reference import FrozenReference
from swift.rl.losses import LossConfig
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.trainers.grpo.build import load_models


class Watched(FrozenReference):
    """A reference that says when it is run."""

    def __init__(self, module):
        super().__init__(module)
        self.seen, self.runs = threading.Event(), 0

    def active(self):
        self.runs += 1
        self.seen.set()
        return super().active()


def some_without_reward(completion, prompt):
    return None if sum(completion.token_ids) % 3 == 0 else all_different(completion, prompt)


def trained(folder, tmp_path, *, late, reward=all_different, in_reward=False, whole=False, **settings):
    """A run of three steps, its scorer and its reference."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    reference = Watched(AutoModelForCausalLM.from_pretrained(folder))
    scorer = LateScorer(reward, reference.seen, needs_whole_batch=whole) if late else Scorer(reward)
    if settings.get("depth"):  # who samples ahead needs weights of its own
        settings["engine"] = build_engine(EngineSpec(backend="transformers", model=str(folder)))
    trainer = make_trainer(
        folder, tmp_path / str(late), reference=reference, scorer=scorer, max_steps=3, max_samples=2,
        loss=LossConfig(beta=0.0 if in_reward else 0.5), **settings,
    )  # fmt: skip
    reference.seen.set()  # the first rewards come before the first step, which decides on micro-batches
    if in_reward:
        trainer.pipeline.batches.config = replaced(trainer.pipeline.batches.config, reward_kl=0.5)
        trainer.pipeline.batches.kl_of = trainer.logprobs.reward_kl
    trainer.train()
    return trainer, scorer, reference


def replaced(config, **changes):
    import dataclasses

    return dataclasses.replace(config, **changes)


CASES = [
    pytest.param({}, id="loss"),
    pytest.param({"num_global_batches": 3}, id="num_global_batches"),
    pytest.param({"depth": 1}, id="one-ahead"),
    pytest.param({"whole": True}, id="whole-batch"),
    pytest.param({"in_reward": True}, id="reward"),
    pytest.param({"reward": some_without_reward}, id="without-reward"),
    pytest.param({"reward": some_without_reward, "in_reward": True}, id="without-reward-in-reward"),
]


@pytest.mark.parametrize("settings", CASES)
def test_rewards_may_take_until_the_reference_has_run_and_no_bit_changes(nano_folders, tmp_path, settings):
    folder = nano_folders["qwen2"]
    late, scorer, reference = trained(folder, tmp_path, late=True, **settings)
    assert scorer.calls >= 2, "rewards that waited for the reference"
    plain, _, _ = trained(folder, tmp_path, late=False, **settings)
    for (name, ours), theirs in zip(late.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    measure = "kl_in_reward" if settings.get("in_reward") else "kl"
    assert [row[measure] for row in logs_of(late)] == [row[measure] for row in logs_of(plain)]
    assert logs_of(late)[-1][measure] != 0
    if "reward" not in settings:
        passes = len(logs_of(late)) * 4  # 8 completions by slices of 2
        assert reference.runs == passes, "no pass was made twice"


def test_what_a_replay_buffer_may_stand_in_for_is_not_passed_over(nano_folders, tmp_path):
    from swift.rollout.replay import ReplayBuffer

    trainer = make_trainer(nano_folders["qwen2"], tmp_path, loss=LossConfig(beta=0.5), reference=watched(nano_folders))
    assert trainer.pipeline.batches.has_early_pass
    trainer.pipeline.batches.replay = ReplayBuffer(4, max_age=4, seed=0, recompute=False)
    assert not trainer.pipeline.batches.has_early_pass


def test_a_reference_that_knows_fewer_tokens_than_the_tokenizer_is_refused(nano_folders):
    words = "--rlhf_type grpo --dataset d --reward_funcs accuracy --beta 0.1 --tuner_type full"
    words = f"{words} --model {nano_folders['qwen2']} --ref_model {nano_folders['llama']}"
    args = parse("rlhf", words.split(), {}).args
    template = load_chat(args)
    policy, beside = load_models(args, template)
    assert type(policy) is not type(beside["ref_logprobs"].module)
    template.tokenizer.add_tokens(["one", "more"])
    with pytest.raises(ConfigError, match=r"--ref_model: .*llama: knows 263 tokens, .* --model has 265; give a model"):
        load_models(args, template)


def watched(folders):
    from transformers import AutoModelForCausalLM

    return Watched(AutoModelForCausalLM.from_pretrained(folders["qwen2"]))
