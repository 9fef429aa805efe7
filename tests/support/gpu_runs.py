"""Whole `swift` runs on the simulated GPU, and how often they may wait there."""

import base64
import json
from pathlib import Path

import pytest
from cli_runs import LIMIT_S, environment
from preloaded import Program
from vlms import image

WORKER = Path(__file__).with_name("run_on_simulated_gpu.py")
STEPS = 2
"""Counted ones, of three."""
COLLECT, SPLIT = "metrics.py StepMetrics.collect", "micro_batch.py split_by_sample"
LOG, DECODE = "atomic_trainer.py AtomicTrainer.train", "batch.py BatchRun.step"
TOKENS = 4
"""Of a completion."""
BUDGET = {COLLECT: STEPS, LOG: STEPS, DECODE: STEPS * TOKENS, SPLIT: STEPS}
"""How often the host may wait: once a step for its metrics, once where Trainer logs its loss, once a decoded token, and
once a rollout batch for the log-probs of the reference, which are computed while rewards are."""
NOTED = ("waits", "copies", "attention")
PLUGIN = """
from swift.rewards import ORM, orms

class Places(ORM):
    def __call__(self, completions, **kwargs):
        return [float(sum(map(ord, text)) % 5) for text in completions]

orms["places"] = Places
"""
GRPO = (
    "rlhf --rlhf_type grpo --external_plugins {plugin} --reward_funcs places --num_generations 4 "
    f"--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_completion_length {TOKENS} "
    "--max_tokens_per_micro_batch 60 --parity_check off"
)
CHECKED = GRPO.replace("--parity_check off", "--parity_check start")
TWO = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
LONG = pytest.mark.long
EBFT = (
    "--num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_completion_length 16 "
    "--parity_check off"
)


class GpuRuns:
    """Runs commands on the simulated GPU, three steps each, in one output directory."""

    def __init__(self, folder, models):
        self.folder, self.models = folder, models
        with (folder / "rows.jsonl").open("w") as file:
            for number in range(24):
                said = f"{number} is said"
                messages = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": said}]
                row = {"messages": messages, "rejected_response": "no", "ground_truth": said}
                file.write(json.dumps(row) + "\n")

    def __call__(self, command, *, plugin=PLUGIN, model=None, dataset=None, steps=1 + STEPS):
        """The exit code, what was written to stderr, and what the ledger has of the counted steps."""
        (self.folder / "plugin.py").write_text(plugin)
        command = (
            f"{command} --model {model or self.models['qwen2']} "
            f"--dataset {dataset or self.folder / 'rows.jsonl'} "
            f"--output_dir {self.folder / 'out'} --add_version false --report_to none --max_steps {steps}"
        )
        words = command.format(plugin=self.folder / "plugin.py").split()
        ledger, errors = self.folder / "ledger.json", self.folder / "stderr.txt"
        program = Program(
            [WORKER, ledger, *words],
            output=self.folder / "stdout.txt",
            errors=errors,
            env=environment(),
            cwd=self.folder,
        )
        code = program.wait(LIMIT_S)
        found = json.loads(ledger.read_text()) if ledger.exists() else {}
        return code, errors.read_text(), found


def image_rows(folder):
    """A file of prompts with an image, each with two answers."""
    rows = folder / "images.jsonl"
    with rows.open("w") as file:
        for number in range(24):
            shown = [f"data:;base64,{base64.b64encode(image(number)).decode()}"]
            asked = {"role": "user", "content": f"<image>say {number}"}
            messages = [asked, {"role": "assistant", "content": f"{number} is said"}]
            file.write(json.dumps({"messages": messages, "rejected_response": "no", "images": shown}) + "\n")
    return rows


@pytest.fixture
def on_gpu(nano_folders, tmp_path):
    return GpuRuns(tmp_path, nano_folders)


def beyond(found, budget):
    """What a run did more often than it may."""
    counted = {}
    for what, line, count in found["waits"]:
        file, _, function = line.rpartition("/")[2].partition(" ")
        place = f"{file.partition(':')[0]} {function}"
        counted[place] = [*counted.get(place, []), (count, what, line)]
    waits = {place: all_ for place, all_ in counted.items() if sum(count for count, *_ in all_) > budget.get(place, 0)}
    return {name: rows for name, rows in {**found, "waits": waits}.items() if name in NOTED and rows}
