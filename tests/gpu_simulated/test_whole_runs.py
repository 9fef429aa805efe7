"""Whole runs on the simulated GPU: no operand is on another device, and the host waits as seldom as it is said here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("run_there.py")
STEPS = 2
"""Counted ones, of three."""
COLLECT, SPLIT = "metrics.py StepMetrics.collect", "micro_batch.py split_by_sample"
LOG, DECODE = "atomic_trainer.py AtomicTrainer.train", "batch.py BatchRun.step"
BUDGET = {COLLECT: STEPS, LOG: STEPS, DECODE: STEPS * 8, SPLIT: STEPS}
"""How often the host may wait: once a step for its metrics, once where Trainer logs its loss, once a decoded token, and
once a rollout batch for log-probs of the trainer, which are compared with the sampler's."""
PLUGIN = """
from swift.rewards import ORM, orms

class Places(ORM):
    def __call__(self, completions, **kwargs):
        return [float(sum(map(ord, text)) % 5) for text in completions]

orms["places"] = Places
"""
GRPO = (
    "rlhf --rlhf_type grpo --model {model} --dataset {rows} --external_plugins {plugin} --reward_funcs places "
    "--num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_completion_length 8 "
    "--max_tokens_per_micro_batch 60"
)
FULL = f"{GRPO} --tuner_type full --torch_dtype float32"
PLANT = """
import torch
import swift.trainers.grpo.step as step

usual = step.policy_loss

def planted(logprobs, **settings):
    {}
    return usual(logprobs, **settings)

step.policy_loss = planted
"""


@pytest.fixture
def there(nano_folders, tmp_path):
    """Runs a command on the simulated GPU; gives the exit code, the errors and what the ledger has."""
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for number in range(24):
            messages = [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number} is said"},
            ]
            row = {"messages": messages, "rejected_response": "no", "ground_truth": f"{number} is said"}
            file.write(json.dumps(row) + "\n")

    def run(command, *more, plugin=PLUGIN, arch="qwen2", steps=1 + STEPS):
        (tmp_path / "plugin.py").write_text(plugin)
        places = {"model": nano_folders[arch], "rows": rows, "plugin": tmp_path / "plugin.py"}
        flags = [
            "--output_dir",
            tmp_path / "out",
            "--max_steps",
            steps,
            "--report_to",
            "none",
            "--add_version",
            "false",
        ]
        words = [*command.format(**places).split(), *map(str, flags), *more]
        ledger = tmp_path / "ledger.json"
        done = subprocess.run(
            [sys.executable, WORKER, ledger, *words], capture_output=True, text=True, timeout=300, check=False
        )
        found = json.loads(ledger.read_text()) if ledger.exists() else {}
        return done.returncode, done.stderr, found

    return run


def beyond(found, budget):
    """What a run did more often than it may."""
    counted = {}
    for what, line, count in found["waits"]:
        file, _, function = line.rpartition("/")[2].partition(" ")
        place = f"{file.partition(':')[0]} {function}"
        counted[place] = [*counted.get(place, []), (count, what, line)]
    waits = {place: all_ for place, all_ in counted.items() if sum(count for count, *_ in all_) > budget.get(place, 0)}
    return {name: rows for name, rows in {**found, "waits": waits}.items() if name in CHECKED and rows}


CHECKED = ("waits", "copies", "attention")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param("--tuner_type full --torch_dtype float32", {}, id="full"),
        pytest.param(
            "--tuner_type full --torch_dtype bfloat16 --beta 0.04 --num_iterations 2",
            {SPLIT: 2 * STEPS},  # log-probs of the reference, and of the first iteration
            id="bf16-reference-iterations",
        ),
        pytest.param("--tuner_type lora", {}, id="lora"),
        pytest.param("--tuner_type lora --use_dora true --gradient_checkpointing true", {}, id="dora-recomputed"),
        pytest.param(
            "--tuner_type full --off_policy_sequence_mask_delta 0.2 --rollout_importance_sampling_mode token_truncate",
            {SPLIT: 2 * STEPS},  # the old log-probs
            id="corrections",
        ),
        pytest.param("--tuner_type full --loss_type dapo --dynamic_sample true", {}, id="dapo-dynamic"),
        pytest.param("--tuner_type full --offload_model true --offload_optimizer true", {}, id="offload"),
    ],
)
def test_grpo_waits_once_a_step(there, flags, more):
    code, err, found = there(f"{GRPO} {flags}")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, {**BUDGET, **more}) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("logprobs.detach()[torch.arange(2)]", "copies"),  # a CPU index
        ("logprobs.mean().item()", "waits"),
        ("torch.zeros(3).to(logprobs.device)", "copies"),  # pageable
        (
            "q, k = logprobs.new_ones(1, 4, 3, 2), logprobs.new_ones(1, 2, 3, 2); m = q[0, 0] @ k[0, 0].T > 0; "
            "torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=m, enable_gqa=True)",
            "attention",
        ),
    ],
)
def test_a_planted_fault_is_caught(there, fault, caught):
    code, err, found = there(FULL, plugin=PLUGIN + PLANT.format(fault))
    assert code == 0, err[-3000:]
    assert list(beyond(found, BUDGET)) == [caught]


@pytest.mark.long
def test_a_planted_mix_of_devices_ends_the_run(there):
    code, err, _ = there(FULL, plugin=PLUGIN + PLANT.format("logprobs + torch.ones(len(logprobs))"))
    assert code == 1
    assert "found at least two devices, cuda:0 and cpu" in err
