"""What swift does in each task. Each function runs in a child process of its own; see `swift.bench.contest`."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from swift.bench.contest import Gate
from swift.bench.rollouts import Rollout, frozen
from swift.bench.work import Work


def command(work: Work, output_dir: str, *, max_steps: int) -> list[str]:
    """The words after `swift rlhf`."""
    words = {
        "rlhf_type": "grpo",
        "model": work.model,
        "dataset": work.dataset,
        "external_plugins": work.plugin,
        "reward_funcs": "even_share",
        "tuner_type": "full",
        "torch_dtype": work.dtype,
        "loss_type": "grpo",
        "beta": work.beta,
        "temperature": 1.0,
        "num_generations": work.num_generations,
        "per_device_train_batch_size": work.per_device,
        "gradient_accumulation_steps": work.accumulation,
        "max_completion_length": work.completion_tokens,
        "gradient_checkpointing": str(work.recompute).lower(),
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
    from swift.bench.turns import TurnCallback

    _run(work, TurnCallback(gate, work.num_completions, _expected(work)))


def profile(work: Work, gate: Gate) -> None:
    """The same with the seconds of each phase; the last turns are for torch's profiler, see `swift.bench.profile`."""
    from swift.bench.profile import Operators, Phases, watch
    from swift.bench.turns import TurnCallback

    phases, operators = Phases(), Operators()
    watch(phases)

    def begin() -> None:
        phases.restart()
        operators.begin()

    def more() -> dict[str, Any]:
        return {"phases": phases.seconds(), **operators.end()}

    _run(work, TurnCallback(gate, work.num_completions, _expected(work), begin=begin, more=more))


def _expected(work: Work) -> int | None:
    return None if work.lengths == "natural" else sum(work.limits)


def _run(work: Work, callback: Any) -> None:
    from swift.arguments import parse

    with tempfile.TemporaryDirectory() as folder:
        resolved = parse("rlhf", command(work, folder, max_steps=1_000_000), os.environ)
        from transformers import trainer

        trainer.DEFAULT_CALLBACKS.append(callback)
        if work.lengths == "tail":
            _limit_lengths(work.limits)
        from swift.trainers.grpo import run

        run(resolved)


def _limit_lengths(limits: list[int]) -> None:
    """Give each request the limit of its place in the batch, as if its completion ended there."""
    import itertools
    from dataclasses import replace

    from swift.rollout.engines.transformers import TransformersEngine

    submit, limit = TransformersEngine.submit, itertools.cycle(limits)

    def limited(self: Any, request: Any) -> None:
        if request.prompt is not None:  # of the data; the parity check's requests have none
            request = replace(request, sampling=replace(request.sampling, max_new_tokens=next(limit)))
        submit(self, request)

    TransformersEngine.submit = limited  # type: ignore[method-assign]


def samples_of(rollouts: list[Rollout]) -> list[Any]:
    """Rollouts as the trainer takes them."""
    import numpy as np

    from swift.rollout.samples import TrainSample

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
    """The trainer with the settings of the command but without a pipeline: windows are handed to it."""
    from transformers import TrainingArguments

    from swift.arguments import parse
    from swift.observability.metrics import MetricStore
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo_arguments import trainer_settings
    from swift.trainers.grpo_trainer import GRPOTrainer

    args = parse("rlhf", command(work, folder, max_steps=1), os.environ).args
    return GRPOTrainer(
        model=model,
        args=TrainingArguments(folder, max_steps=1, learning_rate=1e-6, report_to="none", use_cpu=work.device == "cpu"),
        settings=trainer_settings(args),
        pipeline=None,  # type: ignore[arg-type]
        collectives=Collectives(),
        metrics=MetricStore(),
        reference=reference,
    )


def load_model(work: Work) -> Any:
    """The policy, where and as what it is trained."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)).to(work.device)
    if work.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def backward(trainer: Any, rollouts: list[Rollout]) -> float:
    """Gradients of one window; the loss."""
    from swift.rollout.samples import RolloutBatch

    return float(trainer.training_step(trainer.model, RolloutBatch(samples_of(rollouts), 1, 1)))


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

    from swift.arguments import parse
    from swift.bench.work import prompts
    from swift.models import load_chat
    from swift.rollout.engines.transformers import TransformersEngine
    from swift.types import Request, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        args = parse("rlhf", command(work, folder, max_steps=1), os.environ).args
    template = load_chat(args)
    engine = TransformersEngine(load_model(work), eos_token_ids=template.stop_token_ids, tokenizer=template.tokenizer)
    ids = [template.encode_prompt([{"role": "user", "content": text}]) for text in prompts(work)]
    G, limits = work.num_generations, work.limits

    def sample(limit: int) -> int:
        requests = [
            Request(f"{p}/{g}", ids[p], SamplingParams(min(limit, limits[p * G + g]), seed=p * 1000 + g))
            for p in range(work.num_prompts)
            for g in range(G)
        ]
        return sum(len(completion.token_ids) for completion in engine.generate(requests))

    def turn() -> dict[str, Any]:
        began = time.perf_counter()
        sample(1)
        prefill_s = time.perf_counter() - began
        began = time.perf_counter()
        tokens = sample(work.completion_tokens)
        prompt_tokens = sum(len(ids[p]) for p in range(work.num_prompts)) * G
        return {
            "prefill_s": prefill_s,
            "whole_s": time.perf_counter() - began,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
        }

    gate.serve(turn)


def publish(work: Work, gate: Gate) -> None:
    """New weights to vLLM in this process, checked on arrival; see `swift.bench.publishing`."""
    from swift.bench.publishing import serve
    from swift.rollout.weight_sync.policy import LiveWeights, PolicyWeights
    from swift.rollout.weight_sync.publisher import WeightPublisher
    from swift.trainers.distributed import Collectives

    publishers: list[WeightPublisher] = []

    def send(engine: Any, model: Any, version: int) -> None:
        if not publishers:
            source = partial(PolicyWeights, model)
            publishers.append(WeightPublisher(engine, source=source, live=LiveWeights(model), ranks=Collectives()))
        publishers[0].publish(version)

    serve(work, gate, load_model(work), send)


def start_command(work: Work, output_dir: str) -> list[str]:
    """The shell command whose first optimizer step is waited for."""
    return [sys.executable, "-m", "swift", "rlhf", *command(work, output_dir, max_steps=1)]


def first_step_done(output_dir: str) -> bool:
    """Whether the first step is in the log."""
    return any(path.stat().st_size > 0 for path in Path(output_dir).glob("v*/logging.jsonl"))
