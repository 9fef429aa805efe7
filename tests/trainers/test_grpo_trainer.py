"""The GRPO step: gradients that no cut changes, updates that are skipped, log-probs that are not computed twice."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
import torch
from grpo_parts import (
    logs_of,
    one_step,
    passes_of,
    policy_of,
    relative_difference,
    share_of_even_tokens,
)
from safetensors.torch import load_file

from swift.errors import EngineDead, NumericError, RewardError
from swift.models.reference import AdapterOffReference, FrozenReference
from swift.rl.losses import LossConfig
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.trainers.checkpoint import verify
from swift.types import Prompt


def test_gradient_checkpointing_changes_no_gradient(make):
    expected = one_step(make()).gradients
    trainer = make()
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert relative_difference(one_step(trainer).gradients, expected) < 1e-6


def test_samples_without_advantage_are_left_out_and_still_counted(make):
    def reward(completion, prompt):
        return 1.0 if prompt.prompt_id == "p0" else completion.token_ids[0] % 2

    found = []
    for skips, sequences in ((True, 4), (False, 8)):
        trainer = make(reward=reward, skip_zero_advantage=skips)
        passes = passes_of(trainer)
        found.append(one_step(trainer).gradients)
        assert sum(passes) == sequences, "the group of equal rewards takes part in no forward pass if it may be skipped"
    assert relative_difference(*found) < 1e-6


def test_one_update_per_rollout_needs_one_forward(make):
    trainer = make(max_steps=3)
    calls = passes_of(trainer)
    trainer.train()
    assert calls == [8, 8, 8]


def test_iterations_reuse_the_first_forward_as_old_logprobs(make):
    trainer = make(iterations=3, max_steps=3)
    calls = passes_of(trainer)
    trainer.train()
    assert calls == [8, 8, 8]
    ratios = [row["ratio/max"] for row in logs_of(trainer)]
    assert ratios[0] == 1.0
    assert ratios[1] > 1.0
    assert len(trainer.rounds) == 1, "one rollout feeds three updates"


def test_later_global_batches_get_old_logprobs_before_the_first_update(make):
    trainer = make(num_global_batches=2, max_steps=2, learning_rate=1e-2)
    calls = passes_of(trainer)
    trainer.train()
    assert calls == [8, 8, 8], "global batch 2 without gradient, then global batches 1 and 2"
    first, second = (row["ratio/max"] for row in logs_of(trainer))
    assert first == 1.0
    assert second > 1.0


def test_a_later_update_without_old_logprobs_ends_the_run(make):
    """As when a sample is on another rank than at its first update: its ratio would be 1 without a word."""
    trainer = make(iterations=2, max_steps=2)
    step = trainer.training_step

    def forget(model, batch, *more):
        if batch.position == 1:
            batch.samples[3].old_logprobs = None
        return step(model, batch, *more)

    trainer.training_step = forget
    with pytest.raises(NumericError, match="old log-probs: rank 0 has none for 1 of 8 samples in update 2"):
        trainer.train()


def test_a_global_batch_without_signal_leaves_every_weight_alone(make):
    trainer = make(reward=lambda c, p: 1.0, weight_decay=0.5)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert [row["health/steps_without_signal"] for row in logs_of(trainer)] == [1, 1]
    assert trainer.state.global_step == 2


def test_a_non_finite_gradient_skips_the_update_and_ends_the_run_when_it_stays(make):
    trainer = make(max_steps=50)
    poison(trainer)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(NumericError, match="grad_norm"):
        trainer.train()
    assert trainer.state.global_step == 9
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_a_non_finite_gradient_skips_the_update_without_clipping_too(make):
    trainer = make(max_steps=2, max_grad_norm=0.0)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    poison(trainer)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def poison(trainer):
    original = trainer.logprobs.scores
    trainer.logprobs.scores = lambda *given: (original(*given)[0] * float("nan"), None)


@pytest.mark.parametrize("kind", ["frozen copy", "adapters off"])
def test_the_kl_of_the_first_step_is_zero_and_grows(make, nano_folders, kind):
    folder, lora = nano_folders["qwen3"], {"lora_dropout": 0.0} if kind == "adapters off" else None
    policy = policy_of(folder, lora=lora)
    reference = AdapterOffReference(policy) if lora else FrozenReference(policy_of(folder))
    rate = 1e-1 if kind == "adapters off" else 1e-2
    loss = LossConfig(beta=0.1)
    trainer = make(model=policy, reference=reference, loss=loss, learning_rate=rate)
    frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    trainer.train()
    first, second = (row["kl"] for row in logs_of(trainer))
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second > 1e-6
    assert all(torch.equal(p, frozen[name]) for name, p in policy.named_parameters() if not p.requires_grad)


def test_completions_carry_the_version_of_the_weights_whose_log_probs_they_have(make):
    trainer = make("llama", num_global_batches=2, max_steps=5, learning_rate=1e-2)
    trainer.train()
    assert [scored.version for scored in trainer.rounds] == [0, 1, 2]
    assert [trainer.pipeline.weight_sync.step_of(version) for version in (0, 1, 2)] == [0, 2, 4]
    gaps = [row["mismatch/logp_abs_diff_max"] for row in logs_of(trainer)]
    assert len(gaps) == 5 and max(gaps) < 1e-5


def test_an_engine_with_weights_of_its_own_trains_like_the_model_itself(make, nano_folders):
    def trained(**engine):
        trainer = make(max_steps=5, **engine)
        trainer.train()
        assert max(row["mismatch/logp_abs_diff_max"] for row in logs_of(trainer)) < 1e-5
        return [one.token_ids for scored in trainer.rounds for group in scored.groups for one in group.completions]

    engine = build_engine(EngineSpec(backend="transformers", model=str(nano_folders["qwen2"])))
    assert trained(engine=engine) == trained()


def test_the_overlong_filter_takes_cut_completions_out_of_the_loss_only(make):
    trainer = make(overlong_filter=True)
    trainer.train()
    scored = trainer.rounds[0]
    assert set(scored.excluded) == {"overlong"}
    assert any(advantage != 0 for advantage in scored.advantages), "they count in the group's statistics"
    assert [row["health/steps_without_signal"] for row in logs_of(trainer)] == [1, 1]


def test_excluded_samples_carry_no_loss(make):
    def reward(completion, prompt):
        return None if completion.request_id.endswith("/0") else float(completion.token_ids[0] % 2)

    trainer = make(reward=reward)
    trainer.train()
    scored = trainer.rounds[0]
    assert [advantage is None for advantage in scored.advantages] == [True, False, False, False] * 2
    assert logs_of(trainer)[0]["tokens/trained"] == 6 * 8


def test_evaluation_leaves_the_training_stream_alone(make):
    plain = make(max_steps=4)
    plain.train()
    evaluated = make(
        max_steps=4,
        eval_prompts=plain.pipeline.scheduler.source.prompts[:3],
        eval_strategy="steps",
        eval_steps=1,
    )
    evaluated.train()
    assert [row["eval_reward"] for row in evaluated.state.log_history if "eval_reward" in row]
    assert [row["loss"] for row in logs_of(plain)] == [row["loss"] for row in logs_of(evaluated)]


def test_training_raises_the_reward(make):
    trainer = make(
        reward=share_of_even_tokens,
        max_steps=60,
        global_batch=32,
        per_device=32,
        max_samples=32,
        learning_rate=3e-3,
    )
    trainer.train()
    rewards = [row["reward"] for row in logs_of(trainer)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_broken_rewards_end_the_run_with_a_checkpoint_that_draws_the_round_again(make):
    def break_at_the_third_round(groups=None):
        if len(trainer.rounds) == 2:
            raise RewardError("--reward_funcs: x: failed on every sample of three batches in a row")

    trainer = make(max_steps=9)
    trainer.pipeline.collector.scorer.end_batch = break_at_the_third_round
    with pytest.raises(RewardError):
        trainer.train()
    content = Path(trainer.args.output_dir, "checkpoint-2", "pipeline_state.msgpack").read_bytes()
    state = msgspec.msgpack.decode(content)[1]["pipeline"]
    assert state["scheduler"]["launched"] == state["scheduler"]["trained"] == 4
    assert state["batch"] is None


def failing(work, at, trainer, error=RuntimeError):
    """`work`, which fails once `at` optimizer steps are done."""

    def run(*args, **named):
        if trainer.state.global_step == at:
            torch.rand(1)  # the failure comes after random numbers were drawn
            raise error("broken")
        return work(*args, **named)

    return run


BREAKS = {
    "sampling": lambda t: setattr(t.engine, "advance", failing(t.engine.advance, 4, t, EngineDead)),
    "scoring": lambda t: setattr(t.scorer, "submit", failing(t.scorer.submit, 4, t)),
    "training": lambda t: setattr(t.step, "run", failing(t.step.run, 3, t)),
    "evaluation": lambda t: setattr(t.pipeline, "evaluate", failing(t.pipeline.evaluate, 3, t)),
}


@pytest.mark.parametrize("where", BREAKS)
def test_what_fails_between_two_updates_leaves_the_checkpoint_of_the_last_one(make, where):
    """Bit for bit the one that a run which saves every step has there."""

    def like_dropout(*_):
        if torch.is_grad_enabled():
            torch.rand(1)

    done = 4 if where in ("sampling", "scoring") else 3
    settings = {"max_steps": done, "iterations": 2}
    if where == "evaluation":
        prompts = [Prompt("held out", [], [50, 51])]
        settings |= {"eval_prompts": prompts, "eval_strategy": "steps", "eval_steps": 3}
    saved = []
    for name, more in {"straight": {"save_strategy": "steps", "save_steps": done}, "broken": {"max_steps": 6}}.items():
        trainer = make(**{**settings, **more})
        trainer.engine, trainer.scorer = trainer.pipeline.collector.engine, trainer.pipeline.collector.scorer
        trainer.model.register_forward_pre_hook(like_dropout)
        if name == "broken":
            BREAKS[where](trainer)
        with contextlib.nullcontext() if name == "straight" else pytest.raises((RuntimeError, EngineDead)):
            trainer.train()
        folder = Path(trainer.args.output_dir) / f"checkpoint-{done}"
        verify(folder)
        files = [torch.load(folder / file, weights_only=False) for file in ("optimizer.pt", "scheduler.pt")]
        random = torch.load(folder / "rng_state.pth", weights_only=False)
        pipeline = msgspec.msgpack.decode((folder / "pipeline_state.msgpack").read_bytes())[1]["pipeline"]
        del pipeline["weight_sync"]  # the next weights were sent before sampling failed
        saved.append((load_file(folder / "model.safetensors"), *files, random["cpu"], random["python"], pipeline))
    torch.testing.assert_close(*([*one[:2], one[3]] for one in saved), rtol=0, atol=0)
    assert saved[0][4:] == saved[1][4:] and saved[0][2] == saved[1][2]


def test_what_fails_while_the_weights_change_leaves_no_checkpoint(make):
    trainer = make(max_steps=6)
    trainer.create_optimizer()
    trainer.optimizer.step = failing(trainer.optimizer.step, 2, trainer)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert not list(Path(trainer.args.output_dir).glob("checkpoint-*"))
