"""ms-swift: its names and defaults are ours, but for what stands here; `shell.py` reads its scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift.arguments.imports.draft import Renamed, Rule, lost, same
from swift.arguments.imports.trl import take_precision

RULES: dict[str, Rule] = {
    "rlhf_type": same("the method"),
    "sft_type": Renamed("tuner_type"),
    "model_id_or_path": Renamed("model"),
    "custom_train_dataset_path": Renamed("dataset"),
    "gpu_memory_utilization": Renamed("vllm_gpu_memory_utilization"),
    "bf16": take_precision("bfloat16"),
    "fp16": take_precision("float16"),
    "eval_dataset": lost("benchmarks of EvalScope are not run; --val_dataset has the rows for evaluation"),
}

OFF_POLICY = ("async_generate", "dynamic_sample")
"""Settings that make samples older than the policy, which swift corrects for by default."""


def defaults(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What ms-swift uses where a configuration is silent, and swift does not: see docs/migration.md."""
    if mode != "rlhf":
        return {}
    dropout = {"lora_dropout": 0.05} if given.get("tuner_type", "lora") == "lora" else {}
    correction = {"rollout_importance_sampling_mode": "none"} if any(map(given.get, OFF_POLICY)) else {}
    return {**dropout, **correction}
