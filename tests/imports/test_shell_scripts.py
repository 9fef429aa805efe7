"""Scripts as people write them: what the shell would make of them is what arrives."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from image_rows import data_url

from swift.arguments.imports.command import import_file, problems_of
from swift.cli.main import main
from swift.errors import ConfigError

SCRIPTS = {
    "variables, continued lines, redirection": (
        """#!/bin/bash
        set -euo pipefail  # it's a comment
        cd "$(dirname "$0")/.."
        MODEL=${MODEL:-nano}
        export CUDA_VISIBLE_DEVICES=0 lower=1
        nohup swift sft \\
            --model "$MODEL" --dataset 'rows.jsonl#10' rows.jsonl --lora_rank 4 \\
            --max_steps 2 --output_dir out "$@" > train.log 2>&1 &
        """,
        "sft",
        {"model": "nano", "dataset": ["rows.jsonl#10", "rows.jsonl"], "max_steps": 2, "output_dir": "out",
         "ENV": {"CUDA_VISIBLE_DEVICES": "0"}},
        set(),
    ),
    "arrays, words in a variable, a pipe": (
        """ARGS=(
          --rlhf_type dpo   # the method
          --model nano
          --dataset "pairs.jsonl"
        )
        ARGS+=(--max_steps 3)
        EXTRA="--learning_rate 1e-5 --warmup_ratio 0.1"
        mkdir -p out && swift rlhf "${ARGS[@]}" $EXTRA | tee log.txt
        """,
        "dpo",
        {"dataset": ["pairs.jsonl"], "max_steps": 3, "learning_rate": 1e-5, "warmup_ratio": 0.1},
        set(),
    ),
    "torchrun": (
        """n=2
        torchrun --nproc_per_node=$n --nnodes 1 --rdzv_backend c10d swift/cli/rlhf.py --rlhf_type grpo --model nano \\
          --dataset rows.jsonl --reward_funcs accuracy format --num_generations 4 --per_device_train_batch_size 4
        """,
        "rlhf",
        {"reward_funcs": ["accuracy", "format"], "ENV": {"NPROC_PER_NODE": "2", "NNODES": "1"}},
        {"rdzv_backend"},
    ),
    "variables of a platform": (
        """NNODES=$WORLD_SIZE NODE_RANK=${RANK} MASTER_ADDR=$(hostname) \\
          torchrun --nproc_per_node=8 --nnodes=$WORLD_SIZE swift/cli/rlhf.py --rlhf_type dpo \\
          --model nano --dataset pairs.jsonl
        """,
        "dpo",
        {"dataset": ["pairs.jsonl"], "ENV": {"NPROC_PER_NODE": "8"}},
        {"NNODES", "NODE_RANK", "MASTER_ADDR"},
    ),
    "a loop, a secret, two commands": (
        """if [ ! -d out ]; then mkdir out; fi
        for lr in 1e-4 1e-5; do
          WANDB_API_KEY=hunter2 MAX_PIXELS=1003520 swift pt --model nano-VL --dataset text.jsonl --learning_rate $lr \\
            --max_length $(expr 1024 / 2) --bf16 true; done
        swift infer --model x
        """,
        "pt",
        {"dataset": ["text.jsonl"], "torch_dtype": "bfloat16", "max_length": 512, "max_pixels": 1003520},
        {"learning_rate", "WANDB_API_KEY", "swift infer"},
    ),
    "a text of several lines, arithmetic": (
        """n=2
        PROMPT="Think first, don't guess.
        Then 'answer'."
        NPROC_PER_NODE=$n swift sft --model nano --dataset rows.jsonl --system "$PROMPT" \\
          --gradient_accumulation_steps $(expr 16 / $n) --max_length $((60 * n + 1)) --lora_rank `expr 2 \\* 2` \\
          --seed $(date +%s)
        """,
        "sft",
        {"system": "Think first, don't guess.\n        Then 'answer'.", "gradient_accumulation_steps": 8,
         "max_length": 121, "lora_rank": 4, "ENV": {"NPROC_PER_NODE": "2"}},
        {"seed"},
    ),
    "images": (
        """MAX_PIXELS=1003520 \\
        swift rlhf --rlhf_type dpo --model nano-VL --dataset pictures.jsonl --freeze_vit true --freeze_aligner false \\
          --aligner_lr 1e-5 --vit_gradient_checkpointing false
        """,
        "dpo",
        {"model": "nano-VL", "max_pixels": 1003520, "freeze_vit": True, "aligner_lr": 1e-5,
         "vit_gradient_checkpointing": False},
        set(),
    ),
    "quoted operators": (
        """swift sft --model=nano --dataset=rows.jsonl --system 'a | b; c && d > e' --run_name "" \\
          --columns '{"solution": "note"}'
        """,
        "sft",
        {"system": "a | b; c && d > e", "run_name": None, "columns": {"solution": "note"}},
        set(),
    ),
    "trl": (
        "uv run trl sft --model_name_or_path nano --dataset_name rows.jsonl --packing --max_length 64 && echo done",
        "sft",
        {"model": "nano", "packing": True, "max_length": 64, "tuner_type": "full", "weight_decay": 0.0},
        set(),
    ),
    "a script of trl": (
        """accelerate launch --config_file zero3.yaml --num_processes 2 trl/scripts/reward.py \\
            --model_name_or_path nano --dataset_name pairs.jsonl --use_peft --lora_r 8 --config more.yaml \\
            --no_remove_unused_columns
        """,
        "rm",
        {"model": "nano", "tuner_type": "lora", "lora_rank": 8, "ENV": {"NPROC_PER_NODE": "2"}},
        {"config_file", "config"},
    ),
    "accelerate's file": (
        """accelerate launch --config_file zero3.json --machine_rank 1 swift/cli/sft.py \
            --model nano --dataset rows.jsonl
        """,
        "sft",
        {"deepspeed": "zero3_offload",
         "ENV": {"NPROC_PER_NODE": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}},
        set(),
    ),
    "accelerate's file of FSDP": (
        """accelerate launch --config_file fsdp.yaml --num_processes 3 swift/cli/sft.py --model nano \\
            --dataset rows.jsonl
        """,
        "sft",
        {"fsdp": "shard_grad_op", "fsdp_offload_params": True, "ENV": {"NPROC_PER_NODE": "3"}},
        set(),
    ),
    "accelerate's file beside the project's own sharding": (
        """accelerate launch --config_file fsdp.yaml swift/cli/sft.py --model nano \\
            --dataset rows.jsonl --fsdp full_shard
        """,
        "sft",
        {"fsdp": "full_shard", "fsdp_offload_params": None, "ENV": {"NPROC_PER_NODE": "2"}},
        set(),
    ),
}  # fmt: skip
ZERO3 = {
    "distributed_type": "DEEPSPEED", "num_machines": 2, "num_processes": 8, "main_process_ip": "host",
    "main_process_port": 1234, "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"},
}  # fmt: skip
FSDP = {
    "distributed_type": "FSDP", "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True},
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_the_shell_would_say(name, place):
    text, mode, settings, lost = SCRIPTS[name]
    (place / "theirs.sh").write_text(text)
    if "zero3.json" in text or "fsdp.yaml" in text:
        (place / "zero3.json").write_text(json.dumps(ZERO3))
        (place / "fsdp.yaml").write_text(yaml.dump(FSDP))
    imported = import_file("theirs.sh")
    (place / "ours.yaml").write_text(imported.to_yaml("theirs.sh", "ours.yaml"))
    ours = yaml.safe_load((place / "ours.yaml").read_text())
    assert imported.draft.mode == mode
    assert {key: ours.get(key) for key in settings} == settings
    assert {key for key, fate, _ in imported.draft.lines if fate == "no counterpart"} == lost
    assert problems_of(imported.command, "ours.yaml") == []
    assert "hunter2" not in str(ours)


NODE = "NNODES=2 NODE_RANK={} MASTER_ADDR={} swift sft --model nano --dataset {}\n"


def test_of_the_commands_of_several_nodes_the_first_is_taken(place):
    (place / "theirs.sh").write_text(NODE.format(0, "127.0.0.1", "rows.jsonl") + NODE.format(1, "m", "rows.jsonl"))
    imported = import_file("theirs.sh")
    ours = yaml.safe_load(imported.to_yaml("theirs.sh", "ours.yaml"))
    assert ours["ENV"] == {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    (note,) = [why for key, fate, why in imported.draft.lines if key == "NODE_RANK" and fate == "no counterpart"]
    assert "1: of other nodes, which start the same command" in note


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (NODE.format(0, "m", "rows.jsonl") + NODE.format(1, "m", "pairs.jsonl"), "swift sft, swift sft: a script"),
        (NODE.format(0, "m", "rows.jsonl") * 2, "swift sft, swift sft: a script"),
        ("swift sft \\\n  --model m \\\n  # a comment\n  --dataset d\n", "--dataset: no command precedes it"),
        ("axolotl train config.yml\n", "axolotl train config.yml: its settings are in a file; give that file"),
        ("python train.py --model m\n", "none: a script is imported if one command of it trains"),
        ("trl ppo --model_name_or_path m\n", "none: a script is imported if one command of it trains"),
        ("echo swift sft --model m\n", "none"),
    ],
)
def test_a_script_that_would_be_read_wrong_is_refused(text, problem, place):
    (place / "theirs.sh").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        import_file("theirs.sh")


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_written_passes_a_dry_run(name, place, nano_folders, vlm_folders, monkeypatch):
    text, _, _, lost = SCRIPTS[name]
    (place / "nano").symlink_to(nano_folders["qwen2"])
    (place / "nano-VL").symlink_to(vlm_folders("qwen3_vl"))
    (place / "theirs.sh").write_text(text)
    rows = {
        "rows": {
            "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
            "solution": "2",
        },
        "pairs": {"prompt": "1", "chosen": "2", "rejected": "3"},
        "pictures": {"prompt": "<image>1", "images": [data_url(0)], "chosen": "2", "rejected": "3"},
        "text": {"text": "1 2 3 " * 20},
    }
    for kind, row in rows.items():
        (place / f"{kind}.jsonl").write_text((json.dumps(row) + "\n") * 32)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the block ENV stays here
    imported = import_file("theirs.sh")
    (place / "ours.yaml").write_text(imported.to_yaml("theirs.sh", "ours.yaml"))
    more = ["--learning_rate", "1e-4"] if "learning_rate" in lost else []
    assert main([imported.command, "ours.yaml", "--dry_run", "true", *more]) == 0
