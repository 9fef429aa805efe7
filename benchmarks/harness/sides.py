"""The commands of the sides: `swift rlhf`, TRL's script, ms-swift's `swift rlhf`; settings are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.works import Row, Work

SIDES = Path(__file__).resolve().parents[1] / "sides"
CHECK_S = 120.0
CONSOLE = Path(sys.executable).with_name("swift")
SWIFT = [str(CONSOLE)] if CONSOLE.exists() else [sys.executable, "-m", "swift"]
"""What a user types; in a clone that is not installed, the module."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a user types, and where: words, environment, working folder."""

    words: list[str]
    environment: dict[str, str]
    folder: Path


def command(side: str, work: Work, output: Path, steps: int, seed: int, ms_swift_python: str | None = None) -> Command:
    """The command of a side for so many steps; a side that is no peer is a variant of swift."""
    shared = _shared(work, output, steps, seed)
    if side == "trl":
        return Command(_trl(work, shared), environment(work.row.device), output)
    if side == "ms-swift":
        assert ms_swift_python is not None
        # another package of the name `swift` must not be found: neither here nor on this one's path
        variables = {name: value for name, value in environment(work.row.device).items() if name != "PYTHONPATH"}
        return Command(_ms_swift(work, shared, ms_swift_python), variables, output)
    flags = [*work.row.flags, *work.row.variants.get(side, ())]
    return Command([*SWIFT, "rlhf", *_words(_swift(work, shared), flags)], environment(work.row.device), output)


def recorded_command(side: str, work: Work, output: Path, rate: float = 1.0) -> Command:
    """One step of plain gradient descent on recorded completions; the model is saved in `output`."""
    shared = {**_shared(work, output, 1, 0), "learning_rate": rate}
    variables = {**environment(work.row.device), "RECORDED": str(work.recorded)}
    if side == "trl":
        return Command([*_trl(work, shared), "--recorded", str(work.recorded)], variables, output)
    plain = _swift(work, shared)
    recorded = {"rollout_func": f"{SIDES / 'recorded_rollout.py'}:recorded"}
    if work.row.image_side:
        recorded = {"external_plugins": f"{plain['external_plugins']} {SIDES / 'recorded_engine.py'}"}
        variables["PYTHONPATH"] = os.pathsep.join([str(SIDES), variables.get("PYTHONPATH", "")])
    words = plain | recorded | {
        "optim": "sgd", "max_grad_norm": 1e9,
        "weight_decay": 0, "lr_scheduler_type": "constant", "warmup_ratio": 0, "save_strategy": "steps",
        "save_steps": 1, "save_only_model": "true", "parity_check": "off",
    }  # fmt: skip
    return Command([*SWIFT, "rlhf", *_words(words, list(work.row.flags))], variables, output)


def recorded_run_command(work: Work, run: Path, output: Path, steps: int, rate: float | None = None) -> Command:
    """The trainer of TRL's AsyncGRPO on the rollouts of a run of swift; with a rate, a step of SGD that is saved."""
    row = work.row
    sizes = {"per_device_train_batch_size": row.per_device, "gradient_accumulation_steps": work.accumulation}
    words = {"model": work.model, "run": run, "output_dir": output, **sizes, "num_generations": row.num_generations}
    words |= {"max_steps": steps, "learning_rate": rate or row.learning_rate, "optim": "sgd" if rate else "adamw_torch"}
    script = [sys.executable, str(SIDES / "trl_async.py"), *_words(words, []), *_trl_switches(row)]
    return Command(script, environment(row.device), output)


def _shared(work: Work, output: Path, steps: int, seed: int) -> dict[str, Any]:
    row = work.row
    return {
        "model": work.model, "dataset": work.dataset, "output_dir": output, "max_steps": steps, "seed": seed,
        "num_generations": row.num_generations, "per_device_train_batch_size": row.per_device,
        "gradient_accumulation_steps": work.accumulation, "max_completion_length": row.completion_tokens,
        "learning_rate": row.learning_rate, "beta": row.beta,
        "loss_type": "dapo" if row.size == "demo" else "grpo",
    }  # fmt: skip


def _swift(work: Work, shared: dict[str, Any]) -> dict[str, Any]:
    row = work.row
    rewards = {"reward_funcs": "accuracy format", "log_completions": "true"}
    plain = {"external_plugins": work.plugin, "reward_funcs": "even_share"}
    return {
        "rlhf_type": "grpo", **shared, "data_seed": shared["seed"], **(rewards if row.size == "demo" else plain),
        "tuner_type": "full", "torch_dtype": row.dtype, "temperature": 1.0,
        "gradient_checkpointing": str(row.recompute).lower(),
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "add_version": "false",
    }  # fmt: skip


def _trl(work: Work, shared: dict[str, Any]) -> list[str]:
    reward = ["--reward", "demo"] if work.row.size == "demo" else []
    return [sys.executable, str(SIDES / "trl_grpo.py"), *_words(shared, []), *reward, *_trl_switches(work.row)]


def _trl_switches(row: Row) -> list[str]:
    switches = {
        "bf16": row.dtype == "bfloat16",
        "use_cpu": row.device == "cpu",
        "gradient_checkpointing": row.recompute,
    }
    return [f"--{name}" for name, wanted in switches.items() if wanted]


def _ms_swift(work: Work, shared: dict[str, Any], python: str) -> list[str]:
    more = {
        "model_type": "qwen2", "template": "default", "bf16": "false", "attn_impl": "sdpa", "use_hf": "true",
        "check_model": "false", "split_dataset_ratio": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0,
    }  # fmt: skip
    return [python, "-m", "swift.cli.rlhf", *_words({**_swift(work, shared), **more}, [])]


def _words(settings: dict[str, Any], flags: list[str]) -> list[str]:
    """Flags replace settings of the same name, and earlier flags."""
    given = {
        name: str(value).split() if name in ("reward_funcs", "external_plugins") else [str(value)]
        for name, value in settings.items()
    }
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        given[name.removeprefix("--")] = [value]
    return [word for name, values in given.items() for word in (f"--{name}", *values)]


def environment(device: str) -> dict[str, str]:
    """Of a command that works on the CPU, or on one GPU."""
    gpu = "" if device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def ms_swift_version(python: str) -> str:
    """The ms-swift that an interpreter has.

    Raises:
        ValueError: it cannot be started, or has none.
    """
    code = "from importlib.metadata import version; print(version('ms-swift'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--ms_swift_python {python}: cannot be started ({error})") from error
    if done.returncode:
        raise ValueError(f"--ms_swift_python {python}: has no ms-swift")
    return done.stdout.strip()
