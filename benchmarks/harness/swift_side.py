"""What swift does in each task. Each function runs in a child process of its own; see `harness.contest`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.contest import Gate
from harness.rollouts import Rollout, frozen
from harness.work import Work


def command(work: Work, output_dir: str, *, max_steps: int) -> list[str]:
    """The words after `swift rlhf`."""
    words = {
        "rlhf_type": "grpo",
        "model": work.model,
        "dataset": work.dataset,
        "external_plugins": work.plugin,
        "reward_funcs": "even_share",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "loss_type": "grpo",
        "beta": work.beta,
        "num_generations": work.num_generations,
        "per_device_train_batch_size": work.per_device,
        "gradient_accumulation_steps": work.accumulation,
        "max_completion_length": work.completion_tokens,
        "gradient_checkpointing": "false",
        "learning_rate": 1e-6,
        "max_steps": max_steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": output_dir,
    }
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def step(work: Work, gate: Gate) -> None:
    """Whole optimizer steps of `swift rlhf --rlhf_type grpo`, one per turn."""
    from harness.turns import TurnCallback
    from swift.arguments import parse

    with tempfile.TemporaryDirectory() as folder:
        resolved = parse("rlhf", command(work, folder, max_steps=1_000_000), os.environ)
        from transformers import trainer

        trainer.DEFAULT_CALLBACKS.append(TurnCallback(gate, work.num_completions))
        from swift.trainers.grpo import run

        run(resolved)


def samples_of(rollouts: list[Rollout]) -> list[Any]:
    """Rollouts as the trainer takes them."""
    import numpy as np

    from swift.rollout.batch import TrainSample

    return [
        TrainSample(
            group=one.group,
            prompt_ids=one.prompt_ids,
            token_ids=one.token_ids,
            sampler_logprobs=np.zeros(one.token_ids.size, dtype=np.float32),
            trained=np.ones(one.token_ids.size, dtype=np.bool_),
            advantage=one.advantage,
        )
        for one in rollouts
    ]


def make_trainer(work: Work, model: Any, folder: str, *, reference: Any = None) -> Any:
    """The trainer without a pipeline: windows are handed to it."""
    from transformers import TrainingArguments

    from swift.models.forward import enable_packed_attention
    from swift.observability.metrics import MetricStore
    from swift.rl.losses import LossConfig
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo_settings import GRPOSettings
    from swift.trainers.grpo_trainer import GRPOTrainer

    enable_packed_attention(model)
    return GRPOTrainer(
        model=model,
        args=TrainingArguments(folder, max_steps=1, learning_rate=1e-6, report_to="none", use_cpu=True),
        settings=GRPOSettings(
            loss=LossConfig(loss_type="grpo", beta=work.beta),
            temperature=1.0,
            max_completion_length=work.completion_tokens,
            per_device=work.per_device,
            slice_size=work.per_device,
        ),
        pipeline=None,  # type: ignore[arg-type]
        collectives=Collectives(),
        metrics=MetricStore(),
        reference=reference,
    )


def load_model(work: Work) -> Any:
    """The policy in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)


def backward(trainer: Any, rollouts: list[Rollout]) -> float:
    """Gradients of one window; the loss."""
    from swift.rollout.batch import TrainUnit

    return float(trainer.training_step(trainer.model, TrainUnit(samples_of(rollouts), 1, 1)))


def train(work: Work, gate: Gate) -> None:
    """Forward, backward and optimizer step on frozen rollouts."""
    rollouts = frozen(work)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, load_model(work), folder)
        optimizer = trainer.create_optimizer()

        def turn() -> dict[str, Any]:
            loss = backward(trainer, rollouts)
            trainer._clip_grad_norm(trainer.model)
            optimizer.step()
            trainer.model.zero_grad()
            return {"loss": loss, "tokens": sum(one.token_ids.size for one in rollouts)}

        gate.serve(turn)


def generate(work: Work, gate: Gate) -> None:
    """Sample the whole batch, and once more with a single token each, which is the prefill."""
    import time

    from harness.work import prompts
    from swift.arguments import parse
    from swift.models import load_chat
    from swift.rollout.engines.transformers import TransformersEngine
    from swift.types import Request, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        args = parse("rlhf", command(work, folder, max_steps=1), os.environ).args
    template = load_chat(args)
    engine = TransformersEngine(load_model(work), eos_token_ids=template.stop_token_ids, tokenizer=template.tokenizer)
    ids = [template.encode_prompt([{"role": "user", "content": text}]) for text in prompts(work)]
    groups = work.num_completions // work.num_generations

    def sample(limit: int) -> int:
        requests = [
            Request(f"{p}/{g}", ids[p], SamplingParams(limit, seed=p * 1000 + g))
            for p in range(groups)
            for g in range(work.num_generations)
        ]
        return sum(len(completion.token_ids) for completion in engine.generate(requests))

    def turn() -> dict[str, Any]:
        began = time.perf_counter()
        sample(1)
        prefill_s = time.perf_counter() - began
        began = time.perf_counter()
        tokens = sample(work.completion_tokens)
        prompt_tokens = sum(len(ids[p]) for p in range(groups)) * work.num_generations
        return {
            "prefill_s": prefill_s,
            "whole_s": time.perf_counter() - began,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
        }

    gate.serve(turn)


def start_command(work: Work, output_dir: str) -> list[str]:
    """The shell command whose first optimizer step is waited for."""
    return [sys.executable, "-m", "swift", "rlhf", *command(work, output_dir, max_steps=1)]


def first_step_done(output_dir: str) -> bool:
    """Whether the first step is in the log."""
    return any(path.stat().st_size > 0 for path in Path(output_dir).glob("v*/logging.jsonl"))
