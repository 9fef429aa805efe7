#!/usr/bin/env bash
# GRPO of a tiny hybrid model on a CPU, without a network: linear attention in three of four layers, as in Qwen3.5.
#
# The plan says "completions continue from the states that their prompts leave": each of the four prompts of a step is
# computed once for its eight completions, forward and backward. The model is random and knows nothing, so the reward is
# one that it can earn by chance: short completions.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/hybrid
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen3_5_text --size nano
python examples/demo/problems.py "$work/data" --train_rows 200

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/data/train.jsonl" \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs short_answer \
    --tuner_type full \
    --num_generations 8 \
    --max_completion_length 32 \
    --per_device_train_batch_size 32 \
    --learning_rate 1e-3 \
    --beta 0 \
    --max_steps 20 \
    --logging_steps 5 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
