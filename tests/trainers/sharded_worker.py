"""One process of runs on sharded parameters: `python sharded_worker.py <tasks.pt>`, with torchrun's variables.

Each task is a run of its own; rank 0 writes what came out of all with torch.save. `launch` starts the processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from experts import on_experts
from grpo_parts import colocate, local
from preloaded import run_ranks
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.forward import TokenSequence
from swift.models.reference import AdapterOffReference, FrozenReference, StartAdapterReference
from swift.models.sharded import gathered, is_zero3, whole_shape
from swift.models.sharded_sampling import sampling_from
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.weights.base import TensorInfo
from swift.rollout.weights.policy import PolicyWeights, adapter_weights
from swift.trainers.grpo.callbacks import EveryFewSteps
from swift.trainers.memory.offload import optimizer_tensors
from swift.trainers.parallel.sharding import sharding_options
from swift.trainers.session import join_processes

LIMIT_S = 500
"""Ten times what the longest takes on an idle machine; workers that lose each other end by themselves sooner."""


def launch(folder: Path, processes: int, tasks: list[dict[str, Any]], **common: Any) -> list[dict[str, Any]]:
    """Run the tasks in fresh processes; what each made."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [{"output": str(folder / f"run-{number}"), **task} for number, task in enumerate(tasks)]
    file, result = folder / "tasks.pt", folder / "results.pt"
    torch.save({"tasks": tasks, "common": common, "result": result}, file)
    run_ranks([__file__, file], folder, count=processes, limit_s=LIMIT_S, DS_ACCELERATOR="cpu")
    return torch.load(result)


def settings(task: dict[str, Any]) -> SimpleNamespace:
    """The flags that a DeepSpeed configuration looks at."""
    return SimpleNamespace(
        deepspeed=task.get("deepspeed"),
        fsdp=task.get("fsdp"),
        fsdp_replicas=task.get("fsdp_replicas", 1),
        fsdp_offload_params=task.get("fsdp_offload_params", False),
        torch_dtype=task.get("dtype", "float32"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_grad_norm=task.get("arguments", {}).get("max_grad_norm", 1.0),
    )


def load(task: dict[str, Any]) -> tuple[Any, Any]:
    """Policy and reference."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = getattr(torch, task.get("dtype", "float32"))

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(task[task.get("base", "model")], dtype=dtype)

    kind = task.get("policy", "full")
    if kind == "full":
        model = base()
        other = AutoModelForCausalLM.from_pretrained(task[task["reference"]]) if "reference" in task else base()
        return model, FrozenReference(other, moves="moves" in task)
    if kind == "experts":
        model = on_experts("qwen3_moe", base()).train()
        return model, AdapterOffReference(model)
    if kind == "adapter":
        model = PeftModel.from_pretrained(base(), task["adapter"], is_trainable=True)
        return model, StartAdapterReference(model)
    model = get_peft_model(base(), LoraConfig(target_modules="all-linear", lora_dropout=0.0, lora_alpha=32))
    return model, StartAdapterReference(model) if "moves" in task else AdapterOffReference(model)


def build(task: dict[str, Any]) -> Any:
    """A GRPO trainer on the task's model and way of sharding it."""
    from grpo_parts import LateScorer, make_trainer

    from swift.rl.losses import LossConfig

    args = settings(task)
    model, reference = load(task)
    beta = task.get("beta", 0.0)
    poisoned = task.get("poisoned_step")
    flat = task.get("flat_steps", [])
    seen = threading.Event()

    def score(completion: Any, prompt: Any) -> float:
        return reward(completion, prompt, flat)

    trainer = make_trainer(
        task["model"],
        task["output"],
        model=model,
        reference=reference if beta else None,
        loss=LossConfig(beta=beta, **task.get("loss", {})),
        **task.get("settings", {}),
        reward=score,
        scorer=LateScorer(score, seen) if task.get("late") else None,
        sequence_group=SequenceGroup.of_this_rank(task.get("sharing", 1)),
        **task.get("parts", {}),
        **task.get("arguments", {}),
        **(sharding_options(args) if args.deepspeed or args.fsdp else {}),
    )
    around(trainer, gather=task.get("gather", True))
    if task.get("late"):
        report_reference(trainer, seen)
    if "moves" in task:
        every, alpha = task["moves"]
        trainer.add_callback(EveryFewSteps(every, lambda step: trainer.move_reference(alpha)))
    if poisoned is not None:
        poison(trainer, poisoned)
    return trainer


def report_reference(trainer: Any, seen: threading.Event) -> None:
    """Tell rewards when the reference has scored a rollout batch."""
    refer = trainer.pipeline.batches.frozen_pass

    def told(batch: Any) -> None:
        refer(batch)
        seen.set()

    trainer.pipeline.batches.frozen_pass = told


def around(trainer: Any, *, gather: bool) -> None:
    """Sampling from sharded parameters, as the run itself sets it up."""
    collector = trainer.pipeline.collector
    collector.engine.eos_token_ids = list(range(0, 256, 9))  # so that ranks decode for different numbers of steps
    collector.around = lambda: sampling_from(trainer.model, gather=gather, any_rank=trainer.collectives.any)


def reward(completion: Any, prompt: Any, flat: list[str]) -> float:
    """All different, but the same for every sample of the prompts named in `flat`."""
    if prompt.prompt_id in flat:
        return 1.0
    return sum(token * (t + 1) for t, token in enumerate(completion.token_ids)) / 1000


def poison(trainer: Any, step: int) -> None:
    """Make the policy's log-probs not finite in one step, on rank 0 only."""
    original = trainer.logprobs.scores

    def poisoned(*args: Any) -> Any:
        values, entropy = original(*args)
        now = torch.is_grad_enabled() and trainer.state.global_step == step and trainer.collectives.is_main
        return (values * float("nan") if now else values), entropy

    trainer.logprobs.scores = poisoned


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered."""
    model = getattr(model, "module", model)
    names = dict(model.named_parameters())
    with gathered(names.values()) as whole:
        return {name: whole(value).float().clone() for name, value in names.items()}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train; logs, weights, and what a weight sync would send."""
    unset_hf_deepspeed_config()  # of the task before: models would be loaded in pieces
    # as in a run, the engine comes first: once ZeRO-3 is set up it would shard the engine's weights too
    own = EngineSpec(model=task["model"], backend="transformers", eos_token_ids=()) if "cycle" in task else None
    engine = build_engine(own) if own is not None else None
    trainer = build(task)
    turns = colocate(trainer, engine, task["cycle"]) if engine is not None else {}
    if task.get("resume"):
        trainer.load_pipeline_state(Path(task["resume"]))
    with contextlib.closing(engine) if engine is not None else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=task.get("resume"))
    held = [local(tensor).detach().clone() for tensor in optimizer_tensors(trainer.optimizer)]
    turns |= {"optimizer": held, "random": torch.get_rng_state()} if engine is not None else {}
    source = PolicyWeights(trainer.model_wrapped, bucket_bytes=1)
    buckets = [[TensorInfo.of(*one) for one in bucket.tensors] for bucket in source.buckets()]
    orders = trainer.collectives.all_gather(buckets)
    synced = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket.tensors}
    assert [TensorInfo.of(name, tensor) for name, tensor in synced.items()] == list(source.manifest())
    assert all(order == buckets for order in orders)
    adapter = adapter_weights(trainer.model_wrapped).tensors if task.get("policy", "full") != "full" else {}
    state = whole_state(trainer.model_wrapped)
    return {
        "replicas": trainer.collectives.all_gather([float(value.double().sum()) for value in state.values()]),
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "state": state,
        "synced": synced,
        "adapter": adapter,
        "reference": reference_weights(trainer),
        "share": share_of_reference(trainer),
        "scores": str(trainer.logprobs.score([TokenSequence([1, 2], [3, 4])]).dtype),
        "controller": asdict(controller) if (controller := trainer.entropy.controller) is not None else None,
        "ranks": trainer.collectives.all_gather(turns),
        "tokens": [list(c.token_ids) for one in trainer.rounds for group in one.groups for c in group.completions],
        "lengths": [len(c.token_ids) for one in trainer.rounds for group in one.groups for c in group.completions],
    }


def reference_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the reference's own numbers, where it has any."""
    if not isinstance(trainer.reference, FrozenReference | StartAdapterReference):
        return {}
    own = isinstance(trainer.reference, FrozenReference) and not trainer.reference.moves
    mine = whole_state(trainer.reference.module) if own else trainer.reference.state()
    for theirs in trainer.collectives.all_gather(mine):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), "ranks have different references"
    return {name: tensor.float().clone() for name, tensor in mine.items()}


def share_of_reference(trainer: Any) -> float | None:
    """How much of a reference that is a module of its own this rank holds."""
    if not isinstance(trainer.reference, FrozenReference):
        return None
    held = list(trainer.reference.module.parameters())
    parts = [one.ds_tensor if is_zero3(one) else local(one) for one in held]
    return sum(one.numel() for one in parts) / sum(math.prod(whole_shape(one)) for one in held)


def main(path: str) -> None:
    """Run the tasks of a file, one after the other."""
    content = torch.load(path, weights_only=False)
    collectives = join_processes(
        SimpleNamespace(ddp_timeout=60, deepspeed=None, fsdp="full_shard", fsdp_offload_params=False)
    )
    results = [train({**content["common"], **task}) for task in content["tasks"]]
    if collectives.is_main:
        torch.save(results, content["result"])
    collectives.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
