"""Tokens that the policy did not write: whatever stands there moves no gradient, and advantages of single tokens."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sources
import torch
from grpo_parts import one_step, policy_of

from swift.models.arguments import CheckpointArguments
from swift.models.template import Template
from swift.models.tokenizer import load_chat
from swift.plugin import Env
from swift.rl.losses import LossConfig
from swift.rollout.batches import BatchConfig, BatchMaker
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.round_result import fault
from swift.rollout.samples import RolloutBatch
from swift.rollout.sources.atropos.api import Group
from swift.rollout.sources.atropos.groups import GroupReader
from swift.rollout.sources.multi_turn.environments import of_envs
from swift.rollout.sources.multi_turn.source import TrajectorySource
from swift.rollout.sources.multi_turn.tools import Toolbox
from swift.rollout.sources.multi_turn.trajectory import Limits, Trajectory
from swift.rollout.sources.nemo_gym.assembly import assemble, calls_of
from swift.trainers.grpo.entropy import EntropySettings
from swift.trainers.grpo.micro_batch import collate
from swift.trainers.grpo.settings import CorrectionSettings
from swift.types import GroupScores, Prompt, Request, RolloutGroup, SamplingParams

ROOT = Path(__file__).parents[2]
SIZE, LIMITS = 8, Limits(max_turns=3, scope="per_round", max_model_len=1000)
CHAT = [{"role": "user", "content": "How many?"}]
CONFIG = BatchConfig(
    num_generations=SIZE, generation_batches=1, num_global_batches=1, num_iterations=1, reward_weights=[1.0]
)
BATCHES = BatchMaker(CONFIG)


class Asks(Env):
    """Two more questions, then it is over."""

    async def reset(self, request):
        return None, {}, None

    async def step(self, messages):
        await asyncio.sleep(0)
        return "And now?", 1.0, len(messages) > 4, {}


def echo(text: str) -> str:
    return "got it " + text


SCHEMA = {"type": "function", "function": {"name": "echo", "parameters": {"properties": {"text": {}}}}}
CALL = {"function": {"name": "echo", "arguments": {"text": "{content}"}}}
VOWELS = {
    "start_anchor": "-",
    "fields": {
        "tool_calls": {"open_pattern": "[aeiou]", "close_pattern": "$", "repeats": True, "transform": CALL},
    },
}


@pytest.fixture(scope="module")
def sampled(nano_folders):
    """What an environment, tools, Atropos and NeMo Gym make of answers of the nano model, as completions by name."""
    folder = nano_folders["qwen2"]
    template = load_chat(CheckpointArguments(model=str(folder)))
    template.tokenizer.chat_template = (ROOT / "examples/train/grpo/environments/tools.jinja").read_text()
    template = Template(template.tokenizer)
    box = Toolbox(template, {"echo": echo}, {"echo": SCHEMA}, VOWELS, 5.0)
    asked = played(folder, template, of_envs({"asks": Asks}, "asks"), template.encode_prompt(CHAT), 5)
    called = played(folder, template, box.play, box.encode(CHAT), 60, stop=tuple("aeiou"))
    assert any(one.episode.metrics["tools/calls"] for one in called)
    return {
        "gym": asked,
        "tools": called,
        "atropos": by_atropos(asked, template),
        "nemo_gym": [by_agent(one, template) for one in asked],
    }


def played(folder, template, play, prompt_ids, tokens, **sampling):
    """Trajectories of one prompt, in order."""
    inner = TransformersEngine(policy_of(folder), eos_token_ids=(), tokenizer=template.tokenizer)
    source = TrajectorySource(inner, template, LIMITS, play, "--gym_env: test")
    prompt = Prompt("p", CHAT, prompt_ids)
    params = [SamplingParams(tokens, seed=seed, **sampling) for seed in range(SIZE)]
    wanted = [Request(f"p-0/{i}", prompt_ids, one, prompt) for i, one in enumerate(params)]
    try:
        done = sources.sampled(source, wanted)
    finally:
        source.close()
    for one in done:
        one.episode.prompt_ids = prompt_ids
    return done


def by_atropos(completions, template):
    """The same as a group of the message API."""
    prompts = [one.episode.prompt_ids for one in completions]
    tokens = [prompt + one.token_ids for prompt, one in zip(prompts, completions, strict=True)]
    masks = [[0] * len(prompt) + one.mask for prompt, one in zip(prompts, completions, strict=True)]
    values = [[1.0] * len(prompt) + one.logprobs for prompt, one in zip(prompts, completions, strict=True)]
    group = {
        "tokens": tokens,
        "masks": [[t if m else -100 for t, m in zip(*pair, strict=True)] for pair in zip(tokens, masks, strict=True)],
        "inference_logprobs": [
            [v if m else 1.0 for v, m in zip(*pair, strict=True)] for pair in zip(values, masks, strict=True)
        ],
        "scores": [float(i) for i in range(SIZE)],
        "env_id": 0,
    }
    reader = GroupReader(
        SIZE, len(template.tokenizer), 1000, 1.0, True, False, template.stop_token_ids, template.decode
    )
    names = [f"a-0/{i}" for i in range(SIZE)]
    return reader.completions(msgspec.convert(group, Group), names, lambda asked: [None] * len(asked))


def by_agent(done, template):
    """The same as the items that an agent of NeMo Gym hands back."""
    edges = [0, *(1 + np.flatnonzero(np.diff(done.mask))), len(done.mask)]
    items = [
        {
            "type": "message",
            "prompt_token_ids": done.episode.prompt_ids + done.token_ids[:first],
            "generation_token_ids": done.token_ids[first:last],
            "generation_log_probs": done.logprobs[first:last],
        }
        for first, last in itertools.pairwise(edges)
        if done.mask[first]
    ]
    request = Request("n-0/0", [1], SamplingParams(5))
    trajectory = Trajectory(request, template, None, LIMITS, [])
    calls = calls_of(items, len(template.tokenizer))
    assert len(calls) == 3
    assemble(trajectory, items, calls, [None] * len(calls), template.stop_token_ids)
    return trajectory.completion()


def samples_of(completions):
    """As the trainer gets them, with rewards 0, 1, ... and one that is left out."""
    assert {fault(one) for one in completions} == {None}
    group = RolloutGroup("p-0", 0, 0, Prompt("p", CHAT, [1]), completions)
    excluded = [*[None] * (SIZE - 1), "no_reward"]
    group.scores = GroupScores([[float(i)] if why is None else [None] for i, why in enumerate(excluded)], excluded)
    return BATCHES.make([group], 0).batch.samples


@pytest.mark.parametrize("door", ["gym", "tools", "atropos", "nemo_gym"])
def test_an_assembled_sample_has_the_log_probs_of_the_trainers_forward(make, sampled, door):
    samples = samples_of(sampled[door])
    batch = collate(samples, [1.0] * SIZE, device="cpu")
    trainer = make()
    with torch.no_grad():
        logprobs_N, _ = trainer.logprobs.scores(trainer.model, batch)
    trained_N = batch.mask_N
    assert 0 < int(trained_N.sum()) < trained_N.numel() - samples[-1].token_ids.size
    assert float((logprobs_N - batch.sampler_logprobs_N)[trained_N].abs().max()) < 1e-5


SETTINGS = {
    "grpo": {},
    "sequence ratio, reference": {"loss": LossConfig(loss_type="gspo", beta=0.3)},
    "corrected by sequence": {"correction": CorrectionSettings(mode="sequence_mask", threshold=1.5)},
    "drifted": {"off_policy_delta": 0.1},
    "entropy bonus": {"entropy": EntropySettings(coefficient=0.1)},
    "most uncertain": {"entropy": EntropySettings(quantile=0.5)},
    "sampler": {"loss": LossConfig(rollout_kl_coef=0.1), "old_logprobs": "sampler"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_gradient_comes_from_tokens_that_the_policy_did_not_write(make, sampled, name):
    def gradients(noise):
        """noise: what masked tokens get; their ids stay, because they are context of later ones."""
        samples = [perturbed(one, noise) for one in stale(samples_of(sampled["tools"]))]
        trainer = make(**SETTINGS[name])
        scores, given = trainer.logprobs.scores, []

        def perturbing(model, batch, entropy="none"):
            own, uncertainty = scores(model, batch, entropy)
            masked = ~batch.mask_N
            if own.requires_grad:
                own.register_hook(lambda gradient: given.append((gradient, batch.mask_N)))
            moved = [None if one is None else torch.where(masked, one * (1 + noise), one) for one in (own, uncertainty)]
            return moved[0], moved[1]

        trainer.logprobs.scores = perturbing
        trainer.pipeline.steps = lambda progress: iter([RolloutBatch(samples, 1, 1)])
        found = one_step(trainer).gradients
        assert given
        for gradient_N, mask_N in given:
            assert not gradient_N[~mask_N].any() and gradient_N[mask_N].any()
        return found

    plain, noisy = gradients(0.0), gradients(0.7)
    assert all(torch.equal(plain[parameter], noisy[parameter]) for parameter in plain)


def stale(samples):
    """Of a rollout batch whose policy has moved since."""
    for number, one in enumerate(samples):
        draw = np.random.default_rng(number).normal(0, 0.2, one.token_ids.size).astype(np.float32)
        one.old_logprobs = one.sampler_logprobs + draw
        one.ref_logprobs = one.sampler_logprobs - draw
    return samples


def perturbed(sample, noise):
    """Other log-probs at masked tokens, and another token where it is nobody's context."""
    values = {
        name: np.where(sample.trained, getattr(sample, name), getattr(sample, name) - 9 * np.float32(noise))
        for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs")
    }
    ids = sample.token_ids.copy()
    if noise and not sample.trained[-1]:
        ids[-1] += 1
    return replace(sample, token_ids=ids, **values)


def test_advantages_of_tokens_weigh_each_token_by_its_own(make, sampled):
    def gradients(by_token=None, scale=0.0):
        samples = samples_of(sampled["gym"])
        for one in samples:
            one.advantage = scale
            if by_token is not None:
                values = by_token(np.arange(one.token_ids.size, dtype=np.float32))
                one.token_advantages = np.where(one.trained, values, 0).astype(np.float32)
        trainer = make()
        trainer.pipeline.steps = lambda progress: iter([RolloutBatch(samples, 1, 1)])
        return one_step(trainer).gradients

    equal, number = gradients(np.ones_like), gradients(scale=1.0)
    assert all(torch.equal(equal[name], number[name]) for name in equal)
    early, late = (gradients(lambda place, side=side: (place < 4) == side) for side in (True, False))
    for name, whole in number.items():
        torch.testing.assert_close(early[name] + late[name], whole, rtol=1e-4, atol=1e-6)
        assert not torch.equal(early[name], whole)
