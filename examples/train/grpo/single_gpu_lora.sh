#!/usr/bin/env bash
# GRPO with LoRA on one GPU: mathematics with a rule-based reward. The place to start with a real model; the trainer's
# model samples, so there is nothing to install. vllm/single_gpu.sh samples with vLLM, several times as fast.
#
#   bash examples/train/grpo/single_gpu_lora.sh                   in the repository's root
#   bash examples/train/grpo/single_gpu_lora.sh --dry_run true    checks everything, prints the plan, loads no weights
#
# Memory: weights in bfloat16 (2 bytes per parameter, so 15 GB for 7B; take Qwen2.5-1.5B-Instruct on a smaller card),
# plus activations, which --mini_batch_size bounds without changing the result.
#
# Batch: 4 completions per micro-batch x 4 micro-batches = 16 completions = 2 prompts x 8 completions per step.
# With little time, give more prompts per step (--gradient_accumulation_steps) before anything else.
#
# Data: rows need a question (`problem` here) and a `solution`; every other column goes to the reward functions.
# The model is told by --system to write <think>...</think><answer>...</answer>, which `format` checks and `accuracy`
# reads. Ids are looked up on ModelScope; --use_hf true takes Hugging Face.
set -euo pipefail
cd "$(dirname "$0")/../../.."

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#1000' \
    --split_dataset_ratio 0.02 \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --train_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 0.9 \
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
    --logging_steps 5 \
    --log_completions true \
    --report_to tensorboard \
    --output_dir output/grpo-lora \
    "$@"
