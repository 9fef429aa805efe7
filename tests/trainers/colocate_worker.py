"""One process of a GRPO run on several ranks, each with an engine that has weights of its own.

`python colocate_worker.py <task.json>` under torchrun's variables. Each rank writes what its run ended with.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from sharded_worker import build, whole_state

from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.phase import SyncPhase
from swift.rollout.weights.policy import PolicyWeights
from swift.rollout.weights.sync import WeightSync
from swift.trainers.memory.colocate import ColocateCycle
from swift.trainers.memory.offload import model_tensors, optimizer_tensors
from swift.trainers.session import join_processes


def own_memory(model: Any) -> None:
    """What is mapped from a file cannot be released."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def sizes(trainer: Any) -> tuple[int, int]:
    """Bytes of model and optimizer that are on the device."""

    def held(tensors: Any) -> dict[int, int]:
        plain = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in plain}

    model = held(model_tensors(trainer.model))
    optimizer = held(optimizer_tensors(trainer.optimizer))
    return sum(model.values()), sum(size for key, size in optimizer.items() if key not in model)


def main(path: str) -> None:
    """Run the task."""
    task = json.loads(Path(path).read_text())
    collectives = join_processes(60, always=bool(task.get("deepspeed") or task.get("fsdp")))
    # as in a run, the engine comes first: once ZeRO-3 is set up it would spread the engine's weights too
    engine = build_engine(EngineSpec(model=task["model"], backend="transformers", eos_token_ids=()))
    trainer = build(task)
    own_memory(trainer.model)
    weight_sync = WeightSync(engine, source=lambda: PolicyWeights(trainer.model), ranks=trainer.collectives)
    pipeline = trainer.pipeline
    pipeline.collector.engine, pipeline.weight_sync = engine, weight_sync
    pipeline.collector.around = contextlib.nullcontext
    seen: list[tuple[int, int]] = []
    lines: list[str] = []
    if task.get("flags") is None:
        pipeline.phase = SyncPhase(weight_sync)
    else:
        cycle = ColocateCycle(
            engine,
            weight_sync,
            **task["flags"],
            log=lines.append,
            metrics=trainer.metrics,
            ranks=trainer.collectives,
            device=torch.device("cpu"),
            copies_on_host=True,
        )
        cycle.attach(trainer.model, lambda: trainer.optimizer)

        @contextlib.contextmanager
        def watched(step: int, *, current: bool = False) -> Any:
            with cycle(step, current=current):
                seen.append(sizes(trainer))
                yield

        pipeline.phase = watched
    with contextlib.closing(engine):
        trainer.train()
    result = {
        "weights": whole_state(trainer.model_wrapped),
        "state": [tensor.detach().clone() for tensor in map(local, optimizer_tensors(trainer.optimizer))],
        "losses": [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row],
        "tokens": [c.token_ids for one in trainer.rounds for group in one.groups for c in group.completions],
        "random": torch.get_rng_state(),
        "seen": seen,
        "lines": lines,
    }
    torch.save(result, f"{task['result']}.{collectives.rank}")
    collectives.barrier()


def local(tensor: Any) -> Any:
    """A rank's own part."""
    return getattr(tensor, "_local_tensor", tensor)


if __name__ == "__main__":
    main(sys.argv[1])
