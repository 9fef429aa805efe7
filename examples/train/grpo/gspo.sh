#!/usr/bin/env bash
# GSPO (arXiv:2507.18071) on eight GPUs: one importance ratio per completion instead of one per token.
#
# `--preset gspo` sets loss, level and clip range as in the paper; the plan at the start prints each value with its
# source. The ratio acts only where a generation batch feeds several optimizer steps: the paper makes four of each,
# hence steps_per_generation = 4 x gradient_accumulation_steps. Look at clip_ratio/region_mean: the paper clips far
# more tokens than PPO does, a tenth and above.
#
# Batch: 4 per device x 8 processes x 2 micro-batches = 64 completions = 8 prompts x 8 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --preset gspo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --steps_per_generation 8 \
    --gradient_accumulation_steps 2 \
    --train_type full \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 4 \
    --num_train_epochs 1 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --save_steps 200 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/gspo \
    "$@"
