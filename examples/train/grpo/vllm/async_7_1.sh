#!/usr/bin/env bash
# Eight GPUs: seven train, one samples the next batch meanwhile (dedicated, asynchronous).
#
# Eight devices, NPROC_PER_NODE=7 and num_infer_workers 1 select dedicated mode; vLLM takes the last device. With
# async_generate the batch of step t+1 is sampled while step t trains, with weights one step old; every token knows
# which weights sampled it, and off_policy/mean and off_policy/max in the log say how old they were.
# If time/generate in the log is near 0, generation hides behind training; if not, give it more devices:
# NPROC_PER_NODE=6 and the flags --num_infer_workers 2 --num_generations 6.
#
# Batch: 1 per device x 7 processes x 2 micro-batches = 14 completions = 2 prompts x 7 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-7}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --split_dataset_ratio 0.01 \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_mode dedicated \
    --num_infer_workers 1 \
    --vllm_device auto \
    --vllm_gpu_memory_utilization 0.7 \
    --vllm_max_model_len 8192 \
    --async_generate true \
    --train_type full \
    --deepspeed zero2 \
    --torch_dtype bfloat16 \
    --num_generations 7 \
    --temperature 1.0 \
    --max_length 4096 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --num_train_epochs 1 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --beta 0.04 \
    --eval_steps 200 \
    --save_steps 200 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/grpo-async \
    "$@"
