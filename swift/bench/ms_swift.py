"""ms-swift as a contender: its own command line, in an interpreter that has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swift.bench.work import Work

SCRIPT = Path(__file__).with_name("ms_swift_turns.py")
CHECK_S = 120.0


def version_in(python: str) -> str:
    """The ms-swift that an interpreter has.

    Raises:
        ValueError: it cannot be started, or has none.
    """
    code = "from importlib.metadata import version; print(version('ms-swift'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"cannot be started ({error})") from error
    if done.returncode:
        raise ValueError("has no ms-swift")
    return done.stdout.strip()


def flags(work: Work, output_dir: str, max_steps: int) -> list[str]:
    """The words after `swift rlhf`: the settings that swift and TRL are given, in ms-swift's names."""
    words = {
        "rlhf_type": "grpo",
        "model": work.model,
        "model_type": "qwen2",
        "template": "default",
        "dataset": work.dataset,
        "external_plugins": work.plugin_of_ms_swift,
        "reward_funcs": "even_share",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "bf16": "false",
        "attn_impl": "sdpa",
        "beta": work.beta,
        "num_generations": work.num_generations,
        "per_device_train_batch_size": work.per_device,
        "gradient_accumulation_steps": work.accumulation,
        "max_completion_length": work.completion_tokens,
        "temperature": 1.0,
        "gradient_checkpointing": "false",
        "learning_rate": 1e-6,
        "max_steps": max_steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_hf": "true",
        "check_model": "false",
        "split_dataset_ratio": 0,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "output_dir": output_dir,
    }
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def turns_command(python: str, work: Work, descriptor: int) -> list[str]:
    """Whole optimizer steps, one per turn."""
    output = str(Path(work.folder) / "ms-swift")
    steps = flags(work, output, max_steps=1_000_000)
    return [python, str(SCRIPT), str(descriptor), str(work.num_completions), *steps]


def start_command(python: str, work: Work, output_dir: str) -> list[str]:
    """The command whose first optimizer step is waited for."""
    return [python, "-m", "swift.cli.rlhf", *flags(work, output_dir, max_steps=1)]


def first_step_done(output_dir: str) -> bool:
    """Whether the first step is in its log."""
    return any(path.stat().st_size > 0 for path in Path(output_dir).rglob("logging.jsonl"))
