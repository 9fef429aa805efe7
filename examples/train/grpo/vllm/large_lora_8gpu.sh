#!/usr/bin/env bash
# A model of 32B parameters on eight GPUs of 80 GB: LoRA, weights sharded by FSDP, two vLLM engines of four devices each.
#
# Per GPU: 8 GB of the trainer's weights (64 GB / 8, read from the files shard by shard), 16 GB of an engine's (64 GB / 4)
# beside its cache while it samples; engine and trainer take turns.
#
# Batch: 1 per device x 8 processes x 4 micro-batches = 32 completions = 4 prompts x 8 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-32B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --split_dataset_ratio 0.01 \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --num_infer_workers 8 \
    --vllm_tensor_parallel_size 4 \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 8192 \
    --sleep_level 1 \
    --fsdp full_shard \
    --gradient_checkpointing true \
    --lora_rank 16 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 4096 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 1 \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --beta 0.0 \
    --eval_steps 200 \
    --save_steps 200 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/grpo-large \
    "$@"
