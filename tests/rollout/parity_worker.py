"""One of two processes that check parity together: `python parity_worker.py <model> <way> <fault> <output>`.

The engine is on rank 0 alone. Ways: ddp (replicas), fsdp (FSDP2), zero3. Each rank writes what it came to.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from datetime import timedelta

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from oracle import load
from parity_engines import FAULTS, SmallEngine, make_check

from swift.models.attention.choice import choose_attention
from swift.trainers.distributed import Collectives


def spread(model, way):
    if way == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for a minute

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine.module


def pieces(model):
    """What this rank holds of each parameter."""
    if hasattr(model, "reshard"):
        model.reshard()  # FSDP2 leaves the outermost parameters whole after a forward pass
    held = []
    for one in model.parameters():
        piece = getattr(one, "ds_tensor", one)
        piece = piece.to_local() if hasattr(piece, "to_local") else piece
        held.append(piece.detach().clone())
    return held


def main(folder, way, fault, output):
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    model = load(folder)
    planted = fault if fault in FAULTS else None
    engine = SmallEngine(model, fault=planted) if rank == 0 else None
    choose_attention(model)
    model = spread(model, way)
    inner = getattr(model, "module", model)
    if fault == "rank 1 differs" and rank == 1:
        with torch.no_grad():
            inner.model.norm.weight.mul_(1.5)
    ranks = Collectives(timeout_s=120.0)
    check = make_check(engine, model, ranks=ranks, inner=inner)
    before = pieces(model)
    report = check.run()
    same = all(torch.equal(a, b) for a, b in zip(before, pieces(model), strict=True))
    later = check.now().verdict if report.verdict == "pass" else None
    found = {"line": report.line(), "error": report.error(), "verdict": report.verdict, "same": same, "now": later}
    torch.save(found, f"{output}.{rank}")
    dist.barrier()
    os._exit(0)  # the destructor of DDP hangs on gloo now and then; what counts is on the disk


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)
    main(*sys.argv[1:])
