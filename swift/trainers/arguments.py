"""Settings of training: optimizer, schedule, batch sizes; and of the run: where it writes, how often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from swift.flags import flag

Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
]  # fmt: skip
"""The schedules of transformers."""

WARMUP = ("warmup_ratio", "warmup_steps")
IDLE = {
    "constant": ("lr_scheduler_kwargs", *WARMUP),
    "constant_with_warmup": ("lr_scheduler_kwargs",),
    "reduce_lr_on_plateau": WARMUP,
    "greedy": WARMUP,
}
"""Schedule -> settings that it does not read."""

Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_8bit",
    "adamw_torch_4bit", "adamw_cpu", "adafactor", "sgd", "muon",
]  # fmt: skip
"""The optimizers that tests train with."""

OPTIMIZER_PACKAGES = {
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"), "bitsandbytes"),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "torchao"),
}
"""The packages that optimizers come from, other than PyTorch."""

MEASURED = ("rouge-1", "rouge-2", "rouge-l", "bleu-4")
"""Metrics of `--predict_with_generate`."""

CUT_AGAIN = ("adamw_torch_fused", "adamw_torch")
"""Optimizers whose state can be cut in another way, and by ZeRO for another number of processes."""


@dataclass(kw_only=True)
class OptimizationArguments:
    """Optimizer, schedule, batch sizes and processes."""

    GROUP: ClassVar[str] = "Optimization"

    learning_rate: float | None = flag(above=0)
    """Peak learning rate."""

    lr_scheduler_type: Schedule = flag("cosine")
    """Learning rate schedule."""

    lr_scheduler_kwargs: dict[str, Any] = flag({}, everyday=False)
    """Settings of the schedule, such as `{"num_cycles": 2}`."""

    warmup_ratio: float = flag(0.0, at_least=0, at_most=1)
    """Share of all steps for warmup."""

    warmup_steps: float = flag(0.0, at_least=0, everyday=False)
    """Number of warmup steps, or below 1 their share of all steps; above 0 it replaces warmup_ratio."""

    weight_decay: float = flag(0.1, at_least=0, everyday=False)
    """Decoupled weight decay."""

    optim: Optimizer = flag(
        "adamw_torch_fused",
        values={"adamw": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit"},
        everyday=False,
        registry="optimizers",
        resume="fixed",
    )
    """Optimizer. adamw is adamw_torch_fused. adamw_8bit and the paged ones need bitsandbytes; adamw_torch_8bit and
    adamw_torch_4bit need torchao; adamw_cpu keeps state and updates on the host. muon is Muon (arXiv:2502.16982) for
    matrices, with AdamW for embeddings, output layer and vectors."""

    optim_args: str | None = flag(everyday=False, unset="the optimizer's defaults", resume="fixed")
    """Further settings of the optimizer, as `name=value,name=value`."""

    master_weights: Literal["fp32", "bf16_stochastic"] = flag("fp32", everyday=False, resume="fixed")
    """Numbers that 16-bit weights are updated through. fp32 are float32 copies; bf16_stochastic has none and rounds
    updated bfloat16 weights stochastically, which saves 4 bytes per trained weight."""

    adam_beta1: float = flag(0.9, at_least=0, below=1, everyday=False)
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = flag(0.95, at_least=0, below=1, everyday=False)
    """Decay of Adam's mean of squared gradients."""

    adam_epsilon: float = flag(1e-8, above=0, everyday=False)
    """Constant in Adam's denominator."""

    max_grad_norm: float = flag(1.0, at_least=0)
    """Maximum gradient norm. 0 turns clipping off."""

    num_train_epochs: float = flag(3.0, above=0)
    """Number of passes over the training rows, without those that `--dynamic_sample` adds."""

    max_steps: int = flag(-1, at_least=-1, aliases=("training_steps",))
    """Number of optimizer steps; above 0 it replaces num_train_epochs."""

    per_device_train_batch_size: int = flag(1, at_least=1, resume="fixed")
    """Number of rows (completions in grpo) per process and accumulation step. By default grpo takes the smallest that
    makes the global batch a multiple of num_generations."""

    per_device_eval_batch_size: int = flag(1, at_least=1, resume="free")
    """Number of rows (completions in grpo) per process and evaluation batch."""

    gradient_accumulation_steps: int | None = flag(at_least=1, resume="fixed")
    """Number of micro-batches per optimizer step."""

    dataloader_drop_last: bool | None = flag(everyday=False, resume="fixed")
    """Whether an incomplete last batch of training rows is left out."""

    dataloader_num_workers: int = flag(1, at_least=0, everyday=False, resume="free")
    """Number of processes that prepare batches."""

    deepspeed: str | None = flag(everyday=False, unset="off", resume="fixed")
    """DeepSpeed setting: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload or a JSON file."""

    fsdp: Literal["full_shard", "shard_grad_op"] | None = flag(
        values={
            "fsdp2": "full_shard",
            "full_shard auto_wrap": "full_shard",
            "shard_grad_op auto_wrap": "shard_grad_op",
        },
        everyday=False,
        unset="off",
        resume="fixed",
    )
    """FSDP2: shards weights, gradients and optimizer state. shard_grad_op keeps gathered layers from forward to
    backward."""

    fsdp_replicas: int = flag(
        1, at_least=1, everyday=False, aliases=("dp_replicate_size",), needs="fsdp", resume="free"
    )
    """Number of copies of the sharded model (HSDP), each on its part of the processes, such as those of a node."""

    fsdp_offload_params: bool = flag(False, everyday=False, needs="fsdp", resume="free")
    """Whether shards of weights, their gradients and the optimizer's state are in the memory of the host, where the
    CPU updates them. A layer comes to the device when it is gathered. Slow."""

    sequence_parallel_size: int = flag(
        1, at_least=1, everyday=False, aliases=("context_parallel_size", "sequence_parallel_degree"), resume="fixed"
    )
    """Number of neighbouring processes that compute the same rows together, a part of the tokens each, where rows are
    too long for one device. A batch has the rows of one process for each such group; in grpo it keeps its completions,
    which the groups share."""

    elastic: bool = flag(False, everyday=False, resume="free")
    """Whether the launcher continues a run with the remaining processes when one dies, from its newest checkpoint, and
    with all of them later. The batches of a step stay the same; so does a resume with another number of processes."""

    ddp_timeout: int = flag(1800, at_least=1, everyday=False, resume="free")
    """Timeout of distributed collectives, in seconds."""

    ddp_find_unused_parameters: bool = flag(False, everyday=False, resume="free")
    """Whether DDP searches for parameters without gradient in every step."""

    use_liger_kernel: bool = flag(False, everyday=False)
    """Whether layers run Liger's kernels. Needs the package liger_kernel and a GPU."""

    liger_kernel_config: dict[str, Any] = flag({}, everyday=False, needs="use_liger_kernel")
    """Liger kernels to switch on or off, such as `{"rope": false}`."""

    tf32: bool | None = flag(everyday=False, unset="torch's default")
    """Whether products of float32 matrices are made of TF32, on GPUs that have it (Ampere and later). Those of 16 bits
    are what they are."""

    full_determinism: bool = flag(False, everyday=False)
    """Whether to use deterministic kernels only: reproducible on GPUs, slower."""

    @property
    def liger_kernels(self) -> dict[str, Any]:
        """The kernels that Liger is asked for; no trainer uses the loss of the model, which it could replace."""
        return {**self.liger_kernel_config, "fused_linear_cross_entropy": False}

    def notes(self) -> Iterator[str]:
        for name in IDLE.get(self.lr_scheduler_type, ()):
            if value := getattr(self, name):
                yield f"--{name}: {value}: no effect with --lr_scheduler_type {self.lr_scheduler_type}"

    def problems(self) -> Iterator[str]:
        if self.liger_kernel_config.get("fused_linear_cross_entropy"):
            yield (
                "--liger_kernel_config: fused_linear_cross_entropy: replaces the model's own loss, which no method "
                "uses; leave it out"
            )
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            yield f"--warmup_steps: {self.warmup_steps:g}: neither a number of steps nor a share below 1; give one"
        if self.optim == "adamw_cpu" and self.deepspeed:
            yield (
                f"--optim: adamw_cpu: --deepspeed {self.deepspeed} keeps the optimizer's state itself; use "
                "--optim adamw with --deepspeed zero2_offload, which updates on the CPU too"
            )
        if self.optim == "adamw_cpu" and self.fsdp:
            yield (
                f"--optim: adamw_cpu: --fsdp {self.fsdp} shards the optimizer's state; use --optim adamw, with "
                "--fsdp_offload_params true, or --deepspeed zero2_offload, if the CPU is to update"
            )
        if self.optim == "muon" and (way := "deepspeed" if self.deepspeed else "fsdp" if self.fsdp else ""):
            yield f"--optim: muon: needs whole matrices, which --{way} cuts; leave it out, or use --optim adamw"
        for obstacle in (text for text, holds in self._inelastic().items() if self.elastic and holds):
            yield f"--elastic: true: {obstacle}, or --elastic false"
        if self.master_weights == "bf16_stochastic":
            for obstacle in (text for text, holds in self._unrounded().items() if holds):
                yield f"--master_weights: bf16_stochastic: {obstacle}, or --master_weights fp32"

    def _inelastic(self) -> dict[str, bool]:
        """Why processes cannot leave a run, and what to use: for each whether it holds."""
        dealt = not hasattr(self, "num_generations")  # rows by a data loader, in micro-batches
        kl = getattr(self, "rlhf_type", "") == "kto" and getattr(self, "loss_type", None) in (None, "kto")
        return {
            f"--deepspeed {self.deepspeed} cuts the state of --optim {self.optim} once; use --optim adamw": bool(
                self.deepspeed
            )
            and self.optim not in CUT_AGAIN,
            "--save_only_model true leaves nothing to continue from; leave it out": getattr(
                self, "save_only_model", False
            ),
            "--group_by_length true orders rows by the number of processes; leave it out": dealt
            and getattr(self, "group_by_length", False),
            "--dataloader_drop_last true leaves out rows by the number of processes; leave it out": dealt
            and bool(self.dataloader_drop_last),
            "the KL of kto is a mean over the rows of all processes; use --loss_type apo_zero_unpaired": kl,
        }

    def _unrounded(self) -> dict[str, bool]:
        """Why weights cannot be rounded stochastically, and what to use: for each whether it holds."""
        dtype, tuner = getattr(self, "torch_dtype", None), getattr(self, "tuner_type", "full")
        known = [name for name in get_args(Optimizer) if name not in ("adamw_cpu", "muon")]
        return {
            f"--torch_dtype {dtype}: only bfloat16 weights are rounded so; use bfloat16": dtype != "bfloat16",
            f"--tuner_type {tuner} trains float32 weights, which have no masters; use full": tuner != "full",
            f"--deepspeed {self.deepspeed} has float32 masters of its own; leave it out": bool(self.deepspeed),
            f"--fsdp {self.fsdp} shards weights in float32, as their own masters; leave it out": bool(self.fsdp),
            f"--optim {self.optim} may need all masters at once; use {', '.join(known)}": self.optim not in known,
        }


@dataclass(kw_only=True)
class EvaluationArguments:
    """When a run is evaluated beside `--eval_steps`, and ended by that."""

    GROUP: ClassVar[str] = "Run"

    eval_on_start: bool = flag(False, everyday=False, resume="free")
    """Whether the model is evaluated before the first step."""

    early_stopping_patience: int | None = flag(
        at_least=1, everyday=False, aliases=("early_stop_interval",), unset="off"
    )
    """Number of evaluations without a better `--metric_for_best_model` that end the run."""

    early_stopping_threshold: float = flag(0.0, at_least=0, everyday=False, needs="early_stopping_patience")
    """Minimum improvement of `--metric_for_best_model` with which an evaluation counts as better for early stopping."""

    def problems(self) -> Iterator[str]:
        if getattr(self, "eval_strategy", "no") == "no":
            for name in ("early_stopping_patience", "eval_on_start"):
                if value := getattr(self, name):
                    yield (
                        f"--{name}: {str(value).lower()}: nothing is evaluated; give --val_dataset or "
                        "--split_dataset_ratio"
                    )


@dataclass(kw_only=True)
class TrainerArguments(EvaluationArguments):
    """What the trainers of TRL and transformers can do beside, under the names that they give it."""

    GROUP: ClassVar[str] = "Optimization"

    neftune_noise_alpha: float | None = flag(above=0, everyday=False, unset="off")
    """Magnitude of the noise that NEFTune (arXiv:2310.05914) adds to embeddings; the paper uses 5 to 15."""

    torch_compile: bool = flag(False, everyday=False)
    """Whether torch.compile compiles the model."""

    torch_compile_backend: str | None = flag(everyday=False, needs="torch_compile", unset="inductor")
    """Backend of torch.compile."""

    torch_compile_mode: str | None = flag(everyday=False, needs="torch_compile", unset="torch's default")
    """Mode of torch.compile, such as max-autotune."""


@dataclass(kw_only=True)
class RouterArguments:
    """Routers of mixtures of experts, in sft, pt, grpo, structured EBFT, dpo, ipo and kto."""

    GROUP: ClassVar[str] = "Objective"

    router_aux_loss_coef: float | None = flag(0.0, at_least=0, everyday=False)
    """Coefficient of the load-balancing loss of mixtures of experts; none is the model's own."""


@dataclass(kw_only=True)
class ActivationArguments:
    """What the trainers of sft, pt, grpo, structured EBFT, dpo, ipo, kto and rm can do with activations."""

    GROUP: ClassVar[str] = "Optimization"

    activation_offloading: bool = flag(False, everyday=False, resume="free")
    """Whether activations wait on the host for the backward pass, where those of a CPU are anyway."""

    def notes(self) -> Iterator[str]:
        if self.activation_offloading and getattr(self, "max_tokens_per_micro_batch", 1) is None:
            yield (
                "--activation_offloading: true: micro-batches are as large as without it; "
                "--max_tokens_per_micro_batch makes them larger"
            )


@dataclass(kw_only=True)
class RunArguments:
    """Where a run writes, how often it logs, saves and evaluates."""

    GROUP: ClassVar[str] = "Run"

    output_dir: str | None = flag(resume="free")
    """Folder of the runs; each makes `v<N>-<time>` in it."""

    add_version: bool = flag(True, everyday=False, resume="free")
    """Whether each run gets a new folder, instead of output_dir itself."""

    run_name: str | None = flag(everyday=False, unset="the run's folder", resume="free")
    """Name of the run in wandb, swanlab, trackio and mlflow."""

    logging_steps: int = flag(5, at_least=1, resume="free")
    """Number of steps between two log lines."""

    logging_first_step: bool = flag(True, everyday=False, resume="free")
    """Whether the first step is logged too."""

    report_to: list[Literal["none", "tensorboard", "wandb", "swanlab", "trackio", "mlflow"]] = flag(
        ["tensorboard"], resume="free"
    )
    """Trackers of metrics besides logging.jsonl."""

    push_to_hub: bool = flag(False, everyday=False, resume="free")
    """Whether the model is uploaded to the Hugging Face hub at the end of the run."""

    hub_model_id: str | None = flag(everyday=False, needs="push_to_hub", resume="free")
    """Repository of the uploaded model, as owner/name."""

    hub_token: str | None = flag(
        secret=True, everyday=False, needs="push_to_hub", unset="HF_TOKEN or the login", resume="free"
    )
    """Token of the hub."""

    hub_private_repo: bool | None = flag(
        everyday=False, needs="push_to_hub", unset="the owner's default", resume="free"
    )
    """Whether the repository is private if it is made."""

    save_strategy: Literal["no", "steps", "epoch"] = flag(
        "steps", everyday=False, values={"false": "no"}, resume="free"
    )
    """Schedule of checkpoints; the last step is always saved."""

    save_steps: float = flag(500, above=0, resume="free")
    """Number of steps between two checkpoints. Below 1, a share of all steps."""

    save_total_limit: int | None = flag(at_least=1, unset="all are kept", resume="free")
    """Maximum number of checkpoints. The oldest is deleted first; the best is kept."""

    save_only_model: bool = flag(False, everyday=False, resume="free")
    """Whether checkpoints have weights only and cannot be resumed."""

    async_save: bool = flag(False, everyday=False, resume="free")
    """Whether the optimizer's state (FSDP: and float32 weights) is copied to the host, and written while training goes
    on. The model is written at once. A checkpoint exists when it is complete, a step or more later."""

    eval_strategy: Literal["no", "steps", "epoch"] | None = flag(
        aliases=("evaluation_strategy",), values={"false": "no"}, resume="free"
    )
    """Schedule of evaluation; off without evaluation data."""

    eval_steps: float | None = flag(above=0, resume="free")
    """Number of steps between two evaluations. Below 1, a share of all steps."""

    load_best_model_at_end: bool = flag(False, everyday=False, resume="free")
    """Whether the run keeps the best checkpoint and ends with its weights."""

    metric_for_best_model: str | None = flag(everyday=False, needs="eval_strategy=steps|epoch", resume="free")
    """Metric of the best checkpoint."""

    greater_is_better: bool | None = flag(everyday=False, needs="eval_strategy=steps|epoch", resume="free")
    """Whether a larger metric is better."""

    resume_from_checkpoint: str | None = flag(unset="start anew", resume="free")
    """Checkpoint folder to resume, or `last` for the newest of output_dir."""

    dry_run: bool = flag(False, resume="free")
    """Whether to check everything, print the plan and end, without loading weights."""

    profile_steps: str | None = flag(everyday=False, unset="nothing is profiled", resume="free")
    """Optimizer steps for torch's profiler, as FIRST:LAST: a trace and a table of operations and gaps per
    process, in `profile/`."""

    def notes(self) -> Iterator[str]:
        if self.async_save and (stage := getattr(self, "deepspeed", None)):
            yield f"--async_save: true: --deepspeed {stage} writes its state before training goes on"

    def problems(self) -> Iterator[str]:
        first, colon, last = (self.profile_steps or "1:1").partition(":")
        if not (colon and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
            yield f"--profile_steps: {self.profile_steps}: not FIRST:LAST; give two steps, such as 3:5"
        if len(self.report_to) > 1 and "none" in self.report_to:
            yield f"--report_to: {' '.join(self.report_to)}: none excludes the others; drop none"
        if self.push_to_hub and not self.hub_model_id:
            yield "--push_to_hub: true: --hub_model_id is missing; give --hub_model_id owner/name"
        for steps, name in {self.eval_steps: "eval_steps", self.save_steps: "save_steps"}.items():
            if steps and steps > 1 and steps % 1:
                yield f"--{name}: {steps:g}: not a whole number; give one such as 500, or a share of all steps below 1"
        schedule = getattr(self, "lr_scheduler_type", None)
        if schedule in ("reduce_lr_on_plateau", "greedy") and self.eval_strategy == "no":
            yield (
                f"--lr_scheduler_type: {schedule}: follows evaluations, and nothing is evaluated; give --val_dataset "
                "or --split_dataset_ratio"
            )
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
        elif self.eval_strategy == "steps" and self.eval_steps and not _is_multiple(self.save_steps, self.eval_steps):
            yield (
                f"--save_steps: {self.save_steps:g}: not a multiple of --eval_steps {self.eval_steps:g}, which "
                f"--load_best_model_at_end needs; e.g. --save_steps {self.eval_steps:g}"
            )


def _is_multiple(steps: float, of: float) -> bool:
    """Of two numbers of steps, or of two shares of all steps."""
    return (steps < 1) == (of < 1) and math.isclose(steps / of, round(steps / of))
