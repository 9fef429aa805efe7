#!/usr/bin/env bash
# A function of your own makes the completions: plugin/rollout.py samples them in two turns and tells a reward how many.
#
# The model (0.6M parameters) is random and knows nothing, so the reward is one that it can earn by chance: an early end.
# Runs on a CPU in half a minute; with --use_vllm true vLLM is the function's tool.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/rollout-func
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size tiny
python examples/demo/problems.py "$work/data" --train_rows 200

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/data/train.jsonl" \
    --external_plugins examples/train/grpo/plugin/rollout.py \
    --rollout_func two_turns \
    --reward_funcs one_turn \
    --train_type full \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 64 \
    --max_completion_length 32 \
    --per_device_train_batch_size 32 \
    --learning_rate 3e-4 \
    --beta 0 \
    --max_steps 20 \
    --logging_steps 5 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
