#!/usr/bin/env bash
# GRPO with LoRA on one GPU, of a hybrid model: most layers of LFM2 are short convolutions. Prompts are computed once for
# their eight completions, which continue from the states that a prompt leaves; the line "attention:" of the plan says so.
# Other hybrids: tiiuae/Falcon-H1-1.5B-Instruct, ibm-granite/granite-4.0-h-micro. For linear attention (Qwen3.5, Qwen3-Next)
# install flash-linear-attention first, for state spaces (Nemotron-H, Falcon-H1) mamba-ssm and causal-conv1d: transformers'
# own code is correct, but many times slower on a GPU.
#
#   bash examples/train/grpo/hybrid.sh --dry_run true    checks everything, prints the plan, loads no weights
set -euo pipefail
cd "$(dirname "$0")/../../.."

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model LiquidAI/LFM2-1.2B \
    --dataset 'AI-MO/NuminaMath-TIR#1000' \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --tuner_type lora \
    --lora_rank 16 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --max_length 1024 \
    --max_completion_length 1024 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-4 \
    --beta 0.02 \
    --save_steps 100 \
    --logging_steps 5 \
    --output_dir output/grpo-hybrid \
    "$@"
