#!/usr/bin/env bash
# DAPO (arXiv:2503.14476) in full; `--preset dapo` sets the first four of these lines.
#
# What each line of DAPO is:
#   --loss_type dapo                           the loss is averaged over all tokens of the step, not per completion
#   --epsilon 0.2 --epsilon_high 0.28          clip higher: unlikely tokens may grow
#   --dynamic_sample true                      groups whose rewards are all equal teach nothing and are replaced while
#                                              the others still decode; dynamic_sample/launched says how many it took
#   --overlong_filter true, soft_overlong      cut completions are left out of the loss; long ones pay a growing price,
#                                              from 4096 - 819 tokens on
#   --beta 0                                   no KL to a reference model
set -euo pipefail
cd "$(dirname "$0")/../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-1.5B \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --reward_funcs accuracy soft_overlong \
    --max_completion_length 4096 \
    --soft_cache_length 819 \
    --loss_type dapo \
    --epsilon 0.2 \
    --epsilon_high 0.28 \
    --dynamic_sample true \
    --max_resample_times 3 \
    --overlong_filter true \
    --beta 0 \
    --train_type full \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --top_p 1.0 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 1 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --save_steps 200 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/dapo \
    "$@"
