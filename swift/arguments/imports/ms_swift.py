"""Old names of ms-swift; all other flags are ours, so that its scripts are a matter of the shell (`shell.py`)."""

from __future__ import annotations

from swift.arguments.imports.draft import Renamed, Rule, same
from swift.arguments.imports.trl import take_precision

RULES: dict[str, Rule] = {
    "rlhf_type": same("the method"),
    "sft_type": Renamed("tuner_type"),
    "model_id_or_path": Renamed("model"),
    "custom_train_dataset_path": Renamed("dataset"),
    "gpu_memory_utilization": Renamed("vllm_gpu_memory_utilization"),
    "bf16": take_precision("bfloat16"),
    "fp16": take_precision("float16"),
}
