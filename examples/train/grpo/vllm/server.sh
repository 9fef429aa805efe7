#!/usr/bin/env bash
# The trainer on this machine, generation on others: start
# `bash examples/rollout/server.sh --vllm_enable_lora true` there first (with --vllm_max_lora_rank R above rank 16).
#
#   SERVERS="10.0.0.1 10.0.0.2" SWIFT_API_KEY=... bash examples/train/grpo/vllm/server.sh
#
# Several servers share the prompts. A server that is restarted is found again, gets the present weights and its
# requests once more; nothing is lost or trained twice. Only the adapter travels (--vllm_enable_lora true on both sides).
# --async_generate true samples ahead while this machine trains.
#
# Batch: 4 completions per micro-batch x 4 micro-batches = 16 completions = 2 prompts x 8 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#1000' \
    --split_dataset_ratio 0.02 \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_mode server \
    --vllm_server_host ${SERVERS:-127.0.0.1} \
    --vllm_server_port "${PORT:-8000}" \
    --vllm_server_timeout 300 \
    --train_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --vllm_enable_lora true \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 2048 \
    --max_completion_length 1024 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 1 \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --beta 0.04 \
    --eval_steps 100 \
    --save_steps 100 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/grpo-server \
    "$@"
