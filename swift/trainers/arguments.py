"""Settings of training: optimizer, schedule, batch sizes; and of the run: where it writes, how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag

Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
]  # fmt: skip
"""The schedules of transformers."""

Optimizer = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "adamw_cpu", "adafactor", "sgd"]
"""The optimizers that tests train with."""


@dataclass(kw_only=True)
class OptimizationArguments:
    """Optimizer, schedule, batch sizes and processes."""

    GROUP: ClassVar[str] = "Optimization"

    learning_rate: float | None = flag(above=0)
    """Peak learning rate."""

    lr_scheduler_type: Schedule = flag("cosine")
    """Course of the learning rate over the run."""

    lr_scheduler_kwargs: dict[str, Any] = flag({}, everyday=False)
    """Settings of the schedule, as JSON such as `{"num_cycles": 2}`."""

    warmup_ratio: float = flag(0.0, at_least=0, at_most=1)
    """Share of all steps over which the learning rate rises to its peak."""

    warmup_steps: int = flag(0, at_least=0, everyday=False)
    """Steps over which the learning rate rises; above 0 it replaces warmup_ratio."""

    weight_decay: float = flag(0.1, at_least=0, everyday=False)
    """Decoupled weight decay."""

    optim: Optimizer = flag(
        "adamw_torch_fused",
        values={"adamw": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit"},
        everyday=False,
        registry="optimizers",
    )
    """Optimizer. adamw is adamw_torch_fused. adamw_8bit keeps its state in 8 bits (needs bitsandbytes), adafactor keeps
    sums of rows and columns, adamw_cpu keeps its state and updates on the host."""

    optim_args: str | None = flag(everyday=False, unset="the optimizer's defaults")
    """More settings of the optimizer, written `name=value,name=value`."""

    adam_beta1: float = flag(0.9, at_least=0, below=1, everyday=False)
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = flag(0.95, at_least=0, below=1, everyday=False)
    """Decay of Adam's mean of squared gradients."""

    adam_epsilon: float = flag(1e-8, above=0, everyday=False)
    """Added to Adam's denominator."""

    max_grad_norm: float = flag(1.0, at_least=0)
    """Gradients are scaled down to this norm; 0 is off."""

    num_train_epochs: float = flag(3.0, above=0)
    """Passes over the training rows. With `--dynamic_sample` replaced groups draw rows too, but steps are counted as if
    they did not."""

    max_steps: int = flag(-1, at_least=-1)
    """Optimizer steps; above 0 it replaces num_train_epochs."""

    per_device_train_batch_size: int = flag(1, at_least=1)
    """Number of completions (rows in sft) of one process in one micro-batch. If not given, rlhf takes the smallest
    number that makes the global batch a multiple of num_generations."""

    per_device_eval_batch_size: int = flag(1, at_least=1)
    """Completions (rows in sft) of one process in one evaluation batch."""

    gradient_accumulation_steps: int = flag(1, at_least=1)
    """Micro-batches of an optimizer step."""

    dataloader_num_workers: int = flag(1, at_least=0, everyday=False)
    """Processes that prepare batches."""

    deepspeed: str | None = flag(everyday=False, unset="off")
    """DeepSpeed: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload or a JSON file."""

    fsdp: Literal["full_shard", "shard_grad_op"] | None = flag(everyday=False, unset="off")
    """Spread weights, gradients and optimizer state over the processes with torch's FSDP2: full_shard gathers each
    layer in every pass, shard_grad_op keeps it gathered from the forward to the backward pass."""

    ddp_timeout: int = flag(1800, at_least=1, everyday=False)
    """Seconds that processes wait for each other."""

    ddp_find_unused_parameters: bool = flag(False, everyday=False)
    """Let torch look for parameters without gradient in every step."""

    full_determinism: bool = flag(False, everyday=False)
    """Use deterministic kernels only: reproducible on GPUs, and slower."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if self.optim == "adamw_cpu" and self.deepspeed:
            yield (
                f"--optim: adamw_cpu: --deepspeed {self.deepspeed} keeps the optimizer's state itself; use "
                "--optim adamw with --deepspeed zero2_offload, which updates on the CPU too"
            )
        if self.optim == "adamw_cpu" and self.fsdp:
            yield (
                f"--optim: adamw_cpu: --fsdp {self.fsdp} spreads the optimizer's state over the devices; use --optim "
                "adamw, or --deepspeed zero2_offload, which updates on the CPU too"
            )


@dataclass(kw_only=True)
class RunArguments:
    """Where a run writes, how often it logs, saves and evaluates."""

    GROUP: ClassVar[str] = "Run"

    output_dir: str | None = flag()
    """Folder of the runs; each run makes `v<N>-<time>` in it."""

    add_version: bool = flag(True, everyday=False)
    """Make a new folder for each run; false writes into output_dir itself."""

    run_name: str | None = flag(everyday=False, unset="the run's folder")
    """Name of the run in wandb and swanlab."""

    logging_steps: int = flag(5, at_least=1)
    """Steps between two log lines; step 1 is logged too."""

    logging_first_step: bool = flag(True, everyday=False)
    """Log the first step too."""

    report_to: list[Literal["none", "tensorboard", "wandb", "swanlab"]] = flag(["tensorboard"])
    """Where metrics go besides logging.jsonl; none is nowhere else."""

    save_strategy: Literal["no", "steps", "epoch"] = flag("steps", everyday=False)
    """When checkpoints are saved; the last step always is."""

    save_steps: int = flag(500, at_least=1)
    """Steps between two checkpoints."""

    save_total_limit: int | None = flag(at_least=1, unset="all are kept")
    """Checkpoints that are kept; the oldest goes first, the best stays."""

    save_only_model: bool = flag(False, everyday=False)
    """Save weights without optimizer state. Such a checkpoint cannot be resumed."""

    eval_strategy: Literal["no", "steps", "epoch"] = flag("steps", aliases=("evaluation_strategy",))
    """When the model is evaluated; off without evaluation data."""

    eval_steps: int | None = flag(at_least=1)
    """Steps between two evaluations."""

    load_best_model_at_end: bool = flag(False, everyday=False)
    """Keep the best checkpoint and end with its weights."""

    metric_for_best_model: str | None = flag(everyday=False)
    """Metric that decides which checkpoint is best."""

    greater_is_better: bool | None = flag(everyday=False)
    """Whether a larger metric is better."""

    resume_from_checkpoint: str | None = flag(unset="start anew")
    """Checkpoint folder to go on from, or `last` for the newest of output_dir."""

    dry_run: bool = flag(False)
    """Check everything, print the plan, and end without loading weights."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if len(self.report_to) > 1 and "none" in self.report_to:
            yield f"--report_to: {' '.join(self.report_to)}: none excludes the others; drop none"
        if self.load_best_model_at_end:
            yield from self._best_model_problems()

    def _best_model_problems(self) -> Iterator[str]:
        fix = "; or --load_best_model_at_end false"
        if self.eval_strategy == "no":
            yield "--load_best_model_at_end: true: nothing is evaluated; give --val_dataset" + fix
        elif self.eval_strategy != self.save_strategy:
            yield (
                f"--load_best_model_at_end: true: --save_strategy {self.save_strategy} and --eval_strategy "
                f"{self.eval_strategy} differ; make them equal" + fix
            )
        elif self.eval_strategy == "steps" and self.eval_steps and self.save_steps % self.eval_steps:
            yield (
                f"--save_steps: {self.save_steps}: not a multiple of --eval_steps {self.eval_steps}, which "
                f"--load_best_model_at_end needs; e.g. --save_steps {self.eval_steps}"
            )
