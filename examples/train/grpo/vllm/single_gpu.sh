#!/usr/bin/env bash
# One GPU, vLLM and the trainer share it (colocate): they take turns, and each gives its memory to the other.
#
#   sleep_level 1        vLLM's weights go to the host and its KV cache is dropped while the trainer trains
#   offload_optimizer    the optimizer's state goes to the host while vLLM samples
#
# When vLLM starts, its share (vllm_gpu_memory_utilization) must be free beside the trainer's weights: 15 GB here. Full
# tuning can add --offload_model true: the weights leave during sampling too, and each weight sync gets slower
# (docs/memory.md).
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
    --vllm_gpu_memory_utilization 0.5 \
    --sleep_level 1 \
    --offload_optimizer true \
    --gc_collect_after_offload true \
    --train_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
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
    --output_dir output/grpo-vllm \
    "$@"
