"""What TRL's own GRPOTrainer does in each task, with the settings under which it is fastest here.

On a CPU gradient checkpointing and 16-bit, TRL's defaults, are off; sdpa attention; all generations of a step in one
call. In 16 bits it has float32 weights and autocast, its default, which like swift's masters loses no small update.
Each function runs in a child process of its own; see `swift.bench.contest`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from swift.bench.contest import Gate
from swift.bench.rollouts import Rollout, frozen
from swift.bench.work import Work, even_share, prompts


def make_trainer(work: Work, folder: str, *, max_steps: int = 1, callbacks: Any = None, model: Any = None) -> Any:
    """TRL's trainer over the work's prompts."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work.per_device,
        gradient_accumulation_steps=work.accumulation,
        num_generations=work.num_generations,
        max_completion_length=work.completion_tokens,
        loss_type="grpo",
        beta=work.beta,
        use_bias_correction_kl=False,
        max_steps=max_steps,
        learning_rate=1e-6,
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=work.dtype == "bfloat16",
        use_cpu=work.device == "cpu",
        gradient_checkpointing=work.recompute,
        model_init_kwargs={"dtype": "float32"} if model is None else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts(work)]
    tokenizer = None
    if model is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    kind = _trimmed(GRPOTrainer, work.limits) if work.lengths == "tail" else GRPOTrainer
    trainer = kind(
        model=work.model if model is None else model,
        reward_funcs=even_share,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    if work.recompute:  # its training loop would do it, which is not entered for training alone
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def _trimmed(trainer: Any, limits: list[int]) -> Any:
    """TRL's trainer where each completion counts up to the limit of its place in the batch.

    `model.generate` samples until the longest row has ended and computes the others on to there; with an end token they
    would be masked from it on. Here they are cut at their limit, which is the same work in the same shapes.
    """

    class Trimmed(trainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
            return [ids[:limit] for ids, limit in zip(completion_ids, limits, strict=True)], logprobs

    return Trimmed


def step(work: Work, gate: Gate) -> None:
    """Whole optimizer steps of GRPOTrainer.train, one per turn."""
    from swift.bench.turns import TurnCallback

    with tempfile.TemporaryDirectory() as folder:
        expected = None if work.lengths == "natural" else sum(work.limits)
        callback = TurnCallback(gate, work.num_completions, expected)
        make_trainer(work, folder, max_steps=1_000_000, callbacks=[callback]).train()


def batches_of(work: Work, rollouts: list[Rollout]) -> list[dict[str, Any]]:
    """Rollouts as TRL's micro-batches: prompts padded on the left, completions on the right."""
    import torch
    from trl.trainer.utils import pad

    batches = []
    for start in range(0, len(rollouts), work.per_device):
        part = rollouts[start : start + work.per_device]
        prompt_rows = [torch.from_numpy(one.prompt_ids).long() for one in part]
        rows = [torch.from_numpy(one.token_ids).long() for one in part]
        batch = {
            "prompt_ids": pad(prompt_rows, padding_value=0, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(row) for row in prompt_rows], padding_value=0, padding_side="left"),
            "completion_ids": pad(rows, padding_value=0, padding_side="right"),
            "completion_mask": pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="right"),
            "advantages": torch.tensor([one.advantage for one in part]),
            "num_items_in_batch": torch.tensor(sum(one.token_ids.size for one in rollouts)),
        }
        batches.append({name: tensor.to(work.device) for name, tensor in batch.items()})
    return batches


def backward(trainer: Any, batches: list[dict[str, Any]]) -> float:
    """Gradients of one optimizer step; the loss."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(batches)
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch)
        trainer.accelerator.backward(loss)
        total += float(loss)
    return total


def train(work: Work, gate: Gate) -> None:
    """Forward, backward and optimizer step on frozen rollouts."""
    import torch

    rollouts = frozen(work)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, folder)
        optimizer = trainer.create_optimizer()
        batches = batches_of(work, rollouts)

        def turn() -> dict[str, Any]:
            loss = backward(trainer, batches)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            trainer.model.zero_grad()
            return {"loss": loss, "tokens": sum(one.token_ids.size for one in rollouts)}

        gate.serve(turn)


def generate(work: Work, gate: Gate) -> None:
    """Sample the whole batch, and once more with a single token each, which is the prefill."""
    import time

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, folder)
    chats = [[{"role": "user", "content": text}] for text in prompts(work)[: work.num_prompts]]
    tokenizer = trainer.processing_class
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    rows = [row for row in ids for _ in range(work.num_generations)]

    def sample(limit: int) -> int:
        trainer.generation_config.max_new_tokens = limit
        completions, _ = trainer._generate_single_turn(rows, None, {}, work.num_generations)
        return sum(map(len, completions))

    def turn() -> dict[str, Any]:
        began = time.perf_counter()
        sample(1)
        prefill_s = time.perf_counter() - began
        began = time.perf_counter()
        tokens = sample(work.completion_tokens)
        return {
            "prefill_s": prefill_s,
            "whole_s": time.perf_counter() - began,
            "prompt_tokens": sum(map(len, rows)),
            "completion_tokens": tokens,
        }

    gate.serve(turn)


def publish(work: Work, gate: Gate) -> None:
    """New weights to vLLM in this process by TRL's own `sync_weights` (colocate): one call of `load_weights` each.

    Only its constructor is not run, which would make an engine with settings for a GPU; the engine is the one that
    swift makes.
    """
    from contextlib import nullcontext
    from types import SimpleNamespace

    from trl.generation.vllm_generation import VLLMGeneration

    from swift.bench.publishing import serve
    from swift.bench.swift_side import load_model

    trl = VLLMGeneration.__new__(VLLMGeneration)
    trl.mode, trl.enable_sleep_mode, trl.accelerator = "colocate", False, None
    trl._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())

    def send(engine: Any, model: Any, version: int) -> None:
        trl.model = model
        trl.llm = SimpleNamespace(llm_engine=engine._llm, reset_prefix_cache=engine._llm.reset_prefix_cache)
        trl.sync_weights()

    serve(work, gate, load_model(work), send)


def start_command(work: Work, output_dir: str) -> list[str]:
    """The shell command whose first optimizer step is waited for: the smallest script a user of TRL would write."""
    return [sys.executable, "-m", "swift.bench.trl_first_step", work.to_json(), output_dir]


def first_step_done(output_dir: str) -> bool:
    """Whether the first step was logged."""
    return (Path(output_dir) / "first_step").exists()
