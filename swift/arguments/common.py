"""Settings and checks that several modes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from swift.data.arguments import StreamArguments
from swift.flags import REQUIRED, flag, flags_of, typed
from swift.models.arguments import TunerArguments
from swift.rollout.placement import has_own_engine
from swift.trainers.arguments import OptimizationArguments, RunArguments, TrainerArguments

GROUPS = (
    "Model",
    "Data",
    "Optimization",
    "Sampling",
    "Environments",
    "Objective",
    "Energy-based fine-tuning",
    "Asynchronous and data",
    "Reward",
    "Engine",
    "Run",
    "Plugins",
)
"""Headings of the help, in its order."""


@dataclass(kw_only=True)
class CommonArguments:
    """Settings of every mode."""

    GROUP: ClassVar[str] = "Run"

    debug: bool = flag(False, everyday=False, resume="free")
    """Whether expected errors keep their traceback. SWIFT_DEBUG=1 does the same."""

    json: bool = flag(False, everyday=False, resume="free")
    """Whether output is machine-readable."""

    def problems(self) -> Iterator[str]:
        cls: Any = type(self)
        for setting in flags_of(cls).values():
            if setting.details.unset == REQUIRED and getattr(self, setting.name) in (None, []):
                fix = f"valid: {setting.valid}" if setting.valid else f"give: {setting.summary}"
                yield f"--{setting.name}: missing: required; {fix}"


def model_missing(args: Any) -> Iterator[str]:
    """A mode needs a model."""
    if not args.model and not args.adapters:
        yield "--model: missing: the mode needs a model; give --model <folder or hub id>, or --adapters"


def context_problems(args: Any) -> Iterator[str]:
    """Models beside the policy that do not get its other context, or its new tokens."""
    for name in ("rope_scaling", "max_model_len", "new_special_tokens"):
        if value := getattr(args, name):
            given = f"--{name}: {typed(value)}"
            if has_own_engine(args):
                yield f"{given}: an engine reads the files of --model alone; change them, or use --use_vllm false"
            for other in ("teacher_model", "teacher_model_server"):
                if getattr(args, other, None):
                    yield f"{given}: not with --{other}, which does not get it; change the files of --model instead"


def backend_problems(args: Any) -> Iterator[str]:
    """Backends that exclude each other."""
    if args.use_vllm and args.use_lmdeploy:
        yield "--use_lmdeploy: true: excludes --use_vllm true; set one of them to false"
    if args.use_lmdeploy and args.vllm_enable_lora:
        yield (
            "--vllm_enable_lora: true: LMDeploy reads adapters at its start only and gets merged weights; "
            "--vllm_enable_lora false, or --use_vllm true"
        )
    expected = "vllm" if args.use_vllm else "lmdeploy" if args.use_lmdeploy else None
    if expected and args.infer_backend not in (None, expected):
        yield f"--infer_backend: {args.infer_backend}: contradicts --use_{expected} true; drop one of the two"


def training_data_missing(args: Any) -> Iterator[str]:
    """Training needs rows, and a stream of them has no length."""
    if not args.dataset:
        yield "--dataset: missing: there is nothing to train on; give --dataset <file, hub id or reasoning_gym:task>"
    if not getattr(args, "streaming", False):
        return
    if args.max_steps <= 0:
        yield f"--max_steps: {args.max_steps}: a stream has no known end; give --max_steps, or --streaming false"
    for kind in ("save", "eval"):
        if getattr(args, f"{kind}_strategy") == "epoch" and hasattr(args, "max_epochs"):
            if args.dataloader_num_workers > 1:
                yield (
                    f"--{kind}_strategy: epoch: other processes read the stream and see where an epoch ends; use "
                    "--dataloader_num_workers 1"
                )
        elif getattr(args, f"{kind}_strategy") == "epoch":
            yield f"--{kind}_strategy: epoch: a stream has no epochs; use --{kind}_strategy steps --{kind}_steps N"


def float16_problems(args: Any) -> Iterator[str]:
    """Trainers of TRL and transformers scale the loss of float16; the gradients must be float32 to undo it."""
    if args.torch_dtype != "float16":
        return
    if args.optim == "adamw_cpu":
        yield (
            "--optim: adamw_cpu: cannot undo the loss scaling of --torch_dtype float16; "
            "use --torch_dtype bfloat16, or --optim adamw"
        )
    has_head = getattr(args, "rlhf_type", None) in ("rm", "prm") or hasattr(args, "num_labels")
    if not args.deepspeed and (args.tuner_type == "full" or args.modules_to_save or has_head):
        yield (
            "--torch_dtype: float16: its loss scaling does not work where float16 weights themselves are trained; "
            "use --torch_dtype bfloat16 or float32, or --deepspeed zero2"
        )


@dataclass(kw_only=True)
class PluginArguments:
    """Plugins of the modes whose trainer is TRL's or transformers'."""

    external_plugins: list[str] = flag(
        [], aliases=("custom_register_path",), joins=True, group="Run", everyday=False, resume="free"
    )
    """Python files that register methods of rlhf and optimizers."""


@dataclass(kw_only=True)
class TrainerModeArguments(
    PluginArguments,
    CommonArguments,
    RunArguments,
    TrainerArguments,
    OptimizationArguments,
    StreamArguments,
    TunerArguments,
):
    """Settings of the modes whose trainer is TRL's or transformers'."""

    max_epochs: int | None = flag(at_least=1, group="Optimization", everyday=False, unset="no limit")
    """Number of passes over a stream that end the run before max_steps. The last rows are left out if they do not fill
    a step."""

    load_from_cache_file: bool = flag(True, group="Data", everyday=False, resume="free")
    """Whether tokenised rows of an earlier run with equal rows and settings are used again."""

    def problems(self) -> Iterator[str]:
        yield from model_missing(self)
        yield from training_data_missing(self)
        if self.max_epochs and not self.streaming:
            yield f"--max_epochs: {self.max_epochs}: ends a stream of rows; use --num_train_epochs {self.max_epochs}"
        yield from float16_problems(self)
        yield from self.tuner_problems()
