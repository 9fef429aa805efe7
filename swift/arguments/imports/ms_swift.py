"""ms-swift: its names and defaults are ours, but for what stands here; `shell.py` reads its scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.arguments.imports.draft import Draft, Renamed, Rule, lost, same, text_of, where_true
from swift.arguments.imports.trl import take_precision
from swift.arguments.values import show
from swift.errors import ConfigError

HEARS = re.compile(r"(?:^|[-_/.\d])(?:(?<!qwen2[._]5.)omni|audio)\d*(?:[-_.]|$)|voxtral", re.IGNORECASE)
"""Names of models with sound that are not trained on images alone."""
SEES = re.compile(
    r"(?:^|[-_/.\d])(?:vl|ocr)\d*(?:[-_.]|$)|qwen2[._]5.omni|internvl|llava|minicpm-[vo]|ovis|pixtral|paligemma|molmo|janus",
    re.IGNORECASE,
)
"""Names of models with images."""
QUANTISED = re.compile(r"gptq|awq|-int[48]\b", re.IGNORECASE)
"""Names of models whose weights are stored in few bits."""


def _model(draft: Draft, key: str, raw: Any) -> None:
    """Refuses a script whose text part alone would be another training."""
    name = Path(str(raw)).name
    if HEARS.search(name):
        raise ConfigError(f"--{key}: {raw}: sound is not supported; a run without it would be another training")
    if SEES.search(name) and not draft.sees:
        raise ConfigError(
            f"--{key}: {raw}: images are not supported in {draft.mode}; a text run would be another training"
        )
    if QUANTISED.search(name):
        raise ConfigError(f"--{key}: {raw}: quantised weights are not supported; --quant_method bnb quantises the base")
    draft.take(key, "model", raw)


def _quantisation(draft: Draft, key: str, raw: Any) -> None:
    if raw != "bnb":
        raise ConfigError(f"--{key}: {raw}: not supported; --quant_method bnb with --quant_bits 4 or 8 is")
    draft.take(key, "quant_method", raw)


def _thinking(draft: Draft, key: str, raw: Any) -> None:
    text = show(text_of(raw)).lower()
    if text in ("true", "false"):
        draft.take(key, "chat_template_kwargs", {key: text == "true"})
    else:
        draft.lose(key, f"{text}: neither true nor false; give one")


def _optimizer(draft: Draft, key: str, raw: Any) -> None:
    if raw == "lorap":
        draft.same(key, "lorap_lr_ratio says how")
    elif raw in ("muonclip", "galore", "multimodal"):
        draft.lose(key, f"{raw}: this optimizer of ms-swift is not here; leave it out, or use --optim")
    else:
        draft.take(key, "optim", raw)


def _cached(draft: Draft, key: str, raw: Any) -> None:
    """Rows that `swift export --to_cached_dataset` has tokenised there; here training keeps what it has tokenised."""
    for folder in raw if isinstance(raw, list) else [raw]:
        if (Path(str(folder)).expanduser() / "state.json").is_file():
            draft.lose(key, f"{folder}: token ids of ms-swift; give the rows that they were made of with --dataset")
            return
    draft.take(key, key.removeprefix("cached_"), raw)


RULES: dict[str, Rule] = {
    "optimizer": _optimizer,
    "model": _model,
    "quant_method": _quantisation,
    "enable_thinking": _thinking,
    "enable_dft_loss": where_true(loss_type="dft"),
    "rlhf_type": same("the method"),
    "sft_type": Renamed("tuner_type"),
    "model_id_or_path": _model,
    "custom_train_dataset_path": Renamed("dataset"),
    "cached_dataset": _cached,
    "cached_val_dataset": _cached,
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
