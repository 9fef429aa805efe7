"""Whatever the flags, a dry run and the run end alike: both start, or both are refused in the same words.

HOSTILE_SEED draws other flags than those of last time.
"""

import contextlib
import math
import random
from pathlib import Path

import pytest
from cli_runs import Cli, error_lines
from commands import adapter, short_run
from test_hostile_inputs import chance

from swift.arguments.modes import MODES
from swift.cli.main import main
from swift.flags import Flag, flags_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWN = ("rlhf", "rlhf", "ebft", "dpo", "kto", "orpo", "cpo", "rm", "sft", "sft", "pt")
NUM_CASES, MOST_FLAGS = 60, 3
REFUSED, UNUSABLE = 2, 3

TEXTS = {
    "target_modules": ["all-linear", "q_proj", "no_proj", "lm_head", "embed_tokens"],
    "modules_to_save": ["lm_head", "embed_tokens", "none"],
    "freeze_parameters": ["model", "model.layers.0", "none"],
    "trainable_parameters": ["model.norm", "none"],
    "metric_for_best_model": ["loss", "eval_loss", "reward", "rewards/margins", "nothing"],
    "template": ["qwen3", "chatml", "none"],
    "system": ["Brief.", ""],
    "stop_words": ["a", ""],
    "optim_args": ["momentum=0.9", "x"],
    "curriculum_column": ["solution", "none"],
    "reward_weights": ["1", "-1", "1 2"],
    "interleave_prob": ["1", "0.5 0.5"],
    "max_length": ["1", "8", "64", "5000"],
}
"""Words for settings that take any text, or for which most numbers are too large."""

NUMBERS = [0, 1, 2, 3, 8, 64]
FRACTIONS = [0, 0.01, 0.5, 1, 2]

LEFT = {
    "dry_run", "debug", "json", "add_version", "max_steps", "use_vllm", "use_lmdeploy", "infer_backend", "use_hf",
    "push_to_hub", "report_to", "async_generate", "torch_compile", "max_completion_length", "cpu_devices",
    "reward_timeout", "rollout_timeout", "stall_timeout", "ddp_timeout", "resume_from_checkpoint", "reward_workers",
    "dataset_num_proc", "dataloader_num_workers", "num_infer_workers", "rollout_source", "gradient_accumulation_steps",
    "overwrite_output_dir", "deepspeed", "fsdp",
}  # fmt: skip
"""Settings that need other machines or make a run long, and those of this comparison."""


def value_of(rng: random.Random, flag: Flag) -> str | None:
    """A word that may or may not be right for a setting; None for those that take any text."""
    if flag.name in TEXTS:
        return rng.choice(TEXTS[flag.name])
    if flag.choices:
        return str(rng.choice(flag.choices))
    if flag.kind == "bool":
        return rng.choice(["true", "false"])
    numbers = {"int": NUMBERS, "float": FRACTIONS}.get(flag.kind, [])
    lowest, highest = (flag.details.bounds.get(name, limit) for name, limit in (("ge", -math.inf), ("le", math.inf)))
    right = [one for one in numbers if lowest <= one <= highest] or numbers
    return str(rng.choice(right)) if right else None


def drawn_words(rng: random.Random, cli: Cli) -> list[str]:
    """A right command line with some further flags; often with evaluation, an adapter or a reference."""
    mode = rng.choice(DRAWN)
    words = short_run(cli, mode, max_steps=1)
    data = words[words.index("--dataset") + 1]
    flags = {
        name: flag
        for name, flag in flags_of(MODES[mode]).items()
        if name not in LEFT and not name.startswith(("vllm_", "ray_", "lmdeploy_", "nemo_gym_", "atropos_"))
    }
    for name in rng.sample(sorted(flags), len(flags))[: rng.randint(1, MOST_FLAGS)]:
        if (value := value_of(rng, flags[name])) is not None:
            words += [f"--{name}", *value.split(" ")]
    if rng.random() < 0.4:
        words += ["--tuner_type", "lora"]
    if rng.random() < 0.4:
        words += ["--val_dataset", data, "--eval_strategy", "steps", "--eval_steps", "1"]
    if rng.random() < 0.2:
        words += ["--adapters", str(adapter(cli))]
    if "ref_model" in flags and rng.random() < 0.3:
        words += ["--ref_model", str(rng.choice([cli.model, adapter(cli), "./none"])), "--beta", "0.1"]
    return words


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_a_dry_run_ends_as_the_run_does(cli, number, capfd, monkeypatch):
    monkeypatch.chdir(cli.folder)
    words = drawn_words(chance("agreement", number), cli)
    ends = {}
    for dry in ("true", "false"):
        with contextlib.suppress(FileNotFoundError):
            Path(cli.folder, "out").rmdir()
        code = main([*words, "--dry_run", dry])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err, (words, err[-3000:])
        ends[dry] = code, error_lines(err)[:1]
    assert ends["true"] == ends["false"], words
    assert ends["true"][0] in (0, REFUSED, UNUSABLE), (words, ends)
