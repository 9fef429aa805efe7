"""How often `swift doctor` names the right cause: runs made sick on purpose, and healthy ones.

    python benchmarks/sick_runs.py --out output/sick_runs            # makes what is missing, then prints the score
    python benchmarks/sick_runs.py --only template_wrong             # runs of one cause, or words of their names
    python benchmarks/sick_runs.py --blind                           # runs that the rules were not written for
    python benchmarks/sick_runs.py --keep tests/observability/sick   # and shortens one log per cause for the tests

`sick_cases.py` has the runs. A tiny model is tuned first, once. A run takes some seconds on a core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sick_cases import BLIND, CASES, HEALTHY, Case

from swift.models.tiny import build_tiny
from swift.observability.diagnosis import diagnose
from swift.observability.doctor import newest_attempts
from swift.observability.evidence import Evidence, gather
from swift.observability.jsonl import read_jsonl

COMMON = {
    "rlhf_type": "grpo", "reward_funcs": "accuracy", "tuner_type": "full", "num_generations": "8",
    "per_device_train_batch_size": "32", "max_completion_length": "24", "learning_rate": "1e-4", "beta": "0",
    "max_steps": "40", "logging_steps": "1", "report_to": "none", "add_version": "false", "save_strategy": "no",
    "reward_workers": "1", "gradient_checkpointing": "false", "temperature": "1.0", "record_rollouts": "every:8",
    "lr_scheduler_type": "constant", "log_entropy": "true",
}  # fmt: skip
SFT = (
    "--tuner_type full --gradient_checkpointing false --per_device_train_batch_size 64 --learning_rate 2e-3 "
    "--warmup_ratio 0.05 --report_to none --save_only_model true --add_version false --num_train_epochs 1"
)
SFT_ROWS = 64 * 160
Problem = tuple[str, int]


def problem(rng: random.Random, most: int) -> Problem:
    """A sum or a difference of numbers below `most`."""
    a, b = rng.randrange(most), rng.randrange(most)
    return (f"{a}+{b}=", a + b) if rng.random() < 0.5 else (f"{max(a, b)}-{min(a, b)}=", abs(a - b))


def copied(value: int) -> Problem:
    """The easiest problem."""
    return f"{value}=", value


def rows(most: int, num: int, solution: Callable[[int, random.Random], str] = lambda value, _: str(value)) -> list[Any]:
    """Rows of a dataset with different problems, as far as there are so many."""
    rng = random.Random(most)
    found = dict(problem(rng, most) for _ in range(20 * num))
    return [{"query": query, "solution": solution(value, rng)} for query, value in list(found.items())[:num]]


WORDS = {
    "0": "zero", "1": "un", "2": "deux", "3": "trois", "4": "quatre", "5": "cinq", "6": "six", "7": "sept", "8": "huit",
    "9": "neuf", "+": "plus", "-": "moins", "=": "font",
}  # fmt: skip
"""French, which the model has not seen."""
DATA: dict[str, Callable[[], list[Any]]] = {
    "sums": lambda: rows(20, 400),
    "one solution": lambda: rows(20, 400, lambda value, _: "777"),
    "marked": lambda: rows(20, 400, lambda value, _: f"#{value}#"),
    "in a template": lambda: [
        {**row, "query": f"<|im_start|>user\n{row['query']}<|im_end|>\n<|im_start|>assistant\n"}
        for row in DATA["sums"]()
    ],
    "units": lambda: rows(20, 400, lambda value, _: f"{value} apples"),
    "some empty": lambda: rows(20, 400, lambda value, rng: str(value) if rng.random() < 0.7 else "none"),
    "decimals": lambda: rows(20, 400, lambda value, _: f"{value}.0"),
    "boxed": lambda: rows(20, 400, lambda value, _: f"\\boxed{{{value}}}"),
    "some null": lambda: [
        {**row, "solution": row["solution"] if number % 3 else None} for number, row in enumerate(DATA["sums"]())
    ],
    "no solution": lambda: rows(20, 400, lambda value, _: ""),
    "the question as solution": lambda: [{**row, "solution": row["query"]} for row in DATA["sums"]()],
    "no task": lambda: [{**row, "query": "Solve the problem."} for row in DATA["sums"]()],
    "long": lambda: [
        {**row, "query": f"{row['query']} Take your time, and think before you answer."} for row in DATA["sums"]()
    ],
    "with an end": lambda: [{**row, "query": f"{row['query']}<|im_end|>"} for row in DATA["sums"]()],
    "in words": lambda: [{**row, "query": " ".join(WORDS[char] for char in row["query"])} for row in DATA["sums"]()],
    "easy": lambda: [{"query": f"{value}=", "solution": str(value)} for value in range(300)],
    "mixed": lambda: DATA["easy"]()[:100] + rows(20, 300),
    "hard": lambda: [
        {"query": f"{a}*{a + 7}*{a + 9}=", "solution": str(a * (a + 7) * (a + 9))} for a in range(100, 500)
    ],
    "two prompts": lambda: rows(20, 2) * 4,
    "three rows many times": lambda: rows(20, 3) * 60,
}


def sft_rows() -> list[Any]:
    """Chats of a teacher who is right about sums in half of the cases, and always says a number that he is told."""
    rng, found = random.Random(0), []
    for _ in range(SFT_ROWS):
        told = rng.random() < 0.35
        query, value = copied(rng.randrange(400)) if told else problem(rng, 20)
        said = value if told or rng.random() < 0.5 else value + rng.choice((-2, -1, 1, 2))
        answer = f"<think>{query[:-1]}</think><answer>{said}</answer>"
        found.append({"messages": [{"role": "user", "content": query}, {"role": "assistant", "content": answer}]})
    return found


def swift(*words: str, cwd: Path, processes: int = 1) -> int:
    """Runs a command; its output goes to out.txt."""
    env = os.environ | ({"NPROC_PER_NODE": str(processes)} if processes > 1 else {})
    with (cwd / "out.txt").open("w") as out:
        command = [sys.executable, "-m", "swift", *words]
        return subprocess.run(command, cwd=cwd, env=env, stdout=out, stderr=out, check=False, timeout=900).returncode


def write_rows(path: Path, found: list[Any]) -> Path:
    """A jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path.absolute()


def tuned(work: Path) -> Path:
    """The model that the runs begin with, made once."""
    model = work / "tuned"
    if not model.exists():
        build_tiny(work / "untuned", size="tiny")
        data = write_rows(work / "sft.jsonl", sft_rows())
        words = f"--model {work / 'untuned'} --dataset {data} --output_dir {work / 'sft'} {SFT}"
        assert swift("sft", *words.split(), cwd=work) == 0, (work / "out.txt").read_text()[-2000:]
        shutil.copytree(max((work / "sft").glob("checkpoint-*")), model)
    return model


def change(model: Path, file: str, edit: Callable[[Any], Any]) -> None:
    """Edits a JSON file of a model, if it is there."""
    path = model / file
    if path.exists():
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def change_template(model: Path, edit: Callable[[str], str]) -> None:
    """Edits the chat template, wherever it is."""
    path = model / "chat_template.jinja"
    if path.exists():
        path.write_text(edit(path.read_text()))
    change(model, "tokenizer_config.json", lambda c: {k: edit(v) if k == "chat_template" else v for k, v in c.items()})


def no_end(model: Path) -> None:
    """Template and configuration have another end of turn than the model."""
    change_template(model, lambda text: text.replace("<|im_end|>", "<|endoftext|>"))
    for file in ("config.json", "generation_config.json"):
        change(model, file, lambda content: {**content, "eos_token_id": content["pad_token_id"]})
    change(model, "tokenizer_config.json", lambda content: {**content, "eos_token": "<|endoftext|>"})


MODELS: dict[str, Callable[[Path], None]] = {
    "tuned": lambda model: None,
    "no end": no_end,
    "no generation prompt": lambda model: change_template(
        model, lambda text: text.replace("add_generation_prompt", "false")
    ),
    "double bos": lambda model: change_template(model, lambda text: "<|endoftext|><|endoftext|>" + text),
    "open roles": lambda model: change_template(model, lambda text: text.replace("<|im_end|>", "")),
    "texts left out": lambda model: change_template(
        model, lambda text: re.sub(r"\w+(?:\.content|\[.content.\])", "''", text)
    ),
    "another role": lambda model: change_template(model, lambda text: text.replace("assistant", "user")),
    "opened twice": lambda model: change_template(
        model, lambda text: text.replace("<|im_start|>assistant\\n", 2 * "<|im_start|>assistant\\n")
    ),
}


def model_of(name: str, work: Path) -> Path:
    """The model of a case, made unless it is there."""
    source, model = tuned(work), work / name.replace(" ", "_")
    if not model.exists():
        shutil.copytree(source, model)
        MODELS[name](model)
    return model


def made(case: Case, work: Path) -> Path:
    """The folder of a case's run, which is made unless it is there."""
    folder = work / case.name
    if (folder / "out.txt").exists():
        return folder
    folder.mkdir(exist_ok=True)
    model = model_of(case.model, work)
    data = write_rows(folder / "data.jsonl", DATA[case.data]())
    given = case.flags.format(untuned=work / "untuned").split("--")[1:]
    flags = {**COMMON, **{name: value for name, _, value in (one.strip().partition(" ") for one in given)}}
    flags |= {"model": str(model), "dataset": str(data), "output_dir": "."}
    if case.plugin:
        (folder / "plugin_of_case.py").write_text(case.plugin)
        flags["external_plugins"] = "plugin_of_case.py"
    words = [word for name, value in flags.items() for word in (f"--{name}", *value.split())]
    code = swift("rlhf", *words, cwd=folder, processes=case.processes)
    print(f"{case.name}: exit code {code}", flush=True)
    return folder


def evidence_of(folder: Path) -> Evidence:
    """The evidence in a run's folder."""
    files = (folder / "logging.jsonl", folder / "completions.jsonl")
    log, completions = (newest_attempts(list(read_jsonl(file)) if file.exists() else []) for file in files)
    return gather(folder, log, completions)


def score(work: Path, cases: list[Case]) -> None:
    """Prints what the doctor says of each run, and how often it is right."""
    right: Counter[str] = Counter()
    for case in cases:
        if not (work / case.name / "attempts.jsonl").exists():
            print(f"{case.name:28} {case.how:9} refused at its start, see out.txt: not counted")
            continue
        findings = diagnose(evidence_of(work / case.name))
        said = findings[0].cause if findings else HEALTHY
        kind = "healthy" if case.cause == HEALTHY else "sick"
        right[kind] += said == case.cause
        right[f"all {kind}"] += 1
        listed = ", ".join(f"{one.cause} {one.confidence:.2f}" for one in findings)
        print(f"{case.name:28} {case.how:9} {'' if said == case.cause else 'WRONG'} {listed or HEALTHY}")
    print(f"right cause first: {right['sick']} of {right['all sick']} sick runs")
    print(f"called sick: {right['all healthy'] - right['healthy']} of {right['all healthy']} healthy runs")


def shortened(e: Evidence, *, steps: int = 6, texts: int = 4) -> bytes:
    """A run's evidence in a few KB: numbers with four digits, completions of a few steps, a prompt of the record."""
    chosen = sorted({row["step"] for row in e.completions})
    kept = set(chosen[:: max(1, len(chosen) // steps)])
    groups = [group[:texts] for group in e.groups if group[0]["step"] in kept]
    prompts = e.record[:: len(e.record) // 4 + 1]
    content = {
        "log": e.log, "evals": e.evals, "about": {"prompt": e.about.get("prompt", "")},
        "completions": [{name: row.get(name) for name in KEPT} for group in groups for row in group],
        "record": [{"prompt_ids": [int(one) for one in row["prompt_ids"]], "versions": []} for row in prompts],
        "args": {name: e.args.get(name) for name in ARGS}, "reasons": list(e.reasons), "adapter": list(e.adapter),
    }  # fmt: skip
    return gzip.compress(json.dumps(rounded(content), separators=(",", ":")).encode(), mtime=0)


KEPT = (
    "step", "group_id", "prompt_id", "prompt", "completion", "completion_tokens", "finish_reason", "rewards", "reward",
    "excluded", "columns",
)  # fmt: skip
ARGS = ("tuner_type", "beta", "temperature", "max_completion_length", "reward_weights", "torch_dtype", "warmup_ratio")


def rounded(value: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def one_of_each_first(cases: list[Case]) -> list[Case]:
    """The cases so that every cause has a run soon, and as many healthy ones."""
    seen: Counter[str] = Counter()
    turns = []
    for case in cases:
        turns.append(seen[case.cause] // (8 if case.cause == HEALTHY else 1))
        seen[case.cause] += 1
    return [case for _, case in sorted(zip(turns, cases, strict=True), key=lambda pair: pair[0])]


def main() -> None:
    """Make the runs and print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="output/sick_runs")
    parser.add_argument("--only", default="")
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--score_only", action="store_true")
    args = parser.parse_args()
    work = Path(args.out).absolute()
    work.mkdir(parents=True, exist_ok=True)
    cases = [case for case in (BLIND if args.blind else CASES) if args.only in case.name]
    if not args.score_only:
        for name in {case.model for case in cases}:
            model_of(name, work)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda case: made(case, work), one_of_each_first(cases)))
    score(work, cases)
    if args.keep:
        for case in cases:
            if (work / case.name / "logging.jsonl").exists():
                (Path(args.keep) / f"{case.name}.json.gz").write_bytes(shortened(evidence_of(work / case.name)))


if __name__ == "__main__":
    main()
