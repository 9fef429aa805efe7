#!/usr/bin/env bash
# GRPO on a base in 4 bits. The in-process engine samples with the quantised policy; the reference is that base alone.
# Needs bitsandbytes. More flags can be given: bash examples/train/grpo/qlora.sh --dry_run true
set -euo pipefail
cd "$(dirname "$0")/../../.."

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#2000' \
    --reward_funcs accuracy format \
    --tuner_type lora \
    --lora_rank 16 \
    --quant_method bnb \
    --quant_bits 4 \
    --num_generations 8 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 2 \
    --max_completion_length 512 \
    --learning_rate 1e-4 \
    --beta 0.02 \
    --save_steps 100 \
    --output_dir output/grpo-qlora \
    "$@"
