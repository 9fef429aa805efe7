#!/usr/bin/env bash
# A tiny model learns to guess a letter in three turns, from "earlier" and "later".
#
# The share of games won rises from about 0.4 to over 0.8 (docs/environments.md). The model that imitates a forgetful
# player is made first, once. Runs on a CPU; with --use_vllm true vLLM samples.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"      # a tiny model is no faster on more
here=examples/train/grpo/environments
student=$(bash "$here/student.sh" guess)
swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$student/model" \
    --dataset "$student/data/train.jsonl" \
    --external_plugins "$here/guess.py" \
    --gym_env guess \
    --max_turns 3 \
    --reward_funcs environment \
    --train_type full \
    --gradient_checkpointing false \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 128 \
    --max_completion_length 4 \
    --per_device_train_batch_size 128 \
    --max_steps 120 \
    --learning_rate 5e-4 \
    --beta 0 \
    --logging_steps 10 \
    --report_to none \
    --add_version false \
    --output_dir "${OUT:-output/guess}" \
    "$@"
