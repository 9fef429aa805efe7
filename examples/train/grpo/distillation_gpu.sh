#!/usr/bin/env bash
# On-policy distillation on one GPU: a 7B teacher, a student of 1.5B with LoRA, and rewards that are only measured.
#
# The teacher scores each completion of the student once. It takes its weights in bfloat16 beside the student (15 GB)
# and keeps no activations for a backward pass. --deepspeed zero3 and --fsdp full_shard shard it as they shard the
# student; --offload_model true moves both to the host while vLLM samples.
#
# --reward_weights 0 logs the reward `accuracy` without learning from it; a weight above 0 learns from both, and needs
# several completions per prompt. Teacher and student have the same tokenizer.
set -euo pipefail
cd "$(dirname "$0")/../../.."

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --teacher_model Qwen/Qwen2.5-7B-Instruct \
    --teacher_kl_coef 1.0 \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --reward_funcs accuracy \
    --reward_weights 0 \
    --tuner_type lora \
    --lora_rank 32 \
    --torch_dtype bfloat16 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.3 \
    --sleep_level 1 \
    --num_generations 1 \
    --max_length 2048 \
    --max_completion_length 1024 \
    --per_device_train_batch_size 32 \
    --mini_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-4 \
    --beta 0 \
    --max_steps 100 \
    --save_steps 50 \
    --logging_steps 1 \
    --output_dir output/distillation \
    "$@"
