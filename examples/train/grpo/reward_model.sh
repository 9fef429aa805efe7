#!/usr/bin/env bash
# A reward model beside a reward function. A reward model is a sequence-classification model with one label; it reads
# the finished conversation through its own chat template, and its score is the reward.
#
# --reward_weights: functions first, then models, in the order given. Scores of a reward model have a scale of their
# own: look at rewards/<name>/mean and /std of the first steps before choosing weights. GRPO divides by the group's
# spread, so only the proportions between the rewards matter.
# Several models: --reward_model A B; LoRA adapters on them: --reward_adapters.
# The reward model shares the trainer's GPU: 1.2 GB more for 0.6B parameters in bfloat16.
# --beta keeps the policy near the model it started from; without it, it will find what the reward model overrates.
set -euo pipefail
cd "$(dirname "$0")/../../.."

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-en#2000' \
    --reward_model Skywork/Skywork-Reward-V2-Qwen3-0.6B \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs short_answer \
    --reward_weights 0.5 0.1 \
    --train_type lora \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 512 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 1 \
    --learning_rate 1e-4 \
    --beta 0.1 \
    --save_steps 100 \
    --output_dir output/grpo-reward-model \
    "$@"
