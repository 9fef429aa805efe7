#!/usr/bin/env bash
# Two processes on a CPU, without a network: what changes (nothing) when a run is spread over processes.
#
# Each process takes half of the prompts and half of the completions; gradients are averaged with gloo. The batch of a
# step is 16 per device x 2 processes = 32 completions = 4 prompts x 8 completions, and equals that of one process with
# --per_device_train_batch_size 32. On GPUs the same line runs with one process per GPU and NCCL.
#
# The model is random and knows nothing, so the reward is one that it can earn by chance: short completions.
# `make demo` shows a model that learns to calculate.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/two-processes
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size nano
python examples/demo/problems.py "$work/data" --train_rows 200

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}    # one thread per process: two processes share the cores

NPROC_PER_NODE=2 swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/data/train.jsonl" \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs short_answer \
    --train_type full \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 32 \
    --per_device_train_batch_size 16 \
    --learning_rate 1e-3 \
    --beta 0 \
    --max_steps 20 \
    --logging_steps 5 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
