"""Training with DeepSpeed's ZeRO: settings into a configuration, and steps into its engine.

`--deepspeed` names a preset or a JSON file. A file may tune what is DeepSpeed's own (stages, buckets, offload); what
swift decides (batch sizes, optimizer, schedule, clipping, types) must be absent, "auto", or equal. Everything
wrong is found before weights are loaded.

`DeepSpeedSteps` drives the engine for a trainer that makes several backward passes per update: the accumulation
boundary is set on the last one alone, nothing is divided by a number of accumulation steps, and an update with a
non-finite gradient is skipped on all ranks alike.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, ResourceError, join_problems, parse_json, suggest
from swift.models.sharded import quiet_accelerator
from swift.trainers.parallel.zero_checkpoints import load_safely

_OFFLOAD = {"device": "cpu", "pin_memory": True}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload_optimizer": _OFFLOAD},
    "zero3_offload": {"stage": 3, "offload_optimizer": _OFFLOAD, "offload_param": _OFFLOAD},
}
"""`zero_optimization` of each preset; bucket sizes are DeepSpeed's own, for stage 3 by the model's width."""

_BY_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")

USABLE = (
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "fp16", "bf16",
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "communication_data_type",
    "prescale_gradients", "gradient_predivide_factor", "aio", "data_types", "checkpoint", "disable_allgather",
    "comms_logger", "flops_profiler", "activation_checkpointing", "use_data_before_expert_parallelism",
    "optimizer", "scheduler", "disable_python_gc", "log_level",
)  # fmt: skip
"""Top-level keys of a configuration file that are read; `optimizer` and `scheduler` under conditions."""

REPLACED = {
    "amp": "--torch_dtype",
    "torch_autocast": "--torch_dtype",
    "tensorboard": "--report_to tensorboard",
    "wandb": "--report_to wandb",
    "csv_monitor": "--report_to; metrics are in logging.jsonl",
    "comet": "--report_to",
    "elasticity": "--elastic true",
}
"""Keys whose work a flag does."""


def deepspeed_config(args: Any) -> dict[str, Any]:
    """The configuration that `--deepspeed`, which is set, describes, for transformers' TrainingArguments.

    Batch sizes and clipping are "auto", which transformers fills in from its arguments.
    """
    given = _read(args.deepspeed)
    join_problems(_problems(given, args))
    zero = dict(given.get("zero_optimization", {}))
    if int(zero.get("stage", 0)) == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # a checkpoint is a model that others can load
    config = {name: value for name, value in given.items() if name not in ("optimizer", "scheduler", "fp16", "bf16")}
    dtype = dtype_name(args)
    if dtype == "bfloat16":  # without the check a non-finite gradient would be applied
        config["bf16"] = {**given.get("bf16", {}), "enabled": True, "check_grad_overflow": True}
    elif dtype == "float16":
        config["fp16"] = {**given.get("fp16", {}), "enabled": True}
    return {
        "steps_per_print": 2**31,  # its progress lines, beside ours
        # torch's own AdamW on the CPU needs no compiler, and is the same arithmetic as without offload
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **config,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
    }


def require_deepspeed(args: Any) -> None:
    """Check `--deepspeed`, which is set, before anything is loaded."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ResourceError(
            f"--deepspeed: {args.deepspeed}: needs the package deepspeed, which is not installed; "
            "pip install -r requirements/deepspeed.txt"
        )
    deepspeed_config(args)


def dtype_name(args: Any) -> str:
    """The type that weights are computed in: float32, bfloat16 or float16."""
    from swift.models.policy import pick_dtype

    return str(pick_dtype(args.torch_dtype)).removeprefix("torch.")


def stage_of(args: Any) -> int:
    """ZeRO's stage; 0 without `--deepspeed`."""
    return int(deepspeed_config(args)["zero_optimization"].get("stage", 0)) if args.deepspeed else 0


def make_deepspeed_state() -> None:
    """Make accelerate set DeepSpeed up, on CPUs too."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    # names that torch 2.13 deprecates, called by DeepSpeed many times a step
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    on_gpu = torch.accelerator.is_available()
    if not on_gpu:
        import deepspeed.ops

        # would be compiled at the first start, and its ranks wait for each other without a bound; gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        PartialState(**({} if on_gpu else {"backend": "gloo"}))
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
    load_safely()


# --- configuration files -----------------------------------------------------------------------------------------


def _read(name: str) -> dict[str, Any]:
    """A preset, or the content of a JSON file."""
    if name in PRESETS:
        zero = dict(PRESETS[name])
        if zero["stage"] == 3:
            zero |= dict.fromkeys(_BY_WIDTH, "auto")
        return {"zero_optimization": zero}
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"--deepspeed: {name}: neither a preset nor a file; {suggest(name, list(PRESETS))}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--deepspeed: {path}: not JSON ({error}); see docs/distributed_training.md") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--deepspeed: {path}: not a JSON object; see docs/distributed_training.md")
    join_problems([f"--deepspeed: {path}: {wrong}; see docs/distributed_training.md" for wrong in _mistyped(content)])
    return content


def _mistyped(content: Mapping[str, Any]) -> list[str]:
    """Entries that are read here and are not of DeepSpeed's types."""
    objects = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler")
    others = [key for key in objects if not isinstance(content.get(key, {}), dict)]
    wrong = [f"{key} {json.dumps(content[key])}: not an object" for key in others]
    if wrong:
        return wrong
    if not isinstance(content.get("optimizer", {}).get("params", {}), dict):
        wrong.append("optimizer.params: not an object")
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        wrong.append(f"zero_optimization.stage {json.dumps(stage)}: not a stage; valid: 0, 1, 2, 3")
    return wrong


def _problems(given: Mapping[str, Any], args: Any) -> list[str]:
    found = [*_unusable(given), *_conflicts(given, args), *_zero_problems(given.get("zero_optimization", {}), args)]
    return [f"--deepspeed: {args.deepspeed}: {line}" for line in found]


def _unusable(given: Mapping[str, Any]) -> Iterator[str]:
    """Keys that nothing reads, or that would be a second setting beside a flag."""
    for key in given:
        if key in REPLACED:
            yield f"{key}: cannot be used; remove it and use {REPLACED[key]}"
        elif key not in USABLE:
            yield f"{key}: swift cannot use this key; remove it; {suggest(key, USABLE)}"
    optimizer = given.get("optimizer", {"type": "AdamW"})  # one of "auto" values is what --optim adamw is
    automatic = all(value == "auto" for value in optimizer.get("params", {}).values())
    if optimizer.get("type") not in ("Adam", "AdamW") or not automatic:
        yield "optimizer: cannot be used; remove it and use --optim, --learning_rate and --adam_*"
    if "scheduler" in given:
        yield "scheduler: cannot be used; remove it and use --lr_scheduler_type and --warmup_ratio"


def _conflicts(given: Mapping[str, Any], args: Any) -> Iterator[str]:
    """Values of a file that differ from those of the flags."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    per_device, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    wanted: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (per_device, "--per_device_train_batch_size"),
        "gradient_accumulation_steps": (accumulation, "--gradient_accumulation_steps"),
        "train_batch_size": (per_device * accumulation * world, "per device x accumulation x processes"),
        "gradient_clipping": (args.max_grad_norm, "--max_grad_norm"),
    }
    for key, (value, flag) in wanted.items():
        if given.get(key, "auto") not in ("auto", value):
            yield f'{key} {json.dumps(given[key])}: {flag} is {value}; make them equal, or write "auto"'
    dtype = dtype_name(args)
    for key, name in (("fp16", "float16"), ("bf16", "bfloat16")):
        enabled = given.get(key, {}).get("enabled", "auto")
        if enabled not in ("auto", dtype == name):
            shown = json.dumps(enabled)
            yield f'{key}.enabled {shown}: the weights are {dtype}; write "auto", or use --torch_dtype'


def _zero_problems(zero: Mapping[str, Any], args: Any) -> Iterator[str]:
    dtype, where = dtype_name(args), "zero_optimization: "
    if int(zero.get("stage", 0)) == 0 and dtype != "float32":
        yield f"{where}stage 0 loses small updates of {dtype} weights; use zero1, or leave --deepspeed out"
    if zero.get("compute_grad_norm") is False:
        yield where + "compute_grad_norm false: a non-finite gradient would go unnoticed; remove it"
    if zero.get("stage3_gather_16bit_weights_on_model_save") is False:
        yield where + "stage3_gather_16bit_weights_on_model_save false: checkpoints would hold no model; remove it"
    if zero.get("zenflow"):
        yield where + "zenflow: updates at times of its own; remove it"
    if importlib.util.find_spec("deepspeed") is None:
        return
    quiet_accelerator()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**{name: value for name, value in zero.items() if value != "auto"})
    except ValidationError as error:
        yield from (f"{where}{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())


# --- steps -------------------------------------------------------------------------------------------------------


class DeepSpeedSteps:
    """Backward passes and updates of the engine that `deepspeed.initialize` made, several passes per update."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._has_gradient = False
        self.norm: float | None = None
        """Gradient norm of the last global batch, before clipping; None when it had no backward pass."""

    def begin(self) -> None:
        """A global batch starts; so far it has no gradient."""
        self.norm, self._has_gradient = None, False

    def backward(self, loss: Any, *, last: bool) -> None:
        """One pass; only after the last one are gradients complete on all ranks."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)
        self._has_gradient = last

    def step(self) -> None:
        """Update the weights, if there is a gradient; a non-finite one leaves them alone, on all ranks alike."""
        if not self._has_gradient:
            return
        if self.engine.zero_optimization_stage() == 0:
            self._step_replicated()
            return
        self.engine.step()
        optimizer = self.engine.optimizer
        norm = self.engine.get_global_grad_norm()
        self.norm = math.inf if optimizer.overflow else float(norm)
        # read by Trainer, which would hold the schedule: a skipped update is a step like any other
        optimizer.overflow = False

    def _step_replicated(self) -> None:
        """Stage 0: every rank has all gradients, summed, so each comes to the same verdict alone."""
        import torch

        gradients = [p.grad.float() for p in self.engine.module.parameters() if p.grad is not None]
        self.norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(self.norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
