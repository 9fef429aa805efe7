"""Every algorithm option on the demo's task: what is learned in a few steps, and the metric that shows that it acts.

    python benchmarks/algorithms.py [--only baseline sapo] [--seeds 0 1] [--steps 40] [--keep FOLDER] [--record]

Each row is one `swift rlhf --rlhf_type grpo` per seed with the demo's model, problems and rewards, and the flags of
that row besides. It says that an option runs end to end and does what it is for, not which is better: the task is tiny,
the runs are short, the seeds few. `--keep` leaves the runs in a folder and takes up those that are complete there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import record, tables
from harness.sides import SWIFT
from harness.works import ROOT, demo

RUN_LIMIT_S = 900.0
LAST = 10
"""Rollouts whose mean reward counts."""


@dataclass(frozen=True, slots=True)
class Option:
    """A row: a name, the flags that make it, and the metric that shows that it acts.

    how: what is made of the metric over the steps of a run, a key of `COMBINE`. `metric` may also be a column of the
    problems; then it is what was sampled that counts.
    """

    name: str
    flags: str
    metric: str
    how: str = "mean"


COMBINE: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "max": max,
    "min": min,
    "sum": sum,
    "last": lambda values: values[-1],
}
TWICE = "--num_iterations 2 "
VLLM = "--use_vllm true --vllm_enforce_eager true "
AHEAD = (
    "--vllm_mode dedicated --async_generate true --prefetch_depth 2 --log_rollout_offpolicy_metrics true "
    "--rollout_importance_sampling_mode "
)
ANSWER = "<think>[^<]{1,30}</think><answer>-?[0-9]{1,3}</answer>"
OPTIONS = (
    Option("baseline", "", "frac_reward_zero_std"),
    Option("dapo, two updates", TWICE, "clip_ratio/region_mean"),
    Option("dapo, clip-higher", TWICE + "--epsilon_high 0.28", "clip_ratio/high_mean"),
    Option("grpo", TWICE + "--loss_type grpo", "clip_ratio/region_mean"),
    Option("dr_grpo", TWICE + "--loss_type dr_grpo --scale_rewards none", "clip_ratio/region_mean"),
    Option("bnpo", TWICE + "--loss_type bnpo", "clip_ratio/region_mean"),
    Option("gspo", TWICE + "--loss_type gspo --epsilon 3e-4 --epsilon_high 4e-4", "clip_ratio/region_mean"),
    Option("luspo", TWICE + "--loss_type luspo --epsilon 0.002 --epsilon_high 0.0025", "clip_ratio/region_mean"),
    Option("cispo", TWICE + "--loss_type cispo --epsilon_high 5", "clip_ratio/high_mean"),
    Option("sapo", TWICE + "--loss_type sapo", "ratio/max", "max"),
    Option("vespo", TWICE + "--loss_type vespo", "vespo/phi_mean"),
    Option("two-sided clip", TWICE + "--delta 1.5", "ratio/max", "max"),
    Option("rloo", "--advantage_estimator rloo", "grad_norm"),
    Option("reinforce_plus_plus", "--advantage_estimator reinforce_plus_plus", "grad_norm"),
    Option("gdpo", "--scale_rewards gdpo", "grad_norm"),
    Option("KL in the loss", "--beta 0.04 --kl_bias_correction true", "kl", "last"),
    Option("KL in the reward", "--beta 0.04 --kl_in_reward true", "time/ref_logp"),
    Option(
        "sync_ref_model", "--beta 0.04 --kl_bias_correction true --sync_ref_model true --ref_model_sync_steps 10",
        "kl", "last",
    ),
    Option("dynamic_sample", "--dynamic_sample true", "dynamic_sample/zero_variance", "sum"),
    Option("replay", "--replay_buffer_size 64", "replay/groups", "sum"),
    Option(
        "re-roll", "--reroll_start_fraction 0.1 --reroll_max_groups 2 --reroll_fail_reward 1", "reroll/waiting", "max"
    ),
    Option("curriculum", "--curriculum_column carries", "carries"),
    Option("async, no correction", AHEAD + "none", "mismatch/ess", "min"),
    Option("async, token_truncate", AHEAD + "token_truncate", "mismatch/clipped_frac"),
    Option("async, token_mask", AHEAD + "token_mask", "mismatch/clipped_frac"),
    Option("async, sequence_truncate", AHEAD + "sequence_truncate", "mismatch/clipped_frac"),
    Option("async, sequence_mask", AHEAD + "sequence_mask", "mismatch/clipped_frac"),
    Option("async, OPSM", AHEAD + "none --off_policy_sequence_mask_delta 0.01", "off_policy/masked_frac"),
    Option(
        "streaming_partial_batch",
        "--vllm_mode dedicated --async_generate true --streaming_partial_batch true --streaming_min_groups 4",
        "off_policy/mean",
    ),
    Option("in-flight updates", AHEAD + "token_truncate --in_flight_updates true", "off_policy/max", "max"),
    Option("weights every 4 steps", "--vllm_mode dedicated --vllm_sync_interval 4", "off_policy/max", "max"),
    Option("max_staleness", AHEAD + "token_truncate --max_staleness 1", "off_policy/max", "max"),
    Option("zero advantages computed", "--skip_zero_advantage_batches false", "time/train"),
    Option("replay, stored log-probs", "--replay_buffer_size 64 --replay_recompute_logps false", "replay/age"),
    Option("ratio against the sampler", TWICE + "--old_logprobs sampler", "clip_ratio/region_mean"),
    Option("overlong_filter", "--max_completion_length 21 --overlong_filter true", "tokens/trained"),
    Option(
        "soft_overlong", "--reward_funcs accuracy format soft_overlong --soft_max_length 22 --soft_cache_length 2",
        "rewards/soft_overlong/mean", "last",
    ),
    Option("one reward worker", "--reward_workers 1", "time/reward"),
    Option("guided regex", "--vllm_guided_decoding_regex " + ANSWER, "rewards/format/mean", "min"),
    Option("generation_kwargs", '--generation_kwargs {"presence_penalty":0.5}', "mismatch/biased"),
    Option("rollout_func", "--rollout_func examples/train/grpo/plugin/rollout.py:two_turns", "turns"),
    Option("log_unique_prompts", "--log_completions true --log_unique_prompts true", "completions/unique_prompts"),
    Option("adafactor", "--optim adafactor --learning_rate 1e-3", "grad_norm"),
    Option("adamw_8bit", "--optim adamw_8bit", "grad_norm"),
    Option("adamw_cpu", "--optim adamw_cpu", "grad_norm"),
    Option("vLLM, colocate", VLLM + "--vllm_mode colocate", "mismatch/logp_abs_diff_max", "max"),
    Option("vLLM, dedicated", VLLM + "--vllm_mode dedicated", "mismatch/logp_abs_diff_max", "max"),
    Option("entropy bonus, adaptive", "--use_adaptive_entropy true --entropy_target 0.1", "entropy_coef", "max"),
    Option("top-entropy tokens", "--top_entropy_quantile 0.2", "entropy_threshold"),
)  # fmt: skip

BASE = (
    "--loss_type dapo --eval_strategy steps --num_generations_eval 1 --reward_funcs accuracy format --train_type full "
    "--gradient_checkpointing false --num_generations 8 --temperature 1.0 --max_completion_length 48 "
    "--per_device_train_batch_size 64 --learning_rate 1e-4 --warmup_ratio 0.05 --beta 0 --log_entropy true "
    "--logging_steps 1 --save_strategy no --report_to none --parity_check off --add_version false"
)


def command(option: Option, model: Path, data: tuple[Path, Path], folder: Path, steps: int, seed: int) -> list[str]:
    """One run; a flag of the option replaces that of the base."""
    train, held_out = data
    of_run = f"--model {model} --dataset {train} --val_dataset {held_out} --output_dir {folder} --seed {seed}"
    of_run += f" --data_seed {seed} --max_steps {steps} --eval_steps {steps}"
    given: dict[str, list[str]] = {}
    for words in (BASE, of_run, option.flags):
        now: dict[str, list[str]] = {}
        for word in words.split():
            if word.startswith("--"):
                values = now[word] = []
            else:
                values.append(word)
        given |= now
    return [
        *SWIFT,
        "rlhf",
        "--rlhf_type",
        "grpo",
        *(word for name, values in given.items() for word in (name, *values)),
    ]


def problems(data: Path, folder: Path) -> tuple[Path, Path]:
    """What is trained on, with a column that says how hard a row is (its carries and borrows), and what is held out."""
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        left, right = row["query"].rstrip("=").replace("-", "+").split("+")
        units = int(left) % 10 - int(right) % 10 if "-" in row["query"] else 9 - int(left) % 10 - int(right) % 10
        row["carries"] = int(units < 0)
    made = folder / "train_with_carries.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made, data / "held_out.jsonl"


def execute(words: list[str], folder: Path, flags: str) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optional = [str(Path(sys.prefix) / "optional")] if "8bit" in flags else []  # where `make install` has bitsandbytes
    path = os.pathsep.join([str(ROOT), *optional])
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=RUN_LIMIT_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{folder.name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def read(option: Option, folder: Path) -> dict[str, Any]:
    """What one run says of itself.

    Raises:
        RuntimeError: the metric that shows that the option acts is not in its log.
    """
    rows = list(json_rows(folder / "logging.jsonl"))
    steps = [row for row in rows if "reward" in row]  # of several updates of a rollout, the first
    sampled = [row for row in json_rows(folder / "completions.jsonl") if row["split"] == "train"]
    values = [row[option.metric] for row in [*rows, *(row["columns"] for row in sampled)] if option.metric in row]
    if not values:
        raise RuntimeError(f"{option.name}: its log has no {option.metric}")
    return {
        "reward": fmean(row["reward"] for row in steps[-LAST:]),
        "held_out_accuracy": next(row for row in rows if "eval_reward" in row)["eval_rewards/accuracy/mean"],
        "dropped_tokens": sum(row["completion_tokens"] for row in sampled if not row["used"]),
        "metric_value": COMBINE[option.how](values),
    }


def measure(option: Option, options: argparse.Namespace, model: Path, data: tuple[Path, Path], home: Path) -> dict:
    """All seeds of an option, as a row."""
    runs = []
    for seed in options.seeds:
        folder = home / f"{option.name.replace(', ', '-').replace(' ', '_')}-{options.steps}-{seed}"
        if not (done := folder / "done").exists():
            execute(command(option, model, data, folder, options.steps, seed), folder, option.flags)
            done.touch()
        runs.append({"seed": seed, **read(option, folder)})
        print(f"{option.name}, seed {seed}: reward {runs[-1]['reward']:.3f}", flush=True)
    more = {"flags": " ".join(option.flags.split()), "steps": options.steps, "metric": option.metric, "how": option.how}
    return {"row": option.name, **more, "runs": runs}


HEADER = ["option", "reward", "accuracy", "metric", "value"]


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table: means over the seeds."""

    def mean(name: str) -> float:
        return fmean(float(run[name]) for run in row["runs"])

    metric = f"`{row['metric']}`" + (f" {row['how']}" if row["how"] != "mean" else "")
    return [
        row["row"],
        f"{mean('reward'):.2f}",
        f"{mean('held_out_accuracy'):.3f}",
        metric,
        f"{mean('metric_value'):.3g}",
    ]


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    names = [option.name for option in OPTIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--keep", type=Path, help="folder of the runs; complete ones are not made again")
    parser.add_argument("--out", type=Path, default=Path("output/bench/algorithms.json"), help="file of the results")
    parser.add_argument("--record", action="store_true", help="put the rows into benchmarks/results and the docs")
    return parser.parse_args(words)


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        home = (options.keep or Path(temporary)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        model, train = demo(home)
        data = problems(train.parent, home)
        rows = [measure(option, options, model, data, home) for option in OPTIONS if option.name in options.only]
    print(tables.aligned(HEADER, [cells(row) for row in rows]))
    print(f"written to {record.write(options.out, rows)}")
    if options.record:
        import page

        print(f"recorded in {record.merge(record.results_file('algorithms'), rows)}")
        page.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
