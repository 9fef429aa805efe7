#!/usr/bin/env bash
# Eight GPUs, each with a trainer process and a vLLM engine that take turns (colocate), all weights trained with ZeRO-2.
#
# Eight devices, NPROC_PER_NODE=8 and num_infer_workers 8 select colocate; --vllm_mode colocate says it outright.
# Every engine samples an eighth of the prompts. For a model that does not fit on one device besides the trainer, spread
# an engine over two: --vllm_tensor_parallel_size 2 makes four engines of two devices each.
#
# Batch: 1 per device x 8 processes x 2 micro-batches = 16 completions = 2 prompts x 8 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --split_dataset_ratio 0.01 \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --num_infer_workers 8 \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 8192 \
    --sleep_level 1 \
    --offload_model true \
    --offload_optimizer true \
    --gc_collect_after_offload true \
    --train_type full \
    --deepspeed zero2 \
    --torch_dtype bfloat16 \
    --num_generations 8 \
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
    --output_dir output/grpo-colocate \
    "$@"
