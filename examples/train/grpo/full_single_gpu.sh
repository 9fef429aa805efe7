#!/usr/bin/env bash
# GRPO of all weights of a small model on one GPU.
#
# Memory: 16-bit weights are updated through float32 masters, so that updates of 1e-6 are not rounded away. A parameter
# costs 2 bytes for the weight, 2 for its gradient, and 12 for master and the two moments of Adam: 25 GB for 1.5B.
# float32 takes 16 bytes, too, and computes more slowly. With --beta 0 there is no reference model; any other value
# keeps a frozen copy of the weights beside the policy.
#
# Full tuning takes a learning rate ten or more times lower than LoRA: 1e-6 is the usual value.
set -euo pipefail
cd "$(dirname "$0")/../../.."

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --train_type full \
    --torch_dtype bfloat16 \
    --gradient_checkpointing true \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 1024 \
    --per_device_train_batch_size 8 \
    --mini_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --num_train_epochs 1 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --beta 0 \
    --save_steps 100 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/grpo-full \
    "$@"
