"""Preferences about one-digit sums, and runs of trainers of TRL or transformers."""

import json
import random
from itertools import chain
from pathlib import Path

import pytest
import torch
from preloaded import run_ranks
from safetensors.torch import load_file

from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.distributed import Collectives
from swift.trainers.grpo import run as grpo
from swift.trainers.trl.frame import build_trainer
from swift.trainers.trl.method import method_of
from swift.trainers.trl.run import load_model, run


def sums(count, seed=0):
    """Pairs about one-digit sums: the right answer is chosen, a wrong one is rejected."""
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randint(0, 4), draw.randint(0, 4)
        wrong = draw.choice([n for n in range(9) if n != a + b])
        yield {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "chosen": [{"role": "assistant", "content": str(a + b)}],
            "rejected": [{"role": "assistant", "content": str(wrong)}],
        }


def verdicts(count, seed=0):
    """The same as single answers, each with its label; good and bad ones take turns."""
    for number, pair in enumerate(sums(count, seed)):
        good = number % 2 == 0
        yield {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}


def chats(count):
    """The right ones as chats."""
    for pair in sums(count):
        yield {"messages": [*pair["prompt"], *pair["chosen"]]}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def argv_of(own, *flags):
    """The words of a small run: `flags` in place of `own` settings, and these in place of what is usual."""
    usual = {
        "--tuner_type": "full", "--learning_rate": "3e-3", "--logging_steps": 1, "--gradient_checkpointing": "false",
        "--report_to": "none", "--gradient_accumulation_steps": 1,
    }  # fmt: skip
    given = list(words_of(flags))
    base = [f"{flag} {value}" for flag, value in {**usual, **own}.items() if flag not in given]
    return [*words_of(base), *given]


def words_of(flags):
    """`"--flag value --other value"`, or a value by itself, or several of these."""
    for one in flags:
        if isinstance(one, str):
            yield from one.split() if one.startswith("--") else [one]
        else:
            yield from words_of(one)


def trainer_of(resolved, folder):
    """The trainer of a run, before its first step."""
    method, args = method_of(resolved.mode), resolved.args
    template = method.template(args)
    train, val, _ = method.encoded(args, template)
    model, parts = load_model(args, method, template.vision)
    more = {"collectives": Collectives(), "settings": {}, "parts": parts}
    return build_trainer(method, args, folder, model, template, train, val, [], **more)


def trained(resolved) -> Path:
    """Runs the method in this process; the run's folder."""
    assert (grpo.run if resolved.mode in ("gkd", "rlhf") else run)(resolved) == 0
    return newest_run(resolved.args.output_dir)


def in_two(resolved, *, count=2, **variables) -> Path:
    """Runs it in two processes (or `count`); the run's folder."""
    output = Path(resolved.args.output_dir)
    command = ["-m", "swift", resolved.command, *words_of_settings(resolved)]
    run_ranks(command, output.with_name(f"{output.name}-logs"), count=count, limit_s=600, **variables)
    return newest_run(output)


def words_of_settings(resolved):
    """The flags that gave these settings."""
    return chain.from_iterable(f"--{name} {_words(getattr(resolved.args, name))}".split(" ") for name in resolved.given)


def _words(value):
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def train_as_one_and_as_two(make, tmp_path, *way, rel=1e-2) -> Path:
    """Runs `make(*flags)` in one process, with two micro-batches, and in two, sharded by `way`: the same model.

    Returns:
        the folder of the two.
    """
    alone = trained(make("--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "one")))
    together = in_two(make("--output_dir", str(tmp_path / "two"), *way))
    ours, theirs = (weights(list_checkpoints(one)[-1]) for one in (alone, together))
    assert all(torch.allclose(ours[name], theirs[name], atol=5e-4) for name in ours)
    for name in ("loss", "grad_norm"):  # Adam hides a factor
        assert logged(alone, name) == pytest.approx(logged(together, name), rel=rel)
    return together


def assert_resumes_exactly(make, at=2) -> Path:
    """A run of `make(*flags)` that goes on from step `at` is the undisturbed one."""

    def saving(*flags):
        return make("--save_steps", str(at), *flags)

    run_dir = trained(saving())
    assert_goes_on_exactly(run_dir, saving, at)
    return run_dir


def assert_goes_on_exactly(run_dir, make, at=2, run=trained):
    """From its checkpoint of step `at`: to the same weights and logs."""
    last = list_checkpoints(run_dir)[-1]
    straight = weights(last)
    assert run(make("--resume_from_checkpoint", str(run_dir / f"checkpoint-{at}"))) == run_dir
    resumed = weights(last)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    first, second = ([row for row in untimed(run_dir) if row["attempt"] == attempt] for attempt in (1, 2))
    expected = [row | {"attempt": 2} for row in first if row["step"] > at]
    pairs = zip(second, expected, strict=True)
    differ = [{name: (one.get(name), other.get(name)) for name in one | other} for one, other in pairs]
    differ = [{name: both for name, both in row.items() if both[0] != both[1]} for row in differ]
    assert expected and not any(differ), differ


def untimed(run_dir) -> list[dict]:
    """The log lines without what measures time; there are some."""
    timed = ("step_time", "_runtime", "_second", "tokens_per_s", "rss_gib")
    found = rows(run_dir / "logging.jsonl")
    assert found
    return [
        {name: value for name, value in row.items() if not name.endswith(timed) and not name.startswith("time/")}
        for row in found
    ]


def weights(checkpoint):
    files = list(checkpoint.glob("*model*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def newest_run(output_dir) -> Path:
    return max(Path(output_dir).glob("v*-*"), key=lambda path: int(path.name[1:].split("-")[0]))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir) -> list[tuple[int, float]]:
    found = [(row["step"], row["loss"]) for row in rows(run_dir / "logging.jsonl") if "loss" in row]
    assert found
    return found


def logged(run_dir, key="loss"):
    """A metric by attempt and step."""
    return {(row["attempt"], row["step"]): row[key] for row in rows(run_dir / "logging.jsonl") if key in row}
