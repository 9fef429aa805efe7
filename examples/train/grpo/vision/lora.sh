#!/usr/bin/env bash
# GRPO with LoRA on one GPU, of a model that sees: rows have images (docs/vision.md). The tower and the layers behind it stay
# as they are; --freeze_vit false --freeze_aligner false adapts them, too. Prompts, images included, are computed once for
# their eight completions. --max_pixels bounds the tokens of an image: Qwen2.5-VL has one per 28 x 28 pixels.
#
#   bash examples/train/grpo/vision/lora.sh --dry_run true    checks everything, prints the plan, loads no weights
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-VL-3B-Instruct \
    --dataset 'hf::lmms-lab/multimodal-open-r1-8k-verified#1000' \
    --columns '{"problem": "query"}' \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --tuner_type lora \
    --lora_rank 16 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --max_pixels 401408 \
    --num_generations 8 \
    --max_length 2048 \
    --truncation_strategy delete \
    --max_completion_length 1024 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-4 \
    --beta 0.02 \
    --save_steps 100 \
    --logging_steps 5 \
    --output_dir output/grpo-vision \
    "$@"
