#!/usr/bin/env bash
# Eight GPUs of one machine with DDP: every process holds the whole model, generates for its share of the prompts with
# the transformers engine, and gradients are averaged.
#
# Batch: 4 per device x 8 processes x 2 micro-batches = 64 completions = 8 prompts x 8 completions per step.
# Prompts are split over the processes, never repeated; eight processes give the run that one would, up to rounding.
#
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT as for torchrun, and start this on each:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash examples/train/grpo/multi_gpu_ddp.sh
#
# SIGTERM saves a checkpoint and ends with exit code 75; the same command with --resume_from_checkpoint last goes on.
set -euo pipefail
cd "$(dirname "$0")/../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --split_dataset_ratio 0.01 \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --train_type lora \
    --lora_rank 16 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --num_train_epochs 1 \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --beta 0.04 \
    --eval_steps 200 \
    --save_steps 200 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/grpo-ddp \
    "$@"
