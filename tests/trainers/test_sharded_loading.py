"""No rank ever holds the whole model: its weights stay in the files, mapped into memory, until its shards are cut.

As a program this file is one rank: `python test_sharded_loading.py <folder> <deepspeed or fsdp> <how>`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from preloaded import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from swift.models.sharded import shard
from swift.trainers.parallel.sharding import sharding_options
from swift.trainers.session import join_processes

SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 512}
WEIGHTS = 12 * (4 * 512**2 + 3 * 512 * 2048) + 2 * 512**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "how", "bytes_each"),
    # FSDP's shards are float32, and those in bfloat16 that they come from leave with the first pass
    [("fsdp", "full_shard", 4 + 2), ("deepspeed", "zero3", 2)],
)
def test_a_rank_never_holds_much_more_than_its_shards(tmp_path, way, how, bytes_each):
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    run_ranks([__file__, tmp_path, way, how], tmp_path, count=2, limit_s=120, DS_ACCELERATOR="cpu")
    shards = WEIGHTS // 2 * bytes_each
    for rank in (0, 1):
        held, peak = map(int, (tmp_path / f"rank-{rank}").read_text().split())
        assert shards < held < 1.15 * shards
        # on a CPU the values that ZeRO sends from rank 0 are written into the pages of the files, which copies them
        assert peak < 1.15 * shards or (way == "deepspeed" and rank == 1)


def anonymous_bytes() -> int:
    """Memory of this process that no file stands for."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def main(folder: Path, way: str, how: str) -> None:
    """Load, shard, and write how much memory that took: afterwards, and at most."""
    settings = {
        "deepspeed": None,
        "fsdp": None,
        "fsdp_replicas": 1,
        "fsdp_offload_params": False,
        "ddp_timeout": 60,
        "torch_dtype": "bfloat16",
        "max_grad_norm": 1.0,
        way: how,
    }
    args = SimpleNamespace(**settings, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    collectives = join_processes(args)
    options = sharding_options(args)
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(folder / "run"), use_cpu=not torch.accelerator.is_available(), **options),
    )
    before, most, done = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            most.append(anonymous_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    shard(trainer.model, trainer.accelerator)
    done.set()
    watcher.join()
    held = anonymous_bytes()
    (folder / f"rank-{collectives.rank}").write_text(f"{held - before} {max([*most, held]) - before}")
    collectives.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
