#!/usr/bin/env bash
# A tiny model learns to use a calculator: asking it, and saying what it answered, is the only way to be right.
#
# The share of right answers rises from about 0.25 to 0.89 (docs/environments.md). The model that imitates a
# careless teacher is made first, once. Runs on a CPU; with --use_vllm true vLLM samples.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"      # a tiny model is no faster on more
here=examples/train/grpo/environments
student=$(bash "$here/student.sh" calculator)
swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$student/model" \
    --dataset "$student/data/train.jsonl" \
    --external_plugins "$here/calculator.py" \
    --rollout_tools calculate \
    --max_turns 3 \
    --reward_funcs accuracy \
    --train_type full \
    --gradient_checkpointing false \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 128 \
    --max_completion_length 96 \
    --per_device_train_batch_size 64 \
    --max_steps 80 \
    --learning_rate 2e-4 \
    --beta 0 \
    --logging_steps 10 \
    --report_to none \
    --add_version false \
    --output_dir "${OUT:-output/calculator}" \
    "$@"
