"""The trainer of TRL's AsyncGRPO alone, on the record of a run of swift: its completions, advantages and log-probs.

No server is needed: a worker in the process hands the rows over, weights go nowhere. TRL's attention over shared
prefixes takes the FlashAttention 3 of a hub; where that is not on the disk, torch's own FlashAttention stands in, and
for float32, which neither has, SDPA of each segment. What was taken is logged as `attention`.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import queue
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_grpo import Log

from swift import read_rollouts


class RecordedWorker:
    """Hands over the rows of a record, step after step, and begins again at its end."""

    def __init__(self, run):
        self.metrics_queue = queue.Queue()
        rows = itertools.cycle([sample_of(row) for row in read_rollouts(run)])
        self.rollout_buffer = SimpleNamespace(get=lambda timeout: next(rows), qsize=lambda: 0)

    def nothing(self, *args, **kwargs):
        """Neither a process nor a server is behind it."""

    start = stop = update_model_version = check_health = nothing
    init_weight_transfer = pause = resume = destroy = nothing

    def send_weights(self, iterator):
        """The weights stay here."""


def sample_of(row):
    """A row of the record as TRL's worker makes it; it is never stale."""
    length = len(row["prompt_ids"])
    zeros, mask = np.zeros(length), np.asarray(row["trained"])
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.concatenate([row["prompt_ids"], row["token_ids"]]),
        completion_mask=np.concatenate([zeros, mask]).astype(int),
        old_log_probs=np.concatenate([zeros, row["sampler_logprobs"]]),
        advantage=row["advantage"],
        model_version=2**31,
        group_id=row["group"],
        metrics={},
    )


def attention(on_gpu_in_bf16):
    """The package of FlashAttention 3 or what stands in for it, and its name."""
    if not on_gpu_in_bf16:
        return SimpleNamespace(flash_attn_varlen_func=by_segment), "sdpa, segment by segment"
    try:
        return packing._flash_attn(), "flash-attn 3"
    except Exception as error:  # whatever the package of hubs raises without a network, kept in the log
        return SimpleNamespace(flash_attn_varlen_func=of_torch), f"torch's varlen_attn ({type(error).__name__})"


def of_torch(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
    """Torch's own FlashAttention 2."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    more = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    more |= {"enable_gqa": True} if "enable_gqa" in known else {}
    return varlen_attn(q, k, v, cu_q, cu_k, int(max_q), int(max_k), scale=softmax_scale, **more)


def by_segment(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
    """Each segment against its path, whose end it is."""
    found = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        heads = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(found)


def parse():
    """The options."""
    parser = argparse.ArgumentParser()
    for name in ("model", "run", "output_dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--optim", default="adamw_torch")
    for name in ("bf16", "use_cpu", "gradient_checkpointing"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main():
    """Train; a step of SGD is saved."""
    options = parse()
    plain = {"max_grad_norm": 1e9, "weight_decay": 0.0} if options.optim == "sgd" else {}
    taken, name = attention(options.bf16 and not options.use_cpu)
    packing._flash_attn = lambda: taken
    if options.use_cpu:  # it asks CUDA for a name
        async_grpo_trainer.get_peak_flops_per_device = lambda *args: None
    config = AsyncGRPOConfig(
        **{key: value for key, value in vars(options).items() if key not in ("model", "run", "output_dir")},
        output_dir=str(options.output_dir),
        token_budget=0,
        temperature=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **plain,
    )
    worker = RecordedWorker(options.run)
    log = Log(options.output_dir / "logging.jsonl")
    trainer = AsyncGRPOTrainer(
        model=str(options.model),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["of the record"]}),
        rollout_worker=worker,
        weight_transfer=worker,
        callbacks=[log],
    )
    trainer.train()
    log.on_log(None, trainer.state, None, {"attention": name})
    if options.optim == "sgd":
        trainer.model.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
